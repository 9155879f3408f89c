//! Evidence about ranks in addition to the cause: the rank that others name, and ranks that crashed together.

use std::collections::BTreeSet;

use super::Evidence;
use super::catalog::Catalog;
use super::lines;
use super::scan::RelevantLine;
use super::structure::{number_after, spots_of};
use super::vote::Vote;

/// Signatures of crashes in native code.
const CRASHES: [&str; 4] = ["crash.segv", "torch.sigsegv", "exit.any_segv", "exit.minus11"];

/// The rank that others report as ended: JAX's service names its task, srun the task that exited with an error,
/// launchers of MPI the process that ended first or crashed.
pub fn named_by_others(catalog: &Catalog, evidence: &Evidence) -> Option<u32> {
    let tasks = spots_of(catalog, evidence, "jax.task_named")
        .filter_map(|(_, spot)| number_after(&spot.text, &["task:"]))
        .filter_map(|task| u32::try_from(task).ok());
    const EXITS: [&str; 3] = ["srun.task_exit", "mpi.process_name", "mpi.crashed"];
    let exits = EXITS.into_iter().flat_map(|id| spots_of(catalog, evidence, id));
    let exits = exits.filter_map(|(_, spot)| spot.rank);
    let named: BTreeSet<u32> = tasks.chain(exits).collect();
    named.first().copied().filter(|_| named.len() == 1)
}

/// Whether several ranks crashed in native code, each by itself: incompatible libraries, on every host.
pub fn crashed_together<'v>(votes: impl Iterator<Item = &'v Vote>) -> bool {
    let crashes = votes.filter(|vote| CRASHES.contains(&vote.id.as_str()));
    let spots: Vec<&RelevantLine> =
        crashes.flat_map(|vote| vote.spots.iter().map(|(_, spot)| spot)).collect();
    let ranks: BTreeSet<u32> = spots.iter().filter_map(|spot| spot.rank).collect();
    ranks.len() > 1 || spots.iter().any(|spot| lines::repeated_elsewhere(&spot.text) > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::class::{Class, Restart};
    use crate::attribution::scan::{Kind, Scan};
    use crate::attribution::{Attribution, attribute};

    fn judged(log: &str) -> Attribution {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
        attribute(catalog, &Evidence { findings, ..Evidence::default() })
    }

    #[test]
    fn the_task_that_the_service_names_is_where_to_look() {
        let gone = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n";
        let one = judged(&format!("{gone}/job:jax_worker/replica:0/task:3\n"));
        assert_eq!((one.class, one.root.rank), (Class::Unknown, Some(3)));
        let two =
            judged(&format!("{gone}/job:jax_worker/replica:0/task:3\n/job:jax_worker/replica:0/task:5\n"));
        assert_eq!(two.root.rank, None, "of two nobody can tell which was first");
    }

    #[test]
    fn the_rank_that_a_launcher_names_or_that_alone_has_a_line_of_the_cause_is_where_to_look() {
        let raised = "KeyError: 'mask'\n";
        let first = "prterun detected that one or more processes exited with non-zero status\n   Process name: [prterun-h3-77@1,12]\n";
        assert_eq!(judged(&format!("{raised}{first}")).root.rank, Some(12));
        let crashed = "x1c0: rank 2 died from signal 15\nx1c1: rank 9 died from signal 11 and dumped core\n";
        assert_eq!(judged(crashed).root.rank, Some(9));
        let kernel = "amdgpu 0000:9d:00.0: amdgpu: {3}socket: 6, die: 1, 1 new uncorrectable hardware errors detected in umc block\n";
        let hip = "[rank4]: torch.AcceleratorError: HIP error: unspecified launch failure\n";
        assert_eq!(judged(&format!("{kernel}{hip}")).root.rank, Some(4));
        let table = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nRoot Cause (first observed failure):\n[0]:\n  host      : h\n  rank      : 19 (local_rank: 3)\n  exitcode  : 1 (pid: 12)\n";
        let alone = judged(table);
        assert_eq!((alone.class, alone.root.rank), (Class::Unknown, Some(19)));
    }

    #[test]
    fn labels_of_tasks_are_no_ranks_where_the_ranks_have_other_numbers() {
        let raised = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n";
        let label = |task: u32, text: &str| format!("{task}: {text}");
        let own = label(0, "[rank1]: waiting for a peer failed\n") + &label(1, &format!("[rank9]: {raised}"));
        let exit = "srun: error: n2: task 1: Exited with exit code 1\n";
        let judged_own = judged(&(own + exit)).root;
        assert_eq!((judged_own.rank, judged_own.victims.contains(&1)), (Some(9), false));
        let table = "  rank      : 11 (local_rank: 3)\n";
        assert_eq!(judged(&(label(1, raised) + &label(1, table))).root.rank, Some(11));
        assert_eq!(judged(&label(1, raised)).root.rank, Some(1), "nothing else numbers the ranks");
    }

    #[test]
    fn a_task_that_left_is_no_rank_where_a_rank_with_another_number_raised() {
        let raised = "[rank6]: ValueError: the vocabulary is empty\n";
        let exit = |task: u32| format!("srun: error: n2: task {task}: Exited with exit code 1\n");
        let root = |log: String| judged(&log).root;
        let launcher = root(raised.to_owned() + &exit(0));
        assert_eq!((launcher.rank, launcher.victims.is_empty()), (Some(6), true));
        assert_eq!(root(raised.to_owned() + &exit(6)).rank, Some(6));
        let others = root(raised.to_owned() + &exit(6) + &exit(2));
        assert!(others.victims.contains(&2), "tasks are ranks here");
    }

    #[test]
    fn the_task_that_left_with_an_error_raised_it() {
        let raised = "FileExistsError: [Errno 17] File exists: '/data/eeg/S043'\n";
        let one = judged(&format!("{raised}srun: error: nid008637: task 3: Exited with exit code 1\n"));
        assert_eq!(one.root.rank, Some(3));
        let two = judged(&format!(
            "{raised}srun: error: n1: task 3: Exited with exit code 1\nsrun: error: n2: task 4: Exited with exit code 1\n"
        ));
        assert_eq!(two.root.rank, None);
    }

    #[test]
    fn one_crash_may_pass_and_what_crashes_on_several_ranks_does_not() {
        let crash =
            |task: u32| format!("srun: error: nid{task}: task {task}: Segmentation fault (core dumped)\n");
        assert_eq!(judged(&crash(0)).restart, Restart::RestartSameNodes);
        assert_eq!(judged(&(crash(0) + &crash(2))).restart, Restart::DoNotRestart);
        let table = "srun: error: nid1: tasks 0,2: Segmentation fault (core dumped)\n";
        assert_eq!(judged(table).restart, Restart::DoNotRestart);
    }

    #[test]
    fn a_crash_that_ray_counts_on_other_workers_too_is_one_of_several() {
        let crash = "(W pid=3, ip=10.0.0.9) *** SIGSEGV received at time=17 on cpu 3 ***";
        let of_one = judged(&format!("{crash}\n"));
        let of_many = judged(&format!("{crash} [repeated 7x across cluster]\n"));
        assert_eq!((of_one.class, of_many.class), (Class::Unknown, Class::SoftwarePlatform));
        assert_eq!(of_many.restart, Restart::DoNotRestart);
        assert_eq!(of_many.evidence.first().map(|vote| vote.count), Some(8));
    }

    #[test]
    fn an_unknown_cause_names_no_rank_unless_others_follow() {
        let hint = "[rank5]: ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n";
        let alone = judged(hint);
        assert_eq!((alone.class, alone.root.rank), (Class::Unknown, None));
        let locked = "step 1\nBlockingIOError: [Errno 11] Unable to lock file\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-01T00:00:00 ***\n";
        let lines: Vec<u64> = judged(locked).root.lines.iter().map(|(_, spot)| spot.line).collect();
        assert_eq!(lines, [2], "what may be the cause comes before what followed");
        let lost = "[rank3]: RuntimeError: CUDA error: unspecified launch failure\n[rank0]: NCCL WARN Connection closed by remote peer\n";
        let followed = judged(lost);
        assert_eq!((followed.class, followed.root.rank), (Class::Unknown, Some(3)));
    }
}
