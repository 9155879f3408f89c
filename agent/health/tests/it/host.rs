//! The judge of the host: single samples, and properties that hold for any samples.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;

use mainstay_health::host::os::{
    CpuTimes, Disk, GroupEvents, GroupUsage, HostJudge, HostLimits, HostSample, Memory, MemoryGroup,
    Pressure, Reading, Space, changes,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};
use proptest::prelude::*;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

const GIB: u64 = 1 << 30;
const INTERVAL: Span = Span::seconds(5);

fn calm() -> HostSample {
    let still = Pressure { some_avg10: 0.0, full_avg10: 0.0 };
    HostSample {
        cpus: Reading::Value(8),
        load: Reading::Value(7.5),
        cpu_times: Reading::NotAvailable("no virtual machine".to_owned()),
        cpu_pressure: Reading::Value(still),
        memory: Reading::Value(Memory { total: 64 * GIB, available: 50 * GIB, swap_total: 0, swap_used: 0 }),
        memory_pressure: Reading::Value(still),
        groups: vec![],
        oom_kills: Reading::Value(3),
        disks: vec![disk("/", 100 * GIB)],
    }
}

fn disk(mount: &str, free: u64) -> Disk {
    Disk {
        mount: mount.to_owned(),
        space: Reading::Value(Space { total: 500 * GIB, free, inodes: 1000, inodes_free: 900 }),
        silent_since: None,
        read_only: Reading::Value(false),
        meant_writable: None,
    }
}

fn with_available(available: u64) -> HostSample {
    let memory = Memory { total: 64 * GIB, available, swap_total: 0, swap_used: 0 };
    HostSample { memory: Reading::Value(memory), ..calm() }
}

/// A judge with its clock.
struct Host {
    judge: HostJudge,
    now: Mono,
}

impl Host {
    fn new() -> Host {
        Host { judge: HostJudge::new(HostLimits::default()), now: Mono(1) }
    }

    /// The component after each of `count` equal samples.
    fn sees(&mut self, name: &str, sample: &HostSample, count: usize) -> Vec<Component> {
        (0..count)
            .map(|_| {
                self.now = self.now.after(INTERVAL);
                let judged = self.judge.step(self.now, sample);
                judged.components.into_iter().find(|component| component.name == name).unwrap()
            })
            .collect()
    }

    fn states(&mut self, name: &str, sample: &HostSample, count: usize) -> Vec<HealthState> {
        self.sees(name, sample, count).iter().map(|component| component.state).collect()
    }
}

#[test]
fn a_calm_host_is_healthy_from_the_first_sample() {
    let mut host = Host::new();
    for component in host.judge.step(Mono(5), &calm()).components {
        assert_eq!(component.state, Healthy, "{component:?}");
        assert_eq!((component.read_at, component.since), (Some(Mono(5)), Mono(5)));
        assert!(!component.reason.is_empty() && !component.evidence.is_empty(), "{component:?}");
    }
}

#[test]
fn little_memory_takes_three_readings_to_degrade_and_six_to_recover() {
    let mut host = Host::new();
    assert_eq!(
        host.states("host.memory", &with_available(2 * GIB), 4),
        [Healthy, Healthy, Degraded, Degraded]
    );
    let recovering = host.sees("host.memory", &calm(), 6);
    testing::snapshot!(
        "reasons",
        "host: little memory takes three readings to degrade and six to recover",
        recovering[0].reason
    );
    let states: Vec<HealthState> = recovering.iter().map(|component| component.state).collect();
    assert_eq!(states, [Degraded, Degraded, Degraded, Degraded, Degraded, Healthy]);
    assert_eq!(recovering[5].since, host.now);
    assert_eq!(host.states("host.memory", &with_available(GIB / 4), 3)[2], Unhealthy);
}

#[test]
fn a_small_share_of_a_large_memory_is_enough() {
    let memory = Memory { total: 2048 * GIB, available: 20 * GIB, swap_total: 0, swap_used: 0 };
    let sample = HostSample { memory: Reading::Value(memory), ..calm() };
    assert_eq!(Host::new().states("host.memory", &sample, 5)[4], Healthy);
}

#[test]
fn a_kernel_without_psi_is_a_note_and_a_failed_pressure_reading_is_unknown() {
    let absent = Reading::NotAvailable("no PSI".to_owned());
    let sample = HostSample { memory_pressure: absent.clone(), cpu_pressure: absent, ..calm() };
    for name in ["host.memory", "host.cpu"] {
        let component = &Host::new().sees(name, &sample, 1)[0];
        assert_eq!(component.state, Healthy);
        assert!(component.reason.contains("judged without"), "{}", component.reason);
    }
    let failed = Reading::Failed("reading /proc/pressure/memory: Input/output error".to_owned());
    let component = &Host::new().sees("host.memory", &HostSample { memory_pressure: failed, ..calm() }, 1)[0];
    assert_eq!(component.state, Unknown);
    assert!(component.reason.contains("Input/output error"), "{}", component.reason);
}

#[test]
fn after_a_failed_reading_the_state_is_unknown_until_six_readings_succeed() {
    let mut host = Host::new();
    host.states("host.oom", &calm(), 1);
    let read_at = host.now;
    let unread = HostSample { oom_kills: Reading::Failed("gone".to_owned()), ..calm() };
    let component = &host.sees("host.oom", &unread, 1)[0];
    assert_eq!((component.state, component.read_at), (Unknown, Some(read_at)));
    assert_eq!(host.states("host.oom", &calm(), 6), [Unknown, Unknown, Unknown, Unknown, Unknown, Healthy]);
}

#[test]
fn thrashing_is_unhealthy() {
    let pressure = Pressure { some_avg10: 80.0, full_avg10: 60.0 };
    let sample = HostSample { memory_pressure: Reading::Value(pressure), ..calm() };
    assert_eq!(Host::new().states("host.memory", &sample, 3)[2], Unhealthy);
}

#[test]
fn a_control_group_at_its_limit_degrades() {
    let group = |used| MemoryGroup {
        source: "/sys/fs/cgroup/job".to_owned(),
        usage: Reading::Value(GroupUsage { limit: 10 * GIB, used }),
        events: None,
    };
    let mut host = Host::new();
    let full = HostSample { groups: vec![group(10 * GIB - 1)], ..calm() };
    let component = host.sees("host.memory", &full, 3).pop().unwrap();
    assert_eq!(component.state, Degraded);
    testing::snapshot!("reasons", "host: a control group at its limit degrades", component.reason);
    assert_eq!(host.states("host.memory", &calm(), 1), [Healthy], "a group that is gone is forgotten");
}

#[test]
fn memory_events_of_a_control_group_are_recorded_and_change_no_state() {
    let mut host = Host::new();
    let mut seen = |seconds: u64, kills, at_limit| -> Vec<(String, String)> {
        let group = MemoryGroup {
            source: "/sys/fs/cgroup/job".to_owned(),
            usage: Reading::Value(GroupUsage { limit: 10 * GIB, used: GIB }),
            events: Some(GroupEvents { kills, at_limit }),
        };
        let sample = HostSample { groups: vec![group], ..calm() };
        let judged = host.judge.step(Mono(1).after(Span::seconds(seconds)), &sample);
        assert!(
            judged.components.iter().all(|component| component.state == Healthy),
            "{:?}",
            judged.components
        );
        let facts = judged.facts.into_iter().map(|fact| match fact {
            Fact::Observed(observation) => (observation.event, observation.detail),
            other => ("another".to_owned(), format!("{other:?}")),
        });
        facts.collect()
    };
    assert_eq!(seen(0, 3, 500), [], "events before the start do not count");
    assert_eq!(seen(5, 3, 500), []);
    let killed = seen(10, 4, 502);
    assert_eq!(
        killed.iter().map(|(event, _)| event.as_str()).collect::<Vec<_>>(),
        ["group_kill", "group_at_limit"]
    );
    testing::snapshot!(
        "reasons",
        "host: memory events of a control group are recorded and change no state",
        killed[0].1
    );
    testing::snapshot!(
        "reasons",
        "host: memory events of a control group are recorded and change no state 2",
        killed[1].1
    );
    // A job's page cache makes the group reach its limit repeatedly: one event in ten minutes is enough.
    assert_eq!(seen(15, 4, 900), []);
    assert!(seen(700, 4, 901)[0].1.contains("399 times"));
}

#[test]
fn oom_kills_degrade_at_once_and_for_ten_minutes() {
    let mut host = Host::new();
    assert!(host.judge.step(Mono(1), &calm()).facts.is_empty(), "kills before the start do not count");
    let killed = HostSample { oom_kills: Reading::Value(5), ..calm() };
    let start = host.now.after(INTERVAL);
    let judged = host.judge.step(start, &killed);
    assert_eq!(judged.facts, [Fact::OutOfMemoryKills { count: 2 }]);
    let state_at = |host: &mut Host, seconds| {
        let judged = host.judge.step(start.after(Span::seconds(seconds)), &killed);
        assert_eq!(judged.facts, []);
        judged.components[3].clone()
    };
    let component = state_at(&mut host, 599);
    assert_eq!(component.state, Degraded);
    testing::snapshot!("reasons", "host: oom kills degrade at once and for ten minutes", component.reason);
    assert_eq!(state_at(&mut host, 600).state, Healthy);
}

#[test]
fn a_file_system_that_turned_read_only_is_unhealthy_at_once() {
    let read_only = |meant_writable| {
        let disk = Disk { read_only: Reading::Value(true), meant_writable, ..disk("/data", 400 * GIB) };
        HostSample { disks: vec![disk], ..calm() }
    };
    let writable = HostSample { disks: vec![disk("/data", 400 * GIB)], ..calm() };

    let mut host = Host::new();
    host.states("host.disk", &writable, 1);
    let component = host.sees("host.disk", &read_only(None), 1).pop().unwrap();
    assert_eq!((component.state, component.action), (Unhealthy, RecommendedAction::ContactSupport));
    testing::snapshot!(
        "reasons",
        "host: a file system that turned read only is unhealthy at once",
        component.reason
    );

    assert_eq!(Host::new().states("host.disk", &read_only(Some(true)), 1), [Unhealthy]);
    assert_eq!(Host::new().states("host.disk", &read_only(None), 1), [Healthy], "an image may be read-only");
    assert_eq!(Host::new().states("host.disk", &read_only(Some(false)), 1), [Healthy]);
}

#[test]
fn a_full_disk_is_reported_with_its_mount_and_a_silent_one_with_the_duration() {
    let mut host = Host::new();
    let full = HostSample { disks: vec![disk("/", 100 * GIB), disk("/ckpt", GIB / 2)], ..calm() };
    let component = host.sees("host.disk", &full, 3).pop().unwrap();
    assert_eq!(component.state, Unhealthy);
    testing::snapshot!("reasons", "host: a full disk", component.reason);

    let mut host = Host::new();
    let silent = Disk { silent_since: Some(host.now), ..disk("/nfs", 0) };
    let component = host.sees("host.disk", &HostSample { disks: vec![silent], ..calm() }, 2).pop().unwrap();
    assert_eq!(component.state, Unknown);
    testing::snapshot!(
        "reasons",
        "host: a full disk is reported with its mount and a silent one with the duration",
        component.reason
    );
}

#[test]
fn few_free_inodes_degrade_and_zero_of_zero_does_not() {
    let disk_of = |inodes, inodes_free| {
        let space = Space { total: 500 * GIB, free: 400 * GIB, inodes, inodes_free };
        HostSample { disks: vec![Disk { space: Reading::Value(space), ..disk("/", 0) }], ..calm() }
    };
    assert_eq!(Host::new().states("host.disk", &disk_of(1000, 30), 3)[2], Degraded);
    assert_eq!(Host::new().states("host.disk", &disk_of(0, 0), 5)[4], Healthy);
}

#[test]
fn changes_are_new_components_and_new_states() {
    let mut host = Host::new();
    let first = host.judge.step(Mono(1), &calm()).components;
    assert_eq!(changes(&BTreeMap::new(), &first).len(), 4);
    let before: BTreeMap<String, Component> =
        first.into_iter().map(|component| (component.name.clone(), component)).collect();
    let killed = HostSample { oom_kills: Reading::Value(4), load: Reading::Value(1.0), ..calm() };
    let changed = changes(&before, &host.judge.step(Mono(2), &killed).components);
    assert_eq!(changed.len(), 1);
    assert_eq!((changed[0].from, changed[0].component.state), (Some(Healthy), Degraded));
}

fn reading<T: std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = Reading<T>> {
    let absent = prop_oneof![Just(()).prop_map(|()| Err(true)), Just(()).prop_map(|()| Err(false))];
    prop_oneof![4 => value.prop_map(Ok), 1 => absent].prop_map(|value: Result<T, bool>| match value {
        Ok(value) => Reading::Value(value),
        Err(true) => Reading::NotAvailable("this kernel has none".to_owned()),
        Err(false) => Reading::Failed("it failed".to_owned()),
    })
}

fn any_sample() -> impl Strategy<Value = HostSample> {
    let pressure = || {
        reading(
            (0.0..100.0, 0.0..100.0).prop_map(|(some_avg10, full_avg10)| Pressure { some_avg10, full_avg10 }),
        )
    };
    let memory = reading(any::<[u64; 4]>().prop_map(|bytes| Memory {
        total: bytes[0],
        available: bytes[1],
        swap_total: bytes[2],
        swap_used: bytes[3],
    }));
    let space = reading(any::<[u64; 4]>().prop_map(|numbers| Space {
        total: numbers[0],
        free: numbers[1],
        inodes: numbers[2],
        inodes_free: numbers[3],
    }));
    let silent = proptest::option::weighted(0.1, any::<u64>().prop_map(Mono));
    let disk = (space, silent, reading(any::<bool>()), any::<Option<bool>>()).prop_map(
        |(space, silent_since, read_only, meant_writable)| Disk {
            mount: "/".to_owned(),
            space,
            silent_since,
            read_only,
            meant_writable,
        },
    );
    let cpu = (reading(any::<u32>()), reading(0.0..1e4), pressure());
    let rest = (reading(any::<u64>()), proptest::collection::vec(disk, 0..3));
    (cpu, memory, pressure(), rest).prop_map(|(cpu, memory, memory_pressure, rest)| HostSample {
        cpus: cpu.0,
        load: cpu.1,
        cpu_times: Reading::Value(CpuTimes { total: 1000, stolen: 1 }),
        cpu_pressure: cpu.2,
        memory,
        memory_pressure,
        groups: vec![],
        oom_kills: rest.0,
        disks: rest.1,
    })
}

/// Whether a component must not be healthy because a required reading is missing.
fn lacks(name: &str, sample: &HostSample) -> bool {
    let failed = |pressure: &Reading<Pressure>| matches!(pressure, Reading::Failed(_));
    match name {
        "host.cpu" => {
            sample.cpus.value().is_none() || sample.load.value().is_none() || failed(&sample.cpu_pressure)
        }
        "host.memory" => sample.memory.value().is_none() || failed(&sample.memory_pressure),
        "host.oom" => sample.oom_kills.value().is_none(),
        _ => {
            let unread = |disk: &Disk| {
                disk.space.value().is_none()
                    || disk.silent_since.is_some()
                    || disk.read_only.value().is_none()
            };
            sample.disks.is_empty() || sample.disks.iter().any(unread)
        }
    }
}

#[test]
fn stolen_cpu_time_is_judged_by_its_share() {
    let times =
        |total, stolen| HostSample { cpu_times: Reading::Value(CpuTimes { total, stolen }), ..calm() };
    let mut host = Host::new();
    let mut state = Healthy;
    for poll in 1..=4 {
        state = host.states("host.cpu", &times(poll * 1000, 500_000 + poll * 150), 1)[0];
    }
    assert_eq!(state, Degraded);
    for poll in 5..=10 {
        state = host.states("host.cpu", &times(poll * 1000, 500_600 + poll), 1)[0];
    }
    assert_eq!(state, Healthy);
    // Counters that were reset and then do not change.
    assert_eq!(host.states("host.cpu", &times(10, 0), 5), [Healthy; 5]);
}

proptest! {
    #[test]
    fn a_component_without_its_readings_is_not_healthy(samples in proptest::collection::vec(any_sample(), 1..30)) {
        let mut host = Host::new();
        for sample in &samples {
            host.now = host.now.after(INTERVAL);
            for component in host.judge.step(host.now, sample).components {
                if lacks(&component.name, sample) {
                    prop_assert_ne!(component.state, Healthy, "{:?}", component);
                }
                prop_assert!(component.since <= host.now);
                prop_assert!(!component.reason.is_empty() || component.state == Healthy);
            }
        }
    }

    #[test]
    fn a_state_worsens_after_three_readings_and_improves_after_six_at_the_earliest(
        available in proptest::collection::vec(0..8 * GIB, 1..200)
    ) {
        let mut host = Host::new();
        let mut state = Healthy;
        let mut held = 3;
        for available in available {
            let now = host.states("host.memory", &with_available(available), 1)[0];
            held += 1;
            if now != state {
                prop_assert!(held >= if now > state { 3 } else { 6 }, "{:?} to {:?} after {}", state, now, held);
                (state, held) = (now, 0);
            }
        }
    }

    #[test]
    fn readings_around_a_limit_within_the_margin_change_the_state_at_most_once(
        shares in proptest::collection::vec(0.92..1.09_f64, 1..200)
    ) {
        // The limit is 5 % of 64 GiB.
        let limit = 64.0 * GIB as f64 * 0.05;
        let mut host = Host::new();
        let states: Vec<HealthState> = shares
            .iter()
            .map(|share| host.states("host.memory", &with_available((limit * share) as u64), 1)[0])
            .collect();
        prop_assert!(states.windows(2).filter(|pair| pair[0] != pair[1]).count() <= 1);
    }
}
