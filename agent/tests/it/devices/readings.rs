//! Readings of working GPUs, and the resulting states.

use std::os::fd::AsFd;
use std::time::Duration;

use mainstay_health::hardware::gpu::{
    Clocks, EccCount, EccPlace, FabricInfo, GpuEvent, GpuProcess, Sampled, SlowdownTimes, SramErrors,
};
use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::health::HealthState::{Degraded, Healthy, Unhealthy};
use mainstay_model::health::RecommendedAction::{
    self, None as Nothing, RebootNode, ReplaceNode, ResetDevice,
};
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Span;
use mainstay_sensors::source::device::Waited;
use serde_json::json;

use super::host::{FIRST, Host, SECOND};

#[test]
fn eight_healthy_gpus_are_healthy() {
    let mut host = Host::with_gpus(8);
    let gpus = host.gpus();
    assert_eq!(gpus.len(), 8);
    let gpu = &gpus[7];
    let identity = gpu.identity.as_ref().unwrap();
    assert_eq!((identity.uuid.as_str(), identity.address.to_string()), ("GPU-7", "0000:08:00".to_owned()));
    assert_eq!((gpu.trouble.as_ref(), gpu.temperature.value(), gpu.nvlinks.len()), (None, Some(&41), 18));
    assert_eq!(gpu.recovery_action, Sampled::Value(0));
    assert_eq!(host.expect("gpu.driver", Healthy, Nothing), "driver 550.54.15, 8 GPUs");
    for bus in 1..=8 {
        host.expect(&format!("gpu.0000:{bus:02x}:00"), Healthy, Nothing);
    }
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
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    testing::snapshot!("components", "a GPU with an NVLink that is down", reason);
    let reason = host.expect("nvlink.0000:01:00/3", Unhealthy, ResetDevice);
    testing::snapshot!("components", "an NVLink that is down", reason);
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
    testing::snapshot!("components", "a GPU with an XID whose driver wants a reboot", reason);
}

#[test]
fn every_value_of_a_library_is_read() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000], [4712, u64::MAX]]));
    host.set(
        "/gpus/0/links",
        json!({"4": {"replays": 12, "crc": 3, "recovered": 2, "effective_ber": 0x50c, "received_errors": 5, "integrity_errors": 6}}),
    );
    host.set(
        "/gpus/0/values",
        json!({"dram_corrected_aggregate": 7, "sram_threshold": 0, "sram_uncorrected_aggregate": 2, "margin": -1,
               "slowdown_thermal": 5, "pages_uncorrected": 2, "processor_repair": 1, "fabric_mask": 0x155, "memory_temperature": 61}),
    );
    let gpu = host.gpus().remove(0);
    let process = |pid, memory| GpuProcess { pid: Pid(pid), memory };
    assert_eq!(gpu.processes, Sampled::Value(vec![process(4711, Some(1_000_000)), process(4712, None)]));
    assert_eq!((gpu.margin, gpu.memory_temperature), (Sampled::Value(-1), Sampled::Value(61)));
    assert_eq!(gpu.slowdown, Sampled::Value(SlowdownTimes { thermal: 5, brake: 0 }));
    assert_eq!(gpu.clocks, Sampled::Value(Clocks { sm: 1980, memory: 2619 }));
    let fabric = FabricInfo { state: 3, status: 0, health_mask: 0x155, health_summary: 1 };
    assert_eq!((gpu.fabric, gpu.unrepairable), (Sampled::Value(fabric), Sampled::Value(false)));
    let details = gpu.details.unwrap();
    let corrected = EccCount { place: EccPlace::Dram, corrected: true, lifetime: true, count: 7 };
    assert!(details.ecc.contains(&corrected), "{:?}", details.ecc);
    let sram = SramErrors { uncorrected_lifetime: 2, ..SramErrors::default() };
    assert_eq!((details.sram, details.pages_retired), (Sampled::Value(sram), Sampled::Value((0, 2))));
    assert_eq!(details.repairs, Sampled::Value((false, true)));
    assert_eq!((details.hottest, details.power_limit), (Sampled::Value(87), Sampled::Value(700_000)));
    assert_eq!((details.slowdown_margin, details.inforom_valid), (Sampled::Value(-2), Sampled::Value(true)));
    assert_eq!(
        (details.persistence, details.gsp, details.ecc_on),
        (Sampled::Value(true), Sampled::Value(true), Sampled::Value(true))
    );
    assert_eq!(details.vbios, Sampled::Value("96.00.61.00.01".to_owned()));
    let link = details.links.into_iter().find(|of| of.link == 4).unwrap();
    assert_eq!(
        (link.replays, link.recoveries, link.crc, link.recovered),
        (Some(12), Some(0), Some(3), Some(2))
    );
    assert_eq!((link.effective_ber, link.symbol_ber), (Some(5e-12), Some(0.0)));
    assert_eq!(link.damaged_packets, Some(11));
    assert_eq!(link.remote.map(|remote| remote.to_string()).as_deref(), Some("0000:c1:00"));
}

#[test]
fn xids_come_by_events_too() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let (reader, _writer) = std::io::pipe().unwrap();
    // A GPU without the newer kinds is asked for the older ones.
    host.set("/event_kinds", json!(0xa));
    let event = |kind, data| json!({"gpu": 1, "kind": kind, "data": data});
    host.set("/events", json!([event(8, 79), event(2, 0)]));
    let mut reported = Vec::new();
    while reported.len() < 2 {
        match host.source.wait(reader.as_fd(), Duration::from_secs(60)) {
            Waited::Reported(events) => reported.extend(events),
            other => panic!("{other:?}"),
        }
    }
    let gpu = PciAddress::parse("0000:02:00");
    let event = |kind, data| GpuEvent { gpu, kind, data, instance: None };
    assert_eq!(reported, [event(8, 79), event(2, 0)]);
    host.judge.event(host.now, &reported[0]);
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn peers_that_are_not_reached_any_more_are_missed() {
    let mut host = Host::with_gpus(3);
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/peers_lost", json!([1, 2]));
    host.gpus();
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    assert!(reason.contains("0000:02:00, 0000:03:00 over NVLink"), "{reason}");
    host.expect(SECOND, Healthy, Nothing);
    // If the driver does not report it, there is no finding.
    host.set("/gpus/0/peers_lost", json!([]));
    host.look_for_a_while();
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetP2PStatus": 3}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}
