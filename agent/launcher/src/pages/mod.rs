//! Reads the ranks' pages: steps, hangs, and what the ranks do when they hang.

pub mod files;

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_group::lead::Here;
use mainstay_health::parse::mounts::{mount_of, parse_mounts};
use mainstay_model::entry::{Fact, StepDone};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::Span;
use mainstay_recovery::job::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
use mainstay_tier::pool::{PoolOwner, Whole, world};
use mainstay_view::node::BeatView;

use crate::agent_link::stream::LinkOrder;
use crate::hang::Evidence;
use crate::output::rank_output::StreamTails;
use crate::ranks::process::RankProcess;
use crate::ranks::stop::reap_orphans;
use crate::run::Launcher;
use crate::signatures;
use mainstay_recovery::protocol::Event;
use mainstay_sensors::source::evidence::{Frames, Subject};
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::{clock, lifeline};

/// Readers get a new sample of the pages after this many looks.
const LOOKS_PER_SAMPLE: u32 = 5;

/// How many of a rank's last steps go into the evidence.
const LAST_STEPS: usize = 16;

/// At most this many steps between two samples are reported to the agent: the newest.
const MOST_STEP_TIMES: usize = 128;

impl Launcher {
    pub(crate) fn regular_look(&mut self) {
        self.look();
        self.judge_hangs();
        self.report_sights();
        self.save_if_due();
        self.pass_on_save_request();
        let now = clock::mono();
        let pool = self.rank_spec.checkpoint_pool.as_deref();
        self.group.look(now, || pool.is_some_and(world::is_kept));
        self.poll_group(now);
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_SAMPLE) {
            self.sample();
            // At the latest here: events may arrive without a pause.
            self.journal.snapshots.show_due();
            let messages = self.checkpoints.pool_owner.as_ref().map(PoolOwner::messages).unwrap_or_default();
            messages.into_iter().for_each(|line| self.output.terminal.print(line));
            self.compare_what_was_saved();
            self.report_a_silent_directory();
            self.look_what_is_ready();
            let ranks = self.ranks.processes.iter().map(|rank| rank.pid);
            let store = self.group.store_process();
            let ranks: Vec<Pid> = ranks.chain(self.ranks.warm.templates()).chain(store).collect();
            // Includes the guardian if another process killed it: it would be ahead of all others in the queue.
            reap_orphans(|pid| !ranks.contains(&pid));
            if self.stopping.stop.is_none() && self.ranks.are_running() {
                self.ranks.limits.sample();
                signatures::let_go();
            }
            let waits = self.waiting().is_some();
            if self.stopping.stop.is_none()
                && let Some(fact) = self.ranks.warm.look_after(&self.rank_spec, waits)
            {
                self.fact(fact);
            }
        }
    }

    /// Has the ranks of all hosts save, after the same step, when a save is due.
    fn save_if_due(&mut self) {
        let now = clock::mono();
        if self.stopping.stop.is_some()
            || !self.group.lead_mut().is_some_and(|lead| lead.job_mut().save_is_due(now))
        {
            return;
        }
        let attempt = self.ranks.attempt;
        let (group, here) = self.group_and_host();
        if let (Some(step), Some(lead)) = (here.save_after(), group.lead_mut()) {
            lead.save_is_due(attempt, step);
            self.poll_group(now);
        }
    }

    /// Reports to the leader on another host, which judges hangs, what the ranks here are doing.
    fn report_sights(&mut self) {
        if self.group.reports_sights() {
            let now = clock::mono();
            self.group.seen(self.ranks.attempt, self.hang.judge.due_to_report(now));
            self.poll_group(now);
        }
    }

    /// Reads all pages and reports what is new to the job.
    pub(crate) fn look(&mut self) {
        let attempt = self.ranks.attempt;
        let mut stepped = Vec::new();
        for index in 0..self.ranks.processes.len() {
            let (rank, pid) = (self.ranks.processes[index].rank, self.ranks.processes[index].pid);
            let Some(update) = self.ranks.pages.get_mut(&rank).map(PageReader::look) else { continue };
            let now = clock::mono();
            if let Some(page) = self.ranks.pages.get_mut(&rank) {
                self.hang.judge.see(self.ranks.processes[index].local_rank, page, now);
            }
            if let Some((client, _)) = update.connected {
                self.watch_lifeline(index);
                self.fact(Fact::RankConnected { attempt, rank, client });
            }
            if let Some(reason) = update.refused {
                self.fact(Fact::RankRefused { attempt, rank, reason });
            }
            if let Some((role, stage)) = update.role {
                self.step(now, Event::Role { attempt, rank, role, stage });
            }
            if !update.steps.is_empty() {
                self.output.spoken.stepped(rank, &update.steps);
                if index == 0 {
                    self.time_steps(&update.steps);
                }
                stepped.push((rank, update.steps));
            }
            if let Some(note) = update.raised {
                self.report_steps(std::mem::take(&mut stepped));
                self.ranks.processes[index].raised = true;
                self.output.spoken.note(rank, &note);
                self.note_end(Some(&note), None, &StreamTails::default());
                let data = self.ranks.pages.get(&rank).and_then(PageReader::data);
                self.count_oom_kills();
                self.fact(Fact::RankRaised { attempt, rank, pid, note, data });
            }
        }
        self.report_steps(stepped);
        if !self.drill.due.is_empty() {
            self.inject_what_is_due();
        }
    }

    /// Reports to the job which steps ranks completed.
    fn report_steps(&mut self, ranks: Vec<(Rank, Vec<StepDone>)>) {
        if !ranks.is_empty() {
            self.step(clock::mono(), Event::Steps { attempt: self.ranks.attempt, ranks });
            self.vouch();
        }
    }

    /// Remembers how long steps took for the agent, which compares them with its own activity.
    fn time_steps(&mut self, done: &[StepDone]) {
        let whole = done.iter().filter(|step| !step.first);
        let times =
            whole.map(|step| StepTime { start: step.start, end: step.end, saving: Span(step.checkpoint_ns) });
        let times: Vec<StepTime> = times.collect();
        if let Some(replicas) = &self.checkpoints.replicas {
            replicas.stepped(&times);
        }
        self.agent.step_times.extend(times);
        let surplus = self.agent.step_times.len().saturating_sub(MOST_STEP_TIMES);
        self.agent.step_times.drain(..surplus);
    }

    /// Reports that the file system of the checkpoints does not answer, in each attempt, and that it answers again.
    fn report_a_silent_directory(&mut self) {
        let silent = self.checkpoints.pool_owner.as_ref().is_some_and(PoolOwner::is_directory_silent);
        let reported = self.checkpoints.silence_reported;
        let running = self.stopping.stop.is_none() && self.ranks.are_running();
        let (event, words) = match (silent, reported) {
            (true, reported) if running && reported != Some(self.ranks.attempt) => {
                (FILE_SYSTEM_SILENT, "does not answer: steps stay in memory, and training goes on")
            }
            (false, Some(_)) => (FILE_SYSTEM_ANSWERS, "answers again"),
            _ => return,
        };
        self.checkpoints.silence_reported = silent.then_some(self.ranks.attempt);
        let directory = &self.rank_spec.checkpoint_dir;
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounts = parse_mounts(&table);
        let named = mount_of(&mounts, directory).map_or_else(String::new, |mount| {
            format!("{} file system at {} ({}), with ", mount.kind, mount.point.display(), mount.from)
        });
        let detail = format!("the {named}the checkpoint directory {}, {words}", directory.display());
        self.fact(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: event.to_owned(),
            weight: if silent { Weight::Error } else { Weight::Info },
            detail,
            ..Observation::default()
        }));
    }

    /// Compares what ranks saved of a step, once all have saved.
    pub(crate) fn compare_what_was_saved(&mut self) {
        let whole = self.checkpoints.pool_owner.as_ref().map(PoolOwner::whole_steps).unwrap_or_default();
        for Whole { attempt, step, chunks } in whole {
            let Ok(attempt) = u32::try_from(attempt).map(Attempt) else { continue };
            let shards = (self.rank_spec.seat.first_rank..).map(Rank).zip(chunks).collect();
            self.step(clock::mono(), Event::Saved { attempt, step, shards });
            self.vouch();
        }
    }

    /// Has the pool owner preserve the step that can be resumed from.
    fn vouch(&self) {
        let vouched = self.group.lead().and_then(|lead| lead.job().vouched());
        if let (Some(pool_owner), Some(step)) = (&self.checkpoints.pool_owner, vouched) {
            pool_owner.vouch(self.ranks.attempt.0.into(), step);
        }
    }

    /// Has the rank's lifeline report when its process starts to end. Without one its pidfd reports the end, later.
    fn watch_lifeline(&mut self, index: usize) {
        let rank = &mut self.ranks.processes[index];
        let word_at = self.ranks.pages.get(&rank.rank).and_then(PageReader::lifeline);
        let (Some(word_at), Some((_, page)), false) = (word_at, &rank.page, rank.watched) else { return };
        let (pid, endings) = (rank.pid, self.ranks.endings.0.clone());
        let watched = lifeline::watch(page, word_at, move || {
            // The receiver goes only when the launcher does.
            let _ = endings.send(pid);
        });
        rank.watched = watched.is_ok();
        if let Err(error) = watched {
            tracing::debug!(rank = rank.rank.0, %error, "cannot watch a rank's lifeline");
        }
    }

    /// Judges whether ranks hang, unless one is being stopped or missing.
    fn judge_hangs(&mut self) {
        let failed = |rank: &RankProcess| {
            rank.raised || rank.ending.is_some() || rank.exit.is_some_and(|exit| !exit.is_success())
        };
        if self.stopping.stop.is_some() || self.ranks.processes.iter().any(failed) {
            return;
        }
        if let Some(fact) = self.hang.judge.judge(&self.ranks.processes, clock::mono()) {
            self.fact(fact);
        }
    }

    /// Starts to record what the ranks do, in a thread: `/proc` may block a reader.
    pub(crate) fn take_evidence(&mut self, attempt: Attempt) {
        let file = self.rank_spec.run_dir.join(format!("attempt_{}/hang.json", attempt.0));
        // Native frames pause a rank for a moment, so they are only for ranks that will be stopped.
        let frames = if self.hang.judge.acts() { Frames::Native } else { Frames::Python };
        self.hang.evidence = Some(Evidence::begin(attempt, file, self.subjects(), frames));
    }

    fn subjects(&self) -> Vec<Subject> {
        let living = self.ranks.living();
        living
            .map(|rank| {
                let beat = self.ranks.pages.get(&rank.rank).and_then(PageReader::beat).unwrap_or_default();
                Subject {
                    rank: rank.rank,
                    pid: rank.pid,
                    stacks: Some(rank.files.stacks.clone()),
                    step: beat.step,
                    sections: beat.sections,
                    last_steps: self
                        .ranks
                        .pages
                        .get(&rank.rank)
                        .map_or_else(Vec::new, |page| page.last_steps(LAST_STEPS)),
                }
            })
            .collect()
    }

    pub(crate) fn evidence_taken(&mut self, taken: Fact) {
        self.hang.evidence = None;
        // Look once more: a rank that made progress meanwhile did not hang.
        self.look();
        if let Some(passed) = self.hang.judge.passed(clock::mono()) {
            return self.fact(passed);
        }
        self.fact(taken);
    }

    pub(crate) fn sample(&mut self) {
        let beats: Vec<(Rank, BeatView)> = self
            .ranks
            .pages
            .iter()
            .filter_map(|(rank, page)| {
                Some((*rank, BeatView { pace: self.group.pace(*rank), ..page.beat()? }))
            })
            .collect();
        for (rank, beat) in &beats {
            self.journal.snapshots.sample(&self.id, self.ranks.attempt, *rank, beat.clone());
        }
        if !beats.is_empty() {
            self.journal.snapshots.publish();
        }
        let steps = std::mem::take(&mut self.agent.step_times);
        self.agent.send(LinkOrder::Beats { attempt: self.ranks.attempt, beats, steps });
    }
}
