//! What the cloud announces, as the whole agent follows it, and what it does not ask on other machines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

#[path = "support/metadata.rs"]
mod metadata;
mod support;

use std::fs;
use std::path::Path;

use mainstay_agent::source::cloud::{CloudSource, Provider};
use mainstay_core::cloud::{CloudSample, Notice, NoticeKind};
use metadata::{Metadata, Mood};
use support::Agent;
use tempfile::TempDir;

const EVENT: &str = "instance/maintenance-event";
const UPCOMING: &str = "instance/upcoming-maintenance";

/// A machine whose firmware says this.
fn machine(product: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let dmi = directory.path().join("sys/class/dmi/id");
    fs::create_dir_all(&dmi).unwrap();
    fs::write(dmi.join("product_name"), format!("{product}\n")).unwrap();
    directory
}

fn start(machine: &TempDir, metadata: &Metadata, provider: &str) -> Agent {
    let settings: [(&str, &Path); 3] = [
        ("HOST_SYS_ROOT", &machine.path().join("sys")),
        ("CLOUD_METADATA", Path::new(&metadata.address)),
        ("CLOUD_PROVIDER", Path::new(provider)),
    ];
    Agent::start(machine.path(), &settings)
}

/// Looks until it is so.
fn look_until(source: &mut CloudSource, is_so: impl Fn(&Result<Vec<Notice>, String>) -> bool) -> CloudSample {
    loop {
        let sample = source.sample();
        if is_so(&sample.notices) {
            return sample;
        }
        std::thread::yield_now();
    }
}

fn kinds(notices: &Result<Vec<Notice>, String>) -> Vec<NoticeKind> {
    notices.iter().flatten().map(|notice| notice.kind).collect()
}

#[test]
fn changes_are_told_by_the_server_and_not_polled_for() {
    let metadata = Metadata::start();
    let mut source = CloudSource::new(Provider::Google, &metadata.address).unwrap();
    assert_eq!(source.sample().notices, Ok(Vec::new()), "the first look waits for the server");
    for key in [EVENT, "instance/preempted", UPCOMING] {
        metadata.wait_until_asked(&format!("{key}?"));
    }
    metadata.wait_until_asked("maintenance-event?wait_for_change=true&timeout_sec=60&last_etag=1");
    metadata
        .wait_until_asked("upcoming-maintenance?alt=json&wait_for_change=true&timeout_sec=60&last_etag=1");
    metadata.wait_until_asked("preempted?wait_for_change=true&timeout_sec=60&last_etag=1");
    assert_eq!(metadata.asked().len(), 6, "{:?}", metadata.asked());

    metadata.set(EVENT, "TERMINATE_ON_HOST_MAINTENANCE");
    look_until(&mut source, |notices| kinds(notices) == [NoticeKind::Termination]);
    metadata.wait_until_asked("maintenance-event?wait_for_change=true&timeout_sec=60&last_etag=2");
    metadata.set(EVENT, "NONE");
    look_until(&mut source, |notices| notices == &Ok(Vec::new()));
}

#[test]
fn a_server_that_fails_is_told_of_and_asked_again() {
    let metadata = Metadata::start();
    let mut source = CloudSource::new(Provider::Google, &metadata.address).unwrap();
    for (mood, words) in [
        (Mood::Unavailable, "status 503"),
        (Mood::Resets, "connection"),
        (Mood::SomethingElse, "not the metadata server"),
    ] {
        metadata.mood(mood);
        let failed =
            look_until(&mut source, |notices| notices.as_ref().is_err_and(|why| why.contains(words)));
        assert!(failed.notices.is_err());
        metadata.mood(Mood::Well);
        look_until(&mut source, |notices| notices == &Ok(Vec::new()));
    }
}

#[test]
fn one_key_that_cannot_be_read_hides_nothing_that_another_announces() {
    let metadata = Metadata::start();
    metadata.set("instance/preempted", "TRUE");
    metadata.set(UPCOMING, "<html>");
    // This kind of machine does not have the key.
    metadata.remove(EVENT);
    let mut source = CloudSource::new(Provider::Google, &metadata.address).unwrap();
    assert_eq!(kinds(&source.sample().notices), [NoticeKind::Preemption]);
}

#[test]
fn a_server_that_does_not_answer_holds_up_nothing() {
    let metadata = Metadata::start();
    metadata.mood(Mood::Mute);
    let mut source = CloudSource::new(Provider::Google, &metadata.address).unwrap();
    assert_eq!(source.sample().notices, Err("no answer yet".to_owned()));
    metadata.mood(Mood::Well);
    look_until(&mut source, |notices| notices == &Ok(Vec::new()));
}

#[test]
fn whose_machine_it_is_the_firmware_says() {
    let whose = |product: &str| Provider::by_firmware(&machine(product).path().join("sys"));
    assert_eq!(whose("Google Compute Engine"), Some(Provider::Google));
    for other in ["", "PowerEdge XE9680", "Standard PC (Q35 + ICH9, 2009)", "Google Chromebook"] {
        assert_eq!(whose(other), None, "{other}");
    }
    assert_eq!(Provider::by_firmware(Path::new("/nowhere")), None);
}

#[test]
fn the_whole_agent_tells_what_is_announced_and_when_it_is_over() {
    let metadata = Metadata::start();
    let machine = machine("Google Compute Engine");
    let agent = start(&machine, &metadata, "auto");
    agent.wait_for("Google Compute Engine announces nothing for this machine");
    metadata.set(
        UPCOMING,
        r#"{"can_reschedule": "false", "maintenance_status": "PENDING", "type": "SCHEDULED",
            "window_end_time": "2999-01-01T04:00:00Z", "window_start_time": "2999-01-01T00:00:00Z"}"#,
    );
    agent.wait_for("maintenance of the host: SCHEDULED, PENDING, from 2999-01-01T00:00:00Z");
    metadata.set(EVENT, "MIGRATE_ON_HOST_MAINTENANCE");
    agent.wait_for(
        "host.cloud went from HEALTHY to DEGRADED: the machine is moved to another host while it runs, now",
    );
    metadata.set(EVENT, "NONE");
    agent.wait_for("host.cloud went from DEGRADED to HEALTHY");
    let status = agent.status();
    assert!(status.contains("host.cloud") && status.contains("begins in"), "{status}");

    // The same window is not announced again after a restart.
    drop(agent);
    let agent = start(&machine, &metadata, "auto");
    metadata.set("instance/preempted", "TRUE");
    agent.wait_for("host.cloud went from HEALTHY to UNHEALTHY: the machine is taken away (preempted), now");
    let events = agent.events();
    let announced = events.lines().filter(|line| line.contains("maintenance of the host: SCHEDULED")).count();
    assert_eq!(announced, 1, "{events}");
}

#[test]
fn on_other_machines_nothing_is_asked_and_nothing_shown() {
    for (product, provider) in [("PowerEdge XE9680", "auto"), ("Google Compute Engine", "none")] {
        let metadata = Metadata::start();
        let machine = machine(product);
        let agent = start(&machine, &metadata, provider);
        agent.wait_for("host.memory");
        assert_eq!(metadata.asked(), [""; 0]);
        assert!(!agent.status().contains("host.cloud"));
    }
}
