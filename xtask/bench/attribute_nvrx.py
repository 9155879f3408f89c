"""NVRx's deterministic stage over a file; prints MB/s."""

import os
import sys
import time

from nvidia_resiliency_ext.attribution.restart_agent.l0.assembly import build_l0_bundle

began = time.perf_counter()
build_l0_bundle(sys.argv[1])
print(os.path.getsize(sys.argv[1]) / 1e6 / (time.perf_counter() - began))
