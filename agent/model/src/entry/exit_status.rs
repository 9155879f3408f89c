//! How a process ended.

use serde::{Deserialize, Serialize};

/// How a process ended, as reported by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl ExitStatus {
    /// Parses the status from `wait`: the signal in the low seven bits, or the code in the next byte.
    pub fn of_wait(number: i32) -> ExitStatus {
        match number & 0x7f {
            0 => ExitStatus::Code((number >> 8) & 0xff),
            signal => ExitStatus::Signal(signal),
        }
    }

    /// Exit code 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Code(0)
    }

    /// The status as a shell reports it: a signal is 128 + its number.
    pub fn as_shell_code(self) -> i32 {
        match self {
            ExitStatus::Code(code) => code,
            ExitStatus::Signal(signal) => 128 + signal,
        }
    }
}

impl std::fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ExitStatus::Code(code) => write!(f, "exit code {code}"),
            ExitStatus::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "{name}"),
                None => write!(f, "signal {signal}"),
            },
        }
    }
}

/// The name of a Linux signal that can end a process.
pub fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}
