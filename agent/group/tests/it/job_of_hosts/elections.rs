//! Single elections: who is a candidate, who takes over, and who yields to others.

use mainstay_group::clock::Mapping;
use mainstay_group::follow::{self, CutOff, Follow, Leads};
use mainstay_group::record::Record;
use mainstay_group::round::Seated;
use mainstay_group::wire::{Down, Up};
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::{Command, Event, Seat, StopWhy};

use super::faults::Fault;
use super::network::STORE;
use super::scenarios::{running, seated};
use super::{LEASE_SPAN, SECOND, World};

fn follower() -> Follow {
    let leads = Leads { launcher: "l0".to_owned(), host: "h0".to_owned(), epoch: 1 };
    let seat = Seat { group_rank: 1, group_world_size: 2, first_rank: 1, world_size: 2 };
    Follow::new(Mono(1), "l1".to_owned(), leads, seat, LEASE_SPAN, Mapping::default(), true)
}

fn record(seats: &[Seated]) -> Record {
    Record {
        at: Default::default(),
        seats: seats.to_vec(),
        leader: "l0".to_owned(),
        job: String::new(),
        launch: String::new(),
        attempt: Default::default(),
        running: true,
        carried: None,
        ended: None,
    }
}

/// A follower whose leader is lost. `runs`: whether it has ranks.
fn orphan(runs: bool) -> Follow {
    let mut follow = follower();
    if runs {
        let command = Command::Start {
            attempt: Attempt(0),
            in_process: false,
            master_addr: String::new(),
            master_port: 1,
            resume: None,
            before: None,
        };
        follow.receive(Mono(2), Down::Command { number: 1, epoch: 1, command });
    }
    follow.disconnected(Mono(3), "the leader has gone", true);
    let acts: Vec<_> = acts(&mut follow);
    assert!(acts.iter().any(|act| matches!(act, follow::Act::Campaign)), "{acts:?}");
    follow
}

fn acts(follow: &mut Follow) -> Vec<follow::Act> {
    std::iter::from_fn(|| follow.poll()).collect()
}

#[test]
fn a_launcher_that_lost_its_seat_to_another_one_does_not_take_over() {
    let mut seats = seated(2);
    assert!(orphan(true).takes_over(Mono(4), Some(&record(&seats))));
    seats[1].member.launcher = "another".to_owned();
    let mut follow = orphan(true);
    assert!(!follow.takes_over(Mono(4), Some(&record(&seats))));
    let acts = acts(&mut follow);
    assert!(matches!(acts.last(), Some(follow::Act::CutOff(CutOff::Replaced))), "{acts:?}");
}

/// It has just joined, or the store was wiped before it read the record. The others have followed for longer.
#[test]
fn a_launcher_without_a_record_of_its_seat_yields_to_the_others() {
    let mut seats = seated(2);
    seats[1].member.launcher = "another".to_owned();
    for (runs, known) in [(false, None), (true, None), (false, Some(record(&seats)))] {
        let mut follow = orphan(runs);
        assert!(!follow.takes_over(Mono(4), known.as_ref()));
        follow.disconnected(Mono(5), "the leader has gone", true);
        follow.look(Mono(4).after(LEASE_SPAN), None, false);
        let given_back = acts(&mut follow);
        let stands = |act: &follow::Act| matches!(act, follow::Act::Campaign | follow::Act::CutOff(_));
        assert!(!given_back.iter().any(stands), "{given_back:?}");

        // It does not wait forever.
        follow.look(Mono(4).after(Span(LEASE_SPAN.0 * 3)), None, false);
        let given_up = acts(&mut follow);
        assert!(matches!(given_up.last(), Some(follow::Act::CutOff(CutOff::NoRecord))), "{given_up:?}");
    }
}

#[test]
fn a_launcher_that_yielded_is_a_candidate_in_the_next_election() {
    let mut follow = orphan(false);
    assert!(!follow.takes_over(Mono(4), None));
    let leads = Leads { launcher: "l2".to_owned(), host: "h2".to_owned(), epoch: 3 };
    follow.led_by(Mono(5), leads, 0);
    acts(&mut follow);
    follow.disconnected(Mono(6), "this one has gone, too", true);
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::Campaign)));
}

/// The leader that it saw for a moment has yielded to others, is alive, and welcomes no follower.
#[test]
fn a_follower_without_a_welcome_is_a_candidate_once_the_store_names_no_leader() {
    let mut follow = orphan(true);
    follow.led_by(Mono(4), Leads { launcher: "l2".to_owned(), host: "h2".to_owned(), epoch: 2 }, 0);
    follow.connected();
    acts(&mut follow);
    let late = Mono(4).after(LEASE_SPAN);
    let stands = |act: &follow::Act| matches!(act, follow::Act::Campaign);
    follow.look(late, None, true);
    assert!(!acts(&mut follow).iter().any(stands), "the leader may be about to welcome it");
    follow.look(late, None, false);
    assert!(acts(&mut follow).iter().any(stands));
}

/// Another host takes the place of the first leader. Then the store is wiped, and the second leader is lost, too.
#[test]
fn the_newest_host_is_elected_and_yields_to_one_with_a_record() {
    let mut world = running(3, 0);
    world.fail(Fault::PowerCut(0, 4 * SECOND));
    let leads = |world: &World| world.launchers.iter().position(|launcher| launcher.leads().is_some());
    while leads(&world).is_none() {
        world.step();
    }
    let leader = leads(&world).expect("one leads");
    world.until(world.now + 2 * SECOND);
    let joined = |world: &World| world.launchers[world.machines[0].launcher].seat.is_some();
    assert!(!joined(&world), "it has not joined yet");
    world.fail(Fault::StoreWiped);
    while !joined(&world) {
        world.step();
    }
    let newest = world.machines[0].launcher;
    let leads_at = world.launchers[leader].machine;
    let others = (1..3).filter(|machine| *machine != leads_at);
    others.for_each(|machine| world.fail(Fault::Blocked(machine, STORE, 4 * SECOND)));
    world.fail(Fault::LauncherDies(leads_at));
    let was_elected = |world: &World| world.elected.values().any(|elected| *elected == newest);
    while !was_elected(&world) {
        world.step();
    }
    world.until(world.now + 60 * SECOND);
    assert!(world.launchers[newest].runs(), "it continues as a follower");
    world.be_quiet();
    assert_eq!(world.until_over(), 3);
}

#[test]
fn without_a_leader_the_wait_for_a_seat_is_limited() {
    let mut follow = follower();
    follow.receive(Mono(2), Down::Waiting { status: String::new(), spare: None });
    follow.disconnected(Mono(3), "the leader has gone", true);
    follow.look(Mono(3).after(LEASE_SPAN), None, false);
    let acts = acts(&mut follow);
    assert!(
        !acts.iter().any(|act| matches!(act, follow::Act::Campaign | follow::Act::CutOff(_))),
        "{acts:?}"
    );
    follow.look(Mono(3).after(Span(LEASE_SPAN.0 * 3)), None, false);
    assert!(matches!(
        std::iter::from_fn(|| follow.poll()).last(),
        Some(follow::Act::CutOff(CutOff::NoLeader))
    ));
}

#[test]
fn the_answer_to_a_new_leader_survives_the_loss_of_the_connection() {
    let mut follow = follower();
    let attempt = Attempt(0);
    let leads = Leads { launcher: "l2".to_owned(), host: "h2".to_owned(), epoch: 2 };
    follow.led_by(Mono(2), leads, 0);
    let seat = Seat { group_rank: 1, group_world_size: 2, first_rank: 1, world_size: 2 };
    let welcomed = |follow: &mut Follow| {
        follow.connected();
        let (job, launch) = (String::new(), String::new());
        follow.receive(
            Mono(3),
            Down::Welcome { seat: seat.clone(), job, launch, have: 0, epoch: 2, newest: 0 },
        );
    };
    welcomed(&mut follow);
    let command = Command::Stop { attempt, why: StopWhy::Fault, save_after: None };
    follow.receive(Mono(4), Down::Command { number: 1, epoch: 2, command });
    follow.disconnected(Mono(5), "it was reset", false);
    let ended = Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() };
    follow.step(Mono(6), Event::Fact(ended.clone()));
    welcomed(&mut follow);
    follow.receive(Mono(8), Down::Beat { sent: Mono(7), at: Mono(7) });
    let acts: Vec<_> = std::iter::from_fn(|| follow.poll()).collect();
    let answers = |act: &follow::Act| matches!(act, follow::Act::Send(Up::Event { event: Event::Fact(fact), .. }) if *fact == ended);
    assert!(acts.iter().any(answers), "{acts:?}");
}
