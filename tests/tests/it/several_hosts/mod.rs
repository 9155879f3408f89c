//! Jobs of several hosts: one launcher for each, in separate network namespaces if PyTorch trains over them, else
//! on the loopback address.

mod agents;
mod bad_links;
mod checkpoints;
mod cluster;
mod etcd;
mod frameworks;
mod leaders;
mod links;
mod lost;
mod network;
mod resize;
mod schedulers;
mod slow;
mod slurm;
mod spares;

use cluster::Cluster;
use mainstay_core::base::id::Rank;
use mainstay_core::model::entry::{Body, Fact};
use mainstay_core::model::verdict::Cause;
use mainstay_tests::{End, has_client, has_torch, is_root, journal, skipped};
use nix::sys::signal::Signal;

use crate::ddp::DDP;

/// Twenty steps with a checkpoint at every fifth; a rank waits in step 7 of the attempts that are named in WAITS.
const TRAINER: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
for step in range(0 if saved is None else saved + 1, 20):
    if step == 7 and str(ATTEMPT) in os.environ.get("WAITS", "").split(","):
        mark(f"waits.{ATTEMPT}.{RANK}")
        wait_for(f"go.{ATTEMPT}")
    mainstay.step(step, loss=1.0)
    if step % 5 == 0:
        mainstay.checkpoint.save(step, step)
mark(f"done.{RANK}", os.environ["GROUP_RANK"] + os.environ["WORLD_SIZE"])
"#;

/// The verdicts in each launcher's journal, without host-specific parts.
fn verdicts(end: &End) -> Vec<(Option<Rank>, Cause, String)> {
    let verdicts = journal::verdicts(&end.journal).into_iter();
    verdicts.map(|verdict| (verdict.culprit, verdict.cause.clone(), verdict.headline.clone())).collect()
}

#[test]
fn two_hosts_run_one_world_and_a_killed_rank_on_either_restarts_all() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start(TRAINER, "--nproc-per-node 2", &[("WAITS", "0,1")]);
    for attempt in 0..2u32 {
        for rank in 0..4 {
            jobs[rank / 2].mark(&format!("waits.{attempt}.{rank}"));
        }
        // A rank of the follower, then one of the leader.
        let (host, rank) = if attempt == 0 { (1, 3) } else { (0, 0) };
        jobs[host].kill_rank(attempt, rank);
    }
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 3, "{end}");
        end.assert_printed("rank 3 was ended by SIGKILL after step 6");
        end.assert_printed("rank 0 was ended by SIGKILL after step 6");
        end.assert_printed("restart 2 of 3");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]), "both journals have the same failures");
    assert_eq!(verdicts(&ends[0]).len(), 2);
    assert_eq!((cluster.read(0, "done.0"), cluster.read(1, "done.3")), ("04".to_owned(), "14".to_owned()));
    let [first, second] = journal::outcomes(&ends[0].journal)[..] else {
        panic!("two outcomes\n{}", ends[0])
    };
    assert_eq!((first.step, second.step), (6, 6), "from the checkpoint of step 5\n{}", ends[0]);
}

#[test]
fn an_exception_on_one_host_ends_the_job_on_all_with_one_explanation() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = r#"
import mainstay
for step in range(1000):
    mainstay.step(step)
    if RANK == 2 and step == 3:
        raise ValueError("bad sample 17")
    time.sleep(0.01)
    if step > 3:
        wait_for("never")
"#;
    let jobs = cluster.start(script, "--nproc-per-node 2", &[]);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(1);
        end.assert_printed("bad sample 17");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]));
    assert_eq!(verdicts(&ends[0]).last().expect("a verdict").0, Some(Rank(2)), "{}", ends[0]);
    assert_eq!(ends[0].summary().attempts, ends[1].summary().attempts);
}

#[test]
fn a_lost_launcher_is_named_and_its_host_may_come_back() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let options = "--nproc-per-node 2";
    let mut jobs = cluster.start(TRAINER, options, &[("WAITS", "0")]);
    for rank in 0..4 {
        jobs[rank / 2].mark(&format!("waits.0.{rank}"));
    }
    let follower = jobs.remove(1);
    follower.lose_launcher();
    jobs[0].wait_until_printed("node rank 1, ranks 2 to 3) is lost");
    jobs[0].wait_until_printed("waiting up to");
    jobs.push(cluster.start_host(1, TRAINER, options, &[("WAITS", "0")]));
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    assert_eq!(ends[0].summary().attempts, 2, "{}", ends[0]);
    ends[0].assert_printed("(node rank 1, ranks 2 to 3) was lost");
    assert!(!ends[0].stderr.contains("SIGKILL"), "no rank is said to have been killed: {}", ends[0]);
    assert_eq!(cluster.read(1, "done.2"), "14");
}

#[test]
fn a_follower_that_loses_its_leader_stops_its_ranks_and_hands_the_job_back() {
    let cluster = Cluster::new(2);
    let mut jobs = cluster.start("mark(f'runs.{RANK}'); wait_for('never')", "", &[]);
    jobs[0].mark("runs.0");
    jobs[1].mark("runs.1");
    let leader = jobs.remove(0);
    leader.lose_launcher();
    let ends = cluster.ends(jobs);
    ends[0].assert_status(75).assert_printed("the ranks of this host are stopped");
}

#[test]
fn a_signal_to_one_launcher_ends_the_job_on_all() {
    let cluster = Cluster::new(2);
    let jobs = cluster.start("mark(f'runs.{RANK}'); wait_for('never')", "", &[]);
    jobs[0].mark("runs.0");
    jobs[1].mark("runs.1");
    jobs[1].signal(Signal::SIGTERM);
    for end in cluster.ends(jobs) {
        end.assert_status(128 + 15);
    }
}

/// Ranks in step with each other, as those of a trainer, that save when they are asked to, or when it is due.
const SAVES: &str = r#"
import mainstay
shared = os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(shared, exist_ok=True)
for step in range(1, 1_000_000):
    open(f"{shared}/{step}.{RANK}", "w").close()
    while not os.path.exists(f"{shared}/{step}.{1 - RANK}"):
        time.sleep(0.001)
    time.sleep(0.02)
    mainstay.step(step)
    if step <= 5:
        with mainstay.section("checkpoint"):
            pass
    if mainstay.checkpoint.due():
        mark(f"due.{RANK}", step)
    if mainstay.save_requested():
        mark(f"saved.{RANK}", step)
        break
"#;

#[test]
fn ranks_of_all_hosts_are_asked_to_save_after_the_same_step() {
    if !has_client() {
        return;
    }
    for signal in [Signal::SIGTERM, Signal::SIGUSR1] {
        let cluster = Cluster::new(2);
        let jobs = cluster.start(SAVES, "", &[]);
        let due = [jobs[0].mark("due.0"), jobs[1].mark("due.1")];
        assert_eq!(due[0], due[1], "a save is due after the same step");
        jobs[1].signal(signal);
        for end in cluster.ends(jobs) {
            end.assert_status(128 + signal as i32);
        }
        assert_eq!(cluster.read(0, "saved.0"), cluster.read(1, "saved.1"));
    }
}

#[test]
fn a_restart_is_ordered_at_any_host() {
    let cluster = Cluster::new(2);
    let jobs = cluster.start("mark(f'runs.{ATTEMPT}.{RANK}'); wait_for(f'go.{ATTEMPT}')", "", &[]);
    jobs[0].mark("runs.0.0");
    jobs[1].mark("runs.0.1");
    jobs[1].asked(cluster.stage(1), &["job", "restart", "--reason", "a drill"]);
    jobs[0].mark("runs.1.0");
    jobs[1].mark("runs.1.1");
    cluster.stage(0).mark("go.1");
    cluster.stage(1).mark("go.1");
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
}

#[test]
fn hosts_that_do_not_come_and_hosts_that_do_not_fit_are_named() {
    let cluster = Cluster::new(2);
    let leader = cluster.start_host(0, "pass", "--rdzv-conf join_timeout=6", &[]);
    leader.wait_until_printed("1 of 2 hosts joined; missing: node rank 1");
    let other = cluster.start_host_as(1, "pass", "--nnodes 3 --node-rank 1", &[]);
    assert!(other.has_ended());
    other.end().assert_status(70).assert_printed("it was started with --nnodes 3, the leader with 2");
    let end = leader.end();
    end.assert_status(70).assert_printed("1 of 2 hosts joined; missing: node rank 1 within 6.00 s");
    end.assert_printed("Check on the missing hosts");
}

#[test]
fn a_host_with_another_script_or_another_number_of_ranks_is_named_on_all_terminals() {
    let cluster = Cluster::new(2);
    let leader = cluster.start_host(0, "mark(f'ran.{RANK}')", "--nproc-per-node 1", &[]);
    let other = cluster.start_host(1, "mark(f'ran.{RANK}', 'other')", "--nproc-per-node 2", &[]);
    for end in cluster.ends(vec![leader, other]) {
        end.assert_status(0).assert_printed("its script or command differs from that of this host (hash ");
        end.assert_printed("it has 2 ranks (--nproc-per-node), this host 1");
    }
    assert_eq!(cluster.read(1, "ran.2"), "other", "a difference that may be meant stops nothing");
}

/// Asserts that all ranks of a training have the parameters of an undisturbed one. `hosts` has the host of each rank.
fn assert_undisturbed(cluster: &Cluster, hosts: &[usize]) {
    let read = |mark: &str| -> Vec<String> {
        let ranks = hosts.iter().enumerate();
        ranks.map(|(rank, host)| cluster.read(*host, &format!("{mark}.{rank}"))).collect()
    };
    let (finals, undisturbed) = (read("final"), read("undisturbed"));
    assert_eq!(finals, undisturbed, "bit for bit");
    assert!(finals.iter().all(|of| *of == finals[0]), "all ranks have the same parameters: {finals:?}");
}

#[test]
fn ddp_over_two_hosts_that_loses_a_rank_ends_with_the_parameters_of_an_undisturbed_run() {
    if !has_torch() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let cluster = Cluster::in_namespaces(2);
    let jobs = cluster.start(DDP, "--nproc-per-node 1", &[("WAITS", "0")]);
    for (rank, job) in jobs.iter().enumerate() {
        job.mark(&format!("waits.0.{rank}"));
    }
    jobs[1].kill_rank(0, 1);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    let started = ends[0].journal.iter().any(
        |entry| matches!(&entry.body, Body::Fact(Fact::AttemptStarted { ranks, .. }) if ranks.len() == 2),
    );
    assert!(started, "{}", ends[0]);
    assert_undisturbed(&cluster, &[0, 1]);
}
