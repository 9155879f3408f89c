//! GPUs by way of the real probe, the real NVML wrapper and a library of our own in place of NVIDIA's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod support;

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_agent::source::device::{DeviceSource, ProbePlan, Waited};
use mainstay_core::catalog::Catalog;
use mainstay_core::device::{
    Clocks, DeviceJudge, DeviceLimits, DeviceReport, DriverTrouble, EccCount, EccPlace, FabricInfo, GpuEvent,
    GpuProcess, GpuReading, GpuTrouble, ProbeAnswer, Read, SlowdownTimes, SramErrors,
};
use mainstay_core::entry::Fact;
use mainstay_core::health::{Component, HealthState, RecommendedAction};
use mainstay_core::id::Pid;
use mainstay_core::parse::kmsg::Record;
use mainstay_core::parse::log::LogReader;
use mainstay_core::pci::PciAddress;
use mainstay_core::time::{Mono, Span};
use serde_json::{Value, json};
use support::Agent;
use tempfile::TempDir;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{None as Nothing, RebootNode, ReplaceNode, ResetDevice};

fn catalog() -> Catalog {
    Catalog::new(
        toml::from_str(include_str!("../catalog/hardware/xid.toml")).unwrap(),
        toml::from_str(include_str!("../catalog/hardware/sxid.toml")).unwrap(),
        toml::from_str(include_str!("../catalog/hardware/kernel.toml")).unwrap(),
        toml::from_str(include_str!("../catalog/hardware/nvlink.toml")).unwrap(),
    )
    .unwrap()
}

/// A host with GPUs that do as they are told.
struct Host {
    directory: TempDir,
    script: Value,
    source: DeviceSource,
    judge: DeviceJudge,
    now: Mono,
}

impl Host {
    fn with_gpus(count: usize) -> Host {
        Host::with_deadline(count, Duration::from_secs(60))
    }

    fn with_deadline(count: usize, deadline: Duration) -> Host {
        let directory = tempfile::tempdir().unwrap();
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        let library = directory.path().join(fake_devices::LIBRARY);
        fs::copy(built, &library).unwrap();
        let gpus: Vec<Value> = (0..count)
            .map(|index| json!({"uuid": format!("GPU-{index}"), "pci": format!("00000000:{:02X}:00.0", index + 1)}))
            .collect();
        let host = Host {
            script: json!({"driver": "550.54.15", "gpus": gpus}),
            source: DeviceSource::new(plan(Some(library), deadline)),
            judge: DeviceJudge::new(catalog(), DeviceLimits::default()),
            now: Mono(1_000_000_000_000),
            directory,
        };
        host.write();
        host
    }

    /// Changes the world.
    fn set(&mut self, pointer: &str, value: Value) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        self.script.pointer_mut(parent).unwrap()[key] = value;
        self.write();
    }

    fn write(&self) {
        let path = self.directory.path().join(fake_devices::SCRIPT);
        let beside = path.with_extension("new");
        fs::write(&beside, self.script.to_string()).unwrap();
        fs::rename(beside, path).unwrap();
    }

    /// One look at the GPUs, some time later.
    fn look(&mut self) -> (DeviceReport, Vec<Fact>) {
        self.now = self.now.after(Span::seconds(10));
        let report = self.source.sample(self.now);
        let facts = self.judge.report(self.now, report.clone());
        (report, facts)
    }

    /// Some looks: what was found is taken back only after several that are in order.
    fn look_for_a_while(&mut self) {
        for _ in 0..3 {
            self.gpus();
        }
    }

    fn gpus(&mut self) -> Vec<GpuReading> {
        match self.look().0 {
            DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => gpus,
            other => panic!("no GPUs: {other:?}"),
        }
    }

    fn component(&mut self, name: &str) -> Component {
        let all = self.judge.components(self.now);
        let names: Vec<String> = all.iter().map(|component| component.name.clone()).collect();
        all.into_iter()
            .find(|component| component.name == name)
            .unwrap_or_else(|| panic!("no {name} in {names:?}"))
    }

    fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) -> String {
        let component = self.component(name);
        assert_eq!((component.state, component.action), (state, action), "{name}: {}", component.reason);
        component.reason
    }
}

fn plan(library: Option<PathBuf>, deadline: Duration) -> ProbePlan {
    ProbePlan {
        program: env!("CARGO_BIN_EXE_mainstay").into(),
        library,
        sys: "/nowhere".into(),
        proc: "/nowhere".into(),
        deadline,
        details_every: Span::default(),
        known: Vec::new(),
    }
}

const FIRST: &str = "gpu.0000:01:00";
const SECOND: &str = "gpu.0000:02:00";

#[test]
fn eight_healthy_gpus_are_healthy() {
    let mut host = Host::with_gpus(8);
    let gpus = host.gpus();
    assert_eq!(gpus.len(), 8);
    let gpu = &gpus[7];
    let identity = gpu.identity.as_ref().unwrap();
    assert_eq!((identity.uuid.as_str(), identity.address.to_string()), ("GPU-7", "0000:08:00".to_owned()));
    assert_eq!((gpu.trouble.as_ref(), gpu.temperature.value(), gpu.nvlinks.len()), (None, Some(&41), 18));
    assert_eq!(gpu.recovery_action, Read::Value(0));
    assert_eq!(host.expect("gpu.driver", Healthy, Nothing), "driver 550.54.15, 8 GPUs");
    for bus in 1..=8 {
        host.expect(&format!("gpu.0000:{bus:02x}:00"), Healthy, Nothing);
    }
}

#[test]
fn a_lost_gpu_keeps_its_name_and_takes_no_other_along() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    host.set("/gpus/0/codes", json!({"*": 15}));
    let gpus = host.gpus();
    assert_eq!(gpus[0].trouble, Some(GpuTrouble::Lost));
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Healthy, Nothing);
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetTemperature": 15}));
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.set("/gpus/0/codes", json!({"*": 16}));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.set("/gpus/0/codes", json!({}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_gpu_that_is_not_counted_any_more_is_missed() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let first = host.script["gpus"][0].clone();
    host.set("/gpus", json!([first]));
    host.gpus();
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn what_a_gpu_does_not_have_is_no_fault() {
    let mut host = Host::with_gpus(1);
    let values = json!({"ecc_volatile": null, "ecc_aggregate": null, "remapped_corrected": null, "recovery_action": null, "power": null, "nvlinks": 0, "pages_pending": null});
    host.set("/gpus/0/values", values);
    let gpus = host.gpus();
    assert_eq!((&gpus[0].ecc_volatile, &gpus[0].power), (&Read::NotOffered, &Read::NotOffered));
    assert_eq!((&gpus[0].remapped, &gpus[0].recovery_action), (&Read::NotOffered, &Read::NotOffered));
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn errors_of_a_lifetime_are_no_fault_and_those_of_now_are() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/values", json!({"ecc_aggregate": 12, "remapped_uncorrected": 3}));
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
    for (values, state, action) in [
        (json!({"ecc_volatile": 1}), Unhealthy, ResetDevice),
        (json!({"remap_pending": 1}), Degraded, ResetDevice),
        (json!({"remap_failed": 1}), Unhealthy, ReplaceNode),
    ] {
        host.set("/gpus/0/values", values);
        host.gpus();
        host.expect(FIRST, state, action);
        host.set("/gpus/0/values", json!({}));
        host.look_for_a_while();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn links_are_missed_that_were_there_before() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/links_down", json!([17]));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/links_down", json!([3, 17]));
    host.gpus();
    assert_eq!(host.expect(FIRST, Unhealthy, ResetDevice), "NVLink 3 down, 16 of 17 up");
    let reason = host.expect("nvlink.0000:01:00/3", Unhealthy, ResetDevice);
    assert!(reason.ends_with("its other end is 0000:c1:00"), "{reason}");
    host.set("/gpus/0/values", json!({"mig": 1}));
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
    host.expect("nvlink.0000:01:00/3", Healthy, Nothing);
}

#[test]
fn a_short_slowdown_is_none_and_a_long_one_is() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/values", json!({"clock_reasons": 0x40}));
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
    for _ in 0..6 {
        host.now = host.now.after(Span::seconds(50));
        host.gpus();
    }
    host.expect(FIRST, Degraded, RecommendedAction::ContactSupport);
    host.set("/gpus/0/values", json!({"clock_reasons": 4}));
    for _ in 0..10 {
        host.now = host.now.after(Span::seconds(50));
        host.gpus();
    }
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn xids_and_readings_are_one_gpu() {
    let mut host = Host::with_gpus(1);
    host.gpus();
    let line =
        "NVRM: Xid (PCI:0000:01:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response";
    let (at, fact) = LogReader::default().read(host.now, &Record::parse(line), 1).unwrap();
    host.judge.take_in(at, &fact);
    host.set("/gpus/0/values", json!({"recovery_action": 2}));
    host.gpus();
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    assert!(reason.contains("XID 119") && reason.contains("a reboot of the node"), "{reason}");
}

#[test]
fn each_way_of_not_being_readable_has_its_own_words() {
    for (code, trouble, words) in [
        (9, DriverTrouble::DriverNotLoaded, "is not loaded"),
        (18, DriverTrouble::VersionMismatch, "different versions"),
        (4, DriverTrouble::NoPermission, "may not ask"),
        (999, DriverTrouble::Other, "refuses"),
    ] {
        let mut host = Host::with_gpus(1);
        host.gpus();
        host.set("/codes", json!({"nvmlDeviceGetCount_v2": code}));
        // The library begins anew after it failed: then it is its beginning that fails.
        for _ in 0..2 {
            let report = host.look().0;
            let DeviceReport::Answered(ProbeAnswer::Trouble { trouble: told, .. }) = report else {
                panic!("{code}: {report:?}")
            };
            assert_eq!(told, trouble, "{code}");
            let reason = host.expect("gpu.driver", Unknown, Nothing);
            assert!(reason.contains(words), "{reason}");
            host.expect(FIRST, Unknown, Nothing);
            host.set("/codes", json!({"nvmlInit_v2": code}));
        }
        host.set("/codes", json!({}));
        host.gpus();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn everything_that_a_library_tells_is_read() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000], [4712, u64::MAX]]));
    host.set(
        "/gpus/0/links",
        json!({"4": {"replays": 12, "crc": 3, "recovered": 2, "effective_ber": 0x50c}}),
    );
    host.set(
        "/gpus/0/values",
        json!({"dram_corrected_aggregate": 7, "sram_threshold": 0, "sram_uncorrected_aggregate": 2, "margin": -1,
               "slowdown_thermal": 5, "pages_uncorrected": 2, "fabric_mask": 0x155, "memory_temperature": 61}),
    );
    let gpu = host.gpus().remove(0);
    let process = |pid, memory| GpuProcess { pid: Pid(pid), memory };
    assert_eq!(gpu.processes, Read::Value(vec![process(4711, Some(1_000_000)), process(4712, None)]));
    assert_eq!((gpu.margin, gpu.memory_temperature), (Read::Value(-1), Read::Value(61)));
    assert_eq!(gpu.slowdown, Read::Value(SlowdownTimes { thermal: 5, brake: 0 }));
    assert_eq!(gpu.clocks, Read::Value(Clocks { sm: 1980, memory: 2619 }));
    let fabric = FabricInfo { state: 3, status: 0, health_mask: 0x155, health_summary: 1 };
    assert_eq!((gpu.fabric, gpu.unrepairable), (Read::Value(fabric), Read::Value(false)));
    let details = gpu.details.unwrap();
    let corrected = EccCount { place: EccPlace::Dram, corrected: true, lifetime: true, count: 7 };
    assert!(details.ecc.contains(&corrected), "{:?}", details.ecc);
    let sram = SramErrors { uncorrected_lifetime: 2, ..SramErrors::default() };
    assert_eq!((details.sram, details.pages_retired), (Read::Value(sram), Read::Value((0, 2))));
    assert_eq!((details.hottest, details.power_limit), (Read::Value(87), Read::Value(700_000)));
    assert_eq!((details.slowdown_margin, details.inforom_valid), (Read::Value(-2), Read::Value(true)));
    assert_eq!(
        (details.persistence, details.gsp, details.ecc_on),
        (Read::Value(true), Read::Value(true), Read::Value(true))
    );
    assert_eq!(details.vbios, Read::Value("96.00.61.00.01".to_owned()));
    let link = details.links.into_iter().find(|of| of.link == 4).unwrap();
    assert_eq!(
        (link.replays, link.recoveries, link.crc, link.recovered),
        (Some(12), Some(0), Some(3), Some(2))
    );
    assert_eq!((link.effective_ber, link.symbol_ber), (Some(5e-12), Some(0.0)));
    assert_eq!(link.remote.map(|remote| remote.to_string()).as_deref(), Some("0000:c1:00"));
}

#[test]
fn a_driver_of_old_lacks_much_and_is_no_worse_for_it() {
    let host = Host::with_gpus(2);
    let library = host.directory.path().join(fake_devices::LIBRARY);
    let newest = fs::read(&library).unwrap();
    let old = fake_devices::without(
        &newest,
        &[
            "nvmlDeviceGetPciInfo_v3",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetSramEccErrorStatus",
            "nvmlDeviceGetMarginTemperature",
            "nvmlDeviceGetUnrepairableMemoryFlag_v1",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceGetGspFirmwareMode",
            "nvmlDeviceValidateInforom",
            "nvmlEventSetCreate",
        ],
    );
    assert_ne!(newest, old);
    // Not over the old one, which is mapped.
    let beside = library.with_extension("old");
    fs::write(&beside, old).unwrap();
    fs::rename(beside, &library).unwrap();
    let mut host = host;
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    host.set("/gpus/0/links", json!({"4": {"replays": 12}}));
    host.set("/gpus/0/values", json!({"clock_reasons": 4, "violation_thermal": 9}));
    let gpus = host.gpus();
    let gpu = &gpus[0];
    assert_eq!(gpu.identity.as_ref().unwrap().address.to_string(), "0000:01:00");
    assert_eq!(gpu.processes, Read::Value(vec![GpuProcess { pid: Pid(4711), memory: Some(1_000_000) }]));
    assert_eq!((&gpu.clock_reasons, &gpu.fabric), (&Read::Value(4), &Read::NotOffered));
    assert_eq!((&gpu.remapped, &gpu.recovery_action), (&Read::NotOffered, &Read::NotOffered));
    assert_eq!(gpu.slowdown, Read::Value(SlowdownTimes { thermal: 9, brake: 0 }));
    let details = gpu.details.as_ref().unwrap();
    assert_eq!(
        (&details.sram, &details.gsp, &details.inforom_valid),
        (&Read::NotOffered, &Read::NotOffered, &Read::NotOffered)
    );
    assert_eq!(details.links[4].replays, Some(12));
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn an_older_version_of_a_struct_is_asked_for_where_the_newest_is_not_known() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"fabric_version": 2, "fabric_status": 28, "fabric_summary": 2}));
    let fabric = FabricInfo { state: 3, status: 28, health_mask: 0, health_summary: 0 };
    assert_eq!(host.gpus()[0].fabric, Read::Value(fabric));
}

#[test]
fn odd_answers_of_one_gpu_are_unknown_there_and_nowhere_else() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    for function in ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState"] {
        host.set("/gpus/0/codes", json!({function: 999}));
        host.gpus();
        host.expect(FIRST, Unknown, Nothing);
        host.expect(SECOND, Healthy, Nothing);
    }
    // What is not needed to call it well may fail as it likes.
    let codes = json!({"nvmlDeviceGetPowerUsage": 999, "nvmlDeviceGetComputeRunningProcesses_v3": 2, "nvmlDeviceGetFieldValues": 999,
        "nvmlDeviceGetMigMode": 2, "nvmlDeviceGetGpuFabricInfoV": 999, "nvmlDeviceGetSerial": 3, "nvmlDeviceGetPersistenceMode": 4});
    host.set("/gpus/0/codes", codes);
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_driver_that_is_slow_is_not_one_that_hangs() {
    let mut host = Host::with_deadline(3, Duration::from_secs(3));
    host.set("/slow_ms", json!(10));
    assert_eq!(host.gpus().len(), 3);
    host.expect("gpu.driver", Healthy, Nothing);
}

#[test]
fn xids_come_by_events_too() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let (reader, _writer) = std::io::pipe().unwrap();
    // A GPU that does not offer the newer kinds is asked for the older.
    host.set("/event_kinds", json!(0xa));
    let event = |kind, data| json!({"gpu": 1, "kind": kind, "data": data});
    host.set("/events", json!([event(8, 79), event(2, 0)]));
    let mut told = Vec::new();
    while told.len() < 2 {
        match host.source.wait(reader.as_fd(), Duration::from_secs(60)) {
            Waited::Told(events) => told.extend(events),
            other => panic!("{other:?}"),
        }
    }
    let gpu = PciAddress::parse("0000:02:00");
    let event = |kind, data| GpuEvent { gpu, kind, data, instance: None };
    assert_eq!(told, [event(8, 79), event(2, 0)]);
    host.judge.event(host.now, &told[0]);
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_library_without_events_is_watched_all_the_same() {
    for codes in [
        json!({"nvmlEventSetCreate": 3}),
        json!({"nvmlDeviceRegisterEvents": 3}),
        json!({"nvmlEventSetWait_v2": 999}),
    ] {
        let mut host = Host::with_gpus(1);
        host.set("/codes", codes);
        host.gpus();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn a_gpu_that_was_lost_before_the_agent_began_keeps_its_name() {
    let mut host = Host::with_gpus(2);
    let gpus = host.gpus();
    let known: Vec<_> = gpus.into_iter().map(|gpu| (gpu.index, gpu.identity.unwrap())).collect();
    host.set("/gpus/0/codes", json!({"*": 15}));
    let library = host.directory.path().join(fake_devices::LIBRARY);
    host.source = DeviceSource::new(ProbePlan { known, ..plan(Some(library), Duration::from_secs(60)) });
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
}

#[test]
fn a_library_that_is_not_there_is_said_to_be_missing() {
    let mut source =
        DeviceSource::new(plan(Some("/nowhere/libnvidia-ml.so.1".into()), Duration::from_secs(60)));
    let report = source.sample(Mono(1));
    let DeviceReport::Answered(ProbeAnswer::Trouble { trouble, detail }) = report else {
        panic!("{report:?}")
    };
    assert_eq!(trouble, DriverTrouble::LibraryMissing);
    assert!(detail.contains("/nowhere/libnvidia-ml.so.1"), "{detail}");
}

#[test]
fn a_host_without_gpus_is_left_in_peace() {
    let mut source = DeviceSource::new(plan(None, Duration::from_secs(60)));
    assert_eq!(source.sample(Mono(1)), DeviceReport::NoGpus);
    let mut judge = DeviceJudge::new(catalog(), DeviceLimits::default());
    assert_eq!(judge.report(Mono(1), DeviceReport::NoGpus), []);
    assert_eq!(judge.components(Mono(1)), []);
}

#[test]
fn a_driver_that_hangs_is_a_fact_and_is_asked_again() {
    let mut host = Host::with_deadline(1, Duration::from_secs(5));
    host.gpus();
    host.set("/hang", json!(["nvmlDeviceGetTemperature"]));
    let (report, facts) = host.look();
    let since = host.now;
    assert_eq!(report, DeviceReport::Silent { since, reading: Some(0) });
    assert_eq!(facts, [Fact::GpuDriverSilent { since }]);
    host.expect("gpu.driver", Unknown, Nothing);
    host.expect(FIRST, Unknown, Nothing);

    host.now = host.now.after(Span::seconds(60));
    let (report, facts) = host.look();
    assert_eq!((report, facts), (DeviceReport::Silent { since, reading: Some(0) }, Vec::new()));
    let reason = host.expect("gpu.driver", Unhealthy, RebootNode);
    assert!(reason.starts_with("driver hung since 70"), "{reason}");
    assert!(reason.ends_with("while GPU 0000:01:00 was read"), "{reason}");

    host.set("/hang", json!([]));
    // Whoever hung is not gone at once; until then nobody else is started.
    let facts = loop {
        match host.look() {
            (DeviceReport::Silent { .. }, _) => {}
            (DeviceReport::Answered(_), facts) => break facts,
            (other, _) => panic!("{other:?}"),
        }
    };
    assert!(matches!(facts[0], Fact::GpuDriverAnswered { .. }));
    host.expect("gpu.driver", Healthy, Nothing);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_probe_that_is_no_probe_is_broken() {
    let mut broken = plan(Some("/nowhere".into()), Duration::from_secs(60));
    broken.program = "/bin/false".into();
    let report = DeviceSource::new(broken.clone()).sample(Mono(1));
    assert!(matches!(report, DeviceReport::Broken(_)), "{report:?}");
    broken.program = "/nowhere/mainstay".into();
    let DeviceReport::Broken(why) = DeviceSource::new(broken).sample(Mono(1)) else { panic!("started") };
    assert!(why.starts_with("starting /nowhere/mainstay: No such file"), "{why}");
}

#[test]
fn an_agent_whose_driver_hangs_answers_and_says_so() {
    let mut host = Host::with_gpus(2);
    host.set("/hang", json!(["nvmlDeviceGetTemperature"]));
    let library = host.directory.path().join(fake_devices::LIBRARY);
    let log = host.directory.path().join("kmsg");
    fs::write(&log, "").unwrap();
    let settings: [(&str, &Path); 4] = [
        ("GPU_LIBRARY", &library),
        ("GPU_DEADLINE", "1s".as_ref()),
        ("GPU_INTERVAL", "1s".as_ref()),
        ("KERNEL_LOG_PATH", &log),
    ];
    let agent = Agent::start(host.directory.path(), &settings);
    agent.wait_for("gpu_driver_silent");
    assert!(agent.status().contains("driver hung since"), "{}", agent.status());
    host.set("/hang", json!([]));
    agent.wait_for("gpu.driver went from UNKNOWN to HEALTHY");
    assert!(agent.status().contains("gpu.0000:02:00"), "{}", agent.status());
}

#[test]
fn an_agent_shows_its_gpus_and_tells_an_xid_once() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    let library = host.directory.path().join(fake_devices::LIBRARY);
    let log = host.directory.path().join("kmsg");
    fs::write(&log, "").unwrap();
    let settings: [(&str, &Path); 3] =
        [("GPU_LIBRARY", &library), ("GPU_INTERVAL", "1s".as_ref()), ("KERNEL_LOG_PATH", &log)];
    let agent = Agent::start(host.directory.path(), &settings);
    // Learned: three readings were well.
    agent.wait_for("18 NVLinks up");
    let told: Value = serde_json::from_str(&agent.ask(&["gpus", "--json"])).unwrap();
    assert_eq!(told["exit_status"], 0, "{told}");
    let first = &told["devices"][0];
    assert_eq!((&first["pci_address"], &first["uuid"]), (&json!("0000:01:00"), &json!("GPU-0")));
    assert_eq!((&first["links_up"], &first["power_limit"]), (&json!(18), &json!(700.0)));
    assert_eq!(first["processes"], json!([{"pid": 4711, "memory": 1_000_000}]));

    // Both tell of one XID, and only the driver of another.
    let line = "4,1,1000,-;NVRM: Xid (PCI:0000:02:00): 119, pid=7, name=python, Timeout after 6s\n";
    fs::write(&log, line).unwrap();
    let event = |gpu, code| json!({"gpu": gpu, "kind": 8, "data": code});
    host.set("/events", json!([event(1, 119), event(0, 79)]));
    agent.wait_for("XID 79 of GPU 0000:01:00: told by an event of NVML");
    let events = agent.ask(&["events", "--json"]);
    let xids = events.lines().filter(|line| line.contains("XID 119 of GPU")).count();
    assert_eq!(xids, 1, "{events}");
    let gpus = agent.ask(&["gpus"]);
    assert!(gpus.contains("0000:01:00  UNHEALTHY") && gpus.contains("XID 79"), "{gpus}");
}

#[test]
fn calls_that_hang_for_one_gpu_take_no_other_along() {
    let mut host = Host::with_deadline(3, Duration::from_secs(5));
    host.gpus();
    host.set("/gpus/1/hang", json!(["nvmlDeviceGetTemperature"]));
    let since = host.now.after(Span::seconds(10));
    assert_eq!(host.look().0, DeviceReport::Silent { since, reading: Some(1) });
    // The others are read while it hangs, and when it is tried again, too.
    for wait in [10, 60, 10] {
        host.now = host.now.after(Span::seconds(wait));
        let gpus = loop {
            match host.look().0 {
                DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => break gpus,
                // Whoever hung is not gone at once.
                DeviceReport::Silent { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(gpus[1].trouble, Some(GpuTrouble::Hangs(since)));
        assert_eq!((gpus[0].trouble.as_ref(), gpus[2].trouble.as_ref()), (None, None));
        host.expect(FIRST, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
    host.expect(SECOND, Unhealthy, RebootNode);
    host.set("/gpus/1/hang", json!([]));
    host.now = host.now.after(Span::seconds(60));
    host.look_for_a_while();
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_gpu_that_hangs_from_the_start_hides_no_other() {
    for function in ["nvmlDeviceRegisterEvents", "nvmlDeviceGetUUID"] {
        let mut host = Host::with_deadline(2, Duration::from_secs(5));
        host.set("/gpus/0/hang", json!([function]));
        assert!(matches!(host.look().0, DeviceReport::Silent { reading: Some(0), .. }));
        while matches!(host.look().0, DeviceReport::Silent { .. }) {}
        host.expect(SECOND, Healthy, Nothing);
        let nameless = if function == "nvmlDeviceGetUUID" { Unknown } else { Healthy };
        // It is told apart from one whose events alone cannot be had, once it was tried again.
        (0..7).for_each(|_| drop(host.look()));
        host.expect("gpu.driver", nameless, Nothing);
    }
}

#[test]
fn peers_that_are_not_reached_any_more_are_missed() {
    let mut host = Host::with_gpus(3);
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/peers_lost", json!([1, 2]));
    host.gpus();
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    assert!(reason.contains("0000:02:00, 0000:03:00 over NVLink any more"), "{reason}");
    host.expect(SECOND, Healthy, Nothing);
    // Where the driver does not tell, nothing is made of it.
    host.set("/gpus/0/peers_lost", json!([]));
    host.look_for_a_while();
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetP2PStatus": 3}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn why_a_gpu_has_no_handle_is_its_own_state() {
    for (code, state, action) in [
        (8, Unhealthy, RecommendedAction::ContactSupport),
        (11, Unhealthy, RebootNode),
        (15, Unhealthy, RebootNode),
        (16, Unhealthy, ResetDevice),
        (999, Unknown, Nothing),
        (4, Unknown, Nothing),
        (10, Unknown, Nothing),
    ] {
        let mut host = Host::with_gpus(2);
        host.gpus();
        host.set("/gpus/0/codes", json!({"nvmlDeviceGetHandleByIndex_v2": code}));
        host.gpus();
        host.expect(FIRST, state, action);
        host.expect(SECOND, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
}

#[test]
fn numbers_that_stand_for_none_are_none() {
    let mut host = Host::with_gpus(1);
    let all_bits = i64::from(u32::MAX);
    host.set(
        "/gpus/0/values",
        json!({"memory_temperature": all_bits, "recovery_action": all_bits, "temperature": all_bits}),
    );
    let gpus = host.gpus();
    let gpu = &gpus[0];
    assert_eq!((&gpu.memory_temperature, &gpu.temperature), (&Read::NotOffered, &Read::NotOffered));
    assert_eq!(gpu.recovery_action, Read::NotOffered);
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"memory_temperature": 0}));
    assert_eq!(host.gpus()[0].memory_temperature, Read::NotOffered);
}

#[test]
fn a_library_without_the_functions_of_old_is_asked_by_the_newer_ones() {
    let mut host = Host::with_gpus(1);
    let codes = json!({"nvmlDeviceGetTemperature": 3, "nvmlDeviceGetCurrentClocksEventReasons": 3, "nvmlDeviceGetPciInfo_v3": 3});
    host.set("/gpus/0/codes", codes);
    let gpus = host.gpus();
    assert_eq!((&gpus[0].temperature, &gpus[0].clock_reasons), (&Read::Value(41), &Read::Value(1)));
    assert_eq!(gpus[0].identity.as_ref().unwrap().address.to_string(), "0000:01:00");
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_library_that_tells_nothing_but_names_does_not_make_healthy() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let silent = [
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ];
    let codes: serde_json::Map<String, Value> =
        silent.iter().map(|function| ((*function).to_owned(), json!(3))).collect();
    host.set("/gpus/0/codes", Value::Object(codes));
    host.gpus();
    host.expect(FIRST, Unknown, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_gpu_that_only_the_kernel_still_holds_is_missed_and_one_that_is_excluded_is_not() {
    let mut host = Host::with_gpus(2);
    let proc = host.directory.path().join("proc");
    let held = |name: &str, information: &str| {
        let directory = proc.join("driver/nvidia/gpus").join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("information"), information).unwrap();
    };
    held("0000:01:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    held("0000:02:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    held("0000:03:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t Yes\n");
    let library = host.directory.path().join(fake_devices::LIBRARY);
    host.source =
        DeviceSource::new(ProbePlan { proc: proc.clone(), ..plan(Some(library), Duration::from_secs(60)) });
    host.gpus();
    host.expect("gpu.driver", Healthy, Nothing);
    held("0000:04:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    host.gpus();
    let reason = host.expect("gpu.driver", Unhealthy, RebootNode);
    assert!(reason.ends_with("holds GPU 0000:04:00 too"), "{reason}");
}
