"""The time that watching adds to a real training step of PyTorch; prints one JSON object. Needs a fresh page in
MAINSTAY_PAGE.

A step reads a batch from a DataLoader, runs a model under DistributedDataParallel (gloo) forward and backward,
reduces a value, and steps the optimizer. Steps with and without the measured part take turns, in the order A B B A,
so that noise of the machine affects both; after each change one step does not count, because the interpreter has to
warm up again. Half the difference of such a group of four is one sample, and the median of the samples counts. The
three measured parts are: the hooks of the sections; a poll of the collectives' counters by a separate thread,
somewhere in each step; and nothing, whose cost must be 0. Polls happen twice a second, so each step of 50 ms is
charged with a tenth of one.
"""

import json
import os
import random
import statistics
import threading
import time

import torch
import torch.distributed as dist
from torch.optim import optimizer as of_torch
from torch.utils.data.dataloader import _BaseDataLoaderIter as Loading

import mainstay
import mainstay.torch
from mainstay import _torch_collectives

STEP_S = 0.050
FOURS = int(os.environ.get("BENCH_FOURS", "400"))
WIDTH, BATCH, GROUPS = 1024, 32, 4
Parallel = torch.nn.parallel.DistributedDataParallel


class Hooks:
    """The hooks that `watch` has installed, to remove and restore."""

    def __init__(self):
        self._lists = [of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks]
        self._kept = [dict(hooks) for hooks in self._lists]
        self._call = Parallel.__dict__["__call__"]
        assert all(self._kept), "each place has a hook"
        backward, fetch = torch.autograd.backward, Loading.__next__
        self._backward = (backward.__wrapped__, backward)
        self._fetch = (fetch.__wrapped__, fetch)

    def set(self, on):
        for hooks, kept in zip(self._lists, self._kept):
            hooks.clear()
            if on:
                hooks.update(kept)
        Parallel.__call__ = self._call if on else torch.nn.Module.__call__
        torch.autograd.backward = self._backward[on]
        Loading.__next__ = self._fetch[on]


class Looks:
    """A thread that reads the collectives' counters once in each step, at any time in it, while it is on."""

    def __init__(self):
        self._on, self._step_s = False, 0.0
        self._due = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        watch, pause = _torch_collectives.Watch(), threading.Event()
        while True:
            self._due.wait()
            self._due.clear()
            pause.wait(random.random() * self._step_s)
            watch.look()

    def set(self, on):
        self._on = on

    def step(self, took_s):
        """A step starts, and the previous one took this long."""
        self._step_s = took_s
        if self._on:
            self._due.set()


class Nothing:
    def set(self, on):
        pass


assert mainstay.active(), mainstay.status()
# gloo prints to standard output; keep its output out of the result.
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(GROUPS - 1):
    dist.new_group([0])

# The polls are called explicitly here.
_torch_collectives.start = lambda: None
mainstay.torch.watch()
layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
model = Parallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batches = torch.utils.data.DataLoader(torch.randn(BATCH * 64, WIDTH), batch_size=BATCH)


def endless():
    while True:
        yield from batches


data, looks, took = endless(), Looks(), 0.0


def step():
    global took
    looks.step(took)
    began = time.perf_counter_ns()
    loss = model(next(data)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    optimizer.step()
    ns = time.perf_counter_ns() - began
    took = ns / 1e9
    return ns


def four(what):
    """Half the difference of two steps with it and two without; and how long one took without."""

    def after(on):
        what.set(on)
        step()

    after(False)
    a = step()
    after(True)
    b, c = step(), step()
    after(False)
    return (b + c - a - step()) / 2, a


def told(samples):
    """Their median, and its standard error."""
    median = statistics.median(samples)
    spread = statistics.median(abs(sample - median) for sample in samples) * 1.4826
    return median, 1.25 * spread / len(samples) ** 0.5


things = {"hooks": Hooks(), "look": looks, "nothing": Nothing()}
things["hooks"].set(False)
for _ in range(20):
    step()
samples, plain = {name: [] for name in things}, []
for _ in range(FOURS):
    for name, what in things.items():
        sample, without = four(what)
        samples[name].append(sample)
        plain.append(without)
hooks, look, nothing = (told(samples[name]) for name in things)
share = STEP_S / _torch_collectives.INTERVAL_S
added = hooks[0] + look[0] * share
print(
    json.dumps(
        {
            "added_ns": added,
            "uncertain_ns": (hooks[1] ** 2 + (look[1] * share) ** 2) ** 0.5,
            "hooks_ns": hooks[0],
            "look_ns": look[0],
            "nothing_ns": nothing[0],
            "step_ns": statistics.median(plain),
            "torch_step_paired_percent": 100.0 * added / (STEP_S * 1e9),
        }
    ),
    file=result,
    flush=True,
)
