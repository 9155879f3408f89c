//! Eight healthy GPUs under load, which a test can change.

use mainstay_health::hardware::gpu::{
    Clocks, DeviceJudge, DeviceLimits, DeviceReport, ExpectedGpus, FabricInfo, GpuDetails, GpuIdentity,
    GpuReading, LinkErrors, LinkReading, PcieLink, PeerAccess, ProbeAnswer, RemappedRows, Sampled,
    SlowdownTimes, SramErrors,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

use super::catalog;

use HealthState::Healthy;

pub const FIRST: &str = "gpu.0000:01:00";
pub const SECOND: &str = "gpu.0000:02:00";
pub const LINK: &str = "nvlink.0000:01:00/3";

pub fn address(index: u32) -> PciAddress {
    PciAddress { domain: 0, bus: u8::try_from(index + 1).unwrap(), device: 0 }
}

/// A healthy GPU under load.
pub fn gpu(index: u32) -> GpuReading {
    let own = address(index);
    let name = "NVIDIA H100 80GB HBM3".to_owned();
    let link = PcieLink { generation: 5, width: 16 };
    GpuReading {
        index,
        identity: Some(GpuIdentity {
            address: own,
            uuid: format!("GPU-{index}"),
            name,
            serial: Some("1".into()),
        }),
        ecc_volatile: Sampled::Value(0),
        ecc_aggregate: Sampled::Value(3),
        ecc_corrected: Sampled::Value(1000),
        remapped: Sampled::Value(RemappedRows {
            corrected: 1,
            uncorrected: 2,
            pending: false,
            failed: false,
        }),
        pages_pending: Sampled::Value(false),
        unrepairable: Sampled::Value(false),
        recovery_action: Sampled::Value(0),
        temperature: Sampled::Value(60),
        memory_temperature: Sampled::Value(70),
        margin: Sampled::Value(0),
        power: Sampled::Value(650_000),
        // The power cap, normal under load.
        clock_reasons: Sampled::Value(4),
        slowdown: Sampled::Value(SlowdownTimes { thermal: 5_000_000_000, brake: 0 }),
        pcie: Sampled::Value(link),
        pcie_max: Sampled::Value(link),
        pcie_replays: Sampled::Value(7),
        nvlinks: (0..18).map(|link| LinkReading { link, up: Sampled::Value(true) }).collect(),
        fabric: Sampled::Value(FabricInfo {
            state: 3,
            status: 0,
            health_mask: 0xaa | 0x100,
            health_summary: 1,
        }),
        mig: Sampled::Value(false),
        clocks: Sampled::Value(Clocks { sm: 1980, memory: 2619 }),
        utilization: Sampled::Value(99),
        memory: Sampled::Value((70 << 30, 80 << 30)),
        details: Some(Box::new(GpuDetails {
            power_limit: Sampled::Value(700_000),
            peers: (0..8)
                .filter(|other| *other != index)
                .map(|other| PeerAccess { peer: address(other), status: 0 })
                .collect(),
            hottest: Sampled::Value(87),
            memory_hottest: Sampled::Value(95),
            slowdown_margin: Sampled::Value(-2),
            persistence: Sampled::Value(true),
            inforom_valid: Sampled::Value(true),
            vbios: Sampled::Value("96.00".into()),
            sram: Sampled::Value(SramErrors { uncorrected_lifetime: 1, ..SramErrors::default() }),
            links: (0..18)
                .map(|link| LinkErrors {
                    link,
                    replays: Some(40),
                    recoveries: Some(2),
                    crc: Some(1),
                    effective_ber: Some(1e-15),
                    recovery_failed: Some(1),
                    recovered: Some(3),
                    ..LinkErrors::default()
                })
                .collect(),
            ..GpuDetails::default()
        })),
        ..GpuReading::default()
    }
}

pub struct Host {
    pub judge: DeviceJudge,
    pub gpus: Vec<GpuReading>,
    pub bound: Vec<PciAddress>,
    pub facts: Vec<Fact>,
    pub now: Mono,
}

impl Host {
    pub fn new() -> Host {
        Host::with(DeviceLimits::default(), ExpectedGpus::default())
    }

    pub fn with(limits: DeviceLimits, expected: ExpectedGpus) -> Host {
        Host {
            judge: DeviceJudge::new(catalog(), limits).expecting(expected),
            gpus: (0..8).map(gpu).collect(),
            bound: Vec::new(),
            facts: Vec::new(),
            now: Mono(100_000_000_000_000),
        }
    }

    pub fn poll(&mut self) {
        self.poll_after(10);
    }

    pub fn poll_after(&mut self, seconds: u64) {
        self.now = self.now.after(Span::seconds(seconds));
        let answer = ProbeAnswer::Gpus {
            driver: Some("570.1".into()),
            gpus: self.gpus.clone(),
            bound: self.bound.clone(),
        };
        self.facts.extend(self.judge.report(self.now, DeviceReport::Answered(answer)));
    }

    pub fn poll_times(&mut self, count: u32) {
        (0..count).for_each(|_| self.poll());
    }

    /// The first GPU, for changes.
    pub fn first(&mut self) -> &mut GpuReading {
        &mut self.gpus[0]
    }

    pub fn details(&mut self) -> &mut GpuDetails {
        self.gpus[0].details.as_mut().unwrap()
    }

    pub fn find(&mut self, name: &str) -> Option<Component> {
        self.judge.components(self.now).into_iter().find(|component| component.name == name)
    }

    pub fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) -> String {
        let component = self.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!((component.state, component.action), (state, action), "{name}: {}", component.reason);
        component.reason
    }

    /// All components that are not healthy.
    pub fn not_healthy(&mut self) -> Vec<String> {
        let all = self.judge.components(self.now);
        all.into_iter()
            .filter(|component| component.state != Healthy)
            .map(|component| format!("{}: {}", component.name, component.reason))
            .collect()
    }

    pub fn events(&self) -> Vec<&str> {
        self.facts
            .iter()
            .map(|fact| match fact {
                Fact::Observed(observation) => observation.event.as_str(),
                _ => "other",
            })
            .collect()
    }
}
