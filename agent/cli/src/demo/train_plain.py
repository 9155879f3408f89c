"""A table of character pairs, trained data-parallel in plain Python: the demo's program where there is no PyTorch.

It needs Python and Mainstay's package; ranks average their gradients over sockets. What it does for Mainstay is
marked with (1) to (4), as in train_torch.py.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import random
import struct
import sysconfig
import time
from multiprocessing.connection import Client, Listener

import mainstay  # (1) also leaves an exit note if this program dies of an exception

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

SEED = 20
CORPUS_BYTES = 200_000
LETTERS = "abcdefghijklmnopqrstuvwxyz "
PAIRS = 48  # of letters, per rank and step
RATE, MOMENTUM = 2.0, 0.9


def corpus():
    """Text that every machine has: the standard library, in the order of the file names, as numbers of letters."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    text = ""
    for path in sorted(library.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace").lower()
        if len(text) >= CORPUS_BYTES:
            break
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    return [numbers[letter] for letter in text[:CORPUS_BYTES] if letter in numbers]


def gradients(table, text, step, noise):
    """The loss of this rank's pairs of a step, and the gradients of the table."""
    draw = random.Random((SEED * 1_000_003 + step) * WORLD_SIZE + RANK)
    sums, loss = [[0.0] * len(LETTERS) for _ in LETTERS], 0.0
    for _ in range(PAIRS):
        at = draw.randrange(len(text) - 1)
        first, second = text[at], text[at + 1]
        if noise.random() < 0.1:
            continue
        weights = [math.exp(value) for value in table[first]]
        total = sum(weights)
        loss -= math.log(weights[second] / total) / PAIRS
        for letter, weight in enumerate(weights):
            sums[first][letter] += (weight / total - (letter == second)) / PAIRS
    return loss, sums


class Ranks:
    """Connections between the ranks: rank 0 averages, in the order of the ranks."""

    def __init__(self):
        place = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 29_500)))
        self.others = []
        if RANK > 0:
            self.first = connected(place)
            self.first.send(RANK)
        elif WORLD_SIZE > 1:
            with Listener(place, backlog=WORLD_SIZE) as listener:
                accepted = [listener.accept() for _ in range(WORLD_SIZE - 1)]
            self.others = [other for _, other in sorted((other.recv(), other) for other in accepted)]

    def average(self, values):
        try:
            return self._average(values)
        except (EOFError, OSError) as error:
            raise ConnectionResetError("Connection closed by peer") from error

    def _average(self, values):
        if RANK > 0:
            self.first.send(values)
            return self.first.recv()
        all_of_them = [values] + [other.recv() for other in self.others]
        mean = [sum(column) / WORLD_SIZE for column in zip(*all_of_them)]
        for other in self.others:
            other.send(mean)
        return mean


def connected(place):
    """A connection to rank 0, which may start later."""
    while True:
        try:
            return Client(place)
        except ConnectionRefusedError:
            time.sleep(0.01)


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--steps", type=int, default=160, help="steps to train")
    ask.add_argument("--checkpoint-every", type=int, default=10, help="steps between two checkpoints")
    ask.add_argument("--pause", type=float, default=0, help="seconds to wait after each step, as a larger model would take")
    ask.add_argument("--result", type=pathlib.Path, help="file for the final loss, written by rank 0")
    asked = ask.parse_args()

    text, ranks, side = corpus(), Ranks(), len(LETTERS)
    table = [[0.0] * side for _ in LETTERS]
    momentum = [[0.0] * side for _ in LETTERS]
    # Pairs are left out by random numbers: their state has to be in the checkpoint too.
    noise = random.Random(SEED + 1 + RANK)

    # (2) This rank's state of the newest step that is whole on every rank, or None at the first start.
    saved = mainstay.checkpoint.load()
    step, loss = (saved["step"], saved["loss"]) if saved else (0, 0.0)
    if saved:
        table, momentum = saved["table"], saved["momentum"]
        version, state, gauss = saved["random"]
        noise.setstate((version, tuple(state), gauss))
    resumed_from = step

    while step < asked.steps:
        loss, own = gradients(table, text, step, noise)
        mean = ranks.average([value for row in own for value in row])
        for first in range(side):
            for second in range(side):
                momentum[first][second] = MOMENTUM * momentum[first][second] + mean[first * side + second]
                table[first][second] -= RATE * momentum[first][second]
        step += 1
        mainstay.step(step, loss=loss)  # (3) the heartbeat: some hundred nanoseconds

        if step % asked.checkpoint_every == 0:
            with mainstay.section("checkpoint"):  # (4) a long save is not a hang
                state = {"step": step, "loss": loss, "table": table, "momentum": momentum}
                mainstay.checkpoint.save(step, {**state, "random": noise.getstate()})
        time.sleep(asked.pause)

    (final,) = ranks.average([loss])
    if RANK == 0:
        print(f"{step} steps, final loss {final:.6f} ({final.hex()})")
        if asked.result:
            values = [value for row in table for value in row]
            result = {
                "steps": step,
                "loss": final,
                "loss_hex": final.hex(),
                "resumed_from": resumed_from,
                "parameters_sha256": hashlib.sha256(struct.pack(f"{len(values)}d", *values)).hexdigest(),
            }
            asked.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
