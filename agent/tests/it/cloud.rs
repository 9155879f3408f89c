//! Announcements of the cloud with the whole agent, and no requests on other machines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;
use crate::support::metadata;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;

use mainstay_health::host::cloud::{CloudSample, Notice, NoticeKind};
use mainstay_sensors::source::cloud::{CloudSource, Provider};
use metadata::{Metadata, Mood};
use support::Agent;
use testing::TempDir;

const EVENT: &str = "instance/maintenance-event";
const UPCOMING: &str = "instance/upcoming-maintenance";

/// A machine with this product name in its firmware.
fn machine(product: &str) -> TempDir {
    let directory = testing::tempdir().unwrap();
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

/// Looks until the condition is true.
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
fn changes_are_pushed_by_the_server_and_not_polled() {
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
fn a_failing_server_is_reported_and_asked_again() {
    let metadata = Metadata::start();
    let mut source = CloudSource::new(Provider::Google, &metadata.address).unwrap();
    for mood in [Mood::Unavailable, Mood::Resets, Mood::SomethingElse] {
        metadata.mood(mood);
        let failed = look_until(&mut source, Result::is_err).notices.unwrap_err();
        if !matches!(mood, Mood::Resets) {
            // Each key is asked.
            let (_, why) = failed.split_once(": ").unwrap();
            testing::snapshot!("cloud", format!("{mood:?}"), why);
        }
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
    testing::snapshot!("cloud", "no answer yet", source.sample().notices.unwrap_err());
    metadata.mood(Mood::Well);
    look_until(&mut source, |notices| notices == &Ok(Vec::new()));
}

/// A server that answers each request by its method, path and one header.
fn serve(answer: impl Fn(&str, &str, &str) -> (&'static str, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let mut words = first.split(' ');
            let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let (status, body) = answer(method, path, &headers.join("\n").to_lowercase());
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    address
}

#[test]
fn amazon_is_asked_with_a_token_and_404_means_that_nothing_is_announced() {
    let (send, action) = std::sync::mpsc::channel::<String>();
    let reported = std::sync::Mutex::new((action, None::<String>));
    let address = serve(move |method, path, headers| {
        let token = headers.contains("x-aws-ec2-metadata-token: abc");
        let mut reported = reported.lock().unwrap();
        if let Ok(new) = reported.0.try_recv() {
            reported.1 = Some(new);
        }
        match (method, path) {
            ("PUT", "/latest/api/token") if headers.contains("-ttl-seconds: 21600") => {
                ("200 OK", "abc".to_owned())
            }
            ("GET", _) if !token => ("401 Unauthorized", String::new()),
            ("GET", "/latest/meta-data/spot/instance-action") => match &reported.1 {
                Some(action) => ("200 OK", action.clone()),
                None => ("404 Not Found", "<?xml version=\"1.0\"?>".to_owned()),
            },
            _ => ("404 Not Found", String::new()),
        }
    });
    let mut source = CloudSource::new(Provider::Amazon, &address).unwrap();
    assert_eq!(source.sample().notices, Ok(Vec::new()));
    send.send(r#"{"action": "terminate", "time": "2027-01-15T08:22:00Z"}"#.to_owned()).unwrap();
    let sample = look_until(&mut source, |notices| !kinds(notices).is_empty());
    assert_eq!(kinds(&sample.notices), [NoticeKind::Preemption]);
    // A server that returns no token is not Amazon's.
    let other = serve(|_, _, _| ("200 OK", "<html>\n".to_owned()));
    let sample = CloudSource::new(Provider::Amazon, &other).unwrap().sample();
    testing::snapshot!("cloud", "no server of Amazon", sample.notices.unwrap_err().replace(&other, "SERVER"));
}

#[test]
fn azure_events_of_this_machine_count_and_those_of_others_do_not() {
    let address = serve(|_, path, headers| {
        let events = r#"{ "DocumentIncarnation": 2, "Events": [
            { "EventId": "A", "EventType": "Redeploy", "Resources": ["other"], "EventStatus": "Scheduled", "NotBefore": "" },
            { "EventId": "B", "EventType": "Preempt", "Resources": ["train_0"], "EventStatus": "Scheduled",
              "NotBefore": "Thu, 21 Jan 2027 09:00:43 GMT" } ] }"#;
        match path.split('?').next() {
            _ if !headers.contains("metadata: true") => ("400 Bad Request", String::new()),
            Some("/metadata/instance/compute/name") => ("200 OK", "train0".to_owned()),
            Some("/metadata/scheduledevents") => ("200 OK", events.to_owned()),
            _ => ("404 Not Found", String::new()),
        }
    });
    let sample = CloudSource::new(Provider::Azure, &address).unwrap().sample();
    assert_eq!(kinds(&sample.notices), [NoticeKind::Preemption]);
}

#[test]
fn the_firmware_determines_the_provider() {
    let whose = |product: &str| Provider::by_firmware(&machine(product).path().join("sys"));
    assert_eq!(whose("Google Compute Engine"), Some(Provider::Google));
    let by = |file: &str, text: &str| {
        let machine = machine("Virtual Machine");
        fs::write(machine.path().join("sys/class/dmi/id").join(file), format!("{text}\n")).unwrap();
        Provider::by_firmware(&machine.path().join("sys"))
    };
    assert_eq!(by("sys_vendor", "Amazon EC2"), Some(Provider::Amazon));
    assert_eq!(by("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"), Some(Provider::Azure));
    assert_eq!(by("sys_vendor", "Microsoft Corporation"), None, "Hyper-V elsewhere");
    for other in ["", "PowerEdge XE9680", "Standard PC (Q35 + ICH9, 2009)", "Google Chromebook"] {
        assert_eq!(whose(other), None, "{other}");
    }
    assert_eq!(Provider::by_firmware(Path::new("/nowhere")), None);
}

#[test]
fn the_whole_agent_reports_announcements_and_their_end() {
    let metadata = Metadata::start();
    let machine = machine("Google Compute Engine");
    let agent = start(&machine, &metadata, "auto");
    agent.wait_for_state("host.cloud", "HEALTHY");
    metadata.set(
        UPCOMING,
        r#"{"can_reschedule": "false", "maintenance_status": "PENDING", "type": "SCHEDULED",
            "window_end_time": "2999-01-01T04:00:00Z", "window_start_time": "2999-01-01T00:00:00Z"}"#,
    );
    agent.wait_for("2999-01-01T00:00:00Z");
    metadata.set(EVENT, "MIGRATE_ON_HOST_MAINTENANCE");
    agent.wait_for_change("host.cloud", "HEALTHY", "DEGRADED");
    metadata.set(EVENT, "NONE");
    agent.wait_for_change("host.cloud", "DEGRADED", "HEALTHY");
    let status = agent.status();
    assert!(status.contains("host.cloud") && status.contains("starts in"), "{status}");

    // The same window is not announced again after a restart.
    drop(agent);
    let agent = start(&machine, &metadata, "auto");
    agent.wait_for_first_reading("host.cloud");
    metadata.set("instance/preempted", "TRUE");
    agent.wait_for_change("host.cloud", "HEALTHY", "UNHEALTHY");
    let events = agent.events();
    let announces = |line: &&str| line.contains("\"cloud_notice\"") && line.contains("SCHEDULED");
    let announced = events.lines().filter(announces).count();
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

/// A job of this agent, whose rank exits with 0 on SIGTERM.
fn job(machine: &TempDir, options: &[&str]) -> std::process::Child {
    let script = machine.path().join("rank.sh");
    fs::write(&script, "#!/bin/sh\ntrap 'exit 0' TERM\necho up\nwhile :; do sleep 0.02; done\n").unwrap();
    job_of(machine, options, &script)
}

/// A job of this agent that runs this script as its rank.
fn job_of(machine: &TempDir, options: &[&str], script: &Path) -> std::process::Child {
    std::process::Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .args(["run", "--no-python", "--socket"])
        .arg(machine.path().join("agent.sock"))
        .arg("--log-dir")
        .arg(machine.path().join("logs"))
        .arg("--runtime-dir")
        .arg(machine.path().join("runtime"))
        .args(options)
        .args(["/bin/sh".as_ref(), script.as_os_str()])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_job_leaves_a_machine_that_is_taken_away_with_the_status_for_its_scheduler() {
    let machine = machine("Google Compute Engine");
    let metadata = Metadata::start();
    let agent = start(&machine, &metadata, "auto");
    let mut job = job(&machine, &["--hand-back-exit", "99"]);
    let mut printed = String::new();
    BufReader::new(job.stdout.take().unwrap()).read_line(&mut printed).unwrap();
    agent.wait_for("MASTER_PORT");
    metadata.set("instance/preempted", "TRUE");
    let ended = job.wait_with_output().unwrap();
    let printed = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(99), "{printed}");
    let leave = agent.wait_for_observation("host.cloud", "cloud_leave");
    assert!(printed.contains(leave["detail"].as_str().unwrap()), "{printed}");
}

#[test]
fn a_job_that_is_to_stay_does_not_end_by_a_notice() {
    let machine = machine("Google Compute Engine");
    let metadata = Metadata::start();
    let agent = start(&machine, &metadata, "auto");
    let mut job = job(&machine, &["--stay-on-notice"]);
    let mut printed = String::new();
    BufReader::new(job.stdout.take().unwrap()).read_line(&mut printed).unwrap();
    agent.wait_for("MASTER_PORT");
    metadata.set("instance/preempted", "TRUE");
    agent.wait_for_observation("host.cloud", "cloud_leave");
    // The signal that follows ends it, not the notice.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(job.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(job.wait().unwrap().code(), Some(143));
}

/// A maintenance window that starts in this many seconds, as Google's metadata server announces it.
fn starts_in(seconds: i64) -> String {
    let starts = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
    format!(r#"{{"maintenance_status": "PENDING", "type": "SCHEDULED", "window_start_time": "{starts:.0}"}}"#)
}

#[test]
fn a_job_saves_and_ends_shortly_before_its_machine_is_maintained() {
    let machine = machine("Google Compute Engine");
    let metadata = Metadata::start();
    let settings: [(&str, &Path); 4] = [
        ("HOST_SYS_ROOT", &machine.path().join("sys")),
        ("CLOUD_METADATA", Path::new(&metadata.address)),
        ("CLOUD_PROVIDER", Path::new("auto")),
        ("LIMITS_HOST_CLOUD_LEAVE", Path::new("30m")),
    ];
    let agent = Agent::start(machine.path(), &settings);
    let mut job = job(&machine, &[]);
    let mut printed = String::new();
    BufReader::new(job.stdout.take().unwrap()).read_line(&mut printed).unwrap();
    agent.wait_for("MASTER_PORT");
    // A window far in the future ends nothing.
    metadata.set(UPCOMING, &starts_in(7200));
    agent.wait_for_observation("host.cloud", "cloud_notice");
    metadata.set(UPCOMING, &starts_in(1500));
    let ended = job.wait_with_output().unwrap();
    let printed = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(75), "{printed}");
    let leave = agent.wait_for_observation("host.cloud", "cloud_leave");
    assert!(printed.contains(leave["detail"].as_str().unwrap()), "{printed}");

    // A job that starts in the meantime receives the notice too.
    let late = self::job(&machine, &[]).wait_with_output().unwrap();
    assert_eq!(late.status.code(), Some(75), "{}", String::from_utf8_lossy(&late.stderr));
}

#[test]
fn the_signal_of_a_machine_that_shuts_down_does_not_cut_saving_short() {
    let machine = machine("Google Compute Engine");
    let metadata = Metadata::start();
    let agent = start(&machine, &metadata, "auto");
    let saved = machine.path().join("saved");
    let script = machine.path().join("saving.sh");
    let saving = format!("while [ ! -e '{}' ]; do sleep 0.02; done", saved.display());
    let text = format!(
        "#!/bin/sh\ntrap 'echo told; {saving}; exit 0' TERM\necho up\nwhile :; do sleep 0.02; done\n"
    );
    fs::write(&script, text).unwrap();
    let mut job = job_of(&machine, &[], &script);
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("up")));
    agent.wait_for("MASTER_PORT");
    metadata.set("instance/preempted", "TRUE");
    assert!(lines.any(|line| line.contains("told")));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(job.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    agent.wait_for("SIGTERM");
    fs::write(&saved, "").unwrap();
    lines.for_each(drop);
    let ended = job.wait_with_output().unwrap();
    let printed = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(75), "{printed}");
    assert!(!printed.contains("is killed") && !agent.events().contains("SIGKILL"), "{printed}");
}
