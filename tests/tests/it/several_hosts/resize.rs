//! A job of MIN to MAX hosts: it goes on with fewer hosts when one is lost, and with more when one comes.

use mainstay_core::model::entry::{Body, Fact};
use mainstay_tests::{End, Job, has_client};
use nix::sys::signal::Signal;

use super::cluster::Cluster;

/// Steps in common, until a mark says that it is enough. All ranks save when they are asked to.
const STEPS: &str = r#"
import mainstay
mainstay.on_world_change(lambda old, new: mark(f"changed.{ATTEMPT}.{RANK}", f"{old} to {new}"))
world = int(os.environ["WORLD_SIZE"])
mark(f"world.{ATTEMPT}.{RANK}", f"{world} on {os.environ['GROUP_RANK']} of {os.environ['GROUP_WORLD_SIZE']}")
shared = os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(shared, exist_ok=True)
for step in range(1, 1_000_000):
    open(f"{shared}/{ATTEMPT}.{step}.{RANK}", "w").close()
    while not all(os.path.exists(f"{shared}/{ATTEMPT}.{step}.{rank}") for rank in range(world)):
        time.sleep(0.001)
    mainstay.step(step)
    if step == 3:
        mark(f"steps.{ATTEMPT}.{RANK}")
    if mainstay.save_requested():
        mark(f"saved.{ATTEMPT}.{RANK}", step)
        break
    if os.path.exists(f"{shared}/enough.{ATTEMPT}"):
        break
    time.sleep(0.02)
"#;

/// Hosts that come one after the other; the first leads.
fn start(cluster: &Cluster, hosts: usize, script: &str, options: &str) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for host in 0..hosts {
        jobs.push(cluster.start_host_as(host, script, options, &[]));
        match host {
            0 => jobs[0].wait_until_said("this host leads the job"),
            _ => jobs[host].wait_until_said("joining the job; its leader is"),
        }
    }
    jobs
}

fn kill(job: Job) {
    job.signal(Signal::SIGKILL);
    assert!(job.has_ended());
}

/// How the number of ranks changed, by a host's journal.
fn worlds(end: &End) -> Vec<(u32, u32)> {
    let changed = end.story.iter().filter_map(|entry| match &entry.body {
        Body::Fact(Fact::WorldChanged { before, now, .. }) => Some((*before, *now)),
        _ => None,
    });
    changed.collect()
}

#[test]
fn a_job_goes_on_without_a_lost_host_and_takes_it_back() {
    if !has_client() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(4, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let options = "--nnodes 1:3 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=60";
    let mut jobs = start(&cluster, 3, STEPS, options);
    for rank in 0..3 {
        cluster.host_with(&format!("steps.0.{rank}"));
    }
    // The host of rank 1: the host of rank 2 moves into its place.
    let lost = cluster.host_with("steps.0.1");
    let moves = cluster.host_with("steps.0.2");
    kill(jobs.remove(lost));
    assert_eq!(cluster.host_with("steps.1.1"), moves);
    cluster.host_with("steps.1.0");
    assert_eq!(cluster.read(0, "world.1.0"), "2 on 0 of 2");
    assert_eq!(cluster.read(moves, "world.1.1"), "2 on 1 of 2");
    assert_eq!(cluster.read(0, "changed.1.0"), "3 to 2");
    assert_eq!(cluster.read(moves, "changed.1.1"), "3 to 2");
    jobs[0].wait_until_said("did not come back within 1.00 s");

    jobs.push(cluster.start_host_as(3, STEPS, options, &[]));
    assert_eq!(cluster.host_with("steps.2.2"), 3);
    cluster.host_with("steps.2.0");
    cluster.host_with("steps.2.1");
    assert_eq!(cluster.read(0, "world.2.0"), "3 on 0 of 3");
    assert_eq!(cluster.read(moves, "world.2.1"), "3 on 1 of 3", "who stays keeps its ranks");
    for (host, rank) in [(0, 0), (moves, 1), (3, 2)] {
        assert_eq!(cluster.read(host, &format!("changed.2.{rank}")), "2 to 3");
    }
    assert_eq!(cluster.read(0, "saved.1.0"), cluster.read(moves, "saved.1.1"), "all save the same step");
    std::fs::write(cluster.stage(0).work().join("checkpoints/enough.2"), "").expect("a mark");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    assert_eq!(worlds(&ends[0]), [(3, 2), (2, 3)]);
    assert_eq!(worlds(&ends[1]), [(3, 2), (2, 3)], "each host has the whole story");
    let decisions =
        |end: &End| end.story.iter().filter(|entry| matches!(entry.body, Body::Decision(_))).count();
    assert_eq!(decisions(&ends[0]), 1, "hosts that join are no failure\n{}", ends[0]);
    ends[0].assert_said("the job goes on with 3 ranks instead of 2");
}
