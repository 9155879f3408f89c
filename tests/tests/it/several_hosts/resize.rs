//! A job of MIN to MAX hosts: it continues with fewer hosts when one is lost, and with more when one joins.

use mainstay_model::entry::{Body, Fact};
use mainstay_tests::{End, Job, has_client, has_torch};

use super::cluster::Cluster;
use super::etcd::{Etcd, has_etcd};
use crate::words::terminal;

/// Common steps, until a file marks the end. All ranks save when they are asked to.
const STEPS: &str = r#"
import mainstay
mainstay.on_world_change(lambda old, new: mark(f"changed.{ATTEMPT}.{RANK}", f"{old} to {new}"))
world = int(os.environ["WORLD_SIZE"])
mark(f"world.{ATTEMPT}.{RANK}", f"{world} on {os.environ['GROUP_RANK']} of {os.environ['GROUP_WORLD_SIZE']}")
shared = os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(shared, exist_ok=True)
for step in range(1, 1_000_000):
    # The first rank decides for all of them whether this is the last step.
    last = RANK == 0 and os.path.exists(f"{shared}/enough.{ATTEMPT}")
    with open(f"{shared}/aside.{RANK}", "w") as file:
        file.write("last" if last else "")
    os.rename(file.name, f"{shared}/{ATTEMPT}.{step}.{RANK}")
    while not all(os.path.exists(f"{shared}/{ATTEMPT}.{step}.{rank}") for rank in range(world)):
        time.sleep(0.001)
    mainstay.step(step)
    if step == 3:
        mark(f"steps.{ATTEMPT}.{RANK}")
    if mainstay.save_requested():
        mark(f"saved.{ATTEMPT}.{RANK}", step)
        break
    if open(f"{shared}/{ATTEMPT}.{step}.0").read():
        break
    time.sleep(0.02)
"#;

/// Hosts that start in sequence; the first leads.
fn start(cluster: &Cluster, hosts: usize, script: &str, options: &str) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for host in 0..hosts {
        jobs.push(cluster.start_host_as(host, script, options, &[]));
        match host {
            0 => jobs[0].wait_until_printed(terminal::LEADS),
            _ => jobs[host].wait_until_printed(terminal::JOINS),
        }
    }
    jobs
}

/// How the number of ranks changed, by a host's journal.
fn worlds(end: &End) -> Vec<(u32, u32)> {
    let changed = end.journal.iter().filter_map(|entry| match &entry.body {
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
    jobs.remove(lost).lose_launcher();
    assert_eq!(cluster.host_with("steps.1.1"), moves);
    cluster.host_with("steps.1.0");
    assert_eq!(cluster.read(0, "world.1.0"), "2 on 0 of 2");
    assert_eq!(cluster.read(moves, "world.1.1"), "2 on 1 of 2");
    assert_eq!(cluster.read(0, "changed.1.0"), "3 to 2");
    assert_eq!(cluster.read(moves, "changed.1.1"), "3 to 2");
    jobs[0].wait_for_fact("fewer ranks", |fact| matches!(fact, Fact::WorldChanged { before: 3, now: 2, .. }));
    let status = jobs[0].asked(cluster.stage(0), &["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(status["servers"][0]["jobs"][0]["world_size"], 2, "{status}");

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
        |end: &End| end.journal.iter().filter(|entry| matches!(entry.body, Body::Decision(_))).count();
    assert_eq!(decisions(&ends[0]), 1, "hosts that join are no failure\n{}", ends[0]);
}

/// Data-parallel training with the same global batch on any number of ranks, saved after each step by
/// `mainstay.dcp`. At the end each rank compares its parameters with those of one process that has used the same
/// batches.
const DATA_PARALLEL: &str = r#"
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import mainstay, mainstay.dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL, STEPS = 12, 400
torch.set_num_threads(1)

class config:
    batch = GLOBAL // int(os.environ["WORLD_SIZE"])

@mainstay.on_world_change
def keep_the_global_batch(old, new):
    config.batch = GLOBAL // new
    mark(f"batch.{ATTEMPT}.{RANK}", f"{config.batch} on {new} instead of {old}")

def make():
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

def loss_of(model, step, first, count):
    samples = [torch.randn(4, generator=torch.Generator().manual_seed(1000 * step + of)) for of in range(first, first + count)]
    inputs = torch.stack(samples)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()

def train(model, optimiser, step, first, count):
    optimiser.zero_grad()
    loss = loss_of(model, step, first, count)
    loss.backward()
    optimiser.step()
    return loss.item()

dist.init_process_group("gloo")
model, optimiser = make()
model = DDP(model)
state = {"model": model.module.state_dict(), "momentum": {name: torch.zeros_like(of) for name, of in model.module.named_parameters()}}
reader, begin = mainstay.dcp.Reader(), 0
try:
    dcp.load(state, storage_reader=reader)
    begin = reader.step + 1
    model.module.load_state_dict(state["model"])
    for name, of in model.module.named_parameters():
        optimiser.state[of] = {"momentum_buffer": state["momentum"][name].clone()}
except CheckpointException as error:
    assert ATTEMPT == 0 and "no whole step" in str(error), error
mark(f"from.{ATTEMPT}.{RANK}", begin)
for step in range(begin, STEPS):
    if ATTEMPT == 0 and step == 8:
        mark(f"waits.{RANK}")
        if RANK == 1:
            wait_for("never")
    loss = train(model, optimiser, step, RANK * config.batch, config.batch)
    if ATTEMPT == 1:
        time.sleep(0.1)  # until the host that was lost has come back
    mainstay.step(step, loss=loss)
    asked = mainstay.save_requested()
    if step == begin:
        mark(f"listens.{ATTEMPT}.{RANK}")
    if ATTEMPT < 2 or step % 50 == 0:
        momentum = {name: optimiser.state[of]["momentum_buffer"] for name, of in model.module.named_parameters()}
        dcp.save({"model": model.module.state_dict(), "momentum": momentum}, storage_writer=mainstay.dcp.Writer(step))
    if asked:
        mark(f"saved.{ATTEMPT}.{RANK}", step)
        sys.exit(0)
alone, optimiser = make()
for step in range(STEPS):
    train(alone, optimiser, step, 0, GLOBAL)
for mine, of_one in zip(model.module.parameters(), alone.parameters()):
    torch.testing.assert_close(mine.detach(), of_one.detach(), rtol=1e-4, atol=1e-5)
mark(f"equal.{RANK}")
dist.destroy_process_group()
"#;

#[test]
fn data_parallel_training_shrinks_and_grows_and_ends_with_the_parameters_of_one_process() {
    if !has_torch() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(4, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let options = "--nnodes 2:3 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=60";
    let variables = [("GLOO_SOCKET_IFNAME", "lo")];
    let mut jobs: Vec<Job> = Vec::new();
    for host in 0..3 {
        jobs.push(cluster.start_host_as(host, DATA_PARALLEL, options, &variables));
        match host {
            0 => jobs[0].wait_until_printed(terminal::LEADS),
            _ => jobs[host].wait_until_printed(terminal::JOINS),
        }
    }
    for rank in 0..3 {
        cluster.host_with(&format!("waits.{rank}"));
    }
    let (lost, moves) = (cluster.host_with("waits.1"), cluster.host_with("waits.2"));
    jobs.remove(lost).lose_launcher();
    assert_eq!(cluster.host_with("from.1.1"), moves);
    assert_eq!(cluster.read(moves, "from.1.1"), "8", "from the newest step");
    assert_eq!(cluster.read(moves, "batch.1.1"), "6 on 2 instead of 3");
    // Ranks that have not polled for a save request yet cannot be asked to save.
    cluster.host_with("listens.1.0");
    cluster.host_with("listens.1.1");
    jobs.push(cluster.start_host_as(3, DATA_PARALLEL, options, &variables));
    assert_eq!(cluster.host_with("from.2.2"), 3);
    let last: u64 = cluster.read(0, "saved.1.0").parse().expect("a step");
    for (host, rank) in [(0, 0), (moves, 1), (3, 2)] {
        cluster.host_with(&format!("from.2.{rank}"));
        assert_eq!(cluster.read(host, &format!("from.2.{rank}")), (last + 1).to_string(), "no step is lost");
        assert_eq!(cluster.read(host, &format!("batch.2.{rank}")), "4 on 3 instead of 2");
    }
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    for (host, rank) in [(0, 0), (moves, 1), (3, 2)] {
        cluster.read(host, &format!("equal.{rank}"));
    }
    assert_eq!(worlds(&ends[0]), [(3, 2), (2, 3)]);
}

/// Each rank's own state by `mainstay.checkpoint`, which cannot be divided.
const OWN_STATES: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
mark(f"loaded.{ATTEMPT}.{RANK}", saved)
if ATTEMPT == 0:
    for step in range(5):
        mainstay.step(step)
        assert mainstay.checkpoint.save(step, f"step {step} of rank {RANK}")
    mark(f"waits.{RANK}")
wait_for(f"end.{ATTEMPT}")
"#;

#[test]
fn a_job_whose_state_fits_one_number_of_ranks_waits_for_a_host_instead_of_restarting() {
    if !has_client() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(4, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let cluster = cluster.sharing_nothing();
    // The last call leaves time for a second launcher on a busy machine: a job that starts with one host saves for one.
    let options = "--nnodes 1:3 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=10";
    let mut jobs = start(&cluster, 2, OWN_STATES, options);
    for rank in 0..2 {
        cluster.host_with(&format!("waits.{rank}"));
    }
    jobs[0].wait_for_event("step_copied");
    // A third one would be welcome, if what was saved could be divided.
    jobs.push(cluster.start_host_as(2, OWN_STATES, options, &[]));
    jobs[0].wait_for_event("world_stays");
    jobs.remove(2).lose_launcher();
    // One host too few is no reason to start over either.
    jobs.remove(1).lose_launcher();
    let awaited = jobs[0].wait_for_event("host_awaited");
    assert_eq!(awaited.values["keeps_world"], "true", "{awaited:?}");
    jobs.push(cluster.start_host_as(3, OWN_STATES, options, &[]));
    for rank in 0..2 {
        let host = cluster.host_with(&format!("loaded.1.{rank}"));
        assert_eq!(cluster.read(host, &format!("loaded.1.{rank}")), format!("step 4 of rank {rank}"));
        cluster.stage(host).mark("end.1");
    }
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(worlds(&end), []);
    }
}

/// Ranks that can stay in their processes.
const RESTARTABLE: &str = r#"
import mainstay
mark(f"process.{ATTEMPT}.{RANK}")
@mainstay.restartable
def train():
    mark(f"round.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}", os.environ["WORLD_SIZE"])
    mainstay.step(1)
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.01)
train()
"#;

#[test]
fn ranks_that_wait_in_their_processes_get_new_ones_when_their_number_changes() {
    if !has_client() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(3, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let options = "--nnodes 1:3 --nproc-per-node 2 --rdzv-conf shrink_after=1,last_call_timeout=60";
    let mut jobs = start(&cluster, 3, RESTARTABLE, options);
    for rank in 0..6 {
        cluster.host_with(&format!("round.0.{rank}"));
    }
    jobs.remove(1).lose_launcher();
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    for rank in 0..4 {
        let host = cluster.host_with(&format!("process.1.{rank}"));
        assert_eq!(cluster.read(host, &format!("round.1.{rank}")), "4");
    }
    assert_eq!(worlds(&ends[0]), [(6, 4)]);
}

#[test]
fn a_host_beyond_the_multiple_waits_and_gets_ranks_again() {
    if !has_client() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(5, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let options =
        "--nnodes 2:4 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=60,world_multiple=2";
    let mut jobs = start(&cluster, 4, STEPS, options);
    for rank in 0..4 {
        cluster.host_with(&format!("steps.0.{rank}"));
    }
    let (lost, waits) = (cluster.host_with("steps.0.1"), cluster.host_with("steps.0.3"));
    jobs.remove(lost).lose_launcher();
    // Three are left, of which the one with the highest ranks waits.
    let at = if waits > lost { waits - 1 } else { waits };
    jobs[at].wait_until_printed(terminal::WAITS_FOR_SEAT);
    for rank in 0..2 {
        let host = cluster.host_with(&format!("steps.1.{rank}"));
        assert!(cluster.read(host, &format!("world.1.{rank}")).starts_with("2 on"));
        assert_ne!(host, waits);
    }
    jobs.push(cluster.start_host_as(4, STEPS, options, &[]));
    for rank in 0..4 {
        let host = cluster.host_with(&format!("steps.2.{rank}"));
        assert!(cluster.read(host, &format!("world.2.{rank}")).starts_with("4 on"));
    }
    assert_eq!(cluster.host_with("steps.2.2"), waits, "who has waited longest comes first");
    std::fs::write(cluster.stage(0).work().join("checkpoints/enough.2"), "").expect("a mark");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    assert_eq!(worlds(&ends[0]), [(4, 2), (2, 4)]);
}

#[test]
fn the_next_leader_continues_with_the_present_number_of_ranks() {
    if !has_client() || !has_etcd() {
        return;
    }
    let etcd = Etcd::start();
    let cluster =
        Cluster::meeting_at(4, &format!("--rdzv-backend etcd --rdzv-endpoint 127.0.0.1:{}", etcd.port));
    let options = "--nnodes 1:4 --max-restarts 5 --rdzv-conf shrink_after=1,last_call_timeout=60,lease=4";
    let mut jobs = start(&cluster, 4, STEPS, options);
    for rank in 0..4 {
        cluster.host_with(&format!("steps.0.{rank}"));
    }
    // The host of rank 1, then the leader, which has rank 0.
    let lost = cluster.host_with("steps.0.1");
    jobs.remove(lost).lose_launcher();
    for rank in 0..3 {
        cluster.host_with(&format!("steps.1.{rank}"));
    }
    let (second, third) = (cluster.host_with("steps.1.1"), cluster.host_with("steps.1.2"));
    jobs.remove(0).lose_launcher();
    assert_eq!(cluster.host_with("steps.2.0"), third, "the highest host moves into the first place");
    assert_eq!(cluster.host_with("steps.2.1"), second);
    assert_eq!(cluster.read(third, "changed.2.0"), "3 to 2");
    assert_eq!(cluster.read(second, "world.2.1"), "2 on 1 of 2");
    std::fs::write(cluster.stage(0).work().join("checkpoints/enough.2"), "").expect("a mark");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(worlds(end), [(4, 3), (3, 2)], "{end}");
    }
}

/// Each rank saves the same state, and loads it whatever the number of ranks was.
const SAME_STATES: &str = r#"
import mainstay
saved = mainstay.checkpoint.load(replicated=True)
mark(f"loaded.{ATTEMPT}.{RANK}", saved)
for step in range(5 if saved is None else saved + 1, 9 + 3 * ATTEMPT):
    mainstay.step(step)
    assert mainstay.checkpoint.save(step, step)
mark(f"waits.{ATTEMPT}.{RANK}")
wait_for(f"go.{ATTEMPT}")
"#;

#[test]
fn a_state_that_all_ranks_share_is_loaded_by_fewer_and_by_more() {
    if !has_client() {
        return;
    }
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let cluster = Cluster::meeting_at(4, &format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}"));
    let options = "--nnodes 1:3 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=60";
    let mut jobs = start(&cluster, 3, SAME_STATES, options);
    for rank in 0..3 {
        cluster.host_with(&format!("waits.0.{rank}"));
    }
    jobs.remove(2).lose_launcher();
    for rank in 0..2 {
        let host = cluster.host_with(&format!("waits.1.{rank}"));
        assert_eq!(cluster.read(host, &format!("loaded.1.{rank}")), "8", "the newest step of three");
    }
    jobs.push(cluster.start_host_as(3, SAME_STATES, options, &[]));
    for rank in 0..3 {
        let host = cluster.host_with(&format!("waits.2.{rank}"));
        assert_eq!(cluster.read(host, &format!("loaded.2.{rank}")), "11", "the newest step of two");
    }
    for host in [0, 1, 2, 3] {
        cluster.stage(host).mark("go.2");
    }
    for end in cluster.ends(jobs) {
        end.assert_status(0);
    }
}

/// All ranks have the same state, and no directory is shared. The ranks take each step together, as ranks with a
/// collective do: no step of ranks that drift apart would ever be whole.
const REPLICATED: &str = r#"
import socket
import mainstay
store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def meet():
    if os.environ["WORLD_SIZE"] == "1":
        return None
    if RANK == 0:
        with socket.create_server(store) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection(store)
        except ConnectionRefusedError:
            time.sleep(0.01)

def together(ends):
    """Whether the other rank goes on too."""
    if peer is None:
        return not ends
    try:
        peer.send(b"e" if ends else b"s")
        answer = peer.recv(1)
    except OSError:
        answer = b""
    if not answer:
        # The other host is lost: wait for the end of this attempt.
        wait_for("never")
    return not ends and answer == b"s"

saved = mainstay.checkpoint.load(replicated=True)
begin = 0 if saved is None else saved["step"] + 1
mark(f"from.{ATTEMPT}.{RANK}", begin)
peer = meet()
for step in range(begin, 1_000_000):
    mainstay.step(step)
    assert mainstay.checkpoint.save(step, {"step": step})
    if step == begin + 3:
        mark(f"steps.{ATTEMPT}.{RANK}")
    if not together(ends=mainstay.save_requested() or os.path.exists(f"{MARKS}/enough")):
        break
    time.sleep(STEP_TAKES)
"#;

#[test]
fn a_host_that_joins_gets_the_state_of_the_others_without_a_shared_directory() {
    state_reaches_a_host_that_joins("0.05");
}

#[test]
fn a_host_that_joins_gets_the_state_also_if_saves_are_faster_than_copies() {
    state_reaches_a_host_that_joins("0.003");
}

/// `step_takes`: seconds from one save to the next.
fn state_reaches_a_host_that_joins(step_takes: &str) {
    if !has_client() {
        return;
    }
    let script = &REPLICATED.replace("STEP_TAKES", step_takes);
    let endpoint = format!("127.0.0.1:{}", testing::free_port());
    let meets = format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}");
    let cluster = Cluster::meeting_at(3, &meets).sharing_nothing();
    let options = "--nnodes 1:2 --rdzv-conf shrink_after=1,grow_after=1,last_call_timeout=60";
    let mut jobs = start(&cluster, 2, script, options);
    for rank in 0..2 {
        cluster.host_with(&format!("steps.0.{rank}"));
    }
    jobs[0].wait_for_event("step_copied");
    jobs.remove(1).lose_launcher();
    cluster.host_with("steps.1.0");
    jobs.push(cluster.start_host_as(2, script, options, &[]));
    for rank in 0..2 {
        cluster.host_with(&format!("steps.2.{rank}"));
    }
    for host in [0, 2] {
        std::fs::write(cluster.stage(host).marks().join("enough"), "").expect("a mark");
    }
    let from = |host: usize, mark: &str| -> u64 { cluster.read(host, mark).parse().expect("a step") };
    let shrunk = from(0, "from.1.0");
    let grown = from(0, "from.2.0");
    assert!(shrunk > 0 && grown > shrunk, "{shrunk}, {grown}");
    assert_eq!(from(2, "from.2.1"), grown, "the host that joined goes on from the same step");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(worlds(end).last(), Some(&(1, 2)), "{end}");
    }
    ends[1].assert_printed("load(replicated=True)");
}
