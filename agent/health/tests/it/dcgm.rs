//! DCGM as a second opinion: how it changes a GPU's state, and what must not change it.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;

use mainstay_health::hardware::dcgm::{
    DcgmCatalog, DcgmFile, DcgmHealth, DcgmJudge, DcgmReport, ExporterJudge, ExporterReport, Incident,
    Violation,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::observation::Weight;
use mainstay_model::pci::PciAddress;
use mainstay_model::report::SensorReport;
use mainstay_model::time::Mono;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};

fn catalog() -> DcgmCatalog {
    let file: DcgmFile =
        toml::from_str(include_str!("../../../catalog/hardware/dcgm.toml")).expect("a catalog");
    DcgmCatalog::new(file).expect("no code twice")
}

fn incident(gpu: Option<u32>, health: u32, code: u32) -> Incident {
    Incident { gpu, system: 16, health, code, message: format!("incident {code}") }
}

fn health(incidents: Vec<Incident>) -> DcgmReport {
    DcgmReport::Health(DcgmHealth { gpus: vec![0, 1], incidents, ..DcgmHealth::default() })
}

fn judged(incidents: Vec<Incident>) -> SensorReport {
    DcgmJudge::new(catalog(), false).step(Mono(1), &health(incidents))
}

fn state_of(judged: &SensorReport, name: &str) -> (HealthState, RecommendedAction) {
    let component = judged.components.iter().find(|component| component.name == name);
    let component = component.cloned().unwrap_or_default();
    (component.state, component.action)
}

#[test]
fn a_failure_counts_only_for_its_own_gpu() {
    let all = judged(vec![incident(Some(1), 20, 4)]);
    assert_eq!(state_of(&all, "dcgm.gpu0"), (Healthy, RecommendedAction::None));
    assert_eq!(state_of(&all, "dcgm.gpu1"), (Unhealthy, RecommendedAction::ResetDevice));
    assert_eq!(state_of(&all, "dcgm"), (Healthy, RecommendedAction::None));
}

#[test]
fn a_warning_of_dcgm_makes_a_gpu_at_most_degraded() {
    assert_eq!(state_of(&judged(vec![incident(Some(0), 10, 4)]), "dcgm.gpu0").0, Degraded);
}

#[test]
fn an_xid_from_dcgm_leaves_the_gpu_healthy() {
    for code in [81, 101, 131] {
        let all = judged(vec![incident(Some(0), 20, code)]);
        assert_eq!(state_of(&all, "dcgm.gpu0"), (Healthy, RecommendedAction::None), "{code}");
        let evidence = &all.components[1].evidence;
        assert!(evidence[0].source.contains(&code.to_string()), "{evidence:?}");
        assert!(matches!(&all.facts[0], Fact::Observed(observation) if observation.weight == Weight::Info));
    }
}

#[test]
fn power_at_the_cap_is_no_fault_and_an_unknown_code_is_at_most_degraded() {
    assert_eq!(state_of(&judged(vec![incident(Some(0), 10, 12)]), "dcgm.gpu0").0, Healthy);
    let unknown = judged(vec![incident(Some(0), 20, 9999)]);
    assert_eq!(state_of(&unknown, "dcgm.gpu0"), (Degraded, RecommendedAction::ContactSupport));
}

#[test]
fn the_first_check_gives_no_opinion_on_gpus() {
    let mut judge = DcgmJudge::new(catalog(), false);
    let first = DcgmReport::Health(DcgmHealth { gpus: vec![0], first: true, ..DcgmHealth::default() });
    let names: Vec<String> =
        judge.step(Mono(1), &first).components.into_iter().map(|component| component.name).collect();
    assert_eq!(names, ["dcgm"], "no GPU has a result yet");
    assert_eq!(judge.step(Mono(2), &health(Vec::new())).components.len(), 3);
}

#[test]
fn an_incident_is_reported_once_and_again_when_it_recurs() {
    let mut judge = DcgmJudge::new(catalog(), false);
    let mut fact_count = |incidents| judge.step(Mono(1), &health(incidents)).facts.len();
    assert_eq!(
        fact_count(vec![incident(Some(0), 20, 4), incident(Some(0), 20, 4), incident(Some(1), 10, 4)]),
        2
    );
    assert_eq!(fact_count(vec![incident(Some(0), 20, 4), incident(Some(1), 10, 4)]), 0);
    assert_eq!(fact_count(Vec::new()), 0);
    assert_eq!(fact_count(vec![incident(Some(0), 20, 4)]), 1);
}

#[test]
fn a_host_without_dcgm_shows_nothing_unless_dcgm_is_expected() {
    let absent = DcgmReport::Absent("no library".into());
    assert_eq!(DcgmJudge::new(catalog(), false).step(Mono(1), &absent), SensorReport::default());
    let expected = DcgmJudge::new(catalog(), true).step(Mono(1), &absent);
    assert_eq!(state_of(&expected, "dcgm").0, Unknown);
    // It answered before and no longer does.
    let mut judge = DcgmJudge::new(catalog(), false);
    judge.step(Mono(1), &health(Vec::new()));
    assert_eq!(state_of(&judge.step(Mono(2), &DcgmReport::Silent), "dcgm").0, Unknown);
}

#[test]
fn every_catalog_entry_has_a_unique_name_a_meaning_and_a_source() {
    let file: DcgmFile =
        toml::from_str(include_str!("../../../catalog/hardware/dcgm.toml")).expect("a catalog");
    let names: BTreeSet<&str> = file.dcgm.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names.len(), file.dcgm.len(), "no two have the same name");
    assert!(file.dcgm.iter().all(|entry| !entry.meaning.is_empty() && !entry.source.is_empty()));
}

fn placed(incidents: Vec<Incident>) -> DcgmHealth {
    let addresses = [(0, "0000:01:00"), (1, "0000:02:00")];
    let addresses = addresses.map(|(gpu, place)| (gpu, PciAddress::parse(place).expect("an address")));
    DcgmHealth { gpus: vec![0, 1], incidents, addresses: addresses.into(), ..DcgmHealth::default() }
}

#[test]
fn gpus_with_a_known_address_have_an_opinion_and_no_dcgm_component() {
    let mut judge = DcgmJudge::new(catalog(), false);
    let all = judge.step(Mono(1), &DcgmReport::Health(placed(vec![incident(Some(1), 20, 4)])));
    let names: Vec<&str> = all.components.iter().map(|component| component.name.as_str()).collect();
    assert_eq!(names, ["dcgm"]);
    assert!(
        matches!(&all.facts[0], Fact::Observed(observation) if observation.component == "gpu.0000:02:00")
    );
    let codes_of = |judge: &DcgmJudge, place: &str| {
        judge.opinions().get(&PciAddress::parse(place).expect("an address")).cloned()
    };
    assert_eq!(codes_of(&judge, "0000:01:00"), Some(Vec::new()));
    let printed = codes_of(&judge, "0000:02:00").expect("an opinion").remove(0);
    assert_eq!((printed.state, printed.action), (Unhealthy, RecommendedAction::ResetDevice));
    assert!(printed.checks.contains("ecc_uncorrected"), "{printed:?}");
    // A host engine that does not answer has no opinion.
    judge.step(Mono(2), &DcgmReport::Silent);
    assert!(judge.opinions().is_empty());
    // Its first check has none either.
    judge.step(Mono(3), &DcgmReport::Health(DcgmHealth { first: true, ..placed(Vec::new()) }));
    assert!(judge.opinions().is_empty());
}

#[test]
fn a_violated_policy_is_an_event_and_no_fault() {
    let mut judge = DcgmJudge::new(catalog(), false);
    let violations = vec![Violation { condition: 0x40, gpu: Some(0), value: 31 }];
    let all = judge.step(Mono(1), &DcgmReport::Health(DcgmHealth { violations, ..placed(Vec::new()) }));
    let [Fact::Observed(observation)] = all.facts.as_slice() else { panic!("{:?}", all.facts) };
    assert_eq!(
        (observation.event.as_str(), observation.component.as_str()),
        ("dcgm_policy_violated", "gpu.0000:01:00")
    );
    testing::snapshot!("reasons", "dcgm: a violated policy is an event and no fault", observation.detail);
    assert!(judge.opinions().values().all(Vec::is_empty));
    assert!(all.components.iter().all(|component| component.state == Healthy));
}

mod exporter {
    use super::*;

    fn page(xid: u32, pending: u32) -> ExporterReport {
        ExporterReport::Page(format!(
            "# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n\
             DCGM_FI_DEV_GPU_TEMP{{gpu=\"0\",UUID=\"GPU-0\",modelName=\"NVIDIA H100 \\\"80GB\\\"\"}} 41\n\
             DCGM_FI_DEV_XID_ERRORS{{gpu=\"0\",UUID=\"GPU-0\"}} {xid}\n\
             DCGM_FI_DEV_ROW_REMAP_PENDING{{gpu=\"0\",UUID=\"GPU-0\"}} {pending}\n"
        ))
    }

    fn only(judged: &SensorReport) -> &Component {
        assert_eq!(judged.components.len(), 1);
        &judged.components[0]
    }

    #[test]
    fn the_xid_gauge_is_reported_only_when_it_changes_and_is_no_fault() {
        let mut judge = ExporterJudge::default();
        let first = judge.step(Mono(1), &page(79, 0));
        assert_eq!(only(&first).state, Healthy);
        assert!(first.facts.is_empty(), "it may be old");
        assert!(only(&first).evidence[0].reading.contains("last XID 79"));
        assert!(judge.step(Mono(2), &page(79, 0)).facts.is_empty());
        let changed = judge.step(Mono(3), &page(48, 1));
        assert_eq!(changed.facts.len(), 2);
        assert_eq!(only(&changed).state, Healthy);
    }

    #[test]
    fn a_page_without_dcgm_metrics_is_unknown() {
        let mut judge = ExporterJudge::default();
        let mut state = |report| only(&judge.step(Mono(1), &report)).state;
        assert_eq!(state(ExporterReport::Failed("refused".into())), Unknown);
        assert_eq!(state(ExporterReport::Page("<html>".into())), Unknown);
        assert_eq!(state(ExporterReport::Page("go_threads 12\n".into())), Unknown, "the host engine is gone");
        assert_eq!(state(page(0, 0)), Healthy);
    }
}

mod pages {
    use mainstay_health::parse::prometheus::{PageError, parse};
    use proptest::prelude::*;

    #[test]
    fn samples_are_parsed_with_labels_escapes_and_timestamps() {
        let samples =
            parse("a 1\nb{} +Inf 1712345678901\n c{x=\"1\\\"\\\\\\n\", y=\"é\",} -2.5e3 \n\n# d 4\n")
                .expect("a page");
        let gauges: Vec<(&str, f64)> =
            samples.iter().map(|sample| (sample.name.as_str(), sample.value)).collect();
        assert_eq!(gauges, [("a", 1.0), ("b", f64::INFINITY), ("c", -2500.0)]);
        assert_eq!(samples[2].labels["x"], "1\"\\\n");
        assert_eq!(samples[2].labels["y"], "é");
    }

    #[test]
    fn an_invalid_sample_is_refused_with_its_line_number() {
        for line in
            ["a", "1a 1", "a{x=1} 1", "a{x=\"1} 1", "a{x=\"1\"y=\"2\"} 1", "a b", "a 1 b", "a 1 2 3", "{} 1"]
        {
            assert!(
                matches!(parse(&format!("ok 1\n{line}\n")), Err(PageError::Line { line: 2, .. })),
                "{line}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_page_causes_a_panic(page in "[a-z{}=\",\\\\0-9 .\n]{0,200}") {
            let _ = parse(&page);
        }
    }
}
