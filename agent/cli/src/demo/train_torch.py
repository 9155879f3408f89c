"""A small character-level language model, trained data-parallel on the sources of Python's standard library.

An ordinary PyTorch program: it runs by itself, under torchrun, and under Mainstay. What it does for Mainstay is
marked with (1) to (4), and costs nothing without a launcher.

    python train.py                                            # one process, no launcher
    mainstay run --nproc-per-node 2 --max-restarts 3 train.py  # two ranks; survives the death of either

Everything that the result depends on is either fixed by a seed, a function of the step and the rank, or part of the
checkpoint. A run that was interrupted and resumed therefore ends with the same bits as one that was not.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sysconfig
import time

import mainstay  # (1) also leaves an exit note if this program dies of an exception
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

SEED = 20
CORPUS_BYTES = 2_000_000
BATCH, LENGTH = 12, 48  # sequences per rank and step, bytes per sequence
WIDTH, LAYERS = 128, 2


class CharacterModel(nn.Module):
    """Predicts the next byte of a text from those before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        # Dropout draws from torch's random numbers: their state has to be in the checkpoint too.
        self.recur = nn.GRU(WIDTH, WIDTH, LAYERS, batch_first=True, dropout=0.1)
        self.predict = nn.Linear(WIDTH, 256)

    def forward(self, text):
        hidden, _ = self.recur(self.embed(text))
        return self.predict(hidden)


def corpus():
    """The first bytes of the standard library, in the order of the file names: text that every machine has."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch_of(text, step):
    """The batch of this step and rank, whatever was trained before it."""
    draw = torch.Generator().manual_seed((SEED * 1_000_003 + step) * WORLD_SIZE + RANK)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw)
    chunks = torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()
    return chunks[:, :-1], chunks[:, 1:]


def checkpoint_state(step, loss, model, optimizer):
    """All that the next step depends on, and the loss in case there is no next one."""
    return {
        "step": step,
        "loss": loss.detach(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }


def restore(state, model, optimizer):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"], state["loss"]


def parameter_digest(model):
    """Equal for two models only if every bit of every parameter is."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def sum_in_rank_order(_, bucket):
    """Averages gradients. Of more than two numbers the order of a sum matters, and a ring's depends on how buckets are laid out."""
    mine = bucket.buffer()
    all_of_them = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    gathered = dist.all_gather(all_of_them, mine, async_op=True).get_future()

    def average(_):
        total = all_of_them[0]
        for theirs in all_of_them[1:]:
            total = total + theirs
        return total / WORLD_SIZE

    return gathered.then(average)


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--steps", type=int, default=160, help="steps to train")
    ask.add_argument("--checkpoint-every", type=int, default=10, help="steps between two checkpoints")
    ask.add_argument("--pause", type=float, default=0, help="seconds to wait after each step, as a larger model would take")
    ask.add_argument("--result", type=pathlib.Path, help="file for the final loss, written by rank 0")
    asked = ask.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")

    text = corpus()
    model = CharacterModel()
    trained = DistributedDataParallel(model) if distributed else model
    if WORLD_SIZE > 2:
        trained.register_comm_hook(None, sum_in_rank_order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(SEED + 1 + RANK)  # equal weights above, a rank's own dropout from here

    # (2) This rank's state of the newest step that is whole on every rank, or None at the first start.
    saved = mainstay.checkpoint.load()
    step, loss = restore(saved, model, optimizer) if saved else (0, None)
    resumed_from = step

    while step < asked.steps:
        inputs, targets = batch_of(text, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        mainstay.step(step, loss=loss.item())  # (3) the heartbeat: some hundred nanoseconds

        if step % asked.checkpoint_every == 0:
            with mainstay.section("checkpoint"):  # (4) a long save is not a hang
                mainstay.checkpoint.save(step, checkpoint_state(step, loss, model, optimizer))
        time.sleep(asked.pause)

    final = loss.detach().double()
    if distributed:
        dist.all_reduce(final)  # the mean over the ranks: of two numbers, the order of the sum does not matter
        dist.destroy_process_group()
    final = final.item() / WORLD_SIZE
    if RANK == 0:
        print(f"{step} steps, final loss {final:.6f} ({final.hex()})")
        if asked.result:
            result = {
                "steps": step,
                "loss": final,
                "loss_hex": final.hex(),
                "resumed_from": resumed_from,
                "parameters_sha256": parameter_digest(model),
            }
            asked.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
