"""A rank that only sends heartbeats, 20 times a second, under Mainstay or under NVRx."""

import os
import time

if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ or os.environ.get("BENCH_CLIENT") == "nvrx":
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()

    def beat(_):
        client.send_heartbeat()
else:
    from mainstay import step as beat

ready = f"{os.environ['BENCH_READY']}.{os.environ['RANK']}"
n = 0
while True:
    beat(n)
    if n == 0:
        open(ready, "w").close()
    n += 1
    time.sleep(0.050)
