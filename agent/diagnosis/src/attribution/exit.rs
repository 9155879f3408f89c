//! The meaning of exit statuses. A status is weak evidence: all statuses together form one family.

use super::class::{Class, Restart};

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// The end of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The rank, if known.
    pub rank: Option<u32>,
    /// Its status.
    pub status: Status,
    /// Its index in the order of deaths by kernel time, from 0, if known.
    pub order: Option<u32>,
}

/// What a status means.
#[derive(Clone, Debug, PartialEq)]
pub struct Meaning {
    /// In a few words.
    pub text: &'static str,
    /// Classes with their log-odds, heaviest first. Empty if the rank was merely stopped.
    pub classes: &'static [(Class, f64)],
    /// The advice, for codes with an agreed meaning.
    pub restart: Option<Restart>,
}

const HUP: i32 = 1;
const ILL: i32 = 4;
const ABRT: i32 = 6;
const BUS: i32 = 7;
const FPE: i32 = 8;
const KILL: i32 = 9;
const SEGV: i32 = 11;
const TERM: i32 = 15;

/// Names of signals as they appear in logs.
const NAMES: [(&str, i32); 10] = [
    ("SIGHUP", HUP),
    ("SIGINT", 2),
    ("SIGQUIT", 3),
    ("SIGILL", ILL),
    ("SIGABRT", ABRT),
    ("SIGBUS", BUS),
    ("SIGFPE", FPE),
    ("SIGKILL", KILL),
    ("SIGSEGV", SEGV),
    ("SIGTERM", TERM),
];

impl Status {
    /// Normalizes a signal: a shell's 128 + n and Python's -n are signal n.
    pub(super) fn normal(self) -> Status {
        match self {
            Status::Code(code @ 129..=159) => Status::Signal(code - 128),
            Status::Code(code @ -31..=-1) => Status::Signal(-code),
            other => other,
        }
    }

    /// What the status means. `None` for success and for codes without a meaning.
    pub fn meaning(self) -> Option<Meaning> {
        use Class::{HardwareGpu, HostResource, Preemption, SoftwarePlatform, Unknown, UserCode, UserConfig};
        let (text, classes, restart): (_, &'static [(Class, f64)], _) = match self.normal() {
            Status::Signal(SEGV) => {
                ("ended by a segmentation fault", &[(SoftwarePlatform, 1.6), (UserCode, 0.6)], None)
            }
            Status::Signal(BUS) => (
                "ended by a bus error: a mapped file or shared memory had no room",
                &[(HostResource, 2.2), (SoftwarePlatform, 0.3)],
                None,
            ),
            Status::Signal(ILL) => (
                "ended by an illegal instruction: built for another processor",
                &[(SoftwarePlatform, 2.6), (UserCode, 0.2)],
                None,
            ),
            Status::Signal(FPE) => ("ended by an arithmetic fault", &[(UserCode, 1.2)], None),
            Status::Signal(KILL) => (
                "killed by SIGKILL: the OOM killer, the scheduler or a person",
                &[(HostResource, 1.3), (Preemption, 0.4), (Unknown, 0.6)],
                None,
            ),
            Status::Signal(ABRT) => ("aborted itself", &[(Unknown, 0.2)], None),
            Status::Signal(TERM) => ("asked to stop by SIGTERM", &[(Unknown, 0.6), (Preemption, 0.5)], None),
            Status::Signal(HUP) => ("ended by a hang-up of its terminal", &[(UserConfig, 0.8)], None),
            Status::Code(0) => {
                ("exited with status 0: the errors in the log were no failure", &[(Unknown, 2.5)], None)
            }
            Status::Code(126 | 127) => {
                ("the command was not found or may not be executed", &[(UserConfig, 2.4)], None)
            }
            Status::Code(2) => ("exit code 2, usual for a wrong command line", &[(UserConfig, 0.8)], None),
            Status::Code(16) => (
                "exit code 16: Megatron asks for a rerun on another GPU, to distinguish a transient fault from a permanent one",
                &[(HardwareGpu, 0.8)],
                // On the same GPU the rerun repeats the result, without end (Megatron-LM #5281).
                Some(Restart::RestartExcludeNode),
            ),
            Status::Code(17) => (
                "exit code 17: Megatron's validation of a result failed again",
                &[(HardwareGpu, 1.6)],
                Some(Restart::RestartExcludeNode),
            ),
            Status::Code(42) => (
                "exit code 42: the job asks to be started again (GKE's xpk)",
                &[],
                Some(Restart::RestartSameNodes),
            ),
            Status::Code(93) => {
                ("exit code 93: the job asked not to be restarted", &[], Some(Restart::DoNotRestart))
            }
            Status::Code(247) => ("exit code 247, usual for memory", &[(HostResource, 1.0)], None),
            _ => return None,
        };
        Some(Meaning { text, classes, restart })
    }
}

/// Reads exits from free text: `137`, `SIGBUS`, `exit code 1`, `-11 (SIGSEGV) rank 3`.
pub fn from_text(text: &str) -> Vec<Exit> {
    let mut statuses: Vec<Status> = Vec::new();
    for (name, signal) in NAMES {
        if text.contains(name) {
            statuses.push(Status::Signal(signal));
        }
    }
    if statuses.is_empty() {
        let words: Vec<&str> = text
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
            .filter(|w| !w.is_empty())
            .collect();
        for (at, word) in words.iter().enumerate() {
            let lower = word.to_ascii_lowercase();
            let about_exit = at == 0
                || matches!(
                    words[at - 1].to_ascii_lowercase().as_str(),
                    "exit"
                        | "code"
                        | "exitcode"
                        | "status"
                        | "signal"
                        | "returncode"
                        | "rc"
                        | "exited"
                        | "with"
                );
            if let Ok(code) = lower.parse::<i32>()
                && about_exit
                && code != 0
            {
                let signal = at > 0 && words[at - 1].eq_ignore_ascii_case("signal");
                statuses.push(if signal { Status::Signal(code) } else { Status::Code(code) });
            }
        }
    }
    if statuses.is_empty() && matches!(text.trim(), "0" | "0:0" | "exit 0" | "exit code 0" | "COMPLETED 0:0")
    {
        statuses.push(Status::Code(0));
    }
    statuses.dedup();
    statuses.into_iter().map(|status| Exit { rank: None, status, order: None }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Status> {
        from_text(text).into_iter().map(|exit| exit.status.normal()).collect()
    }

    #[test]
    fn exits_are_read_from_words() {
        assert_eq!(read("137"), [Status::Signal(9)]);
        assert_eq!(read("-11 (SIGSEGV)"), [Status::Signal(11)]);
        assert_eq!(read("task 1 exit 1"), [Status::Code(1)]);
        assert_eq!(read("exitcode 139 on rank 3"), [Status::Signal(11)]);
        assert_eq!(read("exit 0"), [Status::Code(0)]);
        assert_eq!(read("0:0"), [Status::Code(0)]);
        assert_eq!(read("3 ranks"), [Status::Code(3)]);
        assert_eq!(read(""), []);
    }

    #[test]
    fn agreed_codes_are_respected() {
        let restart = |code| Status::Code(code).meaning().and_then(|meaning| meaning.restart);
        assert_eq!(restart(93), Some(Restart::DoNotRestart));
        assert_eq!(restart(42), Some(Restart::RestartSameNodes));
        assert_eq!(restart(16), Some(Restart::RestartExcludeNode));
        assert_eq!(restart(1), None);
    }
}
