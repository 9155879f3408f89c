"""The cost of Mainstay's calls in a Python rank; prints one JSON object. Needs a fresh page in MAINSTAY_PAGE."""

import json
import time

import mainstay

BATCHES, CALLS = 201, 5000
STEP_S = 0.050
STEPS = 60


def back_to_back(call):
    """Median over batches of ns per call, the loop around it included."""
    costs = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        for n in range(CALLS):
            call(n)
        costs.append((time.perf_counter_ns() - began) / CALLS)
    return sorted(costs)[BATCHES // 2]


def section(_):
    with mainstay.section("forward"):
        pass


def in_a_training_loop():
    """The share of a 50 ms step that the calls of a step take, in percent, after work that has emptied the caches."""
    waste = bytearray(64 << 20)
    costs, clock = [], []
    for n in range(STEPS):
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            waste[:] = bytes(1 << 20) * 64
        t0 = time.perf_counter_ns()
        t1 = time.perf_counter_ns()
        with mainstay.section("forward"):
            pass
        mainstay.step(n, loss=1.5)
        t2 = time.perf_counter_ns()
        clock.append(t1 - t0)
        costs.append(t2 - t1)
    cost = sorted(costs)[STEPS // 2] - sorted(clock)[STEPS // 2]
    return 100.0 * cost / (STEP_S * 1e9)


assert mainstay.active(), mainstay.status()
print(
    json.dumps(
        {
            "heartbeat_ns": back_to_back(mainstay.step),
            "step_loss_ns": back_to_back(lambda n: mainstay.step(n, loss=1.5)),
            "section_pair_ns": back_to_back(section),
            "step_overhead_percent": in_a_training_loop(),
        }
    )
)
