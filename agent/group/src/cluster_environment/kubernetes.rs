//! Kubernetes: pods of JobSets and Indexed Jobs, and workers of operators that set `RANK` and `WORLD_SIZE` for each pod.

use super::{
    ExplicitOptions, Refused, Source, Sourced, Variables, first_number, master_address, number, text,
};

/// A pod of an Indexed Job or a JobSet. Kubernetes does not pass the number of pods to a pod: without `--nnodes` each
/// pod of an Indexed Job is a separate job.
pub(super) fn indexed(
    variables: &Variables,
    full_name: Option<&str>,
    given: &ExplicitOptions,
) -> Result<Option<Source>, Refused> {
    let Some(index) = first_number(variables, &["JOB_COMPLETION_INDEX"])? else { return Ok(None) };
    let (set, job) = (text(variables, "JOBSET_NAME"), text(variables, "REPLICATED_JOB_NAME"));
    if given.hosts.is_none() {
        if set.is_some() && job.is_some() {
            return Err(Refused(format!(
                "PET_NNODES is not set, but JOBSET_NAME and JOB_COMPLETION_INDEX={} are: set it (or --nnodes) to the \
                 number of pods of the job; 1 if each pod is a job of its own",
                index.value
            )));
        }
        return Ok(None);
    }
    let crowded = first_number(variables, &["JOB_INDEX"])?.filter(|job| job.value > 0).map(|job| {
        format!(
            "JOB_INDEX={}: with several Jobs in a JobSet, JOB_COMPLETION_INDEX does not number the pods; set \
             PET_NODE_RANK",
            job.value
        )
    });
    let by_set =
        || Some((set?, job?)).map(|(set, job)| Sourced::new(format!("{set}-{job}-0-0.{set}"), "JOBSET_NAME"));
    let by_name = || first_pod(full_name?, index.value).map(|pod| Sourced::new(pod, "the name of this pod"));
    let address = master_address(variables).or_else(by_set).or_else(by_name).ok_or_else(|| {
        format!(
            "MASTER_ADDR is not set, but JOB_COMPLETION_INDEX={} is: set it (or --master-addr) to the name of the pod \
             with index 0, such as JOB-0.SERVICE, which needs a headless service",
            index.value
        )
    });
    let port = port(variables)?;
    Ok(Some(Source {
        hosts: None,
        node_rank: index,
        address,
        port,
        run_id: None,
        crowded,
        counts_hosts: false,
        store: None,
    }))
}

/// A worker of a PyTorchJob from before `PET_` variables, or of a platform that follows it: `RANK` and `WORLD_SIZE`
/// count pods.
pub(super) fn workers(variables: &Variables, given: &ExplicitOptions) -> Result<Option<Source>, Refused> {
    // Ranks of another launcher have this variable.
    if text(variables, "LOCAL_RANK").is_some() {
        return Ok(None);
    }
    let Some(pods) = first_number(variables, &["WORLD_SIZE"])?.filter(|pods| pods.value > 1) else {
        return Ok(None);
    };
    let rank = first_number(variables, &["RANK"])?;
    let lacking = |lacks: &str, has: String| {
        Refused(format!(
            "{lacks} is not set, but WORLD_SIZE={} and {has} are: set all three for a job of several hosts, or use \
             --standalone for a job of this host",
            pods.value
        ))
    };
    let (rank, address) = match (rank, master_address(variables)) {
        (None, None) => return Ok(None),
        (None, Some(_)) if given.node_rank.is_some() => return Ok(None),
        (None, Some(_)) => return Err(lacking("RANK", "MASTER_ADDR".to_owned())),
        (Some(rank), None) if !given.has_address => {
            return Err(lacking("MASTER_ADDR", format!("RANK={}", rank.value)));
        }
        (Some(rank), address) => (rank, address),
    };
    if rank.value >= pods.value {
        return Err(Refused(format!("RANK={}: WORLD_SIZE={} counts from 0", rank.value, pods.value)));
    }
    // Newer operators count ranks in WORLD_SIZE if they know the number of ranks per pod.
    let counts_ranks = given
        .hosts
        .zip(given.ranks)
        .is_some_and(|((_, most), ranks)| most.checked_mul(ranks) == Some(pods.value));
    if given.hosts.is_none()
        && given.ranks.is_some_and(|ranks| ranks > 1)
        && text(variables, "PET_NPROC_PER_NODE").is_some()
    {
        return Err(Refused(format!(
            "WORLD_SIZE={}: with PET_NPROC_PER_NODE it counts pods or ranks, which differs between operators; set \
             PET_NNODES (or --nnodes) to the number of pods",
            pods.value
        )));
    }
    Ok(Some(Source {
        hosts: (!counts_ranks).then_some(pods),
        node_rank: rank,
        address: address.ok_or_else(|| "MASTER_ADDR is not set".to_owned()),
        port: port(variables)?,
        run_id: None,
        crowded: None,
        counts_hosts: false,
        store: None,
    }))
}

fn port(variables: &Variables) -> Result<Option<u16>, Refused> {
    if text(variables, "MASTER_ADDR").is_none() {
        return Ok(None);
    }
    number(variables, "MASTER_PORT")
}

/// The pod with index 0 in the same job as the pod with this name and index: `train-3.service.…` gives
/// `train-0.service.…`.
fn first_pod(full_name: &str, index: u32) -> Option<String> {
    let (pod, service) = full_name.split_once('.')?;
    let job = pod.strip_suffix(&format!("-{index}"))?;
    Some(format!("{job}-0.{service}"))
}

/// The full name of a host, from a text such as `/etc/hosts`, where Kubernetes writes the full name of each pod.
pub fn full_name(hosts_file: &str, host: &str) -> Option<String> {
    hosts_file.lines().find_map(|line| {
        let mut names = line.split('#').next()?.split_whitespace().skip(1);
        let full = names.next().filter(|full| full.contains('.'))?;
        (full.split('.').next() == Some(host)).then(|| full.to_owned())
    })
}
