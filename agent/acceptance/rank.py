"""One rank that trains a little and fails in the way that FAULT names, in the first attempt only."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

DEVICE, FAULT = os.environ["ACCEPT_DEVICE"], os.environ["ACCEPT_FAULT"]
BACKEND = os.environ.get("ACCEPT_BACKEND", "gloo")
FIRST = os.environ.get("MAINSTAY_ATTEMPT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == "0"


def fail():
    with open(os.environ["ACCEPT_MARK"], "a") as mark:
        mark.write(f"failed {time.time()}\n")
    if FAULT == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "exception":
        raise RuntimeError("acceptance: a planned exception")
    if FAULT == "assert":  # Device-side: an index out of range. On the CPU it is an exception.
        print(torch.zeros(4, device=DEVICE)[torch.tensor([9], device=DEVICE)])
    if FAULT == "oom":
        print(torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE))
    raise SystemExit(f"{FAULT} did not fail")


def main():
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    weights = torch.ones(1024, 64, device=DEVICE)
    for step in range(20):
        gradient = (weights * 0.01).sum(0).contiguous()
        dist.all_reduce(gradient)
        weights = weights - gradient * 1e-3
        if step == 0 and rank == 0:
            with open(os.environ["ACCEPT_MARK"], "a") as mark:
                mark.write(f"step {time.time()}\n")
        if step == 10 and FIRST and FAULT != "none" and rank == dist.get_world_size() - 1:
            fail()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
