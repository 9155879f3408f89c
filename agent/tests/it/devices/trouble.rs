//! Unusable GPUs and drivers: each has its own message.

use std::fs;
use std::time::Duration;

use mainstay_health::hardware::gpu::{
    DeviceJudge, DeviceLimits, DeviceReport, DriverTrouble, GpuTrouble, ProbeAnswer,
};
use mainstay_model::health::HealthState::{Healthy, Unhealthy, Unknown};
use mainstay_model::health::RecommendedAction::{self, None as Nothing, RebootNode, ResetDevice};
use mainstay_model::time::Mono;
use mainstay_sensors::source::device::{DeviceSource, ProbePlan};
use serde_json::json;

use super::host::{FIRST, Host, SECOND, catalog, plan};

#[test]
fn a_lost_gpu_keeps_its_name_and_takes_no_other_along() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    host.set("/gpus/0/codes", json!({"*": 15}));
    let gpus = host.gpus();
    assert_eq!(gpus[0].trouble, Some(GpuTrouble::Lost));
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Healthy, Nothing);
    host.set("/gpus/0/codes", json!({"nvmlDeviceGetTemperature": 15}));
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.set("/gpus/0/codes", json!({"*": 16}));
    host.gpus();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.set("/gpus/0/codes", json!({}));
    host.look_for_a_while();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_gpu_that_is_not_counted_any_more_is_missed() {
    let mut host = Host::with_gpus(2);
    host.gpus();
    let first = host.script["gpus"][0].clone();
    host.set("/gpus", json!([first]));
    host.gpus();
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn each_way_of_being_unreadable_has_its_own_message() {
    for (code, trouble, words, state, action) in [
        (9, DriverTrouble::DriverNotLoaded, "is not loaded", Unknown, Nothing),
        (18, DriverTrouble::VersionMismatch, "different versions", Unhealthy, RebootNode),
        (4, DriverTrouble::NoPermission, "may not ask", Unknown, Nothing),
        (15, DriverTrouble::GpuLost, "lost a GPU", Unhealthy, RebootNode),
        (16, DriverTrouble::ResetRequired, "needs a reset", Unhealthy, ResetDevice),
        (10, DriverTrouble::Other, "refuses", Unknown, Nothing),
        (999, DriverTrouble::Other, "refuses", Unknown, Nothing),
    ] {
        let mut host = Host::with_gpus(1);
        host.gpus();
        host.set("/codes", json!({"nvmlDeviceGetCount_v2": code}));
        // The library is initialized again after a failure: then the initialization fails.
        for _ in 0..2 {
            let report = host.look().0;
            let DeviceReport::Answered(ProbeAnswer::Trouble { trouble: reported, .. }) = report else {
                panic!("{code}: {report:?}")
            };
            assert_eq!(reported, trouble, "{code}");
            let reason = host.expect("gpu.driver", state, action);
            assert!(reason.contains(words), "{reason}");
            host.expect(FIRST, Unknown, Nothing);
            host.set("/codes", json!({"nvmlInit_v2": code}));
        }
        host.set("/codes", json!({}));
        host.gpus();
        host.expect(FIRST, Healthy, Nothing);
    }
}

#[test]
fn a_gpu_that_was_lost_before_the_agent_started_keeps_its_name() {
    let mut host = Host::with_gpus(2);
    let gpus = host.gpus();
    let known: Vec<_> = gpus.into_iter().map(|gpu| (gpu.index, gpu.identity.unwrap())).collect();
    host.set("/gpus/0/codes", json!({"*": 15}));
    let library = host.directory.path().join(fake_devices::LIBRARY);
    host.source = DeviceSource::new(ProbePlan { known, ..plan(Some(library), Duration::from_secs(60)) });
    host.gpus();
    host.expect(FIRST, Unhealthy, RebootNode);
}

#[test]
fn a_missing_library_is_reported_as_missing() {
    let mut source =
        DeviceSource::new(plan(Some("/nowhere/libnvidia-ml.so.1".into()), Duration::from_secs(60)));
    let report = source.sample(Mono(1));
    let DeviceReport::Answered(ProbeAnswer::Trouble { trouble, detail }) = report else {
        panic!("{report:?}")
    };
    assert_eq!(trouble, DriverTrouble::LibraryMissing);
    assert!(detail.contains("/nowhere/libnvidia-ml.so.1"), "{detail}");
}

#[test]
fn a_host_without_gpus_is_left_in_peace() {
    let mut source = DeviceSource::new(plan(None, Duration::from_secs(60)));
    assert_eq!(source.sample(Mono(1)), DeviceReport::NoGpus);
    let mut judge = DeviceJudge::new(catalog(), DeviceLimits::default());
    assert_eq!(judge.report(Mono(1), DeviceReport::NoGpus), []);
    assert_eq!(judge.components(Mono(1)), []);
}

#[test]
fn the_reason_why_a_gpu_has_no_handle_is_its_own_state() {
    for (code, state, action) in [
        (8, Unhealthy, RecommendedAction::ContactSupport),
        (11, Unhealthy, RebootNode),
        (15, Unhealthy, RebootNode),
        (16, Unhealthy, ResetDevice),
        (999, Unknown, Nothing),
        (4, Unknown, Nothing),
        (10, Unknown, Nothing),
    ] {
        let mut host = Host::with_gpus(2);
        host.gpus();
        host.set("/gpus/0/codes", json!({"nvmlDeviceGetHandleByIndex_v2": code}));
        host.gpus();
        host.expect(FIRST, state, action);
        host.expect(SECOND, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
}

#[test]
fn a_gpu_that_only_the_kernel_still_holds_is_missed_and_one_that_is_excluded_is_not() {
    let mut host = Host::with_gpus(2);
    let proc = host.directory.path().join("proc");
    let held = |name: &str, information: &str| {
        let directory = proc.join("driver/nvidia/gpus").join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("information"), information).unwrap();
    };
    held("0000:01:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    held("0000:02:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    held("0000:03:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t Yes\n");
    let library = host.directory.path().join(fake_devices::LIBRARY);
    host.source =
        DeviceSource::new(ProbePlan { proc: proc.clone(), ..plan(Some(library), Duration::from_secs(60)) });
    host.gpus();
    host.expect("gpu.driver", Healthy, Nothing);
    held("0000:04:00.0", "Model: \t NVIDIA H100\nGPU Excluded:\t No\n");
    host.gpus();
    let reason = host.expect("gpu.driver", Unhealthy, RebootNode);
    assert!(reason.ends_with("holds GPU 0000:04:00 too"), "{reason}");
}

#[test]
fn a_gpu_without_a_location_is_found_by_its_name() {
    let mut host = Host::with_gpus(2);
    host.without(&["nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"]);
    let proc = host.directory.path().join("proc");
    let library = host.directory.path().join(fake_devices::LIBRARY);
    let source = |library: &std::path::Path| {
        let plan = plan(Some(library.to_owned()), Duration::from_secs(60));
        DeviceSource::new(ProbePlan { proc: proc.clone(), ..plan })
    };
    // No source has it: that is reported, and no GPU counts as healthy.
    host.source = source(&library);
    host.gpus();
    host.expect("gpu.driver", Unknown, Nothing);
    for (name, uuid) in [("0000:01:00.0", "GPU-0"), ("0000:02:00.0", "GPU-1")] {
        let directory = proc.join("driver/nvidia/gpus").join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("information"), format!("GPU UUID: \t {uuid}\nGPU Excluded:\t No\n"))
            .unwrap();
    }
    host.source = source(&library);
    host.look_for_a_while();
    host.expect("gpu.driver", Healthy, Nothing);
    host.expect(FIRST, Healthy, Nothing);
    host.set("/gpus/1/values", json!({"ecc_volatile": 3}));
    host.gpus();
    host.expect(SECOND, Unhealthy, ResetDevice);
    host.expect(FIRST, Healthy, Nothing);
}
