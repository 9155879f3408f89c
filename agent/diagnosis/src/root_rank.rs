//! The verdict on a failed attempt: the rank where the failure started, the kind of its end, and the victims.
//!
//! Orders the ends by the kernel's time of death and the notes' own times. Ends that report a lost peer come after ends that do not.
//! Attribution by logs and device health builds on this verdict.

use std::collections::BTreeMap;

use crate::attribution::level;
use crate::fingerprint::fingerprint;
use crate::traceback_tail;
use mainstay_hang::{ACTIVITY, Hang, HangKind, listed};
use mainstay_model::entry::{ExitStatus, LineTime, Note};
use mainstay_model::hang::is_no_acknowledgement;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};

/// How a rank of the failed attempt ended.
#[derive(Clone, Debug, Default)]
pub struct RankEnd {
    /// Its exit note, if it raised.
    pub note: Option<Note>,
    /// Its exit status, and when the launcher learned it.
    pub exit: Option<(ExitStatus, Mono)>,
    /// Whether it ended because the launcher stopped it.
    pub after_stop: bool,
    /// When the launcher first detected the failure.
    pub detected_at: Option<Mono>,
    /// The last step that it completed in this attempt.
    pub step: Option<u64>,
    /// The position in its data when it failed, if it reported one.
    pub data: Option<u64>,
    /// Whether it sent heartbeats in this attempt.
    pub heartbeats: bool,
    /// The last lines of its standard error.
    pub stderr_tail: Vec<String>,
    /// The last lines of its standard output.
    pub stdout_tail: Vec<String>,
    /// Set if its host was lost, and the rank with it.
    pub lost: Option<LostHost>,
    /// When each line of `stderr_tail` was written. Empty if unknown.
    pub stderr_times: Vec<LineTime>,
    /// The same for `stdout_tail`.
    pub stdout_times: Vec<LineTime>,
}

/// The class of a verdict on a lost host: on the ranks that ended with it, whose fault that is, is unknown.
pub const HOST_LOST: &str = "host_lost";

/// The loss of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostHost {
    /// Its name.
    pub host: String,
    /// For people: "host b (node rank 1, ranks 2 to 3)".
    pub named: String,
    /// How the loss was detected.
    pub how: String,
}

impl RankEnd {
    /// Whether the rank failed by itself, judging only by its own end.
    pub fn failed(&self) -> bool {
        self.note.is_some() || (!self.after_stop && self.exit.is_some_and(|(status, _)| !status.is_success()))
    }

    /// Adds a note made from the printed traceback, if the rank ended by itself and left none.
    pub fn with_last_words(mut self) -> RankEnd {
        if let (None, false, Some((ExitStatus::Code(1), at))) = (&self.note, self.after_stop, self.exit) {
            self.note = traceback_tail::exception(&self.stderr_tail, at);
        }
        self
    }

    /// When it failed: the note's time, else the time of death.
    pub fn failed_at(&self) -> Option<Mono> {
        match (&self.note, self.exit) {
            (Some(note), _) => Some(note.at),
            (None, Some((_, at))) => Some(at),
            (None, None) => None,
        }
    }

    /// Whether it chose to exit, although the launcher stopped it before noticing: an interpreter takes a while to end after
    /// `sys.exit(3)`, and its peers lose their connections meanwhile. The exit code is not one that SIGTERM leads to.
    fn chose_its_exit(&self) -> bool {
        const OF_A_STOP: [i32; 5] = [0, 1, 15, 130, 143];
        let Some((ExitStatus::Code(code), _)) = self.exit else { return false };
        self.after_stop && self.note.is_none() && !OF_A_STOP.contains(&code)
    }

    /// Whether its end is typical of the loss of a peer.
    pub fn speaks_of_a_lost_peer(&self) -> bool {
        self.note.as_ref().is_some_and(|note| speaks_of_a_lost_peer(&note.message))
    }
}

/// Whether the message is typical of the loss of a peer.
pub fn speaks_of_a_lost_peer(message: &str) -> bool {
    const LOST_PEER: [&str; 7] = [
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Socket Timeout",
        "remote process exited",
        "ncclRemoteError",
        "ncclSystemError",
    ];
    LOST_PEER.iter().any(|phrase| message.contains(phrase))
}

/// Judges a failed attempt. `out_of_memory_kills` is the kernel's number of OOM kills since it started: of the job's control group, or
/// of the whole host if only that is counted.
pub fn judge(
    incident: Incident,
    attempt: Attempt,
    ends: &BTreeMap<Rank, RankEnd>,
    out_of_memory_kills: u64,
) -> Verdict {
    let root = ends
        .iter()
        .filter(|(_, end)| end.failed())
        .min_by_key(|(rank, end)| (end.speaks_of_a_lost_peer(), end.failed_at(), **rank));
    // If all ranks that failed by themselves lost a peer, the peer may be one that chose to exit.
    let chose = || ends.iter().filter(|(_, end)| end.chose_its_exit()).min_by_key(|(_, end)| end.failed_at());
    let root = root.map(|root| if root.1.speaks_of_a_lost_peer() { chose().unwrap_or(root) } else { root });
    let Some((&culprit, end)) = root else { return no_rank_failed(incident, attempt) };

    let alike = raised_the_same(culprit, end, ends);
    let others = ends.keys().copied().filter(|rank| *rank != culprit);
    let victims: Vec<Rank> = others.filter(|rank| alike.binary_search(rank).is_err()).collect();
    // A shell whose command was killed exits with 137.
    let by_sigkill = matches!(end.exit, Some((ExitStatus::Signal(9) | ExitStatus::Code(137), _)));
    let killed = by_sigkill && end.note.is_none();
    let cause = match (&end.note, end.exit) {
        (None, Some(_)) if let Some(lost) = &end.lost => Cause::HostLost { host: lost.host.clone() },
        (Some(note), _) => {
            Cause::Exception { exception: note.exception.clone(), fingerprint: fingerprint(note) }
        }
        (None, Some(_)) if killed && out_of_memory_kills > 0 => Cause::OutOfMemory,
        (None, Some((ExitStatus::Signal(signal), _))) => Cause::Signal { signal },
        (None, Some((ExitStatus::Code(code), _))) => Cause::ExitCode { code },
        (None, None) => return no_rank_failed(incident, attempt),
    };
    let at_step = match end.step {
        Some(step) => format!(" after step {step}"),
        None if end.heartbeats => " before its first step".to_owned(),
        // Without heartbeats the step is unknown.
        None => String::new(),
    };
    let (headline, class) = match (&cause, &end.lost) {
        (Cause::HostLost { .. }, Some(lost)) => {
            (format!("{} was lost{at_step}: {}", lost.named, lost.how), Some(HOST_LOST.to_owned()))
        }
        _ => (format!("{culprit} {}{at_step}", what_happened(&cause, end)), None),
    };
    let fault_at = end.failed_at().unwrap_or_default();
    let mut evidence = evidence(culprit, end, out_of_memory_kills, killed);
    if !alike.is_empty() {
        evidence.push(format!("the same exception was raised at the same place by {}", listed(&alike)));
    }
    Verdict {
        class,
        confidence: confidence(&cause, end),
        culprit_confidence: Some(confidence(&cause, end)),
        culprit: Some(culprit),
        step: end.step,
        data: end.data,
        heartbeats: end.heartbeats,
        detected_at: end.detected_at.unwrap_or(fault_at),
        evidence,
        victims,
        ..Verdict::new(incident, attempt, cause, headline, fault_at)
    }
}

/// The ranks that raised the same exception as the culprit, at the same place in the program: they are no victims of it. The loss of a
/// peer looks the same on all victims.
fn raised_the_same(culprit: Rank, end: &RankEnd, ends: &BTreeMap<Rank, RankEnd>) -> Vec<Rank> {
    let Some(first) = end.note.as_ref().filter(|_| !end.speaks_of_a_lost_peer()) else { return Vec::new() };
    let same = fingerprint(first);
    let others = ends.iter().filter(|(rank, _)| **rank != culprit);
    let notes = others.filter_map(|(rank, end)| Some((*rank, end.note.as_ref()?)));
    // Compare the exception first: a fingerprint reads the whole traceback, and there can be 100,000 ranks.
    let is_alike = |note: &Note| {
        let equal = note.message == first.message && note.traceback == first.traceback;
        note.exception == first.exception && (equal || fingerprint(note) == same)
    };
    let alike = notes.filter(|(_, note)| is_alike(note));
    alike.map(|(rank, _)| rank).collect()
}

/// The verdict when ranks could not be started.
pub fn start_failed(incident: Incident, attempt: Attempt, error: &str, at: Mono) -> Verdict {
    let headline = format!("the ranks could not be started: {error}");
    Verdict {
        confidence: 1.0,
        evidence: vec![error.to_owned()],
        ..Verdict::new(incident, attempt, Cause::StartFailed, headline, at)
    }
}

/// The verdict when a start waited in vain for the place of a lost host to be taken.
pub fn host_missing(incident: Incident, attempt: Attempt, host: String, error: &str, at: Mono) -> Verdict {
    Verdict {
        headline: error.to_owned(),
        cause: Cause::HostLost { host },
        domain: FaultDomain::Infrastructure,
        class: Some(HOST_LOST.to_owned()),
        // Who ended it was not seen.
        confidence: 0.9,
        ..start_failed(incident, attempt, error, at)
    }
}

/// The lowest confidence in a fault of the network where a connection is not acknowledged.
const CUT_CONFIDENCE: f64 = 0.85;

/// The verdict on ranks that were alive and made no progress. `found` is what was observed before they were stopped.
pub fn hung(incident: Incident, attempt: Attempt, hang: &Hang, found: Vec<String>) -> Verdict {
    // In a job of one rank, that rank is the culprit.
    let alone = hang.victims.first().filter(|_| hang.culprits.is_empty() && hang.victims.len() == 1);
    let culprit = hang.culprits.first().or(alone).copied();
    let (domain, class) = match hang.kind {
        HangKind::UserCode | HangKind::Mismatch | HangKind::FinishedEarly | HangKind::Livelock => {
            (FaultDomain::User, Some("user_code"))
        }
        HangKind::DataInput => (FaultDomain::User, Some("data")),
        HangKind::Network => (FaultDomain::Infrastructure, Some("fabric")),
        HangKind::BlockedIo => (FaultDomain::Infrastructure, Some("storage")),
        HangKind::SilentHost => (FaultDomain::Hardware, None),
        HangKind::Stopped | HangKind::NeverRegistered | HangKind::AllStill => (FaultDomain::Unknown, None),
    };
    // Nothing of a program keeps a kernel from acknowledging.
    let (cut, found): (Vec<String>, Vec<String>) =
        found.into_iter().partition(|line| is_no_acknowledgement(line));
    let by_network = matches!(hang.kind, HangKind::Network | HangKind::AllStill);
    let (domain, class, confidence, headline) = match cut.first().filter(|_| by_network) {
        Some(cut) => (
            FaultDomain::Infrastructure,
            Some("fabric"),
            hang.confidence.max(CUT_CONFIDENCE),
            format!("{}; {cut}", hang.headline()),
        ),
        None => (domain, class, hang.confidence, hang.headline()),
    };
    let evidence = each_once(cut.into_iter().chain(hang.evidence.iter().cloned()).chain(found));
    let place = match hang.culprits.first() {
        Some(_) => format!("{} in {}", listed(&hang.culprits), hang.phase),
        None => hang.phase.clone(),
    };
    let cause = Cause::Hang { hang: hang.kind, place };
    Verdict {
        domain,
        class: class.map(str::to_owned),
        doubts: Doubts { against: Vec::new(), would_change: would_change(hang) },
        confidence,
        culprit_confidence: culprit.map(|_| hang.confidence),
        culprit,
        victims: hang.victims.iter().copied().filter(|victim| Some(*victim) != culprit).collect(),
        step: hang.step,
        heartbeats: hang.phase != ACTIVITY,
        detected_at: hang.confirmed,
        evidence,
        ..Verdict::new(incident, attempt, cause, headline, hang.since)
    }
}

/// Drops lines that another line contains completely: a stack may be read in two ways and by two readers.
fn each_once(lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for line in lines {
        if kept.iter().any(|other| other.contains(line.trim())) {
            continue;
        }
        kept.retain(|other| !line.contains(other.trim()));
        kept.push(line);
    }
    kept
}

/// What would change the verdict on a hang.
fn would_change(hang: &Hang) -> Vec<String> {
    let mut evidence = vec![if hang.culprits.is_empty() {
        "A rank whose stack or counters differ from those of all others: the hang would have started there."
            .to_owned()
    } else {
        format!("Another rank that is behind {}, by stacks or counters.", listed(&hang.culprits))
    }];
    if hang.kind == HangKind::Network {
        evidence
            .push("Links without errors at that time: then the ranks took different code paths.".to_owned());
    }
    evidence
}

fn what_happened(cause: &Cause, end: &RankEnd) -> String {
    match cause {
        Cause::Exception { exception, .. } => {
            let message = end.note.as_ref().map_or("", |note| note.message.lines().next().unwrap_or(""));
            let message = in_a_headline(message);
            let name = exception.strip_prefix("builtins.").unwrap_or(exception);
            if message.is_empty() { format!("raised {name}") } else { format!("raised {name}: {message}") }
        }
        Cause::ExitCode { code } => format!("exited with code {code}"),
        Cause::Signal { signal } => ended_by(*signal),
        Cause::OutOfMemory => "was killed while the kernel's OOM killer was active".to_owned(),
        Cause::HostLost { host } => format!("was lost with host {host}"),
        Cause::StartFailed => "could not be started".to_owned(),
        Cause::Hang { hang, .. } => hang.of_a_rank().to_owned(),
    }
}

/// The start of a message that is too long for one line: its first sentences, or its first words. The evidence has the full message.
fn in_a_headline(message: &str) -> String {
    const MAX_CHARS: usize = 200;
    if message.chars().count() <= MAX_CHARS {
        return message.to_owned();
    }
    let begin: String = message.chars().take(MAX_CHARS).collect();
    // Skip a sentence that is too short to be useful.
    let sentences = begin.rfind(". ").filter(|end| *end > MAX_CHARS / 5).and_then(|end| begin.get(..=end));
    let words = || begin.rfind(' ').and_then(|end| begin.get(..end)).unwrap_or(&begin);
    format!("{} …", sentences.unwrap_or_else(words))
}

/// What a signal did to a rank, in words.
fn ended_by(signal: i32) -> String {
    let name = ExitStatus::Signal(signal);
    match signal {
        4 => format!("crashed in native code ({name}: an instruction that this CPU does not have)"),
        6 => format!("aborted in native code ({name})"),
        7 => format!(
            "crashed in native code ({name}: mapped memory without storage behind it; /dev/shm may be full)"
        ),
        8 => format!("crashed in native code ({name}: an arithmetic error such as a division by zero)"),
        11 => format!("crashed in native code ({name}: an invalid memory access)"),
        _ => format!("was ended by {name}"),
    }
}

/// The confidence in the culprit: lower if all evidence points to the end of another rank.
fn confidence(cause: &Cause, end: &RankEnd) -> f64 {
    match cause {
        _ if end.speaks_of_a_lost_peer() => 0.4,
        _ if end.chose_its_exit() => 0.8,
        Cause::OutOfMemory => 0.8,
        Cause::Exception { .. }
        | Cause::ExitCode { .. }
        | Cause::Signal { .. }
        | Cause::HostLost { .. }
        | Cause::StartFailed
        | Cause::Hang { .. } => 0.95,
    }
}

fn evidence(culprit: Rank, end: &RankEnd, out_of_memory_kills: u64, killed: bool) -> Vec<String> {
    let mut evidence = Vec::new();
    if let Some(note) = &end.note {
        let source = match &note.file {
            Some(file) => format!("error file of {culprit}, {file}"),
            None => format!("exit note of {culprit}"),
        };
        evidence.push(format!("{source}: {}: {}", note.exception, note.message));
        if let Some(frame) = note.traceback.lines().rfind(|line| line.trim_start().starts_with("File \"")) {
            evidence.push(format!("raised at {}", frame.trim()));
        }
    }
    // A rank that raised was stopped afterwards: its status was caused by the launcher.
    if let (false, Some((status, _))) = (end.after_stop && !end.chose_its_exit(), end.exit) {
        evidence.push(format!("the process of {culprit} ended with {status}"));
    }
    if killed && out_of_memory_kills == 0 {
        evidence.push("Mainstay sent no SIGKILL, and the kernel counted no OOM kill".to_owned());
    }
    if out_of_memory_kills > 0 {
        evidence
            .push(format!("the kernel's OOM killer ended {out_of_memory_kills} process(es) in this attempt"));
    }
    if let Some(position) = end.data {
        evidence.push(format!("{culprit} read its data at position {position}"));
    }
    evidence.extend(last_line(end));
    evidence
}

/// The last line that a rank without an exception wrote to its standard error, with its time.
fn last_line(end: &RankEnd) -> Option<String> {
    if end.note.is_some() {
        return None;
    }
    let at = informative_line(&end.stderr_tail)?;
    let line = end.stderr_tail.get(at)?.trim();
    let when = match (end.stderr_times.get(at), end.failed_at()) {
        (Some(time), Some(failed_at)) => format!(", {}", time.before_failure(failed_at)),
        _ => String::new(),
    };
    Some(format!("last message on its standard error{when}: {line}"))
}

/// The line that explains why a process ended: the newest that reports a failure, else the newest. Skips warnings and the source lines
/// that they quote.
fn informative_line(lines: &[String]) -> Option<usize> {
    const OF_A_FAILURE: [&str; 8] =
        ["Fatal", "fatal", "terminate called", "what():", "rror:", "Assertion", "Exception", "killed"];
    let of_a_warning = |at: usize, line: &str| {
        let above = at.checked_sub(1).and_then(|above| lines.get(above));
        level::is_mild(line)
            || line.starts_with(' ') && above.is_some_and(|above| level::is_python_warning(above))
    };
    let says_something = |at: usize, line: &str| !line.trim().is_empty() && !of_a_warning(at, line);
    let newest_first = || lines.iter().enumerate().rev().filter(|(at, line)| says_something(*at, line));
    let of_a_failure =
        newest_first().take(40).find(|(_, line)| OF_A_FAILURE.iter().any(|word| line.contains(word)));
    of_a_failure.or_else(|| newest_first().next()).map(|(at, _)| at)
}

/// The job core must get a verdict even for an attempt without a failure.
fn no_rank_failed(incident: Incident, attempt: Attempt) -> Verdict {
    let headline = "the ranks ended without reporting a reason";
    Verdict::new(incident, attempt, Cause::ExitCode { code: 1 }, headline, Mono::default())
}

#[cfg(test)]
mod tests;
