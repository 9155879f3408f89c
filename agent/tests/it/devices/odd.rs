//! Answers that the interface allows and that no driver of NVIDIA gives. Each is read with a possible meaning or as
//! not reported, and affects nothing else.

use std::os::fd::AsFd;
use std::time::Duration;

use mainstay_health::hardware::gpu::{DeviceReport, FabricInfo, GpuTrouble, ProbeAnswer, Sampled};
use mainstay_model::health::HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use mainstay_model::health::RecommendedAction::{None as Nothing, RebootNode, ResetDevice};
use mainstay_sensors::source::device::Waited;
use serde_json::{Value, json};

use super::host::{FIRST, Host, SECOND};

/// The script's names of all numbers of a GPU.
const NUMBERS: [&str; 40] = [
    "power",
    "clock_reasons",
    "pcie_generation",
    "pcie_width",
    "pcie_generation_max",
    "pcie_width_max",
    "pcie_replays",
    "pages_pending",
    "power_limit",
    "persistence",
    "unrepairable",
    "temperature",
    "ecc_corrected",
    "ecc_volatile",
    "ecc_aggregate",
    "dram_uncorrected_volatile",
    "sram_uncorrected_volatile",
    "sram_uncorrected_aggregate",
    "sram_threshold",
    "remapped_corrected",
    "remapped_uncorrected",
    "remap_pending",
    "remap_failed",
    "mig",
    "utilization",
    "memory_used",
    "fabric_mask",
    "slowdown_at",
    "memory_hottest",
    "hottest",
    "clock_sm",
    "clock_memory",
    "violation_thermal",
    "ecc_on",
    "gsp",
    "channel_repair",
    "processor_repair",
    "memory_temperature",
    "recovery_action",
    "slowdown_margin",
];

#[test]
fn numbers_with_all_bits_set_are_none_whatever_they_count() {
    // One by one, and all of them.
    let alone = NUMBERS.iter().map(|name| json!({*name: -1}));
    let all: serde_json::Map<String, Value> = NUMBERS
        .iter()
        .filter(|name| **name != "temperature")
        .map(|name| ((*name).to_owned(), json!(-1)))
        .collect();
    for values in alone.chain([Value::Object(all)]) {
        let mut host = Host::with_gpus(2);
        host.set("/gpus/0/values", values.clone());
        host.look_for_a_while();
        let component = host.component(FIRST);
        assert_eq!(component.state, Healthy, "{values}: {}", component.reason);
        host.expect(SECOND, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
    // A fault in addition to them still counts.
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"power": -1, "mig": -1, "utilization": -1, "ecc_volatile": 1}));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
}

#[test]
fn handles_are_names_and_no_addresses_and_may_be_others_each_time() {
    let mut host = Host::with_gpus(3);
    host.set("/fresh_handles", json!(true));
    host.look_for_a_while();
    for gpu in [FIRST, SECOND, "gpu.0000:03:00", "gpu.driver"] {
        host.expect(gpu, Healthy, Nothing);
    }
    host.set("/events", json!([{"gpu": 1, "kind": 8, "data": 79}]));
    let (reader, _writer) = std::io::pipe().unwrap();
    let Waited::Reported(events) = host.source.wait(reader.as_fd(), Duration::from_secs(60)) else {
        panic!("no event")
    };
    assert_eq!(events[0].gpu.map(|gpu| gpu.to_string()), Some("0000:02:00".to_owned()));
}

#[test]
fn an_event_without_a_gpu_ends_no_probe_and_each_of_several_is_reported() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    host.set(
        "/events",
        json!([
            {"gpu": 0, "kind": 8, "data": 79, "of_nobody": true},
            {"gpu": 0, "kind": 8, "data": 31},
            {"gpu": 1, "kind": 8, "data": 31, "instance": 3},
            {"gpu": 1, "kind": 8, "data": 94},
            {"gpu": 7, "kind": 8, "data": 13}
        ]),
    );
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut reported = Vec::new();
    while reported.len() < 5 {
        match host.source.wait(reader.as_fd(), Duration::from_secs(60)) {
            Waited::Reported(events) => reported.extend(events),
            other => panic!("{other:?} after {reported:?}"),
        }
    }
    let seen: Vec<_> = reported.iter().map(|of| (of.gpu.map(|gpu| gpu.bus), of.data, of.instance)).collect();
    let expected = [
        (None, 79, None),
        (Some(1), 31, None),
        (Some(2), 31, Some(3)),
        (Some(2), 94, None),
        (None, 13, None),
    ];
    assert_eq!(seen, expected);
    host.gpus();
    host.expect("gpu.driver", Healthy, Nothing);
}

#[test]
fn names_may_be_long_be_no_text_and_have_controls_in_them() {
    let long = "NVIDIA ".repeat(20)[..95].trim_end().to_owned();
    for (bytes, shown) in [
        (long.clone().into_bytes(), long.as_str()),
        (b"H100 \xff\xfe 80GB".to_vec(), "H100 \u{fffd}\u{fffd} 80GB"),
        (b"\x1b[31mH100\x07\n80GB".to_vec(), "[31mH10080GB"),
        (Vec::new(), "NVIDIA GPU"),
    ] {
        let mut host = Host::with_gpus(2);
        host.set("/gpus/0/name_bytes", json!(bytes));
        host.set("/gpus/0/uuid_bytes", json!([b'\xc3', b'(', b'7']));
        host.look_for_a_while();
        let identity = host.gpus().remove(0).identity.unwrap();
        assert_eq!((identity.name.as_str(), identity.uuid.as_str()), (shown, "\u{fffd}(7"));
        host.expect(FIRST, Healthy, Nothing);
    }
    // Whatever its format, another name in the same place is another board.
    let mut host = Host::with_gpus(1);
    for (uuid, another) in [("MIG-GPU-b850f46d/7/0", false), ("0x17", true), ("", false), ("0x17", false)] {
        host.set("/gpus/0/uuid", json!(uuid));
        let facts: Vec<_> = (0..4).flat_map(|_| host.look().1).collect();
        assert_eq!(format!("{facts:?}").contains("another board"), another, "{uuid:?}: {facts:?}");
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn a_struct_with_only_the_first_version_filled_in_returns_only_that() {
    let mut host = Host::with_gpus(2);
    let odd = json!({"fabric_bytes": 29, "fabric_mask": 0x55, "fabric_summary": 2});
    host.set("/gpus/0/values", odd);
    host.look_for_a_while();
    let fabric = FabricInfo { state: 3, status: 0, health_mask: 0, health_summary: 0 };
    assert_eq!(host.gpus()[0].fabric, Sampled::Value(fabric));
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"fabric_mask": 0x55, "fabric_summary": 2}));
    host.look_for_a_while();
    host.expect(FIRST, Unhealthy, ResetDevice);
}

#[test]
fn values_without_their_type_are_the_whole_numbers_that_they_look_like() {
    let mut host = Host::with_gpus(2);
    host.set("/untyped_fields", json!(true));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"recovery_action": 2}));
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_list_with_too_large_a_length_has_no_additional_entries() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    for claimed in [20, 100_000] {
        host.set("/gpus/0/values", json!({"processes_claimed": claimed}));
        let pids: Vec<i32> =
            host.gpus()[0].processes.value().unwrap().iter().map(|process| process.pid.0).collect();
        assert_eq!(pids, [4711]);
    }
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn an_excessive_gpu_count_is_unknown_and_hides_none() {
    let mut host = Host::with_gpus(2);
    host.set("/count", json!(3));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.expect("gpu.driver", Unknown, Nothing);
    host.set("/gpus/0/values", json!({"ecc_volatile": 3}));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.expect(SECOND, Healthy, Nothing);
    // An impossible number is not waited for.
    host.set("/count", json!(u32::MAX));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
}

#[test]
fn codes_that_no_header_knows_are_unknown_and_no_fault() {
    for code in [77, 1000, u32::MAX] {
        let mut host = Host::with_gpus(2);
        host.look_for_a_while();
        host.set("/gpus/0/codes", json!({"*": code, "nvmlDeviceGetHandleByIndex_v2": 0, "nvmlDeviceGetPciInfo_v3": 0, "nvmlDeviceGetUUID": 0}));
        host.look_for_a_while();
        host.expect(FIRST, Unknown, Nothing);
        host.expect(SECOND, Healthy, Nothing);
        host.set("/gpus/0/codes", json!({}));
        host.look_for_a_while();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn gpus_that_are_counted_in_another_order_stay_who_they_are() {
    const THIRD: &str = "gpu.0000:03:00";
    let mut host = Host::with_gpus(3);
    host.look_for_a_while();
    let all = host.script["gpus"].clone();
    // The driver was reloaded; the second GPU does not answer at the position where the first was.
    let mut lost = all[1].clone();
    lost["codes"] = json!({"*": 15});
    host.set("/gpus", json!([lost, all[2], all[0]]));
    host.gpus();
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect(FIRST, Healthy, Nothing);
    host.expect(THIRD, Healthy, Nothing);
    host.set("/gpus", json!([all[2], all[1], all[0]]));
    host.look_for_a_while();
    for gpu in [FIRST, SECOND, THIRD] {
        host.expect(gpu, Healthy, Nothing);
    }
}

#[test]
fn two_gpus_at_one_address_are_not_a_replaced_board() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/1/pci", json!("00000000:01:00.0"));
    let facts: Vec<_> = (0..5).flat_map(|_| host.look().1).collect();
    assert!(!format!("{facts:?}").contains("another board"), "{facts:?}");
    host.expect(FIRST, Healthy, Nothing);
    host.expect("gpu.driver", Unknown, Nothing);
}

#[test]
fn a_library_that_crashes_at_one_question_is_asked_the_others() {
    let mut host = Host::with_gpus(2);
    host.set("/crash", json!(["nvmlDeviceValidateInforom"]));
    assert!(matches!(host.look().0, DeviceReport::Broken(_)));
    assert_eq!(host.component("gpu.driver").state, Unknown);
    host.look_for_a_while();
    host.expect("gpu.driver", Healthy, Nothing);
    host.set("/gpus/1/values", json!({"remap_pending": 1}));
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Degraded, ResetDevice);
}

#[test]
fn a_library_that_crashes_for_one_gpu_hides_no_other() {
    let mut host = Host::with_gpus(3);
    host.gpus();
    host.set("/gpus/0/crash", json!(["nvmlDeviceGetTemperature"]));
    let mut reports = (0..6).map(|_| host.look().0);
    let answered = reports.find_map(|report| match report {
        DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => Some(gpus),
        _ => None,
    });
    let gpus = answered.unwrap();
    assert!(matches!(&gpus[0].trouble, Some(GpuTrouble::Other(why)) if why.contains("crashes")), "{gpus:?}");
    host.expect(FIRST, Unknown, Nothing);
    host.expect(SECOND, Healthy, Nothing);
    host.expect("gpu.0000:03:00", Healthy, Nothing);
}

#[test]
fn a_gpu_that_is_healthy_again_reports_its_xids_again() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/1/codes", json!({"nvmlDeviceGetHandleByIndex_v2": 15}));
    host.gpus();
    host.set("/gpus/1/codes", json!({}));
    host.look_for_a_while();
    host.set("/events", json!([{"gpu": 1, "kind": 8, "data": 48}]));
    let (reader, _writer) = std::io::pipe().unwrap();
    let Waited::Reported(events) = host.source.wait(reader.as_fd(), Duration::from_secs(60)) else {
        panic!("no event")
    };
    assert_eq!((events[0].gpu.map(|gpu| gpu.bus), events[0].data), (Some(2), 48));
}
