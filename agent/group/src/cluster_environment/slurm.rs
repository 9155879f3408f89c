//! Slurm: a task of a step that `srun` started.

use super::{Refused, Source, Sourced, Variables, first_number, number, port_of, text};
use mainstay_health::parse::hostlist;

/// Slurm numbers everything that is not a step of `srun` (batch script, interactive and external step) from here up.
const RESERVED_STEPS: u32 = 0xffff_fff0;

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
    let job: Option<u64> = number(variables, "SLURM_JOB_ID")?;
    Ok(Some(Source {
        address: first_host(variables, &hosts),
        port: job.map(|job| port_of(job.wrapping_mul(13).wrapping_add(step.value.into()))),
        run_id: job.map(|job| Sourced::new(format!("slurm-{job}.{}", step.value), "SLURM_JOB_ID")),
        hosts: Some(hosts),
        node_rank,
        crowded,
        counts_hosts: true,
    }))
}

/// The run id of a job whose hosts are the tasks of an array. Slurm starts a lost task again under the same id, and
/// gives it to no other array.
pub(super) fn array(variables: &Variables) -> Option<Sourced<String>> {
    const ARRAY: &str = "SLURM_ARRAY_JOB_ID";
    let job = text(variables, ARRAY).filter(|job| job.bytes().all(|byte| byte.is_ascii_digit()))?;
    Some(Sourced::new(format!("slurm-{job}"), ARRAY))
}

/// The host with node rank 0.
fn first_host(variables: &Variables, hosts: &Sourced<u32>) -> Result<Sourced<String>, String> {
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
    let first = names.into_iter().next().ok_or("SLURM_STEP_NODELIST is empty: give --master-addr")?;
    Ok(Sourced::new(first, *name))
}

/// A hint for a process in an allocation of several hosts that `srun` did not start: the other hosts stay idle.
pub(super) fn not_a_step(variables: &Variables) -> Option<String> {
    text(variables, "SLURM_JOB_ID")?;
    let hosts = first_number(variables, &["SLURM_JOB_NUM_NODES", "SLURM_NNODES"]).ok()??;
    (hosts.value > 1).then(|| {
        format!(
            "{}={}, but srun did not start this launcher: the job runs on this host only. `srun --ntasks-per-node=1 \
             mainstay run …` uses all of them",
            hosts.from, hosts.value
        )
    })
}
