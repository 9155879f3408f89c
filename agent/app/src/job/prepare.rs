//! What a launcher prepares before ranks run: its place among the hosts, memory for checkpoints, a guardian.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use mainstay_group::wire::{Join, PROTOCOL};
use mainstay_tier::disk::Keep;
use mainstay_tier::pool::{self, PoolOwner};
use tokio::sync::mpsc;

use mainstay_launcher::Settings;
use mainstay_launcher::agent_link::implicated::implicated;
use mainstay_launcher::group::plan::HostsPlan;
use mainstay_launcher::group::rendezvous::{self, JoinOutcome};
use mainstay_launcher::group::streams::api::ApiLinks;
use mainstay_launcher::output::Terminal;
use mainstay_launcher::paths::{self, LaunchPaths};
use mainstay_launcher::ranks::RankSpec;
use mainstay_launcher::ranks::guardian::Guardian;
use mainstay_recovery::protocol::Seat;
use mainstay_sys::cgroup::Cgroup;
use mainstay_sys::clock;
use mainstay_sys::private_directory::private_directory;

/// Files that a launcher has open in addition to connections to other launchers: output, pages, pools, looks at
/// others.
const FILES_APART_FROM_HOSTS: u64 = 512;

/// A unique name of this launch. Agents on other hosts find the steps by the part before the `@`. The process id
/// alone is not unique: it may be the same in each container.
pub(super) fn launch(run: &str) -> String {
    format!("{run}@{}.{:x}", std::process::id(), clock::now().wall.0)
}

/// Each of the other hosts has a connection to the leading launcher, and any launcher may become the leader.
pub(super) fn warn_if_files_are_few(limit: Option<u64>, hosts: u32, print: &impl Fn(String)) {
    let needed = u64::from(hosts) + FILES_APART_FROM_HOSTS;
    if let Some(limit) = limit.filter(|limit| *limit < needed) {
        print(format!(
            "{limit} files can be open here, and a launcher that leads {hosts} hosts needs {needed}: raise the hard \
             limit (ulimit -Hn, LimitNOFILE=)"
        ));
    }
}

/// A unique name of this launcher, with characters that are valid in keys of the coordination store.
fn launcher_name(host: &str) -> String {
    let fits = |letter: char| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '-' };
    let host: String = host.chars().take(64).map(fits).collect();
    format!("{host}_{}_{:x}", std::process::id(), clock::now().wall.0)
}

/// The settings with which the ranks of a job of one host are started.
///
/// # Errors
/// The current directory cannot be read.
pub(super) fn rank_spec(settings: &Settings, launch_paths: &LaunchPaths) -> anyhow::Result<RankSpec> {
    let checkpoint_dir = match &settings.checkpoint_dir {
        Some(directory) => std::path::absolute(directory)
            .with_context(|| format!("--checkpoint-dir {}", directory.display()))?,
        None => launch_paths.published_dir.join("checkpoints"),
    };
    Ok(RankSpec {
        job: launch_paths.job.clone(),
        settings: settings.ranks.clone(),
        launch: launch(&settings.ranks.run_id),
        launcher: None,
        seat: Seat {
            group_rank: 0,
            group_world_size: 1,
            first_rank: 0,
            world_size: settings.ranks.local_world_size,
        },
        previous_size: None,
        ran_before: None,
        master_addr: settings.master_addr.clone(),
        max_restarts: settings.policy.budget.max_restarts,
        run_dir: launch_paths.run_dir.clone(),
        published_dir: launch_paths.published_dir.clone(),
        logs_aside: None,
        checkpoint_dir,
        checkpoint_pool: None,
        resume: BTreeMap::new(),
        page_dir: launch_paths.runtime_dir.as_ref().ok().map(|runtime| runtime.path.clone()),
        boot_id: clock::boot_id_bytes(),
        cgroup_procs: None,
        modules_file: None,
        devices: None,
    })
}

/// Waits for the other hosts, and assigns this host its place among them.
pub(super) async fn come_together(
    hosts: HostsPlan,
    mut rank_spec: RankSpec,
    settings: &Settings,
    (replicas_port, api, sockets): (Option<u16>, ApiLinks, &[PathBuf]),
    signals: &mut mpsc::Receiver<i32>,
    terminal: &Terminal,
) -> anyhow::Result<(RankSpec, JoinOutcome)> {
    let host = nix::unistd::gethostname().context("reading the host's name")?;
    let (command, script) = paths::identity_of_program(&settings.ranks.command);
    let join = Join {
        command,
        script,
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        run_id: settings.ranks.run_id.clone(),
        launcher: launcher_name(&host.to_string_lossy()),
        host: host.to_string_lossy().into_owned(),
        address: hosts.local_addr.clone().unwrap_or_default(),
        node_rank: hosts.node_rank,
        ranks: settings.ranks.local_world_size,
        hosts: hosts.hosts,
        program: paths::hash_of_program(&settings.ranks.command),
        // The address is known once the meeting place is known.
        replicas: replicas_port.map_or_else(String::new, |port| format!(":{port}")),
        domain: hosts.fails_together(),
        moves: true,
        // Without memory there is no use in joining early.
        prepares: replicas_port.is_some(),
        listens: String::new(),
        implicated: implicated(sockets).await,
        have: (0, 0),
        have_of: String::new(),
    };
    rank_spec.launcher = Some(rank_spec.launch.clone());
    if settings.checkpoint_dir.is_none() && replicas_port.is_none() {
        terminal.print(
            "without memory for checkpoints, mainstay.checkpoint needs a directory that all hosts share: name one with \
             --checkpoint-dir. Without it, no step is whole on any host, and ranks start from their own checkpoints or from step 0"
                .to_owned(),
        );
    }
    let print = |text: String| terminal.print(text);
    let names = (rank_spec.job.clone(), rank_spec.launch.clone());
    let together = rendezvous::gather(hosts, join, names, &rank_spec.run_dir, signals, api, &print).await?;
    if let Some(seat) = together.seat() {
        rank_spec.seat = seat.clone();
    }
    if let Some(seat) = together.seat().filter(|_| !together.waits()) {
        let last = seat.first_rank + settings.ranks.local_world_size.saturating_sub(1);
        terminal.print(format!(
            "all hosts are there: this is node rank {} of {}, with ranks {} to {last} of {}",
            seat.group_rank, seat.group_world_size, seat.first_rank, seat.world_size
        ));
    }
    if let JoinOutcome::Following(followed, _) = &together {
        (rank_spec.job, rank_spec.launch) = (followed.job.clone(), followed.launch.clone());
    }
    Ok((rank_spec, together))
}

/// Memory for checkpoints; without it the ranks write to the disk themselves.
pub(super) async fn start_pool_owner(
    settings: &Settings,
    runtime_root: &Path,
    rank_spec: &RankSpec,
    terminal: &Terminal,
) -> Option<PoolOwner> {
    let wanted = &settings.checkpoints;
    if !wanted.in_memory {
        return None;
    }
    // If the pages have no place, perhaps because others could write there, nothing that a job resumes from is
    // placed there.
    if rank_spec.page_dir.is_none() {
        terminal.print(
            "no memory for checkpoints without it; ranks write them to the disk themselves".to_owned(),
        );
        return None;
    }
    let root = runtime_root.join("pools");
    let settings = pool::Settings {
        root: root.clone(),
        directory: rank_spec.checkpoint_dir.clone(),
        job: rank_spec.job.clone(),
        run: rank_spec.launch.clone(),
        world_size: rank_spec.seat.world_size,
        ranks: rank_spec.own_ranks(),
        keep: Keep { steps: wanted.keep, bytes: wanted.quota },
        // On several hosts one more: a step stays until each of its shards has a copy on another host.
        slots: wanted.slots + usize::from(rank_spec.seat.group_world_size > 1),
        memory: wanted.memory,
        rate: wanted.bandwidth,
    };
    let place = root.clone();
    let start = move || {
        private_directory(&place)
            .map_err(|error| format!("{}: {error}", place.display()))
            .and_then(|()| PoolOwner::start(settings).map_err(|error| error.to_string()))
    };
    let started = tokio::task::spawn_blocking(start).await.unwrap_or_else(|error| Err(error.to_string()));
    // Pools of killed launchers are unused memory. Recovering them may take long, so it does not delay this job.
    let _ = std::thread::Builder::new().name("ckpt-left".to_owned()).spawn(move || {
        for line in pool::recover_all(&root).iter().flat_map(pool::Recovered::lines) {
            tracing::warn!("{line}");
        }
    });
    match started {
        Ok(pool_owner) => Some(pool_owner),
        Err(error) => {
            terminal.print(format!(
                "no memory for checkpoints: {error}; ranks write them to the disk themselves"
            ));
            None
        }
    }
}

/// Without a guardian the ranks still die with the launcher; only processes that they started may survive.
pub(super) fn start_guardian(mark: &str, cgroup: Option<&Cgroup>, pool: Option<&Path>) -> Option<Guardian> {
    let program = Path::new("/proc/self/exe");
    // By the launch, which is unique, and not by the job: another launcher may run with the same id.
    Guardian::start(program, mark, cgroup.map(Cgroup::path), pool)
        .inspect_err(|error| tracing::warn!(%error, "running without a guardian"))
        .ok()
}
