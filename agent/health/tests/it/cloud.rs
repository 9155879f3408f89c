//! Announcements of the cloud: which are near, which are distant, and that each is reported once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use mainstay_health::host::cloud::leave::Leave;
use mainstay_health::host::cloud::{CloudJudge, CloudLimits, CloudSample, Notice, NoticeKind};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::observation::Observation;
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Span, Stamp, Wall};

const HOUR: i64 = 3600;

fn at(seconds: i64) -> Stamp {
    Stamp { mono: Mono(0).after(Span::seconds(1000 + seconds as u64)), wall: wall(seconds) }
}

fn wall(seconds: i64) -> Wall {
    Wall((1_800_000_000 + seconds) * 1_000_000_000)
}

fn maintenance(starts: i64) -> Notice {
    Notice {
        id: "upcoming".into(),
        kind: NoticeKind::Maintenance,
        starts: Some(wall(starts)),
        ends: Some(wall(starts + 4 * HOUR)),
        ongoing: false,
        detail: format!("SCHEDULED, PENDING, at {starts}"),
        source: "instance/upcoming-maintenance".into(),
    }
}

fn now(kind: NoticeKind) -> Notice {
    Notice {
        id: format!("{kind:?}"),
        kind,
        starts: None,
        ends: None,
        detail: "TRUE".into(),
        ..maintenance(0)
    }
}

fn sample(notices: &[Notice]) -> CloudSample {
    CloudSample { provider: "Google Compute Engine".into(), notices: Ok(notices.to_vec()) }
}

fn silent() -> CloudSample {
    CloudSample { provider: "Google Compute Engine".into(), notices: Err("connection reset".into()) }
}

fn judge() -> CloudJudge {
    CloudJudge::new(CloudLimits::default())
}

fn one(judged: &SensorReport) -> &Component {
    let [component] = judged.components.as_slice() else { panic!("{judged:#?}") };
    assert_eq!(component.name, "host.cloud");
    component
}

fn observations(judged: &SensorReport) -> Vec<&Observation> {
    judged
        .facts
        .iter()
        .map(|fact| match fact {
            Fact::Observed(observation) => observation,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn events(judged: &SensorReport) -> Vec<&str> {
    observations(judged).iter().map(|observation| observation.event.as_str()).collect()
}

#[test]
fn without_announcements_the_state_is_healthy() {
    let judged = judge().step(at(0), &sample(&[]));
    assert_eq!((one(&judged).state, judged.facts.len()), (HealthState::Healthy, 0));
}

#[test]
fn a_distant_announcement_is_reported_and_changes_the_state_only_when_near() {
    let mut judge = judge();
    let week = sample(&[maintenance(7 * 24 * HOUR)]);
    let judged = judge.step(at(0), &week);
    assert_eq!((one(&judged).state, one(&judged).action), (HealthState::Healthy, RecommendedAction::None));
    testing::snapshot!("reasons", "cloud: a distant announcement", one(&judged).reason);
    assert_eq!(events(&judged), ["cloud_notice"]);
    let near = judge.step(at(7 * 24 * HOUR - HOUR + 60), &week);
    assert_eq!(
        (one(&near).state, one(&near).action),
        (HealthState::Degraded, RecommendedAction::ReplaceNode)
    );
    testing::snapshot!("reasons", "cloud: a near announcement", one(&near).reason);
    assert_eq!(events(&near), [""; 0], "it was reported a week ago");
    testing::snapshot!(
        "reasons",
        "cloud: a distant announcement is reported and changes the state only when near",
        one(&judge.step(at(7 * 24 * HOUR + 1), &week)).reason
    );
    let over = judge.step(at(7 * 24 * HOUR + HOUR), &sample(&[]));
    assert_eq!((one(&over).state, events(&over)), (HealthState::Healthy, vec!["cloud_notice_over"]));
}

#[test]
fn a_moved_window_is_reported_again() {
    let mut judge = judge();
    judge.step(at(0), &sample(&[maintenance(30 * 60)]));
    let moved = judge.step(at(10), &sample(&[maintenance(48 * HOUR)]));
    assert_eq!((one(&moved).state, events(&moved)), (HealthState::Healthy, vec!["cloud_notice"]));
}

#[test]
fn the_kind_of_a_current_announcement_determines_the_state() {
    for (kind, state, action) in [
        (NoticeKind::AtRisk, HealthState::Degraded, RecommendedAction::None),
        (NoticeKind::Migration, HealthState::Degraded, RecommendedAction::None),
        (NoticeKind::Maintenance, HealthState::Degraded, RecommendedAction::ReplaceNode),
        (NoticeKind::Termination, HealthState::Unhealthy, RecommendedAction::ReplaceNode),
        (NoticeKind::Preemption, HealthState::Unhealthy, RecommendedAction::ReplaceNode),
    ] {
        let judged = judge().step(at(0), &sample(&[now(kind)]));
        assert_eq!((one(&judged).state, one(&judged).action), (state, action), "{kind:?}");
    }
}

#[test]
fn a_window_that_ended_long_ago_leaves_the_machine_healthy() {
    let forgotten = maintenance(-24 * HOUR);
    assert_eq!(
        one(&judge().step(at(0), &sample(std::slice::from_ref(&forgotten)))).state,
        HealthState::Healthy
    );
    let goes_on = Notice { ongoing: true, ..forgotten };
    assert_eq!(one(&judge().step(at(0), &sample(&[goes_on]))).state, HealthState::Degraded);
}

#[test]
fn a_brief_failure_of_the_metadata_server_changes_nothing() {
    let mut judge = judge();
    assert_eq!(one(&judge.step(at(0), &silent())).state, HealthState::Unknown, "it never answered");
    judge.step(at(10), &sample(&[]));
    let judged = judge.step(at(60), &silent());
    assert_eq!((one(&judged).state, one(&judged).read_at), (HealthState::Healthy, Some(at(10).mono)));
    let judged = judge.step(at(130), &silent());
    assert_eq!(one(&judged).state, HealthState::Unknown);
    testing::snapshot!("reasons", "cloud: a silent metadata server", one(&judged).reason);
    // Earlier announcements still count.
    let mut judge = self::judge();
    judge.step(at(0), &sample(&[now(NoticeKind::Preemption)]));
    assert_eq!(one(&judge.step(at(600), &silent())).state, HealthState::Unhealthy);
}

#[test]
fn no_announcement_is_reported_again_after_a_restart() {
    let mut first = judge();
    let week = sample(&[maintenance(7 * 24 * HOUR)]);
    let judged = first.step(at(0), &week);
    let mut second = judge();
    observations(&judged).into_iter().for_each(|observation| second.recall(observation));
    assert_eq!(events(&second.step(at(10), &week)), [""; 0]);
    let mut third = judge();
    observations(&judged).into_iter().for_each(|observation| third.recall(observation));
    assert_eq!(events(&third.step(at(10), &sample(&[]))), ["cloud_notice_over"]);
}

/// The requests to jobs to save and end.
fn leaves(judged: &SensorReport) -> Vec<Leave> {
    judged.facts.iter().filter_map(Leave::from_fact).collect()
}

#[test]
fn jobs_are_asked_once_and_immediately_to_leave_a_preempted_machine() {
    let mut judge = judge();
    let at_once = sample(&[now(NoticeKind::Preemption)]);
    let asked = leaves(&judge.step(at(0), &at_once));
    let [Leave { reason, by: None }] = asked.as_slice() else { panic!("{asked:?}") };
    testing::snapshot!(
        "reasons",
        "cloud: jobs are asked once and immediately to leave a preempted machine",
        reason
    );
    assert_eq!(leaves(&judge.step(at(1), &at_once)), []);
    // Withdrawn and announced again.
    judge.step(at(2), &sample(&[]));
    assert_eq!(leaves(&judge.step(at(3), &at_once)).len(), 1);

    let in_two_minutes = Notice { starts: Some(wall(121)), ..now(NoticeKind::Preemption) };
    let asked = leaves(&self::judge().step(at(0), &sample(&[in_two_minutes])));
    assert_eq!(asked.first().map(|leave| leave.by), Some(Some(wall(121))));
}

#[test]
fn jobs_train_until_shortly_before_the_announced_time() {
    for kind in [NoticeKind::Maintenance, NoticeKind::Termination] {
        let mut judge = judge();
        let announced = sample(&[Notice { kind, ..maintenance(HOUR / 2) }]);
        assert_eq!(leaves(&judge.step(at(0), &announced)), [], "{kind:?}");
        assert_eq!(leaves(&judge.step(at(HOUR / 2 - 121), &announced)), [], "{kind:?}");
        let asked = leaves(&judge.step(at(HOUR / 2 - 120), &announced));
        assert_eq!(asked.first().map(|leave| leave.by), Some(Some(wall(HOUR / 2))), "{kind:?}");
        assert_eq!(leaves(&judge.step(at(HOUR / 2 - 119), &announced)), [], "{kind:?}");
    }
}

#[test]
fn jobs_are_asked_to_leave_again_for_a_moved_window() {
    let mut judge = judge();
    assert_eq!(leaves(&judge.step(at(0), &sample(&[maintenance(60)]))).len(), 1);
    let moved = sample(&[maintenance(HOUR)]);
    assert_eq!(leaves(&judge.step(at(10), &moved)), []);
    assert_eq!(leaves(&judge.step(at(HOUR - 60), &moved)).len(), 1);
}

#[test]
fn no_job_leaves_for_an_announcement_that_a_running_machine_survives() {
    let started = maintenance(-60);
    let unreported = Notice { starts: None, ..maintenance(0) };
    let goes_on = Notice { ongoing: true, ..maintenance(60) };
    for notice in [started, unreported, goes_on, now(NoticeKind::Migration), now(NoticeKind::AtRisk)] {
        assert_eq!(leaves(&judge().step(at(0), &sample(std::slice::from_ref(&notice)))), [], "{notice:?}");
    }
}
