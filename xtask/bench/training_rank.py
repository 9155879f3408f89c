"""A rank that trains and saves, and writes what its steps took between two saves as a line of JSON.

environment: BENCH_OUT   where the lines go
             BENCH_MIB   the size of its state
             BENCH_STEPS steps from one save to the next
             BENCH_SAVES how many saves
             BENCH_TURN  how many of them in a turn; each turn begins when there is a file BENCH_OUT.turn-NUMBER
             BENCH_COPY  a script that copies so many MiB whenever it is written to, after each save; none if unset

A step is one product of matrices after the other in one thread, as long as a step of 50 ms on this machine. What a save takes is not
counted: it is a figure of its own.
"""

import json
import os
import subprocess
import sys
import time

import mainstay
import torch

torch.set_num_threads(1)
STEPS, SAVES, TURN = (int(os.environ[name]) for name in ("BENCH_STEPS", "BENCH_SAVES", "BENCH_TURN"))
OUT = os.environ["BENCH_OUT"]
WORDS = int(os.environ["BENCH_MIB"]) * (1 << 20) // 4 // 16
STEP_S = 0.05
now = time.perf_counter

one, other = torch.randn(768, 768), torch.randn(768, 768)
into = torch.empty(768, 768)


def products(count):
    for _ in range(count):
        torch.mm(one, other, out=into)


def products_of_a_step():
    products(20)
    began = now()
    products(200)
    return max(1, round(200 * STEP_S / (now() - began)))


count = products_of_a_step()
state = {f"layer{number}.weight": torch.full((WORDS,), float(number)) for number in range(16)}
began = now()
assert mainstay.checkpoint.reserve(state), "there is no memory for it"
with open(f"{OUT}.reserving", "w", encoding="utf-8") as out:
    out.write(str(now() - began))
os.rename(f"{OUT}.reserving", f"{OUT}.ready")
copier = None
if script := os.environ.get("BENCH_COPY"):
    command = [sys.executable, script, os.environ["BENCH_MIB"]]
    copier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    copier.stdout.readline()
for save in range(SAVES):
    while save % TURN == 0 and not os.path.exists(f"{OUT}.turn-{save // TURN}"):
        time.sleep(0.01)
    for tensor in state.values():
        # An unchanged state would not be sent.
        tensor.add_(1.0)
    assert mainstay.checkpoint.save((save + 1) * STEPS, state)
    if copier:
        os.write(copier.stdin.fileno(), b".")
    began, cpu = now(), time.thread_time()
    for step in range(STEPS):
        products(count)
        mainstay.step(save * STEPS + step + 1)
    line = {"steps": STEPS, "took": now() - began, "cpu": time.thread_time() - cpu, "count": count}
    with open(OUT, "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
