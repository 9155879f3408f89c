//! DCGM with the real probe and a fake library.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use mainstay_health::hardware::dcgm::{DcgmReport, ExporterReport, Violation};
use mainstay_sensors::source::dcgm::{DcgmPlan, DcgmSource, scrape};
use serde_json::{Value, json};
use support::Agent;
use testing::TempDir;

/// A scripted host engine.
struct Engine {
    directory: TempDir,
    source: DcgmSource,
}

impl Engine {
    fn saying(script: &Value) -> Engine {
        Engine::with(script, Some("localhost:5555"), Duration::from_secs(60))
    }

    fn with(script: &Value, address: Option<&str>, deadline: Duration) -> Engine {
        let directory = testing::tempdir().unwrap();
        let built = std::env::current_exe().unwrap().with_file_name(fake_dcgm::LIBRARY);
        let library = directory.path().join(fake_dcgm::LIBRARY);
        fs::copy(built, &library).unwrap();
        let source = DcgmSource::new(DcgmPlan {
            program: env!("CARGO_BIN_EXE_mainstay").into(),
            library: Some(library),
            address: address.map(str::to_owned),
            expected: true,
            policies: true,
            sys: directory.path().join("sys"),
            deadline,
        });
        let engine = Engine { directory, source };
        engine.says(script);
        engine
    }

    fn says(&self, script: &Value) {
        let path = self.directory.path().join(fake_dcgm::SCRIPT);
        fs::write(path.with_extension("new"), script.to_string()).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    }
}

fn ecc(gpu: u32) -> Value {
    json!({"gpu": gpu, "system": 16, "health": 20, "code": 4, "message": "Detected 1 volatile double-bit ECC error"})
}

#[test]
fn incidents_have_their_gpu_and_the_first_check_is_not_used() {
    let mut engine = Engine::saying(&json!({"gpus": [0, 3], "incidents": [ecc(3)]}));
    let DcgmReport::Health(first) = engine.source.sample() else { panic!("no health") };
    assert!(first.first && first.incidents.is_empty());
    let DcgmReport::Health(next) = engine.source.sample() else { panic!("no health") };
    assert_eq!((next.first, next.gpus), (false, vec![0, 3]));
    let found = &next.incidents[0];
    assert_eq!((found.gpu, found.system, found.health, found.code), (Some(3), 16, 20, 4));
    assert_eq!(found.message, "Detected 1 volatile double-bit ECC error");
}

#[test]
fn gpus_are_located_and_violated_policies_are_reported_once() {
    let places = json!({"0": "00000000:01:00.0", "3": "00000000:C1:00.0"});
    let mut engine = Engine::saying(&json!({"gpus": [0, 3], "addresses": places, "policy": 0x7f}));
    let DcgmReport::Health(first) = engine.source.sample() else { panic!("no health") };
    let reported: Vec<String> = first.addresses.values().map(ToString::to_string).collect();
    assert_eq!(reported, ["0000:01:00", "0000:c1:00"]);
    assert_eq!(first.violations, []);
    let violations = json!([[0x40, 3, 31], [0x8, 0, 95]]);
    let violated = json!({"gpus": [0, 3], "addresses": places, "policy": 0x7f, "violations": violations});
    engine.says(&violated);
    let DcgmReport::Health(next) = engine.source.sample() else { panic!("no health") };
    let of = |condition, gpu, value| Violation { condition, gpu: Some(gpu), value };
    assert_eq!(next.violations, [of(0x40, 3, 31), of(0x8, 0, 95)]);
    let DcgmReport::Health(last) = engine.source.sample() else { panic!("no health") };
    assert_eq!(last.violations, []);
}

/// The reports of a double-bit error, heat and an XID, if another client has set this policy.
fn reported_with(policy: u32, codes: &Value) -> Vec<u32> {
    let mut engine = Engine::saying(&json!({"gpus": [0, 1], "policy": policy, "codes": codes}));
    assert!(matches!(engine.source.sample(), DcgmReport::Health(_)));
    let violations = json!([[0x1, 0, 2], [0x8, 0, 95], [0x40, 1, 31]]);
    engine.says(&json!({"gpus": [0, 1], "policy": policy, "codes": codes, "violations": violations}));
    let DcgmReport::Health(health) = engine.source.sample() else { panic!("no health") };
    health.violations.into_iter().map(|violation| violation.condition).collect()
}

#[test]
fn policies_are_set_where_there_are_none_and_unchanged_elsewhere() {
    assert_eq!(reported_with(0, &json!({})), [0x1, 0x40], "ours, of all but heat");
    assert_eq!(reported_with(0x8, &json!({})), [0x8], "somebody else's alone");
    for function in ["dcgmPolicyGet", "dcgmPolicySet"] {
        assert_eq!(reported_with(0, &json!({function: -6})), [0_u32; 0], "{function}");
    }
}

#[test]
fn an_engine_without_locations_and_policies_is_used_too() {
    let codes = json!({"dcgmEntitiesGetLatestValues": -6, "dcgmPolicyRegister_v2": -6});
    let mut engine = Engine::saying(&json!({"gpus": [0], "codes": codes, "incidents": [ecc(0)]}));
    engine.source.sample();
    let DcgmReport::Health(health) = engine.source.sample() else { panic!("no health") };
    assert_eq!((health.addresses.len(), health.incidents.len()), (0, 1));
}

#[test]
fn an_older_engine_is_asked_in_its_own_version() {
    let mut engine = Engine::saying(&json!({"gpus": [0], "newest_response": 4, "incidents": [ecc(0)]}));
    engine.source.sample();
    let DcgmReport::Health(health) = engine.source.sample() else { panic!("no health") };
    assert_eq!(health.incidents.len(), 1);
}

#[test]
fn more_incidents_than_there_is_room_for_are_cut_off() {
    let many: Vec<Value> = (0..100).map(|_| ecc(0)).collect();
    let mut engine = Engine::saying(&json!({"gpus": [0], "newest_response": 4, "incidents": many}));
    engine.source.sample();
    let DcgmReport::Health(health) = engine.source.sample() else { panic!("no health") };
    assert_eq!(health.incidents.len(), 64);
}

#[test]
fn an_engine_that_does_not_run_is_absent_and_one_that_restarts_is_asked_again() {
    let mut engine = Engine::saying(&json!({"codes": {"dcgmConnect_v2": -21}}));
    let DcgmReport::Absent(why) = engine.source.sample() else { panic!("it is there") };
    testing::snapshot!("dcgm", "an engine that does not run", why);
    engine.says(&json!({"gpus": [0]}));
    assert!(matches!(engine.source.sample(), DcgmReport::Health(health) if health.first));
    engine.says(&json!({"codes": {"dcgmHealthCheck": -3}}));
    assert!(matches!(engine.source.sample(), DcgmReport::Failed(_)));
    engine.says(&json!({"gpus": [0]}));
    assert!(matches!(engine.source.sample(), DcgmReport::Health(health) if health.first), "a new connection");
}

#[test]
fn one_that_hangs_is_silent_and_left_behind() {
    let mut engine =
        Engine::with(&json!({"hang": ["dcgmInit"]}), Some("localhost:5555"), Duration::from_millis(200));
    assert_eq!(engine.source.sample(), DcgmReport::Silent);
}

#[test]
fn an_engine_of_our_own_is_run_where_that_is_wanted() {
    let mut engine = Engine::with(&json!({"gpus": [0]}), None, Duration::from_secs(60));
    assert!(matches!(engine.source.sample(), DcgmReport::Health(_)));
}

#[test]
fn without_a_library_it_is_absent() {
    let mut source = DcgmSource::new(DcgmPlan {
        program: env!("CARGO_BIN_EXE_mainstay").into(),
        library: Some("/nowhere/libdcgm.so.4".into()),
        address: None,
        expected: true,
        policies: true,
        sys: "/sys".into(),
        deadline: Duration::from_secs(60),
    });
    assert!(matches!(source.sample(), DcgmReport::Absent(_)));
}

fn exporter(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metrics", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        let length = stream.read(&mut request).unwrap();
        assert!(request[..length].starts_with(b"GET /metrics HTTP/1.0\r\n"));
        stream.write_all(answer.as_bytes()).unwrap();
    });
    url
}

#[test]
fn an_exporters_page_is_read_and_another_page_is_an_error() {
    let deadline = Duration::from_secs(60);
    let page = scrape(&exporter("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\na 1\n"), deadline);
    assert_eq!(page, ExporterReport::Page("a 1\n".to_owned()));
    for url in [
        exporter("HTTP/1.1 503 Service Unavailable\r\n\r\n"),
        exporter("SSH-2.0\n"),
        "https://localhost:9400/metrics".to_owned(),
        "http://127.0.0.1:1/metrics".to_owned(),
    ] {
        assert!(matches!(scrape(&url, deadline), ExporterReport::Failed(_)), "{url}");
    }
}

#[test]
fn dcgm_findings_are_on_the_component_that_nvml_has_for_the_gpu() {
    let directory = testing::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let built = std::env::current_exe().unwrap();
    for library in [fake_dcgm::LIBRARY, fake_devices::LIBRARY] {
        fs::copy(built.with_file_name(library), place(library)).unwrap();
    }
    let gpus = json!([{"uuid": "GPU-0", "pci": "00000000:01:00.0"}]);
    fs::write(place(fake_devices::SCRIPT), json!({"driver": "570.86.15", "gpus": gpus}).to_string()).unwrap();
    // One GPU that NVML reads as healthy, and a problem that the agent does not check itself.
    let unknown = json!({"gpu": 0, "system": 16, "health": 10, "code": 9999, "message": "something new"});
    let script = json!({"gpus": [0], "addresses": {"0": "00000000:01:00.0"}, "incidents": [ecc(0), unknown]});
    fs::write(place(fake_dcgm::SCRIPT), script.to_string()).unwrap();
    fs::write(place("kmsg"), "").unwrap();
    let (nvml, dcgm, log) = (place(fake_devices::LIBRARY), place(fake_dcgm::LIBRARY), place("kmsg"));
    let settings: [(&str, &Path); 6] = [
        ("GPU_LIBRARY", &nvml),
        ("GPU_INTERVAL", "1s".as_ref()),
        ("DCGM_LIBRARY", &dcgm),
        ("DCGM_MODE", "on".as_ref()),
        ("DCGM_INTERVAL", "1s".as_ref()),
        ("KERNEL_LOG_PATH", &log),
    ];
    let agent = Agent::start(directory.path(), &settings);
    agent.wait_for_change("gpu.0000:01:00", "HEALTHY", "DEGRADED");
    let status = agent.status();
    assert!(status.contains("DCGM 9999: something new") && !status.contains("dcgm.gpu0"), "{status}");
    let explained = agent.ask(&["explain", "gpu.0000:01:00"]);
    assert!(explained.contains("70 % sure"), "{explained}");
    let evidence = explained.lines().filter(|line| line.contains("DCGM") && !line.contains(" ago"));
    testing::snapshot!("dcgm", "explain: lines about DCGM", evidence.collect::<Vec<&str>>().join("\n"));
}
