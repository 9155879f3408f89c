//! A host with scripted GPUs.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use mainstay_health::hardware::catalog::Catalog;
use mainstay_health::hardware::gpu::{DeviceJudge, DeviceLimits, DeviceReport, GpuReading, ProbeAnswer};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};
use mainstay_sensors::source::device::{DeviceSource, ProbePlan};
use serde_json::{Value, json};
use testing::TempDir;

pub const FIRST: &str = "gpu.0000:01:00";
pub const SECOND: &str = "gpu.0000:02:00";

pub fn catalog() -> Catalog {
    Catalog::new(
        toml::from_str(include_str!("../../../catalog/hardware/xid.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/sxid.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/kernel.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/nvlink.toml")).unwrap(),
    )
    .unwrap()
}

/// A host with simulated GPUs.
pub struct Host {
    pub directory: TempDir,
    pub script: Value,
    pub source: DeviceSource,
    pub judge: DeviceJudge,
    pub now: Mono,
}

impl Host {
    pub fn with_gpus(count: usize) -> Host {
        Host::with_deadline(count, Duration::from_secs(60))
    }

    pub fn with_deadline(count: usize, deadline: Duration) -> Host {
        let directory = testing::tempdir().unwrap();
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

    /// Changes the script.
    pub fn set(&mut self, pointer: &str, value: Value) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        self.script.pointer_mut(parent).unwrap()[key] = value;
        self.write();
    }

    pub fn write(&self) {
        let path = self.directory.path().join(fake_devices::SCRIPT);
        let beside = path.with_extension("new");
        fs::write(&beside, self.script.to_string()).unwrap();
        fs::rename(beside, path).unwrap();
    }

    /// Removes functions from the library, as in an old driver.
    pub fn without(&self, functions: &[&str]) {
        let library = self.directory.path().join(fake_devices::LIBRARY);
        let newest = fs::read(&library).unwrap();
        let old = fake_devices::without(&newest, functions);
        assert_ne!(newest, old);
        // Not over the old one, which is mapped.
        let beside = library.with_extension("old");
        fs::write(&beside, old).unwrap();
        fs::rename(beside, &library).unwrap();
    }

    /// One look at the GPUs, some time later.
    pub fn look(&mut self) -> (DeviceReport, Vec<Fact>) {
        self.now = self.now.after(Span::seconds(10));
        let report = self.source.sample(self.now);
        let facts = self.judge.report(self.now, report.clone());
        (report, facts)
    }

    /// Several looks: a finding is cleared only after several healthy readings.
    pub fn look_for_a_while(&mut self) {
        for _ in 0..3 {
            self.gpus();
        }
    }

    pub fn gpus(&mut self) -> Vec<GpuReading> {
        match self.look().0 {
            DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => gpus,
            other => panic!("no GPUs: {other:?}"),
        }
    }

    pub fn component(&mut self, name: &str) -> Component {
        let all = self.judge.components(self.now);
        let names: Vec<String> = all.iter().map(|component| component.name.clone()).collect();
        all.into_iter()
            .find(|component| component.name == name)
            .unwrap_or_else(|| panic!("no {name} in {names:?}"))
    }

    pub fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) -> String {
        let component = self.component(name);
        assert_eq!((component.state, component.action), (state, action), "{name}: {}", component.reason);
        component.reason
    }
}

/// How the probe is started.
pub fn plan(library: Option<PathBuf>, deadline: Duration) -> ProbePlan {
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
