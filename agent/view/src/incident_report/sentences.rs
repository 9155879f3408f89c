//! The sentences of a report: whose fault, what was done and what to do.

use mainstay_diagnosis::attribution::class::Class;
use mainstay_diagnosis::attribution::explain::{REPORT_IT, class_advice};
use mainstay_diagnosis::diagnose::CLIENT_FAILED;
use mainstay_diagnosis::root_rank::{self, HOST_LOST};
use mainstay_model::entry::ExitStatus;
use mainstay_model::hang::HangKind;
use mainstay_model::time::Span;
use mainstay_model::verdict::{Action, Cause, Decision, FaultDomain, Verdict};

/// Whose fault it was and with what confidence. If that is unknown, what was observed.
pub fn fault(verdict: &Verdict) -> String {
    let sure = percent(verdict.confidence);
    let class = verdict.class.as_deref().and_then(|name| Class::named(name).map(|class| (class, name)));
    if let (Some(what), Some((_, name))) = (not_the_programs(verdict), class) {
        return format!("{} ({name}). {sure} sure.", capital(what));
    }
    if is_of_client(verdict) {
        return format!("Mainstay's own: its client in the rank failed ({CLIENT_FAILED}). {sure} sure.");
    }
    let whose = match verdict.domain {
        FaultDomain::User => "The training program's",
        FaultDomain::Hardware => "The hardware's",
        FaultDomain::Infrastructure => "The infrastructure's",
        FaultDomain::Platform => "The platform's",
        FaultDomain::Unknown => return format!("Unknown. {}", not_seen(verdict)),
    };
    match class {
        Some((class, name)) => format!("{whose}: {} ({name}). {sure} sure.", class.description()),
        None => format!("{whose}. {sure} sure."),
    }
}

/// What failed, if it is the user's but not the program's: a wrong setting, or what the job used up.
fn not_the_programs(verdict: &Verdict) -> Option<&'static str> {
    let class = verdict.class.as_deref().and_then(Class::named);
    let setting = class.filter(|class| *class == Class::UserConfig && verdict.domain == FaultDomain::User);
    ran_out(verdict).or(setting.map(Class::description))
}

/// What the job used up, if that made it fail.
fn ran_out(verdict: &Verdict) -> Option<&'static str> {
    let class = verdict.class.as_deref().and_then(Class::named).filter(|_| verdict.resource_ran_out())?;
    Some(if class == Class::Storage {
        "the storage: as a rule a full disk or quota"
    } else {
        class.description()
    })
}

/// On which rank it started and with what confidence.
pub(super) fn origin(verdict: &Verdict) -> Option<String> {
    let culprit = verdict.culprit?;
    // Journals of earlier versions have a single confidence.
    let sure = verdict
        .culprit_confidence
        .or((verdict.domain == FaultDomain::Unknown).then_some(verdict.confidence))?;
    Some(format!("It started on {culprit} ({} sure).", percent(sure)))
}

/// One line for the terminal and the list of events: what happened, whose fault and with what confidence.
pub fn brief(verdict: &Verdict) -> String {
    let (headline, sure) = (&verdict.headline, percent(verdict.confidence));
    if is_of_client(verdict) {
        return format!("{headline} (the fault of Mainstay's own client, {sure} sure)");
    }
    if verdict.domain != FaultDomain::Unknown {
        let whose = not_the_programs(verdict).map_or_else(|| verdict.domain.to_string(), str::to_owned);
        return format!("{headline} ({whose}, {sure} sure)");
    }
    let who_sent = match verdict.cause {
        _ if verdict.class.as_deref() == Some(HOST_LOST) => "; why is unknown",
        Cause::Signal { signal: 9 } => {
            "; cause not seen: neither Mainstay nor the kernel's OOM killer sent the signal"
        }
        Cause::Signal { signal } if comes_from_outside(signal) => {
            "; cause not seen: Mainstay did not send the signal"
        }
        // Nothing of the program ran that could be at fault; the line contains the error.
        Cause::Hang { .. } | Cause::StartFailed => "",
        _ => "; fault unknown",
    };
    format!("{}{who_sent}", verdict.headline)
}

/// Whether Mainstay's own client failed.
fn is_of_client(verdict: &Verdict) -> bool {
    verdict.class.as_deref() == Some(CLIENT_FAILED)
}

/// Why no one is blamed for a lost host.
const LOST_HOST: &str = "Cause not seen: the host or its launcher was lost. Its power, its network, its kernel log, or who \
                         ended the launcher can show why.";

/// Why no one is blamed.
fn not_seen(verdict: &Verdict) -> String {
    let rank = verdict.culprit.map_or_else(|| "a rank".to_owned(), |rank| rank.to_string());
    match &verdict.cause {
        // Journals of earlier versions have only the class.
        _ if verdict.class.as_deref() == Some(HOST_LOST) => LOST_HOST.to_owned(),
        Cause::Signal { signal: 9 } => format!(
            "Cause not seen: {rank} was ended by SIGKILL. Neither Mainstay nor the kernel's OOM killer sent it; a scheduler, \
             another process or a person did."
        ),
        Cause::Signal { signal } if comes_from_outside(*signal) => format!(
            "Cause not seen: {rank} received {}, which Mainstay did not send; a scheduler, another process or a \
             person sent it.",
            ExitStatus::Signal(*signal)
        ),
        Cause::Signal { signal: 6 } => format!(
            "Cause not seen: native code in {rank} called abort(), usually because a library detected an \
             unrecoverable state. The end of its output may show why."
        ),
        Cause::Signal { signal } => format!(
            "Cause not seen: {rank} crashed in native code ({}). The program, a library or the hardware can be the reason; a \
             core dump, or PYTHONFAULTHANDLER=1 at the next run, shows where.",
            ExitStatus::Signal(*signal)
        ),
        Cause::ExitCode { code: 1 } if has_last_message(verdict) => {
            format!("The last message of {rank} matches no known failure; it is quoted below.")
        }
        Cause::ExitCode { code: 1 } => {
            format!("Cause not seen: {rank} exited with code 1 and left no message on its standard error.")
        }
        Cause::ExitCode { code: code @ 129..=192 } => format!(
            "Cause not seen: {rank} exited with code {code}, which is what a shell returns when {} ended its command.",
            ExitStatus::Signal(code - 128)
        ),
        Cause::ExitCode { code } => format!(
            "Cause not seen: the program of {rank} exited with code {code}, and no known message shows why."
        ),
        Cause::Exception { .. } if lost_a_peer(verdict) => format!(
            "Cause not seen: {rank} lost its connection to another rank, and no rank of this host failed for another reason. \
             Another host of the job, or the network, can be the reason."
        ),
        Cause::Exception { .. } => format!(
            "The message of {rank} matches no known failure; it is quoted below with its location in the program."
        ),
        Cause::HostLost { .. } => LOST_HOST.to_owned(),
        Cause::OutOfMemory => {
            format!(
                "{rank} was killed while the kernel's OOM killer was active; who used the memory was not seen."
            )
        }
        Cause::StartFailed => "The operating system's error is quoted below.".to_owned(),
        Cause::Hang { hang: HangKind::Stopped, .. } => format!(
            "{} is stopped by a signal (SIGSTOP or SIGTSTP), which Mainstay did not send; a debugger, a scheduler or a \
             person did.",
            capital(&rank)
        ),
        Cause::Hang { .. } => "No evidence shows why the ranks make no progress.".to_owned(),
    }
}

/// Whether the evidence quotes the rank's last message on standard error.
fn has_last_message(verdict: &Verdict) -> bool {
    verdict.evidence.iter().any(|line| line.starts_with("last message on its standard error"))
}

/// Whether the exception is typical of the end of another rank.
fn lost_a_peer(verdict: &Verdict) -> bool {
    root_rank::speaks_of_a_lost_peer(&verdict.headline)
}

/// Whether another process stopped or ended the rank.
fn was_sent_a_signal(cause: &Cause) -> bool {
    match cause {
        Cause::Signal { signal } => comes_from_outside(*signal),
        Cause::Hang { hang, .. } => *hang == HangKind::Stopped,
        _ => false,
    }
}

/// Whether the signal is sent by others, and not caused by the program's own code.
fn comes_from_outside(signal: i32) -> bool {
    // The process itself causes SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV and SIGSYS.
    !matches!(signal, 4 | 5 | 6 | 7 | 8 | 11 | 31)
}

/// What was done, and why.
pub fn done(decision: Option<&Decision>, since_then: AfterFailure) -> String {
    let ended = match since_then {
        AfterFailure::Ended { exit } => Some(exit),
        AfterFailure::Starting | AfterFailure::Training => None,
    };
    let Some(Decision { action, after, why, .. }) = decision else {
        return match ended {
            Some(exit) => {
                format!("Nothing: the job ended with exit status {exit} before anything was decided.")
            }
            None => "Nothing was decided yet.".to_owned(),
        };
    };
    if let (Action::Wait, Some(exit)) = (action, ended) {
        return format!("The job ended with exit status {exit} while it waited: {why}.");
    }
    let done = match action {
        Action::RestartInProcess { .. } => "The ranks restarted in their processes".to_owned(),
        Action::RespawnRanks { .. } => {
            "The lost ranks were started again; the others waited for them".to_owned()
        }
        Action::RespawnHost { .. } => "The ranks of this host were started again".to_owned(),
        Action::RestartInJob { .. } => "All ranks were started again".to_owned(),
        Action::ReplaceHost { .. } => "A spare host took the place of this one".to_owned(),
        Action::Shrink { .. } => "The job continued with fewer ranks".to_owned(),
        Action::HandBack { exit } => {
            format!("The job was handed back to the scheduler with exit status {exit}")
        }
        Action::Stop { exit } => format!("The job was stopped with exit status {exit}"),
        Action::Wait => "Nothing yet".to_owned(),
    };
    let later = if after.0 > 0 { format!(" after a wait of {after}") } else { String::new() };
    format!("{done}{later}: {why}.")
}

/// The state of the job after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// No rank has completed a step yet.
    Starting,
    /// All ranks have completed a step.
    Training,
    /// The job has ended.
    Ended {
        /// Its exit status.
        exit: i32,
    },
}

/// What the reader should do next. It follows from the decision: a job that runs again needs nothing, and the failure of a stopped job
/// is not called transient.
pub fn advice(verdict: &Verdict, decision: Option<&Decision>, since_then: AfterFailure) -> Vec<String> {
    let class = verdict.class.as_deref().and_then(Class::named).filter(|class| *class != Class::Unknown);
    let look = class.map(|class| class_advice(class).to_owned());
    let look = if is_of_client(verdict) { Some(REPORT_IT.to_owned()) } else { look };
    let ended = matches!(since_then, AfterFailure::Ended { .. });
    match decision.map(|decision| decision.action) {
        Some(Action::Stop { .. }) => before_the_next_start(verdict, look),
        Some(Action::Wait) | None if ended => before_the_next_start(verdict, look),
        Some(Action::HandBack { .. }) => {
            let here = match verdict.domain {
                FaultDomain::Hardware if let Some(host) = &verdict.host => format!(
                    "The scheduler can start the job without {host} (Slurm: --exclude={}). Have {host} checked.",
                    node(host)
                ),
                FaultDomain::Hardware => {
                    "The scheduler can start the job on another host. Have this one checked.".to_owned()
                }
                _ if let Some(host) = verdict.missing_host() => format!(
                    "Start the job again on all hosts, with another one in place of {host} (Slurm: --exclude={}). A \
                     scheduler that requeues this exit status does so. Have {host} checked.",
                    node(host)
                ),
                _ => "The scheduler can start the job again, on another host if there is one.".to_owned(),
            };
            std::iter::once(here).chain(look).collect()
        }
        Some(Action::Wait) | None => vec!["Wait for the decision: mainstay status shows it.".to_owned()],
        Some(_) => {
            let now = match since_then {
                AfterFailure::Training => "Nothing now: the job is training again.".to_owned(),
                AfterFailure::Starting => {
                    "Nothing now: the ranks are starting; mainstay status shows their first step.".to_owned()
                }
                AfterFailure::Ended { exit: 0 } => {
                    "Nothing: the job completed successfully afterwards.".to_owned()
                }
                AfterFailure::Ended { exit } => {
                    format!("The job ended with exit status {exit} since then: read its last failure first.")
                }
            };
            vec![now, if_it_comes_back(verdict, look)]
        }
    }
}

/// The name of a host among Slurm's nodes, as a rule.
fn node(host: &str) -> &str {
    host.split('.').next().unwrap_or(host)
}

/// What to do before a job that ended is started again.
fn before_the_next_start(verdict: &Verdict, look: Option<String>) -> Vec<String> {
    std::iter::once(to_start_again(verdict).to_owned()).chain(look).collect()
}

fn to_start_again(verdict: &Verdict) -> &'static str {
    match (verdict.domain, &verdict.cause) {
        _ if is_of_client(verdict) => {
            "Start the job again, with another version of Mainstay if there is one."
        }
        (FaultDomain::User, _) if verdict.class.as_deref() == Some(Class::Storage.name()) => {
            "Free space or quota where the program writes (df, df -i), then start the job again."
        }
        (FaultDomain::User, _) if ran_out(verdict).is_some() => {
            "Give the job more of what ran out, or let it use less, then start it again."
        }
        (FaultDomain::User, _) if not_the_programs(verdict).is_some() => {
            "Correct the configuration, then start the job again."
        }
        (FaultDomain::User, _) => "Fix the program, its configuration or its data, then start the job again.",
        (FaultDomain::Hardware, _) => {
            "Take this host out of the job and have it checked, then start the job again."
        }
        (FaultDomain::Infrastructure, _) => {
            "Check the network, the storage and the host, then start the job again."
        }
        (FaultDomain::Platform, _) => {
            "Check the versions and settings of the software under the program, then start the job again."
        }
        (FaultDomain::Unknown, cause) if was_sent_a_signal(cause) => {
            "Find out who sent the signal (the scheduler's log, the host's other users), then start the job again."
        }
        (FaultDomain::Unknown, Cause::ExitCode { .. }) => {
            "Find out from the program and the culprit's output why it exits with this code, then start the job again."
        }
        (FaultDomain::Unknown, _) => {
            "Read the culprit's last output and the kernel log of that time, then start the job again."
        }
    }
}

fn if_it_comes_back(verdict: &Verdict, look: Option<String>) -> String {
    let then = look.unwrap_or_else(|| {
        let look = match (verdict.domain, &verdict.cause) {
            (FaultDomain::Unknown, cause) if was_sent_a_signal(cause) => {
                "Find out who sends the signal: the scheduler's log, the host's other users."
            }
            (FaultDomain::Hardware, _) => "Take this host out of the job and have it checked.",
            (FaultDomain::Infrastructure, _) => "Check the network, the storage and the host.",
            (FaultDomain::Platform, _) => "Check the software under the program.",
            (FaultDomain::Unknown, Cause::ExitCode { .. }) => {
                "Find out from the program and the culprit's output why it exits with this code."
            }
            _ => "Read the culprit's last output and the kernel log of that time.",
        };
        look.to_owned()
    });
    format!("If it recurs: {then}")
}

/// A duration for people: "38.2 s", "12 min", "3 h 5 min".
pub(super) fn length(span: Span) -> String {
    let seconds = span.0 / 1_000_000_000;
    match seconds {
        0..=59 => span.to_string(),
        60..=3599 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

pub(super) fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
