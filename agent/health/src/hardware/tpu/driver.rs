//! Lines of libtpu's driver logs (`tpu_logs/tpu_driver.*`, in glog format) that explain why a job fails.

/// A driver line that reports a problem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverReport {
    /// The kind of problem.
    pub problem: TpuProblem,
    /// The line without the glog prefix.
    pub message: String,
}

/// Kinds of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TpuProblem {
    /// A core stopped by itself.
    CoreHalted,
    /// A chip is held by a process that still exists, or its lock file was left behind.
    ChipBusy,
    /// libtpu could not start.
    NotStarted,
    /// A host of the slice no longer takes part.
    SessionLost,
    /// The slice gave up (libtpu's term).
    SliceFailed,
    /// libtpu itself detected that slices do not progress.
    Hang,
}

impl TpuProblem {
    /// Its name in the journal.
    pub fn name(self) -> &'static str {
        match self {
            TpuProblem::CoreHalted => "core_halted",
            TpuProblem::ChipBusy => "chip_busy",
            TpuProblem::NotStarted => "not_started",
            TpuProblem::SessionLost => "session_lost",
            TpuProblem::SliceFailed => "slice_failed",
            TpuProblem::Hang => "hang",
        }
    }

    /// Whether it is about this host. The others may be caused by another host.
    pub fn is_of_this_host(self) -> bool {
        matches!(self, TpuProblem::CoreHalted | TpuProblem::ChipBusy | TpuProblem::NotStarted)
    }
}

/// Maximum length of a kept message, in bytes.
const MAX_MESSAGE_BYTES: usize = 300;

/// Parses a line: `E1121 03:04:05.123456    1234 tpu.cc:42] Core halted unexpectedly`. Only warnings and errors count;
/// informational lines name mere possibilities.
pub fn read(line: &str) -> Option<DriverReport> {
    let (head, message) = line.split_once("] ")?;
    let is_glog = head.len() >= 6
        && head.starts_with(['W', 'E', 'F'])
        && head.as_bytes()[1..5].iter().all(u8::is_ascii_digit);
    if !is_glog {
        return None;
    }
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    let problem = if has(&["Core halted unexpectedly", "Accelerator device halted prematurely"]) {
        TpuProblem::CoreHalted
    } else if has(&["Device or resource busy", "already in use by process", "open iommu group"]) {
        TpuProblem::ChipBusy
    } else if has(&["TPU initialization failed"]) {
        TpuProblem::NotStarted
    } else if has(&["TPU session error from worker"]) {
        TpuProblem::SessionLost
    } else if has(&["SLICE_FAILURE_"]) {
        TpuProblem::SliceFailed
    } else if has(&["HANG_DETECTED", "Megascale detects a hang"]) {
        TpuProblem::Hang
    } else {
        return None;
    };
    let mut end = message.len().min(MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    Some(DriverReport { problem, message: message[..end].trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn problem(message: &str) -> Option<TpuProblem> {
        read(&format!("E1121 03:04:05.123456    1234 tpu_driver.cc:42] {message}"))
            .map(|report| report.problem)
    }

    #[test]
    fn what_ends_jobs_is_read() {
        use TpuProblem::{ChipBusy, CoreHalted, Hang, NotStarted, SessionLost, SliceFailed};
        for (line, expected) in [
            ("Core halted unexpectedly: INTERNAL: Accelerator device halted", CoreHalted),
            ("open(/dev/vfio/3): Device or resource busy: Device or resource busy", ChipBusy),
            ("The TPU is already in use by process with pid 4711.", ChipBusy),
            ("TPU initialization failed: open(/dev/accel0): No such file", NotStarted),
            ("Session master detected TPU session error from worker 10.0.0.7:8471", SessionLost),
            ("Detected failure SLICE_FAILURE_CHIP_DRIVER_ERROR in session", SliceFailed),
            ("HANG_DETECTED: graph 7", Hang),
        ] {
            assert_eq!(problem(line), Some(expected), "{line}");
        }
    }

    #[test]
    fn informational_lines_chatter_and_other_files_are_ignored() {
        for line in [
            "I1121 03:04:05.123456    1234 tpu.cc:42] Core halted unexpectedly is what this would say",
            "E1121 03:04:05.123456    1234 tpu.cc:42] Failed to fetch metadata key",
            "W1121 03:04:05.123456    1234 tpu.cc:42] Deprecated flag --foo",
            "Core halted unexpectedly",
            "Exception] HANG_DETECTED",
            "Log file created at: 2026/11/21 03:04:05",
            "",
        ] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in any::<String>()) {
            let long = format!("E1121 03:04:05.1 1 a.cc:1] HANG_DETECTED{text}");
            prop_assert!(read(&long).is_none_or(|report| report.message.len() <= MAX_MESSAGE_BYTES));
            let _ = read(&text);
        }
    }
}
