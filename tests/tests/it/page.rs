//! The page and the JSON of an agent with a real job: in a real browser, and by its OpenAPI description.

use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_model::entry::Fact;
use mainstay_tests::{Agent, Job, Stage, has_client, mainstay, skipped};
use serde_json::Value;

/// A Python with Playwright, axe and Schemathesis: `MAINSTAY_TEST_BROWSER`, which `cargo xtask test` provides.
fn tools() -> Option<PathBuf> {
    let python = std::env::var_os("MAINSTAY_TEST_BROWSER").map(PathBuf::from);
    if python.is_none() {
        skipped("MAINSTAY_TEST_BROWSER names no Python with Playwright; `cargo xtask test` provides it");
    }
    python.filter(|_| has_client())
}

/// Ranks that train on until the test ends, and again after rank 1 was killed.
const TRAINING: &str = r#"
import itertools, mainstay
for step in itertools.count():
    mainstay.step(step)
    if step == 10 and ATTEMPT == 0 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 12:
        mark(f"up.{ATTEMPT}.{RANK}")
    if os.path.exists(f"{MARKS}/end"):
        break
    time.sleep(0.05)
"#;

/// An agent that serves HTTP, and a job that trains again after its rank 1 was killed.
fn served(stage: &Stage) -> (Agent, Job, String) {
    let address = format!("127.0.0.1:{}", testing::free_port());
    let program = mainstay().display().to_string();
    let line = [
        "sh",
        "-c",
        &format!(r#"MAINSTAY_AGENT_JOB_TEXTS=everyone exec "$0" "$@" --http {address}"#),
        &program,
    ];
    let agent = Agent::start_under(&line.map(str::to_owned), stage);
    let job = stage.python(TRAINING).ranks(2).with(&agent).start();
    job.mark("up.1.0");
    job.mark("up.1.1");
    agent.wait_for_fact(
        job.id(),
        "the restart's first step",
        |fact| matches!(fact, Fact::RanksStepping { attempt, .. } if attempt.0 == 1),
    );
    (agent, job, format!("http://{address}"))
}

/// What a reader of the page sees; none if there is no browser.
fn read(python: &Path, url: &str, kind: &str) -> Option<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/page_in_browser.py");
    let output = Command::new(python).arg(script).args([url, kind]).output().unwrap();
    let (printed, failed) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let seen: Value =
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}{failed}"));
    if seen.get("missing").is_some() {
        skipped("no Chromium is installed: apt-get install chromium");
        return None;
    }
    assert_eq!(
        (&seen["errors"], &seen["violations"]),
        (&Value::Array(vec![]), &Value::Array(vec![])),
        "{seen:#}"
    );
    let requests = seen["requests"].as_array().unwrap();
    assert!(
        requests.iter().all(|of| of.as_str().is_some_and(|of| of.starts_with(url) || of == "data:,")),
        "{seen:#}"
    );
    let bytes = seen["bytes"].as_u64().unwrap();
    assert!((1000..=150_000).contains(&bytes), "{bytes}");
    Some(seen)
}

fn shows(seen: &Value, part: &str, what: &str) -> bool {
    seen[part].as_str().is_some_and(|text| text.contains(what))
}

#[test]
fn the_page_shows_a_job_that_runs_and_a_report_the_same_job_without_a_server() {
    let Some(python) = tools() else { return };
    let stage = Stage::new();
    let (agent, job, url) = served(&stage);
    if let Some(seen) = read(&python, &format!("{url}/"), "live") {
        assert!(shows(&seen, "jobs", job.id()) && shows(&seen, "ranks", "connected"), "{seen:#}");
        assert!(shows(&seen, "incidents", "SIGKILL") && shows(&seen, "components", "host.cpu"), "{seen:#}");
        assert!(shows(&seen, "bars", "training") && shows(&seen, "causes", "SIGKILL"), "{seen:#}");
        assert_eq!(seen["map"], true);
        let requests: Vec<&str> =
            seen["requests"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(requests.iter().any(|of| of.contains("/v1/stream")), "{seen:#}");
        assert!(!requests.iter().any(|of| of.contains("/v1/jobs")), "the page does not poll: {seen:#}");
    }
    stage.mark("end");
    let run_dir = job.run_dir();
    job.end().assert_status(0);
    agent.stop();
    let file = stage.work().join("report.html");
    let mut report = Command::new(mainstay());
    let written = report.arg("report").arg(&run_dir).arg("--html").arg(&file).output().unwrap();
    assert!(written.status.success(), "{written:?}");
    if let Some(seen) = read(&python, &format!("file://{}", file.display()), "still") {
        assert!(shows(&seen, "incidents", "SIGKILL") && shows(&seen, "bars", "training"), "{seen:#}");
        assert_eq!(seen["map"], false);
    }
}

#[test]
fn the_page_of_a_launcher_shows_its_job_without_the_texts_of_the_program() {
    let Some(python) = tools() else { return };
    let stage = Stage::new();
    let address = format!("127.0.0.1:{}", testing::free_port());
    let job = stage.python(TRAINING).ranks(2).options(&format!("--http {address}")).start();
    job.mark("up.1.0");
    job.mark("up.1.1");
    job.wait_for_fact(
        "the restart's first step",
        |fact| matches!(fact, Fact::RanksStepping { attempt, .. } if attempt.0 == 1),
    );
    if let Some(seen) = read(&python, &format!("http://{address}/"), "withheld") {
        assert!(shows(&seen, "jobs", job.id()) && shows(&seen, "ranks", "connected"), "{seen:#}");
        assert!(shows(&seen, "facts", "withheld") && !shows(&seen, "incidents", "SIGKILL"), "{seen:#}");
        assert_eq!(seen["map"], true);
    }
    stage.mark("end");
    job.end().assert_status(0);
}

#[test]
fn the_answers_are_as_the_openapi_file_describes_them() {
    let Some(python) = tools() else { return };
    let stage = Stage::new();
    let (agent, job, url) = served(&stage);
    let description = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/openapi.yaml");
    let program = python.with_file_name("schemathesis");
    let mut check = Command::new(program);
    check.arg("run").arg(description).args([
        "--url",
        &url,
        "--max-examples",
        "25",
        "--seed",
        "1",
        "--no-color",
    ]);
    // Requests for the job and the failure that exist.
    check.current_dir(stage.work());
    let config = format!(
        "[[operations]]\ninclude-path = \"/v1/jobs/{{job}}\"\nparameters = {{ job = {id:?} }}\n\n[[operations]]\n\
         include-path = \"/v1/incidents/{{job}}/{{incident}}\"\nparameters = {{ job = {id:?} }}\n",
        id = job.id()
    );
    std::fs::write(stage.work().join("schemathesis.toml"), config).unwrap();
    let checked = check.output().unwrap();
    let printed = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{printed}{}", String::from_utf8_lossy(&checked.stderr));
    stage.mark("end");
    job.end().assert_status(0);
    agent.stop();
}
