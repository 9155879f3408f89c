//! Carries out what the group has to do on this host, and what it orders.

use std::time::Duration;

use mainstay_diagnosis::root_rank::host_missing;
use mainstay_group::late_orders::{OnStart, on_start, on_stop};
use mainstay_group::lead::Here;
use mainstay_journal::state::StateWriter;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Rule, Verdict};
use mainstay_recovery::protocol::{Command, Event, StopWhy};
use mainstay_sys::clock;

use crate::group::store::Elected;
use crate::group::{Act, FromOthers, Group};
use crate::policy::Policy;
use crate::ranks::{Ranks, Start, save};
use crate::run::{Launcher, from_now};

/// How long the end of the job waits for followers to know of it, and a follower for its leader.
const END_WITHIN: Duration = Duration::from_secs(5);
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);

/// What the leader asks of its own host.
pub(crate) struct OwnHost<'a> {
    ranks: &'a Ranks,
    snapshots: &'a StateWriter,
    has_others: bool,
}

impl Here for OwnHost<'_> {
    fn save_after(&self) -> Option<u64> {
        // Other hosts learn of it later than this one.
        let later = u64::from(self.has_others);
        save::after_step(self.ranks).map(|step| step.saturating_add(later))
    }

    fn entries_after(&self, have: u64, most: usize) -> Option<Vec<Entry>> {
        self.snapshots.reader().entries_after(have, most).ok().map(|read| read.entries)
    }
}

impl Launcher {
    pub(crate) fn group_and_host(&mut self) -> (&mut Group, OwnHost<'_>) {
        let Launcher { group, ranks, journal, .. } = self;
        let has_others = group.has_other_hosts();
        (group, OwnHost { ranks, snapshots: &journal.snapshots, has_others })
    }

    /// Carries out what the group has to do, until nothing is left.
    pub(crate) fn poll_group(&mut self, now: Mono) {
        loop {
            let (group, here) = self.group_and_host();
            let Some(act) = group.poll(now, &here) else { break };
            self.act(now, act);
        }
        if let Some((attempt, step)) = self.group.vouched() {
            self.checkpoints.vouch(attempt, step);
        }
    }

    fn act(&mut self, now: Mono, act: Act) {
        match act {
            Act::Record(at, body) => self.publish(at, body),
            Act::Entry { seq, at, body, is_past } => {
                let line = self.journal.line(&body).filter(|_| !is_past);
                line.into_iter().for_each(|line| self.output.terminal.print(line));
                let entry = self.journal.record(at, Some(seq), body);
                self.pass_on(entry);
            }
            Act::Obey(command) => self.tasks.push_back(command),
            Act::Print(line) => self.output.terminal.print(line),
            Act::Finished(attempt, rank) if attempt == self.ranks.attempt => {
                self.hang.job.finished_elsewhere(rank, now);
            }
            Act::Seen(attempt, ranks) if attempt == self.ranks.attempt => {
                ranks.iter().for_each(|seen| self.hang.seen_elsewhere(now, seen));
            }
            Act::Finished(..) | Act::Seen(..) => {}
            Act::Meet { hosts, spares } => {
                if let Some(replicas) = &self.checkpoints.replicas {
                    replicas.meet(&hosts, spares);
                }
            }
            Act::TookSeat => {
                let ranks = self.settings.ranks.local_world_size;
                let line = self.group.follower_mut().map(|following| following.seated(ranks));
                line.into_iter().for_each(|line| self.output.terminal.print(line));
            }
            // Ranks would wait in their processes forever.
            Act::LeftSeat if self.ranks.are_running() => {
                self.tasks.push_back(Command::stop(self.ranks.attempt, StopWhy::Dismissed));
            }
            Act::LeftSeat => {}
            Act::Orphaned(reason) => self.leader_is_lost(reason),
            Act::StopRanks if self.ranks.are_running() => {
                self.tasks.push_back(Command::stop(self.ranks.attempt, StopWhy::Requested));
            }
            Act::StopRanks | Act::HandBack => self.exit = Some(self.settings.policy.hand_back_exit),
            Act::End(exit) => self.exit = Some(exit),
        }
    }

    pub(crate) async fn obey(&mut self, command: Command) {
        let of_ranks = self.ranks.attempt;
        match command {
            Command::Seat { attempt, seat } => self.take_seat(attempt, seat).await,
            Command::Open { attempt } => {
                let port = self.ranks.take_port(self.settings.master_port, &mut self.group);
                self.group.step(clock::mono(), Event::Opened { attempt, port });
            }
            Command::Gather { attempt, peers } => {
                self.checkpoints.gather(attempt, peers, &mut self.group);
            }
            Command::Bring { attempt, step } => {
                let world = self.ranks.spec.seat.world_size;
                self.checkpoints.bring(attempt, step, world, &mut self.group);
            }
            Command::Start { attempt, in_process, master_addr, master_port, resume, before } => {
                let ranks = &mut self.ranks;
                let has_ranks = !ranks.processes.is_empty();
                match on_start(attempt, of_ranks, has_ranks, ranks.are_running(), in_process) {
                    OnStart::Ignore => {
                        tracing::warn!(%attempt, "a start of an attempt that is over is ignored");
                        return;
                    }
                    OnStart::Refuse => {
                        ranks.attempt = attempt;
                        let error = "ranks of an earlier attempt still run on this host".to_owned();
                        return self.group.fact(Fact::start_failed(attempt, error));
                    }
                    OnStart::Start => {}
                }
                (ranks.spec.master_addr, ranks.spec.ran_before) = (master_addr, before);
                let port = self.checkpoints.to_resume(resume.as_ref()).map(|resume| {
                    ranks.spec.resume = resume;
                    master_port
                });
                // A spare has not checked yet what it resumes from.
                let again = attempt.0 > 0 || self.group.was_spare();
                if let Some(start) = self.checkpoints.hold(Start { attempt, in_process, port }, again) {
                    self.start(start);
                }
            }
            Command::EndRank { attempt, rank } if attempt == of_ranks => self.end_rank(rank).await,
            Command::EndRank { .. } => {}
            Command::Stop { attempt, why, save_after } if on_stop(attempt, of_ranks) => {
                let _ = self.checkpoints.give_up_start();
                let (ranks, to) = self.split();
                (ranks.attempt, ranks.stopping.save_after) = (attempt, save_after);
                ranks.stop(why, &to);
            }
            // It is over on this host.
            Command::Stop { attempt, .. } => {
                self.group.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() });
            }
            Command::AskToSave { attempt, save_after } => {
                self.ranks.stopping.save_after = save_after;
                if attempt == of_ranks && self.ranks.stopping.stop.is_none() {
                    let line = save::ordered(&mut self.ranks);
                    line.into_iter().for_each(|line| self.output.terminal.print(line));
                }
            }
            Command::TakeEvidence { attempt } => self.hang.take_evidence(&self.ranks, attempt),
            Command::SaveDue { attempt, step } => {
                if attempt == of_ranks && self.ranks.stopping.stop.is_none() {
                    save::is_due(&self.ranks, step);
                }
            }
            Command::Look { launcher, address } => self.group.probe(launcher, address),
            Command::Consult(verdict) => self.consult(verdict),
            Command::AskPolicy { incident, case } => match &mut self.policy {
                Some(policy) => policy.ask(incident, &case, false),
                None => {
                    let answer = Event::PolicyAnswer { incident, advice: Ok(None) };
                    self.group.step(clock::mono(), answer);
                }
            },
            Command::Wake { at } => self.wake_at = Some(from_now(at)),
            Command::Finish { exit, summary } => {
                if let Some(following) = self.group.follower_mut() {
                    following.summary = summary.map(|summary| *summary);
                }
                self.exit = Some(exit);
            }
        }
    }

    /// Processes a message of another launcher or of the store.
    pub(crate) fn others_sent(&mut self, event: FromOthers) {
        let newest = self.journal.snapshots.newest();
        if let Some(elected) = self.group.receive(clock::mono(), newest, event) {
            self.take_over(elected);
        }
    }

    /// The leader is lost, and this launcher was elected: it continues from the leader's record and from what hosts report
    /// again.
    fn take_over(&mut self, elected: Elected) {
        let Elected { record_writer, record: Some(record), .. } = elected else { return };
        let now = clock::now();
        let seat = self.ranks.spec.seat.group_rank;
        let Some((adopted, spec, patience)) = self.group.adopt(&record, seat, self.ranks.attempt, now) else {
            return;
        };
        let policy = self.settings.policy_of_job(&self.ranks.spec.job);
        let (mut job, merge) = adopted.resume(now.mono, spec, policy, patience);
        self.policy = Policy::for_job(&self.settings, &self.ranks.spec);
        self.policy.iter().for_each(|policy| job.advised_by(policy.name()));
        self.journal.recall(&mut job);
        self.journal.snapshots.show_due();
        let reader = self.journal.snapshots.reader();
        self.group.take_over(now.mono, &adopted, (job, merge), (&record, record_writer), &reader);
        self.exit = record.ended.or(self.exit);
        self.group.judge_hangs_with(&mut self.hang, now.mono);
    }

    /// Records the end of the job for this host: no launcher can lead it.
    fn leader_is_lost(&mut self, reason: String) {
        let Some(following) = self.group.follower() else { return };
        let (at, host) = (clock::mono(), following.follow.leader().host.clone());
        let headline = format!("host {host}, which leads the job, is lost");
        let incident = self.journal.next_incident();
        let exit = self.settings.policy.hand_back_exit;
        let decision = Decision {
            incident,
            action: Action::HandBack { exit },
            after: Span::default(),
            rule: Rule::LeaderLost,
            why: "no other host can lead the job; start it again on all hosts".to_owned(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        };
        let verdict = host_missing(incident, self.ranks.attempt, host, &headline, at);
        self.publish(at, Body::Verdict(Verdict { evidence: vec![reason], ..verdict }));
        self.publish(at, Body::Decision(decision));
    }

    /// Waits until the others know that the job is over, or long enough.
    pub(crate) async fn announce_end(&mut self) {
        match self.group.follower() {
            Some(following) if following.summary.is_none() => return,
            // The leader, which ordered the end, closes the connection. Before that it may not have the confirmation.
            Some(_) => {
                let lost = async { while !self.group.next().await.is_loss_of_leader() {} };
                let _ = tokio::time::timeout(ACKNOWLEDGED_WITHIN, lost).await;
                return;
            }
            None => {}
        }
        let until = tokio::time::Instant::now() + END_WITHIN;
        while self.others_lack_commands() {
            // One that has no connection now may reconnect for it.
            match tokio::time::timeout_at(until, self.group.next()).await {
                Ok(event @ FromOthers::Host(_)) => self.others_sent(event),
                Ok(_) => {}
                Err(_) => return,
            }
        }
        // Followers wait for that.
        if let Some(lead) = self.group.lead_mut() {
            lead.close_all();
        }
        self.poll_group(clock::mono());
    }

    fn others_lack_commands(&mut self) -> bool {
        self.poll_group(clock::mono());
        let (group, here) = self.group_and_host();
        let Some(lead) = group.lead_mut() else { return false };
        lead.feed_all(&here);
        let lack = lead.awaits_followers();
        self.poll_group(clock::mono());
        lack
    }
}
