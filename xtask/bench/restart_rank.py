"""A rank of the restart benchmark: DDP over gloo, 50 ms steps, resumes from a checkpoint, and records its progress.

Each event is one line in the file BENCH_EVENTS, with CLOCK_MONOTONIC, which all processes of a host share. A rank
raises when the file BENCH_EVENTS.raise.RANK exists. With BENCH_REPLICATED all ranks save into memory, which has
copies on other hosts; otherwise the first rank saves into a file that all share.
"""

import time

FIRST_LINE = time.monotonic_ns()

import json
import os

RANK = int(os.environ["RANK"])
EVENTS = os.environ["BENCH_EVENTS"]
CHECKPOINT = EVENTS + ".checkpoint"
TRIGGER = f"{EVENTS}.raise.{RANK}"
REPLICATED = "BENCH_REPLICATED" in os.environ
STEP_S = 0.050
events = os.open(EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(event, at=None, step=None):
    line = {"at": at or time.monotonic_ns(), "event": event, "rank": RANK, "pid": os.getpid(), "step": step}
    os.write(events, (json.dumps(line) + "\n").encode())


note("python", FIRST_LINE)

try:
    import mainstay
except ImportError:  # under the peers
    mainstay = None
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
note("imported")
dist.init_process_group("gloo")
note("process_group")

torch.manual_seed(0)
model = torch.nn.Linear(1000, 1000)
trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
saved = None
note("wrapped")
if REPLICATED:
    saved = mainstay.checkpoint.load()
elif os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, weights_only=True)
if saved is not None:
    model.load_state_dict(saved["model"])
    step = saved["step"]
note("resumed", step=step)

inputs = torch.randn(8, 1000)
while True:
    until = time.monotonic() + STEP_S
    optimizer.zero_grad()
    trained(inputs).square().mean().backward()
    optimizer.step()
    step += 1
    time.sleep(max(0.0, until - time.monotonic()))
    if mainstay:
        mainstay.step(step)
    if REPLICATED and step % 100 == 0:
        # Copies may cost training 1 %: more frequent saves would not keep up.
        mainstay.checkpoint.save(step, {"model": model.state_dict(), "step": step})
    elif not REPLICATED and RANK == 0 and step % 10 == 0:
        torch.save({"model": model.state_dict(), "step": step}, CHECKPOINT + ".new")
        os.replace(CHECKPOINT + ".new", CHECKPOINT)
    note("step", step=step)
    if os.path.exists(TRIGGER):
        os.unlink(TRIGGER)
        note("raise", step=step)
        raise RuntimeError(f"asked to fail at step {step}")
