"""A default process group that is kept across rounds.

PyTorch 2.15 can reconfigure a Gloo group with other peers instead of creating it again (``_reconfigure``,
experimental). A rank that continues in its process then keeps its group and all references to it; a new process
creates one that joins. Gloo sends its addresses to the peers through the store with which the group was created. That
store would end with its round, so the group gets a store that forwards every call to the store of the current round.

If PyTorch does not support this, each round creates the group again, as without this module.
"""

from __future__ import annotations

import os
import sys

from . import _collectives_release, _rounds

_DISTRIBUTED = "torch.distributed.distributed_c10d"
_OFF = "MAINSTAY_RECONFIGURE"

_kept = None  # the store of the group that is kept


def process_group(backend=None, *, timeout=None, **options):
    """See :func:`mainstay.torch.process_group`."""
    import torch.distributed as dist

    if timeout is not None:
        options["timeout"] = timeout
    if not can(dist, backend, options):
        dist.init_process_group(backend, **options)
        return dist.group.WORLD
    with _collectives_release.noting():
        _of_this_round(dist, backend, options)
    return dist.group.WORLD


def can(dist, backend, options) -> bool:
    """Whether a group of this kind is kept. Only Gloo is supported."""
    from . import _restartable

    if os.environ.get(_OFF) == "0" or _restartable._current is None or backend != "gloo":
        return False
    if {"store", "init_method", "rank", "world_size", "device_id"} & set(options):
        return False
    names = ("_reconfigure", "_get_reconfigure_handle", "_supports_reconfigure")
    return all(hasattr(dist, name) for name in names) and all(name in os.environ for name in ("RANK", "WORLD_SIZE"))


def keeps() -> bool:
    """Whether the default group of this process is kept."""
    distributed = sys.modules.get(_DISTRIBUTED)
    return _kept is not None and distributed is not None and distributed.is_initialized()


def forget() -> None:
    """Stops keeping the group."""
    global _kept
    _kept = None


def _of_this_round(dist, backend, options) -> None:
    global _kept
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    waits = {"timeout": options["timeout"]} if "timeout" in options else {}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world,
        is_master=rank == 0, wait_for_workers=False, **waits,
    )
    if keeps():
        _kept.of_the_round = store
    else:
        holder = _store_of_rounds(dist)
        holder.of_the_round = store
        dist.init_process_group(
            backend, store=holder, rank=rank, world_size=world, enable_reconfigure=True, **options,
        )
        if not dist._supports_reconfigure():
            # The group works, but cannot be kept.
            return
        _kept = holder
    try:
        store.set(f"mainstay/handle/{rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"mainstay/handle/{of}").decode() for of in range(world)]
        # The number of a round is unique in a launch, and a group is reconfigured once per round.
        dist._reconfigure(uuid=_rounds.epoch() + 1, handles=handles, **waits).wait()
    except BaseException:
        # After an error the next round creates the group again.
        forget()
        raise


def _store_of_rounds(dist):
    class Rounds(dist.Store):
        """Forwards every call to the store of the current round."""

        def __init__(self):
            super().__init__()
            self.of_the_round = None

        def set(self, key, value):
            return self.of_the_round.set(key, value)

        def get(self, key):
            return self.of_the_round.get(key)

        def add(self, key, value):
            return self.of_the_round.add(key, value)

        def wait(self, keys, *timeout):
            return self.of_the_round.wait(keys, *timeout)

        def check(self, keys):
            return self.of_the_round.check(keys)

        def compare_set(self, key, expected, desired):
            return self.of_the_round.compare_set(key, expected, desired)

        def delete_key(self, key):
            return self.of_the_round.delete_key(key)

        def num_keys(self):
            return self.of_the_round.num_keys()

        def set_timeout(self, timeout):
            self.of_the_round.set_timeout(timeout)

        @property
        def timeout(self):
            return self.of_the_round.timeout

    return Rounds()
