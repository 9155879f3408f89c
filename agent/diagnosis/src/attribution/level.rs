//! The severity of a line: by the level that its logger wrote, or by the form of a Python warning.
//!
//! A program survives what it only warns of. A line below the level of an error is no cause by itself.

use super::healthy;
use super::lines;

/// Bytes at the start of a line in which a logger's level is searched.
const HEAD_BYTES: usize = 160;

/// The level of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// A note: debug, information, or a message which states that nothing is wrong.
    Note,
    /// A warning.
    Warning,
    /// An error or worse.
    Error,
    /// The line has no level.
    Unsaid,
}

/// Phrases of lines which state that the program goes on.
const GOES_ON: [&str; 19] = [
    "training goes on",
    "going on without",
    "continuing without",
    "is handled by",
    "there were missing keys",
    "may result in unexpected",
    "exception ignored in",
    "this is expected",
    "falling back to",
    "is deprecated",
    "will be deprecated",
    "has been deprecated",
    "can be safely ignored",
    "you can ignore",
    "can safely ignore",
    "retrying in",
    "will retry",
    "trying again in",
    "using default value",
];

/// Alarms that the kernel logs at too low a level: hung tasks, stalled CPUs.
const KERNEL_ALARMS: [&str; 2] = ["INFO: task", "INFO: rcu"];

/// The level of a cleaned line that may have prefixes of launchers.
pub fn level(line: &str) -> Level {
    if KERNEL_ALARMS.iter().any(|alarm| line.contains(alarm)) {
        return Level::Error;
    }
    // Checked before the logger's level: programs log as errors what they survive.
    if goes_on(line) {
        return Level::Note;
    }
    if let Some(level) = of_logger(head(line)) {
        return level;
    }
    if is_python_warning(line) {
        return Level::Warning;
    }
    Level::Unsaid
}

/// Whether the line states that the program goes on.
fn goes_on(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    GOES_ON.iter().any(|phrase| lower.contains(phrase))
}

/// Whether the line is a note or a warning.
pub fn is_mild(line: &str) -> bool {
    matches!(level(line), Level::Note | Level::Warning)
}

/// What a line contains that reports a problem. Learned words and hints apply only to such lines: they were learned from failures and
/// would match other lines as well.
pub(super) const COMPLAINTS: [&str; 57] = [
    "error",
    "fail",
    "fatal",
    "exception",
    "cannot",
    "can't",
    "can not",
    "could not",
    "couldn't",
    "unable",
    "invalid",
    "denied",
    "refused",
    "missing",
    "not found",
    "no such",
    "abort",
    "crash",
    "killed",
    "kill",
    "timed out",
    "timeout",
    "lost",
    "unreachable",
    "mismatch",
    "unsupported",
    "not supported",
    "illegal",
    "corrupt",
    "exceed",
    "insufficient",
    "assert",
    "broken",
    "panic",
    "segmentation fault",
    "page fault",
    "hardware fault",
    "bad ",
    "wrong",
    "unexpected",
    "not available",
    "unavailable",
    "rejected",
    "conflict",
    "not responding",
    "gave up",
    "out of",
    "died",
    "terminated",
    "cancelled",
    "preempt",
    "evict",
    "stuck",
    "undefined",
    "degraded",
    "unhealthy",
    "dead",
];

/// The level that a logger of the program wrote. Launchers and threads of native libraries also log, even while the program has already
/// failed: they show nothing about it.
pub fn of_program(line: &str) -> Option<Level> {
    const OF_OTHERS: [&str; 9] = [
        ".cpp:",
        ".cc:",
        ".hpp:",
        ".h:",
        ".cu:",
        "NCCL ",
        "distributed/run.py",
        "distributed.run:",
        "elastic",
    ];
    let head = head(line);
    of_logger(head).filter(|_| !OF_OTHERS.iter().any(|other| head.contains(other)))
}

/// Whether the line announces that the program caught the exception of the traceback below it: a logger of the program wrote it as a
/// warning or an error. A note ("INFO step 100") only happens to precede the traceback.
pub fn reports_a_caught_exception(line: &str) -> bool {
    matches!(of_program(line), Some(Level::Warning | Level::Error))
}

/// Whether the line reports a problem, and not only as a warning.
pub fn complains(line: &str) -> bool {
    // What the launcher prints about the job is no line of the program.
    if line.starts_with("mainstay: ") {
        return false;
    }
    let level = level(line);
    if matches!(level, Level::Note | Level::Warning) || healthy::reports_no_fault(line) {
        return false;
    }
    let lower = line.to_ascii_lowercase();
    let counts_none =
        ["0 error", "no error", "0 fail", "no fail"].iter().any(|phrase| lower.contains(phrase));
    level == Level::Error || !counts_none && COMPLAINTS.iter().any(|word| lower.contains(word))
}

/// Whether the line starts a Python warning, `train.py:3: UserWarning: text`, or is the call in the quoted source.
pub fn is_python_warning(line: &str) -> bool {
    line.contains("warnings.warn(")
        || line.match_indices("Warning:").any(|(at, _)| names_a_category(line, at))
}

/// Whether the word that ends at `at` is a warning category: at the start of the message, or after a source location.
fn names_a_category(line: &str, at: usize) -> bool {
    let name = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '.');
    let before = line[..at].trim_end_matches(name);
    before.trim().is_empty() || before.ends_with(": ") || lines::prefix(line).len >= before.len()
}

/// The first part of a line, cut at a character boundary.
fn head(line: &str) -> &str {
    let mut end = line.len().min(HEAD_BYTES);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    &line[..end]
}

/// The level that a logger wrote at the start of the line.
fn of_logger(head: &str) -> Option<Level> {
    of_letter(head).or_else(|| of_word(head))
}

/// The level letter of glog and c10: `W1124 06:42:31.1 12 file.cc:3]`, `[W1124 06:42:31.1 file.cpp:3]`, `[W socket.cpp:3]`.
fn of_letter(head: &str) -> Option<Level> {
    let bytes = head.as_bytes();
    for (at, letter) in head.char_indices() {
        let level = match letter {
            'I' => Level::Note,
            'W' => Level::Warning,
            'E' | 'F' => Level::Error,
            _ => continue,
        };
        let starts = at == 0 || matches!(bytes[at - 1], b'[' | b' ' | b':');
        let rest = bytes.get(at + 1..).unwrap_or_default();
        // `06:42:31.123 W `: after a time of day.
        let after_time =
            at >= 2 && bytes[at - 1] == b' ' && bytes[at - 2].is_ascii_digit() && rest.first() == Some(&b' ');
        let after_time = after_time && lines::time_of_day(&head[..at]).is_some();
        if after_time {
            return Some(level);
        }
        let stamped = rest.len() > 5 && rest[..4].iter().all(u8::is_ascii_digit) && rest[4] == b' ';
        if starts && (stamped || at > 0 && bytes[at - 1] == b'[' && is_place(rest)) {
            return Some(level);
        }
    }
    None
}

/// ` socket.cpp:663]`: a C++ source location up to the bracket.
fn is_place(rest: &[u8]) -> bool {
    let Some(body) = rest.strip_prefix(b" ") else { return false };
    let Some(end) = body.iter().position(|byte| *byte == b']') else { return false };
    let location = &body[..end];
    let known: [&[u8]; 4] = [b".cpp:", b".cc:", b".hpp:", b".h:"];
    known.iter().any(|suffix| location.windows(suffix.len()).any(|window| window == *suffix))
}

/// `WARNING:root:`, `[WARNING]`, ` - INFO - `, `level=warning`, `NCCL WARN`.
fn of_word(head: &str) -> Option<Level> {
    let mut from = 0;
    while from < head.len() {
        let rest = &head[from..];
        let begin = rest.find(|letter: char| letter.is_ascii_alphabetic())?;
        let at = from + begin;
        let word = &head[at..];
        let end =
            word.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(word.len());
        let word = &word[..end];
        if let Some(level) = of_name(head, at, word) {
            return Some(level);
        }
        // An exception's name ends the prefix: its message follows.
        if word.ends_with("Error") || word.ends_with("Exception") {
            return None;
        }
        from = at + end;
    }
    None
}

fn of_name(head: &str, at: usize, word: &str) -> Option<Level> {
    let before = &head[..at];
    let after = head[at + word.len()..].chars().next();
    let keyed =
        before.ends_with("level=") || before.ends_with("level\": \"") || before.ends_with("level\":\"");
    let stands_alone = before.ends_with(['[', '|', ':', '-', ' ', '(', '\t', '<']) || before.is_empty();
    let ends = matches!(after, None | Some(']' | '|' | ':' | '-' | ' ' | ')' | '\t' | '>' | ','));
    if !(keyed || stands_alone && ends) {
        return None;
    }
    let upper = word.bytes().all(|byte| byte.is_ascii_uppercase());
    let bracketed = before.ends_with('[') && after == Some(']');
    if !upper && !bracketed && !keyed {
        return None;
    }
    match word.to_ascii_uppercase().as_str() {
        // NCCL has a single level for problems.
        "WARN" if before.ends_with("NCCL ") => Some(Level::Error),
        "DEBUG" | "INFO" | "NOTICE" | "TRACE" => Some(Level::Note),
        "WARNING" | "WARN" => Some(Level::Warning),
        "ERROR" | "CRITICAL" | "FATAL" | "ERR" | "CRIT" | "EMERG" | "ALERT" | "PANIC" => Some(Level::Error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loggers_write_their_level_in_many_ways() {
        for line in [
            "[rank0]:[W1124 06:42:31.612 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed",
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [host]:29500 (errno: 97)",
            "W1124 06:42:31.123456 4711 torch/distributed/run.py:792] OMP_NUM_THREADS is 1",
            "WARNING:root:no such file, using the default",
            "[WARNING] connection lost",
            "2026-11-24 10:00:00,123 - train - WARNING - CUDA is not available",
            "2026-11-24 10:00:00,123 WARNING [trainer.py:33] out of memory is near",
            "time=\"2026-11-24\" level=warning msg=\"no space left\"",
            "[rank1]: /home/a/train.py:12: FutureWarning: `torch.cuda.amp.GradScaler(args...)` is old.",
            "UserWarning: this may fail",
            "1124 06:42:31.123 W 0 reader.py:43] reading a shard failed",
            "  warnings.warn(",
        ] {
            assert_eq!(level(line), Level::Warning, "{line}");
        }
        for line in [
            "node-1:812:900 [0] NCCL INFO NET/IB : No device found.",
            "[INFO] 12 workers",
            "DEBUG:urllib3:retry",
            "[2026-11-24 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10",
            "Cannot use the fused kernel, falling back to the slow one",
            "some keys are missing. This IS expected if you load another task's checkpoint",
        ] {
            assert_eq!(level(line), Level::Note, "{line}");
        }
    }

    #[test]
    fn errors_are_not_mild() {
        for line in [
            "node-1:812:900 [0] NCCL WARN Error: failed to extend /dev/shm",
            "[rank0]:[E1124 06:42:31.612 ProcessGroupNCCL.cpp:552] Exception: CUDA error",
            "ERROR:root:connection lost",
            "2026-11-24 10:00:00 CRITICAL out of memory",
            "INFO: task python:812 blocked for more than 120 seconds.",
        ] {
            assert_eq!(level(line), Level::Error, "{line}");
        }
        for line in [
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ValueError: unknown level WARNING",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "srun: error: Unable to create step",
            "",
        ] {
            assert_eq!(level(line), Level::Unsaid, "{line}");
        }
    }
}
