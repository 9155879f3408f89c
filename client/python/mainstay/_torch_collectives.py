"""Reads the counters of collectives from torch. No collective is wrapped, so collectives cost nothing extra.

A thread polls twice a second. *Entered* is the sequence number of the group's backends, which also counts the
operations that C++ code (DDP's reducer, DTensor) enters. *Completed* comes from NCCL's status if there is one. Else it
comes from the flight recorder once the counters stop changing, which also reports the newest operation. Else it is the
number entered when the last optimizer step started.
"""

from __future__ import annotations

import json
import sys
import threading

from . import _native, _role

INTERVAL_S = 0.5
ROLE_LOOKS = 600  # frameworks create their groups within the first minutes; every fourth poll is enough
DUMPS_APART_S = 5.0  # a dump walks the whole recorder, 0.1 s for 2000 operations, without the GIL

_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_KINDS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_reduce_barrier": "barrier",
    "all_gather": "all_gather", "_all_gather_base": "all_gather", "allgather": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "all_to_all": "all_to_all", "alltoall": "all_to_all", "barrier": "barrier", "send": "send", "recv": "recv",
}  # fmt: skip

_thread = None


def start() -> None:
    """Starts the thread, once."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_keep_looking, name="mainstay-collectives", daemon=True)
        _thread.start()


def _keep_looking() -> None:
    watch = Watch()
    pause = threading.Event()
    looks = 0
    while not pause.wait(INTERVAL_S):
        if not _native.active():
            return
        looks += 1
        if looks <= ROLE_LOOKS and looks % 4 == 1:
            _role.from_frameworks()
        try:
            watch.look()
        except Exception:
            # A group is being created or destroyed, or this torch has other tables.
            continue


class _Group:
    """The known state of one process group."""

    __slots__ = ("completed", "devices", "dumped", "entered", "id", "steps", "still")

    def __init__(self, id: int, devices: list):
        self.id = id
        self.devices = devices  # one per backend; a reference to the backend itself would keep it alive after the group
        self.entered = self.completed = 0
        self.steps = None
        self.still = 0  # polls without change
        self.dumped = -1  # the value of `still` at the last dump of the recorder


class Watch:
    """All process groups of this process; :meth:`look` reads their counters and writes them into the page."""

    def __init__(self):
        self._groups = {}

    def look(self) -> None:
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        if distributed is None or not distributed.is_initialized():
            self._groups.clear()
            return
        known = {}
        world = distributed._world
        steps = _native.optimizer_steps()
        nccl = _nccl_completed()
        for group, name in list(world.pg_names.items()):
            if group == distributed.GroupMember.NON_GROUP_MEMBER:
                continue
            state = self._groups.get(name)
            if state is None:
                state = _Group(_native.group_id(name, _ranks(world, group)), _devices(group))
            known[name] = state
            self._look_at(state, name, _entered(group, state.devices), steps, nccl.get(name))
        self._groups = known

    def _look_at(self, state, name: str, entered: int, steps, nccl) -> None:
        moved = entered != state.entered
        if moved:
            # Groups work in order: more operations follow those entered at the previous poll.
            state.completed = state.entered if entered > state.entered else 0
            state.still = 0
        else:
            state.still += 1
            if steps != state.steps:
                # An optimizer step started after the counters stopped changing: it had to wait for all of them.
                state.completed = entered
        state.entered, state.steps = entered, steps
        operation = None
        if nccl is not None:
            state.completed = nccl
        if state.completed < entered and not moved:
            due = state.dumped < 0 or (state.still - state.dumped) * INTERVAL_S >= DUMPS_APART_S
            if not due:
                return
            state.dumped = state.still
            recorded = _recorded(name, entered)
            if recorded is not None:
                active, *operation = recorded
                state.completed = entered - active
        else:
            state.dumped = -1
        kind, size = operation or (None, 0)
        _native.collective(state.id, entered, state.completed, kind, size)


def _ranks(world, group) -> list:
    return sorted(world.pg_group_ranks.get(group, {}))


def _devices(group) -> list:
    """One kind of device for each backend of the group. A group for CPU and GPU may have two backends."""
    backends = {id(group._get_backend(device)): device for device in group._device_types}
    return list(backends.values())


def _entered(group, devices) -> int:
    """The number of operations that the group's backends have entered."""
    return sum([group._get_backend(device)._get_sequence_number_for_group() for device in devices])


def _nccl_completed() -> dict:
    """The number of the newest collective that NCCL has completed, by group name."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    from torch._C import _distributed_c10d as native

    dump = getattr(native, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    dumped = json.loads(dump(False, False))
    configured = dumped.get("pg_config", {})
    return {
        configured.get(group, {}).get("name", group): max(0, int(status["last_completed_collective"]))
        for group, status in dumped.get("pg_status", {}).items()
        if "last_completed_collective" in status
    }


def _recorded(name: str, entered: int):
    """The flight recorder's data on the group: the number of incomplete operations, and kind and bytes of the newest.
    None if it has not recorded the newest, because it is off or was started after the group."""
    from torch._C import _distributed_c10d as native

    newest, active = None, 0
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if not hasattr(native, dump):
            continue
        for entry in json.loads(getattr(native, dump)(True, False)).get("entries", ()):
            if entry["process_group"][0] != name or entry.get("is_p2p"):
                continue
            if newest is None or entry["collective_seq_id"] >= newest["collective_seq_id"]:
                newest = entry
            if not entry.get("retired") and entry.get("state") != "completed":
                active += 1
    if newest is None or newest["collective_seq_id"] < entered:
        return None
    return active, _kind(newest), _bytes(newest)


def _kind(entry) -> str:
    name = entry["profiling_name"].rpartition(":")[2]
    return _KINDS.get(name, "other")


def _bytes(entry) -> int:
    total = 0
    for size, dtype in zip(entry.get("input_sizes", ()), entry.get("input_dtypes", ())):
        count = 1
        for length in size:
            count *= length
        total += count * _BYTES.get(dtype, 1)
    return total
