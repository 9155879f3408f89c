"""A rank of the in-process benchmark: an all-reduce over gloo at each step, in which the peers are blocked when one rank raises.

Each event is one line in the file BENCH_EVENTS, with CLOCK_MONOTONIC. In each round but the last another rank raises, after
a few steps. Under `mainstay run` the function is restartable; with BENCH_NVRX it is NVRx's in-process wrapper around it.
"""

import json
import os
import time

EVENTS = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
FAULTS = int(os.environ["BENCH_FAULTS"])
STEPS = 20
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def note(event, round):
    line = {"at": time.monotonic_ns(), "event": event, "rank": RANK, "round": round}
    os.write(EVENTS, (json.dumps(line) + "\n").encode())


import datetime

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def train(round, store=None):
    note("enter", round)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=datetime.timedelta(seconds=10))
    tensor = torch.ones(1024)
    for step in range(STEPS * (round + 1)):
        if round < FAULTS and step == STEPS * (round + 1) - 1 and RANK == round % WORLD:
            # The others are inside the collective by then.
            time.sleep(0.05)
            note("raise", round)
            raise RuntimeError(f"injected in round {round}")
        dist.all_reduce(tensor)
        if store is None:
            mainstay.step(step)
        time.sleep(0.005)
    if store is None:
        dist.destroy_process_group()
    note("done", round)


if os.environ.get("BENCH_NVRX"):
    # With LOCAL_RANK set it looks for GPUs and InfiniBand, and ends the job where there are none.
    os.environ.pop("LOCAL_RANK", None)
    from typing import Optional

    import nvidia_resiliency_ext.inprocess as inprocess

    port = int(os.environ["MASTER_PORT"])

    @inprocess.Wrapper(store_kwargs={"port": port + 1})
    def wrapped(call: Optional[inprocess.CallWrapper] = None):
        round = call.iteration
        host = os.environ["MASTER_ADDR"]
        train(round, dist.TCPStore(host, port + 2 + round, WORLD, RANK == 0, multi_tenant=True))

    wrapped()
else:
    import mainstay

    # A round is an attempt.
    mainstay.restartable(lambda: train(int(os.environ["MAINSTAY_ATTEMPT"])))()
