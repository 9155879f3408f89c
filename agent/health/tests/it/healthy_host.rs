//! A day of a healthy host that trains, with the usual noise: load, a full page cache, links that flap, counters that
//! grow, clocks that are slewed. Each component must stay healthy.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use mainstay_health::hardware::tpu::{
    Chip, ChipHolder, CoreState, Holders, Runtime, RuntimeReply, RuntimeService as TpuService, TpuJudge,
    TpuLimits, TpuSample,
};
use mainstay_health::host::fabric::{
    FabricJudge, FabricLimits, FabricSample, Identity, LearnedLinks, LinkKind, LinkState, PortReading,
};
use mainstay_health::host::os::{
    Blocked, Capped, ClockReading, CpuTimes, Disk, GroupEvents, GroupUsage, HostJudge, HostLimits,
    HostSample, Memory, MemoryGroup, MemoryModule, MountReading, MountState, Pressure, ProcessScan, Reading,
    Service, Services, Space, SystemJudge, SystemSample, Tables, Usage,
};
use mainstay_model::health::{Component, HealthState};
use mainstay_model::id::{BootId, Pid};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span, Wall};

const GIB: u64 = 1 << 30;
const EVERY: u64 = 10;
const LOOKS: u64 = 24 * 3600 / EVERY;

/// Pseudo-random numbers, the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn once_in(&mut self, poll_times: u64) -> bool {
        self.below(poll_times) == 0
    }

    fn share(&mut self, most: u64) -> f64 {
        self.below(most * 100) as f64 / 100.0
    }
}

fn at(poll: u64) -> Mono {
    Mono(0).after(Span::seconds(7200 + poll * EVERY))
}

fn all_are_well(poll: u64, components: &[Component]) {
    let not_healthy = components.iter().find(|component| component.state != HealthState::Healthy);
    assert_eq!(not_healthy, None, "after {} minutes", poll * EVERY / 60);
}

/// All cores are busy and memory is full of page cache. Pressure is high in single looks, and a control group reaches
/// its limit because of its page cache.
fn busy_host(dice: &mut Dice, poll: u64, at_limit: &mut u64) -> HostSample {
    let full = dice.once_in(40);
    let pressure = Pressure { some_avg10: if full { 99.0 } else { dice.share(90) }, full_avg10: 0.0 };
    let memory_pressure =
        Pressure { some_avg10: dice.share(20), full_avg10: if full { 30.0 } else { dice.share(5) } };
    *at_limit += dice.below(500);
    HostSample {
        cpus: Reading::Value(128),
        load: Reading::Value(128.0 + dice.share(300)),
        cpu_times: Reading::Value(CpuTimes { total: poll * 128_000, stolen: poll * 10 }),
        cpu_pressure: Reading::Value(pressure),
        memory: Reading::Value(Memory {
            total: 2048 * GIB,
            available: (80 + dice.below(900)) * GIB,
            swap_total: 0,
            swap_used: 0,
        }),
        memory_pressure: Reading::Value(memory_pressure),
        groups: vec![MemoryGroup {
            source: "/sys/fs/cgroup/kubepods/pod1".to_owned(),
            usage: Reading::Value(GroupUsage { limit: 512 * GIB, used: (200 + dice.below(250)) * GIB }),
            events: Some(GroupEvents { kills: 0, at_limit: *at_limit }),
        }],
        oom_kills: Reading::Value(2),
        disks: vec![Disk {
            mount: "/".to_owned(),
            space: Reading::Value(Space {
                total: 3500 * GIB,
                free: (400 + dice.below(300)) * GIB,
                inodes: 0,
                inodes_free: 0,
            }),
            silent_since: None,
            read_only: Reading::Value(false),
            meant_writable: None,
        }],
    }
}

/// Processes that wait for disks for a moment, zombies that are soon reaped, a clock that is slewed, corrected memory
/// errors, a CPU package that is throttled now and then, a service that is restarted twice.
fn living_system(dice: &mut Dice, poll: u64, corrected: &mut u64, throttled: &mut u64) -> SystemSample {
    *corrected += dice.below(3);
    *throttled += u64::from(dice.once_in(60));
    let usage = |used, limit| Reading::Value(Usage { used, limit });
    let blocked = (0..dice.below(5)).map(|number| Blocked {
        pid: 5000 + number as i32,
        start: 77,
        name: "pt_data_worker".to_owned(),
        kernel_thread: false,
        waits_in: vec!["folio_wait_bit_common".to_owned()],
        ran: Some(poll * 3 + number),
    });
    let scan = ProcessScan {
        processes: 1500,
        zombies: if dice.once_in(30) { 400 } else { dice.below(20) },
        most: Some((Pid(17), "containerd-shim".to_owned(), 12)),
        blocked: blocked.collect(),
    };
    let slewed = dice.below(4_000_000) as i64;
    let unit = |name: &str, active: &str, restarts| Service {
        name: name.to_owned(),
        active: active.to_owned(),
        sub: "running".to_owned(),
        enabled: true,
        restarts,
        ..Service::default()
    };
    let mount = MountReading {
        point: "/data".to_owned(),
        kind: "nfs4".to_owned(),
        from: "filer:/data".to_owned(),
        state: MountState::Answers,
    };
    SystemSample {
        wall: Wall(1_700_000_000_000_000_000 + at(poll).0 as i64 + slewed),
        since_boot: (!dice.once_in(100)).then(|| at(poll)),
        clock: Reading::Value(ClockReading {
            synchronised: !dice.once_in(200),
            max_error: Span::millis(dice.below(900)),
            source: Some("tsc".to_owned()),
            has_fast: true,
        }),
        tables: Tables {
            files: usage(40_000 + dice.below(20_000), u64::MAX),
            tasks: usage(9_000 + dice.below(4_000), 4_194_304),
            group_tasks: Some(Usage { used: 3_000 + dice.below(4_000), limit: 16_384 }),
        },
        scan: poll.is_multiple_of(3).then_some(Reading::Value(scan)),
        mounts: vec![mount],
        services: poll.is_multiple_of(6).then(|| {
            Reading::Value(Services {
                units: vec![
                    unit("nvidia-fabricmanager.service", "active", 0),
                    unit(
                        "kubelet.service",
                        if dice.once_in(500) { "activating" } else { "active" },
                        poll / 4000,
                    ),
                    unit("opensm.service", "inactive", 0),
                ],
                gpus: 8,
                switches: true,
            })
        }),
        memory: vec![MemoryModule { name: "mc0 DIMM_A1".to_owned(), corrected: *corrected, uncorrected: 0 }],
        throttled: [("CPU package 0".to_owned(), *throttled)].into(),
        governors: [("powersave".to_owned(), 128)].into(),
        capped: Some(Capped { cpus: 128, least: 100.0, at_least: 128 }),
        ..SystemSample::default()
    }
}

#[test]
fn a_healthy_day_of_the_host_causes_no_unhealthy_component() {
    let mut dice = Dice(11);
    let mut host = HostJudge::new(HostLimits::default());
    let mut system = SystemJudge::new(HostLimits::default());
    let (mut at_limit, mut corrected, mut throttled) = (0, 5_000, 300);
    for poll in 0..LOOKS {
        let judged = host.step(at(poll), &busy_host(&mut dice, poll, &mut at_limit));
        all_are_well(poll, &judged.components);
        assert!(judged.components.len() == 4 && judged.facts.len() <= 1, "{:?}", judged.facts);
        let sample = living_system(&mut dice, poll, &mut corrected, &mut throttled);
        all_are_well(poll, &system.step(at(poll), &sample).components);
    }
}

#[test]
fn a_full_disk_is_reported() {
    let mut dice = Dice(11);
    let mut host = HostJudge::new(HostLimits::default());
    let not_healthy = (0..3).any(|poll| {
        let mut sample = busy_host(&mut dice, poll, &mut 0);
        sample.disks[0].space =
            Reading::Value(Space { total: 3500 * GIB, free: GIB / 2, inodes: 0, inodes_free: 0 });
        host.step(at(poll), &sample)
            .components
            .iter()
            .any(|component| component.state != HealthState::Healthy)
    });
    assert!(not_healthy);
}

/// Ports with the error counts of intact cables, two link flaps in the day, and all kinds of congestion.
#[test]
fn a_healthy_day_of_the_network_causes_no_unhealthy_component() {
    let mut dice = Dice(13);
    let mut judge =
        FabricJudge::new(FabricLimits::default(), BootId("b".to_owned()), vec![], LearnedLinks::default());
    let names = [
        "link_downed",
        "symbol_error",
        "link_error_recovery",
        "port_rcv_errors",
        "port_xmit_discards",
        "local_ack_timeout_err",
        "roce_slow_restart",
        "out_of_sequence",
        "port_xmit_wait",
    ];
    let mut counters = [[0u64; 9]; 8];
    // Two counters have long been at the largest value that InfiniBand can count.
    (counters[4][0], counters[5][1]) = (255, 65_535);
    for poll in 0..LOOKS {
        if poll == 4_000 {
            // The driver was loaded again: its counters start at 0.
            counters[6] = [0; 9];
        }
        let links = counters.iter_mut().enumerate().map(|(number, counts)| {
            let blinks = number == 3 && (poll == 1000 || poll == 6500);
            counts[0] = (counts[0] + u64::from(blinks)).min(255);
            // The standard allows 120 symbol errors in an hour; here it is half of that.
            counts[1] = (counts[1] + u64::from(dice.once_in(6))).min(65_535);
            counts[2] += u64::from(dice.once_in(400));
            counts[3] += dice.below(20);
            counts[4] += dice.below(300);
            counts[5] += if dice.once_in(2000) { 200 } else { 0 };
            counts[6] += dice.below(40);
            counts[7] += dice.below(100_000);
            counts[8] += dice.below(100_000_000);
            let (logical, physical) = if blinks { ("DOWN", "Polling") } else { ("ACTIVE", "LinkUp") };
            PortReading {
                name: format!("mlx5_{number}/1"),
                identity: Identity {
                    serial: Some(format!("guid-{number}")),
                    place: Some(format!("0000:{number:02x}:00.0")),
                },
                kind: LinkKind::InfiniBand,
                state: Reading::Value(LinkState {
                    active: !blinks,
                    logical: logical.into(),
                    physical: Some(physical.into()),
                }),
                // A port that comes up has a low rate for a moment.
                rate: Reading::Value(if blinks { 2.5 } else { 400.0 }),
                counters: names
                    .iter()
                    .zip(*counts)
                    // The driver omits a counter once in a while.
                    .filter(|(name, _)| **name != "symbol_error" || poll % 977 != 0)
                    .map(|(name, count)| ((*name).into(), count))
                    .collect(),
                ..PortReading::default()
            }
        });
        let sample = FabricSample { links: links.collect(), ..FabricSample::default() };
        let components = judge.step(at(poll), &sample).components;
        all_are_well(poll, &components);
        assert_eq!(components.len(), 9);
    }
}

/// Jobs come and go, cores are slightly behind each other, and libtpu refuses connections while chips are idle.
#[test]
fn a_healthy_day_of_tpus_causes_no_unhealthy_component() {
    let mut dice = Dice(17);
    let mut judge = TpuJudge::new(TpuLimits::default());
    for poll in 0..LOOKS {
        let idle = poll % 1000 >= 900;
        let holder = ChipHolder { pid: Pid(4711), name: "python".to_owned() };
        let holders = Holders::Known(if idle { vec![] } else { vec![holder] });
        let chips = (0..4).map(|number| Chip {
            number,
            address: PciAddress { domain: 0, bus: 0, device: 4 + number as u8 },
            function: 0,
            kind: "v5p",
            nodes: vec![format!("/dev/vfio/{number}")],
            holders: holders.clone(),
        });
        let cores: Vec<CoreState> = (0..4)
            .map(|number| CoreState {
                core: number,
                chip: Some(number),
                tensor_core: true,
                program: "abcd".to_owned(),
                launch: Some((poll * 3 - u64::from(number == 2 && poll > 0 && dice.once_in(4))) as i64),
                counters: vec![0x1f40 + dice.below(64) as i64],
                queued: 1,
                ..CoreState::default()
            })
            .collect();
        let runtime = Runtime {
            duty_cycle: (0..4).map(|chip| (chip, dice.share(100))).collect(),
            supported: Some(17),
            cores: Some(cores),
            ..Runtime::default()
        };
        let answer = if idle { RuntimeReply::Refused } else { RuntimeReply::Reported(runtime) };
        let sample = TpuSample {
            chips: Ok(chips.collect()),
            services: vec![TpuService { endpoint: "localhost:8431".to_owned(), answer }],
            stalls: vec![],
            driver: vec![],
        };
        let components = judge.step(at(poll), &sample).components;
        all_are_well(poll, &components);
        assert_eq!(components.len(), 5);
    }
}
