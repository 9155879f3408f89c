//! Active probes of a GPU with the real probe in a child process, and a fake CUDA library.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::path::PathBuf;
use std::time::Duration;

use mainstay_health::host::preflight::deep::{DeepLimits, Probe};
use mainstay_health::host::preflight::{Check, CheckVerdict};
use mainstay_model::health::RecommendedAction::{self, ContactSupport, None as Nothing, ResetDevice};
use mainstay_model::units::Bytes;
use mainstay_sensors::source::active::{ActivePlan, probe};
use serde_json::{Value, json};
use testing::TempDir;

const GPU: &str = "0000:3b:00.0";

/// A host with one GPU.
struct Host {
    directory: TempDir,
    deadline: Duration,
}

impl Host {
    fn new(habits: Value) -> Host {
        let host = Host { directory: testing::tempdir().unwrap(), deadline: Duration::from_secs(60) };
        let built = std::env::current_exe().unwrap().with_file_name(fake_cuda::LIBRARY);
        std::fs::copy(built, host.library()).unwrap();
        let mut script = json!({ "gpus": [GPU] });
        for (key, value) in habits.as_object().unwrap() {
            script[key] = value.clone();
        }
        std::fs::write(host.directory.path().join(fake_cuda::SCRIPT), script.to_string()).unwrap();
        host
    }

    fn library(&self) -> PathBuf {
        self.directory.path().join(fake_cuda::LIBRARY)
    }

    /// Limits that this host's own memory copies satisfy.
    fn check(&self) -> Check {
        self.held_to(Bytes(1 << 20))
    }

    fn held_to(&self, gpu_memory: Bytes) -> Check {
        self.probed(gpu_memory, self.library())
    }

    fn probed(&self, gpu_memory: Bytes, library: PathBuf) -> Check {
        let plan = ActivePlan {
            program: env!("CARGO_BIN_EXE_mainstay").into(),
            deadline: self.deadline,
            limits: DeepLimits { gpu_memory, ..DeepLimits::default() },
            cuda: Some(library),
        };
        probe(&plan, &Probe::Gpu(GPU.to_owned()))
    }
}

#[track_caller]
fn is(check: &Check, verdict: CheckVerdict, action: RecommendedAction) {
    assert_eq!((check.verdict, check.action), (verdict, action), "{}", check.reason);
}

/// The same, and that its reason is that of the case.
#[track_caller]
fn says(check: &Check, verdict: CheckVerdict, action: RecommendedAction, case: &str) {
    is(check, verdict, action);
    testing::snapshot!("cuda", case, check.reason);
}

/// A text without the folder of the host.
fn masked(host: &Host, text: &str) -> String {
    text.replace(&host.directory.path().display().to_string(), "DIRECTORY")
}

#[test]
fn a_gpu_that_keeps_and_computes_what_it_must_passes_with_what_was_measured() {
    let check = Host::new(json!({})).check();
    is(&check, CheckVerdict::Pass, Nothing);
    assert!(!check.reason.is_empty(), "what was measured");
    assert_eq!(check.evidence.len(), 2, "{:?}", check.evidence);
}

#[test]
fn wrong_results_fail_and_ask_for_a_reset() {
    let check = Host::new(json!({"wrong": "product"})).check();
    says(&check, CheckVerdict::Fail, ResetDevice, "a wrong product");
    // Each of ten copies flips the same bit: the last one shows it.
    let check = Host::new(json!({"wrong": "memory"})).check();
    says(&check, CheckVerdict::Fail, ResetDevice, "memory that changes");
    let check = Host::new(json!({"codes": {"cuCtxSynchronize": 214}})).check();
    says(&check, CheckVerdict::Fail, ResetDevice, "an error in memory");
}

#[test]
fn slow_memory_only_warns() {
    let host = Host::new(json!({"copy_ms": 50}));
    is(&host.held_to(Bytes(50 << 30)), CheckVerdict::Warn, Nothing);
    is(&host.check(), CheckVerdict::Pass, Nothing);
}

#[test]
fn a_call_that_hangs_is_left_behind_at_the_deadline() {
    for function in ["cuInit", "cuMemAlloc_v2", "cuCtxSynchronize"] {
        let mut host = Host::new(json!({"hang": [function]}));
        host.deadline = Duration::from_millis(500);
        let check = host.check();
        assert_eq!(check.verdict, CheckVerdict::Unknown, "{function}: {}", check.reason);
    }
}

#[test]
fn memory_that_is_full_is_no_fault_of_the_gpu() {
    for (habits, case) in [
        (json!({"free": 0}), "no free memory"),
        (json!({"codes": {"cuMemAlloc_v2": 2}}), "no memory is given"),
    ] {
        let check = Host::new(habits).check();
        says(&check, CheckVerdict::Unknown, Nothing, case);
    }
}

#[test]
fn a_gpu_that_refuses_is_for_support() {
    // An illegal address, a launch that failed, the driver's unknown error.
    for code in [700, 719, 999] {
        let check = Host::new(json!({"codes": {"cuLaunchKernel": code}})).check();
        says(&check, CheckVerdict::Fail, ContactSupport, &format!("a launch returns {code}"));
    }
}

#[test]
fn a_driver_that_rejects_our_kernels_is_no_verdict_on_the_gpu() {
    for code in [200, 209, 218, 222] {
        let check = Host::new(json!({"codes": {"cuModuleLoadData": code}})).check();
        says(&check, CheckVerdict::Unknown, Nothing, &format!("kernels are not taken: {code}"));
    }
}

#[test]
fn without_cuda_there_is_nothing_to_probe() {
    let host = Host::new(json!({}));
    let check = host.probed(Bytes(1 << 20), host.directory.path().join("libnone.so"));
    is(&check, CheckVerdict::Skipped, Nothing);
    testing::snapshot!("cuda", "no CUDA", masked(&host, &check.reason));
    let check = Host::new(json!({"codes": {"cuInit": 100}})).check();
    says(&check, CheckVerdict::Skipped, Nothing, "CUDA sees no GPU");
    let check = Host::new(json!({"gpus": ["0000:5e:00.0"]})).check();
    says(&check, CheckVerdict::Skipped, Nothing, "CUDA sees another GPU");
}

#[test]
fn a_library_that_lacks_a_function_is_no_verdict_on_the_gpu() {
    let host = Host::new(json!({}));
    let library = std::fs::read(host.library()).unwrap();
    std::fs::write(host.library(), fake_devices::without(&library, &["cuMemcpyDtoD_v2"])).unwrap();
    let check = host.check();
    is(&check, CheckVerdict::Unknown, Nothing);
    testing::snapshot!("cuda", "a function is missing", masked(&host, &check.reason));
}
