//! A job of one host: its group has one member, and nothing waits for a store.

use mainstay_group::lead::{Act, Lead, LeaderSettings};
use mainstay_group::merge::Merge;
use mainstay_group::round::{Member, Seated};
use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::Job;
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{Command, Event, Seat, StopWhy};

use crate::support::cluster::{Nothing, exited, started};

const NOW: Mono = Mono(1);

fn alone() -> Lead {
    let (mut out, spec) = (Vec::new(), JobSpec { world_size: 1, local_world_size: 1, ..JobSpec::default() });
    let job = Job::begin(NOW, spec, Settings::from(Budget { max_restarts: 1, window: None }), &mut out);
    let member = Member { ranks: 1, address: "here".to_owned(), ..Member::default() };
    let seat = Seat { group_world_size: 1, world_size: 1, ..Seat::default() };
    let merge = Merge::new(vec![Seated { member, seat }], Span(u64::MAX));
    let mut lead = Lead::new(NOW, job, merge, LeaderSettings::default());
    lead.begin_with(NOW, out);
    lead
}

/// What the host has to do and to record now.
fn done(lead: &mut Lead) -> (Vec<Command>, Vec<Fact>) {
    let (mut commands, mut facts) = (Vec::new(), Vec::new());
    while let Some(act) = lead.poll(NOW, &Nothing) {
        match act {
            Act::Obey(command) => commands.push(command),
            Act::Record(_, Body::Fact(fact)) => facts.push(fact),
            Act::Record(..) => {}
            other => panic!("it concerns other hosts: {other:?}"),
        }
    }
    (commands, facts)
}

fn start(lead: &mut Lead, attempt: Attempt) {
    assert_eq!(done(lead).0, [Command::Open { attempt }]);
    lead.step(NOW, Event::Opened { attempt, port: Ok(7) });
    let (commands, _) = done(lead);
    let [Command::Start { attempt: of, master_addr, master_port: 7, .. }] = &commands[..] else {
        panic!("{commands:?}")
    };
    assert_eq!((*of, master_addr.as_str()), (attempt, "here"));
    lead.step(NOW, Event::Fact(started(attempt, 7, [Rank(0)].into_iter())));
    let started = |fact: &Fact| matches!(fact, Fact::AttemptStarted { hosts, .. } if hosts.is_empty());
    assert!(done(lead).1.iter().any(started));
}

#[test]
fn ranks_are_started_restarted_and_finish_without_a_store() {
    let mut lead = alone();
    start(&mut lead, Attempt(0));
    lead.step(NOW, Event::Fact(exited(Attempt(0), Rank(0), ExitStatus::Signal(9), false)));
    assert_eq!(done(&mut lead).0, [Command::stop(Attempt(0), StopWhy::Fault)]);
    let ended = |attempt| Event::Fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() });
    lead.step(NOW, ended(Attempt(0)));
    assert!(matches!(done(&mut lead).0[..], [Command::Consult(_)]));
    lead.step(NOW, Event::AgentEvidence(None));
    start(&mut lead, Attempt(1));
    lead.step(NOW, Event::Fact(exited(Attempt(1), Rank(0), ExitStatus::Code(0), false)));
    assert_eq!(done(&mut lead).0, [Command::stop(Attempt(1), StopWhy::Done)]);
    lead.step(NOW, ended(Attempt(1)));
    let (commands, _) = done(&mut lead);
    assert!(matches!(commands[..], [Command::Finish { exit: 0, summary: Some(_) }]), "{commands:?}");
    assert_eq!(lead.over(), Some(0));
}

#[test]
fn a_failed_start_is_reported_at_once_and_as_it_is() {
    let error = "no memory".to_owned();
    let (attempt, failed) = (Attempt(0), Fact::start_failed(Attempt(0), error.clone()));
    let mut no_port = alone();
    done(&mut no_port);
    no_port.step(NOW, Event::Opened { attempt, port: Err(error) });
    let mut no_rank = alone();
    done(&mut no_rank);
    no_rank.step(NOW, Event::Opened { attempt, port: Ok(7) });
    done(&mut no_rank);
    no_rank.step(NOW, Event::Fact(failed.clone()));
    for mut lead in [no_port, no_rank] {
        let (commands, facts) = done(&mut lead);
        assert!(facts.contains(&failed) && matches!(commands[..], [Command::Consult(_)]), "{commands:?}");
    }
}
