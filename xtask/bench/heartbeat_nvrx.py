"""The cost of NVRx's calls in a Python rank, measured back to back as ours are; run by ft_launcher, which must know the
section. Writes a JSON object of each batch to the file in BENCH_RESULT."""

import json
import os
import time

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

BATCHES, CALLS = 21, 500


def back_to_back(call):
    costs = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        costs.append((time.perf_counter_ns() - began) / CALLS)
    return costs


client = RankMonitorClient()
client.init_workload_monitoring()


def section():
    client.start_section("forward")
    client.end_section("forward")


batches = zip(back_to_back(client.send_heartbeat), back_to_back(section))
result = [{"heartbeat_ns": heartbeat, "section_pair_ns": pair} for heartbeat, pair in batches]
client.shutdown_workload_monitoring()
with open(os.environ["BENCH_RESULT"], "w") as file:
    json.dump(result, file)
