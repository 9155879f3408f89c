//! Slurm: a task of a step that `srun` started.

use super::{Refused, Source, Sourced, Variables, first_number, number, port_of, port_of_etcd, text};
use mainstay_health::parse::hostlist;

/// Slurm numbers everything that is not a step of `srun` (batch script, interactive and external step) from here up.
const RESERVED_STEPS: u32 = 0xffff_fff0;

/// The job that the step belongs to.
pub const JOB_OF_SLURM: &str = "SLURM_JOB_ID";

const NODES: [&str; 2] = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];

/// This process as a task of a step. `None` if it is not one.
pub(super) fn step(variables: &Variables) -> Result<Option<Source>, Refused> {
    let step = first_number(variables, &["SLURM_STEP_ID", "SLURM_STEPID"])?;
    let Some(step) = step.filter(|step| step.value < RESERVED_STEPS) else { return Ok(None) };
    let Some(task) = number::<u32>(variables, "SLURM_PROCID")? else { return Ok(None) };
    let hosts = first_number(variables, &NODES)?.ok_or_else(|| {
        Refused(format!(
            "SLURM_STEP_NUM_NODES is not set, but {} is: start with srun, which sets both, or use --standalone",
            step.from
        ))
    })?;
    let tasks = first_number(variables, &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    let crowded = tasks.filter(|tasks| tasks.value != hosts.value).map(|tasks| {
        format!(
            "{}={} on {} hosts ({}): `mainstay run` starts the ranks of a host itself; use `srun --ntasks-per-node=1` \
             and --nproc-per-node, or --standalone if each task is a job of its own",
            tasks.from, tasks.value, hosts.value, hosts.from
        )
    });
    let crowded = crowded.or_else(|| {
        let components = text(variables, "SLURM_HET_SIZE").filter(|size| *size != "1")?;
        Some(format!(
            "SLURM_HET_SIZE={components}: the hosts of a heterogeneous job are not read; give --nnodes, --node-rank \
             and --master-addr"
        ))
    });
    let node_rank = match number(variables, "SLURM_NODEID")? {
        Some(node) => Sourced::new(node, "SLURM_NODEID"),
        None => Sourced::new(task, "SLURM_PROCID"),
    };
    let job: Option<u64> = number(variables, JOB_OF_SLURM)?;
    let number_of_step = job.map(|job| job.wrapping_mul(13).wrapping_add(step.value.into()));
    let names = names_of_hosts(variables, &hosts);
    let store = match (&names, number_of_step) {
        (Ok(Sourced { value: names, .. }), Some(number)) => match &names[..] {
            [_, second, third, ..] => Some(([second.clone(), third.clone()], port_of_etcd(number))),
            _ => None,
        },
        _ => None,
    };
    let first = |Sourced { value: names, from }: Sourced<Vec<String>>| {
        let first = names.into_iter().next().ok_or("SLURM_STEP_NODELIST is empty: give --master-addr")?;
        Ok(Sourced::new(first, from))
    };
    Ok(Some(Source {
        address: names.and_then(first),
        port: number_of_step.map(port_of),
        run_id: job.map(|job| Sourced::new(format!("slurm-{job}.{}", step.value), JOB_OF_SLURM)),
        hosts: Some(hosts),
        node_rank,
        crowded,
        counts_hosts: true,
        store,
    }))
}

/// The run id of a job whose hosts are the tasks of an array. Slurm starts a lost task again under the same id, and
/// gives it to no other array.
pub(super) fn array(variables: &Variables) -> Option<Sourced<String>> {
    const ARRAY: &str = "SLURM_ARRAY_JOB_ID";
    let job = text(variables, ARRAY).filter(|job| job.bytes().all(|byte| byte.is_ascii_digit()))?;
    Some(Sourced::new(format!("slurm-{job}"), ARRAY))
}

/// Whether Slurm may end this step of several hosts when it has lost one of them. A step does not see `--no-kill`, only the
/// variable that does the same. For the first host, so that one terminal shows it.
pub fn may_end_with_a_host(variables: &Variables) -> bool {
    let Ok(Some(Source { hosts: Some(hosts), node_rank, .. })) = step(variables) else { return false };
    hosts.value > 1 && node_rank.value == 0 && text(variables, "SLURM_NO_KILL").is_none()
}

/// Where this task of an array would run the store of the job.
pub(super) fn place_in_array(variables: &Variables) -> Option<(String, u16)> {
    let array = number(variables, "SLURM_ARRAY_JOB_ID").ok()??;
    Some((text(variables, "SLURMD_NODENAME")?.to_owned(), port_of_etcd(array)))
}

/// The hosts of the step; the first has node rank 0.
fn names_of_hosts(variables: &Variables, hosts: &Sourced<u32>) -> Result<Sourced<Vec<String>>, String> {
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
    let Some((name, list)) = lists.iter().find_map(|name| Some((name, text(variables, name)?))) else {
        return Err("SLURM_STEP_NODELIST is not set: it names the hosts of the step; srun sets it. Or give --master-addr"
            .to_owned());
    };
    let names = hostlist::expand(list).map_err(|error| format!("{name}={list}: {error}"))?;
    if names.len() != hosts.value as usize {
        return Err(format!(
            "{name}={list} names {} hosts, but {}={}: both have to describe the same step; give --master-addr",
            names.len(),
            hosts.from,
            hosts.value
        ));
    }
    Ok(Sourced::new(names, *name))
}

/// A hint for a process in an allocation of several hosts that `srun` did not start: the other hosts stay idle.
pub(super) fn not_a_step(variables: &Variables) -> Option<String> {
    text(variables, JOB_OF_SLURM)?;
    let hosts = first_number(variables, &["SLURM_JOB_NUM_NODES", "SLURM_NNODES"]).ok()??;
    (hosts.value > 1).then(|| {
        format!(
            "{}={}, but srun did not start this launcher: the job runs on this host only. `srun --ntasks-per-node=1 \
             mainstay run …` uses all of them",
            hosts.from, hosts.value
        )
    })
}
