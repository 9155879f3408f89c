//! TPUs as the agent sees them: directory trees in place of /sys and /proc, a service with libtpu's wire format,
//! and other programs in its place.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;
use crate::support::libtpu;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use libtpu::{Libtpu, Script, core};
use mainstay_health::hardware::tpu::{Chip, Holders, Runtime, RuntimeReply, TpuSample, outliers};
use mainstay_model::time::Span;
use mainstay_proto::libtpu::tpu::monitoring::runtime::gauge::Value;
use mainstay_proto::libtpu::tpu_telemetry::AllCoreStateSummaries;
use mainstay_sensors::source::tpu::{TpuPlan, TpuSource, idle_at};
use prost::Message;
use support::Agent;
use testing::TempDir;

/// A host with TPUs, as files.
struct Host(TempDir);

impl Host {
    fn new() -> Host {
        let host = Host(testing::tempdir().unwrap());
        fs::create_dir_all(host.path("sys/bus/pci/devices")).unwrap();
        fs::create_dir_all(host.path("proc")).unwrap();
        fs::create_dir_all(host.path("logs")).unwrap();
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn device(&self, address: &str, vendor: &str, device: &str) -> PathBuf {
        let at = self.path("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&at).unwrap();
        fs::write(at.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(at.join("device"), format!("{device}\n")).unwrap();
        at
    }

    fn vfio_chip(&self, address: &str, device: &str, group: u32) {
        symlink(
            format!("../../../kernel/iommu_groups/{group}"),
            self.device(address, "0x1ae0", device).join("iommu_group"),
        )
        .unwrap();
    }

    /// A process that has files open.
    fn process(&self, pid: u32, files: &[&str], ports: &str) {
        let at = self.path(&format!("proc/{pid}"));
        fs::create_dir_all(at.join("fd")).unwrap();
        for (number, file) in files.iter().enumerate() {
            symlink(file, at.join(format!("fd/{number}"))).unwrap();
        }
        fs::write(at.join("comm"), "python3\n").unwrap();
        fs::write(at.join("environ"), format!("HOME=/root\0TPU_RUNTIME_METRICS_PORTS={ports}\0LANG=C\0"))
            .unwrap();
    }

    fn source(&self, endpoints: &[&str]) -> TpuSource {
        self.source_with(endpoints, Duration::from_secs(20))
    }

    fn source_with(&self, endpoints: &[&str], deadline: Duration) -> TpuSource {
        let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
        let plan = TpuPlan {
            sys: self.path("sys"),
            proc: self.path("proc"),
            endpoints,
            deadline,
            log_dir: self.path("logs"),
        };
        TpuSource::new(plan, BTreeSet::new())
    }
}

fn chips(sample: &TpuSample) -> &[Chip] {
    sample.chips.as_ref().unwrap()
}

fn holders(chip: &Chip) -> Vec<i32> {
    chip.holders.known().iter().map(|holder| holder.pid.0).collect()
}

fn script() -> Script {
    let metric = |name: &str, values: [Value; 2]| {
        (name.to_owned(), values.into_iter().enumerate().map(|(core, value)| (core as i64, value)).collect())
    };
    Script {
        metrics: BTreeMap::from([
            metric("tpu.runtime.hbm.memory.usage.bytes", [Value::AsInt(1 << 30), Value::AsInt(2 << 30)]),
            metric("tpu.runtime.hbm.memory.total.bytes", [Value::AsInt(16 << 30), Value::AsInt(16 << 30)]),
            metric(
                "tpu.runtime.tensorcore.dutycycle.percent",
                [Value::AsDouble(93.5), Value::AsDouble(40.0)],
            ),
        ]),
        cores: Some(BTreeMap::from([(0, core(0, 42)), (1, core(1, 41))])),
        ..Script::default()
    }
}

fn reported(sample: &TpuSample) -> &Runtime {
    sample.services[0].answer.runtime().unwrap_or_else(|| panic!("{sample:?}"))
}

#[test]
fn a_host_without_tpus_is_not_asked_anything() {
    let host = Host::new();
    // A network card and a disk of the same vendor, and a GPU.
    host.device("0000:00:05.0", "0x1ae0", "0x0042");
    host.device("0000:00:06.0", "0x1ae0", "0x001f");
    host.device("0000:00:07.0", "0x10de", "0x2330");
    let nothing =
        TpuSample { chips: Ok(Vec::new()), services: Vec::new(), stalls: Vec::new(), driver: Vec::new() };
    assert_eq!(host.source(&[]).sample(), nothing);
    fs::remove_dir_all(host.path("sys")).unwrap();
    assert_eq!(host.source(&[]).sample(), nothing);
}

#[test]
fn chips_are_in_the_order_of_their_nodes_and_held_by_who_has_them_open() {
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0062", 10);
    host.vfio_chip("0000:00:05.0", "0x0062", 9);
    host.process(4711, &["/dev/null", "/dev/vfio/vfio", "/dev/vfio/9"], "8431");
    host.process(4712, &["/dev/vfio/9"], "8431");
    host.process(1, &["/dev/vfio/1", "/tmp/vfio/10"], "");
    fs::write(host.path("proc/meminfo"), "").unwrap();
    let sample = host.source(&[]).sample();
    let seen: Vec<_> =
        chips(&sample).iter().map(|chip| (chip.number, chip.nodes.clone(), holders(chip))).collect();
    let node = |name: &str| vec![name.to_owned()];
    assert_eq!(seen, [(0, node("/dev/vfio/9"), vec![4711, 4712]), (1, node("/dev/vfio/10"), vec![])]);
    assert!(chips(&sample)[1].holders.is_free());
    assert_eq!(chips(&sample)[0].kind, "v5p");
}

#[test]
fn older_generations_have_nodes_of_their_own_and_the_newest_two_per_chip() {
    let host = Host::new();
    let at = host.device("0000:00:04.0", "0x1ae0", "0x005e");
    fs::create_dir_all(at.join("accel/accel3")).unwrap();
    host.vfio_chip("0000:00:06.0", "0x0076", 20);
    host.vfio_chip("0000:00:06.1", "0x0076", 21);
    host.device("0000:00:01.0", "0x1ae0", "0x0063");
    host.process(5, &["/dev/accel3"], "");
    let sample = host.source(&["localhost:1"]).sample();
    let seen: Vec<_> = chips(&sample).iter().map(|chip| (chip.kind, chip.nodes.join(" "))).collect();
    let expected = [("v4", "/dev/accel3"), ("7x", "/dev/vfio/20 /dev/vfio/21"), ("v5e", "")]
        .map(|(k, n)| (k, n.to_owned()));
    assert_eq!(seen, expected);
    assert_eq!(holders(&chips(&sample)[0]), [5]);
}

#[test]
fn a_process_that_cannot_be_read_may_hold_a_chip() {
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0062", 0);
    host.process(4711, &["/dev/vfio/0"], "8431");
    fs::set_permissions(host.path("proc/4711/fd"), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    fs::set_permissions(host.0.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut source = host.source(&["localhost:1"]);
    // For this thread only, the kernel now checks files as for an unprivileged user.
    let sample = std::thread::spawn(move || {
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
        source.sample()
    });
    let sample = sample.join().unwrap();
    let Holders::Partly(known, why) = &chips(&sample)[0].holders else { panic!("{sample:?}") };
    assert!(known.is_empty(), "{known:?}");
    testing::snapshot!("tpu", "holders that cannot be read", why);
}

#[test]
fn the_service_of_the_process_that_holds_a_chip_is_asked_on_its_configured_port() {
    let libtpu = Libtpu::start(script());
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0063", 0);
    let mut source = host.source(&[]);
    assert_eq!(source.sample().services, [], "no process holds it");
    host.process(4711, &["/dev/vfio/0"], &format!("8353,{}", libtpu.port));
    let sample = source.sample();
    assert_eq!(sample.services.len(), 1, "8353 is not asked: {sample:?}");
    assert_eq!(sample.services[0].endpoint, libtpu.endpoint());
    let runtime = reported(&sample);
    assert_eq!(runtime.hbm_used, [(0, 1 << 30), (1, 2 << 30)].into());
    assert_eq!(runtime.hbm_total, [(0, 16 << 30), (1, 16 << 30)].into());
    assert_eq!(runtime.duty_cycle, [(0, 93.5), (1, 40.0)].into());
    let cores = runtime.cores.as_ref().unwrap();
    assert_eq!(
        cores.iter().map(|core| (core.core, core.launch)).collect::<Vec<_>>(),
        [(0, Some(42)), (1, Some(41))]
    );
    assert_eq!(
        (cores[0].program.as_str(), cores[0].queued, cores[0].counters.as_slice()),
        ("abcd", 1, &[0x1f40][..])
    );
}

#[test]
fn how_long_tpus_have_had_no_work_is_the_least_of_what_their_services_say() {
    let idle = |seconds: &[f64]| {
        let cores = seconds.iter().enumerate();
        let of_cores = cores.map(|(core, seconds)| (core as i64, Value::AsDouble(*seconds))).collect();
        let name = "tpu.runtime.tensorcore.idle_duration.seconds".to_owned();
        Libtpu::start(Script { metrics: [(name, of_cores)].into(), ..Script::default() })
    };
    let at =
        |services: &[&Libtpu]| idle_at(services.iter().map(|of| of.port).collect(), Duration::from_secs(20));
    let (resting, working) = (idle(&[90.0, 61.5]), idle(&[70.0, 0.0]));
    assert_eq!(at(&[&resting]), Some(Span::millis(61_500)));
    assert_eq!(at(&[&resting, &working]), Some(Span(0)));
    // If one does not report it, it is unknown.
    let silent = Libtpu::start(Script::default());
    assert_eq!(at(&[&resting, &silent]), None);
}

#[test]
fn the_texts_of_a_program_are_requested_only_when_it_makes_no_progress() {
    let libtpu = Libtpu::start(script());
    let mut source = Host::new().source(&[&libtpu.endpoint()]);
    let hlo = |sample: &TpuSample| reported(sample).cores.as_ref().unwrap()[0].hlo.clone();
    assert_eq!(hlo(&source.sample()), "");
    libtpu.change(|script| script.cores = Some([(0, core(0, 43)), (1, core(1, 43))].into()));
    assert_eq!(hlo(&source.sample()), "");
    assert_eq!(hlo(&source.sample()), "%all-reduce.17");
    assert_eq!(hlo(&source.sample()), "%all-reduce.17");
    libtpu.change(|script| script.cores = Some([(0, core(0, 44)), (1, core(1, 44))].into()));
    assert_eq!(hlo(&source.sample()), "");
    assert_eq!(libtpu.script.lock().unwrap().texts_asked, 2);
}

#[test]
fn only_the_metrics_that_libtpu_lists_are_asked_for() {
    let libtpu = Libtpu::start(script());
    libtpu.change(|script| script.metrics.retain(|name, _| name.contains("dutycycle")));
    let mut source = Host::new().source(&[&libtpu.endpoint()]);
    let sample = source.sample();
    assert_eq!((reported(&sample).supported, reported(&sample).duty_cycle.len()), (Some(1), 2));
    let asked = libtpu.script.lock().unwrap().metrics_asked.clone();
    assert_eq!(asked, ["tpu.runtime.tensorcore.dutycycle.percent"]);
}

#[test]
fn the_drivers_logs_are_read_on_from_where_they_were_left() {
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0062", 0);
    let name = |weight: &str, pid: u32| {
        host.path("logs").join(format!("tpu_driver.t1v-n-0.root.log.{weight}.20261121-030405.{pid}"))
    };
    let line = |text: &str| format!("E1121 03:04:05.123456    1234 tpu_driver.cc:42] {text}\n");
    fs::write(name("ERROR", 7), line("TPU initialization failed: of a job before")).unwrap();
    symlink("/dev/zero", name("INFO", 6)).unwrap();
    let mut source = host.source(&[]);
    let mut printed = || source.sample().driver.into_iter().map(|report| report.message).collect::<Vec<_>>();
    assert_eq!(printed(), [""; 0], "what was there before is old news");
    let append = |path: &Path, text: &str| {
        fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
    };
    append(&name("ERROR", 7), &line("Core halted unexpectedly"));
    append(&name("WARNING", 8), &line("nothing of this"));
    append(&name("WARNING", 8), "E1121 03:04:05.123456    1234 tpu_driver.cc:42] HANG_");
    assert_eq!(printed(), ["Core halted unexpectedly"]);
    append(&name("WARNING", 8), "DETECTED\n");
    assert_eq!(printed(), ["HANG_DETECTED"]);
    assert_eq!(printed(), [""; 0]);
}

#[test]
fn an_older_libtpu_does_not_report_the_states_of_its_cores() {
    let libtpu = Libtpu::start(Script { cores: None, ..script() });
    let sample = Host::new().source(&[&libtpu.endpoint()]).sample();
    assert_eq!((reported(&sample).cores.as_ref(), reported(&sample).duty_cycle.len()), (None, 2));
    // A service without any of the metrics is still libtpu.
    libtpu.change(|script| script.metrics.clear());
    assert_eq!(reported(&Host::new().source(&[&libtpu.endpoint()]).sample()), &Runtime::default());
}

#[test]
fn a_program_that_is_not_libtpu_is_reported_as_such() {
    let improper = |endpoint: &str| {
        let sample = Host::new().source(&[endpoint]).sample();
        let RuntimeReply::Improper(what) = &sample.services[0].answer else { panic!("{sample:?}") };
        what.clone()
    };
    // Another gRPC server.
    let libtpu = Libtpu::start(Script { empty: true, ..script() });
    testing::snapshot!("tpu", "another gRPC server", improper(&libtpu.endpoint()));
    // A program that does not speak gRPC at all, and one that closes the connection.
    for text in ["HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "\u{0}\u{1}garbage", ""] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(text.as_bytes());
        });
        assert!(!improper(&endpoint).is_empty(), "{text:?}");
        server.join().unwrap();
    }
}

#[test]
fn no_listener_and_no_answer_are_distinguished() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert_eq!(Host::new().source(&[&free]).sample().services[0].answer, RuntimeReply::Refused);
    let brief = Duration::from_millis(200);
    let libtpu = Libtpu::start(Script { hangs: true, ..script() });
    // One that accepts connections and never sends anything.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    for endpoint in [libtpu.endpoint(), mute.local_addr().unwrap().to_string()] {
        let sample = Host::new().source_with(&[&endpoint], brief).sample();
        assert_eq!(sample.services[0].answer, RuntimeReply::Silent);
    }
    // One that hangs does not prevent reading the others.
    let well = Libtpu::start(script());
    let mut source = Host::new().source_with(&[&libtpu.endpoint(), &well.endpoint()], Duration::from_secs(5));
    libtpu.change(|script| script.hangs = true);
    assert!(source.sample().services[1].answer.runtime().is_some());
}

#[test]
fn stall_summaries_are_read_once_and_name_the_core_that_is_behind() {
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0062", 0);
    let write = |name: &str, bytes: &[u8]| {
        let path = host.path("logs").join(name);
        fs::write(&path, bytes).unwrap();
        // A file that is still being written is ignored.
        let settled = SystemTime::now() - Duration::from_secs(5);
        fs::File::options().write(true).open(&path).unwrap().set_modified(settled).unwrap();
    };
    let states = |launches: [i32; 3]| AllCoreStateSummaries {
        core_states: launches
            .iter()
            .enumerate()
            .map(|(at, launch)| (at as i32, core(at as i32, *launch)))
            .collect(),
    };
    write("tpu_stall_summary_1.pb", &states([7, 6, 7]).encode_to_vec());
    write("tpu_stall_summary_2.pb", b"\xff\xff\xff");
    write("tpu_driver.INFO", b"not a summary");
    symlink("/dev/zero", host.path("logs/tpu_stall_summary_3.pb")).unwrap();
    nix::unistd::mkfifo(&host.path("logs/tpu_stall_summary_4.pb"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut source = host.source(&[]);
    let stalls = source.sample().stalls;
    assert_eq!(stalls.len(), 3, "{stalls:?}");
    let cores = stalls[0].cores.as_ref().unwrap();
    let named: Vec<_> = cores.iter().map(|core| ("", core)).collect();
    assert_eq!(outliers(&named).iter().map(|outlier| outlier.core).collect::<Vec<_>>(), [1]);
    assert!(stalls[1].cores.is_err() && stalls[2].cores.is_err(), "{stalls:?}");
    assert_eq!(source.sample().stalls, []);
    // Reported before the agent was restarted.
    let plan = TpuPlan {
        sys: host.path("sys"),
        proc: host.path("proc"),
        endpoints: Vec::new(),
        deadline: Duration::from_secs(1),
        log_dir: host.path("logs"),
    };
    let reported = ["tpu_stall_summary_1.pb", "tpu_stall_summary_2.pb", "tpu_stall_summary_3.pb"];
    let mut again = TpuSource::new(plan, reported.map(str::to_owned).into());
    assert_eq!(again.sample().stalls, []);
}

fn start(host: &Host) -> Agent {
    let (sys, proc, logs) = (host.path("sys"), host.path("proc"), host.path("logs"));
    let settings: [(&str, &Path); 5] = [
        ("HOST_SYS_ROOT", &sys),
        ("HOST_PROC_ROOT", &proc),
        ("TPU_LOG_DIR", &logs),
        ("TPU_INTERVAL", Path::new("1s")),
        ("LIMITS_TPU_STILL_FOR", Path::new("1s")),
    ];
    Agent::start(host.0.path(), &settings)
}

#[test]
fn the_whole_agent_names_the_core_that_holds_up_the_others() {
    let libtpu = Libtpu::start(script());
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0063", 0);
    host.vfio_chip("0000:00:05.0", "0x0063", 1);
    host.process(4711, &["/dev/vfio/0", "/dev/vfio/1"], &libtpu.port.to_string());
    let agent = start(&host);
    let outlier = agent.wait_for_observation("tpu.runtime", "core_outlier");
    assert_eq!((&outlier["values.core"], &outlier["values.chip"]), (&"1".into(), &"1".into()));
    let detail = outlier["detail"].as_str().unwrap();
    testing::snapshot!("tpu", "a core that holds up the others", detail.split(';').next().unwrap());
    assert!(detail.contains("%all-reduce.17"), "{detail}");
    let metrics = agent.metrics();
    for line in [
        "mainstay_tpu_duty_cycle_percent{component=\"tpu.0\"} 93.5",
        "mainstay_tpu_hbm_used_bytes{component=\"tpu.1\"} 2147483648",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let status = agent.status();
    assert!(status.contains("tpu.0") && status.contains("duty cycle 94 %"), "{status}");
    drop(libtpu);
    agent.wait_for_observation("tpu.runtime", "runtime_silent");
    // The trainer is gone: the chips are idle.
    fs::remove_dir_all(host.path("proc/4711")).unwrap();
    agent.wait_for("idle: ");
}

#[test]
fn a_core_with_an_uncorrectable_memory_error_makes_its_chip_unhealthy_and_other_errors_do_not() {
    let libtpu = Libtpu::start(script());
    libtpu.change(|script| {
        let cores = script.cores.as_mut().unwrap();
        cores.get_mut(&0).unwrap().error_message = Some("the program was cancelled".to_owned());
        cores.get_mut(&1).unwrap().error_message = Some("UNCORRECTABLE HBM ECC error on core 1".to_owned());
    });
    let host = Host::new();
    host.vfio_chip("0000:00:04.0", "0x0063", 0);
    host.vfio_chip("0000:00:05.0", "0x0063", 1);
    host.process(4711, &["/dev/vfio/0", "/dev/vfio/1"], &libtpu.port.to_string());
    let agent = start(&host);
    let reported = agent.wait_until_in_state("tpu.1", "UNHEALTHY").to_string();
    assert!(reported.contains("0000:00:05.0") && reported.contains("UNCORRECTABLE HBM ECC"), "{reported}");
    let status = agent.status();
    let line = |name: &str| {
        status.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {status}"))
    };
    assert!(line("tpu.1").contains("UNHEALTHY"), "{status}");
    assert!(line("tpu.0").contains("UNKNOWN"), "{status}");
    assert_eq!(line("recommended").trim(), "recommended: REPLACE_NODE", "{status}");
}

#[test]
fn the_whole_agent_reports_nothing_about_tpus_where_there_are_none() {
    let host = Host::new();
    let agent = start(&host);
    agent.wait_for("host.memory");
    assert!(!agent.status().contains("tpu"), "{}", agent.status());
}
