//! Libraries that are not NVIDIA's newest: few functions, old functions, odd answers, odd behavior.

use std::os::fd::AsFd;
use std::time::Duration;

use mainstay_health::hardware::gpu::{GpuTrouble, RemappedRows, Sampled};
use mainstay_model::health::HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use mainstay_model::health::RecommendedAction::{None as Nothing, RebootNode, ReplaceNode, ResetDevice};
use mainstay_sensors::source::device::Waited;
use serde_json::json;

use super::host::{FIRST, Host, SECOND};

/// The functions missing in a library that has only the first form of each, and few of them.
const NEWER: [&str; 38] = [
    "nvmlInit_v2",
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetPciInfo_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPages_v2",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetViolationStatus",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkErrorCounter",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetGspFirmwareMode",
    "nvmlDeviceValidateInforom",
    "nvmlEventSetCreate",
    "nvmlSystemGetDriverVersion",
];

#[test]
fn a_library_with_few_functions_of_old_is_judged_by_what_it_has() {
    let mut host = Host::with_gpus(2);
    host.without(&NEWER);
    let gpus = host.gpus();
    assert_eq!(gpus[1].identity.as_ref().unwrap().address.to_string(), "0000:02:00");
    assert_eq!((&gpus[0].temperature, &gpus[0].remapped), (&Sampled::Value(41), &Sampled::NotOffered));
    host.expect("gpu.driver", Healthy, Nothing);
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"ecc_volatile": 2}));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.expect(SECOND, Healthy, Nothing);
    host.set("/gpus/1/codes", json!({"*": 15}));
    host.gpus();
    host.expect(SECOND, Unhealthy, RebootNode);
}

#[test]
fn a_library_that_can_only_be_initialised_with_flags_is_initialised_with_none() {
    let mut host = Host::with_gpus(1);
    host.without(&["nvmlInit_v2", "nvmlInit"]);
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn functions_that_only_exist_by_name_are_called_in_their_older_form() {
    const NOT_FOUND: u32 = 13;
    let mut host = Host::with_gpus(2);
    host.set("/codes", json!({"nvmlDeviceGetCount_v2": NOT_FOUND}));
    let missing = json!({"nvmlDeviceGetHandleByIndex_v2": NOT_FOUND, "nvmlDeviceGetPciInfo_v3": NOT_FOUND,
        "nvmlDeviceGetPciInfo_v2": NOT_FOUND, "nvmlDeviceGetMemoryInfo_v2": NOT_FOUND,
        "nvmlDeviceGetComputeRunningProcesses_v3": NOT_FOUND, "nvmlDeviceGetRetiredPages": NOT_FOUND});
    host.set("/gpus/0/codes", missing);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    host.set("/gpus/0/values", json!({"pages_uncorrected": 3, "memory_used": 7}));
    let gpu = host.gpus().remove(0);
    assert_eq!(gpu.identity.unwrap().address.to_string(), "0000:01:00");
    assert_eq!(gpu.memory, Sampled::Value((7, 80 << 30)));
    assert_eq!(gpu.processes.value().map(Vec::len), Some(1));
    assert_eq!(gpu.details.unwrap().pages_retired, Sampled::Value((0, 3)));
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn values_without_a_function_are_read_by_their_number() {
    let mut host = Host::with_gpus(1);
    host.without(&[
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMemoryErrorCounter",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPages",
        "nvmlDeviceGetRetiredPages_v2",
        "nvmlDeviceGetRetiredPagesPendingStatus",
    ]);
    let gpu = host.gpus().remove(0);
    let none = RemappedRows { corrected: 0, uncorrected: 0, pending: false, failed: false };
    assert_eq!((gpu.ecc_volatile, gpu.remapped), (Sampled::Value(0), Sampled::Value(none)));
    host.expect(FIRST, Healthy, Nothing);
    for (values, state, action) in [
        (json!({"ecc_volatile": 1}), Unhealthy, ResetDevice),
        (json!({"remap_pending": 1}), Degraded, ResetDevice),
        (json!({"remap_failed": 1}), Unhealthy, ReplaceNode),
        (json!({"pages_pending": 1}), Degraded, ResetDevice),
        (json!({"pages_corrected": 63}), Degraded, ReplaceNode),
    ] {
        host.set("/gpus/0/values", values.clone());
        host.gpus();
        assert!(!host.expect(FIRST, state, action).is_empty(), "{values}");
        host.set("/gpus/0/values", json!({}));
        host.look_for_a_while();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn errors_of_links_are_found_by_whichever_way_counts_them() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/links", json!({"4": {"replays": 70, "recoveries": 3, "crc": 5}}));
    let counted = |host: &mut Host| {
        let details = host.gpus().remove(0).details.unwrap();
        let link = details.links.into_iter().find(|of| of.link == 4).unwrap();
        (link.replays, link.recoveries, link.crc)
    };
    let all = (Some(70), Some(3), Some(5));
    assert_eq!(counted(&mut host), all);
    host.set("/gpus/0/values", json!({"link_fields_stand_still": 1}));
    assert_eq!(counted(&mut host), all);
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetFieldValues": 3}));
    assert_eq!(counted(&mut host), all);
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetNvLinkErrorCounter": 3}));
    assert_eq!(counted(&mut host), (Some(0), Some(0), Some(0)));
    host.set("/gpus/0/values", json!({"pcie_replays": 9}));
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetPcieReplayCounter": 3}));
    assert_eq!(host.gpus()[0].pcie_replays, Sampled::Value(9));
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_gpu_of_which_nothing_can_be_read_is_unusable_in_the_end() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    // The library can only return the handle and the name of the GPU.
    let codes = json!({"*": 999, "nvmlDeviceGetHandleByIndex_v2": 0, "nvmlDeviceGetPciInfo_v3": 0, "nvmlDeviceGetUUID": 0});
    host.set("/gpus/0/codes", codes);
    assert!(matches!(host.gpus()[0].trouble, Some(GpuTrouble::Unopened(_))));
    host.expect(FIRST, Unknown, Nothing);
    host.look_for_a_while();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Healthy, Nothing);
    // A GPU whose calls fail from its name on is treated in the same way.
    host.set("/gpus/0/codes", json!({"*": 999, "nvmlDeviceGetHandleByIndex_v2": 0}));
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.set("/gpus/0/codes", json!({}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_gpu_whose_name_is_missing_once_is_still_the_same_gpu() {
    let mut host = Host::with_gpus(2);
    host.look_for_a_while();
    for codes in [
        json!({"nvmlDeviceGetUUID": 13}),
        json!({"nvmlDeviceGetUUID": 999}),
        json!({"nvmlDeviceGetPciInfo_v3": 999}),
        json!({"nvmlDeviceGetSerial": 999, "nvmlDeviceGetName": 999}),
    ] {
        host.set("/gpus/0/codes", codes);
        let gpus = host.gpus();
        let identity = gpus[0].identity.as_ref().unwrap();
        assert_eq!(
            (identity.uuid.as_str(), identity.address.to_string()),
            ("GPU-0", "0000:01:00".to_owned())
        );
        host.expect(FIRST, Healthy, Nothing);
    }
    // A GPU that never had a name is tracked by its position.
    let mut host = Host::with_gpus(2);
    host.set("/codes", json!({"nvmlDeviceGetUUID": 3}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"remap_pending": 1}));
    host.gpus();
    host.expect(FIRST, Degraded, ResetDevice);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_gpu_that_no_longer_reports_a_value_is_not_healthy() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"remap_pending": 1}));
    host.gpus();
    host.expect(FIRST, Degraded, ResetDevice);
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetRemappedRows": 3, "nvmlDeviceGetFieldValues": 3}));
    host.set("/gpus/0/values", json!({}));
    host.look_for_a_while();
    let reason = host.expect(FIRST, Degraded, ResetDevice);
    testing::snapshot!("components", "a GPU whose driver no longer reports a value", reason);
    host.expect(SECOND, Healthy, Nothing);
    // A missing error count does not make it healthy either.
    host.set("/gpus/1/codes", json!({"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetFieldValues": 3, "nvmlDeviceGetMemoryErrorCounter": 3}));
    host.gpus();
    host.expect(SECOND, Unknown, Nothing);
    host.set("/gpus/1/codes", json!({}));
    host.gpus();
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_gpu_that_is_split_or_has_no_ecc_reports_less_by_design() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let silent = json!({"nvmlDeviceGetRemappedRows": 3, "nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetFieldValues": 3});
    host.set("/gpus/0/codes", silent.clone());
    host.set("/gpus/0/values", json!({"mig": 1}));
    host.set("/gpus/1/codes", silent);
    host.set("/gpus/1/values", json!({"ecc_on": 0}));
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_library_that_writes_to_standard_output_is_understood() {
    let mut host = Host::with_gpus(2);
    host.set("/chatter", json!(true));
    assert_eq!(host.gpus().len(), 2);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_library_that_does_not_wait_for_events_is_not_asked_without_end() {
    let mut host = Host::with_gpus(1);
    host.set("/impatient", json!(true));
    host.gpus();
    // An event is still received; a probe that polls without end would be gone by now.
    host.set("/events", json!([{"gpu": 0, "kind": 8, "data": 79}]));
    let (reader, _writer) = std::io::pipe().unwrap();
    let reported = host.source.wait(reader.as_fd(), Duration::from_secs(60));
    assert!(matches!(&reported, Waited::Reported(events) if events[0].data == 79), "{reported:?}");
    host.gpus();
    host.expect("gpu.driver", Healthy, Nothing);
}

#[test]
fn the_number_of_gpus_may_change_between_two_looks() {
    let mut host = Host::with_gpus(3);
    host.look_for_a_while();
    let all = host.script["gpus"].clone();
    // The first one disappears: the others move up in the list and keep their identity.
    host.set("/gpus", json!([all[1], all[2]]));
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Healthy, Nothing);
    host.expect("gpu.0000:03:00", Healthy, Nothing);
    host.set("/gpus", json!([]));
    host.gpus();
    for gpu in [FIRST, SECOND, "gpu.0000:03:00"] {
        host.expect(gpu, Unhealthy, RebootNode);
    }
    host.set("/gpus", all);
    host.gpus();
    for gpu in [FIRST, SECOND, "gpu.0000:03:00"] {
        host.expect(gpu, Healthy, Nothing);
    }
}

#[test]
fn a_gpu_that_is_lost_in_the_middle_of_a_look_is_lost() {
    // Each of these alone shows it, whatever the others return.
    for function in [
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetPersistenceMode",
    ] {
        let mut host = Host::with_gpus(2);
        host.gpus();
        host.set("/gpus/0/codes", json!({function: 15}));
        host.gpus();
        let reason = host.expect(FIRST, Unhealthy, RebootNode);
        assert!(reason.contains("lost"), "{function}: {reason}");
        host.expect(SECOND, Healthy, Nothing);
    }
}

#[test]
fn a_board_without_its_own_limit_is_too_hot_where_its_clocks_are_held_down() {
    let mut host = Host::with_gpus(1);
    host.set("/gpus/0/values", json!({"hottest": null, "temperature": 91}));
    host.look_for_a_while();
    host.expect(FIRST, Degraded, mainstay_model::health::RecommendedAction::ContactSupport);
    host.set("/gpus/0/values", json!({"hottest": null, "temperature": 85}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_library_that_loses_its_initialisation_is_initialised_again() {
    let mut host = Host::with_gpus(2);
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
    host.set("/begins", json!(1));
    assert_eq!(host.gpus().len(), 2);
    host.expect(FIRST, Healthy, Nothing);
    host.expect("gpu.driver", Healthy, Nothing);
    // One that cannot be initialized again is unknown, and its GPUs are not healthy.
    host.set("/codes", json!({"nvmlInit_v2": 1, "nvmlInitWithFlags": 1}));
    host.set("/begins", json!(2));
    host.look();
    assert_eq!(host.component("gpu.driver").state, Unknown);
    assert_ne!(host.component(FIRST).state, Healthy);
}

#[test]
fn errors_that_are_only_reported_for_each_memory_count() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"ecc_volatile": null, "dram_uncorrected_volatile": 2}));
    host.set("/gpus/1/values", json!({"ecc_volatile": null}));
    host.gpus();
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    assert!(reason.contains('2'), "{reason}");
    host.expect(SECOND, Healthy, Nothing);
}
