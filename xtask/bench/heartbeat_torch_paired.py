"""What watching adds to a real training step of PyTorch; prints one JSON object. Wants a fresh page in MAINSTAY_PAGE.

A step reads a batch from a DataLoader, runs a model under DistributedDataParallel (gloo) forward and backward, reduces
a value, and steps the optimizer. Steps with Mainstay's hooks in place and its counting of collectives at work take
turns with steps without, in the order A B B A, so that what the machine does meanwhile meets both. Half the difference
of such a four is one sample; their median counts, and is told as a share of a step of 50 ms.
"""

import json
import os
import statistics
import threading
import time

import torch
import torch.distributed as dist
from torch.optim import optimizer as of_torch
from torch.utils.data.dataloader import _BaseDataLoaderIter as Loading

import mainstay
import mainstay.torch
from mainstay import _torch_collectives, _torch_sections

STEP_S = 0.050
FOURS = int(os.environ.get("BENCH_FOURS", "400"))
WIDTH, BATCH, GROUPS = 1024, 32, 4


class Hooks:
    """The hooks that `watch` has put in place, to be taken away and put back."""

    def __init__(self, model):
        self._lists = [
            of_torch._global_optimizer_pre_hooks,
            of_torch._global_optimizer_post_hooks,
            model._forward_pre_hooks,
            model._forward_hooks,
        ]
        self._kept = [dict(hooks) for hooks in self._lists]
        assert all(self._kept), "each place has a hook"
        backward, fetch = torch.autograd.backward, Loading.__next__
        self._backward = (backward.__wrapped__, backward)
        self._fetch = (fetch.__wrapped__, fetch)

    def set(self, on):
        for hooks, kept in zip(self._lists, self._kept):
            hooks.clear()
            if on:
                hooks.update(kept)
        torch.autograd.backward = self._backward[on]
        Loading.__next__ = self._fetch[on]


class Counting:
    """The thread that reads the collectives' counters, at its usual pace, while it is on."""

    def __init__(self):
        self.on = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        watch, pause = _torch_collectives.Watch(), threading.Event()
        # What it costs falls upon steps of both kinds alike unless it looks only in those that are watched.
        while not pause.wait(_torch_collectives.INTERVAL_S):
            while not self.on:
                pause.wait(0.0005)
            watch.look()


assert mainstay.active(), mainstay.status()
# What gloo prints is not ours.
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(GROUPS - 1):
    dist.new_group([0])

mainstay.torch.watch()
layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batches = torch.utils.data.DataLoader(torch.randn(BATCH * 64, WIDTH), batch_size=BATCH)


def endless():
    while True:
        yield from batches


data = endless()


def step():
    began = time.perf_counter_ns()
    loss = model(next(data)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    optimizer.step()
    return time.perf_counter_ns() - began


hooks, counting = Hooks(model), Counting()


def timed(on):
    hooks.set(on)
    counting.on = on
    return step()


for _ in range(20):
    timed(False)


samples, plain = [], []
for _ in range(FOURS):
    a, b, c, d = timed(False), timed(True), timed(True), timed(False)
    samples.append((b + c - a - d) / 2)
    plain.append(a)
added = statistics.median(samples)
spread = statistics.median(abs(sample - added) for sample in samples) * 1.4826
print(
    json.dumps(
        {
            "added_ns": added,
            "uncertain_ns": 1.25 * spread / len(samples) ** 0.5,
            "step_ns": statistics.median(plain),
            "torch_step_paired_percent": 100.0 * added / (STEP_S * 1e9),
        }
    ),
    file=result,
    flush=True,
)
