//! Ranks that hang or are slow on a host that does not lead: the leader judges the ranks of all hosts.

use mainstay_hang::HangKind;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::finding::FindingKind;
use mainstay_model::id::Rank;
use mainstay_model::verdict::Cause;
use mainstay_tests::{End, has_client, journal};

use super::cluster::Cluster;
use super::verdicts;

/// Eighty quick steps in lockstep over both hosts. In its 61st step of the first attempt, rank 2 is held up by `hold`.
const LOCKSTEP: &str = r#"
import socket
import mainstay
SIZE, SHARED = int(os.environ["WORLD_SIZE"]), os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(SHARED, exist_ok=True)
PLACE = f"{SHARED}/barrier.{ATTEMPT}"
if RANK == 0:
    listener = socket.create_server(("127.0.0.1", 0))
    with open(PLACE + ".new", "w") as place:
        place.write(str(listener.getsockname()[1]))
    os.rename(PLACE + ".new", PLACE)
    peers = [listener.accept()[0] for _ in range(SIZE - 1)]
else:
    while not os.path.exists(PLACE):
        time.sleep(0.01)
    peer = socket.create_connection(("127.0.0.1", int(open(PLACE).read())))
def barrier():
    if RANK == 0:
        for peer in peers:
            peer.recv(1)
        for peer in peers:
            peer.sendall(b"x")
    else:
        globals()["peer"].sendall(b"x")
        globals()["peer"].recv(1)
for step in range(80):
    with mainstay.section("forward"):
        time.sleep(0.005)
        if step == 60 and RANK == 2 and ATTEMPT == 0:
            hold()
    with mainstay.section("all_reduce"):
        barrier()
    mainstay.step(step)
"#;

/// Both launchers have the same verdict: rank 2, and where it is.
fn assert_named(cluster: &Cluster, ends: &[End], kind: HangKind) {
    for end in ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
        let verdict = end.verdict();
        assert_eq!(verdict.culprit, Some(Rank(2)), "{end}");
        assert!(matches!(verdict.cause, Cause::Hang { hang, .. } if hang == kind), "{kind:?}\n{end}");
        assert_eq!(verdict.victims, [Rank(0), Rank(1), Rank(3)], "{end}");
        assert_eq!(verdict.host, Some(cluster.host_name(1)), "{end}");
        let hung = journal::facts(&end.journal).find_map(|fact| match fact {
            Fact::RanksHung { hang, .. } => Some(hang.hosts.clone()),
            _ => None,
        });
        assert_eq!(hung, Some(vec![cluster.host_name(1)]), "{end}");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]));
}

#[test]
fn a_stopped_rank_of_a_follower_is_named_by_the_leader_and_all_restart() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = format!("def hold(): os.kill(os.getpid(), signal.SIGSTOP)\n{LOCKSTEP}");
    let jobs = cluster.start(&script, "--nproc-per-node 2", &[]);
    assert_named(&cluster, &cluster.ends(jobs), HangKind::Stopped);
}

#[test]
fn a_rank_of_a_follower_that_waits_for_itself_is_named_by_the_leader() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = format!("def hold(): os.read(os.pipe()[0], 1)\n{LOCKSTEP}");
    let jobs = cluster.start(&script, "--nproc-per-node 2", &[]);
    assert_named(&cluster, &cluster.ends(jobs), HangKind::UserCode);
}

/// The ranks of the leader wait far longer than any step took, for one that is at something long and announced it.
#[test]
fn ranks_that_wait_for_a_checkpoint_on_another_host_do_not_hang() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let hold = "def hold():\n    with mainstay.section('checkpoint'):\n        time.sleep(6)";
    let jobs = cluster.start(&format!("{hold}\n{LOCKSTEP}"), "--nproc-per-node 2", &[]);
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 1, "{end}");
        let hung = journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RanksHung { .. }));
        assert!(!hung, "{end}");
    }
}

/// As in `slow.rs`: a rank that works longer waits less, as in a collective. The ranks meet by the clock.
const TRAIN: &str = r#"
import mainstay
SHARED, PERIOD = os.environ["MAINSTAY_CHECKPOINT_DIR"], 0.16
os.makedirs(SHARED, exist_ok=True)
if RANK == 0:
    with open(SHARED + "/began.new", "w") as began:
        began.write(repr(time.monotonic() + 0.3))
    os.rename(SHARED + "/began.new", SHARED + "/began")
while not os.path.exists(SHARED + "/began"):
    time.sleep(0.01)
began = float(open(SHARED + "/began").read())
step = 0
while not os.path.exists(MARKS + "/end"):
    step += 1
    ends = began + step * PERIOD
    with mainstay.section("forward"):
        time.sleep(0.12 if RANK == 5 else 0.09)
    with mainstay.section("allreduce"):
        time.sleep(max(0.0, ends - time.monotonic()))
    mainstay.step(step)
"#;

#[test]
fn a_slow_rank_of_a_follower_is_named_with_its_host() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start(TRAIN, "--nproc-per-node 4", &[]);
    let found = jobs.iter().map(|job| {
        job.wait_for("the slow rank", |entry| match &entry.body {
            Body::Finding(finding) if finding.what == FindingKind::SlowRank => Some(finding.clone()),
            _ => None,
        })
    });
    for finding in found {
        assert_eq!(finding.ranks, [Rank(5)], "{finding:?}");
        assert!(finding.host.is_some(), "{finding:?}");
    }
    cluster.stage(0).mark("end");
    cluster.stage(1).mark("end");
    for end in cluster.ends(jobs) {
        end.assert_status(0).assert_printed(&format!("rank 5 on host {} is ", cluster.host_name(1)));
    }
}

/// Work that leaves traces, without heartbeats, and then what is appended.
const WITHOUT_HEARTBEATS: &str = r#"
SHARED = os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(SHARED, exist_ok=True)
def work(while_it):
    while while_it():
        print("step", flush=True)
        time.sleep(0.05)
begin = time.monotonic()
work(lambda: time.monotonic() < begin + 3)
"#;

#[test]
fn ranks_without_heartbeats_that_do_nothing_on_all_hosts_are_started_again() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = format!("{WITHOUT_HEARTBEATS}if ATTEMPT == 0: time.sleep(36000)");
    let jobs = cluster.start(&script, "--nproc-per-node 1 --hang-limit idle=4s", &[]);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
        let verdict = end.verdict();
        assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::AllStill, .. }), "{end}");
        assert!(!verdict.heartbeats && verdict.confidence < 0.7, "{end}");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]));
}

#[test]
fn a_host_without_heartbeats_that_waits_for_another_at_work_is_left_alone() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = format!(
        "{WITHOUT_HEARTBEATS}over = SHARED + '/over'\nif RANK == 0:\n    time.sleep(6)\n    open(over, 'w').close()\nelse:\n    \
         work(lambda: not os.path.exists(over))\n"
    );
    let jobs = cluster.start(&script, "--nproc-per-node 1 --hang-limit idle=2s", &[]);
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 1, "{end}");
        let hung =
            journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RanksHung { acts: true, .. }));
        assert!(!hung, "{end}");
    }
}
