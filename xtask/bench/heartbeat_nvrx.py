"""The cost of NVRx's calls in a Python rank, measured back to back as ours are; run by ft_launcher, which must know the
section. Writes one JSON object to the file in BENCH_RESULT."""

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


result = {"heartbeat_ns": back_to_back(client.send_heartbeat), "section_pair_ns": back_to_back(section)}
client.shutdown_workload_monitoring()
with open(os.environ["BENCH_RESULT"], "w") as file:
    json.dump(result, file)
