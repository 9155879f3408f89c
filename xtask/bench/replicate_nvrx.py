"""Two ranks that replicate their states to each other by NVRx's clique strategy, over gloo on loopback; run by `cargo xtask bench`.

usage: replicate_nvrx.py MIB ROUNDS OUT      writes JSON: bytes of one rank's state a second, of each round

Each rank sends its state and takes the other's at once, as it does where it is used. A round is as long as its slower rank takes.
"""

import json
import multiprocessing
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

TENSORS = 16


def rank(number: int, port: int, mib: int, rounds: int, told) -> None:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    class OnHost(BasicTensorAwareStateDict):
        """It accepts tensors on CUDA only; here they are on the host, which they pass through anyway to be sent."""

        def __init__(self, held):
            self.state_dict, self._is_hollow = held, False

    # Both ranks must find the class by its name.
    OnHost.__qualname__ = "OnHost"
    globals()["OnHost"] = OnHost
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
    state = {f"layer{at}": torch.full(((mib << 18) // TENSORS,), float(at + number)) for at in range(TENSORS)}
    size = sum(each.nbytes for each in state.values())
    rates = []
    # The first makes connections.
    for at in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        copies, _ = strategy.replicate(OnHost(dict(state)), str(at))
        dist.barrier()
        rates.append(size / (time.perf_counter() - began))
        other = copies[1 - number].state_dict["layer3"]
        assert other[0].item() == 3.0 + (1 - number), "the other rank's state has come"
        del copies, other
    if number == 0:
        told.put(rates[1:])
    dist.destroy_process_group()


def main() -> None:
    mib, rounds = int(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork")
    told = start.SimpleQueue()
    ranks = [start.Process(target=rank, args=(number, port, mib, rounds, told)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        sys.exit("a rank failed")
    with open(sys.argv[3], "w", encoding="utf-8") as out:
        json.dump(told.get(), out)


if __name__ == "__main__":
    main()
