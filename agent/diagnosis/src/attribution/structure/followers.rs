//! Causes that are consequences when certain other evidence is present.

use super::spots_in;
use crate::attribution::Evidence;
use crate::attribution::catalog::{Catalog, Role};
use crate::attribution::class::Class;
use crate::attribution::scan::Findings;
use crate::attribution::vote::Vote;

/// Signatures that read "killed by SIGKILL" in a launcher's table.
const KILLED: [&str; 4] = ["exit.minus9", "exit.any_kill", "torch.sigkill", "exit.minus15"];

/// Causes that are consequences when one of these signatures is present too.
const FOLLOWS: [(&str, &[&str]); 13] = [
    ("nccl.internal_error", &["nccl.closed_by_peer", "nccl.remote_error", "nccl.socket_lost"]),
    ("crash.segv", &["exit.134", "amd.gpu_hang", "intel.gpu_hang"]),
    // A program that hangs in a collective had what it needed: something missing is a side issue, such as a monitor.
    ("conda.env", &["nccl.watchdog_timeout"]),
    // A host that never came up is also reported as failed.
    ("host.node_failure", &["slurm.boot"]),
    // A GPU is reset after an out-of-bounds access and reported as hung.
    ("amd.gpu_hang", &["amd.page_fault"]),
    // The kernel ends the process that read the memory which failed.
    ("torch.sigbus", &["host.mce", "storage.disk_kernel"]),
    ("exit.135", &["host.mce"]),
    // A program does not see a GPU that the driver could not bring up.
    ("cuda.no_device", &["gpu.rm_init_failed", "xid.79"]),
    // A cluster counts no GPUs on hosts that do not report theirs.
    ("k8s.unschedulable", &["container.device_plugin"]),
    // A filesystem breaks when its disk does.
    ("storage.filesystem_error", &["storage.disk_kernel"]),
    // A card without its library cannot be opened.
    ("nccl.ib_open", &["net.verbs_library"]),
    // What was not received completely is not what was expected.
    ("data.arrow", &["storage.transfer"]),
    // Found by a rank that retries after another fault.
    ("python.file_exists", &["storage.quota", "storage.enospc"]),
];

/// In a launcher's table with another first failure, the launcher killed the ranks that were killed: they show nothing about the cause.
pub fn demote_stopped_ranks(catalog: &Catalog, evidence: &Evidence, votes: &mut [Vote]) {
    if !evidence.findings.iter().any(|findings| first_failure_was_no_kill(catalog, findings)) {
        return;
    }
    for vote in votes.iter_mut().filter(|vote| KILLED.contains(&vote.id.as_str())) {
        vote.role = Role::Secondary;
        vote.class = Class::Unknown;
        vote.weight = vote.weight.min(0.8);
        vote.also.clear();
    }
}

/// Demotes causes that follow from other evidence, such as a library's "internal error" after a lost connection: the peer was lost.
pub fn demote_followers(votes: &mut [Vote]) {
    for (cause, signs) in FOLLOWS {
        if !votes.iter().any(|vote| signs.contains(&vote.id.as_str())) {
            continue;
        }
        for vote in votes.iter_mut().filter(|vote| vote.id == cause) {
            vote.role = Role::Secondary;
            vote.class = Class::Unknown;
            vote.weight = vote.weight.min(1.0);
            vote.also.clear();
        }
    }
}

fn first_failure_was_no_kill(catalog: &Catalog, findings: &Findings) -> bool {
    let Some(root) = spots_in(catalog, findings, "torch.first_failure").map(|spot| spot.line).min() else {
        return false;
    };
    let first = spots_in(catalog, findings, "torch.table_exit")
        .filter(|spot| spot.line > root)
        .min_by_key(|spot| spot.line);
    let Some((_, code)) = first.and_then(|spot| spot.text.split_once(':')) else { return false };
    let code = code.split_whitespace().next().unwrap_or_default();
    !code.is_empty() && !matches!(code, "-9" | "-15" | "137" | "143")
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    #[test]
    fn ranks_killed_by_the_launcher_do_not_count_as_the_cause() {
        let table = |first: &str| {
            format!(
                "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 11)\n  traceback : Signal 9 (SIGKILL) \
                 received by PID 11\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {first} (pid: 12)\n"
            )
        };
        assert_eq!(judged(&table("1")).class, Class::Unknown);
        // The table does not show who killed: a kill that came first names no culprit either.
        assert_eq!(judged(&table("-9")).class, Class::Unknown);
    }

    #[test]
    fn a_gpu_that_is_reset_after_a_page_fault_is_not_broken() {
        let hang = "HW Exception by GPU node-1 (Agent handle: 0x56) reason :GPU Hang\n";
        let fault = "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f52c3f5f000. Reason: Page not present or supervisor privilege.\n";
        assert_eq!(judged(hang).class, Class::HardwareGpu);
        assert_eq!(judged(&format!("{fault}{hang}")).class, Class::SoftwarePlatform);
    }

    #[test]
    fn a_host_that_never_came_up_is_not_one_that_failed() {
        let failed = "srun: error: Node failure on node17\n";
        let boot = "srun: error: Something is wrong with the boot of the nodes.\n";
        assert_eq!(judged(failed).class, Class::HardwareHost);
        assert_eq!(judged(&format!("{failed}{boot}")).class, Class::SoftwarePlatform);
    }

    #[test]
    fn a_bus_error_of_memory_that_failed_is_not_the_jobs() {
        let ended = "Bus error (core dumped)\n";
        let failed =
            "Memory failure: 0x77aa01: Sending SIGBUS to python3:812 due to hardware memory corruption\n";
        assert_eq!(judged(ended).class, Class::HostResource);
        assert_eq!(judged(&format!("{failed}{ended}")).class, Class::HardwareHost);
    }

    #[test]
    fn a_gpu_that_the_driver_could_not_bring_up_is_the_reason_that_none_is_seen() {
        let unseen = "RuntimeError: No CUDA GPUs are available\n";
        let failed = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)\n";
        assert_eq!(judged(unseen).class, Class::SoftwarePlatform);
        assert_eq!(judged(&format!("{failed}{unseen}")).class, Class::HardwareGpu);
    }

    #[test]
    fn data_that_was_not_received_completely_is_not_broken() {
        let broken =
            "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset\n";
        let dropped = "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected\n";
        assert_eq!(judged(broken).class, Class::Data);
        assert_eq!(judged(&format!("{broken}{dropped}")).class, Class::Storage);
    }
}
