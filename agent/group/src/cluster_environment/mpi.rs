//! MPI's launchers: Open MPI's `mpirun`, and launchers with PMI (MPICH, Intel MPI, Cray).

use super::{Refused, Source, Sourced, Variables, first_number, master_address, number, port_of, text};

/// The URI of `mpirun` itself, and of its daemon on this host.
const MPIRUN: &str = "OMPI_MCA_orte_hnp_uri";
const DAEMON: &str = "OMPI_MCA_orte_local_daemon_uri";

/// A process of Open MPI. Its daemons may themselves be tasks of Slurm, so this is checked before Slurm.
pub(super) fn open_mpi(variables: &Variables) -> Result<Option<Source>, Refused> {
    let Some(hosts) = first_number(variables, &["OMPI_COMM_WORLD_SIZE"])? else { return Ok(None) };
    let Some(node_rank) = first_number(variables, &["OMPI_COMM_WORLD_RANK"])? else {
        return Err(Refused(format!(
            "OMPI_COMM_WORLD_RANK is not set, but OMPI_COMM_WORLD_SIZE={} is: mpirun sets both; unset both to start on \
             this host only",
            hosts.value
        )));
    };
    let here = number::<u32>(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let crowded = here.filter(|here| *here > 1).map(|here| {
        format!(
            "OMPI_COMM_WORLD_LOCAL_SIZE={here}: `mainstay run` starts the ranks of a host itself; use `mpirun \
             --map-by ppr:1:node` and --nproc-per-node"
        )
    });
    let namespace = text(variables, "PMIX_NAMESPACE");
    Ok(Some(Source {
        address: address(variables, &node_rank),
        port: port(variables)?.or_else(|| namespace.map(|name| port_of(sum(name)))),
        run_id: namespace.map(|name| Sourced::new(format!("mpi-{}", as_name(name)), "PMIX_NAMESPACE")),
        hosts: Some(hosts),
        node_rank,
        crowded,
        counts_hosts: false,
        store: None,
    }))
}

/// A process of a launcher with PMI. A launcher with PMIx only does not set the number of processes.
pub(super) fn pmi(variables: &Variables) -> Result<Option<Source>, Refused> {
    // Slurm sets these as well, and its own variables give more.
    if text(variables, "SLURM_STEP_ID").is_some() && text(variables, "MPI_LOCALNRANKS").is_none() {
        return Ok(None);
    }
    let hosts = first_number(variables, &["PMI_SIZE"])?;
    let Some(node_rank) = first_number(variables, &["PMI_RANK", "PMIX_RANK"])? else {
        return match hosts.filter(|hosts| hosts.value > 1) {
            None => Ok(None),
            Some(hosts) => Err(Refused(format!(
                "PMI_RANK is not set, but PMI_SIZE={} is: mpiexec sets both; unset both to start on this host only",
                hosts.value
            ))),
        };
    };
    let crowded = first_number(variables, &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"])?;
    let crowded = crowded.filter(|here| here.value > 1).map(|here| {
        format!(
            "{}={}: `mainstay run` starts the ranks of a host itself; use `mpiexec -ppn 1` and --nproc-per-node",
            here.from, here.value
        )
    });
    Ok(Some(Source {
        hosts,
        address: master_address(variables).ok_or_else(|| no_address("-genv MASTER_ADDR HOST", &node_rank)),
        port: port(variables)?,
        run_id: None,
        node_rank,
        crowded,
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

/// The address that the user passed on; otherwise the host of `mpirun`, if process 0 is there.
fn address(variables: &Variables, node_rank: &Sourced<u32>) -> Result<Sourced<String>, String> {
    if let Some(address) = master_address(variables) {
        return Ok(address);
    }
    let no_address = || no_address("-x MASTER_ADDR=HOST", node_rank);
    let mpirun = text(variables, MPIRUN).and_then(addresses).ok_or_else(no_address)?;
    let is_here = text(variables, DAEMON).and_then(addresses).is_some_and(|daemon| daemon == mpirun);
    if node_rank.value == 0 && !is_here {
        return Err(format!(
            "{MPIRUN}: mpirun does not run on the host of process 0, so that the other hosts do not know its address; \
             pass it on with `mpirun -x MASTER_ADDR=HOST`"
        ));
    }
    Ok(Sourced::new(mpirun.split(',').next().unwrap_or(mpirun).to_owned(), MPIRUN))
}

fn no_address(how: &str, node_rank: &Sourced<u32>) -> String {
    format!(
        "MASTER_ADDR is not set, but {}={} is: all hosts have to know the address of process 0; pass it on with `{how}`",
        node_rank.from, node_rank.value
    )
}

/// The IPv4 addresses in `123.0;tcp://10.0.0.1,172.17.0.1:4711;tcp6://…`.
fn addresses(uri: &str) -> Option<&str> {
    let tcp = uri.split(';').find_map(|part| part.strip_prefix("tcp://"))?;
    let (addresses, _port) = tcp.rsplit_once(':')?;
    (!addresses.is_empty()).then_some(addresses)
}

/// The text with only characters that a run id may contain.
fn as_name(text: &str) -> String {
    text.chars().take(48).map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect()
}

fn sum(text: &str) -> u64 {
    text.bytes().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}
