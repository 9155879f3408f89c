//! The journal's document names every field that is written.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;

use mainstay_model::entry::{
    Body, Entry, ExitStatus, Fact, HostOfRanks, JobOwner, JobSpec, LineTime, Note, StartedRank,
};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use mainstay_model::kernel::{KernelClass, KernelReport, LinkRegisters, LogPlace, NvlinkError, Sxid, Xid};
use mainstay_model::observation::Observation;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{Action, DecidedBy, Decision, FaultDomain, Outcome, Rule};

const DOCUMENT: &str = include_str!("../../../docs/reference/journal.md");
const SOURCE: &str = include_str!("../../model/src/entry.rs");

fn entries() -> Vec<Body> {
    let (attempt, rank, pid) = (Attempt(0), Rank(0), Pid(1));
    let host = HostOfRanks { host: "a".into(), node_rank: 0, first_rank: rank, ranks: 1 };
    let started = StartedRank { rank, local_rank: 0, pid, page: Some("page".into()), start_ticks: Some(7) };
    let note = Note { step: Some(1), at: Mono(1), file: Some(String::new()), ..Note::default() };
    vec![
        Body::Fact(Fact::JobStarted(JobSpec {
            page_dir: Some("pages".into()),
            started_in: "here".into(),
            run: "train~1".into(),
            follows: true,
            owner: Box::new(JobOwner {
                user: "u".into(),
                slurm_job_id: "1".into(),
                slurm_job_name: "j".into(),
                slurm_partition: "q".into(),
                namespace: "n".into(),
                pod: "p".into(),
            }),
            ..JobSpec::default()
        })),
        Body::Fact(Fact::AttemptStarted { attempt, master_port: 1, ranks: vec![started], hosts: vec![host] }),
        Body::Fact(Fact::RankRaised { attempt, rank, pid, note, data: Some(0) }),
        Body::Fact(Fact::RankExited {
            attempt,
            rank,
            pid,
            status: ExitStatus::Signal(9),
            step: Some(1),
            data: Some(0),
            after_stop: true,
            stderr_tail: vec![String::new()],
            stdout_tail: vec![String::new()],
            stderr_times: vec![LineTime { at: Mono(1), steps_after: Some(1) }],
            stdout_times: vec![LineTime::default()],
        }),
        Body::Fact(Fact::Xid(Xid {
            gpu: PciAddress { domain: 0, bus: 1, device: 0 },
            code: 149,
            mig_instance: Some(1),
            pid: Some(pid),
            process: Some("python".into()),
            reset_needed: Some(true),
            drain_and_reset_needed: Some(false),
            recovery_action: Some(1),
            nvlink: Some(NvlinkError {
                unit: "NETIR".into(),
                fatal: Some(true),
                link: Some(1),
                intrinfo: 1,
                status: 1,
            }),
            link_registers: Some(LinkRegisters { link: 1, registers: vec![1] }),
            caused_by: Some(48),
            by_event: true,
            place: LogPlace::default(),
        })),
        Body::Fact(Fact::Sxid(Sxid {
            switch: "nvidia-nvswitch0".into(),
            address: PciAddress { domain: 0, bus: 1, device: 0 },
            code: 20034,
            fatal: Some(true),
            link: Some(1),
            place: LogPlace::default(),
        })),
        Body::Fact(Fact::KernelReport(KernelReport {
            class: KernelClass::OutOfMemory,
            subject: Some("sda".into()),
            pid: Some(pid),
            process: Some("python".into()),
            cgroup: Some("/job".into()),
            place: LogPlace::default(),
        })),
        Body::Fact(Fact::KernelLinesLeftOut { of: "nvme".into(), count: 1 }),
        Body::Fact(Fact::KernelLogGap { records: Some(1) }),
        Body::Fact(Fact::Observed(Observation {
            values: [("values".to_owned(), "400".to_owned())].into(), // names are free
            ..Observation::default()
        })),
        Body::Fact(Fact::GpuDriverSilent { since: Mono(1) }),
        Body::Fact(Fact::GpuDriverAnswered { after: Span(1) }),
        Body::Fact(Fact::Progress { attempt, step: 1, loss: Some(1.0), saving: Span::default(), saves: 0 }),
        Body::Decision(Decision {
            incident: Incident(1),
            action: Action::Stop { exit: 1 },
            after: Span(1),
            rule: Rule::Restart,
            why: String::new(),
            by: DecidedBy::Launcher,
            agent_evidence: true,
        }),
        Body::Finding(Finding {
            finding: 1,
            attempt,
            what: FindingKind::SilentCorruption,
            over: true,
            headline: String::new(),
            domain: FaultDomain::Hardware,
            confidence: 0.9,
            ranks: vec![rank],
            device: Some("GPU 0".into()),
            host: Some("a".into()),
            stage: Some(1),
            since_step: 1,
            step: 2,
            cost_percent: Some(1.0),
            evidence: vec![String::new()],
            last_agreed_step: Some(1),
            doubtful_steps: vec![2],
        }),
        Body::Outcome(Outcome {
            incident: Incident(1),
            attempt,
            step: 1,
            reached_before: 1,
            steps_lost: 0,
            counted: true,
            to_ranks_started: Span(1),
            to_ranks_connected: Some(Span(1)),
            to_first_step: Span(1),
        }),
    ]
}

fn keys(value: &serde_json::Value, into: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            into.insert(key.clone());
            keys(value, into);
        }),
        serde_json::Value::Array(items) => items.iter().for_each(|item| keys(item, into)),
        _ => {}
    }
}

#[test]
fn every_field_that_is_written_is_described() {
    let mut fields = BTreeSet::new();
    for body in entries() {
        let (job, boot) = (Some(JobId("job".into())), BootId("boot".into()));
        let entry = Entry { seq: 1, at: Stamp::default(), boot, job, origin_seq: Some(1), body };
        keys(&serde_json::to_value(&entry).unwrap(), &mut fields);
    }
    // `type` is the tag inside `cause` and `action`, which the document leaves to the API's page.
    fields.remove("type");
    let missing: Vec<&String> = fields.iter().filter(|field| !DOCUMENT.contains(field.as_str())).collect();
    assert!(missing.is_empty(), "docs/reference/journal.md lacks {missing:?}");
}

#[test]
fn every_fact_is_described() {
    let facts = SOURCE.split("pub enum Fact {").nth(1).unwrap().split("\n}\n").next().unwrap();
    // The name in the journal is that of the type, unless an attribute above it keeps an older one.
    let before = std::iter::once("").chain(facts.lines());
    let names = facts.lines().zip(before).filter_map(|(line, before)| {
        let name = line.strip_prefix("    ")?.split([' ', '(', ',']).next()?;
        let kept =
            before.trim().strip_prefix("#[serde(rename = \"").and_then(|kept| kept.strip_suffix("\")]"));
        let is_fact = name.starts_with(|first: char| first.is_ascii_uppercase());
        is_fact.then(|| kept.map_or_else(|| snake_case(name), str::to_owned))
    });
    let names: Vec<String> = names.collect();
    assert!(names.contains(&"job_ended".to_owned()), "the source was not understood: {names:?}");
    let missing: Vec<&String> =
        names.iter().filter(|name| !DOCUMENT.contains(&format!("| `{name}` |"))).collect();
    assert!(missing.is_empty(), "docs/reference/journal.md lacks the facts {missing:?}");
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}
