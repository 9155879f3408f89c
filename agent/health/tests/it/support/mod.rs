//! A host from the point of view of the core: kernel log lines in, components out.
#![allow(
    dead_code,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part; a panic is how it reports"
)]

pub mod fabric;
pub mod gpus;
pub mod lines;

use mainstay_health::hardware::catalog::Catalog;
use mainstay_health::hardware::gpu::{DeviceJudge, DeviceLimits};
use mainstay_health::host::kernel_reports::HostLogJudge;
use mainstay_health::parse::log::LogReader;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

/// The hardware catalog, read only once because each test creates many hosts.
pub fn catalog() -> Catalog {
    static CATALOG: std::sync::OnceLock<Catalog> = std::sync::OnceLock::new();
    CATALOG.get_or_init(read_catalog).clone()
}

fn read_catalog() -> Catalog {
    Catalog::new(
        toml::from_str(include_str!("../../../../catalog/hardware/xid.toml")).unwrap(),
        toml::from_str(include_str!("../../../../catalog/hardware/sxid.toml")).unwrap(),
        toml::from_str(include_str!("../../../../catalog/hardware/kernel.toml")).unwrap(),
        toml::from_str(include_str!("../../../../catalog/hardware/nvlink.toml")).unwrap(),
    )
    .unwrap()
}

pub struct Host {
    pub reader: LogReader,
    pub devices: DeviceJudge,
    pub host: HostLogJudge,
    pub now: Mono,
}

impl Host {
    pub fn new() -> Host {
        Host {
            reader: LogReader::default(),
            devices: DeviceJudge::new(catalog(), DeviceLimits::default()),
            host: HostLogJudge::new(catalog(), "/dev/kmsg"),
            now: Mono(1_000_000_000_000),
        }
    }

    pub fn log(&mut self, line: &str) {
        if let Some((at, fact)) = self.reader.line(self.now, line, 1) {
            self.devices.take_in(at, &fact);
            self.host.take_in(at, &fact);
        }
    }

    /// An XID of GPU 0000:01:00.
    pub fn xid(&mut self, rest: &str) {
        self.log(&format!("NVRM: Xid (PCI:0000:01:00): {rest}"));
    }

    pub fn wait(&mut self, seconds: u64) {
        self.now = self.now.after(Span::seconds(seconds));
    }

    pub fn components(&mut self) -> Vec<Component> {
        let mut all = self.devices.components(self.now);
        all.extend(self.host.components(self.now));
        all
    }

    pub fn component(&mut self, name: &str) -> Component {
        let found = self.components().into_iter().find(|component| component.name == name);
        found.unwrap_or_else(|| panic!("no {name}"))
    }

    /// The components that are not healthy, with state and action.
    pub fn not_healthy(&mut self) -> Vec<(String, HealthState, RecommendedAction)> {
        let not_healthy =
            self.components().into_iter().filter(|component| component.state != HealthState::Healthy);
        not_healthy.map(|component| (component.name, component.state, component.action)).collect()
    }

    pub fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) {
        let component = self.component(name);
        assert_eq!((component.state, component.action), (state, action), "{name}: {}", component.reason);
    }
}
