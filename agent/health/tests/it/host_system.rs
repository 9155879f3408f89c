//! The judge of the operating system: each check with a fault, and with a case that it must not report.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use mainstay_health::host::os::{
    Blocked, Capped, ClockReading, HostLimits, MemoryModule, Modules, MountReading, MountState, ProcessScan,
    Reading, Service, Services, SwitchPorts, SystemJudge, SystemSample, Tables, Usage,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::{BootId, Pid};
use mainstay_model::observation::Observation;
use mainstay_model::time::{Mono, Span, Stamp, Wall};

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ReplaceNode, RestartProcess};

const HOUR: u64 = 3600;

struct Host {
    judge: SystemJudge,
    sample: SystemSample,
    now: Mono,
    /// How far the wall clock is ahead, in nanoseconds.
    ahead: i64,
    seen: Vec<Observation>,
}

impl Host {
    fn new() -> Host {
        let usage = |used, limit| Reading::Value(Usage { used, limit });
        let clock = ClockReading {
            synchronised: true,
            max_error: Span::millis(3),
            source: Some("tsc".into()),
            has_fast: true,
        };
        let sample = SystemSample {
            clock: Reading::Value(clock),
            tables: Tables { files: usage(5000, u64::MAX), tasks: usage(3000, 4_194_304), group_tasks: None },
            scan: Some(Reading::Value(ProcessScan { processes: 400, ..ProcessScan::default() })),
            ..SystemSample::default()
        };
        Host {
            judge: SystemJudge::new(HostLimits::default()),
            sample,
            now: Mono(0).after(Span::seconds(24 * HOUR)),
            ahead: 0,
            seen: Vec::new(),
        }
    }

    fn poll_after(&mut self, seconds: u64) -> Vec<Component> {
        self.now = self.now.after(Span::seconds(seconds));
        self.sample.since_boot = Some(self.now);
        self.sample.wall = Wall(1_700_000_000_000_000_000 + self.now.0 as i64 + self.ahead);
        let judged = self.judge.step(self.now, &self.sample);
        self.seen.extend(judged.facts.into_iter().filter_map(|fact| match fact {
            Fact::Observed(observation) => Some(observation),
            _ => None,
        }));
        judged.components
    }

    fn poll_times(&mut self, count: usize) {
        for _ in 0..count {
            self.poll_after(10);
        }
    }

    fn find(&mut self, name: &str) -> Option<Component> {
        self.poll_after(10).into_iter().find(|component| component.name == name)
    }

    fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) -> String {
        let seen = self.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!((seen.state, seen.action), (state, action), "{name}: {}", seen.reason);
        seen.reason
    }

    fn blocked(&mut self, blocked: &[Blocked]) {
        let scan = ProcessScan { processes: 400, blocked: blocked.to_vec(), ..ProcessScan::default() };
        self.sample.scan = Some(Reading::Value(scan));
    }

    fn zombies(&mut self, zombies: u64) {
        let most = Some((Pid(17), "containerd-shim".to_owned(), zombies));
        self.sample.scan =
            Some(Reading::Value(ProcessScan { processes: 1000, zombies, most, blocked: vec![] }));
    }

    fn mount(&mut self, state: MountState) {
        let (point, kind, from) = ("/data".to_owned(), "nfs4".to_owned(), "server:/data".to_owned());
        self.sample.mounts = vec![MountReading { point, kind, from, state }];
    }

    fn units(&mut self, switches: bool, gpus: u32, units: &[Service]) {
        self.sample.services = Some(Reading::Value(Services { units: units.to_vec(), gpus, switches }));
    }

    fn clock(&mut self, synchronised: bool, max_error: Span) {
        let source = Some("tsc".into());
        self.sample.clock = Reading::Value(ClockReading { synchronised, max_error, source, has_fast: true });
    }
}

fn sleeper(waits_in: &[&str]) -> Blocked {
    Blocked {
        pid: 4711,
        start: 99,
        name: "python".into(),
        kernel_thread: false,
        waits_in: waits_in.iter().map(|name| (*name).to_owned()).collect(),
        ran: Some(12),
    }
}

fn unit(name: &str, active: &str) -> Service {
    Service {
        name: name.into(),
        active: active.into(),
        result: "exit-code".into(),
        enabled: true,
        ..Service::default()
    }
}

#[test]
fn a_calm_host_is_healthy_and_shows_only_components_that_it_has() {
    let mut host = Host::new();
    for _ in 0..100 {
        let components = host.poll_after(10);
        let names: Vec<&str> = components.iter().map(|component| component.name.as_str()).collect();
        assert_eq!(names, ["host.processes", "host.files", "host.clock", "host.boot"]);
        for component in components {
            assert_eq!((component.state, component.action), (Healthy, Nothing), "{component:?}");
            assert!(!component.reason.is_empty() && !component.evidence.is_empty(), "{component:?}");
        }
    }
}

#[test]
fn components_without_readings_are_unknown() {
    let mut host = Host::new();
    host.sample = SystemSample { scan: Some(Reading::default()), ..SystemSample::default() };
    for name in ["host.processes", "host.files", "host.clock"] {
        host.expect(name, Unknown, Nothing);
    }
}

#[test]
fn a_process_that_is_stuck_in_the_gpu_driver_needs_a_reboot() {
    for place in [["nv_open_q+0x12/0x80 [nvidia]"], ["os_acquire_semaphore"], ["uvm_va_space_down_read"]] {
        let mut host = Host::new();
        host.blocked(&[sleeper(&place)]);
        host.poll_times(12);
        let reason = host.expect("host.processes", Unhealthy, RebootNode);
        testing::snapshot!(
            "reasons",
            &format!("host_system: a process that is stuck in the gpu driver needs a reboot: {}", place[0]),
            reason
        );
        host.blocked(&[]);
        host.expect("host.processes", Healthy, Nothing);
    }
}

#[test]
fn a_process_that_is_stuck_elsewhere_degrades() {
    let mut host = Host::new();
    host.blocked(&[sleeper(&["rpc_wait_bit_killable+0x1/0x2 [sunrpc]", "nfs_getattr [nfs]"])]);
    host.poll_times(12);
    let reason = host.expect("host.processes", Degraded, Nothing);
    testing::snapshot!("reasons", "host_system: a process that is stuck elsewhere degrades", reason);
}

#[test]
fn a_process_that_reads_and_writes_is_not_stuck() {
    let mut host = Host::new();
    for ran in 0..100 {
        // It sleeps at each look but ran in between.
        host.blocked(&[Blocked { ran: Some(ran), ..sleeper(&["io_schedule"]) }]);
        host.expect("host.processes", Healthy, Nothing);
    }
    for start in 0..100 {
        host.blocked(&[Blocked { start, ..sleeper(&["nvidia_ioctl"]) }]);
        host.expect("host.processes", Healthy, Nothing);
    }
    let unknown = Blocked { ran: None, ..sleeper(&["io_schedule"]) };
    let thread = Blocked { kernel_thread: true, ..sleeper(&["worker_thread"]) };
    host.blocked(&[unknown, thread]);
    host.poll_times(100);
    host.expect("host.processes", Healthy, Nothing);
}

#[test]
fn two_distant_looks_are_not_enough_and_looks_without_a_scan_change_nothing() {
    let mut host = Host::new();
    host.blocked(&[sleeper(&["nvidia_ioctl"])]);
    host.poll_after(10);
    host.poll_after(600);
    let scan = host.sample.scan.take();
    host.poll_times(5);
    host.expect("host.processes", Healthy, Nothing);
    host.sample.scan = scan;
    host.expect("host.processes", Unhealthy, RebootNode);
    host.sample.scan = None;
    host.expect("host.processes", Unhealthy, RebootNode);
}

#[test]
fn many_lasting_zombies_degrade_and_their_parent_is_named() {
    let mut host = Host::new();
    host.zombies(300);
    host.poll_times(2);
    let reason = host.expect("host.processes", Degraded, RestartProcess);
    assert!(reason.contains("containerd-shim (process 17)"), "{reason}");
    for _ in 0..20 {
        host.zombies(300);
        host.poll_after(10);
        host.zombies(0);
        host.poll_after(10);
    }
    host.zombies(0);
    host.poll_times(6);
    host.expect("host.processes", Healthy, Nothing);
    // Few zombies that are a large share, then many that are a small share.
    host.sample.scan =
        Some(Reading::Value(ProcessScan { processes: 30, zombies: 20, ..ProcessScan::default() }));
    host.poll_times(20);
    host.expect("host.processes", Healthy, Nothing);
    host.zombies(150);
    host.poll_times(20);
    host.expect("host.processes", Healthy, Nothing);
}

#[test]
fn kernel_tables_are_judged_by_the_share_in_use() {
    let mut host = Host::new();
    host.sample.tables.tasks = Reading::Value(Usage { used: 27_000, limit: 32_768 });
    host.poll_times(2);
    host.expect("host.processes", Degraded, RestartProcess);
    host.sample.tables.tasks = Reading::Value(Usage { used: 32_000, limit: 32_768 });
    host.poll_times(2);
    host.expect("host.processes", Unhealthy, RestartProcess);
    host.sample.tables.files = Reading::Value(Usage { used: 96, limit: 100 });
    host.poll_times(2);
    host.expect("host.files", Unhealthy, RestartProcess);
    host.sample.tables.group_tasks = Some(Usage { used: 90, limit: 100 });
    host.poll_times(2);
    host.sample.tables.tasks = Reading::Value(Usage { used: 10, limit: 32_768 });
    host.poll_times(10);
    let reason = host.expect("host.processes", Degraded, RestartProcess);
    testing::snapshot!("reasons", "host_system: kernel tables are judged by the share in use", reason);
}

#[test]
fn a_clock_jump_degrades_for_ten_minutes() {
    let mut host = Host::new();
    host.poll_times(5);
    host.ahead = 30_000_000_000;
    let reason = host.expect("host.clock", Degraded, Nothing);
    assert!(reason.contains("+30.000 s"), "{reason}");
    assert_eq!(host.seen.iter().filter(|seen| seen.event == "clock_jump").count(), 1);
    host.poll_after(601);
    host.expect("host.clock", Healthy, Nothing);
}

#[test]
fn a_clock_that_is_slewed_or_set_at_boot_is_not_a_jump() {
    let mut host = Host::new();
    for _ in 0..100 {
        host.ahead += 5_000_000;
        host.expect("host.clock", Healthy, Nothing);
    }
    let mut host = Host::new();
    host.now = Mono(0);
    host.poll_after(10);
    host.ahead = -3_600_000_000_000;
    host.expect("host.clock", Healthy, Nothing);
    // The two clocks could not be read close together.
    host.sample.since_boot = None;
    let judged = host.judge.step(host.now, &host.sample);
    assert!(judged.facts.is_empty());
}

#[test]
fn a_clock_that_is_no_longer_synchronised_degrades_after_15_minutes() {
    let mut host = Host::new();
    host.poll_after(10);
    host.clock(false, Span::seconds(16));
    host.poll_times(90);
    host.expect("host.clock", Degraded, RestartProcess);
    host.clock(true, Span::millis(5));
    host.expect("host.clock", Healthy, Nothing);
    host.clock(true, Span::seconds(6));
    host.poll_times(91);
    testing::snapshot!(
        "reasons",
        "host_system: a clock that is no longer synchronised degrades after 15 minutes",
        host.expect("host.clock", Degraded, RestartProcess)
    );
}

#[test]
fn a_never_synchronised_clock_is_healthy_unless_the_journal_shows_otherwise() {
    let mut host = Host::new();
    host.clock(false, Span::seconds(16));
    host.poll_times(200);
    testing::snapshot!(
        "reasons",
        "host_system: a never synchronised clock is healthy unless the journal shows otherwise",
        host.expect("host.clock", Healthy, Nothing)
    );

    let mut before = Host::new();
    before.poll_after(10);
    let journal: Vec<(Stamp, BootId, Observation)> =
        before.seen.into_iter().map(|seen| (Stamp::default(), BootId("b".into()), seen)).collect();
    let mut host = Host::new();
    host.judge.recall(Stamp::default(), &BootId("b".into()), &journal);
    host.clock(false, Span::seconds(16));
    host.poll_times(91);
    host.expect("host.clock", Degraded, RestartProcess);
}

#[test]
fn three_boots_within_an_hour_are_a_boot_loop() {
    let now = 1_700_000_000_000_000_000 + (24 * HOUR) as i64 * 1_000_000_000;
    let boots = |minutes_ago: &[i64]| -> Vec<(Stamp, BootId, Observation)> {
        let boot = |ago: &i64| {
            let event =
                Observation { component: "host.boot".into(), event: "boot".into(), ..Observation::default() };
            // Recorded one second after the boot.
            let at =
                Stamp { mono: Mono(1_000_000_000), wall: Wall(now + 1_000_000_000 - ago * 60_000_000_000) };
            (at, BootId(ago.to_string()), event)
        };
        minutes_ago.iter().map(boot).collect()
    };
    let recalling = |journal: &[(Stamp, BootId, Observation)]| {
        let mut host = Host::new();
        host.judge.recall(Stamp { mono: host.now, wall: Wall(now) }, &BootId("5".into()), journal);
        host
    };
    let mut host = recalling(&boots(&[300, 50, 30, 5]));
    let reason = host.expect("host.boot", Degraded, ContactSupport);
    assert!(reason.contains("3 times within 1h"), "{reason}");
    host.poll_after(15 * 60);
    host.expect("host.boot", Healthy, Nothing);
    assert!(host.seen.iter().all(|seen| seen.event != "boot"), "it is in the journal already");
    let mut host = recalling(&boots(&[90, 30, 5, 5]));
    host.expect("host.boot", Healthy, Nothing);
    let mut host = recalling(&boots(&[30]));
    host.expect("host.boot", Healthy, Nothing);
    assert!(host.seen.iter().any(|seen| seen.event == "boot"));
}

#[test]
fn a_mount_that_hangs_is_unhealthy_until_it_answers_twice() {
    let mut host = Host::new();
    host.mount(MountState::Asked);
    host.expect("host.mounts", Unknown, Nothing);
    host.mount(MountState::Answers);
    host.expect("host.mounts", Healthy, Nothing);
    let since = host.now;
    host.mount(MountState::Silent { since });
    let reason = host.expect("host.mounts", Unhealthy, ContactSupport);
    testing::snapshot!(
        "reasons",
        "host_system: a mount that hangs is unhealthy until it answers twice",
        reason
    );
    host.mount(MountState::Answers);
    host.expect("host.mounts", Unhealthy, ContactSupport);
    host.expect("host.mounts", Healthy, Nothing);
    host.mount(MountState::Fails("ESTALE".into()));
    assert!(host.expect("host.mounts", Unhealthy, ContactSupport).contains("ESTALE"));
    host.sample.mounts.clear();
    assert_eq!(host.find("host.mounts"), None);
}

#[test]
fn a_failed_fabric_manager_is_unhealthy_only_with_switches_and_several_gpus() {
    let manager = unit("nvidia-fabricmanager.service", "failed");
    for (switches, gpus, state) in [(true, 8, Unhealthy), (false, 8, Healthy), (true, 1, Healthy)] {
        let mut host = Host::new();
        host.units(switches, gpus, std::slice::from_ref(&manager));
        let seen = host.find("host.services").unwrap();
        assert_eq!(seen.state, state, "{switches} {gpus}: {}", seen.reason);
    }
    let mut host = Host::new();
    host.units(true, 8, &[unit("nvidia-fabricmanager.service", "inactive")]);
    host.poll_after(10);
    host.expect("host.services", Unhealthy, RestartProcess);
}

#[test]
fn other_services_degrade_if_they_failed_but_not_if_they_were_stopped() {
    let mut host = Host::new();
    host.units(false, 8, &[unit("nvidia-persistenced.service", "active")]);
    host.expect("host.services", Healthy, Nothing);
    host.units(false, 8, &[unit("nvidia-persistenced.service", "failed")]);
    host.expect("host.services", Healthy, Nothing);
    let reason = host.expect("host.services", Degraded, RestartProcess);
    testing::snapshot!("reasons", "host_system: a service that failed", reason);
    host.sample.services = None;
    host.expect("host.services", Degraded, RestartProcess);
    host.units(false, 8, &[unit("nvidia-persistenced.service", "inactive")]);
    host.poll_times(5);
    host.expect("host.services", Healthy, Nothing);
    host.units(false, 8, &[]);
    assert_eq!(host.find("host.services"), None);
    host.sample.services = Some(Reading::Failed("systemctl does not answer".into()));
    host.expect("host.services", Unknown, Nothing);
}

#[test]
fn a_service_that_restarts_repeatedly_degrades() {
    let mut host = Host::new();
    for restarts in 100..106 {
        host.units(false, 8, &[Service { restarts, ..unit("nvidia-dcgm.service", "active") }]);
        host.poll_after(60);
    }
    let reason = host.expect("host.services", Degraded, RestartProcess);
    testing::snapshot!("reasons", "host_system: a service that restarts repeatedly degrades", reason);
    host.poll_after(2 * HOUR);
    host.expect("host.services", Healthy, Nothing);
}

#[test]
fn gpus_and_rdma_cards_without_a_direct_path_degrade() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let modules = Modules { loaded: names(&["nvidia", "gdrdrv"]), rdma: true, gpus: 8, ..Modules::default() };
    let cases = [
        (modules.clone(), Some(Degraded)),
        (Modules { dma_buf: true, ..modules.clone() }, Some(Healthy)),
        (Modules { loaded: names(&["nvidia", "nvidia_peermem"]), ..modules.clone() }, Some(Healthy)),
        (Modules { rdma: false, ..modules.clone() }, None),
        (Modules { gpus: 0, ..modules.clone() }, None),
        (Modules { loaded: vec![], ..modules.clone() }, None),
        (Modules { gpus: 0, without_verbs: names(&["mlx5_3"]), ..modules.clone() }, Some(Degraded)),
        (Modules { rdma: false, lacking: names(&["lustre"]), ..modules }, Some(Degraded)),
    ];
    for (modules, state) in cases {
        let mut host = Host::new();
        host.sample.modules = Some(Reading::Value(modules.clone()));
        assert_eq!(host.find("host.modules").map(|seen| seen.state), state, "{modules:?}");
    }
}

#[test]
fn corrected_memory_errors_count_by_rate_and_an_uncorrected_one_is_unhealthy() {
    let mut host = Host::new();
    let module =
        |corrected, uncorrected| vec![MemoryModule { name: "mc0 DIMM_A1".into(), corrected, uncorrected }];
    host.sample.memory = module(1_000_000, 0);
    host.poll_times(10);
    host.expect("host.memory_errors", Healthy, Nothing);
    host.sample.memory = module(1_001_000, 0);
    let reason = host.expect("host.memory_errors", Degraded, ContactSupport);
    assert!(reason.contains("1000 errors of mc0 DIMM_A1"), "{reason}");
    host.poll_after(2 * HOUR);
    host.expect("host.memory_errors", Healthy, Nothing);
    host.sample.memory = module(1_001_000, 1);
    host.expect("host.memory_errors", Unhealthy, ReplaceNode);
}

#[test]
fn thermal_throttling_degrades_after_several_minutes() {
    let mut host = Host::new();
    let mut count = 5000;
    host.sample.governors = [("performance".to_owned(), 128)].into();
    for minute in 1..=6 {
        host.sample.throttled = [("CPU package 0".to_owned(), count)].into();
        count += 1000;
        host.poll_after(50);
        let state = host.find("host.cpu_speed").unwrap().state;
        assert_eq!(state, Healthy, "minute {minute}");
    }
    host.sample.throttled = [("CPU package 0".to_owned(), count)].into();
    host.poll_after(50);
    host.expect("host.cpu_speed", Degraded, ContactSupport);
    host.poll_after(600);
    let reason = host.expect("host.cpu_speed", Healthy, Nothing);
    testing::snapshot!("reasons", "host_system: CPUs at full speed", reason);
}

#[test]
fn cpus_with_a_low_frequency_limit_degrade() {
    let mut host = Host::new();
    host.sample.governors = [("powersave".to_owned(), 128)].into();
    host.sample.capped = Some(Capped { cpus: 128, least: 72.0, at_least: 4 });
    host.expect("host.cpu_speed", Healthy, Nothing);
    host.sample.capped = Some(Capped { cpus: 128, least: 38.0, at_least: 64 });
    let reason = host.expect("host.cpu_speed", Degraded, ContactSupport);
    testing::snapshot!("reasons", "host_system: cpus with a low frequency limit degrade", reason);
    host.sample.capped = None;
    host.expect("host.cpu_speed", Healthy, Nothing);
}

#[test]
fn cpus_held_at_their_lowest_frequency_degrade() {
    let mut host = Host::new();
    host.sample.governors = [("powersave".to_owned(), 128)].into();
    host.expect("host.cpu_speed", Healthy, Nothing);
    host.sample.held_low = 128;
    let reason = host.expect("host.cpu_speed", Degraded, Nothing);
    testing::snapshot!("reasons", "host_system: cpus held at their lowest frequency degrade", reason);
    host.sample.held_low = 0;
    host.expect("host.cpu_speed", Healthy, Nothing);
}

#[test]
fn a_slow_clock_source_degrades_if_the_cpus_have_a_fast_one() {
    for (source, has_fast, state, action) in [
        ("hpet", true, Degraded, RebootNode),
        ("acpi_pm", true, Degraded, RebootNode),
        // A guest has the source that its hypervisor gives it. The sources below are fast.
        ("hpet", false, Healthy, Nothing),
        ("tsc", true, Healthy, Nothing),
        ("kvm-clock", true, Healthy, Nothing),
        ("arch_sys_counter", true, Healthy, Nothing),
    ] {
        let mut host = Host::new();
        let max_error = Span::millis(5);
        host.sample.clock = Reading::Value(ClockReading {
            synchronised: true,
            max_error,
            source: Some(source.into()),
            has_fast,
        });
        let reason = host.expect("host.clock", state, action);
        assert_eq!(reason.contains("slow"), matches!(source, "hpet" | "acpi_pm"), "{reason}");
    }
}

#[test]
fn a_governor_degrades_only_if_the_operator_configured_another() {
    let mut host = Host::new();
    let mut limits = HostLimits::default();
    limits.cpu_speed.governor = "performance".to_owned();
    host.judge = SystemJudge::new(limits);
    host.sample.governors = [("performance".to_owned(), 128)].into();
    host.expect("host.cpu_speed", Healthy, Nothing);
    host.sample.governors = [("performance".to_owned(), 120), ("powersave".to_owned(), 8)].into();
    host.expect("host.cpu_speed", Degraded, Nothing);
}

#[test]
fn pcie_switches_that_redirect_traffic_to_the_cpu_degrade_unless_allowed() {
    let mut host = Host::new();
    assert_eq!(host.find("host.pcie_switches"), None, "a host without such switches");
    host.sample.switch_ports = Some(SwitchPorts { read: 8, redirecting: vec![] });
    host.expect("host.pcie_switches", Healthy, Nothing);
    host.sample.switch_ports = Some(SwitchPorts { read: 8, redirecting: vec!["0000:3a:01.0".to_owned()] });
    let reason = host.expect("host.pcie_switches", Degraded, Nothing);
    assert!(reason.contains("1 of 8 ports") && reason.contains("ACS"), "{reason}");
    let mut limits = HostLimits::default();
    limits.pcie_switches.redirecting_switches = false;
    host.judge = SystemJudge::new(limits);
    host.expect("host.pcie_switches", Healthy, Nothing);
}

#[test]
fn a_failed_power_supply_or_fan_degrades_and_needs_support() {
    let listing = |psu: &str, fan: &str| {
        let text = format!("PSU1 Status | C8h | ok | 10.1 | {psu}\nFAN1 | 41h | {fan} | 29.1 | 9100 RPM\n");
        Some(Reading::Value(mainstay_health::parse::ipmi::sensors(&text)))
    };
    let mut host = Host::new();
    assert!(!host.poll_after(10).iter().any(|component| component.name == "host.chassis"), "no sensors");
    let state = |host: &mut Host, sensors| {
        host.sample.sensors = sensors;
        let components = host.poll_after(60);
        let chassis = components.into_iter().find(|component| component.name == "host.chassis").unwrap();
        (chassis.state, chassis.action, chassis.reason)
    };
    let well = state(&mut host, listing("Presence detected", "ok"));
    assert_eq!((well.0, well.1), (HealthState::Healthy, RecommendedAction::None));
    // A single finding does not count. Sensors are read seldom, and a look without them is not a second finding.
    let once = state(&mut host, listing("Presence detected, Power Supply AC lost", "ok"));
    assert_eq!(once.0, HealthState::Healthy);
    assert_eq!(state(&mut host, None).0, HealthState::Healthy);
    let twice = state(&mut host, listing("Presence detected, Power Supply AC lost", "ok"));
    assert_eq!((twice.0, twice.1), (HealthState::Degraded, RecommendedAction::ContactSupport));
    assert!(twice.2.contains("PSU1 Status") && twice.2.contains("AC lost"), "{}", twice.2);
    assert_eq!(state(&mut host, listing("Presence detected", "ok")).0, HealthState::Healthy);
    for _ in 0..2 {
        state(&mut host, listing("Presence detected", "cr"));
    }
    assert_eq!(state(&mut host, None).0, HealthState::Degraded);
    let unread = state(&mut host, Some(Reading::Failed("timeout".to_owned())));
    assert_eq!(unread.0, HealthState::Unknown);
}
