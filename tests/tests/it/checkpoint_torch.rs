//! Training with PyTorch continues from checkpoints with exactly the same parameters: from memory after a restart,
//! and on another host, from a peer's memory, when the first one is lost with its memory and its disk.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::hosts;

use std::fs;

use hosts::{Hosts, ckpt, json};
use mainstay_tests::{Stage, has_torch, processes};

/// Saves after steps 4, 9, 14, ... With `TROUBLE=kill` rank 1 dies in step 23 of the first attempt; with `TROUBLE=wait`
/// all ranks stop there forever. At the end it trains once more without a failure, in the same processes, because a
/// second start of PyTorch takes longer. The marks are digests of the parameters and the optimizer state.
const TRAINER: &str = r#"
import hashlib, os, signal, time
import torch, torch.distributed as dist
import mainstay
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")

def train(saved, trouble, is_saved):
    torch.manual_seed(17)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
    for step in range(0 if saved is None else saved["step"] + 1, 40):
        if step == 23 and trouble == "kill" and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while step == 23 and trouble == "wait":
            time.sleep(0.1)
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + RANK))
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        if is_saved:
            mainstay.step(step)
            if step % 5 == 4:
                state = {"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
                assert mainstay.checkpoint.save(step, state)
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(t for of in optimiser.state.values() for t in of.values())]:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()

saved = mainstay.checkpoint.load()
mark(f"begins.{ATTEMPT}.{RANK}", str(0 if saved is None else saved["step"] + 1))
trouble = os.environ.get("TROUBLE") if ATTEMPT == 0 else None
mark(f"params.{RANK}", train(saved, trouble, is_saved=True))
mark(f"undisturbed.{RANK}", train(None, None, is_saved=False))
dist.destroy_process_group()
"#;

#[test]
fn ranks_that_are_started_again_go_on_from_memory_to_the_same_parameters() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // Nothing reaches the disk in time: the ranks continue from memory.
    let job = stage
        .python(TRAINER)
        .ranks(2)
        .variable("TROUBLE", "kill")
        .variable("MAINSTAY_CHECKPOINT_BANDWIDTH", "1")
        .start();
    // Each of them starts with PyTorch's imports.
    assert_eq!(job.mark("begins.0.0"), "0");
    job.attempt(1);
    assert_eq!(job.mark("begins.1.0"), "20");
    let (params, undisturbed) = (job.mark("params.1"), job.mark("undisturbed.1"));
    job.end().assert_status(0);
    assert_eq!(params, undisturbed);
}

#[test]
fn a_host_that_is_lost_with_its_memory_and_disk_costs_no_sealed_step() {
    if !has_torch() {
        return;
    }
    let hosts = Hosts::new(5, 2, &[]);
    let mut agents = vec![hosts.agent(0), hosts.agent(1)];
    let run = "run-torch";
    let options = |host: usize| {
        format!(
            "--nproc-per-node 2 --rdzv-id {run} --resume-from {run} --checkpoint-bandwidth 1 --log-dir {} --runtime-dir {} --checkpoint-dir {}",
            hosts.stages[host].logs().display(),
            hosts.stages[host].tmpfs().display(),
            hosts.directory(host).display()
        )
    };
    let job = hosts.stages[0]
        .python(TRAINER)
        .with(&agents[0])
        .own_paths()
        .options(&options(0))
        .variable("TROUBLE", "wait")
        .start();
    assert_eq!(job.mark("begins.0.0"), "0");
    processes::wait_until("step 19 on the other host too", || {
        let listed = json(&ckpt(&agents[1], &["ls", "--run", run, "--json"]));
        let steps = listed["steps"].as_array().cloned().unwrap_or_default();
        steps.iter().any(|step| step["step"] == 19 && step["least_copies"] == 2)
    });
    // The host is lost: its launcher and ranks, its agent, its memory and what its guardian saved of it.
    job.kill_launcher();
    agents.remove(0).kill();
    let _ = fs::remove_dir_all(hosts.directory(0));
    let _ = fs::remove_dir_all(hosts.stages[0].tmpfs());

    let job = hosts.stages[1].python(TRAINER).with(&agents[0]).own_paths().options(&options(1)).start();
    assert_eq!(job.mark("begins.0.0"), "20");
    let (params, undisturbed) = (job.mark("params.0"), job.mark("undisturbed.0"));
    job.end().assert_status(0).assert_printed("checkpoint: step 19");
    assert_eq!(params, undisturbed);
}
