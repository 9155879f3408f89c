//! A launcher before its first turn: its resources and state when its job starts.

use std::collections::VecDeque;
use std::path::PathBuf;

use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_model::entry::{JobOwner, JobSpec};
use mainstay_model::id::{Pid, Rank};
use mainstay_progress::memory::{self, JobMemory};
use mainstay_recovery::job::Job;
use mainstay_recovery::policy;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::clock;
use mainstay_tier::pool::PoolOwner;

use crate::agent_link::AgentLink;
use crate::checkpoints::Checkpoints;
use crate::checkpoints::replicas::Replicas;
use crate::checkpoints::sealing::Sealing;
use crate::drill::Drill;
use crate::group::Group;
use crate::group::rendezvous::JoinOutcome;
use crate::hang::Hang;
use crate::journal::Journal;
use crate::log_mirror::LogMirror;
use crate::output::{Output, Terminal};
use crate::policy::Policy;
use crate::ranks::guardian::Guardian;
use crate::ranks::warm::Warm;
use crate::ranks::{RankSpec, Ranks, Stopping};
use crate::roles::RoleReport;
use crate::run::Launcher;
use crate::settings::Settings;
use crate::{log_files, paths};

/// What exists in addition to the ranks for as long as the job runs.
#[derive(Default)]
pub struct JobResources {
    /// Ends the ranks if the launcher is killed.
    pub guardian: Option<Guardian>,
    /// Keeps the ranks' checkpoints in memory.
    pub pool_owner: Option<PoolOwner>,
    /// The ranks' control group.
    pub cgroup: Option<Cgroup>,
    /// The other hosts of the job, if there are any.
    pub together: Option<JoinOutcome>,
    /// The trainer's own checkpoints, if they are watched.
    pub sealing: Option<Sealing>,
    /// Copies of checkpoints on the job's other hosts, if there are any.
    pub replicas: Option<Replicas>,
    /// Copies the logs, if they are written elsewhere than where people find them.
    pub mirror: Option<LogMirror>,
}

impl Launcher {
    /// Starts the job: records it and takes the order for the first start.
    pub fn begin(
        settings: Settings,
        mut rank_spec: RankSpec,
        snapshots: StateWriter,
        beside: JobResources,
        terminal: Terminal,
        warm: Warm,
    ) -> Launcher {
        let JobResources { guardian, pool_owner, cgroup, together, sealing, replicas, mirror } = beside;
        let mut out = Vec::new();
        let began = clock::mono();
        let job_policy = settings.policy_of_job(&rank_spec.job);
        let mut spec = job_spec(&settings, &rank_spec, job_policy.clone());
        let memory = kept(&settings, &rank_spec, |given| memory::key(&spec, given));
        let read = memory.clone().and_then(|memory| log_files::ask(move || memory.read()).flatten());
        let learned = read.unwrap_or_default();
        spec.earlier.clone_from(&learned.rungs);
        rank_spec.previous_size = previous_size(&settings, &rank_spec, &spec);
        let (first, count) = (Rank(rank_spec.seat.first_rank), settings.ranks.local_world_size as usize);
        let mut hang = Hang::new(&settings.hang, first, count, began);
        hang.recall(&learned);
        let mut policy = None;
        let group = match together {
            Some(JoinOutcome::Following(followed, remote)) => Group::follows(*followed, *remote, spec),
            together => {
                let mut job = Job::begin(began, spec, job_policy, &mut out);
                policy = Policy::for_job(&settings, &rank_spec);
                policy.iter().for_each(|policy| job.advised_by(policy.name()));
                job.recall(&learned);
                match together {
                    Some(JoinOutcome::Leading(gathered, remote)) => {
                        let names = (rank_spec.job.clone(), rank_spec.launch.clone());
                        Group::leads(job, *gathered, *remote, names)
                    }
                    _ => Group::alone(job, &rank_spec),
                }
            }
        };
        group.judge_hangs_with(&mut hang, began);
        let memory = memory.map(|memory| (written_at(&memory, &rank_spec), learned));
        let journal = Journal::new(&rank_spec, snapshots, memory);
        let stopping = Stopping::new(settings.grace, settings.save_signal);
        let mut launcher = Launcher {
            group,
            tasks: VecDeque::new(),
            ranks: Ranks::new(rank_spec, warm, stopping, (guardian, cgroup, mirror), settings.allow_inject),
            hang,
            checkpoints: Checkpoints::new(pool_owner, replicas, sealing),
            journal,
            output: Output::new(terminal, settings.shown.clone(), settings.ranks.role.clone()),
            agent: AgentLink::default(),
            drill: Drill::new(settings.allow_inject, settings.gpu_library.clone()),
            policy,
            role: settings
                .roles
                .as_deref()
                .and_then(|directory| RoleReport::new(directory, &settings.ranks.role)),
            looks: 0,
            wake_at: None,
            exit: None,
            settings,
        };
        launcher.group.begin(began, out);
        launcher.poll_group(began);
        launcher.begin_to_wait();
        launcher
    }
}

/// Where what is learned of the job is kept, by a key: next to the run directories.
fn kept(settings: &Settings, rank_spec: &RankSpec, key: impl Fn(Option<&str>) -> String) -> Option<Memory> {
    let given = settings.checkpoint_dir.as_ref().map(|directory| directory.display().to_string());
    let log_dir = rank_spec.published_dir.parent().filter(|_| settings.remember)?;
    Some(Memory::open(log_dir, &key(given.as_deref())))
}

/// It is copied with the logs, if these are.
fn written_at(memory: &Memory, rank_spec: &RankSpec) -> Memory {
    rank_spec.run_dir.parent().map_or_else(|| memory.clone(), |log_dir| memory.moved_to(log_dir))
}

/// How many ranks the job had in its last run. Also records the present number for the next run.
fn previous_size(settings: &Settings, rank_spec: &RankSpec, spec: &JobSpec) -> Option<u32> {
    let memory = kept(settings, rank_spec, |given| memory::key_of_any_size(spec, given))?;
    let now = JobMemory { ranks: Some(spec.world_size), ..JobMemory::default() };
    let next = written_at(&memory, rank_spec);
    let exchange = move || {
        let before = memory.read().and_then(|learned| learned.ranks);
        if let Err(error) = next.write(now) {
            tracing::debug!(%error, "cannot keep how many ranks the job has");
        }
        before
    };
    log_files::ask(exchange).flatten()
}

/// Where Kubernetes mounts the namespace of a pod.
const POD_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The job's entry in the journal at its start.
fn job_spec(settings: &Settings, rank_spec: &RankSpec, policy: policy::Settings) -> JobSpec {
    let text = |path: &PathBuf| path.display().to_string();
    JobSpec {
        command: settings.ranks.command.clone(),
        world_size: rank_spec.seat.world_size,
        local_world_size: settings.ranks.local_world_size,
        first_rank: Rank(rank_spec.seat.first_rank),
        max_restarts: settings.policy.budget.max_restarts,
        launcher: Pid(i32::try_from(std::process::id()).unwrap_or(0)),
        uid: nix::unistd::getuid().as_raw(),
        run_dir: text(&rank_spec.published_dir),
        // A directory that is gone or does not answer only makes the run harder to find.
        started_in: std::env::current_dir()
            .map_or_else(|_| String::new(), |place| place.display().to_string()),
        run: rank_spec.checkpoint_run().to_owned(),
        checkpoint_dir: text(&rank_spec.checkpoint_dir),
        page_dir: rank_spec.page_dir.as_ref().map(text),
        program: paths::hash_of_program(&settings.ranks.command).map(String::into_boxed_str),
        policy: Some(policy),
        earlier: Vec::new(),
        follows: false,
        owner: Box::new(JobOwner::read(
            |name| std::env::var(name).ok(),
            std::fs::read_to_string(POD_NAMESPACE).ok(),
        )),
    }
}
