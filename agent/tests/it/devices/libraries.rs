//! Libraries of other makes and ages: missing functions and odd answers.

use mainstay_health::hardware::gpu::{FabricInfo, GpuProcess, Sampled, SlowdownTimes};
use mainstay_model::health::HealthState::{Degraded, Healthy, Unknown};
use mainstay_model::health::RecommendedAction::{ContactSupport, None as Nothing};
use mainstay_model::id::Pid;
use serde_json::{Value, json};

use super::host::{FIRST, Host, SECOND};

#[test]
fn what_a_gpu_does_not_have_is_no_fault() {
    let mut host = Host::with_gpus(1);
    let values = json!({"ecc_volatile": null, "ecc_aggregate": null, "remapped_corrected": null, "recovery_action": null, "power": null, "nvlinks": 0, "pages_pending": null,
        "dram_uncorrected_volatile": null, "sram_uncorrected_volatile": null});
    host.set("/gpus/0/values", values);
    let gpus = host.gpus();
    assert_eq!((&gpus[0].ecc_volatile, &gpus[0].power), (&Sampled::NotOffered, &Sampled::NotOffered));
    assert_eq!((&gpus[0].remapped, &gpus[0].recovery_action), (&Sampled::NotOffered, &Sampled::NotOffered));
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_driver_of_old_lacks_much_and_is_no_worse_for_it() {
    let mut host = Host::with_gpus(2);
    host.without(&[
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetSramEccErrorStatus",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetUnrepairableMemoryFlag_v1",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetGspFirmwareMode",
        "nvmlDeviceValidateInforom",
        "nvmlEventSetCreate",
    ]);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    host.set("/gpus/0/links", json!({"4": {"replays": 12}}));
    host.set("/gpus/0/values", json!({"clock_reasons": 4, "violation_thermal": 9}));
    let gpus = host.gpus();
    let gpu = &gpus[0];
    assert_eq!(gpu.identity.as_ref().unwrap().address.to_string(), "0000:01:00");
    assert_eq!(gpu.processes, Sampled::Value(vec![GpuProcess { pid: Pid(4711), memory: Some(1_000_000) }]));
    assert_eq!((&gpu.clock_reasons, &gpu.fabric), (&Sampled::Value(4), &Sampled::NotOffered));
    assert_eq!((&gpu.remapped, &gpu.recovery_action), (&Sampled::NotOffered, &Sampled::NotOffered));
    assert_eq!(gpu.slowdown, Sampled::Value(SlowdownTimes { thermal: 9, brake: 0 }));
    let details = gpu.details.as_ref().unwrap();
    assert_eq!(
        (&details.sram, &details.gsp, &details.inforom_valid),
        (&Sampled::NotOffered, &Sampled::NotOffered, &Sampled::NotOffered)
    );
    assert_eq!(details.links[4].replays, Some(12));
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn an_older_version_of_a_struct_is_requested_where_the_newest_is_unknown() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"fabric_version": 2, "fabric_status": 28, "fabric_summary": 2}));
    let fabric = FabricInfo { state: 3, status: 28, health_mask: 0, health_summary: 0 };
    assert_eq!(host.gpus()[0].fabric, Sampled::Value(fabric));
}

#[test]
fn odd_answers_of_one_gpu_are_unknown_there_and_nowhere_else() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    for function in ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState"] {
        host.set("/gpus/0/codes", json!({function: 999}));
        host.gpus();
        host.expect(FIRST, Unknown, Nothing);
        host.expect(SECOND, Healthy, Nothing);
    }
    // Values that are not needed for a healthy state may fail.
    let codes = json!({"nvmlDeviceGetPowerUsage": 999, "nvmlDeviceGetComputeRunningProcesses_v3": 2, "nvmlDeviceGetFieldValues": 999,
        "nvmlDeviceGetMigMode": 2, "nvmlDeviceGetGpuFabricInfoV": 999, "nvmlDeviceGetSerial": 3, "nvmlDeviceGetPersistenceMode": 4});
    host.set("/gpus/0/codes", codes);
    host.gpus();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn missing_power_and_processes_count_and_withheld_ones_do_not() {
    let mut host = Host::with_gpus(2);
    let both = |code: u32| {
        json!({"nvmlDeviceGetPowerUsage": code, "nvmlDeviceGetComputeRunningProcesses_v3": code,
            "nvmlDeviceGetComputeRunningProcesses": code})
    };
    // Not supported, not permitted.
    for code in [3, 4] {
        host.set("/gpus/0/codes", both(code));
        host.look_for_a_while();
        host.expect(FIRST, Healthy, Nothing);
    }
    host.set("/gpus/0/codes", both(999));
    host.look_for_a_while();
    let reason = host.expect(FIRST, Degraded, ContactSupport);
    testing::snapshot!("components", "a GPU without readings of power and processes", reason);
    host.expect(SECOND, Healthy, Nothing);
    host.set("/gpus/0/codes", json!({}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn numbers_that_mean_no_value_are_no_value() {
    let mut host = Host::with_gpus(1);
    let all_bits = i64::from(u32::MAX);
    host.set(
        "/gpus/0/values",
        json!({"memory_temperature": all_bits, "recovery_action": all_bits, "temperature": all_bits}),
    );
    let gpus = host.gpus();
    let gpu = &gpus[0];
    assert_eq!((&gpu.memory_temperature, &gpu.temperature), (&Sampled::NotOffered, &Sampled::NotOffered));
    assert_eq!(gpu.recovery_action, Sampled::NotOffered);
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/0/values", json!({"memory_temperature": 0}));
    assert_eq!(host.gpus()[0].memory_temperature, Sampled::NotOffered);
}

#[test]
fn a_library_without_the_functions_of_old_is_asked_by_the_newer_ones() {
    let mut host = Host::with_gpus(1);
    let codes = json!({"nvmlDeviceGetTemperature": 3, "nvmlDeviceGetCurrentClocksEventReasons": 3, "nvmlDeviceGetPciInfo_v3": 3});
    host.set("/gpus/0/codes", codes);
    let gpus = host.gpus();
    assert_eq!((&gpus[0].temperature, &gpus[0].clock_reasons), (&Sampled::Value(41), &Sampled::Value(1)));
    assert_eq!(gpus[0].identity.as_ref().unwrap().address.to_string(), "0000:01:00");
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_library_that_returns_only_names_does_not_make_a_gpu_healthy() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let silent = [
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ];
    let codes: serde_json::Map<String, Value> =
        silent.iter().map(|function| ((*function).to_owned(), json!(3))).collect();
    host.set("/gpus/0/codes", Value::Object(codes));
    host.gpus();
    host.expect(FIRST, Unknown, Nothing);
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_library_without_events_is_watched_all_the_same() {
    for codes in [
        json!({"nvmlEventSetCreate": 3}),
        json!({"nvmlDeviceRegisterEvents": 3}),
        json!({"nvmlEventSetWait_v2": 999}),
    ] {
        let mut host = Host::with_gpus(1);
        host.set("/codes", codes);
        host.gpus();
        host.expect(FIRST, Healthy, Nothing);
    }
}
