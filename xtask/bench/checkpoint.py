"""A rank that saves and loads a state of one size with one tool, and writes the times as a line of JSON.

usage: checkpoint.py TOOL GIB SAMPLES OUT PLACE      TOOL: mainstay, torch_save, dcp_async, nvrx, nvrx_replicated,
dlrover

Every round starts with one memcpy of the same bytes between two warm buffers, so that each ratio compares
measurements close in time.
"""

import contextlib
import gc
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time

import numpy as np
import torch

TOOL, GIB, SAMPLES, OUT, PLACE = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
torch.set_num_threads(1)
TENSORS = max(1, int(GIB * 16))
WORDS = int(GIB * (1 << 30) / 4 / TENSORS)
BYTES = TENSORS * WORDS * 4
now = time.perf_counter
# A second rank takes part if states are sent to each other; the first one reports.
RANKS = 2 if TOOL == "nvrx_replicated" else 1
rank = 0


def tell(**facts):
    if rank != 0:
        return
    with open(OUT, "a", encoding="utf-8") as out:
        out.write(json.dumps(facts) + "\n")


def main():
    global rank
    place = tempfile.mkdtemp(dir=PLACE)
    for other in range(1, RANKS):
        if os.fork() == 0:
            rank = other
            break
    state = {f"layer{number}.weight": torch.full((WORDS,), float(number)) for number in range(TENSORS)}
    # More than any cache holds, and no more: a large state is copied over it again and again.
    turns = min(TENSORS, 16)
    buffer = np.zeros(turns * WORDS, np.float32)

    def memcpy():
        began = now()
        for number, tensor in enumerate(state.values()):
            at = number % turns * WORDS
            np.copyto(buffer[at : at + WORDS], tensor.numpy())
        return now() - began

    def check(loaded):
        assert loaded["layer0.weight"][0] == SAMPLES
        for number in range(1, TENSORS):
            tensor = loaded[f"layer{number}.weight"]
            assert tensor[0] == number and tensor[-1] == number

    def new_memory():
        """The time that the kernel alone takes for the pages of this much new memory, in huge pages and with two
        threads: nothing is copied."""
        fresh = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fresh.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(fresh, np.uint8)[::4096]
        half = len(pages) // 2
        # numpy lets other threads run while it fills.
        other = threading.Thread(target=pages[:half].fill, args=(1,))
        began = now()
        other.start()
        pages[half:].fill(1)
        other.join()
        return now() - began

    memcpy()
    try:
        save, settled, load, load_into = WAYS[TOOL](state, place)
        for number in range(SAMPLES + 1):
            copy = memcpy()
            # The state changes from step to step, and no tool may find it unchanged.
            state["layer0.weight"][0] = number
            began = now()
            save(number + 1)
            took = now() - began
            settled(number + 1)
            tell(what="first" if number == 0 else "save", copy=copy, took=took, behind=now() - began)
            # Some peers leave copies of the state in reference cycles, and more of them than a small host has memory
            # for.
            gc.collect()
        for _ in range(SAMPLES if TOOL == "mainstay" else 0):
            copy = memcpy()
            began = now()
            loaded = load()
            took = now() - began
            check(loaded)
            del loaded
            tell(what="load", copy=copy, took=took)
            copy = memcpy()
            tell(what="new memory", copy=copy, took=new_memory())
        for _ in range(SAMPLES):
            copy = memcpy()
            for tensor in state.values():
                tensor[0] = tensor[-1] = -1
            began = now()
            load_into(state)
            took = now() - began
            check(state)
            tell(what="load into", copy=copy, took=took)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if TOOL == "dlrover":
            # It leaves its memory to the next trainer.
            with contextlib.suppress(FileNotFoundError):
                os.unlink("/dev/shm/ckpt_shm_0")
    tell(what="done", bytes=BYTES)


def mainstay(state, _place):
    import mainstay

    assert mainstay.checkpoint.reserve(state), "there is no memory for it"

    def save(step):
        assert mainstay.checkpoint.save(step, state)

    def settled(step):
        while mainstay.checkpoint._in_memory(mainstay.checkpoint._home(None)).origin(step) is None:
            time.sleep(0.01)
        # With two slots the next save would wait for the disk.
        memory = mainstay.checkpoint._pool.memory_of_rank(os.environ["MAINSTAY_CHECKPOINT_DIR"], 0)
        while not any(slot.state == "free" for slot in memory.control.slots()):
            time.sleep(0.01)

    return save, settled, mainstay.checkpoint.load, lambda state: mainstay.checkpoint.load(into=state)


def copied(load):
    """A loader that returns new tensors, as one that loads into those of a model: scripts then call load_state_dict."""

    def load_into(state):
        for name, tensor in load().items():
            state[name].copy_(tensor)

    return load_into


def torch_save(state, place):
    path = os.path.join(place, "state.pt")
    load = lambda: torch.load(path)
    return lambda _: torch.save(state, path), lambda _: None, load, copied(load)


def process_group():
    world = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS, MASTER_ADDR="127.0.0.1", MASTER_PORT=29591)
    os.environ.update({name: str(value) for name, value in world.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo")


def dcp_async(state, place):
    import torch.distributed.checkpoint as dcp

    process_group()
    pending, paths = [], []

    def save(step):
        path = os.path.join(place, str(step))
        pending.append(dcp.async_save(state, checkpoint_id=path))
        paths.append(path)

    def settled(_):
        pending.pop().result()
        while len(paths) > 1:
            shutil.rmtree(paths.pop(0))

    def load_into(state):
        dcp.load(state, checkpoint_id=paths[-1])

    return save, settled, None, load_into


def nvrx(state, place, strategy=None):
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, dict_list_map_inplace
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    process_group()
    # It accepts tensors on CUDA only; here the copy to the host is a copy on the host.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"

    class OnHost(BasicTensorAwareStateDict):
        def __init__(self, held):
            self.state_dict, self._is_hollow = held, False

        def copy_tensors_to_cpu(self, non_blocking=False):
            dict_list_map_inplace(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, self.state_dict)

        def restore_tensor_device(self, non_blocking=True):
            pass

    OnHost.__qualname__ = "OnHost"
    globals()["OnHost"] = OnHost
    manager = LocalCheckpointManager(place, repl_strategy=strategy() if strategy else None)

    def load():
        fresh = LocalCheckpointManager(place, repl_strategy=strategy() if strategy else None)
        fresh.find_latest()
        return fresh.load()[0].state_dict

    return lambda step: manager.save(OnHost(dict(state)), step), lambda _: None, load, copied(load)


def nvrx_replicated(state, place):
    """Two ranks that send each other their states in each save."""
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    return nvrx(state, place, lambda: CliqueReplicationStrategy.from_replication_params(1, 2))


def dlrover(state, place):
    """Its flash checkpoint in memory: no checksums, and one step at a time."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    os.environ.update(NODE_RANK="0", NODE_NUM="1")
    # It mistakes sockets of a killed trainer for those of a living one.
    shutil.rmtree("/tmp/ckpt_sock", ignore_errors=True)
    process_group()
    checkpointer = DdpCheckpointer(place)

    def load():
        """Views of its memory, which are copied where they go."""
        found = checkpointer._engine.get_state_dict_from_memory()
        found = found[1] if isinstance(found, tuple) else found
        return found["model_states"] if "model_states" in found else found

    return (
        lambda step: checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY),
        lambda _: None,
        load,
        copied(load),
    )


WAYS = {
    "mainstay": mainstay,
    "torch_save": torch_save,
    "dcp_async": dcp_async,
    "nvrx": nvrx,
    "nvrx_replicated": nvrx_replicated,
    "dlrover": dlrover,
}

if __name__ == "__main__":
    main()
