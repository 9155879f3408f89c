//! The syntax of option values.

use std::path::PathBuf;

use mainstay_hang::Limits;
use mainstay_model::time::Span;
use mainstay_recovery::policy::{Budget, CauseKind};

use mainstay_launcher::group::plan::Preflight;
use mainstay_launcher::hang::Mode;

/// A span such as `30s`, `2m`, `1h 30m`, or a bare number of seconds.
pub(super) fn duration(text: &str) -> Result<Span, String> {
    if let Ok(seconds) = text.parse::<f64>()
        && seconds.is_finite()
        && seconds >= 0.0
    {
        return Ok(Span((seconds * 1e9) as u64));
    }
    let parsed: jiff::SignedDuration =
        text.parse().map_err(|_| format!("{text:?} is not a duration: write 30s, 2m or 1h"))?;
    u64::try_from(parsed.as_nanos()).map(Span).map_err(|_| format!("{text:?}: a duration cannot be negative"))
}

/// A number of seconds above zero.
pub(super) fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| format!("{text:?} is not a number of seconds above 0"))
}

/// A directory to watch, and the kind of trainer whose format is expected.
pub(super) fn checkpoint_watch(text: &str) -> Result<(String, PathBuf), String> {
    let (kind, directory) = match text.split_once(':') {
        Some((kind, directory)) if !kind.contains('/') => (kind, directory),
        _ => ("auto", text),
    };
    mainstay_checkpoint::files::Kind::parse(kind)?;
    let directory = std::path::absolute(directory).map_err(|error| error.to_string())?;
    Ok((kind.to_owned(), directory))
}

/// Bytes of memory for checkpoints; none for no memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CheckpointMemory(pub(super) Option<u64>);

pub(super) fn checkpoint_memory(text: &str) -> Result<CheckpointMemory, String> {
    if text == "off" {
        Ok(CheckpointMemory(None))
    } else {
        bytes(text).map(|bytes| CheckpointMemory(Some(bytes)))
    }
}

/// A number of bytes such as `64G`: K, M, G and T are powers of 1024.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a number of bytes: write 500M, 64G or 2T");
    let digits = text.trim_end_matches(['B', 'i', 'b']);
    let (number, unit) = match digits.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&digits[..at], unit.to_ascii_uppercase()),
        _ => (digits, ' '),
    };
    let shift = match unit {
        ' ' => 0,
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.trim().parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

/// How long to wait for a host; none to not check it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ReadyWithin(pub(super) Option<Span>);

pub(super) fn ready_within(text: &str) -> Result<ReadyWithin, String> {
    if text == "off" { Ok(ReadyWithin(None)) } else { duration(text).map(|span| ReadyWithin(Some(span))) }
}

/// `hang=2`, `signal=10/1h`.
pub(super) fn cause_budget(text: &str) -> Result<(CauseKind, Budget), String> {
    let (cause, budget) =
        text.split_once('=').ok_or_else(|| format!("{text:?}: write CAUSE=N or CAUSE=N/WINDOW"))?;
    let kind = CauseKind::parse(cause).ok_or_else(|| {
        let known: Vec<&str> = CauseKind::ALL.iter().map(|kind| kind.as_str()).collect();
        format!("{cause:?} is not a cause; write one of {}", known.join(", "))
    })?;
    let (max, window) = match budget.split_once('/') {
        Some((max, window)) => (max, Some(duration(window)?)),
        None => (budget, None),
    };
    let max_restarts = max.parse().map_err(|_| format!("{max:?} is not a number of restarts"))?;
    Ok((kind, Budget { max_restarts, window }))
}

pub(super) fn save_signal(text: &str) -> Result<i32, String> {
    match text.strip_prefix("SIG").unwrap_or(text) {
        "USR1" => Ok(nix::libc::SIGUSR1),
        "USR2" => Ok(nix::libc::SIGUSR2),
        _ => Err(format!("{text:?}: write SIGUSR1 or SIGUSR2")),
    }
}

pub(super) fn hang_mode(text: &str) -> Result<Mode, String> {
    match text {
        "auto" => Ok(Mode::Auto),
        "report" => Ok(Mode::Report),
        "off" => Ok(Mode::Off),
        _ => Err(format!("{text:?} is none of auto, report, off")),
    }
}

pub(super) fn preflight(text: &str) -> Result<Preflight, String> {
    match text {
        "report" => Ok(Preflight::Report),
        "require" => Ok(Preflight::Require),
        _ => Err(format!("{text:?} is none of report, require")),
    }
}

/// `checkpoint=1h`.
pub(super) fn hang_limit(text: &str) -> Result<(String, Span), String> {
    let (phase, span) = text.split_once('=').ok_or_else(|| format!("{text:?}: write PHASE=DURATION"))?;
    match duration(span)? {
        Span(0) => Err(format!("{text:?}: a limit must be above 0")),
        span => Ok((phase.trim().to_owned(), span)),
    }
}

pub(super) fn limits(given: &[(String, Span)]) -> Limits {
    let mut limits = Limits::default();
    for (name, span) in given {
        let place = match name.as_str() {
            "unlearned" => &mut limits.unlearned,
            "long" => &mut limits.long,
            "confirm" => &mut limits.confirm,
            "passing" => &mut limits.passing,
            "spinning" => &mut limits.spinning,
            "working" => &mut limits.working,
            "idle" => &mut limits.idle,
            "cap" => &mut limits.cap,
            phase => limits.given.entry(phase.to_owned()).or_default(),
        };
        *place = *span;
    }
    limits
}
/// Reads the environment variable of a switch. On the command line a switch has no value.
pub(super) fn switch(variable: &'static str) -> impl Fn(&str) -> Result<bool, String> + Clone {
    move |text| match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" | "y" | "t" => Ok(true),
        "" | "0" | "false" | "no" | "off" | "n" | "f" => Ok(false),
        _ => {
            Err(format!("{variable} is 1, true, yes or on to set it, and 0, false, no, off or empty not to"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_read_what_torchrun_reads_and_more() {
        let read = switch("MAINSTAY_X");
        for text in ["1", "true", "True", "YES", "on", "y", "T"] {
            assert_eq!(read(text), Ok(true), "{text}");
        }
        for text in ["0", "false", "False", "no", "OFF", "n", "F", ""] {
            assert_eq!(read(text), Ok(false), "{text}");
        }
        let error = read("2").expect_err("no switch");
        assert!(error.starts_with("MAINSTAY_X is 1, true"), "{error}");
    }
}
