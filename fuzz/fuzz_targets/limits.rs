//! Limits from a configuration file: with any values, no judge panics for a host of which nothing could be read, and
//! no unread component is healthy.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::host::cloud::{CloudJudge, CloudLimits, CloudSample};
use mainstay_health::host::fabric::{FabricJudge, FabricLimits, FabricSample, LearnedLinks};
use mainstay_model::health::HealthState;
use mainstay_health::host::os::{HostJudge, HostLimits, HostSample, SystemJudge, SystemSample};
use mainstay_model::id::BootId;
use mainstay_health::parse::log::LogReader;
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    let host: HostLimits = toml::from_str(&text).unwrap_or_default();
    let fabric: FabricLimits = toml::from_str(&text).unwrap_or_default();
    let cloud: CloudLimits = toml::from_str(&text).unwrap_or_default();
    let mut system = SystemJudge::new(host.clone());
    let mut host = HostJudge::new(host);
    let mut fabric = FabricJudge::new(fabric, BootId("b".to_owned()), Vec::new(), LearnedLinks::default());
    let mut cloud = CloudJudge::new(cloud);
    let mut log = LogReader::default();
    for at in [Mono(1), Mono(u64::MAX / 2), Mono(u64::MAX)] {
        let seen = host.step(at, &HostSample::default());
        assert!(seen.components.iter().all(|component| component.state != HealthState::Healthy));
        let _ = system.step(at, &SystemSample::default());
        let _ = fabric.step(at, &FabricSample::default());
        let silent = CloudSample { provider: String::new(), notices: Err("silent".to_owned()) };
        let _ = cloud.step(Stamp { mono: at, wall: Wall(i64::MAX) }, &silent);
        for _ in 0..3 {
            let _ = log.line(at, "EXT4-fs (sdb1): Remounting filesystem read-only", 1);
        }
        let _ = log.held_back(at);
    }
});
