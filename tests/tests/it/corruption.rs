//! Silent corruption with PyTorch: replicas of a DDP run compare their parameters, or their saved shards are
//! compared. The majority names the rank, and a restarted job continues from an earlier step if the policy asks for
//! it.

#![allow(clippy::expect_used, clippy::panic, reason = "in a test, a panic is the report")]

use mainstay_model::entry::Body;
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::Rank;
use mainstay_tests::{Job, Stage, has_torch};

/// In step 11 of the first attempt a bit of the last rank's parameters flips. Digests are reported after steps 1,
/// 3, 5, ...; checkpoints are saved after steps 4, 9, 14, ... Before step 10 the ranks wait until it is known that
/// they agreed on step 9 and that all of it is sealed. In step 30, when step 29 is sealed for all of them, a rank
/// fails.
const TRAINER: &str = r#"
import os, struct, time
import torch, torch.distributed as dist
import mainstay
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
torch.manual_seed(17)
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(16, 8))
optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
begin, saved = 0, mainstay.checkpoint.load()
if saved is not None:
    model.load_state_dict(saved["model"])
    begin = saved["step"] + 1
mainstay.report_digest(model, every=2)
mark(f"begins.{ATTEMPT}.{RANK}", str(begin))
for step in range(begin, 40):
    if ATTEMPT == 0 and step == 10:
        page = open(os.path.join(os.environ["MAINSTAY_CHECKPOINT_POOL"], f"rank-{RANK:05d}", "control"), "rb", buffering=0)
        # Word 14: the step to return to, plus one.
        while struct.unpack("<Q", os.pread(page.fileno(), 8, 14 * 8))[0] != 10:
            time.sleep(0.01)
    if ATTEMPT == 0 and step == 11 and RANK == dist.get_world_size() - 1:
        with torch.no_grad():
            model.module.weight.view(torch.int32)[0, 0] ^= 1 << 12
    if ATTEMPT == 0 and step == 30:
        control = mainstay._native.Control(os.path.join(os.environ["MAINSTAY_CHECKPOINT_POOL"], f"rank-{RANK:05d}", "control"))
        while not any(slot.step == 29 and slot.state == "sealed" for slot in control.slots()):
            time.sleep(0.01)
        mark(f"sealed.{RANK}")
        for rank in range(dist.get_world_size()):
            wait_for(f"sealed.{rank}")
        wait_for("found")
        if RANK == 0:
            raise RuntimeError("something else")
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + RANK))
    optimiser.zero_grad()
    model(inputs).square().mean().backward()
    optimiser.step()
    mainstay.step(step)
    if step % 5 == 4:
        assert mainstay.checkpoint.save(step, {"step": step, "model": model.state_dict()})
dist.destroy_process_group()
"#;

/// The same without digests and without communication: each rank saves the same 8 MiB in each step, except for a
/// bit of the last rank's from step 5 of the first attempt on. A step is saved when the previous one is sealed for
/// all ranks, and step 5 when it is known that they have been alike. In step 7 a rank fails.
const SAVER: &str = r#"
import os, struct, time
import torch
import mainstay

torch.set_num_threads(1)
RANKS = int(os.environ["WORLD_SIZE"])
pool = os.path.join(os.environ["MAINSTAY_CHECKPOINT_POOL"], f"rank-{RANK:05d}", "control")
control = mainstay._native.Control(pool)
begin, saved = 0, mainstay.checkpoint.load()
if saved is not None:
    begin = saved["step"] + 1
mark(f"begins.{ATTEMPT}.{RANK}", str(begin))
for step in range(begin, 9):
    if ATTEMPT == 0 and step == 7:
        wait_for("found")
        if RANK == 0:
            raise RuntimeError("something else")
    weights = torch.arange(2 << 20, dtype=torch.float32) + step
    if ATTEMPT == 0 and step >= 5 and RANK == RANKS - 1:
        weights.view(torch.int32)[1 << 20] ^= 1 << 12
    mainstay.step(step)
    assert mainstay.checkpoint.save(step, {"step": step, "weights": weights})
    # Later saves may go to the disk, if that is slow.
    if ATTEMPT == 0:
        while not any(slot.step == step and slot.state == "sealed" for slot in control.slots()):
            time.sleep(0.01)
        mark(f"sealed.0.{step}.{RANK}")
        for rank in range(RANKS):
            wait_for(f"sealed.0.{step}.{rank}")
    if ATTEMPT == 0 and step == 4:
        page = open(pool, "rb", buffering=0)
        # Word 14: the step to return to, plus one.
        while struct.unpack("<Q", os.pread(page.fileno(), 8, 14 * 8))[0] != 5:
            time.sleep(0.01)
"#;

/// Runs it, waits for the finding, and for the step at which the restarted job starts.
fn run(trainer: &str, replicas: u32, stage: &Stage) -> (Job, Finding, u64) {
    let job = stage
        .python(trainer)
        .ranks(replicas)
        .variable("MAINSTAY_CHECKPOINT_DOUBTFUL", "skip")
        // Later saves must not push the last good step out.
        .variable("MAINSTAY_CHECKPOINT_KEEP", "1")
        .start();
    let found = job.wait_for("replicas that differ", |entry| match &entry.body {
        Body::Finding(finding)
            if matches!(finding.what, FindingKind::SilentCorruption | FindingKind::ReplicasDiffer) =>
        {
            Some(finding.clone())
        }
        _ => None,
    });
    stage.mark("found");
    // The wait for its first mark starts when its ranks start: with PyTorch's imports.
    job.attempt(1);
    let starts = job.mark("begins.1.0");
    let starts = starts.parse().unwrap_or_else(|_| panic!("no step: {starts:?}"));
    (job, found, starts)
}

#[test]
fn of_three_replicas_the_majority_names_the_rank_and_what_it_saved_since_is_skipped() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let (job, found, starts) = run(TRAINER, 3, &stage);
    assert_eq!(
        (found.what, found.ranks.as_slice()),
        (FindingKind::SilentCorruption, [Rank(2)].as_slice()),
        "{found:?}"
    );
    // Steps this short may pass between two polls: then a later comparison finds it.
    assert!(found.last_agreed_step == Some(9) && found.since_step >= 11, "{found:?}");
    assert_eq!(starts, 10, "after the last step that was saved while the replicas agreed");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed("rank 2");
}

#[test]
fn of_two_differing_replicas_none_is_trusted_and_nothing_is_skipped() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let (job, found, starts) = run(TRAINER, 2, &stage);
    assert_eq!(found.what, FindingKind::ReplicasDiffer, "{found:?}");
    assert!(found.confidence < 0.9, "{found:?}");
    assert_eq!((found.last_agreed_step, starts), (Some(9), 30), "{found:?}");
    job.end().assert_status(0);
}

#[test]
fn what_one_rank_saved_unlike_the_others_is_skipped_without_any_digest() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let (job, found, starts) = run(SAVER, 3, &stage);
    assert_eq!(
        (found.what, found.ranks.as_slice()),
        (FindingKind::SilentCorruption, [Rank(2)].as_slice()),
        "{found:?}"
    );
    assert!(found.last_agreed_step == Some(4) && found.doubtful_steps.contains(&5), "{found:?}");
    assert_eq!(starts, 5, "after the last step that all saved alike");
    let end = job.end();
    end.assert_status(0);
}

#[test]
fn what_two_ranks_saved_unlike_is_a_doubt_and_nothing_is_skipped() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let (job, found, starts) = run(SAVER, 2, &stage);
    assert_eq!((found.what, found.last_agreed_step), (FindingKind::ReplicasDiffer, Some(4)), "{found:?}");
    assert_eq!(starts, 7, "{found:?}");
    job.end().assert_status(0);
}
