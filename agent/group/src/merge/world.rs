//! Changes the number of hosts: after a while the job continues without a lost host, and later with hosts that
//! joined.
//!
//! Seats change only before a start, when no rank runs. They are stored before any host is informed, so that the next
//! leader finds the seats that hosts have. Then every host takes its seat, and ranks start only when all have done
//! so.
//!
//! For hosts that join, running ranks are stopped in order. The merge requests it from the job like a restart that a
//! person orders, and it is not a failure.

use std::collections::{BTreeSet, VecDeque};

use super::{Host, Merge, Next, Phase, observed};
use crate::resize::{Arranged, Limits, arrange};
use crate::round::{Member, Seated, to_avoid};
use mainstay_model::entry::Fact;
use mainstay_model::observation::HostsEvent;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::{Command, Event, Seat};

/// After this time a host that has not taken its seat no longer delays the start. It first writes its checkpoints in
/// memory to disk: 100 GB at 1 GB/s.
const SEATED_WITHIN: Span = Span::seconds(120);

/// If the job does not stop its ranks for waiting hosts because of other work, it is asked again after this time.
const ASK_AGAIN_AFTER: Span = Span::seconds(30);

impl Merge {
    /// Allows the number of hosts to change within these limits. `leader` is the launcher that leads; it keeps a
    /// seat.
    #[must_use]
    pub fn within(mut self, limits: Limits, leader: &str) -> Merge {
        (self.limits, self.leader) = (limits, leader.to_owned());
        self
    }

    /// Whether the saved checkpoints can be loaded only by the same number of ranks. Then that number is kept: with
    /// another one the job would start from scratch.
    pub fn keep_world(&mut self, keep: bool) {
        self.keeps_world = keep;
    }

    /// Sets the launchers that wait for a seat, in order of arrival.
    pub fn set_waiting(&mut self, waiting: Vec<Member>) {
        self.waiting = waiting;
    }

    /// The seats of [`Next::Arranged`] are stored: hosts are informed.
    pub fn arranged(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        self.unstored = false;
        if self.phase == Phase::Arranged && !self.seat_hosts(at, next) {
            self.open(next);
        }
    }

    /// The hosts that a start waits for and what happens then, as text.
    pub(super) fn awaited(&self) -> (String, bool) {
        let missing = self.missing();
        let smaller = self.smaller();
        let keeps_world = smaller.is_none() && self.keeps_world && self.limits.vary();
        let detail = match smaller {
            Some(Arranged { seats, .. }) if self.limits.shrink_after < self.patience => format!(
                "waiting up to {} for {missing} to come back; after that the job goes on with {}",
                self.limits.shrink_after,
                size_of(&seats)
            ),
            None if keeps_world => {
                format!(
                    "waiting up to {} for {missing} to come back: {}",
                    self.patience,
                    self.why_world_stays()
                )
            }
            _ => format!("waiting up to {} for {missing} to come back", self.patience),
        };
        (detail, keeps_world)
    }

    fn why_world_stays(&self) -> String {
        format!(
            "the job keeps its {} ranks, because another number of ranks cannot load what was saved with mainstay.checkpoint. \
             load(replicated=True) and mainstay.dcp can",
            self.world()
        )
    }

    /// Continues without hosts that were waited for long enough, and stops ranks for waiting hosts.
    pub(super) fn look_at_world(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        match self.phase {
            Phase::Waiting { since } if at.since(since) >= self.limits.shrink_after => {
                if let Some(arranged) = self.smaller() {
                    let waited = self.limits.shrink_after;
                    let why = format!("{} did not come back within {waited}", self.missing());
                    self.arrange(at, arranged, &why, next);
                }
            }
            Phase::Seating { since } if at.since(since) >= SEATED_WITHIN => {
                let late = self.hosts.iter().filter(|host| !host.knows).map(Host::named);
                let late = late.collect::<Vec<_>>().join(" and ");
                self.fail(at, format!("{late} did not take the new ranks within {SEATED_WITHIN}"), next);
            }
            Phase::Started if !self.ending && !self.collecting => self.ask_to_grow(at, next),
            _ => {}
        }
    }

    /// Asks the job to stop its ranks for waiting hosts, if the ranks have run long enough.
    fn ask_to_grow(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let ran = self.started_at.is_some_and(|since| at.since(since) >= self.limits.grow_after);
        let has_asked = self.grow_asked.is_some_and(|has_asked| at.since(has_asked) < ASK_AGAIN_AFTER);
        if !ran || has_asked || self.hosts.iter().any(|host| !host.here) {
            return;
        }
        if self.keeps_world {
            return self.report_waiting(at, next);
        }
        let Some(Arranged { seats, .. }) = self.larger() else { return };
        self.grow_asked = Some(at);
        let detail = format!(
            "{} can take part: the ranks are asked to save and are stopped, then the job goes on with {}",
            joining(&self.hosts, &seats),
            size_of(&seats)
        );
        next.push_back(Next::Job(at, observed(HostsEvent::WorldGrows, detail, &[])));
    }

    /// Reports once why hosts that could take part do not.
    fn report_waiting(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let waiting: Vec<&str> = self.waiting.iter().map(|member| member.host.as_str()).collect();
        if !self.limits.vary() || waiting.is_empty() || self.reported_waiting == waiting.len() {
            return;
        }
        let detail = format!("host {} waits: {}", waiting.join(" and host "), self.why_world_stays());
        self.reported_waiting = waiting.len();
        next.push_back(Next::Job(at, observed(HostsEvent::WorldStays, detail, &[])));
    }

    /// Adds waiting hosts before a start that is due anyway. Returns whether there are any.
    pub(super) fn grow(&mut self, at: Mono, next: &mut VecDeque<Next>) -> bool {
        let Some(arranged) = self.larger() else { return false };
        let why = format!("{} joined", joining(&self.hosts, &arranged.seats));
        self.arrange(at, arranged, &why, next);
        true
    }

    /// Gives the ranks of a host that failures implicated to a waiting one, once before a start that is due anyway. Ranks
    /// of other hosts keep their processes. Only among launchers that store copies of checkpoints for each other: else
    /// the state of the ranks may be on their host alone. Returns whether there is such a host.
    pub(super) fn avoid(&mut self, at: Mono, next: &mut VecDeque<Next>) -> bool {
        let can_change = |member: &Member| member.moves && !member.replicas.is_empty();
        if self.has_avoided || !self.waiting.iter().any(can_change) {
            return false;
        }
        let here = self.hosts.iter().map(|host| &host.seated.member);
        let stays = |member: &Member| member.launcher == self.leader || !can_change(member);
        let free: Vec<Member> = self.waiting.iter().filter(|member| can_change(member)).cloned().collect();
        let Some((seat, by)) = to_avoid(here, free.iter(), stays) else { return false };
        let (Some(host), Some(instead)) = (self.hosts.get_mut(seat), free.into_iter().nth(by)) else {
            return false;
        };
        self.has_avoided = true;
        let seated = Seated { member: instead.clone(), seat: host.seated.seat.clone() };
        let before = std::mem::replace(host, Host { knows: false, ..Host::new(seated) });
        let avoided = before.seated.member;
        next.push_back(Next::Job(at, Event::Fact(avoided.avoided(Some(&instead)))));
        self.waiting.retain(|member| member.launcher != instead.launcher);
        self.waiting.push(avoided.clone());
        (self.phase, self.unstored) = (Phase::Arranged, true);
        let seats = self.seats().cloned().collect();
        next.push_back(Next::Arranged(Box::new(Arranged { seats, benched: vec![avoided] })));
        true
    }

    /// Sends seats to the hosts that do not know theirs, once they are stored. Returns whether that has to be waited
    /// for.
    pub(super) fn seat_hosts(&mut self, at: Mono, next: &mut VecDeque<Next>) -> bool {
        if self.unstored {
            self.phase = Phase::Arranged;
            return true;
        }
        if self.hosts.iter().all(|host| host.knows) {
            return false;
        }
        self.phase = Phase::Seating { since: at };
        let attempt = self.attempt;
        for Host { seated: Seated { seat, .. }, .. } in self.hosts.iter().filter(|host| !host.knows) {
            let command = Command::Seat { attempt, seat: seat.clone() };
            next.push_back(Next::Command(seat.group_rank, command));
        }
        true
    }

    pub(super) fn has_seat(&mut self, seat: u32, has: &Seat, next: &mut VecDeque<Next>) {
        if !matches!(self.phase, Phase::Seating { .. }) {
            return;
        }
        if let Some(host) = self.host(seat) {
            // The answer may be about seats that have changed again.
            host.knows |= host.seated.seat == *has;
        }
        if !self.awaits(|host| !host.knows) {
            self.open(next);
        }
    }

    /// The arrangement without the lost hosts.
    fn smaller(&self) -> Option<Arranged> {
        let all_move = self.hosts.iter().filter(|host| host.here).all(|host| host.seated.member.moves);
        let arranged = (self.limits.vary() && all_move).then(|| self.arrangement()).flatten()?;
        (!self.keeps_world || world(&arranged.seats) == self.world()).then_some(arranged)
    }

    /// The arrangement with the waiting hosts, if it is larger than now.
    fn larger(&self) -> Option<Arranged> {
        let all_move = self.hosts.iter().all(|host| host.seated.member.moves);
        let room = self.hosts.len() < self.limits.hosts.1 as usize && !self.waiting.is_empty();
        let room = room && !self.keeps_world;
        let arranged = (self.limits.vary() && all_move && room).then(|| self.arrangement()).flatten()?;
        (world(&arranged.seats) > self.world()).then_some(arranged)
    }

    fn arrangement(&self) -> Option<Arranged> {
        let before: Vec<(Seated, bool)> =
            self.hosts.iter().map(|host| (host.seated.clone(), host.here)).collect();
        let mut waiting: Vec<Member> = self.waiting.iter().filter(|member| member.moves).cloned().collect();
        waiting.sort_by_key(Member::is_avoided);
        arrange(&before, &waiting, &self.limits, &self.leader)
    }

    pub(super) fn world(&self) -> u32 {
        self.hosts.iter().map(|host| host.seated.member.ranks).sum()
    }

    /// Assigns these seats; the leader stores them.
    fn arrange(&mut self, at: Mono, arranged: Arranged, why: &str, next: &mut VecDeque<Next>) {
        let Arranged { seats, benched } = &arranged;
        let before = self.world();
        // Ranks that wait in their processes have the numbers and memory of the former world.
        let in_process = std::mem::replace(&mut self.in_process, false);
        let mut why = why.to_owned();
        if !benched.is_empty() {
            let names: Vec<&str> = benched.iter().map(|member| member.host.as_str()).collect();
            why = format!(
                "{why}; host {} waits because the number of ranks must be a multiple of {}",
                names.join(" and "),
                self.limits.multiple
            );
        }
        if in_process {
            why = format!("{why}; all ranks get new processes because their numbers may change");
        }
        let changed = Fact::WorldChanged {
            attempt: self.attempt,
            before,
            now: world(seats),
            hosts: seats.iter().map(|at| at.member.host.clone()).collect(),
            why,
        };
        next.push_back(Next::Job(at, Event::Fact(changed)));
        let no_rank_runs = |at: &Seated| Host { knows: false, ..Host::new(at.clone()) };
        self.hosts = seats.iter().map(no_rank_runs).collect();
        let seated: BTreeSet<&str> = seats.iter().map(|at| at.member.launcher.as_str()).collect();
        self.waiting.retain(|member| !seated.contains(member.launcher.as_str()));
        self.waiting.extend(benched.iter().cloned());
        (self.phase, self.unstored) = (Phase::Arranged, true);
        next.push_back(Next::Arranged(Box::new(arranged)));
    }
}

fn world(seats: &[Seated]) -> u32 {
    seats.iter().map(|at| at.member.ranks).sum()
}

/// "2 hosts (4 ranks)".
fn size_of(seats: &[Seated]) -> String {
    let counted = |number: u32, word: &str| match number {
        1 => format!("1 {word}"),
        more => format!("{more} {word}s"),
    };
    let hosts = u32::try_from(seats.len()).unwrap_or(u32::MAX);
    format!("{} ({})", counted(hosts, "host"), counted(world(seats), "rank"))
}

/// The hosts with a seat that have none now, as text.
fn joining(now: &[Host], seats: &[Seated]) -> String {
    let now: BTreeSet<&str> = now.iter().map(|host| host.seated.member.launcher.as_str()).collect();
    let is_new = |at: &&Seated| !now.contains(at.member.launcher.as_str());
    let names: Vec<String> =
        seats.iter().filter(is_new).map(|at| format!("host {}", at.member.host)).collect();
    names.join(" and ")
}
