"""Ranks that step together every 50 ms, by a barrier over a socket; with `nvrx` as argument each reports to NVRx's
monitor."""

import os
import socket
import sys
import time

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]
FOLDER = os.environ["BENCH_FOLDER"]
PLACE = f"{FOLDER}/barrier.{ATTEMPT}"
WARM = 120  # steps: enough for what they take to be learned

if "nvrx" in sys.argv:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()

    def tell(step):
        monitor.send_heartbeat()
else:
    import mainstay

    tell = mainstay.step

if RANK == 0:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PLACE + ".new")
    listener.listen(SIZE)
    os.rename(PLACE + ".new", PLACE)
    peers = [listener.accept()[0] for _ in range(SIZE - 1)]
else:
    while not os.path.exists(PLACE):
        time.sleep(0.01)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(PLACE)


def barrier():
    if RANK == 0:
        for other in peers:
            other.recv(1)
        for other in peers:
            other.sendall(b"x")
    else:
        peer.sendall(b"x")
        peer.recv(1)


took = open(f"{FOLDER}/took.{RANK}", "a", buffering=1)
step = 0
while True:
    began = time.monotonic()
    time.sleep(0.05)
    barrier()
    tell(step)
    step += 1
    if step > 1 and RANK == 0:
        took.write(f"{time.monotonic() - began}\n")
    if step == WARM and RANK == SIZE - 1:
        with open(f"{FOLDER}/warm.{ATTEMPT}.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{FOLDER}/warm.{ATTEMPT}.new", f"{FOLDER}/warm.{ATTEMPT}")
