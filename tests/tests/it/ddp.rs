//! A DDP training that can lose a rank, and trains once more without a failure to compare the results.

/// Gloo, and a model with an optimizer that has state; all of it is in the checkpoint. Use two ranks: with more, the sums
/// of DDP depend on its buckets, which it orders again in the second step of each process. Rank 1
/// waits before step 13 of the attempts that are named in WAITS, and rank 0 waits for it in the all-reduce.
///
/// The mark `final.RANK` has the digest of the parameters. `undisturbed.RANK` has that of a training from the first step
/// to the last in the same process, because on two processors a second start of PyTorch takes longer than this test.
pub const DDP: &str = r#"
import hashlib, torch, torch.distributed as dist
import mainstay
from torch.nn.parallel import DistributedDataParallel as DDP

torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
dist.init_process_group("gloo")

def train(saved, is_watched):
    torch.manual_seed(17)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
    for step in range(0 if saved is None else saved["step"] + 1, 24):
        if is_watched and str(ATTEMPT) in os.environ.get("WAITS", "").split(",") and step == 13:
            mark(f"waits.{ATTEMPT}.{RANK}")
            if RANK == 1:
                wait_for("never")
            # Rank 0 goes on into the all-reduce, where it waits for rank 1.
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + RANK))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if is_watched:
            mainstay.step(step, loss=loss.item())
            if step % 5 == 4:
                with mainstay.section("checkpoint"):
                    state = {"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
                    assert mainstay.checkpoint.save(step, state)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()

mark(f"final.{RANK}", train(mainstay.checkpoint.load(), is_watched=True))
mark(f"undisturbed.{RANK}", train(None, is_watched=False))
dist.destroy_process_group()
"#;
