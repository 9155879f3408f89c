"""Runs the client of NVRx itself, as ft_launcher does: `nvrx_asks.py ENDPOINT [SEGMENT_DIRECTORY]`.

Prints one line of JSON: whether the node may take part, and what the client logged about it.
"""

import importlib.util
import json
import logging
import pathlib
import sys
import types

from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


kept = Kept()
logger = logging.getLogger(LogConfig.name)
logger.addHandler(kept)
logger.setLevel(logging.DEBUG)
answer = {"healthy": NodeHealthCheck(endpoint=sys.argv[1])()}
if len(sys.argv) > 2:
    # The package around it wants PyTorch; the check itself does not.
    package = "nvidia_resiliency_ext.fault_tolerance"
    found = pathlib.Path(importlib.util.find_spec("nvidia_resiliency_ext").origin).parent / "fault_tolerance"
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(found)]
    from nvidia_resiliency_ext.fault_tolerance.segment_health_check import get_segment_health_check

    answer["segment_healthy"] = get_segment_health_check(sys.argv[2])()
answer["said"] = kept.lines
print(json.dumps(answer))
