"""A rank that holds BENCH_GIB of memory in small pages and writes its process id to BENCH_READY when it does."""

import mmap
import os
import time

from mainstay import step

MADV_NOHUGEPAGE = 15
held = mmap.mmap(-1, int(os.environ["BENCH_GIB"]) << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(MADV_NOHUGEPAGE)
for at in range(0, len(held), mmap.PAGESIZE):
    held[at] = 1
step(time.monotonic_ns())
with open(os.environ["BENCH_READY"] + ".new", "w") as told:
    told.write(f"{os.getpid()}\n")
os.rename(os.environ["BENCH_READY"] + ".new", os.environ["BENCH_READY"])
while True:
    time.sleep(1)
