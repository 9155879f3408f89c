//! Passes the events of this host to the group of the job, and carries out what the group has to do and what it orders.

use std::collections::BTreeMap;
use std::time::Duration;

use mainstay_diagnosis::root_rank::host_missing;
use mainstay_group::late_orders::{OnStart, on_start, on_stop};
use mainstay_group::lead::Here;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Incident, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Verdict};
use mainstay_recovery::protocol::{Command, Event, StopWhy};
use tokio::sync::mpsc;

use crate::group::store::Elected;
use crate::group::{Act, FromOthers, Group};
use crate::policy::in_job;
use crate::ranks::Ranks;
use crate::ranks::process::RankProcess;
use crate::ranks::save;
use crate::run::{Ended, Launcher, from_now};
use mainstay_journal::state::StateWriter;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::clock;

/// How long the end of the job waits for followers to know of it, and a follower for its leader.
const END_WITHIN: Duration = Duration::from_secs(5);
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);

/// What the leader asks of its own host.
pub(crate) struct OwnHost<'a> {
    ranks: &'a [RankProcess],
    pages: &'a BTreeMap<Rank, PageReader>,
    snapshots: &'a StateWriter,
    has_others: bool,
}

impl Here for OwnHost<'_> {
    fn save_after(&self) -> Option<u64> {
        // Other hosts learn of it later than this one.
        let later = u64::from(self.has_others);
        save::after_step(self.ranks, self.pages).map(|step| step.saturating_add(later))
    }

    fn entries_after(&self, have: u64, most: usize) -> Option<Vec<Entry>> {
        self.snapshots.reader().entries_after(have, most).ok().map(|read| read.entries)
    }
}

impl Launcher {
    /// Something happened on this host.
    pub(crate) fn step(&mut self, at: Mono, event: Event) {
        self.group.step(at, event);
        self.poll_group(at);
    }

    pub(crate) fn fact(&mut self, fact: Fact) {
        self.fact_at(clock::mono(), fact);
    }

    pub(crate) fn fact_at(&mut self, at: Mono, fact: Fact) {
        self.step(at, Event::Fact(fact));
    }

    /// Carries out what the group has to do, until nothing is left.
    pub(crate) fn poll_group(&mut self, now: Mono) {
        loop {
            let (group, here) = self.group_and_host();
            let Some(act) = group.poll(now, &here) else { return };
            self.act(now, act);
        }
    }

    fn act(&mut self, now: Mono, act: Act) {
        match act {
            Act::Record(at, body) => self.publish_body(at, body),
            Act::Entry { seq, at, body, is_past } => {
                let line = self.journal.line(&body).filter(|_| !is_past);
                line.into_iter().for_each(|line| self.output.terminal.print(line));
                let entry = self.record(at, Some(seq), body);
                self.agent.send_entry(entry, self.rank_spec.own_ranks());
            }
            Act::Obey(command) => self.tasks.push_back(command),
            Act::Print(line) => self.output.terminal.print(line),
            Act::Finished(attempt, rank) if attempt == self.ranks.attempt => {
                self.hang.judge.finished_elsewhere(rank, now);
            }
            Act::Seen(attempt, ranks) if attempt == self.ranks.attempt => {
                self.hang.judge.seen_elsewhere(&ranks, now)
            }
            Act::Finished(..) | Act::Seen(..) => {}
            Act::Meet { hosts, spares } => self.meet(&hosts, spares),
            Act::TookSeat => self.has_a_seat(),
            // Ranks would wait in their processes forever.
            Act::LeftSeat if self.ranks.are_running() => {
                self.tasks.push_back(Command::stop(self.ranks.attempt, StopWhy::Dismissed));
            }
            Act::LeftSeat => {}
            Act::Orphaned(reason) => self.leader_is_lost(&reason),
            Act::StopRanks if self.ranks.are_running() => {
                self.tasks.push_back(Command::stop(self.ranks.attempt, StopWhy::Requested));
            }
            Act::StopRanks | Act::HandBack => self.exit = Some(self.settings.policy.hand_back_exit),
            Act::End(exit) => self.exit = Some(exit),
        }
    }

    pub(crate) fn group_and_host(&mut self) -> (&mut Group, OwnHost<'_>) {
        let Launcher { group, ranks: Ranks { processes, pages, .. }, journal, .. } = self;
        let has_others = group.has_other_hosts();
        (group, OwnHost { ranks: processes, pages, snapshots: &journal.snapshots, has_others })
    }

    /// Carries out a command.
    pub(crate) async fn obey(&mut self, command: Command, ended: &mpsc::UnboundedSender<Ended>) {
        match command {
            Command::Seat { attempt, seat } => self.take_seat(attempt, seat).await,
            Command::Open { attempt } => {
                let port = self.take_port();
                self.step(clock::mono(), Event::Opened { attempt, port });
            }
            Command::Gather { attempt, peers } => self.gather_checkpoints(attempt, peers),
            Command::Bring { attempt, step } => self.bring_checkpoint(attempt, step),
            Command::Start { attempt, in_process, master_addr, master_port, resume, before } => {
                match on_start(
                    attempt,
                    self.ranks.attempt,
                    !self.ranks.processes.is_empty(),
                    self.ranks.are_running(),
                    in_process,
                ) {
                    OnStart::Ignore => {
                        tracing::warn!(%attempt, "a start of an attempt that is over is ignored");
                        return;
                    }
                    OnStart::Refuse => {
                        self.ranks.attempt = attempt;
                        let error = "ranks of an earlier attempt still run on this host".to_owned();
                        return self.fact(Fact::start_failed(attempt, error));
                    }
                    OnStart::Start => {}
                }
                self.rank_spec.master_addr = master_addr;
                self.rank_spec.ran_before = before;
                let port = self.resume_from(resume.as_ref()).map(|()| master_port);
                self.start(attempt, port, in_process, ended).await;
            }
            Command::EndRank { attempt, rank } if attempt == self.ranks.attempt => self.end_rank(rank).await,
            Command::EndRank { .. } => {}
            Command::Stop { attempt, why, save_after } if on_stop(attempt, self.ranks.attempt) => {
                (self.ranks.attempt, self.stopping.save_after) = (attempt, save_after);
                self.stop_ranks(why).await;
            }
            // It is over on this host.
            Command::Stop { attempt, .. } => {
                self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() });
            }
            Command::AskToSave { attempt, save_after } => {
                self.stopping.save_after = save_after;
                if attempt == self.ranks.attempt && self.stopping.stop.is_none() {
                    self.ask_to_save();
                }
            }
            Command::TakeEvidence { attempt } => self.take_evidence(attempt),
            Command::SaveDue { attempt, step }
                if attempt == self.ranks.attempt && self.stopping.stop.is_none() =>
            {
                save::request_save_after(&self.ranks.processes, step);
            }
            Command::SaveDue { .. } => {}
            Command::Look { launcher, address } => self.group.probe(launcher, address),
            Command::Consult(verdict) => self.consult(verdict),
            Command::AskPolicy { incident, case } => self.ask_policy(incident, &case),
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
        let (now, newest) = (clock::mono(), self.journal.snapshots.newest());
        if let Some(elected) = self.group.receive(now, newest, event) {
            self.take_over(elected);
        }
        self.poll_group(now);
    }

    /// The leader is lost, and this launcher was elected: it continues from the leader's record and from what hosts report
    /// again.
    fn take_over(&mut self, elected: Elected) {
        let Elected { record_writer, record: Some(record), .. } = elected else { return };
        let now = clock::now();
        let seat = self.rank_spec.seat.group_rank;
        let Some((adopted, spec, patience)) = self.group.adopt(&record, seat, self.ranks.attempt, now) else {
            return;
        };
        let (mut job, merge) = adopted.resume(now.mono, spec, self.policy(), patience);
        self.policy = in_job::start(&self.settings, &self.rank_spec);
        self.policy.iter().for_each(|policy| job.advised_by(policy.name()));
        self.recall(&mut job);
        self.journal.snapshots.show_due();
        let reader = self.journal.snapshots.reader();
        self.group.take_over(now.mono, &adopted, (job, merge), (&record, record_writer), &reader);
        self.exit = record.ended.or(self.exit);
        self.group.judge_hangs_with(&mut self.hang.judge, now.mono);
    }

    /// Records the end of the job for this host: no launcher can lead it.
    fn leader_is_lost(&mut self, reason: &str) {
        let Some(following) = self.group.follower() else { return };
        let (at, host) = (clock::mono(), following.follow.leader().host.clone());
        let headline = format!("host {host}, which leads the job, is lost");
        self.journal.snapshots.show_due();
        let view = self.journal.snapshots.reader().view();
        let last = view.jobs.get(&self.id).and_then(|job| job.last_verdict.as_ref());
        let incident = Incident(last.map_or(0, |verdict| verdict.incident.0) + 1);
        let exit = self.settings.policy.hand_back_exit;
        let decision = Decision {
            incident,
            action: Action::HandBack { exit },
            after: Span::default(),
            why: "no other host can lead the job; start it again on all hosts".to_owned(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        };
        let verdict = host_missing(incident, self.ranks.attempt, host, &headline, at);
        let verdict = Verdict { evidence: vec![reason.to_owned()], ..verdict };
        self.publish_body(at, Body::Verdict(verdict));
        self.publish_body(at, Body::Decision(decision));
    }

    /// " on host NAME" in a job of several hosts, whose other terminals show it too.
    pub(crate) fn on_host(&self) -> String {
        let several = self.group.has_other_hosts();
        let name = nix::unistd::gethostname().ok().filter(|_| several);
        name.map_or_else(String::new, |name| format!(" on host {}", name.to_string_lossy()))
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
        let (group, here) = self.group_and_host();
        let Some(lead) = group.lead_mut() else { return false };
        lead.feed_all(&here);
        let lack = lead.awaits_followers();
        self.poll_group(clock::mono());
        lack
    }
}
