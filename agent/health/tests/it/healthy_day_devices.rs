//! A day of healthy GPUs, with the usual noise of the driver and of DCGM: each component must stay healthy.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::dcgm::{DcgmCatalog, DcgmHealth, DcgmJudge, DcgmReport, Incident, Violation};
use mainstay_health::hardware::gpu::{
    Clocks, FabricInfo, GpuEvent, GpuReading, PcieLink, RemappedRows, Sampled, SlowdownTimes, SramErrors,
};
use mainstay_model::health::HealthState;
use mainstay_model::time::{Mono, Span};
use support::gpus::{Host, address, gpu};

/// Pseudo-random numbers, the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    fn small(&mut self, limit: u32) -> u32 {
        u32::try_from(self.below(limit.into())).unwrap()
    }
}

/// Seconds between two readings.
const STEP: u64 = 30;
const BOOTED: u64 = 20;

/// The counters of a GPU since the boot, and its index.
struct Noise {
    index: u32,
    corrected: u64,
    replays: u32,
    link_replays: Vec<u64>,
    recoveries: u64,
    times: SlowdownTimes,
}

impl Noise {
    fn new(index: u32) -> Noise {
        Noise {
            index,
            corrected: 0,
            replays: 0,
            link_replays: vec![0; 18],
            recoveries: 0,
            times: SlowdownTimes::default(),
        }
    }

    /// A reading of a healthy GPU, `second` seconds after the boot.
    fn reading(&mut self, dice: &mut Dice, second: u64) -> GpuReading {
        let mut reading = gpu(self.index);
        // All GPUs train, with a pause for evaluation each hour and an idle night.
        let busy = second % 3600 > 240 && second < 20 * 3600;
        self.counters(dice, &mut reading);
        self.heat(dice, &mut reading, busy);
        self.shape(&mut reading, second, busy);
        self.failures(dice, &mut reading);
        if !second.is_multiple_of(60) {
            reading.details = None;
        }
        reading
    }

    fn counters(&mut self, dice: &mut Dice, reading: &mut GpuReading) {
        self.corrected += dice.below(2000);
        if dice.one_in(2000) {
            // The driver was loaded again: the counters start at 0.
            self.corrected = 0;
            self.replays = 0;
            self.link_replays.fill(0);
        }
        // At most 14 a minute, and now and then one burst.
        self.replays += dice.small(8);
        if dice.one_in(1500) {
            self.replays += 5000;
        }
        let details = reading.details.as_mut().unwrap();
        for link in &mut details.links {
            let replays = &mut self.link_replays[link.link as usize];
            *replays += dice.below(6);
            if dice.one_in(20_000) {
                *replays += 143_746;
            }
            link.replays = Some(*replays);
            link.crc = Some(*replays / 10);
        }
        self.recoveries += u64::from(dice.one_in(200));
        details.links[0].recoveries = Some(self.recoveries);
        reading.ecc_corrected = Sampled::Value(self.corrected);
        reading.pcie_replays = Sampled::Value(self.replays);
        // Lifetime counts that include repaired errors.
        reading.ecc_aggregate = Sampled::Value(900);
        reading.remapped =
            Sampled::Value(RemappedRows { corrected: 4, uncorrected: 3, pending: false, failed: false });
        details.sram = Sampled::Value(SramErrors {
            uncorrected_lifetime: 3,
            corrected: 12_000,
            ..SramErrors::default()
        });
    }

    fn heat(&mut self, dice: &mut Dice, reading: &mut GpuReading, busy: bool) {
        // GPUs further back in the airflow are warmer.
        let place = self.index * 2;
        let degrees = if busy { 58 } else { 32 } + place + dice.small(8);
        // A single reading beyond the limit does not count.
        reading.temperature = Sampled::Value(if dice.one_in(400) { 90 } else { degrees });
        reading.memory_temperature =
            if dice.one_in(50) { Sampled::NotOffered } else { Sampled::Value(degrees + 10) };
        reading.margin = Sampled::Value(-1);
        // The power cap, or idle; a thermal slowdown (0x40) now and then.
        let reasons = if busy { 0x4 } else { 0x1 };
        reading.clock_reasons = Sampled::Value(if dice.one_in(40) { reasons | 0x40 } else { reasons });
        self.times.thermal += dice.below(STEP * 1_000_000_000 / 200);
        reading.slowdown = Sampled::Value(self.times);
        // Each GPU reaches a different clock at the power cap.
        let sm = if busy { 1500 + 40 * self.index + dice.small(200) } else { 345 };
        reading.clocks = Sampled::Value(Clocks { sm, memory: 2619 });
    }

    fn shape(&self, reading: &mut GpuReading, second: u64, busy: bool) {
        reading.utilization = Sampled::Value(if busy { 97 } else { 0 });
        if !busy {
            reading.pcie = Sampled::Value(PcieLink { generation: 1, width: 16 });
        }
        // One board has one link less by design.
        if self.index == 5 {
            reading.nvlinks[17].up = Sampled::Value(false);
        }
        // The fabric registers only some time after the boot.
        if second < 280 {
            reading.fabric =
                Sampled::Value(FabricInfo { state: 2, status: 0, health_mask: 0, health_summary: 0 });
        }
        reading.details.as_mut().unwrap().persistence = Sampled::Value(false);
    }

    /// Readings that are not required fail now and then.
    fn failures(&self, dice: &mut Dice, reading: &mut GpuReading) {
        let failed = || "an unknown internal driver error occurred".to_owned();
        if dice.one_in(100) {
            reading.power = Sampled::Failed(failed());
        }
        if dice.one_in(100) {
            reading.processes = Sampled::Failed(failed());
        }
        if dice.one_in(300) {
            reading.fabric = Sampled::Failed(failed());
        }
        if dice.one_in(300) {
            reading.pcie = Sampled::Failed(failed());
        }
        if dice.one_in(300) {
            reading.recovery_action = Sampled::NotOffered;
        }
    }
}

/// DCGM's report about healthy GPUs: incidents that are over but still listed, power at the cap, an old error on a
/// link.
fn second_opinion(dice: &mut Dice, first: bool) -> DcgmReport {
    let incident = |gpu, system, health, code: u32| Incident {
        gpu: Some(gpu),
        system,
        health,
        code,
        message: format!("incident {code}"),
    };
    let mut incidents = vec![incident(0, 0x10, 20, 81), incident(3, 0x2, 10, 13), incident(4, 0x100, 10, 12)];
    if dice.one_in(20) {
        incidents.push(incident(6, 0x80, 10, 10));
    }
    let violations = if dice.one_in(50) {
        vec![Violation { condition: 0x8, gpu: Some(6), value: 84 }]
    } else {
        Vec::new()
    };
    let addresses = (0..8).map(|gpu| (gpu, address(gpu))).collect();
    DcgmReport::Health(DcgmHealth { gpus: (0..8).collect(), incidents, first, addresses, violations })
}

fn dcgm() -> DcgmJudge {
    let file = toml::from_str(include_str!("../../../catalog/hardware/dcgm.toml")).unwrap();
    DcgmJudge::new(DcgmCatalog::new(file).unwrap(), false)
}

/// Simulates a day; `change` can modify the readings. Returns the first components that are not healthy, with the
/// second.
fn day(mut change: impl FnMut(u64, &mut Vec<GpuReading>)) -> Vec<(u64, String)> {
    let mut host = Host::new();
    host.now = Mono(BOOTED * 1_000_000_000);
    let mut dice = Dice(11);
    let mut noise: Vec<Noise> = (0..8).map(Noise::new).collect();
    let mut dcgm = dcgm();
    let mut not_healthy = Vec::new();
    for step in 0..86_400 / STEP {
        let second = BOOTED + step * STEP;
        host.gpus = noise.iter_mut().map(|gpu_noise| gpu_noise.reading(&mut dice, step * STEP)).collect();
        change(second, &mut host.gpus);
        host.now = Mono(second * 1_000_000_000);
        host.poll_after(dice.below(2));
        if step.is_multiple_of(2) {
            let judged = dcgm.step(host.now, &second_opinion(&mut dice, step == 0));
            not_healthy.extend(
                judged
                    .components
                    .iter()
                    .filter(|component| component.state != HealthState::Healthy)
                    .map(|component| (second, format!("{}: {}", component.name, component.reason))),
            );
            host.judge.second_opinions(dcgm.opinions().clone());
        }
        if dice.one_in(300) {
            // A program's fault on any GPU, reported by an NVML event.
            let gpu = Some(address(dice.small(8)));
            host.judge.event(host.now, &GpuEvent { gpu, kind: 8, data: 31, instance: None });
            host.judge.due(host.now.after(Span::seconds(2)), true);
        }
        not_healthy.extend(host.not_healthy().into_iter().map(|words| (second, words)));
        if !not_healthy.is_empty() {
            return not_healthy;
        }
    }
    not_healthy
}

#[test]
fn a_healthy_day_of_gpus_causes_no_unhealthy_component() {
    assert_eq!(day(|_, _| {}), []);
}

#[test]
fn one_memory_error_at_noon_is_reported() {
    let not_healthy = day(|second, gpus| {
        if second >= 43_200 {
            gpus[0].ecc_volatile = Sampled::Value(1);
        }
    });
    let [(43_220, reason)] = &not_healthy[..] else { panic!("{not_healthy:?}") };
    testing::snapshot!("reasons", "healthy_day_devices: one memory error at noon is reported", reason);
}
