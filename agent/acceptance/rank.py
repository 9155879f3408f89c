"""A rank that trains for a few steps and fails in the way that ACCEPT_FAULT names.

It writes its events to the file ACCEPT_MARK, one JSON object per line.
"""

import json
import os
import signal
import sys
import time

# Read before any import: a rank that was forked from a template already has the modules.
FORKED = "torch" in sys.modules


def driver_files():
    """The devices of the NVIDIA driver that this process has open or mapped."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if path.startswith("/dev/nvidia"):
            held.add(path)
    with open("/proc/self/maps") as maps:
        held.update(line.split()[-1] for line in maps if "/dev/nvidia" in line)
    return sorted(held)


INHERITED = driver_files()

import torch  # noqa: E402 (the inherited files are read first)
import torch.distributed as dist  # noqa: E402

import mainstay  # noqa: E402

DEVICE, FAULT = os.environ["ACCEPT_DEVICE"], os.environ["ACCEPT_FAULT"]
BACKEND = os.environ.get("ACCEPT_BACKEND", "gloo")
# These faults occur in each attempt, all others once.
AGAIN = FAULT in ("oom", "hog")
PAUSE = float(os.environ.get("ACCEPT_PAUSE", "0"))


def mark(word, **more):
    line = dict(word=word, time=time.time(), pid=os.getpid(), rank=os.environ["RANK"], **more)
    with open(os.environ["ACCEPT_MARK"], "a") as file:
        file.write(json.dumps(line) + "\n")


def has_failed():
    """Whether an earlier attempt has failed. Launchers count attempts in different ways."""
    try:
        with open(os.environ["ACCEPT_MARK"]) as file:
            return '"failed"' in file.read()
    except FileNotFoundError:
        return False


def fail():
    mark("failed")
    if FAULT == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "exception":
        raise RuntimeError("acceptance: a planned exception")
    if DEVICE == "cpu":
        stand_in()
    if FAULT == "assert":  # Device-side: an index out of range.
        print(torch.zeros(4, device=DEVICE)[torch.tensor([9], device=DEVICE)])
    if FAULT in ("oom", "hog"):  # More than the device has; more than the other process leaves free.
        free, total = torch.cuda.mem_get_info()
        print(torch.empty(total * 2 if FAULT == "oom" else total * 9 // 10, dtype=torch.uint8, device=DEVICE))
    if FAULT in ("illegal", "hang"):
        import kernels

        kernels.launch("poke" if FAULT == "illegal" else "spin", torch)
        torch.cuda.synchronize()
    raise SystemExit(f"{FAULT} did not fail")


def stand_in():
    """Fails with the error messages of a GPU on a host without one."""
    texts = {"assert": "CUDA error: device-side assert triggered", "illegal": "CUDA error: an illegal memory access was encountered"}
    if FAULT in texts:
        raise RuntimeError(texts[FAULT])
    if FAULT in ("oom", "hog"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 160.00 GiB. GPU 0 has a total capacity of 79.11 GiB")
    while FAULT == "hang":
        time.sleep(60)


def train(kept):
    dist.init_process_group(BACKEND)
    rank, failed = dist.get_rank(), has_failed()
    # Shows that state from outside the function still exists and that the device can read it.
    mark("began", forked=FORKED, inherited=INHERITED, kept=float(kept.sum()))
    weights = torch.ones(1024, 64, device=DEVICE)
    for step in range(20):
        gradient = (weights * 0.01).sum(0).contiguous()
        dist.all_reduce(gradient)
        weights = weights - gradient * 1e-3
        weights.sum().item()  # The step is complete when the device has finished it.
        mainstay.step(step)
        if step == 0 and rank == 0:
            mark("step")
        if step == 10 and (AGAIN or not failed) and FAULT != "none" and rank == dist.get_world_size() - 1:
            fail()
        time.sleep(PAUSE)
    dist.destroy_process_group()


def main():
    if DEVICE == "cuda" and BACKEND == "nccl":
        torch.cuda.set_device(0)
    kept = torch.ones(1024, device=DEVICE)
    function = mainstay.restartable(train) if os.environ.get("ACCEPT_STAY") else train
    function(kept)


if __name__ == "__main__":
    sys.exit(main())
