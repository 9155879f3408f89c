//! Snapshots: the view is restored from the journal, readers follow it, and a failing disk stops nothing.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::path::Path;

use mainstay_journal::state::{FINISHED_JOBS, StateWriter, UNWRITTEN_ENTRIES};
use mainstay_journal::store::journal::{Journal, Limits};
use mainstay_model::entry::{Body, Entry, Fact, JobSpec, StartedRank};
use mainstay_model::health::{Component, HealthChange, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, BootId, JobId, Pid, Rank};
use mainstay_model::operator::OperatorAction;
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_view::node::{BeatView, JobPhase, NodeView};

fn open(dir: &Path) -> StateWriter {
    let journal = Journal::open(dir, Limits::default(), BootId("boot".into())).unwrap();
    StateWriter::open(journal).unwrap()
}

fn job(name: &str) -> JobId {
    JobId(name.to_owned())
}

fn record(snapshots: &mut StateWriter, job: &JobId, fact: Fact) -> Entry {
    snapshots.record(Stamp::default(), Some(job), None, Body::Fact(fact))
}

fn start(snapshots: &mut StateWriter, job: &JobId) {
    record(snapshots, job, Fact::JobStarted(JobSpec { world_size: 2, ..JobSpec::default() }));
    let ranks = (0..2)
        .map(|rank| StartedRank {
            rank: Rank(rank),
            local_rank: rank,
            pid: Pid(1),
            page: None,
            start_ticks: None,
        })
        .collect();
    record(
        snapshots,
        job,
        Fact::AttemptStarted { attempt: Attempt(0), master_port: 1, ranks, hosts: Vec::new() },
    );
}

fn end(snapshots: &mut StateWriter, job: &JobId) {
    record(snapshots, job, Fact::JobEnded { exit: 0, reason: "done".into() });
}

fn component(state: HealthState, read_at: u64) -> Component {
    Component {
        name: "host.cpu".into(),
        state,
        reason: String::new(),
        action: RecommendedAction::None,
        evidence: Vec::new(),
        read_at: Some(Mono(read_at)),
        since: Mono(1),
        ..Component::default()
    }
}

#[test]
fn jobs_come_back_after_a_restart_and_components_are_unknown_until_read() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    start(&mut snapshots, &job("a"));
    record(
        &mut snapshots,
        &job("a"),
        Fact::RanksStepping { attempt: Attempt(0), step: 7, counted: false, restoring: Span::default() },
    );
    let change = HealthChange { from: None, component: component(HealthState::Healthy, 1) };
    snapshots.record(Stamp::default(), None, None, Body::Health(change));
    assert_eq!(snapshots.view().state(), HealthState::Healthy);
    let jobs = snapshots.view().jobs.clone();
    drop(snapshots);

    let snapshots = open(dir.path());
    assert_eq!(snapshots.view().jobs, jobs);
    assert_eq!(snapshots.view().state(), HealthState::Unknown);
    assert_eq!(
        (snapshots.replayed().entries, snapshots.reader().newest(), snapshots.reader().oldest()),
        (4, 4, 1)
    );
}

#[test]
fn what_is_held_is_shown_together_when_it_is_due_and_a_snapshot_does_not_change() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    start(&mut snapshots, &job("a"));
    let reader = snapshots.reader();
    let before = reader.view();
    let refuses = |rank| Fact::RankRefused { attempt: Attempt(0), rank: Rank(rank), reason: "old".into() };
    snapshots.hold();
    record(&mut snapshots, &job("a"), refuses(0));
    record(&mut snapshots, &job("a"), refuses(1));
    assert_eq!((reader.newest(), snapshots.newest(), snapshots.is_due()), (2, 4, true));
    snapshots.show_due();
    assert_eq!((reader.newest(), snapshots.is_due()), (4, false));
    let refused = |view: &NodeView| {
        let ranks = view.jobs[&job("a")].ranks.values();
        ranks.filter(|rank| rank.refusal.is_some()).count()
    };
    assert_eq!((refused(&before), refused(&reader.view())), (0, 2));

    end(&mut snapshots, &job("a"));
    assert_eq!(reader.newest(), 4, "it is still held");
    snapshots.release();
    assert_eq!(reader.newest(), 5);
}

#[test]
fn an_unchanged_component_keeps_its_start_time_within_one_boot() {
    let dir = testing::tempdir().unwrap();
    let in_boot = |boot: &str| {
        let journal = Journal::open(dir.path(), Limits::default(), BootId(boot.into())).unwrap();
        StateWriter::open(journal).unwrap()
    };
    let found = |since, state| Component { since: Mono(since), ..component(state, since) };
    let since = |snapshots: &StateWriter| snapshots.view().components["host.cpu"].since;
    let mut snapshots = in_boot("first");
    snapshots.show_host(Stamp::default(), vec![found(1, HealthState::Degraded)]);
    drop(snapshots);
    for restart in 2..4 {
        let mut snapshots = in_boot("first");
        snapshots.show_host(Stamp::default(), vec![found(restart, HealthState::Degraded)]);
        assert_eq!(since(&snapshots), Mono(1), "restart {restart}");
    }
    let mut snapshots = in_boot("second");
    snapshots.show_host(Stamp::default(), vec![found(5, HealthState::Degraded)]);
    assert_eq!(since(&snapshots), Mono(5));
    snapshots.show_host(Stamp::default(), vec![found(6, HealthState::Healthy)]);
    drop(snapshots);
    let mut snapshots = in_boot("second");
    snapshots.show_host(Stamp::default(), vec![found(7, HealthState::Degraded)]);
    assert_eq!(since(&snapshots), Mono(7), "another one");
}

#[test]
fn samples_and_components_show_when_published() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    start(&mut snapshots, &job("a"));
    let reader = snapshots.reader();
    for rank in 0..2 {
        let beat = BeatView { step: Some(3 + u64::from(rank)), ..BeatView::default() };
        snapshots.sample(&job("a"), Attempt(0), Rank(rank), beat);
    }
    snapshots.set_component(component(HealthState::Degraded, 5));
    assert_eq!(reader.view().jobs[&job("a")].step, None);
    snapshots.publish();
    assert_eq!(reader.view().jobs[&job("a")].step, Some(3));
    assert_eq!(reader.view().state(), HealthState::Degraded);
    assert_eq!(reader.newest(), 2, "neither is an entry");
}

#[test]
fn jobs_that_are_over_leave_the_view_oldest_first() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    start(&mut snapshots, &job("long"));
    let count = FINISHED_JOBS + 5;
    for number in 0..count {
        let id = job(&format!("{number}"));
        start(&mut snapshots, &id);
        end(&mut snapshots, &id);
    }
    let check = |snapshots: &StateWriter| {
        let view = snapshots.view();
        assert_eq!(view.jobs.len(), FINISHED_JOBS + 1);
        assert_eq!(view.jobs[&job("long")].phase, JobPhase::Starting);
        assert!(!view.jobs.contains_key(&job("4")));
        assert!(view.jobs.contains_key(&job("5")));
    };
    check(&snapshots);
    drop(snapshots);
    check(&open(dir.path()));
}

#[test]
fn a_lost_job_that_attaches_again_is_not_over() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    start(&mut snapshots, &job("a"));
    record(&mut snapshots, &job("a"), Fact::LauncherLost { pid: Pid(1) });
    start(&mut snapshots, &job("a"));
    for number in 0..FINISHED_JOBS + 1 {
        let id = job(&format!("{number}"));
        start(&mut snapshots, &id);
        end(&mut snapshots, &id);
    }
    assert!(snapshots.view().jobs.contains_key(&job("a")));
}

#[tokio::test]
async fn readers_wait_for_entries_and_notice_when_the_board_is_gone() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    let mut reader = snapshots.reader();
    let follower = tokio::spawn(async move {
        let mut seen = Vec::new();
        let mut cursor = 0;
        while reader.newer_than(cursor).await {
            let read = reader.entries_after(cursor, 2).unwrap();
            cursor = read.cursor;
            seen.extend(read.entries.iter().map(|entry| entry.seq));
        }
        seen
    });
    for number in 0..20 {
        end(&mut snapshots, &job(&format!("{number}")));
        tokio::task::yield_now().await;
    }
    let mut idle = snapshots.reader();
    let mut reader = snapshots.reader();
    while reader.newest() < 20 {
        assert!(reader.changed().await);
    }
    // The follower is at the end before the writer is gone.
    let last = tokio::spawn(async move { idle.changed().await });
    drop(snapshots);
    assert!(!last.await.unwrap());
    let seen = follower.await.unwrap();
    assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
}

/// Moves the journal's directory away, so that no new segment can be created, and restores it.
struct Away<'a>(&'a Path);

impl Away<'_> {
    fn take(dir: &Path) -> Away<'_> {
        std::fs::rename(dir, dir.with_extension("away")).unwrap();
        Away(dir)
    }

    fn give_back(self) {
        std::fs::rename(self.0.with_extension("away"), self.0).unwrap();
    }
}

#[test]
fn a_journal_that_cannot_be_written_stops_nothing_and_catches_up() {
    let outer = testing::tempdir().unwrap();
    let dir = outer.path().join("journal");
    let mut snapshots = open(&dir);
    let reader = snapshots.reader();

    let away = Away::take(&dir);
    start(&mut snapshots, &job("a"));
    end(&mut snapshots, &job("a"));
    assert_eq!(reader.view().jobs[&job("a")].phase, JobPhase::Ended(0), "the view goes on");
    let error = reader.journal_error().unwrap();
    assert!(error.contains("journal/00000000000000000001.jsonl"), "{error}");
    let read = reader.entries_after(1, 1).unwrap();
    assert_eq!((read.entries[0].seq, read.entries.len(), read.cursor), (2, 1, 2), "and so do its readers");
    assert_eq!(reader.newest(), 3);

    away.give_back();
    snapshots.sync();
    assert_eq!(snapshots.journal_error(), None);
    snapshots.publish();
    assert_eq!(reader.journal_error(), None);
    end(&mut snapshots, &job("a"));
    let read = reader.entries_after(0, 100).unwrap();
    assert_eq!(read.entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [1, 2, 3, 4]);
    drop(snapshots);
    assert_eq!(open(&dir).replayed().entries, 4);
}

#[test]
fn what_waits_for_the_disk_is_bounded() {
    let outer = testing::tempdir().unwrap();
    let dir = outer.path().join("journal");
    let mut snapshots = open(&dir);
    let away = Away::take(&dir);
    let count = UNWRITTEN_ENTRIES as u64 + 10;
    for number in 1..=count {
        assert_eq!(end_quietly(&mut snapshots).seq, number);
    }
    away.give_back();
    snapshots.sync();
    snapshots.publish();
    let read = snapshots.reader().entries_after(0, usize::MAX).unwrap();
    assert_eq!(read.entries.len(), UNWRITTEN_ENTRIES);
    assert_eq!(read.entries.last().map(|entry| entry.seq), Some(count), "the newest are kept");
}

#[test]
fn entries_that_are_gathered_are_in_the_journal_when_they_are_shown() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    let reader = snapshots.reader();
    snapshots.hold();
    for number in 1..=3 {
        let gathered = snapshots.gather(Stamp::default(), None, Some(number), Body::Fact(Fact::AgentStopped));
        assert_eq!(gathered.seq, number);
    }
    assert_eq!((snapshots.unwritten(), reader.newest()), (3, 0), "neither written nor shown");
    snapshots.show_due();
    assert_eq!((snapshots.unwritten(), reader.newest()), (0, 3), "both");
    snapshots.gather(Stamp::default(), None, Some(4), Body::Fact(Fact::AgentStopped));
    end_quietly(&mut snapshots);
    assert_eq!(snapshots.unwritten(), 0, "an entry that is not gathered takes those before it along");
    drop(snapshots);
    assert_eq!(open(dir.path()).replayed().entries, 5);
}

#[test]
fn a_burst_of_gathered_entries_loses_none() {
    let dir = testing::tempdir().unwrap();
    let mut snapshots = open(dir.path());
    snapshots.hold();
    let count = 3 * UNWRITTEN_ENTRIES as u64;
    for number in 1..=count {
        snapshots.gather(Stamp::default(), None, Some(number), Body::Fact(Fact::AgentStopped));
    }
    snapshots.release();
    drop(snapshots);
    assert_eq!(open(dir.path()).replayed().entries, count);
}

fn end_quietly(snapshots: &mut StateWriter) -> Entry {
    snapshots.record(Stamp::default(), None, None, Body::Fact(Fact::AgentStopped))
}

#[test]
fn what_operators_said_outlives_the_segment_that_has_it() {
    let dir = testing::tempdir().unwrap();
    let limits = Limits { segment_bytes: 4096, total_bytes: 3 * 4096 };
    let open =
        || StateWriter::open(Journal::open(dir.path(), limits, BootId("boot".into())).unwrap()).unwrap();
    let mut snapshots = open();
    snapshots.show_host(Stamp::default(), vec![component(HealthState::Degraded, 1)]);
    for word in [
        OperatorAction::Acknowledge { reason: "ticket 7".into() },
        OperatorAction::Silence { reason: "bench".into(), until: Wall(1) },
    ] {
        snapshots.attend(Stamp::default(), 1000, "host.cpu", &word).unwrap();
    }
    let said = (snapshots.view().operator_state.clone(), snapshots.newest());
    while snapshots.reader().oldest() <= 2 * said.1 {
        end_quietly(&mut snapshots);
    }
    drop(snapshots);
    assert_eq!(open().view().operator_state, said.0);
}
