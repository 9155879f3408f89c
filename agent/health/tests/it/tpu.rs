//! The health of TPUs: what counts as idle, unknown and missing, and which core delays the others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use mainstay_health::hardware::tpu::{
    Chip, ChipHolder, CoreState, Differs, DriverReport, Holders, Runtime, RuntimeReply, RuntimeService,
    TpuJudge, TpuLimits, TpuSample, chip_kind, outliers, read_driver_line,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span};
use proptest::prelude::*;

fn at(seconds: u64) -> Mono {
    Mono(0).after(Span::seconds(1000 + seconds))
}

fn chip(number: u32, holders: Holders) -> Chip {
    let address = PciAddress { domain: 0, bus: 0, device: 4 + number as u8 };
    Chip { number, address, function: 0, kind: "v5p", nodes: vec![format!("/dev/vfio/{number}")], holders }
}

fn held() -> Holders {
    Holders::Known(vec![ChipHolder { pid: Pid(4711), name: "python".into() }])
}

fn free() -> Holders {
    Holders::Known(Vec::new())
}

fn hidden() -> Holders {
    Holders::Partly(Vec::new(), "12 processes".into())
}

fn service(answer: RuntimeReply) -> Vec<RuntimeService> {
    vec![RuntimeService { endpoint: "localhost:8431".into(), answer }]
}

fn core(number: i32, launch: i64) -> CoreState {
    CoreState {
        core: number,
        chip: Some(number),
        tensor_core: true,
        program: "aa".into(),
        launch: Some(launch),
        counters: vec![0x40],
        hlo: "all-reduce.3".into(),
        ..CoreState::default()
    }
}

fn runtime_reply(cores: &[CoreState]) -> RuntimeReply {
    RuntimeReply::Reported(Runtime { cores: Some(cores.to_vec()), ..Runtime::default() })
}

fn judge() -> TpuJudge {
    TpuJudge::new(TpuLimits::default())
}

fn find<'a>(judged: &'a SensorReport, name: &str) -> &'a Component {
    judged.components.iter().find(|component| component.name == name).unwrap_or_else(|| panic!("{judged:#?}"))
}

fn events(judged: &SensorReport) -> Vec<&str> {
    judged
        .facts
        .iter()
        .map(|fact| match fact {
            Fact::Observed(observation) => observation.event.as_str(),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_host_without_tpus_has_no_tpu_components() {
    let nothing =
        TpuSample { chips: Ok(Vec::new()), services: Vec::new(), stalls: Vec::new(), driver: Vec::new() };
    assert_eq!(judge().step(at(0), &nothing), SensorReport::default());
    let unreadable = TpuSample {
        chips: Err("reading /sys: denied".into()),
        services: Vec::new(),
        stalls: Vec::new(),
        driver: Vec::new(),
    };
    assert_eq!(judge().step(at(0), &unreadable), SensorReport::default());
}

#[test]
fn network_cards_and_disks_of_google_are_no_tpus() {
    assert_eq!(chip_kind(0x0062, 0x0062), Some("v5p"));
    assert_eq!(chip_kind(0x0027, 0x004f), Some("v3"));
    for other in [(0x0042, 0), (0x001f, 0), (0x0027, 0)] {
        assert_eq!(chip_kind(other.0, other.1), None, "{other:?}");
    }
}

#[test]
fn chips_that_no_process_holds_are_idle_for_each_state_of_the_port() {
    for answer in [RuntimeReply::Refused, RuntimeReply::Silent, RuntimeReply::Improper("no HTTP/2".into())] {
        let mut judge = judge();
        let sample = TpuSample {
            chips: Ok(vec![chip(0, free())]),
            stalls: Vec::new(),
            driver: Vec::new(),
            services: service(answer.clone()),
        };
        for seconds in [0, 600] {
            let judged = judge.step(at(seconds), &sample);
            assert_eq!(find(&judged, "tpu.runtime").state, HealthState::Healthy, "{answer:?}");
            assert!(find(&judged, "tpu.runtime").reason.contains("idle"), "{answer:?}");
            assert_eq!(find(&judged, "tpu.0").state, HealthState::Healthy, "{answer:?}");
        }
    }
}

#[test]
fn a_service_without_an_answer_is_unknown_while_chips_are_held() {
    for answer in [RuntimeReply::Refused, RuntimeReply::Silent, RuntimeReply::Improper("no HTTP/2".into())] {
        let mut judge = judge();
        let sample = TpuSample {
            chips: Ok(vec![chip(0, held())]),
            stalls: Vec::new(),
            driver: Vec::new(),
            services: service(answer.clone()),
        };
        judge.step(at(0), &sample);
        let judged = judge.step(at(30), &sample);
        let runtime = find(&judged, "tpu.runtime");
        assert_eq!((runtime.state, runtime.since, runtime.read_at), (HealthState::Unknown, at(0), None));
        assert_eq!(runtime.action, RecommendedAction::None);
        assert!(
            runtime.reason.contains("python (4711)") && runtime.reason.contains("30.00 s"),
            "{runtime:?}"
        );
        // The chip is on the bus and held: it has no fault.
        assert_eq!(find(&judged, "tpu.0").state, HealthState::Healthy);
    }
}

#[test]
fn an_inaccessible_process_may_hold_a_chip() {
    let sample = TpuSample {
        chips: Ok(vec![chip(0, hidden())]),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(RuntimeReply::Refused),
    };
    let judged = judge().step(at(0), &sample);
    for name in ["tpu.runtime", "tpu.0"] {
        let component = find(&judged, name);
        assert_eq!(component.state, HealthState::Unknown);
        testing::snapshot!(
            "reasons",
            format!("tpu: an inaccessible process may hold {name}"),
            component.reason
        );
    }
    // An answer of libtpu outweighs a gap in /proc.
    let sample = TpuSample {
        chips: Ok(vec![chip(0, hidden())]),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(runtime_reply(&[core(0, 1)])),
    };
    let judged = judge().step(at(0), &sample);
    assert_eq!(find(&judged, "tpu.runtime").state, HealthState::Healthy);
    assert_eq!(find(&judged, "tpu.0").state, HealthState::Healthy);
}

#[test]
fn a_service_that_stops_answering_is_reported_once_and_so_is_its_return() {
    let mut judge = judge();
    let sample = |answer| TpuSample {
        chips: Ok(vec![chip(0, held())]),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(answer),
    };
    assert_eq!(events(&judge.step(at(0), &sample(RuntimeReply::Refused))), ["chip_found"]);
    assert_eq!(events(&judge.step(at(10), &sample(runtime_reply(&[core(0, 1)])))), [""; 0]);
    assert_eq!(events(&judge.step(at(20), &sample(RuntimeReply::Silent))), ["runtime_silent"]);
    assert_eq!(events(&judge.step(at(30), &sample(RuntimeReply::Silent))), [""; 0]);
    assert_eq!(events(&judge.step(at(40), &sample(runtime_reply(&[core(0, 2)])))), ["runtime_answers"]);
    // The service ends with its process: this is no silence.
    let idle = TpuSample {
        chips: Ok(vec![chip(0, free())]),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(RuntimeReply::Refused),
    };
    assert_eq!(events(&judge.step(at(50), &idle)), [""; 0]);
    assert_eq!(events(&judge.step(at(60), &sample(RuntimeReply::Refused))), [""; 0]);
}

#[test]
fn readings_of_libtpu_are_assigned_to_the_chips() {
    let runtime = Runtime {
        duty_cycle: [(0, 90.0), (1, 12.0)].into(),
        hbm_used: [(0, 8 << 30), (1, 1 << 30), (2, 3 << 30), (3, 1 << 30)].into(),
        hbm_total: [(0, 8 << 30), (1, 8 << 30), (2, 8 << 30), (3, 8 << 30)].into(),
        // Three values for two chips: the cores cannot be assigned.
        idle_seconds: [(0, 1.0), (1, 1.0), (2, 1.0)].into(),
        ..Runtime::default()
    };
    let chips = Ok(vec![chip(0, held()), chip(1, held())]);
    let sample = TpuSample {
        chips,
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(RuntimeReply::Reported(runtime)),
    };
    let judged = judge().step(at(0), &sample);
    let reason = |name| find(&judged, name).reason.as_str();
    testing::snapshot!("reasons", "tpu: readings of libtpu, first chip", reason("tpu.0"));
    testing::snapshot!("reasons", "tpu: readings of libtpu, second chip", reason("tpu.1"));
    let gauge =
        |name| find(&judged, name).gauges.iter().map(|gauge| (gauge.metric, gauge.value)).collect::<Vec<_>>();
    assert_eq!(
        gauge("tpu.1"),
        [
            ("mainstay_tpu_duty_cycle_percent", 12.0),
            ("mainstay_tpu_hbm_used_bytes", 4.0 * 1024.0_f64.powi(3)),
            ("mainstay_tpu_hbm_total_bytes", 16.0 * 1024.0_f64.powi(3)),
        ]
    );
    // An older libtpu does not report the state of its cores. This is no fault.
    assert_eq!(find(&judged, "tpu.runtime").state, HealthState::Healthy);
}

#[test]
fn a_chip_that_leaves_the_bus_is_missing_even_after_a_restart() {
    let mut first = judge();
    let both = TpuSample {
        chips: Ok(vec![chip(0, free()), chip(1, free())]),
        services: Vec::new(),
        stalls: Vec::new(),
        driver: Vec::new(),
    };
    let found = first.step(at(0), &both);
    let one = TpuSample {
        chips: Ok(vec![chip(0, free())]),
        services: Vec::new(),
        stalls: Vec::new(),
        driver: Vec::new(),
    };
    let mut second = judge();
    for fact in &found.facts {
        let Fact::Observed(observation) = fact else { panic!() };
        second.recall(observation);
    }
    for judge in [&mut first, &mut second] {
        let judged = judge.step(at(10), &one);
        let missing = find(&judged, "tpu.1");
        assert_eq!((missing.state, missing.action), (HealthState::Unhealthy, RecommendedAction::RebootNode));
        assert_eq!(find(&judged, "tpu.0").state, HealthState::Healthy);
        assert_eq!(events(&judged), [""; 0]);
        let unreadable = TpuSample {
            chips: Err("denied".into()),
            services: Vec::new(),
            stalls: Vec::new(),
            driver: Vec::new(),
        };
        assert_eq!(find(&judge.step(at(20), &unreadable), "tpu.1").state, HealthState::Unknown);
        assert_eq!(find(&judge.step(at(30), &both), "tpu.1").state, HealthState::Healthy);
    }
}

#[test]
fn the_core_that_is_behind_is_named_after_60_s_without_progress() {
    let mut judge = judge();
    let chips = || Ok((0..4).map(|number| chip(number, held())).collect());
    let sample = |cores: &[CoreState]| TpuSample {
        chips: chips(),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(runtime_reply(cores)),
    };
    let cores: Vec<CoreState> =
        (0..4).map(|number| core(16 + number, if number == 2 { 41 } else { 42 })).collect();
    judge.step(at(0), &sample(&cores));
    let judged = judge.step(at(59), &sample(&cores));
    assert_eq!(find(&judged, "tpu.2").state, HealthState::Healthy, "the core may still catch up");

    let judged = judge.step(at(60), &sample(&cores));
    let chip = find(&judged, "tpu.2");
    assert_eq!((chip.state, chip.action), (HealthState::Degraded, RecommendedAction::RestartProcess));
    testing::snapshot!(
        "reasons",
        "tpu: the core that is behind is named after 60 s without progress",
        chip.reason
    );
    assert_eq!(events(&judged), ["core_outlier"]);
    assert_eq!(find(&judged, "tpu.1").state, HealthState::Healthy);
    assert_eq!(events(&judge.step(at(70), &sample(&cores))), [""; 0], "reported once");

    let moved: Vec<CoreState> = (0..4).map(|number| core(16 + number, 42)).collect();
    assert_eq!(find(&judge.step(at(80), &sample(&moved)), "tpu.2").state, HealthState::Healthy);
}

fn driver_reported(line: &str) -> Vec<DriverReport> {
    let line = format!("E1121 03:04:05.123456    1234 tpu_driver.cc:42] {line}");
    vec![read_driver_line(&line).unwrap_or_else(|| panic!("{line}"))]
}

#[test]
fn driver_errors_of_this_host_degrade_it_for_10_minutes() {
    let mut judge = judge();
    let sample = |driver| TpuSample {
        chips: Ok(vec![chip(0, held())]),
        services: service(runtime_reply(&[core(0, 42)])),
        stalls: Vec::new(),
        driver,
    };
    let of_another = driver_reported("Session master detected TPU session error from worker 10.0.0.7:8471");
    let judged = judge.step(at(0), &sample(of_another));
    assert!(events(&judged).contains(&"driver_log"));
    assert_eq!(
        find(&judged, "tpu.runtime").state,
        HealthState::Healthy,
        "a fault of another host does not count here"
    );
    let busy = || driver_reported("open(/dev/vfio/0): Device or resource busy");
    let judged = judge.step(at(10), &sample([busy(), busy()].concat()));
    assert_eq!(events(&judged), ["driver_log"], "a line in several files counts once");
    let runtime = find(&judged, "tpu.runtime");
    assert_eq!((runtime.state, runtime.action), (HealthState::Degraded, RecommendedAction::RestartProcess));
    assert!(runtime.reason.starts_with("libtpu's driver: open(/dev/vfio/0)"), "{}", runtime.reason);
    assert_eq!(find(&judge.step(at(300), &sample(Vec::new())), "tpu.runtime").state, HealthState::Degraded);
    assert_eq!(find(&judge.step(at(610), &sample(Vec::new())), "tpu.runtime").state, HealthState::Healthy);
}

#[test]
fn a_job_in_which_no_core_makes_progress_has_no_outlier() {
    let mut judge = judge();
    let cores: Vec<CoreState> = (0..4).map(|number| core(number, 42)).collect();
    let sample = TpuSample {
        chips: Ok((0..4).map(|n| chip(n, held())).collect()),
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(runtime_reply(&cores)),
    };
    judge.step(at(0), &sample);
    let judged = judge.step(at(3600), &sample);
    assert!(judged.components.iter().all(|component| component.state == HealthState::Healthy), "{judged:#?}");
    assert_eq!(events(&judged), [""; 0]);
}

#[test]
fn a_core_with_an_error_makes_its_chip_unknown() {
    let mut broken = core(1, 42);
    broken.error = Some("sequencer unreadable".into());
    let chips = Ok(vec![chip(0, held()), chip(1, held())]);
    let sample = TpuSample {
        chips,
        stalls: Vec::new(),
        driver: Vec::new(),
        services: service(runtime_reply(&[core(0, 42), broken])),
    };
    let judged = judge().step(at(0), &sample);
    assert_eq!(find(&judged, "tpu.1").state, HealthState::Unknown);
    assert!(find(&judged, "tpu.1").reason.contains("sequencer unreadable"));
    assert_eq!(find(&judged, "tpu.0").state, HealthState::Healthy);
}

fn differs(cores: &[CoreState]) -> Vec<(i32, Differs)> {
    let named: Vec<(&str, &CoreState)> = cores.iter().map(|core| ("", core)).collect();
    outliers(&named).into_iter().map(|outlier| (outlier.core, outlier.differs)).collect()
}

#[test]
fn the_strongest_difference_is_reported() {
    let with = |change: fn(&mut CoreState)| {
        let mut cores: Vec<CoreState> = (0..4).map(|number| core(number, 42)).collect();
        change(&mut cores[1]);
        differs(&cores)
    };
    let hlo = "all-reduce.3".to_owned();
    assert_eq!(with(|_| {}), []);
    assert_eq!(
        with(|core| core.launch = Some(40)),
        [(1, Differs::Behind { own: 40, most: 42, hlo: hlo.clone() })]
    );
    assert_eq!(with(|core| core.launch = Some(43)), [(1, Differs::Ahead { own: 43, most: 42 })]);
    assert_eq!(
        with(|core| core.program = "bb".into()),
        [(1, Differs::Program { own: "bb".into(), most: "aa".into() })]
    );
    assert_eq!(with(|core| core.counters.clear()), [(1, Differs::WaitsForInput)]);
    assert_eq!(
        with(|core| core.hlo = "fusion.7".into()),
        [(1, Differs::Place { own: "fusion.7".into(), most: hlo })]
    );
}

#[test]
fn cores_without_work_are_not_compared() {
    // A notebook that used one of four cores and is idle: nothing runs, nothing waits.
    let mut cores: Vec<CoreState> = (0..4).map(|number| core(number, 12)).collect();
    cores[0].launch = Some(57);
    cores.iter_mut().for_each(|core| core.counters.clear());
    assert_eq!(differs(&cores), []);
    // Cores that never had a program and SparseCores are not compared.
    let mut cores: Vec<CoreState> = (0..4).map(|number| core(number, 12)).collect();
    cores[1].launch = None;
    cores[2].launch = Some(0);
    cores[3] = CoreState { tensor_core: false, launch: Some(3), ..core(3, 3) };
    assert_eq!(differs(&cores), []);
    // Of two halves, the correct one is unknown. Of two cores, the one behind is the outlier.
    let halves: Vec<CoreState> = (0..4).map(|number| core(number, i64::from(number / 2) + 1)).collect();
    assert_eq!(differs(&halves), []);
    assert_eq!(differs(&[core(0, 5), core(1, 4)]).len(), 1);
}

proptest! {
    #[test]
    fn cores_in_the_same_state_have_no_outlier(count in 0_i32..64, launch in 0_i64..9) {
        let cores: Vec<CoreState> = (0..count).map(|number| core(number, launch)).collect();
        prop_assert_eq!(differs(&cores), []);
    }

    #[test]
    fn the_outliers_are_at_most_half_of_the_cores(launches in prop::collection::vec(0_i64..4, 0..40)) {
        let cores: Vec<CoreState> =
            launches.iter().enumerate().map(|(number, launch)| core(number as i32, *launch)).collect();
        let named = differs(&cores).len();
        let compared = launches.iter().filter(|launch| **launch > 0).count();
        prop_assert!(named * 2 <= compared);
    }
}
