//! What people on call look at, after a scripted day: a real Prometheus that scrapes the agents of two hosts answers
//! the ten questions of `docs/howto/prometheus.md`, every query of every rule in `deploy/prometheus`, and every panel of
//! the dashboards in `deploy/grafana`.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{Agent, Job, Stage, has_client, is_root, mainstay, processes, skipped};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::cluster::Cluster;

/// Ranks that meet by the clock in each step, one of them with more work, and save every twentieth step.
const PRETRAIN: &str = r#"
import mainstay
PERIOD = 0.15
step = (mainstay.checkpoint.load() or {"step": 0})["step"]
while not os.path.exists(MARKS + "/end"):
    step += 1
    ends = (time.monotonic() // PERIOD + 1) * PERIOD
    with mainstay.section("forward"):
        time.sleep(0.08 if RANK == 1 else 0.03)
    with mainstay.section("allreduce"):
        time.sleep(max(0.0, ends - time.monotonic()))
    mainstay.step(step)
    if step % 20 == 0:
        mainstay.checkpoint.save(step, {"step": step, "bytes": bytes(1 << 20)})
    if step % 20 == 5:
        mark(f"step.{ATTEMPT}.{RANK}", step)
"#;

/// A program with an error, which its user has to fix.
const FINETUNE: &str = r#"
import mainstay
mainstay.step(1)
mainstay.step(2)
wait_for("raise")
raise ValueError("a label is out of range")
"#;

/// Who started the jobs.
const USER: &str = "ada";

/// The selectors of panels that have no data on this day, by their metric, and why.
const NO_DATA: &[(&str, &str)] = &[];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A Prometheus with the rules of the repository.
struct Prometheus {
    program: Child,
    port: u16,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It has ended if it cannot be killed.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

impl Prometheus {
    fn start(dir: &Path, targets: &[String]) -> Option<Prometheus> {
        let rules = repository().join("deploy/prometheus");
        let config = json!({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [rules.join("alerts.rules.yml"), rules.join("recording.rules.yml")],
            "scrape_configs": [{"job_name": "mainstay", "static_configs": [{"targets": targets}]}],
        });
        // JSON is YAML.
        fs::write(dir.join("prometheus.yml"), config.to_string()).unwrap();
        let port = testing::free_port();
        let mut prometheus = Command::new("prometheus");
        prometheus
            .arg(format!("--config.file={}", dir.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("prometheus.log")).unwrap());
        match prometheus.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                skipped("there is no prometheus (apt-get install prometheus)");
                None
            }
            started => Some(Prometheus { program: started.unwrap(), port }),
        }
    }

    /// The answer of its API; none while it is not ready.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(!head.contains(" 400 "), "{path}: {body}");
        let answer: Value = serde_json::from_str(body).ok()?;
        (answer["status"] == "success").then(|| answer["data"].clone())
    }

    /// The series that a query finds now.
    fn series(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let data = self.get(&format!("/api/v1/query?query={encoded}")).unwrap_or_default();
        data["result"].as_array().cloned().unwrap_or_default()
    }

    /// The series that a query finds, once it finds some.
    fn found(&self, query: &str) -> Vec<Value> {
        let series = RefCell::new(Vec::new());
        processes::wait_until(query, || {
            series.replace(self.series(query));
            !series.borrow().is_empty()
        });
        series.into_inner()
    }
}

/// Two hosts with agents, a Prometheus, and the jobs of the day.
struct Day {
    cluster: Cluster,
    agents: Vec<Agent>,
    prometheus: Prometheus,
    pretrain: Vec<Job>,
    finetune: String,
}

/// A kernel log of the stage's own, and two GPUs.
fn devices(stage: &Stage) -> Vec<String> {
    let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
    let library = stage.tmpfs().join(fake_devices::LIBRARY);
    fs::copy(built, &library).unwrap();
    fs::write(stage.work().join("kmsg"), "").unwrap();
    let gpu =
        |number: u32| json!({"uuid": format!("GPU-{number}"), "pci": format!("00000000:0{number}:00.0")});
    let script = json!({"driver": "550.54.15", "gpus": [gpu(1), gpu(2)]});
    fs::write(stage.tmpfs().join(fake_devices::SCRIPT), script.to_string()).unwrap();
    vec![
        format!("MAINSTAY_AGENT_GPU_LIBRARY={}", library.display()),
        "MAINSTAY_AGENT_GPU_INTERVAL=1s".to_owned(),
        format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", stage.work().join("kmsg").display()),
    ]
}

/// The kernel reports that the second GPU is lost.
fn lose_a_gpu(stage: &Stage, agent: &Agent) {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
    let microseconds = now.tv_sec() * 1_000_000 + now.tv_nsec() / 1_000;
    let printed =
        "NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
    fs::write(stage.work().join("kmsg"), format!("4,1,{microseconds},-;{printed}\n")).unwrap();
    agent.wait_for("the XID", |entry| matches!(&entry.body, Body::Fact(Fact::Xid(_))).then_some(()));
}

/// Agents that keep replicas for each other and serve HTTP: they, and where.
fn agents(cluster: &Cluster) -> (Vec<Agent>, Vec<String>) {
    let peers = [0; 2].map(|_| format!("127.0.0.1:{}", testing::free_port()));
    let served = [0; 2].map(|_| format!("127.0.0.1:{}", testing::free_port()));
    let start = |host: usize| {
        let stage = cluster.stage(host);
        let token = stage.work().join("token");
        fs::write(&token, "the same on both hosts").unwrap();
        fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let mut line = vec!["env".to_owned()];
        line.extend(devices(stage));
        line.extend([
            format!("MAINSTAY_AGENT_HTTP={}", served[host]),
            format!("MAINSTAY_AGENT_CHECKPOINT_LISTEN={}", peers[host]),
            format!("MAINSTAY_AGENT_CHECKPOINT_PEERS={}", peers.join(",")),
            format!("MAINSTAY_AGENT_CHECKPOINT_TOKEN_FILE={}", token.display()),
            format!("MAINSTAY_AGENT_CHECKPOINT_STORE={}", stage.tmpfs().join("replicas").display()),
            mainstay().display().to_string(),
        ]);
        Agent::start_under(&line, stage)
    };
    ((0..2).map(start).collect(), served.to_vec())
}

impl Day {
    /// A program with an error ends, a rank of a job of two hosts is killed while another rank is slow, and a GPU is lost.
    fn passed() -> Option<Day> {
        let cluster = Cluster::new(2).sharing_nothing();
        let (agents, served) = agents(&cluster);
        let prometheus = Prometheus::start(&cluster.stage(0).work(), &served)?;
        prometheus.found("count(up == 1) == 2");
        let plan = |host: usize| {
            let options = format!("--nnodes 2 --node-rank {host} --nproc-per-node 2");
            cluster.plan(host, PRETRAIN, &options, &[("USER", USER)]).with(&agents[host]).start()
        };
        let mut pretrain = vec![plan(1), plan(0)];
        pretrain.reverse();
        // Scripts of one stage are one file.
        let alone = Stage::new();
        let single = alone
            .python(FINETUNE)
            .options("--max-restarts 0")
            .variable("USER", USER)
            .with(&agents[0])
            .start();
        // `increase()` needs two samples from before a failure.
        for job in [pretrain[0].id(), single.id()] {
            let counter = format!("mainstay_job_failures_total{{training_job=\"{job}\"}}");
            prometheus.found(&format!("count_over_time({counter}[10m]) > 1"));
        }
        alone.mark("raise");
        let finetune = single.id().to_owned();
        single.end().assert_status(1);
        pretrain[1].mark("step.0.3");
        // Saved, copied and compared.
        let job = format!("training_job=\"{}\"", pretrain[0].id());
        prometheus.found("mainstay_checkpoint_step{tier=\"peer\"}");
        prometheus.found(&format!("mainstay_job_save_stall_seconds_count{{{job}}} > 2"));
        prometheus.found(&format!("mainstay_job_finding{{{job}, what=\"slow_rank\"}}"));
        pretrain[1].kill_rank(0, 3);
        pretrain[1].mark("step.1.3");
        lose_a_gpu(cluster.stage(1), &agents[1]);
        prometheus.found(&format!("mainstay_job_restart_seconds_count{{{job}}} == 1"));
        prometheus.found(&format!("mainstay_job_time_seconds_total{{{job}, state=\"lost_work\"}} > 0"));
        prometheus.found("mainstay_node_state{state=\"UNHEALTHY\"} == 1");
        // All ranks were compared again.
        prometheus.found(&format!("mainstay_rank_self_time_ratio{{{job}}} > 1.1"));
        prometheus.found(&format!("mainstay_job_finding{{{job}}}"));
        Some(Day { cluster, agents, prometheus, pretrain, finetune })
    }

    fn ends(self) {
        (0..2).for_each(|host| self.cluster.stage(host).mark("end"));
        for end in self.cluster.ends(self.pretrain) {
            end.assert_status(0);
        }
        for agent in self.agents {
            agent.stop();
        }
    }
}

/// The blocks in PromQL of a page, each with the heading before it.
fn queries(page: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(page).unwrap();
    let (mut heading, mut open, mut found) = (String::new(), None::<String>, Vec::new());
    for line in text.lines() {
        match &mut open {
            None if line == "```promql" => open = Some(String::new()),
            None => {
                if line.starts_with('#') {
                    line.trim_start_matches(['#', ' ']).clone_into(&mut heading);
                }
            }
            Some(query) if line == "```" => {
                found.push((heading.clone(), std::mem::take(query)));
                open = None;
            }
            Some(query) => query.extend([line, "\n"]),
        }
    }
    found
}

fn label<'a>(series: &'a Value, name: &str) -> &'a str {
    series["metric"][name].as_str().unwrap_or_default()
}

fn value(series: &Value) -> f64 {
    series["value"][1].as_str().unwrap().parse().unwrap()
}

fn answers_the_questions(day: &Day) {
    let asked = queries(&repository().join("docs/howto/prometheus.md"));
    let ask = |number: usize| -> Vec<Value> {
        let (_, query) = asked
            .iter()
            .find(|(heading, _)| heading.starts_with(&format!("{number}. ")))
            .unwrap_or_else(|| panic!("no question {number} in {asked:#?}"));
        day.prometheus.found(query)
    };
    let (pretrain, finetune) = (day.pretrain[0].id(), day.finetune.as_str());
    let of = |series: &[Value], job: &str| -> Vec<Value> {
        series.iter().filter(|one| label(one, "training_job") == job).cloned().collect()
    };
    let bad_host = day.cluster.host_name(1);

    let restarts = ask(1);
    assert_eq!(of(&restarts, pretrain).len(), restarts.len(), "{restarts:#?}");
    let why = ask(2);
    let causes = |job| -> Vec<(String, String)> {
        let of_job = of(&why, job);
        of_job.iter().map(|one| (label(one, "cause").to_owned(), label(one, "domain").to_owned())).collect()
    };
    assert_eq!(causes(finetune), [("exception".to_owned(), "user".to_owned())]);
    assert_eq!(causes(pretrain).len(), 1, "{why:#?}");
    assert_eq!(causes(pretrain)[0].0, "signal");
    let goodput = of(&ask(3), pretrain);
    assert!((0.05..1.0).contains(&value(&goodput[0])), "{goodput:#?}");
    let cost = of(&ask(4), pretrain);
    assert!(label(&cost[0], "cause") == "signal" && value(&cost[0]) > 0.1, "{cost:#?}");
    let slow = ask(5);
    assert!(slow.iter().all(|one| label(one, "rank") == "1"), "{slow:#?}");
    let gpus = ask(6);
    assert!(gpus.iter().all(|one| label(one, "component").contains("02:00")), "{gpus:#?}");
    let ages = ask(7);
    assert!(ages.iter().all(|one| !label(one, "run").is_empty() && value(one) < 600.0), "{ages:#?}");
    assert_eq!(value(&of(&ask(8), pretrain)[0]), 0.0);
    let bad = ask(9);
    assert!(bad.iter().any(|one| label(one, "host") == bad_host), "{bad:#?}");
    let page = ask(10);
    for job in [pretrain, finetune] {
        assert_eq!(label(&of(&page, job)[0], "user"), USER, "{page:#?}");
    }
}

/// Each rule has run without an error, and what it compares has data.
fn rules_have_data(prometheus: &Prometheus) {
    let groups = prometheus.get("/api/v1/rules").unwrap();
    let rules: Vec<Value> = groups["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|of| of["rules"].as_array().unwrap().clone())
        .collect();
    assert!(rules.len() > 10, "{rules:#?}");
    for rule in &rules {
        assert_eq!(
            (&rule["health"], rule["lastError"].as_str().unwrap_or_default()),
            (&json!("ok"), ""),
            "{rule:#}"
        );
        let query = rule["query"].as_str().unwrap();
        // An alert compares with a number, as its last part.
        let compared = [" == ", " > ", " < "].iter().filter_map(|of| query.rsplit_once(of)).next();
        let inner =
            compared.filter(|(_, limit)| limit.parse::<f64>().is_ok()).map_or(query, |(inner, _)| inner);
        assert!(!prometheus.series(inner).is_empty(), "no data for {query}");
    }
}

/// Every panel has data in each of its queries, for each value of its variable that this day has.
fn panels_have_data(day: &Day) {
    let mut empty = Vec::new();
    for name in ["fleet", "job", "host"] {
        let file = repository().join(format!("deploy/grafana/{name}.json"));
        let dashboard: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        for variable in dashboard["templating"]["list"].as_array().unwrap() {
            let Some(inner) = variable["query"].as_str().unwrap().strip_prefix("label_values(") else {
                continue;
            };
            let (metric, of) = inner.trim_end_matches(')').split_once(", ").unwrap();
            assert!(!label(&day.prometheus.found(metric)[0], of).is_empty(), "{variable}");
        }
        let instance =
            label(&day.prometheus.found("mainstay_node_state{state=\"UNHEALTHY\"} == 1")[0], "instance")
                .to_owned();
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let query = target["expr"].as_str().unwrap();
                let asked = query
                    .replace("$__range", "10m")
                    .replace("$__rate_interval", "10s")
                    .replace("$training_job", day.pretrain[0].id())
                    .replace("$instance", &instance);
                assert!(!asked.contains('$'), "{asked}");
                let is_listed = NO_DATA.iter().any(|(metric, _)| query.contains(metric));
                if day.prometheus.series(&asked).is_empty() != is_listed {
                    empty.push(format!("{name}: {}: {asked}", panel["title"]));
                }
            }
        }
    }
    assert!(
        empty.is_empty(),
        "panels that have no data, or have some and are listed as having none: {empty:#?}"
    );
}

/// The other blocks of the pages are queries too; they may find nothing.
fn pages_have_valid_queries(prometheus: &Prometheus) {
    let runbooks = fs::read_dir(repository().join("docs/runbooks")).unwrap();
    let pages =
        runbooks.map(|page| page.unwrap().path()).chain([repository().join("docs/howto/prometheus.md")]);
    let found: Vec<(String, String)> = pages.flat_map(|page| queries(&page)).collect();
    assert!(found.len() > 10, "{found:#?}");
    for (_, query) in found {
        // A query that is not valid is answered with 400.
        prometheus.series(&query);
    }
}

#[test]
fn after_a_day_prometheus_answers_the_ten_questions_and_has_data_for_all_rules_and_panels() {
    if !has_client() {
        return;
    }
    if !is_root() {
        return skipped("hosts have their own names only where the tests run as root");
    }
    let Some(day) = Day::passed() else { return };
    answers_the_questions(&day);
    rules_have_data(&day.prometheus);
    panels_have_data(&day);
    pages_have_valid_queries(&day.prometheus);
    day.ends();
}
