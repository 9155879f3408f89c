//! Checkpoints of several hosts before their ranks start: a host that does not bring its shards delays the start only
//! for a limited time.

use std::collections::VecDeque;

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_group::merge::{Merge, Next};
use mainstay_group::round::first;
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::{Command, Event};

use crate::support::cluster::{Chance, members};

const ATTEMPT: Attempt = Attempt(1);

fn key() -> StepKey {
    StepKey { step: 7, job: "job".into(), run: "run@1".into(), attempt: 0, world: 2 }
}

fn own(rank: u32) -> Copy {
    let root = format!("7.{rank}");
    let shard = Shard { key: key(), rank, root, bytes: 1, created: 0, piece: None };
    Copy { holder: format!("h{rank}:1").into(), medium: Medium::Memory, own: true, verified: true, shard }
}

fn commands(next: &mut VecDeque<Next>) -> Vec<Command> {
    let command = |next| match next {
        Next::Command(_, command) => Some(command),
        Next::Job(..) | Next::Arranged(_) => None,
    };
    next.drain(..).filter_map(command).collect()
}

/// Two hosts with one rank each. They hold a whole step and were ordered to bring it at time 1.
fn bringing() -> (Merge, VecDeque<Next>) {
    let round = first(&members(&mut Chance(1), 2, 1, true), 2).unwrap();
    let (mut merge, mut next) = (Merge::new(round, Span::seconds(60)), VecDeque::new());
    let at = Mono(1);
    merge.order(at, Command::start(ATTEMPT), &mut next);
    merge.step(at, 0, Event::Opened { attempt: ATTEMPT, port: Ok(1024) }, &mut next);
    for rank in 0..2 {
        merge.step(at, rank, Event::Holding { attempt: ATTEMPT, copies: vec![own(rank)] }, &mut next);
    }
    let bring = Command::Bring { attempt: ATTEMPT, step: key() };
    assert!(commands(&mut next).ends_with(&[bring.clone(), bring]));
    (merge, next)
}

fn resumed(commands: &[Command]) -> Vec<Option<StepKey>> {
    let resume = |command: &Command| match command {
        Command::Start { resume, .. } => Some(resume.clone()),
        _ => None,
    };
    commands.iter().filter_map(resume).collect()
}

#[test]
fn a_host_that_does_not_bring_its_shards_is_reported_and_the_step_is_skipped() {
    let (mut merge, mut next) = bringing();
    merge.step(Mono(2), 0, Event::Brought { attempt: ATTEMPT, step: key(), error: None }, &mut next);
    merge.look(Mono(1).after(Span::seconds(599)), &mut next);
    assert!(next.is_empty(), "it still has time: {next:?}");
    merge.look(Mono(1).after(Span::seconds(600)), &mut next);
    let printed = next.iter().find_map(|next| match next {
        Next::Job(_, Event::Fact(Fact::Observed(seen))) => Some(seen.clone()),
        _ => None,
    });
    let printed = printed.unwrap();
    assert_eq!(printed.event, "checkpoint_not_restored");
    assert!(printed.detail.contains("h1") && printed.detail.contains("within 600"), "{}", printed.detail);
    assert_eq!(resumed(&commands(&mut next)), [None, None]);
}

#[test]
fn ranks_resume_from_shards_that_arrive_in_time() {
    let (mut merge, mut next) = bringing();
    let late = Mono(1).after(Span::seconds(500));
    for seat in 0..2 {
        let brought = Event::Brought { attempt: ATTEMPT, step: key(), error: None };
        merge.step(late, seat, brought, &mut next);
    }
    assert_eq!(resumed(&commands(&mut next)), [Some(key()), Some(key())]);
}
