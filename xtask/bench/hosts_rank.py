"""A rank of the benchmarks of several hosts that has no framework: steps of 10 ms, each noted as in restart_rank.py."""

import json
import os
import time

try:
    import mainstay
except ImportError:  # under NVRx
    mainstay = None

RANK = int(os.environ["RANK"])
events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = 0
while True:
    time.sleep(0.01)
    if mainstay:
        mainstay.step(step)
    line = {"at": time.monotonic_ns(), "event": "step", "rank": RANK, "pid": os.getpid(), "step": step}
    os.write(events, (json.dumps(line) + "\n").encode())
    step += 1
