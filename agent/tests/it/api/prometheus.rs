//! The metrics and the shipped rules, checked by Prometheus' own programs. Where they are not installed the tests print a
//! note and end.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use mainstay_api::metrics::METRICS;
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::Span;
use serde_json::Value;
use tokio::net::TcpStream;

use super::events::verdict;
use super::http::{get, get_from};
use super::metrics::{JOB, scraped, stop};
use super::server::Server;

/// The output of promtool; none where it is not installed.
fn promtool(command: &mut Command) -> Option<Output> {
    match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            testing::skip("there is no promtool (apt-get install prometheus)");
            None
        }
        done => Some(done.unwrap()),
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[tokio::test]
async fn promtool_finds_nothing_to_improve_in_the_metrics() {
    let dir = testing::tempdir().unwrap();
    let (server, _) = scraped(dir.path()).await;
    let (_, text) = get(&server, "/metrics").await;
    server.stop().await;
    let file = dir.path().join("page");
    fs::write(&file, text).unwrap();
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(File::open(&file).unwrap());
    let Some(checked) = promtool(&mut check) else { return };
    let found = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && found.is_empty(), "{found}");
}

#[test]
fn the_rules_fire_when_they_should() {
    let mut test = Command::new("promtool");
    test.args(["test", "rules", "rules.test.yml"]).current_dir(repository().join("deploy/prometheus"));
    let Some(tested) = promtool(&mut test) else { return };
    assert!(tested.status.success(), "{}", String::from_utf8_lossy(&[tested.stdout, tested.stderr].concat()));
}

#[test]
fn each_alert_has_its_test_its_runbook_and_metrics_that_exist() {
    let read = |path: &str| fs::read_to_string(repository().join(path)).unwrap();
    let (alerts, recording) =
        (read("deploy/prometheus/alerts.rules.yml"), read("deploy/prometheus/recording.rules.yml"));
    let tests = read("deploy/prometheus/rules.test.yml");
    let values = |text: &str, key: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim().trim_start_matches("- "));
        lines.filter_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned()).collect()
    };
    let names = values(&alerts, "alert:");
    let runbooks = values(&alerts, "runbook_url:");
    assert!(!names.is_empty());
    assert_eq!(names.len(), runbooks.len());
    for (name, url) in names.iter().zip(&runbooks) {
        let (_, page) = url.split_once("/blob/main/").unwrap();
        assert!(read(page).starts_with(&format!("# {name}\n")), "{page}");
        assert!(values(&tests, "alertname:").contains(name), "{name} has no test");
    }
    let pages = fs::read_dir(repository().join("docs/runbooks")).unwrap().count();
    assert_eq!(pages, names.len() + 1, "a runbook for each alert, and the list");
    let recorded = values(&recording, "record:");
    let known: BTreeSet<&str> =
        METRICS.iter().map(|metric| metric.name).chain(recorded.iter().map(String::as_str)).collect();
    for expression in [values(&alerts, "expr:"), values(&recording, "expr:")].concat() {
        let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
        for word in words.filter(|word| word.contains("mainstay_")) {
            assert!(known.contains(word), "{word} of {expression} does not exist");
        }
    }
}

/// A Prometheus that scrapes a server.
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
    fn start(dir: &Path, server: &Server) -> Option<Prometheus> {
        let config = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\nscrape_configs:\n  - job_name: hosts\n    \
             static_configs: [{{targets: ['{}']}}]\n",
            server.http
        );
        fs::write(dir.join("prometheus.yml"), config).unwrap();
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
                testing::skip("there is no prometheus (apt-get install prometheus)");
                None
            }
            started => Some(Prometheus { program: started.unwrap(), port }),
        }
    }

    /// The series that a query finds, once it finds some.
    async fn found(&mut self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        loop {
            assert!(self.program.try_wait().unwrap().is_none(), "Prometheus has ended");
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", self.port)).await {
                let (status, body) = get_from(stream, &format!("/api/v1/query?query={encoded}")).await;
                // It answers 503 until it is ready; an invalid query is 400.
                assert_ne!(status, 400, "{body}");
                if let Some(start) = body.find('{').filter(|_| status == 200) {
                    let body = &body[start..=body.rfind('}').unwrap()];
                    let answer: Value = serde_json::from_str(body).unwrap();
                    let series = answer["data"]["result"].as_array().unwrap();
                    if !series.is_empty() {
                        return series.clone();
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test]
async fn a_real_prometheus_adds_up_the_time_of_a_job() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let Some(mut prometheus) = Prometheus::start(dir.path(), &server) else { return server.stop().await };
    server.job(JOB);
    let report =
        Fact::Progress { attempt: Attempt(0), step: 61, loss: None, saving: Span::seconds(6), saves: 2 };
    server.fact(72, JOB, report);
    // From 10 s, when the job started, to 72 s; 2 s of that until the first step.
    let all = prometheus.found("sum by (training_job) (mainstay_job_time_seconds_total) == 62").await;
    assert_eq!(all[0]["metric"]["training_job"], JOB);
    let training = prometheus.found("mainstay_job_time_seconds_total{state=\"training\"}").await;
    assert_eq!(training[0]["value"][1], "54");
    let lost = prometheus.found("sum(mainstay_job_lost_steps_total)").await;
    assert_eq!(lost[0]["value"][1], "0");
    server.stop().await;
}

#[tokio::test]
async fn a_real_prometheus_sees_the_first_failure_of_a_job_by_its_name() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    let Some(mut prometheus) = Prometheus::start(dir.path(), &server) else { return server.stop().await };
    server.job(JOB);
    let failures = "mainstay_job_failures_total{cause=\"exit_code\",domain=\"user\"}";
    let first = prometheus.found(failures).await;
    assert_eq!(first[0]["metric"]["training_job"], JOB);
    assert_eq!(first[0]["metric"]["job"], "hosts");
    assert_eq!(first[0]["value"][1], "0");
    // `increase()` needs two samples.
    prometheus.found(&format!("count_over_time({failures}[1m]) > 1")).await;
    server.record(95, Some(JOB), verdict(1, "rank 3 raised ValueError: first"));
    server.record(95, Some(JOB), stop());
    let seen = prometheus.found(&format!("sum by (training_job) (increase({failures}[1m])) > 0")).await;
    assert_eq!(seen[0]["metric"]["training_job"], JOB);
    server.stop().await;
}
