//! Hosts that get other ranks, or none for a while: what the leader stores first, and how a follower reacts.
#![allow(clippy::indexing_slicing, reason = "a panic in a test is its report")]

use mainstay_group::clock::Mapping;
use mainstay_group::follow::{self, CutOff, Follow, Leads};
use mainstay_group::lead::{Act, Expected, Lead, LeaderSettings};
use mainstay_group::merge::Merge;
use mainstay_group::record::Record;
use mainstay_group::resize::Limits;
use mainstay_group::round::{Member, first};
use mainstay_group::wire::{Down, Join, PROTOCOL, Up};
use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{Cause, FaultDomain, Verdict};
use mainstay_recovery::job::Job;
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{Command, Event, Seat};

use crate::support::cluster::{Nothing, exited, started};

const SECOND: u64 = 1_000_000_000;

fn seat(group_rank: u32, world_size: u32) -> Seat {
    Seat { group_rank, group_world_size: world_size, first_rank: group_rank, world_size }
}

fn follower() -> Follow {
    let leader = Leads { launcher: "l0".to_owned(), host: "h0".to_owned(), epoch: 1 };
    let lease = Span::seconds(10);
    Follow::new(Mono(1), "l2".to_owned(), leader, seat(2, 3), lease, Mapping::default(), true)
}

fn record_with_its_seat() -> Record {
    let member = |host| Member { launcher: format!("l{host}"), ranks: 1, ..Member::default() };
    Record {
        at: Default::default(),
        seats: first(&(0..3).map(member).collect::<Vec<_>>(), 3).expect("all are there"),
        leader: "l0".to_owned(),
        job: String::new(),
        launch: String::new(),
        attempt: Attempt(0),
        running: true,
        carried: None,
        ended: None,
    }
}

fn acts(follow: &mut Follow) -> Vec<follow::Act> {
    std::iter::from_fn(|| follow.poll()).collect()
}

fn welcome(seat: Seat) -> Down {
    Down::Welcome { seat, job: String::new(), launch: String::new(), have: 0, epoch: 1, newest: 0 }
}

fn starts(follow: &mut Follow) {
    let start = Command::Start {
        attempt: Attempt(0),
        in_process: false,
        master_addr: String::new(),
        master_port: 1,
        resume: None,
        before: None,
    };
    follow.receive(Mono(2), Down::Command { number: 1, epoch: 1, command: start });
    acts(follow);
}

fn cut_off(acts: &[follow::Act]) -> bool {
    acts.iter().any(|act| matches!(act, follow::Act::CutOff(CutOff::Replaced)))
}

#[test]
fn a_follower_without_ranks_takes_the_seat_that_the_leader_assigns() {
    let mut follow = follower();
    follow.receive(Mono(2), welcome(seat(1, 2)));
    assert!(!cut_off(&acts(&mut follow)) && follow.is_connected());
}

#[test]
fn a_follower_whose_ranks_run_is_cut_off_if_its_seat_changes() {
    for down in [welcome(seat(1, 2)), Down::Waiting { status: "wait".to_owned(), spare: None }] {
        let mut follow = follower();
        starts(&mut follow);
        follow.receive(Mono(3), down.clone());
        assert!(cut_off(&acts(&mut follow)), "another host may have its ranks: {down:?}");
        let mut ended = follower();
        starts(&mut ended);
        let over = Fact::AttemptEnded { attempt: Attempt(0), orphans_killed: 0, waiting: Vec::new() };
        ended.step(Mono(3), Event::Fact(over));
        ended.receive(Mono(4), down);
        assert!(!cut_off(&acts(&mut ended)), "its ranks have ended");
    }
}

#[test]
fn a_follower_without_a_seat_does_not_campaign_until_it_has_one_again() {
    let mut follow = follower();
    follow.receive(Mono(2), Down::Waiting { status: "wait".to_owned(), spare: None });
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::LeftSeat)));
    follow.disconnected(Mono(3), "the cable", false);
    let reported = acts(&mut follow);
    assert!(reported.iter().all(|act| !matches!(act, follow::Act::Campaign)), "{reported:?}");
    assert!(!follow.takes_over(Mono(4), Some(&record_with_its_seat())));
    follow.connected();
    follow.receive(Mono(4), welcome(seat(1, 2)));
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::TookSeat)));
    follow.disconnected(Mono(5), "the cable", false);
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::Campaign)));
    assert!(follow.takes_over(Mono(6), Some(&record_with_its_seat())));
}

/// The leader of three hosts. The third was lost during the first start, and the leader waits for it.
struct Waiting {
    lead: Lead,
    record: u64,
}

fn join(launcher: &str) -> Join {
    Join {
        protocol: PROTOCOL,
        launcher: launcher.to_owned(),
        host: launcher.to_owned(),
        ranks: 1,
        hosts: (1, 3),
        moves: true,
        ..Join::default()
    }
}

impl Waiting {
    fn new() -> Waiting {
        let member =
            |number: u32| Member { leads: number == 0, ..Member::from_join(&join(&format!("l{number}"))) };
        let seats = first(&[member(0), member(1), member(2)], 3).expect("a round");
        let limits = Limits { hosts: (1, 3), shrink_after: Span::seconds(1), ..Limits::fixed(3) };
        let merge = Merge::new(seats, Span::seconds(600)).within(limits, "l0");
        let mut out = Vec::new();
        let settings = Settings::from(Budget { max_restarts: 3, window: None });
        let job = Job::begin(Mono(1), JobSpec { world_size: 3, ..JobSpec::default() }, settings, &mut out);
        let leader_settings = LeaderSettings {
            seat: 0,
            launcher: "l0".to_owned(),
            names: Default::default(),
            expected: Expected { leader: join("l0"), mixed: true },
            lease: Span::seconds(10),
            looks_every: Span::millis(500),
            epoch: 1,
            newest_record: 1,
            has_store: true,
        };
        let mut lead = Lead::new(Mono(1), job, merge, leader_settings);
        lead.gathered(&[("l1".to_owned(), 1), ("l2".to_owned(), 2)], Vec::new());
        lead.begin_with(Mono(1), out);
        let mut waiting = Waiting { lead, record: 0 };
        waiting.acts(Mono(1));
        waiting.lead.gone(Mono(2), 2, "it is gone".to_owned());
        waiting.look(3 * SECOND);
        // The start waits until its record is stored.
        waiting.stored(3 * SECOND);
        waiting
    }

    fn acts(&mut self, at: Mono) -> Vec<Act> {
        let acts: Vec<Act> = std::iter::from_fn(|| self.lead.poll(at, &Nothing)).collect();
        for act in &acts {
            if let Act::Store(number, _) = act {
                self.record = *number;
            }
        }
        acts
    }

    /// Lets time pass in steps so short that the launcher does not seem to have been stopped.
    fn look(&mut self, until: u64) -> Vec<Act> {
        let mut all = Vec::new();
        for at in (0..=until).step_by(SECOND as usize / 2) {
            self.lead.look(Mono(at.max(3)), None);
            all.extend(self.acts(Mono(at.max(3))));
        }
        all
    }

    fn stored(&mut self, at: u64) -> Vec<Act> {
        self.lead.stored(Mono(at), self.record);
        let mut acts = self.acts(Mono(at));
        acts.extend(self.acts(Mono(at)));
        acts
    }
}

fn reported_seats(acts: &[Act]) -> Vec<Seat> {
    let reported = acts.iter().filter_map(|act| match act {
        Act::Send(_, Down::Command { command: Command::Seat { seat, .. }, .. })
        | Act::Obey(Command::Seat { seat, .. }) => Some(seat.clone()),
        _ => None,
    });
    reported.collect()
}

#[test]
fn new_seats_are_stored_before_hosts_receive_them() {
    let mut waiting = Waiting::new();
    let mut before = waiting.look(6 * SECOND);
    before.extend(waiting.acts(Mono(6 * SECOND)));
    let stored = before.iter().rev().find_map(|act| match act {
        Act::Store(_, record) => Some(record.seats.len()),
        _ => None,
    });
    assert_eq!(stored, Some(2), "{before:?}");
    assert_eq!(reported_seats(&before), []);
    let after = waiting.stored(6 * SECOND);
    assert_eq!(reported_seats(&after), [seat(0, 2), seat(1, 2)], "{after:?}");
}

#[test]
fn a_launcher_that_joins_is_welcomed_once_its_seat_is_stored() {
    let at = Mono(7 * SECOND);
    let mut waiting = Waiting::new();
    waiting.look(6 * SECOND);
    waiting.stored(6 * SECOND);
    let mut number = 0;
    let mut both = |waiting: &mut Waiting, of: &dyn Fn(u32) -> Event| {
        waiting.lead.step(at, of(0));
        number += 1;
        waiting.lead.receive(at, 1, Up::Event { number, at, event: of(1) });
        waiting.acts(at)
    };
    let attempt = Attempt(0);
    both(&mut waiting, &|host| Event::Seated { attempt, seat: seat(host, 2) });
    waiting.lead.step(at, Event::Opened { attempt, port: Ok(7) });
    waiting.acts(at);
    both(&mut waiting, &|host| Event::Fact(started(attempt, 7, [Rank(host)].into_iter())));
    // A host joins, and a rank dies.
    waiting.lead.joined(at, 9, &join("l9"));
    let welcomed = |acts: &[Act]| acts.iter().any(|act| matches!(act, Act::Send(9, Down::Welcome { .. })));
    assert!(!welcomed(&waiting.acts(at)), "ranks run");
    both(&mut waiting, &|host| Event::Fact(exited(attempt, Rank(host), ExitStatus::Signal(9), host == 1)));
    let ended = Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() };
    both(&mut waiting, &|_| Event::Fact(ended.clone()));
    waiting.lead.step(at, Event::AgentEvidence(None));
    waiting.acts(at);
    // First the record of the attempt is stored, then that of the seats.
    let seats = waiting.stored(7 * SECOND);
    assert!(!welcomed(&seats), "{seats:?}");
    let reported = waiting.stored(7 * SECOND);
    assert!(welcomed(&reported), "{reported:?}");
    assert_eq!(reported_seats(&reported), [seat(0, 3), seat(1, 3), seat(2, 3)]);
}

/// The addresses of hosts and spares that keep copies, as sent on this connection.
fn keepers(acts: &[Act], of: u64) -> Vec<(Vec<String>, Vec<String>)> {
    let reported = acts.iter().filter_map(|act| match act {
        Act::Send(to, Down::Meet { hosts, spares }) if *to == of => Some((hosts.clone(), spares.clone())),
        _ => None,
    });
    reported.collect()
}

#[test]
fn a_spare_receives_what_it_needs_to_prepare_and_all_learn_that_it_keeps_copies() {
    let at = Mono(4 * SECOND);
    let prepares = |name: &str| Join {
        prepares: true,
        replicas: format!("{name}:1"),
        // No host has this number of ranks, so it gets no seat.
        ranks: 2,
        ..join(name)
    };
    let mut waiting = Waiting::new();
    // A follower that supports this reconnects.
    waiting.lead.joined(at, 7, &Join { prepares: true, ..join("l1") });
    waiting.lead.joined(at, 8, &prepares("l8"));
    let acts = waiting.acts(at);
    let reported = acts.iter().find_map(|act| match act {
        Act::Send(8, Down::Waiting { spare: Some(spare), .. }) => Some(spare.seat.clone()),
        _ => None,
    });
    assert_eq!(reported, Some(seat(0, 3)), "{acts:?}");
    let spare = |name: &str| vec![format!("{name}:1")];
    assert_eq!(keepers(&acts, 8), [(Vec::new(), spare("l8"))]);
    assert!(acts.iter().any(|act| matches!(act, Act::Meet { spares, .. } if *spares == spare("l8"))));
    // A launcher without this support receives only the earlier messages.
    waiting.lead.joined(at, 9, &join("l9"));
    let acts = waiting.acts(at);
    assert!(acts.iter().any(|act| matches!(act, Act::Send(9, Down::Waiting { .. } | Down::Welcome { .. }))));
    assert_eq!(keepers(&acts, 9), []);
    waiting.lead.gone(at, 8, "the cable".to_owned());
    let acts = waiting.acts(at);
    assert!(acts.iter().any(|act| matches!(act, Act::Meet { spares, .. } if spares.is_empty())), "{acts:?}");
}

#[test]
fn entries_from_before_a_spare_got_its_seat_are_past_and_later_ones_are_not() {
    let mut follow = follower().waiting();
    let (job, launch) = (String::new(), String::new());
    let welcome = Down::Welcome { seat: seat(1, 2), job, launch, have: 0, epoch: 1, newest: 2 };
    follow.receive(Mono(2), welcome);
    let body = std::sync::Arc::new(Body::Fact(Fact::AgentStopped));
    for seq in 1..=3 {
        follow.receive(Mono(3), Down::Entry { seq, at: Stamp::default(), body: body.clone() });
    }
    let past = acts(&mut follow).into_iter().filter_map(|act| match act {
        follow::Act::Entry { seq, is_past, .. } => Some((seq, is_past)),
        _ => None,
    });
    assert_eq!(past.collect::<Vec<_>>(), [(1, true), (2, true), (3, false)]);
}

#[test]
fn a_spare_that_prepares_follows_without_a_seat_until_it_is_welcomed() {
    let mut follow = follower().waiting();
    assert!(follow.waits_for_a_seat() && !follow.takes_over(Mono(4), Some(&record_with_its_seat())));
    follow.receive(Mono(2), Down::Meet { hosts: vec!["a:1".to_owned()], spares: Vec::new() });
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::Meet { .. })));
    follow.disconnected(Mono(3), "the cable", false);
    assert!(acts(&mut follow).iter().all(|act| !matches!(act, follow::Act::Campaign)));
    follow.connected();
    follow.receive(Mono(4), welcome(seat(1, 3)));
    assert!(acts(&mut follow).iter().any(|act| matches!(act, follow::Act::TookSeat)));
    assert_eq!(follow.seat(), &seat(1, 3));
}

#[test]
fn a_failure_counts_once_for_the_host_of_its_culprit() {
    let members: Vec<Member> = ["l0", "l1", "l2"].map(|name| Member::from_join(&join(name))).to_vec();
    let mut merge = Merge::new(first(&members, 3).expect("a round"), Span::seconds(600));
    let failed = |incident, host: &str| {
        let cause = Cause::Signal { signal: 7 };
        let of = Verdict::new(Incident(incident), Attempt(0), cause, "it failed", Mono(1));
        let (culprit, domain, host) = (Some(Rank(1)), FaultDomain::Hardware, Some(host.to_owned()));
        Verdict { culprit, domain, host, ..of }
    };
    let mut implicated = |verdict: &Verdict| -> Vec<u32> {
        merge.judged(verdict);
        merge.seats().map(|at| at.member.implicated).collect()
    };
    assert_eq!(implicated(&failed(1, "l1")), [0, 1, 0]);
    assert_eq!(implicated(&failed(1, "l1")), [0, 1, 0], "later evidence on the same failure");
    assert_eq!(implicated(&Verdict { domain: FaultDomain::User, ..failed(2, "l1") }), [0, 1, 0]);
    assert_eq!(implicated(&failed(2, "lost")), [0, 1, 0], "another host had the rank then");
    assert_eq!(implicated(&failed(3, "l1")), [0, 2, 0]);
}
