//! The books of a job over a journal: each nanosecond from its first launch on belongs to one state, over restarts,
//! hand-backs and further launches, and each lost one to what explains it.
//!
//! The launcher that leads a job accounts each step as it happens ([`mainstay_progress::goodput::Ledger`]). A journal
//! has the step about every 10 s: between two entries, steps count as equally long.

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_model::finding::Finding;
use mainstay_model::id::{Incident, JobId};
use mainstay_model::policy::CauseKind;
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_model::verdict::{Action, Decision, Verdict};
use mainstay_progress::goodput::{TimeAccounting, TimeCategory};

pub mod google;
pub mod report;

/// The kind of the cause for time that an order of a person costs.
pub const ORDER: &str = "order";

/// The kind of the cause for time that the loss of a launcher costs.
pub const LAUNCHER_LOST: &str = "launcher_lost";

/// What explains lost time: an index into [`Books::causes`].
pub type Charge = Option<usize>;

/// A failure, a finding or an order that lost time is charged to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargedCause {
    /// The kind: that of the failure's cause or of the finding, `order`, or `launcher_lost`.
    pub kind: &'static str,
    /// One line for people.
    pub headline: String,
    /// The host at fault, if one is.
    pub host: Option<String>,
    /// The job's name in that launch.
    pub job: JobId,
    /// Its number, if it is a failure.
    pub incident: Option<Incident>,
    /// When it happened.
    pub at: Wall,
    /// From then until it was detected.
    pub detected_after: Span,
    /// From then until all ranks had completed a step again; `None` if they have not.
    pub recovered_after: Option<Span>,
}

/// Time in one state for one cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booked {
    /// Wall-clock time.
    pub span: Span,
    /// The same for each rank, in nanoseconds.
    pub of_ranks: u128,
}

/// Upper bounds of the buckets of save stalls, in seconds.
pub const STALL_BOUNDS: [f64; 10] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// Saves that held training up for about as long, by [`STALL_BOUNDS`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stalls {
    /// Their number.
    pub saves: u64,
    /// The time of all of them.
    pub total: Span,
}

/// The launch that the entries belong to.
#[derive(Clone, Debug, PartialEq)]
struct Launch {
    base: Stamp,
    job: JobId,
    has_several_hosts: bool,
}

/// The current attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct CurrentAttempt {
    started: Option<Wall>,
    /// Whether a rank sent heartbeats.
    is_heard: bool,
    /// The last step that is booked.
    booked: Option<u64>,
    /// The newest step seen.
    newest: Option<u64>,
    saving: Span,
    failed: bool,
    hung_since: Option<Wall>,
    last_exit: Option<Wall>,
}

/// The books of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Books {
    window: (Wall, Wall),
    /// Whose job it is and how large, from its last launch.
    pub spec: Arc<JobSpec>,
    /// When the first launch started.
    pub began: Option<Wall>,
    /// Launches so far.
    pub launches: u32,
    /// Attempts so far.
    pub attempts: u32,
    /// What lost time is charged to.
    pub causes: Vec<ChargedCause>,
    /// The status of the last launch, if that has ended.
    pub ended: Option<i32>,
    /// Distinct steps completed, in the window.
    pub steps: u64,
    /// Repeated steps by cause, in the window.
    pub lost_steps: BTreeMap<Charge, u64>,
    /// Saves by how long each held training up, also in steps that were repeated; the last of [`Stalls`] is above all
    /// bounds. The journal has the sum of about 10 s: each of these saves counts with their mean.
    pub stalls: [Stalls; STALL_BOUNDS.len() + 1],
    /// The program does not number its steps, and was restarted: `lost_steps` are the most that is possible.
    pub counted: bool,
    /// Whether any rank sent heartbeats. If not, goodput is unknown.
    pub measured: bool,
    booked: BTreeMap<(TimeCategory, Charge), Booked>,
    launch: Option<Launch>,
    attempt: CurrentAttempt,
    /// States since the time up to which all is booked, oldest first: a verdict may still change them.
    open: Vec<(Wall, TimeCategory)>,
    charge: Charge,
    world: u32,
    /// The highest step completed: ever, and before the current attempt.
    highest: (Option<u64>, Option<u64>),
    /// The current findings that cost time: cause, first step, share of the step time.
    slow: BTreeMap<u64, (usize, u64, f64)>,
    /// The time of the newest entry.
    seen: Wall,
}

impl Default for Books {
    fn default() -> Books {
        Books::within(Wall(i64::MIN), Wall(i64::MAX))
    }
}

impl Books {
    /// Empty books that take in the time from `from` to `to`; entries from before are needed to know the state then.
    pub fn within(from: Wall, to: Wall) -> Books {
        Books {
            window: (from, to),
            spec: Arc::default(),
            began: None,
            launches: 0,
            attempts: 0,
            causes: Vec::new(),
            ended: None,
            steps: 0,
            lost_steps: BTreeMap::new(),
            stalls: Default::default(),
            counted: false,
            measured: false,
            booked: BTreeMap::new(),
            launch: None,
            attempt: CurrentAttempt::default(),
            open: Vec::new(),
            charge: None,
            world: 0,
            highest: (None, None),
            slow: BTreeMap::new(),
            seen: Wall(i64::MIN),
        }
    }

    /// Takes in the next entry of the job's journal.
    pub fn entry(&mut self, entry: &Entry) {
        if let Body::Fact(Fact::JobStarted(spec)) = &entry.body {
            return self.launched(entry, spec);
        }
        if self.launch.is_none() {
            return;
        }
        // Hosts report with different delays.
        let at = self.wall(entry.at.mono).max(self.seen);
        self.seen = at;
        match &entry.body {
            Body::Fact(fact) => self.fact(at, fact),
            Body::Verdict(verdict) => self.verdict(at, verdict),
            Body::Decision(decision) => self.decision(at, decision),
            Body::Finding(finding) => self.finding(at, finding),
            // Earlier versions recorded it here only.
            Body::Outcome(outcome) => self.counted |= outcome.counted,
            Body::Health(_) => {}
        }
    }

    /// The time per state and cause. The sum is all time of the job in the window: from its first launch until
    /// `now` if a launch runs (`None`: until its newest entry), without the time after a launch that ended with
    /// status 0.
    pub fn booked(&self, now: Option<Wall>) -> BTreeMap<(TimeCategory, Charge), Booked> {
        self.closed(now).booked
    }

    /// What is booked and cannot change any more.
    pub fn settled(&self) -> &BTreeMap<(TimeCategory, Charge), Booked> {
        &self.booked
    }

    /// The books as if the journal ended at `now`, or at its newest entry.
    #[must_use]
    pub fn closed(&self, now: Option<Wall>) -> Books {
        let mut books = self.clone();
        let end = now.map_or(books.seen, |now| now.max(books.seen));
        if books.launch.is_some() {
            books.settle_training(end);
            books.settle(end);
        }
        books
    }

    /// The accounting as `summary.json` has it.
    pub fn accounting(&self, now: Option<Wall>) -> TimeAccounting {
        let closed = self.closed(now);
        let mut parts: BTreeMap<TimeCategory, Span> = BTreeMap::new();
        for ((state, _), booked) in &closed.booked {
            let part = parts.entry(*state).or_default();
            *part = part.plus(booked.span);
        }
        parts.retain(|_, span| span.0 > 0);
        let wall = parts.values().fold(Span::default(), |sum, span| sum.plus(*span));
        let training = parts.get(&TimeCategory::Training).copied().unwrap_or_default();
        let goodput = if wall.0 == 0 { 0.0 } else { training.0 as f64 / wall.0 as f64 };
        TimeAccounting {
            wall,
            parts,
            goodput: closed.measured.then_some(goodput),
            steps: closed.steps,
            steps_lost: closed.lost_steps.values().sum(),
            counted: closed.counted,
            saves: 0,
        }
    }

    /// Whether this is in the window of the books.
    pub fn is_in_window(&self, at: Wall) -> bool {
        self.window.0 <= at && at <= self.window.1
    }

    /// The highest step that was completed.
    pub fn reached(&self) -> Option<u64> {
        self.highest.0
    }

    fn launched(&mut self, entry: &Entry, spec: &JobSpec) {
        let at = self.seen.max(entry.at.wall);
        if self.launch.is_some() {
            // Its launcher ended without a word: with a host, or killed.
            self.settle_training(self.seen);
            self.charge_to(LAUNCHER_LOST, self.seen);
            self.change(self.seen, TimeCategory::Idle);
        }
        if self.ended == Some(0) {
            // The job was done: this is another one of the same name.
            (self.open, self.highest, self.charge) = (Vec::new(), (None, None), None);
        }
        self.settle(at);
        let name = entry.job.clone().unwrap_or_default();
        self.launch = Some(Launch {
            base: entry.at,
            job: name,
            has_several_hosts: spec.local_world_size < spec.world_size,
        });
        self.spec = Arc::new(spec.clone());
        (self.world, self.ended, self.seen) = (spec.world_size, None, at);
        self.attempt = CurrentAttempt::default();
        self.began.get_or_insert(at);
        self.launches += 1;
        self.change(at, self.meeting());
    }

    fn meeting(&self) -> TimeCategory {
        match &self.launch {
            Some(launch) if launch.has_several_hosts => TimeCategory::Rendezvous,
            _ => TimeCategory::Starting,
        }
    }

    fn fact(&mut self, at: Wall, fact: &Fact) {
        match fact {
            Fact::AttemptStarted { ranks, .. } => self.attempt_started(at, ranks.len()),
            Fact::RankConnected { .. } => {
                self.heard();
                if self.state() == Some(TimeCategory::Starting) {
                    self.change(at, TimeCategory::Initialising);
                }
            }
            Fact::RanksStepping { step, counted, restoring, .. } => {
                self.stepping(at, *step, *counted, *restoring);
            }
            Fact::Progress { step, saving, saves, .. } => {
                self.saved(at, *saving, *saves);
                self.attempt.newest = self.attempt.newest.max(Some(*step));
                self.attempt.saving = self.attempt.saving.plus(*saving);
                self.settle_training(at);
            }
            Fact::RankExited { status, step, after_stop, .. } => {
                self.attempt.newest = self.attempt.newest.max(*step);
                self.attempt.last_exit = self.attempt.last_exit.max(Some(at));
                // Ranks are stopped because of a failure, or the stop was requested and the job is finishing.
                self.attempt.failed |= !status.is_success() || *after_stop;
            }
            Fact::RankRaised { .. } | Fact::RankEnding { .. } | Fact::HostLost { .. } => {
                self.attempt.failed = true;
            }
            Fact::RanksHung { hang, acts, .. } => {
                self.attempt.failed |= acts;
                self.attempt.hung_since = Some(self.wall(hang.since).min(at));
            }
            Fact::HangPassed { .. } => self.hang_passed(at),
            Fact::StopRequested { .. } => {
                self.settle_training(at);
                self.charge = None;
                self.change(at, TimeCategory::Finishing);
            }
            Fact::AttemptEnded { .. } => self.attempt_ended(at),
            Fact::LauncherLost { .. } => {
                self.settle_training(at);
                self.charge_to(LAUNCHER_LOST, at);
                self.end(at, TimeCategory::Idle);
            }
            Fact::JobEnded { exit, .. } => {
                self.settle_training(at);
                self.end(at, TimeCategory::Idle);
                self.ended = Some(*exit);
            }
            _ => {}
        }
    }

    fn heard(&mut self) {
        (self.measured, self.attempt.is_heard) = (true, true);
    }

    fn attempt_started(&mut self, at: Wall, ranks: usize) {
        self.settle_training(at);
        // The attempt before was ended on an order, and not because the job was done.
        let finishing = self.open.iter_mut().filter(|(_, state)| *state == TimeCategory::Finishing);
        finishing.for_each(|(_, state)| *state = TimeCategory::Deciding);
        self.settle(at);
        if let Ok(ranks @ 1..) = u32::try_from(ranks) {
            self.world = ranks;
        }
        self.attempts += 1;
        self.attempt = CurrentAttempt { started: Some(at), ..CurrentAttempt::default() };
        self.slow.clear();
        self.highest.1 = self.highest.0;
        self.change(at, TimeCategory::Starting);
    }

    fn stepping(&mut self, at: Wall, step: u64, counted: bool, restoring: Span) {
        self.heard();
        self.counted |= counted && self.highest.1.is_some();
        let failure = self.charge.and_then(|index| self.causes.get_mut(index));
        if let Some(failure) = failure.filter(|failure| failure.recovered_after.is_none()) {
            failure.recovered_after = Some(span(failure.at, at));
        }
        if self.state() != Some(TimeCategory::Training) {
            self.restored(at, restoring);
            self.change(at, TimeCategory::Training);
            self.settle(at);
            // The first step includes the setup before it, and is accounted there.
            self.count_steps(at, (step, step));
            self.attempt.booked = Some(step);
        }
    }

    /// The last part of the start was a restore: where in it is unknown, and does not matter for its length.
    fn restored(&mut self, at: Wall, restoring: Span) {
        self.drop_later(at);
        if let Some(&(from, TimeCategory::Initialising)) = self.open.last() {
            let length = restoring.0.min(span(from, at).0);
            self.change(Wall(at.0.saturating_sub_unsigned(length)), TimeCategory::Restoring);
        }
    }

    fn saved(&mut self, at: Wall, saving: Span, saves: u64) {
        if saves == 0 || !self.is_in_window(at) {
            return;
        }
        let each = saving.as_seconds() / saves as f64;
        let place = STALL_BOUNDS.iter().position(|bound| each <= *bound).unwrap_or(STALL_BOUNDS.len());
        let stalls = &mut self.stalls[place];
        stalls.saves = stalls.saves.saturating_add(saves);
        stalls.total = stalls.total.plus(saving);
    }

    /// Books the training, which lasted until the next state, or until `at`.
    fn settle_training(&mut self, at: Wall) {
        let training = self.open.iter().position(|(_, state)| *state == TimeCategory::Training);
        if let Some(place) = training {
            let end = self.open.get(place + 1).map_or(at, |(from, _)| *from);
            self.train(end, false);
        }
    }

    /// Books the time since the last report of a step: repeated steps first, then saves, then what findings cost.
    /// `is_cut_off`: a failure ended it, so that time without a completed step is lost.
    fn train(&mut self, at: Wall, is_cut_off: bool) {
        self.settle_before_training();
        let Some(&(from, TimeCategory::Training)) = self.open.first() else { return };
        let at = at.max(from);
        let length = span(from, at);
        let first = self.attempt.booked.map_or(self.attempt.newest, |booked| booked.checked_add(1));
        let (mut again, mut new) = (0, 0);
        if let (Some(first), Some(last)) = (first, self.attempt.newest)
            && first <= last
        {
            (again, new) = self.count_steps(at, (first, last));
            self.attempt.booked = Some(last);
        }
        let lost = match (again, new) {
            (0, 0) if is_cut_off => length,
            (0, 0) => Span::default(),
            _ => part(length, again as f64 / (again as f64 + new as f64)),
        };
        let left = length.minus(lost);
        let saving = Span(std::mem::take(&mut self.attempt.saving).0.min(left.0));
        let left = left.minus(saving);
        let newest = self.attempt.newest.unwrap_or(0);
        let slow = self.slow.values().max_by(|a, b| a.2.total_cmp(&b.2)).copied();
        let (finding, slowed) = slow.map_or((None, Span::default()), |(cause, since, cost)| {
            let steps = again + new;
            // The share of these steps that it had slowed down.
            let of_these = newest.saturating_sub(since.max(1) - 1).min(steps) as f64 / steps.max(1) as f64;
            (Some(cause), part(left, cost * of_these))
        });
        let mut from = from;
        let parts = [
            (TimeCategory::LostWork, self.charge, lost),
            (TimeCategory::Checkpointing, None, saving),
            (TimeCategory::Slowdown, finding, slowed),
            (TimeCategory::Training, None, left.minus(slowed)),
        ];
        for (state, charge, length) in parts {
            let to = Wall(from.0.saturating_add_unsigned(length.0));
            self.book((from, to), state, charge);
            from = to;
        }
        if let Some(open) = self.open.first_mut() {
            open.0 = at;
        }
    }

    /// Counts these steps; returns how many were done before, and how many are new.
    fn count_steps(&mut self, at: Wall, (first, last): (u64, u64)) -> (u64, u64) {
        let all = (last - first).saturating_add(1);
        let again =
            self.highest.1.map_or(0, |before| before.saturating_add(1).saturating_sub(first).min(all));
        if self.is_in_window(at) {
            self.steps = self.steps.saturating_add(all - again);
            if again > 0 {
                *self.lost_steps.entry(self.charge).or_default() += again;
            }
        }
        self.highest.0 = self.highest.0.max(Some(last));
        (again, all - again)
    }

    fn hang_passed(&mut self, at: Wall) {
        let Some(since) = self.attempt.hung_since.take() else { return };
        self.attempt.failed = false;
        if self.state() != Some(TimeCategory::Training) {
            return;
        }
        self.train(since, false);
        let (from, before) = (self.open.first().map_or(at, |(from, _)| *from), self.charge);
        self.charge_to("hang", from);
        if let Some(of) = self.causes.last_mut() {
            of.recovered_after = Some(span(from, at));
        }
        self.book((from, at.max(from)), TimeCategory::Undetected, self.charge);
        self.charge = before;
        self.open = vec![(at.max(from), TimeCategory::Training)];
    }

    fn attempt_ended(&mut self, at: Wall) {
        if self.attempt.failed {
            // The verdict has the times.
            return self.change(at, TimeCategory::Deciding);
        }
        if self.state() == Some(TimeCategory::Training) {
            let end = self.attempt.last_exit.unwrap_or(at).min(at);
            self.train(end, false);
            self.change(end, TimeCategory::Finishing);
        }
    }

    fn verdict(&mut self, at: Wall, verdict: &Verdict) {
        let kind = CauseKind::from_cause(&verdict.cause).as_str();
        let host = verdict.host_at_fault().cloned();
        let job = self.launch.as_ref().map(|launch| launch.job.clone()).unwrap_or_default();
        // What is booked stays, and no fault is later than its verdict.
        let settled = self.open.first().map_or(at, |(from, _)| *from);
        let fault_at = self.wall(verdict.fault_at).clamp(settled, at.max(settled));
        let known = |known: &&mut ChargedCause| known.incident == Some(verdict.incident) && known.job == job;
        if let Some(known) = self.causes.iter_mut().rev().find(known) {
            // Later evidence.
            (known.kind, known.host) = (kind, host);
            known.headline.clone_from(&verdict.headline);
            return;
        }
        let detected_at = self.wall(verdict.detected_at).clamp(fault_at, at.max(fault_at));
        if self.state_until(fault_at) == Some(TimeCategory::Training) {
            self.train(fault_at, true);
        }
        self.causes.push(ChargedCause {
            kind,
            headline: verdict.headline.clone(),
            host,
            job,
            incident: Some(verdict.incident),
            at: fault_at,
            detected_after: span(fault_at, detected_at),
            recovered_after: None,
        });
        // The time before the fault belongs to what was before.
        let after: Vec<(Wall, TimeCategory)> =
            self.open.iter().copied().filter(|(from, _)| *from >= detected_at).collect();
        self.open.retain(|(from, _)| *from < fault_at);
        if !self.open.is_empty() {
            self.change(fault_at, TimeCategory::Undetected);
            self.settle(fault_at);
        }
        self.charge = Some(self.causes.len() - 1);
        self.change(fault_at, TimeCategory::Undetected);
        self.change(detected_at, TimeCategory::Stopping);
        for (from, state) in after {
            // Ranks that ended meanwhile.
            if state != TimeCategory::Training {
                self.change(from, state);
            }
        }
        if self.state() == Some(TimeCategory::Stopping) {
            self.change(at, TimeCategory::Deciding);
        }
        (self.attempt.failed, self.attempt.hung_since) = (true, None);
    }

    fn decision(&mut self, at: Wall, decision: &Decision) {
        if decision.incident == Incident::ORDERED {
            self.settle_training(at);
            self.charge_to(ORDER, at);
            self.attempt.failed = true;
            return self.change(at, TimeCategory::Stopping);
        }
        let is_missing =
            self.charge.and_then(|index| self.causes.get(index)).is_some_and(|of| of.kind == "host_lost");
        let next = match decision.action {
            Action::HandBack { .. } | Action::Stop { .. } => TimeCategory::Finishing,
            Action::Wait | Action::ReplaceHost { .. } => TimeCategory::Waiting,
            _ if is_missing => TimeCategory::Waiting,
            _ => self.meeting(),
        };
        self.settle_training(at);
        self.settle(at);
        self.change(at, TimeCategory::Deciding);
        self.change(Wall(at.0.saturating_add_unsigned(decision.after.0)), next);
    }

    fn finding(&mut self, at: Wall, finding: &Finding) {
        let Some(cost) = finding.cost_percent.filter(|cost| cost.is_finite() && *cost > 0.0) else { return };
        if finding.over {
            self.slow.remove(&finding.finding);
            return;
        }
        let index = self.slow.get(&finding.finding).map_or(self.causes.len(), |(index, ..)| *index);
        if index == self.causes.len() {
            self.causes.push(ChargedCause {
                kind: finding.what.as_str(),
                headline: finding.headline.clone(),
                host: finding.host.clone(),
                job: self.launch.as_ref().map(|launch| launch.job.clone()).unwrap_or_default(),
                incident: None,
                at,
                detected_after: Span::default(),
                recovered_after: None,
            });
        }
        self.slow.insert(finding.finding, (index, finding.since_step, (cost / 100.0).min(1.0)));
    }

    fn charge_to(&mut self, kind: &'static str, at: Wall) {
        self.causes.push(ChargedCause {
            kind,
            headline: match kind {
                ORDER => "a restart was ordered".to_owned(),
                "hang" => "ranks made no progress and then went on".to_owned(),
                _ => "the launcher was lost".to_owned(),
            },
            host: None,
            job: self.launch.as_ref().map(|launch| launch.job.clone()).unwrap_or_default(),
            incident: None,
            at,
            detected_after: Span::default(),
            recovered_after: None,
        });
        self.charge = Some(self.causes.len() - 1);
    }

    fn end(&mut self, at: Wall, state: TimeCategory) {
        self.settle(at);
        self.change(at, state);
        self.launch = None;
    }

    /// The point in time of this launch's monotonic clock. The wall clock may jump during a launch.
    fn wall(&self, at: Mono) -> Wall {
        let Some(Launch { base, .. }) = &self.launch else { return self.seen };
        match at.0.checked_sub(base.mono.0) {
            Some(after) => Wall(base.wall.0.saturating_add_unsigned(after)),
            None => Wall(base.wall.0.saturating_sub_unsigned(base.mono.since(at).0)),
        }
    }

    fn state(&self) -> Option<TimeCategory> {
        self.open.last().map(|(_, state)| *state)
    }

    /// The state until `at`.
    fn state_until(&self, at: Wall) -> Option<TimeCategory> {
        let before = self.open.iter().rev().find(|(from, _)| *from < at);
        before.or(self.open.first()).map(|(_, state)| *state)
    }

    /// From `at` on the job is in this state. A state that was to come later does not.
    fn change(&mut self, at: Wall, state: TimeCategory) {
        self.drop_later(at);
        let at = self.open.last().map_or(at, |(from, _)| at.max(*from));
        self.open.push((at, state));
    }

    fn drop_later(&mut self, at: Wall) {
        while self.open.len() > 1 && self.open.last().is_some_and(|(from, _)| *from > at) {
            self.open.pop();
        }
    }

    /// Books what came before the training that is open.
    fn settle_before_training(&mut self) {
        let began = self.open.iter().position(|(_, state)| *state == TimeCategory::Training);
        if let Some(began) = began.filter(|began| *began > 0) {
            let from = self.open[began].0;
            let later = self.open.split_off(began);
            self.open.push((from, TimeCategory::Training));
            self.settle(from);
            self.open = later;
        }
    }

    /// Books all states up to `at`; the last one goes on from there.
    fn settle(&mut self, at: Wall) {
        self.drop_later(at);
        let Some(&(last, state)) = self.open.last() else { return };
        let at = at.max(last);
        let ends: Vec<Wall> = self.open.iter().skip(1).map(|(from, _)| *from).chain([at]).collect();
        let open = std::mem::take(&mut self.open);
        for ((from, state), to) in open.into_iter().zip(ends) {
            // Without heartbeats the end of the start is unknown: most of the time is training.
            let runs = self.attempt.started.is_some_and(|started| from >= started) && !self.attempt.is_heard;
            let state =
                if state == TimeCategory::Starting && runs { TimeCategory::Unmeasured } else { state };
            let charge = match state {
                TimeCategory::Training
                | TimeCategory::Checkpointing
                | TimeCategory::Slowdown
                | TimeCategory::Finishing
                | TimeCategory::Unmeasured => None,
                _ => self.charge,
            };
            self.book((from, to), state, charge);
        }
        self.open.push((at, state));
    }

    fn book(&mut self, (from, to): (Wall, Wall), state: TimeCategory, charge: Charge) {
        let length = span(from.max(self.window.0), to.min(self.window.1));
        if length.0 > 0 {
            let booked = self.booked.entry((state, charge)).or_default();
            booked.span = booked.span.plus(length);
            booked.of_ranks += u128::from(length.0) * u128::from(self.world);
        }
    }
}

#[cfg(test)]
mod tests;

/// Zero if `to` is earlier.
fn span(from: Wall, to: Wall) -> Span {
    Span(u64::try_from(i128::from(to.0) - i128::from(from.0)).unwrap_or(0))
}

fn part(of: Span, share: f64) -> Span {
    Span(((of.0 as f64 * share.clamp(0.0, 1.0)) as u64).min(of.0))
}
