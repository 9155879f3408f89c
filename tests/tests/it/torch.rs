//! The central guarantee, with PyTorch: a DDP run that loses a rank ends with the same parameters as one that does
//! not.

use mainstay_core::base::id::Rank;
use mainstay_core::model::entry::Fact;
use mainstay_tests::{Job, Stage, has_torch, journal};

/// Two ranks, gloo, a small model with an optimizer that has state; all of it in the checkpoint.
const TRAINER: &str = r#"
import hashlib, torch, torch.distributed as dist
import mainstay
from torch.nn.parallel import DistributedDataParallel as DDP

NAME = os.environ["NAME"]
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
torch.manual_seed(17)
dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin, saved = 0, mainstay.checkpoint.load()
if saved is not None:
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    begin = saved["step"] + 1
for step in range(begin, 24):
    if NAME == "disturbed" and ATTEMPT == 0 and step == 13:
        mark(f"waits.{RANK}")
        if RANK == 1:
            wait_for("never")
        # Rank 0 goes on into the all-reduce, where it waits for rank 1.
    data = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(8, 16, generator=data)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    mainstay.step(step, loss=loss.item())
    if step % 5 == 4:
        with mainstay.section("checkpoint"):
            state = {"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
            assert mainstay.checkpoint.save(step, state)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
mark(f"final.{NAME}.{RANK}", digest.hexdigest())
dist.destroy_process_group()
"#;

#[test]
fn a_ddp_run_that_loses_a_rank_ends_with_the_parameters_of_an_undisturbed_one() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let start = |name: &str| stage.python(TRAINER).ranks(2).variable("NAME", name).start();
    let undisturbed = start("undisturbed");
    let disturbed = start("disturbed");
    disturbed.mark("waits.0");
    disturbed.mark("waits.1");
    // The second attempt is forked from a process that holds torch already; the first was started plainly.
    disturbed.wait_for_fact(
        "a template that is warm",
        |fact| matches!(fact, Fact::Observed(seen) if seen.component == "template" && seen.event == "warm"),
    );
    disturbed.kill_rank(0, 1);

    let expected = parameters(&undisturbed, "undisturbed");
    let found = parameters(&disturbed, "disturbed");
    let end = disturbed.end();
    end.assert_status(0);
    undisturbed.end().assert_status(0);
    assert_eq!(found, expected, "bit for bit\n{end}");
    assert_eq!(expected[0], expected[1], "all ranks of a DDP run have the same parameters");

    let verdict = end.verdict();
    assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), Some(12)), "{end}");
    let [outcome] = journal::outcomes(&end.journal)[..] else { panic!("one outcome\n{end}") };
    assert_eq!((outcome.step, outcome.steps_lost), (10, 3), "{end}");
    assert!(outcome.to_ranks_connected.is_some(), "{end}");
}

fn parameters(job: &Job, name: &str) -> [String; 2] {
    [0, 1].map(|rank| job.mark(&format!("final.{name}.{rank}")))
}

#[test]
fn a_rank_whose_peer_raised_is_a_victim_though_it_raises_too() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // Rank 0 sees a closed connection when rank 1 is gone, and may report it before rank 1's process has ended.
    let script = r#"
import torch, torch.distributed as dist
import mainstay
dist.init_process_group("gloo")
mainstay.step(0)
if RANK == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(1);
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]), "{end}");
    end.assert_printed("rank 1 raised ValueError: bad batch");
}
