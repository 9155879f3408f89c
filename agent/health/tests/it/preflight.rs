//! The verdicts of the checks before a job starts.
#![allow(clippy::panic, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;

use mainstay_health::hardware::gpu::{GpuProcess, GpuReading, GpuTrouble, Sampled};
use mainstay_health::host::preflight::{
    Check, CheckVerdict, GpuAvailability, Group, Requirement, conclude, free, overall, summary,
};
use mainstay_model::health::{Component, HealthState};
use mainstay_model::id::Pid;
use mainstay_model::time::Span;
use mainstay_model::units::Bytes;

fn component(name: &str, state: HealthState) -> Component {
    Component { name: name.to_owned(), state, reason: format!("{name} as it is"), ..Component::default() }
}

fn checks(components: &[(&str, HealthState)]) -> Vec<Check> {
    components.iter().map(|(name, state)| Check::of_component(&component(name, *state))).collect()
}

fn verdict_of<'a>(checks: &'a [Check], name: &str) -> (CheckVerdict, &'a str) {
    let check =
        checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}: {checks:#?}"));
    (check.verdict, &check.reason)
}

#[test]
fn each_component_belongs_to_its_group() {
    let printed = |name: &str| Group::from_name(name).name();
    assert_eq!(printed("gpu.0000:3b:00"), "gpu");
    assert_eq!(printed("nvswitch.0000:c1:00"), "gpu");
    assert_eq!(printed("fabric.mlx5_0/1"), "fabric");
    assert_eq!(printed("host.disk"), "storage");
    assert_eq!(printed("host.storage"), "storage");
    assert_eq!(printed("host.network_card"), "network");
    assert_eq!(printed("host.network_storage"), "storage");
    assert_eq!(printed("host.gpu"), "gpu");
    assert_eq!(printed("host.memory"), "host");
    assert_eq!(printed("tpu.0"), "tpu");
    assert_eq!(printed("kernel log"), "host");
    assert_eq!(printed("new part"), "host");
}

#[test]
fn absent_hardware_is_skipped_with_a_reason() {
    let concluded = conclude(checks(&[("host.cpu", HealthState::Healthy)]), &Group::ALL, &[], &[]);
    let (verdict, reason) = verdict_of(&concluded, "gpu");
    assert_eq!(verdict, CheckVerdict::Skipped);
    testing::snapshot!("reasons", "preflight: absent hardware is skipped with a reason", reason);
    assert_eq!(overall(&concluded), CheckVerdict::Pass);
}

#[test]
fn missing_required_hardware_fails() {
    let required = [Requirement { group: Group::Gpu, count: 2 }];
    let one = [("gpu.driver", HealthState::Healthy), ("gpu.0000:3b:00", HealthState::Healthy)];
    let concluded = conclude(checks(&one), &[Group::Gpu], &required, &[]);
    let (verdict, reason) = verdict_of(&concluded, "required.gpu");
    assert_eq!(verdict, CheckVerdict::Fail);
    testing::snapshot!("reasons", "preflight: missing required hardware fails", reason);
    assert_eq!(overall(&concluded), CheckVerdict::Fail);

    let two = [("gpu.0000:3b:00", HealthState::Healthy), ("gpu.0000:5e:00", HealthState::Healthy)];
    let concluded = conclude(checks(&two), &[Group::Gpu], &required, &[]);
    assert_eq!(overall(&concluded), CheckVerdict::Pass, "{concluded:#?}");
}

#[test]
fn a_group_without_an_answer_is_unknown_and_not_absent() {
    let mut all = checks(&[("host.cpu", HealthState::Healthy)]);
    all.push(Check::unanswered("devices", Group::Gpu, Span::seconds(10)));
    let required = [Requirement { group: Group::Gpu, count: 8 }];
    let concluded = conclude(all.clone(), &Group::ALL, &required, &[Group::Gpu]);
    testing::snapshot!(
        "reasons",
        "preflight: a group without an answer is unknown and not absent",
        verdict_of(&concluded, "devices").1
    );
    assert_eq!(verdict_of(&concluded, "required.gpu").0, CheckVerdict::Unknown);
    assert!(!conclude(all, &Group::ALL, &[], &[Group::Gpu]).iter().any(|check| check.name == "gpu"));
}

#[test]
fn only_the_requested_groups_count() {
    let all = [("host.memory", HealthState::Unhealthy), ("host.disk", HealthState::Healthy)];
    let concluded = conclude(checks(&all), &[Group::Storage], &[], &[]);
    assert_eq!(concluded.len(), 1);
    assert_eq!(overall(&concluded), CheckVerdict::Pass);
}

#[test]
fn the_worst_known_verdict_outweighs_unknown_and_unknown_outweighs_pass() {
    use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
    let verdict_of_states = |states: &[HealthState]| {
        let named: Vec<(&str, HealthState)> = states.iter().map(|state| ("host.x", *state)).collect();
        overall(&checks(&named))
    };
    assert_eq!(verdict_of_states(&[]), CheckVerdict::Unknown);
    assert_eq!(verdict_of_states(&[Healthy]), CheckVerdict::Pass);
    assert_eq!(verdict_of_states(&[Healthy, Unknown]), CheckVerdict::Unknown);
    assert_eq!(verdict_of_states(&[Unknown, Degraded]), CheckVerdict::Warn);
    assert_eq!(verdict_of_states(&[Degraded, Unhealthy, Unknown]), CheckVerdict::Fail);
    let skipped = conclude(Vec::new(), &[Group::Gpu], &[], &[]);
    assert_eq!(overall(&skipped), CheckVerdict::Skipped, "a host without GPUs has no fault");
}

#[test]
fn the_summary_is_one_line_with_the_worst_first() {
    use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
    let all = checks(&[("a", Healthy), ("b", Degraded), ("c", Unknown), ("d", Unhealthy), ("e", Degraded)]);
    let printed = summary(&all, Span::millis(250));
    testing::snapshot!("reasons", "preflight: the summary is one line with the worst first", printed);
    testing::snapshot!(
        "reasons",
        "preflight: the summary is one line with the worst first 2",
        summary(&[], Span::millis(3))
    );
}

fn gpu(used_mib: u64, processes: &[i32]) -> GpuReading {
    GpuReading {
        memory: Sampled::Value((used_mib << 20, 80 << 30)),
        processes: Sampled::Value(
            processes.iter().map(|pid| GpuProcess { pid: Pid(*pid), memory: None }).collect(),
        ),
        ..GpuReading::default()
    }
}

#[test]
fn a_gpu_is_free_if_no_other_process_holds_its_memory() {
    let allowed = Bytes(512 << 20);
    let ours = BTreeSet::from([Pid(7)]);
    let is = |reading: &GpuReading, ours: &BTreeSet<Pid>| free(reading, ours, allowed).0;
    let none = BTreeSet::new();
    assert_eq!(is(&gpu(4, &[]), &none), GpuAvailability::Free);
    assert_eq!(is(&gpu(30_000, &[7]), &ours), GpuAvailability::Free);
    assert!(matches!(is(&gpu(4, &[8]), &ours), GpuAvailability::Held(why) if why.contains("process 8")));
    assert!(matches!(is(&gpu(30_000, &[]), &none), GpuAvailability::Held(why) if why.contains("no process")));
    assert!(matches!(is(&GpuReading::default(), &none), GpuAvailability::Unknown(_)));
    let lost = GpuReading { trouble: Some(GpuTrouble::Lost), ..gpu(4, &[]) };
    assert!(matches!(is(&lost, &none), GpuAvailability::Unknown(_)));
}

mod probes {
    use mainstay_health::host::preflight::deep::{DeepLimits, Measured, Probe, Probed, What, judge};
    use mainstay_health::host::preflight::{Check, CheckVerdict, Group};
    use mainstay_model::health::RecommendedAction;
    use mainstay_model::time::Span;

    fn judged(probe: &Probe, probed: Probed) -> Check {
        judge(probe, probed, &DeepLimits::default(), Span::millis(900), Span::seconds(30))
    }

    fn done(measured: &[(What, f64)]) -> Probed {
        Probed::Done(measured.iter().map(|(what, value)| Measured { what: *what, value: *value }).collect())
    }

    #[test]
    fn a_probe_with_good_readings_passes_and_reports_them() {
        let storage = Probe::Storage("/scratch".into());
        let fast = done(&[(What::Write, 2e9), (What::Read, 3e9), (What::Sync, 0.002), (What::Direct, 1.0)]);
        let check = judged(&storage, fast);
        assert_eq!((check.verdict, check.group), (CheckVerdict::Pass, Group::Storage));
        assert_eq!(check.name, "deep.storage:/scratch");
        testing::snapshot!(
            "reasons",
            "preflight: a probe with good readings passes and reports them",
            check.reason
        );
    }

    #[test]
    fn a_slow_probe_warns_with_the_readings_and_limits() {
        let storage = Probe::Storage("/scratch".into());
        let check = judged(&storage, done(&[(What::Write, 1e6), (What::Read, 3e9), (What::Sync, 30.0)]));
        assert_eq!(check.verdict, CheckVerdict::Warn);
        testing::snapshot!(
            "reasons",
            "preflight: a slow probe warns with the readings and limits",
            check.reason
        );
        let no_number = judged(&Probe::Memory, done(&[(What::Copy, f64::NAN)]));
        assert_eq!(no_number.verdict, CheckVerdict::Warn);
    }

    #[test]
    fn a_wrong_result_fails_and_an_untried_probe_is_unknown() {
        let wrong = judged(&Probe::Cpu, Probed::Wrong("CPU 3".into()));
        assert_eq!((wrong.verdict, wrong.action), (CheckVerdict::Fail, RecommendedAction::ReplaceNode));
        let refused = judged(&Probe::Storage("/x".into()), Probed::Refused("read-only file system".into()));
        assert_eq!(refused.verdict, CheckVerdict::Fail);
        assert_eq!(
            judged(&Probe::Gpu("0000:3b:00.0".into()), Probed::Absent("no CUDA".into())).verdict,
            CheckVerdict::Skipped
        );
        assert_eq!(
            judged(&Probe::Memory, Probed::Untried("no memory".into())).verdict,
            CheckVerdict::Unknown
        );
    }
}
