//! Renders an attribution as text: a headline, the evidence with quoted lines, counter-evidence, next steps, and what would change the
//! result.

use std::collections::BTreeMap;

use serde::Serialize;

use super::class::{Class, Restart};
use super::vote::Vote;
use super::{Attribution, Evidence};
use mainstay_hang::flight::BlockedCollective;
use mainstay_hang::listed;
use mainstay_model::verdict::FaultDomain;

/// A failure of less confidence is not reported as one that comes again.
const MIN_CONFIDENCE_WITHOUT_RETRY: f64 = 0.84;
/// Lines quoted for one piece of evidence.
const MAX_QUOTES: usize = 3;
/// Pieces of evidence shown on each side.
const MAX_GROUNDS: usize = 6;
/// Another class is mentioned from this probability on.
const MIN_ALTERNATIVE_PROBABILITY: f64 = 0.1;

/// The whole attribution, ready to be shown.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One line for the person on call.
    pub headline: String,
    /// What went wrong.
    pub class: Class,
    /// Whose fault it is. Unknown is an abstention.
    pub fault_domain: FaultDomain,
    /// The confidence in the domain, from 0 to 1.
    pub confidence: f64,
    /// What to do now.
    pub restart: Restart,
    /// The rank where the failure started.
    pub culprit: Option<u32>,
    /// All ranks where it started: the culprit, or several that the others wait for.
    pub culprits: Vec<u32>,
    /// Ranks that show the cause at the same time, so that none of them is the culprit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub common_to: Vec<u32>,
    /// Ranks that only followed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<u32>,
    /// Where it started, best first.
    pub root: Vec<Quote>,
    /// The evidence that it is based on, heaviest first.
    pub evidence: Vec<EvidenceSummary>,
    /// The evidence for other causes.
    pub against: Vec<EvidenceSummary>,
    /// The line that reports a problem and that nothing explains, if the cause is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unexplained: Option<Quote>,
    /// Lines that would be a cause and are none: the exception was caught, or healthy steps came after it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub set_aside: Vec<Quote>,
    /// The consequences of the failure.
    pub consequences: Vec<EvidenceSummary>,
    /// Other plausible classes, with their probabilities.
    pub alternatives: Vec<(Class, f64)>,
    /// What PyTorch's flight records show, if ranks are blocked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collectives: Option<BlockedCollective>,
    /// What to do next.
    pub next: Vec<String>,
    /// What would change the attribution.
    pub would_change: Vec<String>,
}

/// A piece of evidence in words.
#[derive(Clone, Debug, Serialize)]
pub struct EvidenceSummary {
    /// The signature's name.
    pub signature: String,
    /// What it means.
    pub meaning: String,
    /// The class it supports.
    pub class: Class,
    /// Its log-odds.
    pub weight: f64,
    /// The number of sightings.
    pub count: u64,
    /// The first lines in which it was seen.
    pub quotes: Vec<Quote>,
}

/// A line quoted.
#[derive(Clone, Debug, Serialize)]
pub struct Quote {
    /// The file.
    pub source: String,
    /// The line's number in the file, from 1. 0 means the whole file.
    pub line: u64,
    /// The rank that wrote the line or that it is about. `None` if unknown.
    pub rank: Option<u32>,
    /// The line, cleaned and shortened.
    pub text: String,
}

/// Renders the attribution.
pub fn report(evidence: &Evidence, judged: &Attribution) -> Report {
    let grounds = |votes: &[Vote]| -> Vec<EvidenceSummary> {
        votes.iter().take(MAX_GROUNDS).map(|vote| ground(evidence, vote)).collect()
    };
    let mut alternatives = judged.posterior.ranked();
    alternatives
        .retain(|(class, probability)| *class != judged.class && *probability >= MIN_ALTERNATIVE_PROBABILITY);
    let (mut for_it, mut against) = (grounds(&judged.evidence), grounds(&judged.against));
    if let Some(ground) = evidence.dumps.ground(judged.class) {
        let is_another = |other: &EvidenceSummary| other.meaning != ground.meaning;
        for_it.retain(is_another);
        against.retain(is_another);
        // For an unknown cause it is the most informative piece.
        let place = if judged.class == Class::Unknown { 0 } else { for_it.len().min(1) };
        for_it.insert(place, ground);
    }
    let held_up = evidence.dumps.held_up.as_ref();
    let unexplained = unexplained(evidence, judged);
    let consequences = &judged.consequences;
    Report {
        headline: headline(judged, consequences, unexplained.as_ref(), held_up) + &counted(&judged.set_aside),
        class: judged.class,
        fault_domain: judged.domain,
        confidence: judged.confidence,
        restart: judged.restart,
        culprit: judged.root.rank,
        culprits: culprits(judged, held_up),
        common_to: judged.root.common.iter().copied().collect(),
        victims: judged.root.victims.iter().copied().collect(),
        root: judged.root.lines.iter().map(|(source, spot)| quote(evidence, *source, spot)).collect(),
        evidence: for_it,
        against,
        unexplained,
        set_aside: aside(evidence, judged).collect(),
        consequences: grounds(consequences),
        collectives: held_up.cloned(),
        next: next(judged, held_up),
        would_change: would_change(judged, &alternatives),
        alternatives,
    }
}

/// Lines quoted of those that were set aside.
const MAX_SET_ASIDE: usize = 20;

fn aside<'r>(evidence: &'r Evidence, judged: &'r Attribution) -> impl Iterator<Item = Quote> + 'r {
    judged.set_aside.iter().take(MAX_SET_ASIDE).map(|((source, _), spot)| quote(evidence, *source, spot))
}

fn counted<T>(set_aside: &BTreeMap<(usize, u64), T>) -> String {
    match set_aside.len() {
        0 => String::new(),
        1 => "; 1 line was set aside".to_owned(),
        many => format!("; {many} lines were set aside"),
    }
}

fn culprits(judged: &Attribution, held_up: Option<&BlockedCollective>) -> Vec<u32> {
    match judged.root.rank {
        Some(rank) => vec![rank],
        None => held_up.iter().flat_map(|blocked| blocked.culprits.iter().map(|rank| rank.0)).collect(),
    }
}

fn ground(evidence: &Evidence, vote: &Vote) -> EvidenceSummary {
    EvidenceSummary {
        signature: vote.id.clone(),
        meaning: vote.meaning.clone(),
        class: vote.class,
        weight: vote.weight,
        count: vote.count,
        quotes: vote
            .spots
            .iter()
            .take(MAX_QUOTES)
            .map(|(source, spot)| quote(evidence, *source, spot))
            .collect(),
    }
}

fn quote(evidence: &Evidence, source: usize, spot: &super::scan::RelevantLine) -> Quote {
    let source = evidence.findings.get(source).map(|findings| findings.source.clone()).unwrap_or_default();
    Quote { source, line: spot.line, rank: spot.rank, text: spot.text.clone() }
}

/// The last line that reports a problem and that no signature matches. `None` if the cause is known.
fn unexplained(evidence: &Evidence, judged: &Attribution) -> Option<Quote> {
    let mut lines = evidence
        .findings
        .iter()
        .enumerate()
        .filter_map(|(source, finding)| finding.unexplained.as_ref().map(|spot| (source, spot)));
    let (source, spot) = lines.next_back()?;
    (judged.class == Class::Unknown).then(|| quote(evidence, source, spot))
}

fn headline(
    judged: &Attribution,
    consequences: &[Vote],
    unexplained: Option<&Quote>,
    held_up: Option<&BlockedCollective>,
) -> String {
    let sure = format!("{:.0} % sure", judged.confidence * 100.0);
    let meaning = judged.evidence.first().map(|vote| vote.meaning.as_str());
    // For an abstention, any finding is a hint.
    let mut found = judged.against.iter().chain(&judged.evidence);
    let hint = found.next().map(|vote| vote.meaning.as_str());
    let place = match (judged.root.rank, judged.root.common.len()) {
        (Some(rank), _) => format!(", first on rank {rank}"),
        (None, 0) => String::new(),
        (None, many) => format!(", on {many} ranks at once"),
    };
    if let (Class::Unknown, Some(held_up)) = (judged.class, held_up) {
        return format!("Cause unknown: {}", held_up.summary);
    }
    match (judged.class, meaning) {
        (Class::Unknown, _) if hint.is_some() => {
            let (meaning, ask) = (hint.unwrap_or_default(), "the other ranks' logs are needed");
            format!("Cause unknown: the evidence is ambiguous ({meaning}); {ask}")
        }
        (Class::Unknown, _) if consequences.is_empty() => match unexplained {
            Some(line) => format!("Cause unknown: no signature matches the message \"{}\"", line.text),
            None => "Cause unknown: these logs report no failure".to_owned(),
        },
        (Class::Unknown, _) => {
            "Cause unknown: these logs show only consequences; the other ranks' logs are needed".to_owned()
        }
        (class, Some(meaning)) => {
            format!("{}: {meaning}{}{place} ({sure})", capital(class.description()), device(judged))
        }
        (class, None) => format!("{}{}{place} ({sure})", capital(class.description()), device(judged)),
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// What to do about a failure of Mainstay itself.
pub const REPORT_IT: &str = "Report it to Mainstay's maintainers with the file that mainstay bundle writes; a newer version may have the fix.";

/// Where to look next for failures of that class.
pub fn class_advice(class: Class) -> &'static str {
    match class {
        Class::UserCode => "Read the quoted traceback and fix the program.",
        Class::UserConfig => "Correct the setting that the quoted line names.",
        Class::Data => {
            "Check the file or record that the quoted line names; a checksum shows whether it is damaged."
        }
        Class::HardwareGpu => {
            "Look at the device: nvidia-smi -q -d ECC,ROW_REMAPPER, the kernel's log; reset it or run dcgmi diag -r 3."
        }
        Class::HardwareHost => {
            "Look at the host: the kernel's log, the BMC's event log, its power and cooling."
        }
        Class::Fabric => {
            "Look at the links of the named hosts: ibstat, error counters, the switch; test the pair with ib_write_bw."
        }
        Class::Storage => "Look at the mount or the bucket from the same host: df, df -i, the server's log.",
        Class::HostResource => {
            "Compare what the job used with its limit: memory.peak of its cgroup, df /dev/shm, ulimit -n."
        }
        Class::Preemption => {
            "Nothing is wrong with the run. Make sure that it saves its state when it receives a signal to stop."
        }
        Class::SoftwarePlatform => {
            "Compare versions of driver, libraries and framework with a host where it works."
        }
        Class::Unknown => "Give the logs of all ranks and the kernel's log of their hosts.",
    }
}

/// What to do about single findings, by the names of their signatures.
const FINDINGS: [(&[&str], &str); 5] = [
    (&["storage.throttled"], "Wait, or log in, which raises the limit: huggingface-cli whoami."),
    (
        &["net.dns"],
        "Ask the resolver of the host for the name in the quoted line: cat /etc/resolv.conf; getent hosts NAME.",
    ),
    (
        &["cuda.device_unavailable", "gaudi.acquire", "jax.tpu_in_use"],
        "Find and end the process that holds the device: fuser -v /dev/nvidia* /dev/accel* /dev/vfio/*.",
    ),
    (
        &["net.gloo_loopback", "net.loopback_fallback"],
        "Set GLOO_SOCKET_IFNAME to the interface between the hosts, which ip -br addr shows; or let getent hosts NAME give \
         the address of each host there.",
    ),
    (&["torch.addr_in_use"], "Find the process that holds the port: ss -ltnp."),
];

/// Where to look next: for the finding that decided, else for the class, with the device that the line names.
fn finding_advice(judged: &Attribution) -> String {
    let first = judged.evidence.first().map_or("", |vote| vote.id.as_str());
    let found = FINDINGS.iter().find(|(ids, _)| ids.contains(&first));
    let class_advice = found.map_or_else(|| class_advice(judged.class), |(_, class_advice)| class_advice);
    let of_driver = |vote: &&Vote| vote.spots.iter().any(|(_, spot)| spot.text.contains("NVRM:"));
    let named = judged.evidence.iter().find(of_driver).and_then(address);
    match named.filter(|_| judged.class == Class::HardwareGpu) {
        Some(gpu) => class_advice
            .replace("ROW_REMAPPER", &format!("ROW_REMAPPER -i {gpu}"))
            .replace("-r 3", &format!("-r 3 -i {gpu}")),
        None => class_advice.to_owned(),
    }
}

/// The first PCI address in the lines of the evidence: `0000:3b:00`.
fn address(vote: &Vote) -> Option<&str> {
    vote.spots.iter().find_map(|(_, spot)| {
        let words = spot.text.split(|letter: char| !letter.is_ascii_hexdigit() && letter != ':');
        let mut words = words.map(|word| word.trim_matches(':'));
        words.find(|word| {
            let mut parts = word.split(':').map(str::len);
            (parts.next(), parts.next(), parts.next(), parts.next()) == (Some(4), Some(2), Some(2), None)
        })
    })
}

/// The host that wrote a line of the kernel: `Jun 10 03:09:55 gpu-07 kernel: …`.
fn host(vote: &Vote) -> Option<&str> {
    vote.spots.iter().find_map(|(_, spot)| {
        let (before, _) = spot.text.split_once(" kernel: ")?;
        before.rsplit(' ').next().filter(|name| !name.is_empty() && !name.contains(':'))
    })
}

/// The device and the host of a fault of the hardware, where its lines name them.
fn device(judged: &Attribution) -> String {
    if judged.domain != FaultDomain::Hardware {
        return String::new();
    }
    let device = judged.evidence.iter().find_map(address).map(|gpu| format!("device {gpu}"));
    let host = judged.evidence.iter().find_map(host).map(|host| format!("host {host}"));
    let places: Vec<String> = device.into_iter().chain(host).collect();
    if places.is_empty() { String::new() } else { format!(", {}", places.join(", ")) }
}

fn next(judged: &Attribution, held_up: Option<&BlockedCollective>) -> Vec<String> {
    let restart = match judged.restart {
        Restart::RestartSameNodes => "Restart on the same hosts.",
        Restart::RestartExcludeNode => "Restart without the suspected host, and drain it for a check.",
        Restart::RestartAfterWait => "Restart when the lost resource is available again.",
        // Keeps advice and headline consistent: an uncertain cause is not reported as one that fails again.
        Restart::DoNotRestart
            if judged.class != Class::Unknown && judged.confidence < MIN_CONFIDENCE_WITHOUT_RETRY =>
        {
            "Do not restart on these hosts; one retry on other hosts distinguishes a bug from a broken host."
        }
        Restart::DoNotRestart => "Do not restart until something has changed: it would fail again.",
    };
    let class_advice = if judged.is_of_client() { REPORT_IT.to_owned() } else { finding_advice(judged) };
    let mut next = vec![restart.to_owned(), class_advice];
    if let Some(BlockedCollective { culprits, .. }) = held_up.filter(|blocked| !blocked.culprits.is_empty()) {
        let who = listed(culprits);
        next.push(format!(
            "Find out why {who} did not enter the operation: check the stack, the log and the host."
        ));
    }
    next
}

fn would_change(judged: &Attribution, alternatives: &[(Class, f64)]) -> Vec<String> {
    let mut conditions = Vec::new();
    for (class, probability) in alternatives.iter().take(2) {
        let sign = match class {
            Class::UserCode | Class::UserConfig => "the same failure at the same step on other hosts",
            Class::Data => "the same failure whenever the same part of the data is read",
            Class::HardwareGpu => "an XID, an ECC error or the same device failing again in another job",
            Class::HardwareHost => "a machine check, a reboot or other jobs failing on this host",
            Class::Fabric => "error counters of a link that grew at that time",
            Class::Storage => "errors of the same mount on other hosts",
            Class::HostResource => {
                "a kill by the kernel in the log of the host or in memory.events of the cgroup"
            }
            Class::Preemption => "a notice of the scheduler or the cloud at that time",
            Class::SoftwarePlatform => "the same failure on hosts with the same driver and libraries only",
            Class::Unknown => "an earlier failure in the logs of another rank",
        };
        conditions.push(format!("{} ({:.0} %): {sign}", capital(class.description()), probability * 100.0));
    }
    if conditions.is_empty() && judged.class != Class::Unknown {
        conditions.push("An earlier failure in the logs of another rank.".to_owned());
    }
    conditions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::attribute;
    use crate::attribution::catalog::Catalog;
    use crate::attribution::scan::{Kind, Scan};

    fn explained(log: &str, exit: &str) -> Report {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
        let evidence =
            Evidence { findings, exits: crate::attribution::exit::from_text(exit), ..Evidence::default() };
        report(&evidence, &attribute(catalog, &evidence))
    }

    #[test]
    fn a_fault_of_a_device_names_the_device_and_the_host_and_the_command_has_them() {
        let lost = "Jun 10 03:09:55 gpu-07 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n";
        let report = explained(lost, "");
        assert!(report.headline.contains(", device 0000:3b:00, host gpu-07"), "{}", report.headline);
        assert!(report.next[1].contains("-i 0000:3b:00"), "{:?}", report.next);
        assert!(report.next.len() <= 3);
    }

    #[test]
    fn advice_belongs_to_the_finding() {
        let held =
            explained("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n", "");
        assert!(held.next[1].contains("fuser -v"), "{:?}", held.next);
        let limited = explained(
            "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://hub/x\n",
            "",
        );
        assert!(limited.next[1].starts_with("Wait"), "{:?}", limited.next);
        let name = explained("ValueError: host not found: Name or service not known\n", "");
        assert!(name.next[1].contains("getent hosts"), "{:?}", name.next);
    }

    #[test]
    fn lines_that_were_set_aside_are_counted_and_listed() {
        let caught = "2026-01-01 10:00:00 - train - ERROR - skipping the batch\nTraceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\nstep 7 loss 2.1\nstep 8 loss 2.0\nstep 9 loss 2.0\n";
        let report = explained(caught, "137");
        testing::snapshot!(
            "reasons",
            "explain: lines that were set aside are counted and listed",
            report.headline
        );
        assert_eq!(report.set_aside.iter().map(|line| line.line).collect::<Vec<_>>(), [5]);
        let none = explained("step 8 loss 2.0\n", "137");
        assert!(none.set_aside.is_empty(), "{}", none.headline);
    }

    #[test]
    fn a_bug_that_is_not_sure_is_tried_once_on_other_hosts() {
        let unsure = explained("ModuleNotFoundError: No module named 'einops'\n", "");
        let sure = explained(
            "  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\n",
            "",
        );
        for (report, name) in [(unsure, "unsure"), (sure, "sure")] {
            assert_eq!(report.restart, Restart::DoNotRestart);
            testing::snapshot!("reasons", format!("explain: a bug that is {name}"), report.next.join("\n"));
        }
    }

    #[test]
    fn an_abstention_calls_what_was_found_a_hint_and_asks_for_the_other_ranks() {
        let hint = explained(
            "[rank5]: ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
            "",
        );
        testing::snapshot!("reasons", "explain: an abstention with a hint", hint.headline);
        assert_eq!(hint.culprit, None);
        let new =
            explained("step 3 loss 2.1\nERROR zorblat: manifold 7 quenched, aborting frobnication\n", "");
        testing::snapshot!("reasons", "explain: an abstention with an unknown message", new.headline);
        assert_eq!(new.unexplained.map(|line| line.line), Some(2));
        assert!(new.consequences.is_empty() && new.evidence.is_empty());
        let nothing = explained("step 3 loss 2.1\n", "");
        testing::snapshot!("reasons", "explain: an abstention without a failure", nothing.headline);
    }

    #[test]
    fn where_a_restart_is_advised_or_nothing_is_known_no_retry_is_asked_for() {
        let lost = explained("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n", "");
        assert_eq!(lost.restart, Restart::RestartExcludeNode);
        testing::snapshot!("reasons", "explain: a lost device", lost.next.join("\n"));
        let nothing = explained("step 3 loss 2.1\n", "");
        assert_eq!(nothing.restart, Restart::RestartSameNodes);
        testing::snapshot!("reasons", "explain: nothing is known", nothing.next.join("\n"));
    }
}
