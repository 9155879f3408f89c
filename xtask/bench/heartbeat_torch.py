"""The cost of watching a PyTorch job per step; prints one JSON object. Needs a fresh page in MAINSTAY_PAGE.

A step of 50 ms enters and leaves data, forward, backward and optimizer and is counted. Each hook is timed
separately, after work that has emptied the caches, as a model's own work does; the thread that reads the
collectives' counters is timed too, and charged with its share of a step.
"""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import mainstay
import mainstay.torch
from mainstay import _native, _torch_collectives, _torch_sections

STEP_S = 0.050
ROUNDS = 60
GROUPS = 4


def cold(call, *arguments):
    """Median ns of a call whose code and data have left the caches."""
    waste = bytearray(64 << 20)
    costs, clock = [], []
    for _ in range(ROUNDS):
        waste[:] = bytes(1 << 20) * 64
        t0 = time.perf_counter_ns()
        t1 = time.perf_counter_ns()
        call(*arguments)
        t2 = time.perf_counter_ns()
        clock.append(t1 - t0)
        costs.append(t2 - t1)
    return max(0.0, statistics.median(costs) - statistics.median(clock))


def added(name, before, after):
    """The time that the hooks add to a call."""
    return {name: max(0.0, after - before)}


def nothing():
    pass


def around(name):
    """An empty function, within a section as the hooks put one around a function."""
    return _torch_sections._around(lambda: None, *_native.gate(mainstay.section(name)))


class Optimizer(torch.optim.Optimizer):
    def __init__(self):
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    def step(self, closure=None):
        pass


assert mainstay.active(), mainstay.status()
# gloo prints to standard output; keep its output out of the result.
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(GROUPS - 1)]

model, plain, given, optimizer = torch.nn.Identity(), torch.nn.Identity(), torch.zeros(1), Optimizer()
before = cold(optimizer.step)
mainstay.torch.watch(model)
costs = {
    **added("optimizer", before, cold(optimizer.step)),
    **added("forward", cold(plain, given), cold(model, given)),
    **added("backward", cold(nothing), cold(around("backward"))),
    **added("data", cold(nothing), cold(around("data"))),
}
look = cold(_torch_collectives.Watch().look)
a_step = sum(costs.values()) + look * STEP_S / _torch_collectives.INTERVAL_S
print(
    json.dumps({"hooks_ns": costs, "look_ns": look, "torch_step_overhead_percent": 100.0 * a_step / (STEP_S * 1e9)}),
    file=result,
)
