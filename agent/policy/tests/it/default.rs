//! The default policy file decides like the built-in policy: over random verdicts, histories, hosts and settings.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use std::collections::BTreeMap;

use mainstay_diagnosis::repeats::{OnHost, SeenBefore};
use mainstay_hang::HangKind;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};
use mainstay_policy::{DEFAULT, Policy};
use mainstay_recovery::policy::{
    Budget, Case, CauseKind, Experience, Host, JobState, PastFailure, Rung, Rungs, Settings, decide,
    decide_with,
};
use proptest::prelude::*;

fn cause() -> impl Strategy<Value = Cause> {
    let kinds = [HangKind::UserCode, HangKind::Network, HangKind::Livelock, HangKind::DataInput];
    prop_oneof![
        4 => (0..2_u8).prop_map(|which| Cause::Exception { exception: "E".into(), fingerprint: format!("f{which}") }),
        1 => (1..3_i32).prop_map(|code| Cause::ExitCode { code }),
        2 => (9..11_i32).prop_map(|signal| Cause::Signal { signal }),
        1 => Just(Cause::OutOfMemory),
        1 => Just(Cause::StartFailed),
        1 => Just(Cause::HostLost { host: "h".into() }),
        3 => (prop::sample::select(kinds.to_vec()), 0..2_u8)
            .prop_map(|(hang, place)| Cause::Hang { hang, place: format!("p{place}") }),
    ]
}

/// Times near the limits of the rules, and arbitrary ones.
fn span() -> impl Strategy<Value = Span> {
    prop_oneof![
        (0..700_u64).prop_map(Span::seconds),
        (0..100_000_u64).prop_map(Span::millis),
        (0..3_000_000_000_000_u64).prop_map(Span),
    ]
}

fn step() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![1 => Just(None), 3 => (0..4_u64).prop_map(Some)]
}

const NOW: Mono = Mono(10_000_000_000_000);

fn past() -> impl Strategy<Value = PastFailure> {
    let what = (cause(), (step(), step()), prop::sample::select(Rung::ALL[..6].to_vec()), (step(), step()));
    (span(), what, span(), any::<bool>(), prop::option::of(span())).prop_map(
        |(ago, (cause, (step, data), rung, (reached, committed)), lived, heartbeats, back_after)| {
            PastFailure {
                decided_at: Mono(NOW.0 - ago.0),
                cause,
                step,
                data,
                lived,
                rung,
                reached,
                committed,
                heartbeats,
                back_after,
            }
        },
    )
}

fn verdict() -> impl Strategy<Value = Verdict> {
    let domains = [
        FaultDomain::User,
        FaultDomain::Hardware,
        FaultDomain::Infrastructure,
        FaultDomain::Platform,
        FaultDomain::Unknown,
    ];
    let sure = prop_oneof![prop::sample::select(vec![0.6, 0.9, 0.97, 1.0]), 0.0..1.0_f64];
    let whose = (prop::sample::select(domains.to_vec()), prop::option::of(Just("data".to_owned())), sure);
    (
        cause(),
        whose,
        any::<bool>(),
        (step(), step()),
        (any::<bool>(), any::<bool>()),
        0..3_u32,
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(
                cause,
                (domain, class, confidence),
                deterministic,
                (step, data),
                (heartbeats, named),
                attempt,
                cannot_run,
            )| {
                Verdict {
                    incident: Incident(1),
                    attempt: Attempt(attempt),
                    headline: "rank 0 failed".into(),
                    cause,
                    domain,
                    class,
                    deterministic,
                    doubts: Doubts::default(),
                    confidence,
                    culprit_confidence: None,
                    cannot_run,
                    culprit: named.then_some(Rank(0)),
                    host: None,
                    victims: vec![Rank(1)],
                    step,
                    data,
                    heartbeats,
                    fault_at: NOW,
                    detected_at: NOW,
                    evidence: vec!["a line".into()],
                }
            },
        )
}

fn component() -> impl Strategy<Value = Component> {
    let names = ["gpu.0000:3b:00", "host.mounts", "host.memory", "net.eth0", "fabric.mlx5_0/1"];
    let states = [HealthState::Unhealthy, HealthState::Degraded, HealthState::Unknown];
    let actions = [RecommendedAction::None, RecommendedAction::RestartProcess, RecommendedAction::RebootNode];
    let (names, states, actions) = (
        prop::sample::select(names.to_vec()),
        prop::sample::select(states.to_vec()),
        prop::sample::select(actions.to_vec()),
    );
    (names, states, actions, span()).prop_map(|(name, state, action, ago)| Component {
        name: name.into(),
        state,
        reason: "it is unhealthy".into(),
        action,
        since: Mono(NOW.0 - ago.0),
        ..Component::default()
    })
}

fn budget() -> impl Strategy<Value = Budget> {
    (0..6_u32, prop::option::of(span())).prop_map(|(max_restarts, window)| Budget { max_restarts, window })
}

fn settings() -> impl Strategy<Value = Settings> {
    let more = prop::collection::vec(prop::sample::select(Rung::ALL.to_vec()), 0..4);
    let by_cause = prop::collection::btree_map(prop::sample::select(CauseKind::ALL.to_vec()), budget(), 0..2);
    (budget(), by_cause, more, prop::option::of(span()), any::<u64>(), any::<bool>()).prop_map(
        |(budget, by_cause, more, ready_within, seed, dry_run)| Settings {
            by_cause: by_cause.into_iter().collect::<BTreeMap<_, _>>(),
            rungs: more.into_iter().fold(Rungs::ONE_HOST, Rungs::with),
            ready_within,
            seed,
            dry_run,
            ..Settings::from(budget)
        },
    )
}

#[derive(Clone, Debug)]
struct Whole {
    verdict: Verdict,
    past: Vec<PastFailure>,
    earlier: Vec<Experience>,
    job: JobState,
    unhealthy: Vec<Component>,
    held: Vec<String>,
    waited: Span,
    last_step: Option<Mono>,
    seen: SeenBefore,
    spares: u32,
}

impl Whole {
    fn case(&self) -> Case<'_> {
        Case {
            verdict: &self.verdict,
            past: &self.past,
            earlier: &self.earlier,
            job: self.job,
            host: Host {
                unhealthy: &self.unhealthy,
                held: &self.held,
                waited: self.waited,
                last_step: self.last_step,
            },
            seen: Some(&self.seen),
            spares: self.spares,
            now: NOW,
        }
    }
}

/// A job of up to three ranks, of which none, some or all wait in their processes.
fn job() -> impl Strategy<Value = JobState> {
    let ranks = (1..4_u32).prop_flat_map(|ranks| (Just(ranks), 0..=ranks));
    (span(), step(), step(), ranks).prop_map(|(lived, reached, committed, (ranks, waiting))| JobState {
        exit: 1,
        lived,
        reached,
        committed,
        ranks,
        waiting,
    })
}

fn experience() -> impl Strategy<Value = Experience> {
    let (causes, rungs) = (CauseKind::ALL.to_vec(), Rung::ALL[..4].to_vec());
    let what = (prop::sample::select(causes), prop::sample::select(rungs));
    (what, 0.0..8.0_f64, 0.0..1.0_f64, 0.0..60.0_f64).prop_map(|((cause, rung), tried, share, seconds)| {
        Experience { cause, rung, tried, helped: tried * share, seconds }
    })
}

/// At most one entry per rung and kind of cause.
fn earlier() -> impl Strategy<Value = Vec<Experience>> {
    prop::collection::vec(experience(), 0..6).prop_map(|mut all| {
        all.sort_by_key(|known| (known.cause, known.rung));
        all.dedup_by_key(|known| (known.cause, known.rung));
        all
    })
}

fn seen() -> impl Strategy<Value = SeenBefore> {
    let host = any::<bool>().prop_map(|at_this_place| OnHost { host: "b".to_owned(), at_this_place });
    (prop::collection::vec(host, 0..2), 0..2_u32, 0..2_u32).prop_map(
        |(elsewhere, in_earlier_runs, answered_by)| SeenBefore {
            elsewhere,
            in_earlier_runs,
            answered_by,
            ..SeenBefore::default()
        },
    )
}

fn whole() -> impl Strategy<Value = Whole> {
    let host = (
        prop::collection::vec(component(), 0..2),
        prop::collection::vec(Just("memory is held".to_owned()), 0..2),
        prop_oneof![Just(Span::default()), span()],
        prop::option::of(span()),
        (seen(), 0..2_u32),
    );
    (verdict(), (prop::collection::vec(past(), 0..6), earlier()), job(), host).prop_map(
        |(verdict, (past, earlier), job, (unhealthy, held, waited, last_step, (seen, spares)))| Whole {
            verdict,
            past,
            earlier,
            job,
            unhealthy,
            held,
            waited,
            last_step: last_step.map(|ago| Mono(NOW.0 - ago.0)),
            seen,
            spares,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_default_file_decides_like_the_built_in_policy(settings in settings(), whole in whole()) {
        let policy = Policy::parse("default.star", DEFAULT).expect("the default policy is sound");
        let (choice, trouble) = decide_with(Some(&policy), &settings, whole.case());
        prop_assert_eq!(trouble, None, "the default file causes no errors");
        let own = decide(&settings, whole.case());
        let why = choice.why.replace(" (default.star)", "");
        prop_assert_eq!((choice.action, choice.after, why), (own.action, own.after, own.why));
    }
}

#[test]
fn the_default_file_stays_far_below_the_limits_after_100_failures() {
    let policy = Policy::parse("default.star", DEFAULT).expect("the default policy is sound");
    let text = r#"
        [[incident]]
        name = "long"
        cause = { kind = "signal", signal = 9 }
        step = 1000
        job = { max_restarts = 1000 }
    "#;
    let failure =
        "[[incident.past]]\ncause = { kind = \"signal\", signal = 9 }\nreached = 5\nback_after = \"3s\"\n";
    let text = text.to_owned() + &failure.repeat(100);
    let incidents = mainstay_policy::incidents::read(&text).expect("a table");
    let decided = policy.decide(&incidents[0].settings, incidents[0].case(), &|| false).expect("a decision");
    assert!(decided.steps < mainstay_policy::LIMITS.steps / 10, "{}", decided.steps);
    assert!(decided.bytes < mainstay_policy::LIMITS.bytes / 10, "{}", decided.bytes);
}
