//! Launchers of this host: their jobs, their reports, and what the node sends them unasked.

use mainstay_checkpoint::owner;
use mainstay_health::host::cloud::leave::{self, Leave};
use mainstay_health::host::contention::{SlowdownHints, slowdown_hints};
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::health::Component;
use mainstay_model::id::{JobId, Pid, Rank};
use mainstay_recovery::job::{ORDERS, RANK_EXCLUDED};
use mainstay_view::node::{JobPhase, JobView};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::{Attached, Hello, Input, Node, Session, ToLauncher};
use mainstay_sensors::source::host::memory_group_of;
use mainstay_sys::pidfd::PidFd;
use mainstay_sys::{clock, processes};

/// The node's state of a job's launcher.
#[derive(Debug)]
pub(super) struct Launcher {
    pid: Pid,
    pub(super) uid: u32,
    have_seq: u64,
    /// The control group that counts its memory, and that of its ranks unless they leave it.
    pub(super) control_group: Option<String>,
    /// GPU activity when ranks of the job were last found to hang.
    pub(super) gpus_in_hang: Vec<String>,
    /// The current connection.
    pub(super) session: Option<(u64, mpsc::Sender<ToLauncher>)>,
    /// The slowdown hints last sent over this connection.
    rank_context: SlowdownHints,
    /// Waits for the end of its process.
    watching: Option<Watching>,
}

/// A task that ends with its launcher.
#[derive(Debug)]
struct Watching(AbortHandle);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Launcher {
    /// A launcher from the journal that has not attached again yet.
    pub(super) fn of_journal(view: &JobView, have_seq: u64) -> Launcher {
        Launcher {
            pid: view.spec.launcher,
            uid: view.spec.uid,
            have_seq,
            control_group: None,
            gpus_in_hang: Vec::new(),
            session: None,
            rank_context: SlowdownHints::default(),
            watching: None,
        }
    }
}

impl Node {
    /// Waits for the launchers of the journal's jobs that are alive; reports the others as lost.
    pub(super) fn find_jobs_again(&mut self) {
        let open: Vec<(JobId, Pid)> = self
            .snapshots
            .view()
            .jobs
            .values()
            .filter(|job| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost))
            .map(|job| (job.id.clone(), job.spec.launcher))
            .collect();
        for (job, pid) in open {
            if processes::is_alive(pid) {
                let watching = self.watch(job.clone(), pid);
                if let Some(launcher) = self.launchers.get_mut(&job) {
                    launcher.watching = watching;
                }
            } else {
                self.launcher_ended(&job, pid);
            }
        }
    }

    pub(super) fn attach(
        &mut self,
        hello: Hello,
        orders: mpsc::Sender<ToLauncher>,
    ) -> Result<Attached, String> {
        if owner::owner(&hello.job.0).is_some_and(|uid| uid != hello.uid) {
            return Err(format!(
                "job {}: the name says that it is another user's; choose another --rdzv-id",
                hello.job
            ));
        }
        let hello = Hello { job: self.key_of(&hello), ..hello };
        let known = self.launchers.get(&hello.job);
        let same = known.is_some_and(|launcher| launcher.pid == hello.pid && launcher.uid == hello.uid);
        if let Some(other) = known.filter(|_| !same)
            && self.is_open(&hello.job)
            && (other.session.is_some() || processes::is_alive(other.pid))
        {
            return Err(format!(
                "job {} is run by the launcher {} of user {}; choose another --rdzv-id",
                hello.job, other.pid.0, other.uid
            ));
        }
        if let Some(most) = self.has_most_jobs(&hello) {
            return Err(most);
        }
        if !same {
            // A late verdict on an earlier job of this name is not recorded for this job.
            self.answered.retain(|answered| answered.session.job != hello.job);
        }
        let now = clock::now().wall;
        if let Some((_, leave)) = self.leave.as_ref().filter(|(_, leave)| leave.by.is_none_or(|by| by > now))
        {
            let _ = orders.try_send(ToLauncher::Leave(leave.clone()));
        }
        self.sessions += 1;
        let number = self.sessions;
        let before = self.launchers.remove(&hello.job).filter(|_| same);
        let (have_seq, watching) =
            before.map_or((0, None), |launcher| (launcher.have_seq, launcher.watching));
        let watching = watching.filter(|watching: &Watching| !watching.0.is_finished());
        let watching = watching.or_else(|| self.watch(hello.job.clone(), hello.pid));
        let session = Some((number, orders));
        self.launchers.insert(
            hello.job.clone(),
            Launcher {
                pid: hello.pid,
                uid: hello.uid,
                have_seq,
                control_group: memory_group_of(hello.pid),
                gpus_in_hang: Vec::new(),
                session,
                rank_context: SlowdownHints::default(),
                watching,
            },
        );
        Ok(Attached { session: Session { job: hello.job, number }, have_seq })
    }

    /// The name under which a launcher's job is kept here: its own, or prefixed with its owner if another user's
    /// job has that name. So no user can block a name for others, or report for another user's job.
    fn key_of(&self, hello: &Hello) -> JobId {
        let with_owner = JobId(owner::owned(hello.uid, &hello.job.0));
        let is_it = |launcher: &Launcher| (launcher.pid, launcher.uid) == (hello.pid, hello.uid);
        if self.launchers.get(&with_owner).is_some_and(is_it) {
            return with_owner;
        }
        let launcher = self.launchers.get(&hello.job).map(|launcher| launcher.uid);
        let job = self.snapshots.view().jobs.get(&hello.job).map(|job| job.spec.uid);
        // Also if it has ended: its outcome is not replaced by another user's.
        let is_anothers = [launcher, job].into_iter().flatten().any(|uid| uid != hello.uid);
        if is_anothers { with_owner } else { hello.job.clone() }
    }

    pub(super) fn entry(&mut self, session: &Session, entry: Entry) {
        let name = |job: &JobId| owner::name(&job.0).to_owned();
        let is_of_job = entry.job.as_ref().is_some_and(|job| name(job) == name(&session.job));
        if !self.is_current(session) || !is_of_job {
            return;
        }
        let Some(launcher) = self.launchers.get_mut(&session.job) else { return };
        if entry.seq <= launcher.have_seq {
            return;
        }
        launcher.have_seq = entry.seq;
        if let Body::Fact(Fact::RanksHung { .. }) = &entry.body {
            // Now, while the ranks hang: when the verdict is proposed, they have been stopped.
            let now = clock::mono();
            let gpus = self.snapshots.view().gpus.iter();
            launcher.gpus_in_hang = gpus.filter_map(|gpu| gpu.doing(now)).collect();
        }
        let body = match entry.body {
            // The kernel reports the owner of the job; a launcher cannot report for another user or process.
            Body::Fact(Fact::JobStarted(mut spec)) => {
                (spec.launcher, spec.uid) = (launcher.pid, launcher.uid);
                bound_command(&mut spec.command);
                Body::Fact(Fact::JobStarted(spec))
            }
            // Only the agent judges the host's health.
            Body::Health(_) => return,
            body => body,
        };
        if let Body::Fact(Fact::AttemptStarted { ranks, .. }) = &body
            && let Some(most) = self.has_most_ranks(session, ranks.len())
        {
            return self.refuse(session, most);
        }
        match &body {
            Body::Fact(Fact::AttemptStarted { .. }) => self.gpus.started(&session.job),
            Body::Fact(Fact::AttemptEnded { waiting, .. }) => {
                let view = self.snapshots.view().jobs.get(&session.job);
                let ranks = view.into_iter().flat_map(|job| job.ranks.values());
                let staying =
                    ranks.filter(|rank| waiting.contains(&rank.rank)).map(|rank| rank.pid).collect();
                self.gpus.emptied(&session.job, clock::mono(), staying);
            }
            Body::Fact(Fact::JobEnded { .. }) => self.gpus.over(&session.job),
            Body::Fact(Fact::Observed(seen)) if seen.component == ORDERS && seen.event == RANK_EXCLUDED => {
                let rank = seen.values.get("rank").and_then(|rank| rank.parse().ok()).map(Rank);
                let job = self.snapshots.view().jobs.get(&session.job);
                if let Some(rank) = rank.and_then(|rank| job?.ranks.get(&rank)) {
                    self.gpus.excluded(&session.job, rank.pid);
                }
            }
            _ => {}
        }
        let recorded = self.record_of_job(entry.at, &session.job, Some(entry.seq), body);
        self.repeats.take_in(&recorded);
        if let Body::Verdict(verdict) = &recorded.body {
            self.report_failures_to_peers();
            self.await_late_evidence(session, verdict);
        }
        self.report_to_hooks(&recorded);
    }

    /// Sends changed slowdown hints to launchers.
    pub(super) fn send_rank_context(&mut self) {
        let view = self.snapshots.view();
        let mut components = None;
        for (job, launcher) in &mut self.launchers {
            let (Some((_, orders)), Some(of)) = (&launcher.session, view.jobs.get(job)) else { continue };
            let components: &Vec<Component> =
                components.get_or_insert_with(|| view.components.values().cloned().collect());
            let ranks: Vec<(Rank, Pid)> = of.ranks.values().map(|rank| (rank.rank, rank.pid)).collect();
            let known = slowdown_hints(&ranks, self.gpus.owners(), components, &view.gpus);
            if !known.is_as(&launcher.rank_context)
                && orders.try_send(ToLauncher::RankContext(known.clone())).is_ok()
            {
                launcher.rank_context = known;
            }
        }
    }

    /// Sends this fact to every launcher, and to each that attaches later, if it says that the machine will be
    /// taken away.
    pub(super) fn ask_launchers_to_leave(&mut self, fact: &Fact) {
        let Some(notice) = leave::notice_of(fact) else { return };
        // A newer notice replaces the previous one; if it still applies, it follows.
        self.leave.take_if(|(of, _)| of == notice);
        let Some(leave) = Leave::from_fact(fact) else { return };
        let sessions = self.launchers.values().filter_map(|launcher| launcher.session.as_ref());
        for (_, orders) in sessions {
            let _ = orders.try_send(ToLauncher::Leave(leave.clone()));
        }
        self.leave = Some((notice.to_owned(), leave));
    }

    /// The connection of a launcher has ended; all its messages were processed.
    pub(super) fn detached(&mut self, session: &Session) {
        if !self.is_current(session) {
            return;
        }
        let Some(launcher) = self.launchers.get_mut(&session.job) else { return };
        launcher.session = None;
        let pid = launcher.pid;
        // Pid 0 is a process in another PID namespace: whether it is alive is not visible from here.
        if pid != Pid(0) && !processes::is_alive(pid) {
            self.launcher_ended(&session.job, pid);
        }
    }

    /// The process of a launcher has ended. Its last messages may still be queued, including the end of the job:
    /// whether it was lost is only known once its connection has ended too.
    pub(super) fn launcher_ended(&mut self, job: &JobId, pid: Pid) {
        let launcher = self.launchers.get(job);
        let is_its = launcher.is_some_and(|launcher| launcher.pid == pid && launcher.session.is_none());
        if is_its && self.is_open(job) {
            self.gpus.over(job);
            self.record(Some(job), Fact::LauncherLost { pid });
        }
    }

    /// Reports the end of the launcher's process.
    fn watch(&self, job: JobId, pid: Pid) -> Option<Watching> {
        let inputs = self.own_inputs.clone();
        match PidFd::open(pid) {
            Ok(launcher) => {
                let watching = tokio::spawn(async move {
                    if launcher.ended().await.is_ok() {
                        let _ = inputs.send(Input::LauncherEnded(job, pid)).await;
                    }
                });
                Some(Watching(watching.abort_handle()))
            }
            // In another PID namespace, or gone: the end of its connection is the only sign.
            Err(error) => {
                tracing::debug!(%job, pid = pid.0, %error, "cannot watch the launcher's process");
                None
            }
        }
    }

    /// Removes launchers that are gone and whose jobs are no longer shown.
    pub(super) fn forget_launchers(&mut self) {
        let jobs = &self.snapshots.view().jobs;
        self.launchers.retain(|job, launcher| launcher.session.is_some() || jobs.contains_key(job));
    }

    /// Why no further job of this user is accepted, if so. Jobs that have not ended are kept as long as their
    /// launchers live, so there must be a limit.
    fn has_most_jobs(&self, hello: &Hello) -> Option<String> {
        let is_its = |job: &&JobId| self.launchers.get(*job).is_some_and(|other| other.uid == hello.uid);
        let jobs = &self.snapshots.view().jobs;
        let open = jobs.keys().filter(is_its).filter(|job| self.is_open(job)).count();
        (open >= JOBS_OF_A_USER && !jobs.contains_key(&hello.job)).then(|| {
            format!(
                "user {} has {open} jobs on this host that are not over, the most that the agent keeps: end some of them",
                hello.uid
            )
        })
    }

    /// Why an attempt with this many ranks is not accepted, if so. Each is in every snapshot and in every answer about
    /// jobs. Ended jobs are shown for a while, so they count too, but less: they must not keep the next ones out.
    fn has_most_ranks(&self, session: &Session, ranks: usize) -> Option<String> {
        let uid = self.launchers.get(&session.job)?.uid;
        let jobs = self.snapshots.view().jobs.values();
        let others = jobs.filter(|job| job.spec.uid == uid && job.id != session.job);
        let weight = |job: &JobView| if self.is_open(&job.id) { 1 } else { 4 };
        let before: usize = others.map(|job| job.ranks.len() / weight(job)).sum();
        (before.saturating_add(ranks) > RANKS_OF_A_USER).then(|| {
            format!(
                "job {} has {ranks} ranks and other jobs of user {uid} have {before}: the agent keeps at most \
                 {RANKS_OF_A_USER} ranks for each user",
                session.job
            )
        })
    }

    /// Ends a launcher's connection with a reason. What it reported last counts as received: it is not sent again.
    fn refuse(&mut self, session: &Session, reason: String) {
        tracing::warn!(job = %session.job, "a launcher's report is refused: {reason}");
        if let Some((_, orders)) =
            self.launchers.get(&session.job).and_then(|launcher| launcher.session.as_ref())
        {
            let _ = orders.try_send(ToLauncher::Refused(reason));
        }
    }

    /// Whether the job is known and has not ended.
    fn is_open(&self, job: &JobId) -> bool {
        let phase = self.snapshots.view().jobs.get(job).map(|job| job.phase);
        phase.is_some_and(|phase| !matches!(phase, JobPhase::Ended(_) | JobPhase::Lost))
    }
}

/// Maximum number of jobs of one user that have not ended.
const JOBS_OF_A_USER: usize = 512;

/// Maximum number of ranks in the jobs of one user: about as many as fit into the message of one attempt.
const RANKS_OF_A_USER: usize = 1 << 16;

/// Bytes and words that are kept of a job's command.
const COMMAND: (usize, usize) = (16 << 10, 1024);

/// A job's command is shown to people: a very long one is cut off.
fn bound_command(command: &mut Vec<String>) {
    let mut left = COMMAND.0;
    let fits = command.iter().take(COMMAND.1).take_while(|word| {
        let fits = word.len() <= left;
        left = left.saturating_sub(word.len());
        fits
    });
    let count = fits.count();
    if count < command.len() {
        command.truncate(count);
        command.push("[...]".to_owned());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_very_long_command_is_cut_off() {
        let mut short = vec!["python".to_owned(), "train.py".to_owned()];
        super::bound_command(&mut short);
        assert_eq!(short, ["python", "train.py"]);
        let mut long = vec!["python".to_owned(), "x".repeat(3_900_000)];
        super::bound_command(&mut long);
        assert_eq!(long, ["python", "[...]"]);
        let mut many = vec!["x".to_owned(); 100_000];
        super::bound_command(&mut many);
        assert_eq!(many.len(), 1025);
    }
}
