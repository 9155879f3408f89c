//! A launcher before its first turn: its resources and state when its job starts.

use std::collections::{BTreeMap, VecDeque};

use mainstay_model::id::{Attempt, JobId, Rank};
use mainstay_recovery::in_process::Round;
use mainstay_recovery::job::Job;
use mainstay_tier::pool::PoolOwner;
use tokio::sync::mpsc;

use crate::agent_link::AgentLink;
use crate::checkpoints::Checkpoints;
use crate::checkpoints::replicas::Replicas;
use crate::checkpoints::sealing::Sealing;
use crate::drill::Drill;
use crate::group::Group;
use crate::group::rendezvous::JoinOutcome;
use crate::hang::Hang;
use crate::hang::Judge;
use crate::journal::Journal;
use crate::log_files;
use crate::output::Output;
use crate::output::Terminal;
use crate::output::rank_output::RankOutput;
use crate::policy::in_job;
use crate::ranks::guardian::Guardian;
use crate::ranks::round_server::RoundServer;
use crate::ranks::spec::RankSpec;
use crate::ranks::start::{job_spec, memory, previous_size};
use crate::ranks::warm::Warm;
use crate::ranks::{Ranks, Stopping};
use crate::run::Launcher;
use crate::settings::Settings;
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_sensors::source::host::Roots;
use mainstay_sensors::source::oom::OomKills;
use mainstay_sensors::source::process_limit::ProcessLimits;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::clock;
use mainstay_sys::inotify::Watcher;

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
        let JobResources { guardian, pool_owner, cgroup, together, sealing, replicas } = beside;
        let mut out = Vec::new();
        let began = clock::mono();
        let policy = settings.policy_of_job(&rank_spec.job);
        let mut spec = job_spec(&settings, &rank_spec, policy.clone());
        let memory = memory(&settings, &rank_spec, &spec);
        let read = memory.clone().and_then(|memory: Memory| log_files::ask(move || memory.read()).flatten());
        let learned = read.unwrap_or_default();
        spec.earlier.clone_from(&learned.rungs);
        rank_spec.previous_size = previous_size(&settings, &rank_spec, &spec);
        let watcher = rank_spec.page_dir.as_ref().and_then(|directory| {
            let watcher = Watcher::new().and_then(|watcher| watcher.watch(directory).map(|_| watcher));
            watcher
                .map_err(|error| {
                    tracing::warn!(%error, "cannot watch the heartbeat pages' directory; looking regularly instead");
                })
                .ok()
        });
        let round_server = rank_spec.page_dir.as_ref().and_then(|directory| {
            RoundServer::open(directory)
                .inspect_err(|error| {
                    let place = directory.display();
                    tracing::warn!(
                        "restart in process is not available: creating a socket in {place}: {error}"
                    );
                })
                .ok()
        });
        let drill = rank_spec.page_dir.as_ref().filter(|_| settings.allow_inject).and_then(|directory| {
            RoundServer::open_for_drills(directory)
                .inspect_err(|error| {
                    let place = directory.display();
                    tracing::warn!("only signals can be injected: creating a socket in {place}: {error}");
                })
                .ok()
        });
        let first = Rank(rank_spec.seat.first_rank);
        let mut hangs = Judge::new(&settings.hang, first, settings.local_world_size as usize, began);
        hangs.recall(&learned);
        let mut user_policy = None;
        let group = match together {
            Some(JoinOutcome::Following(followed)) => Group::follows(*followed, spec),
            together => {
                let mut job = Job::begin(began, spec, policy, &mut out);
                user_policy = in_job::start(&settings, &rank_spec);
                user_policy.iter().for_each(|policy| job.advised_by(policy.name()));
                job.recall(&learned);
                match together {
                    Some(JoinOutcome::Leading(gathered)) => {
                        let names = (rank_spec.job.clone(), rank_spec.launch.clone());
                        Group::leads(job, *gathered, names)
                    }
                    _ => Group::alone(job, &rank_spec),
                }
            }
        };
        group.judge_hangs_with(&mut hangs, began);
        let roots = Roots::default();
        let ranks = Ranks {
            attempt: Attempt(0),
            processes: Vec::new(),
            pages: BTreeMap::new(),
            watcher,
            endings: mpsc::unbounded_channel(),
            monitors: BTreeMap::new(),
            guardian,
            cgroup,
            warm,
            round_server,
            round: Round::default(),
            port: None,
            undying: Vec::new(),
            oom_kills: OomKills::of(roots.proc.clone(), &roots.sys),
            limits: ProcessLimits::of(&roots.proc, &roots.sys),
        };
        let memory = memory.map(|memory| (memory, learned.runs));
        let mut launcher = Launcher {
            id: JobId(rank_spec.job.clone()),
            settings,
            rank_spec,
            group,
            tasks: VecDeque::new(),
            ranks,
            stopping: Stopping::default(),
            hang: Hang { judge: hangs, evidence: None },
            checkpoints: Checkpoints {
                pool_owner,
                replicas,
                sealing,
                starting: None,
                moving: None,
                silence_reported: None,
            },
            journal: Journal { snapshots, memory, shown: None, outcome_shown: None },
            output: Output { terminal, spoken: RankOutput::start() },
            agent: AgentLink::default(),
            drill: Drill { server: drill, due: Vec::new() },
            looks: 0,
            wake_at: None,
            exit: None,
            policy: user_policy,
        };
        if let Some(lead) = launcher.group.lead_mut() {
            lead.begin_with(began, out);
        }
        launcher.poll_group(began);
        launcher.begin_to_wait();
        launcher
    }
}
