//! Starting the ranks of an attempt: plainly or from the template, each with its page, its watcher and its output.

use std::path::{Path, PathBuf};

use mainstay_model::entry::{Fact, JobOwner, JobSpec, StartedRank};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_progress::memory::{self, Learned};
use mainstay_recovery::in_process::Round;
use mainstay_recovery::policy;
use tokio::sync::mpsc;

use crate::log_files;
use crate::output::FollowedFile;
use crate::output::{Duplicate, Stream};
use crate::pages::files;
use crate::paths;
use crate::ranks::port::HeldPort;
use crate::ranks::process::{PageTrouble, RankProcess};
use crate::ranks::spec::RankSpec;
use crate::run::{Ended, Launcher};
use crate::settings::Settings;
use mainstay_journal::store::learned::Memory;
use mainstay_sensors::source::nvrx::Monitor;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::{clock, limits, processes};

impl Launcher {
    /// Starts all ranks of this host. `port` is that of the ranks' store, or why there is none.
    pub(crate) fn start_ranks(
        &mut self,
        attempt: Attempt,
        port: Result<u16, String>,
        ended: &mpsc::UnboundedSender<Ended>,
    ) {
        self.ranks.attempt = attempt;
        self.stopping.stop = None;
        for rank in self.ranks.processes.drain(..) {
            for round_server in self.ranks.round_server.iter().chain(&self.drill.server) {
                round_server.forget(rank.pid);
            }
        }
        if let (Some(directory), Some(old)) = (&self.rank_spec.page_dir, attempt.0.checked_sub(2)) {
            files::remove(directory, old);
        }
        let number = match port {
            Ok(number) => number,
            Err(error) => return self.fact(Fact::start_failed(attempt, error)),
        };
        self.ranks.monitors.clear();
        self.ranks.pages.clear();
        self.output.spoken.forget_files();
        if let Some((aside, why)) = self.rank_spec.choose_logs(attempt) {
            self.output.terminal.print(format!(
                "the log directory {} {why}: the ranks of attempt {} write to {}",
                self.rank_spec.run_dir.display(),
                attempt.0,
                aside.display()
            ));
        }
        if let Some(pool_owner) = &self.checkpoints.pool_owner {
            pool_owner.begin_attempt(attempt.0.into());
        }
        match self.make_ranks(attempt, number, &self.rank_spec.all_ranks(), ended) {
            Err(error) => self.fact(Fact::start_failed(attempt, error)),
            Ok((ranks, page_trouble)) => {
                self.ranks.processes = ranks;
                self.attempt_started(number, page_trouble);
            }
        }
    }

    /// Takes the port of the next attempt. It releases the old one first, since a fixed port is taken again.
    pub(crate) fn take_port(&mut self) -> Result<u16, String> {
        self.ranks.port = None;
        let taken = HeldPort::take(self.settings.master_port.unwrap_or(0));
        if let Err(error) = &taken
            && limits::is_exhaustion(error)
        {
            self.note_exhausted(format!("taking a port for the ranks' store: {error}"));
        }
        let port = taken.map_err(|error| {
            let wanted =
                self.settings.master_port.map_or("any free port".to_owned(), |port| port.to_string());
            format!(
                "taking port {wanted} for the ranks' store (MASTER_PORT): {error}; \
                 leave out --master-port to have a free one chosen"
            )
        })?;
        let number = port.number();
        self.ranks.port = Some(port);
        Ok(number)
    }

    /// Creates processes for these ranks, from the template if there is one, and watches them.
    pub(crate) fn make_ranks(
        &mut self,
        attempt: Attempt,
        port: u16,
        which: &[u32],
        ended: &mpsc::UnboundedSender<Ended>,
    ) -> Result<(Vec<RankProcess>, PageTrouble), String> {
        self.listen_to_nvrx(attempt, which);
        let spare = self.not_of_a_lost_rank();
        let warm = self.ranks.warm.start(&self.rank_spec, attempt, port, which, &spare).and_then(|started| {
            match started {
                Ok(started) => Some(started),
                Err(fact) => {
                    self.fact(fact);
                    None
                }
            }
        });
        let (ranks, trouble) =
            warm.map_or_else(|| self.rank_spec.start(attempt, port, which), Ok).map_err(|error| {
                if error.of_kernel().is_some_and(limits::is_exhaustion) {
                    self.note_exhausted(error.to_string());
                }
                error.to_string()
            })?;
        for rank in &ranks {
            if let Some(page) = self.page_reader(rank) {
                self.ranks.pages.insert(rank.rank, page);
            }
            watch(rank, ended.clone());
            if let Some(guardian) = &mut self.ranks.guardian {
                guardian.guard(rank.pid);
            }
            self.output.spoken.watch(&rank.files);
            self.show_output(rank);
        }
        Ok((ranks, trouble))
    }

    /// The helpers, and ranks that live.
    pub(crate) fn not_of_a_lost_rank(&self) -> Vec<Pid> {
        let living = self.ranks.living().map(|rank| rank.pid);
        living.chain(self.helpers()).collect()
    }

    /// Reports that all ranks of an attempt are started.
    pub(crate) fn attempt_started(&mut self, port: u16, page_trouble: PageTrouble) {
        let attempt = self.ranks.attempt;
        self.ranks.round = Round::begin(attempt, self.ranks.processes.iter().map(|rank| rank.rank));
        self.hang.judge.begin_attempt(attempt, clock::mono());
        self.output.spoken.begin_attempt();
        let ranks = self.ranks.processes.iter().map(started_rank).collect();
        // The leader adds the hosts of a job of several.
        self.fact(Fact::AttemptStarted { attempt, master_port: port, ranks, hosts: Vec::new() });
        if let Some(reason) = page_trouble {
            self.fact(Fact::PagesUnavailable { reason });
        }
    }

    /// Creates sockets for ranks that connect to a rank monitor of NVRx. Without them the ranks run all the same.
    fn listen_to_nvrx(&mut self, attempt: Attempt, which: &[u32]) {
        let Some(directory) = &self.rank_spec.page_dir else { return };
        for &local_rank in which {
            // Dropping the old one removes its socket, so it must precede the new one.
            let rank = self.rank_spec.rank(local_rank);
            self.ranks.monitors.remove(&rank);
            match Monitor::listen(directory, &self.rank_spec.page_spec(attempt, local_rank)) {
                Ok(monitor) => {
                    self.ranks.monitors.insert(rank, monitor);
                }
                Err(error) => {
                    tracing::debug!(local_rank, %error, "no socket for NVRx's client");
                }
            }
        }
    }

    fn page_reader(&self, process: &RankProcess) -> Option<PageReader> {
        let (path, file) = process.page.as_ref()?;
        let substitute = self.ranks.monitors.get(&process.rank).map(Monitor::page);
        PageReader::of(file)
            .inspect_err(
                |error| tracing::warn!(path = %path.display(), %error, "cannot read a heartbeat page"),
            )
            .ok()
            .map(|reader| reader.with_substitute(substitute))
    }

    fn show_output(&self, rank: &RankProcess) {
        let (files, shown) = (&rank.files, &self.settings.shown);
        let (stdout, stderr) = shown.of(rank.local_rank);
        let prefix = shown.prefix_of(&self.settings.role, rank.rank.0, rank.local_rank);
        let streams = [
            (stdout, &files.stdout, Stream::Stdout, &shown.duplicate_stdout, "filtered_stdout.log"),
            (stderr, &files.stderr, Stream::Stderr, &shown.duplicate_stderr, "filtered_stderr.log"),
        ];
        for (on_terminal, path, stream, filters, name) in streams {
            // Next to the directories of the ranks: the lines of all ranks are in one file.
            let attempt = path.parent().and_then(Path::parent).filter(|_| !filters.is_empty());
            let duplicate =
                attempt.map(|attempt| Duplicate { path: attempt.join(name), filters: filters.clone() });
            if on_terminal || duplicate.is_some() {
                let (path, prefix) = (path.clone(), prefix.clone());
                self.output.terminal.follow(FollowedFile { path, prefix, stream, on_terminal, duplicate });
            }
        }
    }
}

/// Where what is learned of the job is kept: next to the run directories.
pub(crate) fn memory(settings: &Settings, rank_spec: &RankSpec, spec: &JobSpec) -> Option<Memory> {
    let given = settings.checkpoint_dir.as_ref().map(|directory| directory.display().to_string());
    let log_dir = rank_spec.run_dir.parent().filter(|_| settings.remember)?;
    Some(Memory::of(log_dir, &memory::key(spec, given.as_deref())))
}

/// How many ranks the job had in its last run. Also records the present number for the next run.
pub(crate) fn previous_size(settings: &Settings, rank_spec: &RankSpec, spec: &JobSpec) -> Option<u32> {
    let given = settings.checkpoint_dir.as_ref().map(|directory| directory.display().to_string());
    let log_dir = rank_spec.run_dir.parent().filter(|_| settings.remember)?;
    let memory = Memory::of(log_dir, &memory::key_of_any_size(spec, given.as_deref()));
    let now = Learned { ranks: Some(spec.world_size), ..Learned::default() };
    let exchange = move || {
        let before = memory.read().and_then(|learned| learned.ranks);
        if let Err(error) = memory.write(now) {
            tracing::debug!(%error, "cannot keep how many ranks the job has");
        }
        before
    };
    log_files::ask(exchange).flatten()
}

/// Where Kubernetes mounts the namespace of a pod.
const POD_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The job's entry in the journal at its start.
pub(crate) fn job_spec(settings: &Settings, rank_spec: &RankSpec, policy: policy::Settings) -> JobSpec {
    let text = |path: &PathBuf| path.display().to_string();
    JobSpec {
        command: settings.command.clone(),
        world_size: rank_spec.seat.world_size,
        local_world_size: settings.local_world_size,
        first_rank: Rank(rank_spec.seat.first_rank),
        max_restarts: settings.policy.budget.max_restarts,
        launcher: Pid(i32::try_from(std::process::id()).unwrap_or(0)),
        uid: nix::unistd::getuid().as_raw(),
        run_dir: text(&rank_spec.run_dir),
        // A directory that is gone or does not answer only makes the run harder to find.
        started_in: std::env::current_dir()
            .map_or_else(|_| String::new(), |place| place.display().to_string()),
        run: rank_spec.checkpoint_run().to_owned(),
        checkpoint_dir: text(&rank_spec.checkpoint_dir),
        page_dir: rank_spec.page_dir.as_ref().map(text),
        program: paths::hash_of_program(&settings.command).map(String::into_boxed_str),
        policy: Some(policy),
        earlier: Vec::new(),
        follows: false,
        owner: Box::new(JobOwner::read(
            |name| std::env::var(name).ok(),
            std::fs::read_to_string(POD_NAMESPACE).ok(),
        )),
    }
}

fn started_rank(process: &RankProcess) -> StartedRank {
    StartedRank {
        rank: process.rank,
        local_rank: process.local_rank,
        pid: process.pid,
        page: process.page.as_ref().map(|(path, _)| path.display().to_string()),
        start_ticks: processes::start_ticks(process.pid),
    }
}

/// Reports a rank's end as soon as the kernel does.
fn watch(rank: &RankProcess, ended: mpsc::UnboundedSender<Ended>) {
    let pidfd = rank.pidfd.clone();
    tokio::task::spawn_local(async move {
        if pidfd.ended().await.is_ok() {
            // The receiver goes only when the launcher does.
            let _ = ended.send(Ended { pid: pidfd.pid(), at: clock::mono() });
        }
    });
}
