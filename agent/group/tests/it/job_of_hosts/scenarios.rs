//! Single failures: those that the simulation found, and known failures of other launchers.

use std::collections::VecDeque;

use mainstay_group::lead::{self, Expected, Lead, LeaderSettings, SteppedDown};
use mainstay_group::merge::{Merge, Next};
use mainstay_group::round::{Member, Seated, first};
use mainstay_group::wire::Join;
use mainstay_model::entry::{ExitStatus, Fact, HostLoss, JobSpec};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::{Job, Output};
use mainstay_recovery::protocol::{Command, Event};

use super::faults::Fault;
use super::network::STORE;
use super::{Happening, LEASE, LEASE_SPAN, PATIENCE, SECOND, World, settings};
use crate::support::cluster::Nothing;

/// A job on `hosts` hosts with `spares` spare launchers whose ranks run.
pub(super) fn running(hosts: u32, spares: u32) -> World {
    let mut world = World::new(4, hosts, spares);
    world.limits = mainstay_group::resize::Limits::fixed(hosts);
    world.until(20 * SECOND);
    assert!(world.launchers[0].leads().is_some_and(|lead| lead.merge().has_started()));
    world
}

pub(super) fn seated(hosts: u32) -> Vec<Seated> {
    let member =
        |host| Member { launcher: format!("l{host}"), ranks: 1, node_rank: Some(host), ..Member::default() };
    first(&(0..hosts).map(member).collect::<Vec<_>>(), hosts).expect("all are there")
}

fn leader() -> Lead {
    let round = seated(2);
    let spec = JobSpec { world_size: 2, ..JobSpec::default() };
    let job = Job::begin(Mono(1), spec, settings(), &mut Vec::new());
    let leader_settings = LeaderSettings {
        seat: 0,
        launcher: "l0".to_owned(),
        names: (String::new(), String::new()),
        expected: Expected { leader: Join { hosts: (2, 2), ..Join::default() }, mixed: false },
        lease: LEASE_SPAN,
        looks_every: Span::millis(500),
        epoch: 1,
        newest_record: 1,
        has_store: true,
    };
    Lead::new(Mono(1), job, Merge::new(round, Span::seconds(5)), leader_settings)
}

#[test]
fn a_slow_leader_steps_down_if_the_job_has_ended_without_it() {
    let mut lead = leader();
    lead.forgotten(1);
    lead.ended(70);
    let acts: Vec<_> = std::iter::from_fn(|| lead.poll(Mono(2), &Nothing)).collect();
    let ended = |act: &lead::Act| matches!(act, lead::Act::StepDown(SteppedDown::Ended { exit: 70 }));
    assert!(acts.iter().any(ended), "{acts:?}");
}

/// Takes all pending acts of a leader. Returns whether it announces the end of the job.
fn reports_the_end(lead: &mut Lead, now: Mono) -> bool {
    let mut reports = false;
    while let Some(act) = lead.poll(now, &Nothing) {
        reports |= matches!(act, lead::Act::Obey(Command::Finish { exit: 1, .. }));
    }
    reports
}

/// A leader whose job has failed permanently, and the number of the record with its end.
fn over() -> (Lead, u64) {
    let mut lead = leader();
    let out = vec![Output::Command(Command::finish(1))];
    lead.begin_with(Mono(2), out);
    let acts: Vec<_> = std::iter::from_fn(|| lead.poll(Mono(2), &Nothing)).collect();
    let number = acts.iter().find_map(|act| match act {
        lead::Act::Store(number, record) if record.ended == Some(1) => Some(*number),
        _ => None,
    });
    (lead, number.expect("the leader stores its end"))
}

#[test]
fn the_end_of_a_job_is_stored_before_it_is_announced() {
    let (mut lead, number) = over();
    assert!(!reports_the_end(&mut lead, Mono(3)));
    lead.stored(Mono(4), number);
    assert!(reports_the_end(&mut lead, Mono(4)));
}

#[test]
fn a_job_ends_without_its_store_after_a_lease_of_silence() {
    let (mut lead, _) = over();
    lead.forgotten(1);
    let almost = Mono(2).after(LEASE_SPAN);
    lead.look(almost, Some(Span(LEASE_SPAN.0 - 1)));
    assert!(!reports_the_end(&mut lead, almost), "another launcher may be elected before");
    let later = almost.after(Span::seconds(1));
    lead.look(later, Some(LEASE_SPAN));
    assert!(reports_the_end(&mut lead, later));
}

/// Found by seeds 824804 and 868164.
#[test]
fn a_reelected_leader_waits_until_the_store_has_its_end() {
    let (mut lead, _) = over();
    lead.forgotten(1);
    let later = Mono(2).after(Span(2 * LEASE_SPAN.0));
    lead.elected(2, Some(1));
    lead.look(later, None);
    let acts: Vec<_> = std::iter::from_fn(|| lead.poll(later, &Nothing)).collect();
    let reports = |act: &lead::Act| matches!(act, lead::Act::Obey(Command::Finish { .. }));
    assert!(!acts.iter().any(reports), "{acts:?}");
    let number = acts.iter().find_map(|act| match act {
        lead::Act::Store(number, record) if record.ended == Some(1) => Some(*number),
        _ => None,
    });
    lead.stored(later, number.expect("the leader stores its end again"));
    assert!(reports_the_end(&mut lead, later));
}

#[test]
fn a_leader_whose_end_is_not_stored_accepts_the_stored_end() {
    let (mut lead, _) = over();
    lead.forgotten(1);
    lead.ended(0);
    let acts: Vec<_> = std::iter::from_fn(|| lead.poll(Mono(3), &Nothing)).collect();
    let ended = |act: &lead::Act| matches!(act, lead::Act::StepDown(SteppedDown::Ended { exit: 0 }));
    assert!(acts.iter().any(ended), "{acts:?}");
}

#[test]
fn an_unfinished_start_of_a_lost_leader_fails_with_its_host() {
    let mut merge = Merge::resume(seated(3), PATIENCE, Attempt(2), false);
    let mut next = VecDeque::new();
    merge.lost(Mono(5), 0, (HostLoss::ReplacedLeader, "it led"), &mut next);
    merge.give_up_start(Mono(5), &mut next);
    let facts: Vec<_> = next
        .iter()
        .filter_map(|next| match next {
            Next::Job(_, Event::Fact(fact)) => Some(fact),
            _ => None,
        })
        .collect();
    assert!(
        matches!(
            facts[..],
            [
                Fact::AttemptStarted { attempt: Attempt(2), .. },
                Fact::HostLost { node_rank: 0, .. },
                Fact::RankExited { rank: Rank(0), .. },
            ]
        ),
        "{facts:?}"
    );
}

/// NVRx#348: one more host than the job needs ends NVRx's job with "Maximum number of nodes exceeded".
#[test]
fn nvrx_348_more_hosts_than_seats_do_not_end_the_job() {
    let mut world = running(4, 1);
    let spare = world.machines[4].launcher;
    world.fail(Fault::LauncherDies(4));
    world.until(40 * SECOND);
    assert_ne!(world.machines[4].launcher, spare, "another launcher replaces it");
    world.fail(Fault::LauncherDies(2));
    world.until(80 * SECOND);
    assert_eq!(world.started_by.len(), 2, "the ranks were restarted once, and not for the spare");
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

/// NVRx#357: a lost host keeps its slot in a round of NVRx, and the round never closes.
#[test]
fn nvrx_357_a_host_that_joins_and_dies_does_not_block_a_round() {
    let mut world = running(4, 2);
    world.fail(Fault::PowerCut(2, 1000 * SECOND));
    // Its replacement loses its power too, before the others can know it.
    let taken = |world: &World| world.launchers[4..].iter().any(|spare| spare.seat.is_some());
    while !taken(&world) {
        world.step();
    }
    let ghost = world.launchers.iter().rposition(|launcher| launcher.seat.is_some()).expect("it has a seat");
    world.fail(Fault::PowerCut(world.launchers[ghost].machine, 1000 * SECOND));
    world.until(120 * SECOND);
    assert!(world.launchers[0].leads().is_some_and(|lead| lead.merge().has_started()));
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

/// NVRx#421: an exception in one launcher closes the rendezvous for all.
#[test]
fn nvrx_421_the_failure_of_one_launcher_does_not_end_the_job() {
    let mut world = running(4, 0);
    for machine in [1, 3] {
        world.fail(Fault::LauncherDies(machine));
        world.until(world.now + 30 * SECOND);
    }
    assert!(world.launchers[0].leads().is_some_and(|lead| lead.merge().has_started()));
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
    // Each failure counts as one restart of the job.
}

/// NVRx#383: a job of NVRx cannot lose the host of the store.
#[test]
fn nvrx_383_the_ranks_survive_the_loss_of_the_store() {
    let mut world = running(4, 0);
    world.fail(Fault::StoreAway(300 * SECOND));
    world.until(world.now + 290 * SECOND);
    assert_eq!(world.started_by.len(), 1, "no rank is restarted");
    assert!(world.launchers.iter().all(|launcher| !launcher.living.is_empty()), "all ranks live");
    world.until(world.now + 30 * SECOND);
    // A failure after the store returned is handled as usual.
    world.rank_exits(2, world.launchers[2].ranks()[0], ExitStatus::Signal(9), false);
    world.until(world.now + 30 * SECOND);
    assert_eq!(world.started_by.len(), 2);
    world.be_quiet();
    assert!(world.until_over() > 0);
}

/// The hosts of the leader and the store are lost at once, with all data of the store.
#[test]
fn the_job_continues_if_leader_and_store_are_lost_at_once() {
    let mut world = running(4, 1);
    world.fail(Fault::StoreWiped);
    world.fail(Fault::PowerCut(0, 1000 * SECOND));
    world.until(world.now + 60 * SECOND);
    assert_eq!(world.leaders, 2);
    assert!(
        world.launchers.iter().filter_map(|launcher| launcher.leads()).any(|lead| lead.merge().has_started())
    );
    world.be_quiet();
    assert_eq!(world.until_over(), 2);
}

#[test]
fn a_leader_without_power_is_replaced_before_its_lease_ends() {
    let mut world = running(4, 1);
    world.fail(Fault::PowerCut(0, 1000 * SECOND));
    world.until(world.now + LEASE - SECOND);
    assert_eq!(world.leaders, 2, "its followers miss it");
    world.be_quiet();
    assert_eq!(world.until_over(), 2);
}

#[test]
fn a_leader_that_only_one_follower_cannot_reach_keeps_leading() {
    let mut world = running(4, 1);
    world.fail(Fault::Blocked(0, 2, 100 * SECOND));
    world.fail(Fault::Blocked(2, 0, 100 * SECOND));
    world.until(world.now + 60 * SECOND);
    assert_eq!(world.leaders, 1);
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

/// A host that returns with the knowledge of a minute ago.
#[test]
fn a_leader_that_stalls_for_a_minute_steps_down_afterwards() {
    let mut world = running(3, 1);
    world.fail(Fault::Stalls(0, 60 * SECOND));
    world.until(world.now + 90 * SECOND);
    assert!(!world.launchers[0].runs(), "it stepped down and its ranks ended");
    assert_eq!(world.leaders, 2);
    world.be_quiet();
    assert_eq!(world.until_over(), 2);
}

/// No message of the host arrives, but it receives all messages.
#[test]
fn a_host_whose_messages_are_lost_is_replaced_and_ends_its_ranks() {
    let mut world = running(3, 1);
    world.fail(Fault::Blocked(1, 0, 100 * SECOND));
    world.fail(Fault::Blocked(1, STORE, 100 * SECOND));
    world.until(world.now + 80 * SECOND);
    assert!(!world.launchers[1].runs(), "it is cut off and has exited");
    assert!(world.launchers[0].leads().is_some_and(|lead| lead.merge().has_started()));
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

/// A job on six hosts whose number does not change. Failures have implicated the third and the last one twice.
fn with_lemons(spares: u32) -> World {
    let worlds = (0..).step_by(6).map(|seed| World::new(seed, 6, spares));
    let mut world = worlds.into_iter().find(|world| !world.limits.vary()).expect("half of them");
    world.until(20 * SECOND);
    world
}

/// The hosts that have no ranks after a rank has failed.
fn without_ranks_after_a_failure(world: &mut World) -> Vec<usize> {
    let before = world.started_by.len();
    let rank = world.launchers[1].ranks()[0];
    world.rank_exits(1, rank, ExitStatus::Signal(9), false);
    world.until(world.now + 40 * SECOND);
    assert_eq!(world.started_by.len(), before + 1, "the ranks were restarted once");
    let launchers = world.launchers.iter().enumerate();
    launchers.filter(|(_, launcher)| launcher.living.is_empty()).map(|(at, _)| at).collect()
}

#[test]
fn a_host_that_failures_implicated_twice_gives_its_ranks_to_a_spare() {
    let mut world = with_lemons(1);
    assert_eq!(without_ranks_after_a_failure(&mut world), [2], "one in a round");
    assert_eq!(without_ranks_after_a_failure(&mut world), [2], "no other host is free");
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

#[test]
fn such_a_host_keeps_its_ranks_without_a_spare() {
    let mut world = with_lemons(0);
    assert!(without_ranks_after_a_failure(&mut world).is_empty());
    world.be_quiet();
    assert_eq!(world.until_over(), 1);
}

impl World {
    /// Runs the simulation until this time.
    pub(super) fn until(&mut self, at: u64) {
        self.at(at, Happening::Nothing);
        while self.now < at {
            self.step();
        }
    }
}
