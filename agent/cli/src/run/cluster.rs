//! The hosts of a job from Slurm, MPI and Kubernetes, if the command line does not name them.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use mainstay_group::cluster_environment::{self, ExplicitOptions, Sourced, Start, Variables};

use super::Args;
use crate::torchrun;

/// What was taken from the environment.
#[derive(Debug, Default)]
pub(super) struct FromEnvironment {
    /// For people: what was taken from where, and what the cluster does with the job.
    pub(super) sources: Vec<String>,
    /// Whether the endpoint is this host, if the environment shows it.
    pub(super) is_endpoint: Option<bool>,
    /// Whether the run id is from the environment, which gives it to one job only.
    pub(super) runs_once: bool,
    /// Whether srun started all hosts, with one command line, and they meet where Slurm's variables say.
    pub(super) is_step: bool,
    /// Whether this host has the program `etcd`.
    pub(super) has_etcd: bool,
    /// The name under which the hosts find each other in the checkpoint directory, if nothing else tells them where to
    /// meet. The endpoint is then the one that this host would have.
    pub(super) meets_as: Option<String>,
}

/// What a step of Slurm cannot know about itself.
const MAY_END: &str = "Slurm ends this job when it has lost a host, unless srun, and sbatch or salloc, had --no-kill, which \
                       a launcher cannot see (`export SLURM_NO_KILL=set` in place of srun --no-kill can be seen)";

/// The environment of this process.
pub(super) fn variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// The name by which the cluster's other hosts reach this one, if a file of the host contains it.
pub(super) fn full_name() -> Option<String> {
    let host = nix::unistd::gethostname().ok()?;
    let file = std::fs::read_to_string("/etc/hosts").ok()?;
    cluster_environment::full_name(&file, host.to_str()?)
}

/// Adds the hosts of the job from the environment to the options.
///
/// # Errors
/// The environment contradicts the options or itself, or it is incomplete.
pub(super) fn add(
    args: &mut Args,
    variables: &Variables,
    full_name: Option<&str>,
) -> anyhow::Result<FromEnvironment> {
    if args.standalone {
        return Ok(FromEnvironment::default());
    }
    let hosts = args.nnodes.as_deref().map(torchrun::nodes).transpose();
    let given = ExplicitOptions {
        hosts: hosts.map_err(|error| anyhow::anyhow!("--nnodes: {error}"))?,
        node_rank: args.node_rank,
        // No cluster's environment contains the address of etcd.
        has_address: args.rdzv_endpoint.is_some()
            || args.master_addr.is_some()
            || args.rdzv_backend.as_deref().is_some_and(|backend| backend.starts_with("etcd")),
        is_numbered: match args.rdzv_backend.as_deref() {
            Some(backend) => Some(backend == "static"),
            None if args.rdzv_endpoint.is_some() => Some(args.node_rank.is_some()),
            None => args.master_addr.as_ref().map(|_| true),
        },
        ranks: args.nproc_per_node.parse().ok(),
        has_etcd: etcd(variables.get("PATH").map_or("", String::as_str).as_ref()).is_some(),
    };
    let start = cluster_environment::start(variables, full_name, &given)?;
    let may_end = cluster_environment::may_end_with_a_host(variables).then(|| MAY_END.to_owned());
    let sources = describe_sources(args, &start, variables).into_iter().chain(may_end).collect();
    let is_endpoint = start.is_endpoint;
    let meets_as = start.meets.as_ref().and(start.run_id.as_ref()).map(|name| name.value.clone());
    let is_of_slurm = |id: &Sourced<String>| id.from == cluster_environment::JOB_OF_SLURM;
    let is_step = start.endpoint.is_some() && start.run_id.as_ref().is_some_and(is_of_slurm);
    let runs_once = start.runs_once && args.rdzv_id.is_none();
    fill(args, start, given.is_numbered);
    Ok(FromEnvironment { sources, is_endpoint, runs_once, is_step, has_etcd: given.has_etcd, meets_as })
}

fn fill(args: &mut Args, start: Start, is_numbered: Option<bool>) {
    let numbered = start.node_rank.is_some() || args.node_rank.is_some() || is_numbered == Some(true);
    let at = endpoints(&start, args.master_port);
    if let Some((address, port)) = &start.meets {
        args.rdzv_backend.get_or_insert_with(|| "c10d".to_owned());
        args.rdzv_endpoint = Some(authority(address, Some(args.master_port.unwrap_or(*port))));
    }
    if let Some(hosts) = start.hosts {
        args.nnodes = Some(hosts.value.to_string());
    }
    if let Some(node_rank) = start.node_rank {
        args.node_rank = Some(node_rank.value);
    }
    if let Some(Sourced { value: (address, port), .. }) = start.endpoint {
        if numbered && start.more_endpoints.is_empty() {
            args.master_addr = Some(address);
            args.master_port = args.master_port.or(port);
        } else {
            args.rdzv_endpoint = at;
        }
        if !numbered {
            args.rdzv_backend.get_or_insert_with(|| "c10d".to_owned());
        }
    }
    if let Some(run_id) = start.run_id {
        args.rdzv_id.get_or_insert(run_id.value);
    }
}

/// Where the hosts meet, as `--rdzv-endpoint` has it.
fn endpoints(start: &Start, given_port: Option<u16>) -> Option<String> {
    let (address, port) = &start.endpoint.as_ref()?.value;
    let all = std::iter::once(address).chain(&start.more_endpoints);
    let all: Vec<String> = all.map(|address| authority(address, given_port.or(*port))).collect();
    Some(all.join(","))
}

/// The program with which launchers keep a store on several hosts, if it is in these directories of `PATH`.
pub(crate) fn etcd(path: &OsStr) -> Option<PathBuf> {
    let mut programs = std::env::split_paths(path).map(|directory| directory.join("etcd"));
    programs.find(|program| {
        let found = std::fs::metadata(program);
        found.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    })
}

fn authority(address: &str, port: Option<u16>) -> String {
    let address = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    port.map_or(address.clone(), |port| format!("{address}:{port}"))
}

/// What was taken from where, in one line; includes values from torchrun's own variables.
fn describe_sources(args: &Args, start: &Start, variables: &Variables) -> Option<String> {
    if start.hint.is_some() {
        return start.hint.clone();
    }
    let own = |name: &str, option: &Option<String>, what: &str| {
        let set = variables.get(name).zip(option.as_ref()).filter(|(set, option)| set == option);
        set.map(|(set, _)| format!("{what}{set} ({name})"))
    };
    let (node_rank, port) =
        (args.node_rank.map(|rank| rank.to_string()), args.master_port.map(|port| port.to_string()));
    let taken: Vec<String> = [
        start.hosts.as_ref().map(|hosts| format!("hosts {} ({})", hosts.value, hosts.from)),
        own("PET_NNODES", &args.nnodes, "hosts "),
        start.node_rank.as_ref().map(|rank| format!("node rank {} ({})", rank.value, rank.from)),
        own("PET_NODE_RANK", &node_rank, "node rank "),
        start.endpoint.as_ref().zip(endpoints(start, args.master_port)).map(|(found, at)| {
            let etcd = if start.more_endpoints.is_empty() { "" } else { "; etcd is on PATH" };
            format!("endpoint {at} ({}{etcd})", found.from)
        }),
        own("PET_RDZV_ENDPOINT", &args.rdzv_endpoint, "endpoint "),
        own("PET_MASTER_ADDR", &args.master_addr, "address "),
        own("PET_MASTER_PORT", &port, "port "),
        start
            .run_id
            .as_ref()
            .filter(|_| args.rdzv_id.is_none())
            .map(|id| format!("run id {} ({})", id.value, id.from)),
        own("PET_RDZV_ID", &args.rdzv_id, "run id "),
    ]
    .into_iter()
    .flatten()
    .collect();
    (!taken.is_empty()).then(|| format!("from the environment: {}", taken.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    const STEP: [(&str, &str); 7] = [
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_NODEID", "1"),
        ("SLURM_PROCID", "1"),
        ("SLURM_STEP_NODELIST", "gpu[1-2]"),
    ];

    fn added(line: &str, variables: &[(&str, &str)]) -> (Args, FromEnvironment) {
        let line = std::iter::once("run").chain(line.split_whitespace()).chain(["/bin/sh"]);
        let mut args = Line::try_parse_from(line).expect("options").args;
        let variables =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let from = add(&mut args, &variables, None).expect("a start");
        (args, from)
    }

    #[test]
    fn a_step_of_slurm_numbers_its_hosts_and_names_the_source() {
        let (args, from) = added("", &STEP);
        assert_eq!((args.nnodes.as_deref(), args.node_rank), (Some("2"), Some(1)));
        assert_eq!((args.master_addr.as_deref(), args.master_port), (Some("gpu1"), Some(16_243)));
        assert_eq!(
            from.sources[0],
            "from the environment: hosts 2 (SLURM_STEP_NUM_NODES), node rank 1 (SLURM_NODEID), \
             endpoint gpu1:16243 (SLURM_STEP_NODELIST), run id slurm-4711.0 (SLURM_JOB_ID)"
        );
    }

    #[test]
    fn explicit_options_take_precedence() {
        let (args, from) = added("--standalone", &STEP);
        assert!(args.nnodes.is_none() && from.sources.is_empty());
        let (args, _) = added("--master-addr a --master-port 7 --rdzv-id mine", &STEP);
        assert_eq!((args.nnodes.as_deref(), args.node_rank), (Some("2"), Some(1)));
        assert_eq!((args.master_addr.as_deref(), args.master_port), (Some("a"), Some(7)));
        assert_eq!(args.rdzv_id.as_deref(), Some("mine"));
        let (args, _) = added("--rdzv-endpoint a:7", &STEP);
        assert_eq!(
            (args.rdzv_endpoint.as_deref(), args.node_rank),
            (Some("a:7"), None),
            "c10d numbers nobody"
        );
    }

    #[test]
    fn hosts_that_srun_started_have_one_command_line_unless_they_meet_elsewhere() {
        assert!(added("", &STEP).1.is_step);
        assert!(added("--nnodes 1:2 --rdzv-id mine", &STEP).1.is_step);
        // Launchers that other steps started may come there, too.
        assert!(!added("--rdzv-endpoint a:7", &STEP).1.is_step);
        assert!(!added("--nnodes 1", &STEP).1.is_step);
        assert!(!added("--nnodes 2 --rdzv-endpoint a:7", &[]).1.is_step);
    }

    #[test]
    fn a_range_of_hosts_meets_at_the_first() {
        let (args, from) = added("--nnodes 1:2", &STEP);
        assert_eq!(
            (args.rdzv_backend.as_deref(), args.rdzv_endpoint.as_deref()),
            (Some("c10d"), Some("gpu1:16243"))
        );
        assert_eq!((args.node_rank, from.is_endpoint), (None, Some(false)));
    }

    #[test]
    fn where_etcd_is_installed_three_hosts_keep_the_store() {
        let directory = testing::tempdir().expect("a directory");
        let etcd = directory.path().join("etcd");
        std::fs::write(&etcd, "").expect("a file");
        let path = directory.path().display().to_string();
        let mut step = STEP.to_vec();
        step.retain(|(name, _)| {
            !["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"].contains(name)
        });
        step.extend([
            ("SLURM_STEP_NUM_NODES", "4"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_NODELIST", "gpu[1-4]"),
            ("PATH", path.as_str()),
        ]);
        let (args, _) = added("", &step);
        assert_eq!((args.master_addr.as_deref(), args.rdzv_endpoint), (Some("gpu1"), None), "no program");
        std::fs::set_permissions(&etcd, std::fs::Permissions::from_mode(0o755)).expect("our own file");
        let three = Some("gpu1:17486,gpu2:17486,gpu3:17486");
        let (args, from) = added("", &step);
        assert_eq!((args.rdzv_endpoint.as_deref(), args.node_rank, args.master_addr), (three, Some(1), None));
        assert_eq!(from.is_endpoint, None);
        let (args, _) = added("--nnodes 3", &step);
        assert_eq!((args.rdzv_endpoint.as_deref(), args.node_rank), (three, None), "the fourth is a spare");
        assert_eq!(args.rdzv_backend.as_deref(), Some("c10d"));
        // Where fewer hosts could start the job, hosts with and without etcd might each do so.
        let (args, _) = added("--nnodes 2:4", &step);
        assert_eq!(args.rdzv_endpoint.as_deref(), Some("gpu1:16243"));
        let (args, _) = added("--rdzv-backend static", &step);
        assert_eq!((args.master_addr.as_deref(), args.rdzv_endpoint), (Some("gpu1"), None));
    }

    #[test]
    fn values_from_torchruns_variables_are_reported() {
        // The options are what the parser reads from these variables.
        let pod =
            [("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "a"), ("PET_MASTER_PORT", "7")];
        let (_, from) = added("--nnodes 2 --node-rank 1 --master-addr a --master-port 7", &pod);
        assert_eq!(
            from.sources,
            [
                "from the environment: hosts 2 (PET_NNODES), node rank 1 (PET_NODE_RANK), address a (PET_MASTER_ADDR), \
                 port 7 (PET_MASTER_PORT)"
            ]
        );
    }
}
