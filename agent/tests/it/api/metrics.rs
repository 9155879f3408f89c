//! The metrics page: checked with a strict parser of the text format, and against its documentation.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_api::metrics::{Kind, METRICS};
use mainstay_checkpoint::advice::Advised;
use mainstay_checkpoint::copied_step::{self, CopiedStep};
use mainstay_hang::{Hang, HangKind};
use mainstay_health::hardware::gpu::{GpuIdentity, GpuReading, GpuView, Sampled};
use mainstay_health::hardware::tpu::metric;
use mainstay_model::entry::{Body, Fact, JobOwner, JobSpec};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::health::{Component, Gauge, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, Incident, JobId, Rank};
use mainstay_model::observation::{HostsEvent, LEADS_HERE};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, FaultDomain, Rule, Verdict};
use mainstay_view::node::BeatView;

use super::checkpoints;
use super::events::verdict;
use super::http::{get, get_as};
use super::server::{SECOND, Server, component};

/// The job of these tests.
pub const JOB: &str = "de\"mo\n";

#[derive(Debug, PartialEq)]
pub struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

#[derive(Debug, Default)]
pub struct Page {
    types: BTreeMap<String, String>,
    helps: BTreeMap<String, String>,
    samples: Vec<Sample>,
}

impl Page {
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut wanted: BTreeMap<String, String> =
            labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect();
        // A job's series have its name in both labels.
        wanted.extend(wanted.get("training_job").map(|job| ("job".to_owned(), job.clone())));
        self.samples.iter().find(|of| of.name == name && of.labels == wanted).map(|of| of.value)
    }
}

/// Parses the text exposition format and panics at anything that it does not allow.
fn parse(text: &str) -> Page {
    assert!(text.ends_with('\n'), "the last line must end");
    let mut page = Page::default();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind), "{line}");
            assert!(page.types.insert(name.to_owned(), kind.to_owned()).is_none(), "two types: {line}");
            assert!(!page.samples.iter().any(|of| of.name == name), "samples before their type: {line}");
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(page.helps.insert(name.to_owned(), help.to_owned()).is_none(), "two helps: {line}");
        } else {
            assert!(!line.starts_with('#'), "{line}");
            let sample = parse_sample(line);
            let same = |of: &Sample| of.name == sample.name && of.labels == sample.labels;
            assert!(!page.samples.iter().any(same), "the same series twice: {line}");
            page.samples.push(sample);
        }
    }
    page
}

fn parse_sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    let letters = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    assert!(!name.is_empty() && name.chars().all(letters) && !name.starts_with(|c: char| c.is_ascii_digit()));
    let mut labels = BTreeMap::new();
    if let Some(mut inner) = rest.strip_prefix('{') {
        while !inner.starts_with('}') {
            let (label, after) = inner.split_once("=\"").unwrap();
            let (value, after) = label_value(after);
            assert!(labels.insert(label.to_owned(), value).is_none(), "label twice: {line}");
            inner = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &inner[1..];
    }
    let value = rest.strip_prefix(' ').unwrap().parse().unwrap_or_else(|_| panic!("no number: {line}"));
    Sample { name: name.to_owned(), labels, value }
}

fn label_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => match chars.next().unwrap().1 {
                'n' => value.push('\n'),
                escaped @ ('\\' | '"') => value.push(escaped),
                other => panic!("escape of {other:?}"),
            },
            other => value.push(other),
        }
    }
    panic!("a label without an end: {text}");
}

fn gpu() -> GpuView {
    let address = PciAddress { domain: 0, bus: 0x3b, device: 0 };
    let identity = GpuIdentity { address, uuid: "GPU-1".into(), name: "NVIDIA H100".into(), serial: None };
    let reading = GpuReading {
        index: 3,
        identity: Some(identity),
        ecc_volatile: Sampled::Value(2),
        ecc_corrected: Sampled::Value(3),
        temperature: Sampled::Value(61),
        power: Sampled::Value(650_500),
        pcie_replays: Sampled::Value(4),
        utilization: Sampled::Value(99),
        memory: Sampled::Value((5, 10)),
        processes: Sampled::Value(Vec::new()),
        ..GpuReading::default()
    };
    GpuView {
        address,
        state: HealthState::Healthy,
        reason: String::new(),
        action: RecommendedAction::None,
        reading: Some(reading),
        links: Some((17, 18)),
        power_limit: None,
        read_at: None,
        notes: Vec::new(),
    }
}

/// A finding that costs a quarter of each step.
fn slow_rank() -> Finding {
    Finding {
        finding: 1,
        attempt: Attempt(0),
        what: FindingKind::SlowRank,
        over: false,
        headline: "rank 1 is 30 % slower than its peers".into(),
        domain: FaultDomain::Hardware,
        confidence: 0.9,
        ranks: vec![Rank(1)],
        device: None,
        host: None,
        stage: None,
        since_step: 8,
        step: 12,
        cost_percent: Some(25.0),
        evidence: Vec::new(),
        last_agreed_step: None,
        doubtful_steps: Vec::new(),
    }
}

const ADVISED: Advised = Advised {
    every: 170.0,
    was: 7200.0,
    stall: 1.0,
    between_failures: 14_400.0,
    restore: 30.0,
    cost: 0.0125,
    cost_was: 0.25,
};

const COPIED: CopiedStep = CopiedStep { attempt: 0, step: 11 };

/// The job is stopped after its first failure.
pub fn stop() -> Body {
    Body::Decision(Decision {
        incident: Incident(1),
        action: Action::Stop { exit: 1 },
        after: Span(0),
        rule: Rule::Recurred,
        why: "it would fail again".into(),
        by: DecidedBy::Launcher,
        agent_evidence: false,
    })
}

/// A server with one of everything.
pub async fn scraped(dir: &std::path::Path) -> (Server, Page) {
    let mut server = Server::with_checkpoints(dir, checkpoints::knowing_one_step(dir)).await;
    server.health("host.cpu", HealthState::Healthy);
    server.health("host.disk", HealthState::Degraded);
    let readings = [metric::DUTY_CYCLE, metric::HBM_USED, metric::HBM_TOTAL, metric::HBM_BANDWIDTH];
    let gauges = readings.iter().map(|metric| Gauge { metric, value: 12.5 }).collect();
    server.snapshots.set_component(Component { gauges, ..component("tpu.0", HealthState::Healthy) });
    server.snapshots.set_gpus(vec![gpu()]);
    server.job(JOB);
    server.record(95, Some(JOB), verdict(1, "rank 3 raised ValueError: first"));
    server.record(95, Some(JOB), stop());
    server.record(96, Some(JOB), Body::Finding(slow_rank()));
    server.record(96, Some(JOB), Body::Fact(ADVISED.fact()));
    server.record(96, Some(JOB), Body::Fact(COPIED.fact()));
    let job = JobId(JOB.into());
    for (second, step) in [(97, 8), (99, 12)] {
        for rank in [Rank(0), Rank(1)] {
            let pace = mainstay_progress::monitor::Pace {
                self_time: Some(mainstay_model::time::Span::millis(80)),
                against_peers: Some(1.25),
                wait_share: Some(0.2),
            };
            let beat = BeatView { step: Some(step), at: Mono(second * SECOND), pace, ..BeatView::default() };
            server.snapshots.sample(&job, Attempt(0), rank, beat);
        }
        server.at(second);
        server.snapshots.publish();
        // A task of the server computes the pace: it is done when the rate, or its first half, is available.
        settle(&server, step).await;
    }
    server.at(100);
    let (status, text) = get(&server, "/metrics").await;
    assert_eq!(status, 200);
    (server, parse(&text))
}

async fn settle(server: &Server, step: u64) {
    loop {
        let page = parse(&get(server, "/metrics").await.1);
        let stepped = page.samples.iter().any(|of| of.name == "mainstay_job_step" && of.value == step as f64);
        let paced = page.samples.iter().any(|of| of.name == "mainstay_job_steps_per_second");
        if stepped && (step == 8 || paced) {
            return;
        }
    }
}

#[tokio::test]
async fn a_scrape_has_node_job_ranks_and_process() {
    let dir = testing::tempdir().unwrap();
    let (server, page) = scraped(dir.path()).await;
    let job = ("training_job", JOB);
    assert_eq!(page.value("mainstay_node_state", &[("state", "DEGRADED")]), Some(1.0));
    assert_eq!(page.value("mainstay_node_state", &[("state", "HEALTHY")]), Some(0.0));
    let disk = [("component", "host.disk"), ("state", "DEGRADED")];
    assert_eq!(page.value("mainstay_component_state", &disk), Some(1.0));
    let age = page.value("mainstay_component_read_age_seconds", &[("component", "host.disk")]);
    assert_eq!(age, Some(10.0));
    assert_eq!(page.value("mainstay_job_phase", &[job, ("phase", "RUNNING")]), Some(1.0));
    assert_eq!(page.value("mainstay_job_step", &[job]), Some(12.0));
    assert_eq!(page.value("mainstay_job_restarts_total", &[job]), Some(0.0));
    assert_eq!(page.value("mainstay_rank_heartbeat_age_seconds", &[job, ("rank", "1")]), Some(1.0));
    assert_eq!(page.value("mainstay_rank_self_time_seconds", &[job, ("rank", "1")]), Some(0.08));
    assert_eq!(page.value("mainstay_rank_self_time_ratio", &[job, ("rank", "1")]), Some(1.25));
    assert_eq!(page.value("mainstay_rank_wait_ratio", &[job, ("rank", "1")]), Some(0.2));
    let finding = [job, ("what", "slow_rank"), ("number", "1")];
    assert_eq!(page.value("mainstay_job_finding", &finding), Some(1.0));
    assert_eq!(page.value("mainstay_job_finding_cost_ratio", &finding), Some(0.25));
    let failures = [("cause", "exit_code"), ("domain", "user"), job];
    assert_eq!(page.value("mainstay_job_failures_total", &failures), Some(1.0));
    assert_eq!(page.value("mainstay_job_hang", &[job]), Some(0.0));
    let interval = page.value("mainstay_job_save_interval_seconds", &[job, ("tier", "memory")]);
    assert_eq!(interval, Some(170.0));
    let cost = |of| page.value("mainstay_job_save_cost_ratio", &[job, ("interval", of)]);
    assert_eq!((cost("advised"), cost("present")), (Some(0.0125), Some(0.25)));
    let tier = [("run", checkpoints::RUN), ("tier", "disk"), ("uid", "")];
    assert_eq!(page.value("mainstay_checkpoint_step", &tier), Some(checkpoints::STEP as f64));
    let age = (100 - checkpoints::SEALED_AT) as f64;
    assert_eq!(page.value("mainstay_checkpoint_age_seconds", &tier), Some(age));
    assert_eq!(page.value("mainstay_journal_newest_cursor", &[]), Some(10.0));
    assert_eq!(page.value("mainstay_journal_writable", &[]), Some(1.0));
    let gpu = [
        ("Hostname", "node-17"),
        ("UUID", "GPU-1"),
        ("gpu", "3"),
        ("pci_bus_id", "00000000:3B:00.0"),
        ("uuid", "GPU-1"),
    ];
    assert_eq!(page.value("mainstay_gpu_power_watts", &gpu), Some(650.5));
    assert_eq!(page.value("mainstay_gpu_nvlinks_up", &gpu), Some(17.0));
    assert_eq!(page.value("mainstay_gpu_utilization_ratio", &gpu), Some(0.99));
    let errors = [&gpu[..], &[("kind", "uncorrected")]].concat();
    assert_eq!(page.value("mainstay_gpu_ecc_errors", &errors), Some(2.0));
    assert!(page.value("process_resident_memory_bytes", &[]).unwrap() > 1e6);
    server.stop().await;
}

#[tokio::test]
async fn a_hang_is_visible_until_it_passes() {
    let dir = testing::tempdir().unwrap();
    let (mut server, _) = scraped(dir.path()).await;
    let hang = Hang {
        kind: HangKind::Stopped,
        culprits: vec![Rank(1)],
        hosts: Vec::new(),
        victims: vec![Rank(0)],
        since: Mono(1),
        confirmed: Mono(2),
        phase: "step".into(),
        limit: Span::seconds(1),
        step: Some(12),
        confidence: 0.95,
        evidence: Vec::new(),
    };
    let hung = Fact::RanksHung { attempt: Attempt(0), hang: Box::new(hang), acts: false };
    let mut after = async |fact| {
        server.fact(100, JOB, fact);
        parse(&get(&server, "/metrics").await.1).value("mainstay_job_hang", &[("training_job", JOB)])
    };
    assert_eq!(after(hung).await, Some(1.0));
    let passed = Fact::HangPassed { attempt: Attempt(0), after: Span::seconds(1) };
    assert_eq!(after(passed).await, Some(0.0));
    server.stop().await;
}

#[tokio::test]
async fn a_job_that_is_over_leaves_no_heartbeat_to_alert_on() {
    let dir = testing::tempdir().unwrap();
    let (mut server, _) = scraped(dir.path()).await;
    server.fact(100, JOB, Fact::JobEnded { exit: 0, reason: "done".into() });
    let page = parse(&get(&server, "/metrics").await.1);
    let to_alert_on = ["mainstay_rank_", "mainstay_job_save_interval", "mainstay_job_save_cost"];
    assert!(!page.samples.iter().any(|of| to_alert_on.iter().any(|name| of.name.starts_with(name))));
    server.stop().await;
}

#[tokio::test]
async fn counters_begin_at_zero_with_the_job_on_the_host_that_leads() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let owner = JobOwner {
        user: "ada".into(),
        slurm_job_id: "81".into(),
        slurm_job_name: "llm".into(),
        ..JobOwner::default()
    };
    let spec = JobSpec { follows: true, uid: 1001, owner: Box::new(owner), ..JobSpec::default() };
    let job = ("training_job", JOB);
    let counters = async |server: &Server| {
        let page = parse(&get(server, "/metrics").await.1);
        let samples = page.samples.iter();
        let of_job =
            samples.filter(|of| page.types[family(&of.name)] != "gauge" && of.labels.contains_key("job"));
        let values: Vec<f64> = of_job.map(|of| of.value).collect();
        (page.value("mainstay_job_leader", &[job]), values, page)
    };
    server.fact(10, JOB, Fact::JobStarted(spec));
    let (leads, values, page) = counters(&server).await;
    assert_eq!((leads, values), (Some(0.0), vec![]));
    let whose = [
        job,
        ("user", "ada"),
        ("uid", "1001"),
        ("slurm_job_id", "81"),
        ("slurm_job_name", "llm"),
        ("slurm_partition", ""),
        ("namespace", ""),
        ("pod", ""),
    ];
    assert_eq!(page.value("mainstay_job_info", &whose), Some(1.0));
    // Of the hosts that see the leader replaced, only the new leader has it here.
    for (here, leads) in [(false, 0.0), (true, 1.0), (false, 0.0), (true, 1.0)] {
        let values = [(LEADS_HERE, here.to_string())];
        let replaced = HostsEvent::LeaderReplaced.observed(String::new(), &values);
        server.fact(11, JOB, Fact::Observed(replaced));
        assert_eq!(counters(&server).await.0, Some(leads));
    }
    let (_, values, page) = counters(&server).await;
    assert!(!values.is_empty() && values.iter().all(|value| *value == 0.0), "{values:?}");
    let failures = [("cause", "exit_code"), ("domain", "user"), job];
    assert_eq!(page.value("mainstay_job_failures_total", &failures), Some(0.0));
    server.stop().await;
}

#[tokio::test]
async fn copies_between_launchers_have_their_age() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job(JOB);
    let of_job = [("training_job", JOB)];
    let tier = [("run", JOB), ("tier", "peer"), ("uid", "0")];
    let read = async |server: &Server| {
        let page = parse(&get(server, "/metrics").await.1);
        let names = ["mainstay_checkpoint_step", "mainstay_checkpoint_age_seconds"];
        let [step, age] = names.map(|name| page.value(name, &tier));
        (step, age, page.value("mainstay_job_copies_behind", &of_job))
    };
    assert_eq!(read(&server).await, (None, None, None));
    server.fact(70, JOB, COPIED.fact());
    assert_eq!(read(&server).await, (Some(11.0), Some(30.0), Some(0.0)));
    server.fact(90, JOB, copied_step::behind("saves come faster than copies"));
    assert_eq!(read(&server).await, (Some(11.0), Some(30.0), Some(1.0)));
    server.stop().await;
}

#[tokio::test]
async fn a_large_job_has_quantiles_and_the_series_of_ranks_on_request() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job(JOB);
    server.fact(
        13,
        JOB,
        Fact::WorldChanged {
            attempt: Attempt(0),
            before: 2,
            now: 257,
            hosts: Vec::new(),
            why: "hosts joined".into(),
        },
    );
    for (rank, step) in [(0, 8), (1, 12)] {
        let beat = BeatView { step: Some(step), at: Mono(99 * SECOND), ..BeatView::default() };
        server.snapshots.sample(&JobId(JOB.into()), Attempt(0), Rank(rank), beat);
    }
    server.snapshots.publish();
    let page = parse(&get(&server, "/metrics").await.1);
    assert!(!page.samples.iter().any(|of| of.name.starts_with("mainstay_rank_")));
    let step = |quantile| {
        let labels = [("training_job", JOB), ("ranks_quantile", quantile)];
        page.value("mainstay_job_rank_step", &labels)
    };
    assert_eq!((step("0"), step("1")), (Some(8.0), Some(12.0)));
    let page = parse(&get(&server, "/metrics?ranks=all").await.1);
    let rank = [("training_job", JOB), ("rank", "1")];
    assert_eq!(page.value("mainstay_rank_step", &rank), Some(12.0));
    server.stop().await;
}

#[tokio::test]
async fn the_form_is_what_the_caller_accepts() {
    let dir = testing::tempdir().unwrap();
    let (server, text) = scraped(dir.path()).await;
    // Of Prometheus 2.42, and of others.
    let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let cases = [
        (prometheus, true),
        ("application/openmetrics-text; q=0.2, text/plain; q=0.5", false),
        ("application/openmetrics-text; q=0", false),
        ("*/*", false),
    ];
    for (accept, is_open) in cases {
        let (headers, body) = get_as(&server, "/metrics", accept).await;
        assert_eq!(headers.contains("content-type: application/openmetrics-text; version=1.0.0"), is_open);
        assert_eq!(body.ends_with("\n# EOF\n"), is_open, "{accept}");
        let Some(body) = body.strip_suffix("# EOF\n") else { continue };
        let page = parse(body);
        let names = |page: &Page| page.samples.iter().map(|of| of.name.clone()).collect::<BTreeSet<_>>();
        assert_eq!(names(&page), names(&text));
        for metric in METRICS.iter().filter(|of| of.kind == Kind::Counter) {
            let family = metric.name.strip_suffix("_total").unwrap();
            assert_eq!((&*page.types[family], &*page.helps[family]), ("counter", metric.help));
        }
    }
    server.stop().await;
}

/// The name of the metric: the samples of a histogram have further ones.
fn family(name: &str) -> &str {
    let mut parts = ["_bucket", "_count", "_sum"].iter().filter_map(|end| name.strip_suffix(end));
    let is_histogram = |name: &&str| METRICS.iter().any(|of| of.kind == Kind::Histogram && of.name == *name);
    parts.find(is_histogram).unwrap_or(name)
}

#[tokio::test]
async fn histograms_have_what_failures_and_saves_took() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job(JOB);
    let job = ("training_job", JOB);
    let read = async |server: &Server| {
        let page = parse(&get(server, "/metrics").await.1);
        let all = ["restart", "detection", "save_stall"].map(|of| {
            let value = |part: &str, labels: &[(&str, &str)]| {
                page.value(&format!("mainstay_job_{of}_seconds_{part}"), labels).unwrap()
            };
            (value("count", &[job]), value("sum", &[job]), value("bucket", &[job, ("le", "1")]))
        });
        let lost = page.value("mainstay_job_lost_seconds_total", &[job, ("cause", "exit_code")]).unwrap();
        let host = page.value("mainstay_job_failures_by_host_total", &[job, ("host", "node-17")]).unwrap();
        (all, lost, host)
    };
    let none = (0.0, 0.0, 0.0);
    assert_eq!(read(&server).await, ([none, none, none], 0.0, 0.0));
    let saving =
        Fact::Progress { attempt: Attempt(0), step: 20, loss: None, saving: Span::seconds(2), saves: 4 };
    server.fact(30, JOB, saving);
    let Body::Verdict(of) = verdict(1, "rank 3 was killed") else { unreachable!() };
    let (domain, fault_at, detected_at) = (FaultDomain::Infrastructure, Mono(40 * SECOND), Mono(45 * SECOND));
    server.record(45, Some(JOB), Body::Verdict(Verdict { domain, fault_at, detected_at, ..of }));
    let Body::Decision(of) = stop() else { unreachable!() };
    let action = Action::RestartInJob { attempt: Attempt(1) };
    server.record(46, Some(JOB), Body::Decision(Decision { action, ..of }));
    let restoring = Span::default();
    server.fact(60, JOB, Fact::RanksStepping { attempt: Attempt(1), step: 1, counted: false, restoring });
    let (all, lost, host) = read(&server).await;
    assert_eq!(all, [(1.0, 20.0, 0.0), (1.0, 5.0, 0.0), (4.0, 2.0, 4.0)]);
    assert_eq!((lost, host), (20.0, 1.0));
    server.stop().await;
}

#[tokio::test]
async fn what_is_scraped_is_what_is_declared() {
    let dir = testing::tempdir().unwrap();
    let (server, page) = scraped(dir.path()).await;
    let scraped: BTreeSet<&str> = page.samples.iter().map(|of| family(&of.name)).collect();
    let declared: BTreeSet<&str> = METRICS.iter().map(|of| of.name).collect();
    assert_eq!(scraped, declared);
    for metric in METRICS {
        assert_eq!(page.types[metric.name], metric.kind.as_str(), "{}", metric.name);
        assert_eq!(page.helps[metric.name], metric.help);
        for sample in page.samples.iter().filter(|of| family(&of.name) == metric.name) {
            let labels: Vec<&str> =
                sample.labels.keys().map(String::as_str).filter(|of| *of != "le").collect();
            assert_eq!(labels, metric.labels, "{}", metric.name);
        }
    }
    server.stop().await;
}

#[test]
fn the_documentation_lists_exactly_these_metrics() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/metrics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| `")).collect();
    let expected: Vec<String> = METRICS
        .iter()
        .map(|metric| {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (metric.name, metric.kind.as_str(), metric.help);
            format!("| `{name}` | {kind} | {} | {help} |", labels.join(", "))
        })
        .collect();
    assert_eq!(rows, expected, "docs/reference/metrics.md is to have these rows:\n{}", expected.join("\n"));
}
