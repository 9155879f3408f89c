"""Releases a rank that is blocked in a collective, and destroys its process groups.

NCCL can be aborted (``ProcessGroupNCCL.abort``, available in PyTorch 2.8). Gloo cannot: a rank waits for its peer
until the timeout, half an hour by default. But it waits on TCP sockets, and shutting them down ends the wait within
milliseconds. The sockets of a group (or of its store) are those that appeared in ``/proc/self/fd`` while the group
was created; all others are left alone.

Gloo loses a send that fails because the peer closed the connection: no exception reaches the waiting thread, which
then waits for the timeout. So a rank that leaves shuts down only its receiving side. It keeps a copy of each
descriptor, so that its connections stay open until all ranks have left (:func:`close`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

_DISTRIBUTED = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"

_lock = threading.Lock()
_groups = {}  # descriptor: inode of its socket
_being_made = {}  # by call in progress: the sockets before it
_kept_open = {}  # by inode of a socket that was shut down: a copy of it, which keeps the connection open
_aborts = {}  # by NCCL backend: the thread that aborts or aborted it
_installed = False


def install() -> None:
    """Starts to record which sockets are created for process groups, now or as soon as torch is imported."""
    global _installed
    if _installed:
        return
    _installed = True
    from mainstay_auto import when_imported

    when_imported(_DISTRIBUTED, lambda module: _note_sockets_of(module, "_new_process_group_helper"))
    when_imported(_RENDEZVOUS, lambda module: _note_sockets_of(module, "_create_c10d_store"))


def sockets() -> dict:
    """The inodes of the open sockets, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found[int(name)] = target
    return found


def _note_sockets_of(module, name: str) -> None:
    make = getattr(module, name, None)
    if make is None:
        return

    def making(*arguments, **named):
        with noting():
            return make(*arguments, **named)

    making.__name__, making.__doc__, making.__wrapped__ = name, make.__doc__, make
    setattr(module, name, making)


@contextlib.contextmanager
def noting():
    """Records the sockets that are created for process groups in this context."""
    call = object()
    before = sockets()
    with _lock:
        _being_made[call] = before
    try:
        yield
    finally:
        made = _new_since(before)
        with _lock:
            _being_made.pop(call, None)
            _groups.update(made)


def _new_since(before: dict) -> dict:
    return {number: inode for number, inode in sockets().items() if before.get(number) != inode}


def release(everything_since=None, both_directions: bool = False) -> None:
    """Ends all waiting in process groups, from any thread; the waiting calls raise.

    ``everything_since`` (an earlier result of :func:`sockets`) extends it to all TCP sockets that appeared since then
    and that no Python object holds, for groups that were created in an unknown way. ``both_directions`` also ends
    sending. It is a last resort, because a peer may then lose a send.
    """
    # NCCL first: PyTorch's watchdog ends the process if it finds broken connections of a group that is not aborted.
    _abort_nccl()
    with _lock:
        targets = dict(_groups)
        under_way = list(_being_made.values())
    for before in under_way:
        targets.update(_new_since(before))
    if everything_since is not None:
        ours = _held_by_python()
        new = _new_since(everything_since)
        targets.update({number: inode for number, inode in new.items() if number not in ours})
    # Ending the receiving side is usually enough: Gloo's thread then fails its connections and everything that waits
    # on them.
    how = socket.SHUT_RDWR if both_directions else socket.SHUT_RD
    for number, inode in targets.items():
        shut = _shut(number, inode, how)
        if shut is not None:
            _kept_open.setdefault(inode, shut)


def shut_all() -> None:
    """Ends all TCP connections of this process."""
    for number, inode in sockets().items():
        _shut(number, inode, socket.SHUT_RDWR)


def _held_by_python() -> set:
    import gc

    return {held.fileno() for held in gc.get_objects() if isinstance(held, socket.socket)}


def _shut(number: int, inode: str, how: int):
    """Shuts down a connected TCP socket and returns a copy of it; None for any other descriptor.

    Leaves listening sockets alone: their loops treat a shutdown as a fatal error.
    """
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        # Checks the copy, because the descriptor may refer to another file by now.
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            os.close(copy)
            return None
        ours = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
        try:
            ours.getpeername()
            ours.shutdown(how)
            return ours
        except OSError:
            pass
    ours.close()
    return None


def _abort_nccl() -> None:
    """Aborts each NCCL backend, once and on a separate thread.

    An abort may wait for the device and for the operations of other communicators on it, so no abort may wait for
    another.
    """
    for backend in _nccl_backends():
        with _lock:
            if backend in _aborts:
                continue
            thread = threading.Thread(target=_quietly, args=(backend.abort,), name="mainstay-abort", daemon=True)
            _aborts[backend] = thread
        thread.start()


def _nccl_backends() -> list:
    distributed = sys.modules.get(_DISTRIBUTED)
    if distributed is None or not distributed.is_initialized():
        return []
    found = []
    for group in list(distributed._world.pg_map):
        try:
            backends = [group._get_backend(device) for device in group._device_types]
        except Exception:
            continue  # the group is being created, or this rank is not a member
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each backend.
        backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
        found += [backend for backend in backends if "nccl" in type(backend).__name__.lower()]
    return found


def destroy() -> None:
    """Destroys all process groups of this process with their store, except a default group that is kept across rounds
    (:mod:`mainstay._reconfigure`). Call it when no thread waits in them.

    Waits for the running aborts without limit, because destroying a group before that would wait for its peers. If this
    never ends, the launcher replaces the rank.
    """
    with _lock:
        aborts = list(_aborts.values())
    for thread in aborts:
        thread.join()
    distributed = sys.modules.get(_DISTRIBUTED)
    from . import _reconfigure

    kept = distributed is not None and _reconfigure.keeps()
    if kept:
        _quietly(lambda: _destroy_others(distributed))
    elif distributed is not None and distributed.is_initialized():
        _quietly(distributed.destroy_process_group)
        if distributed.is_initialized():
            # A group could not be shut down. The next round creates its groups again anyway.
            _quietly(lambda: _strike_off(distributed))
    if distributed is not None:
        # A group whose creation failed has used up a number. Groups find each other in the store by number, and a new
        # process starts at the first.
        _quietly(lambda: setattr(distributed._world, "group_count", 1 if kept else 0))
    with _lock:
        _groups.clear()
        _aborts.clear()


def close() -> None:
    """Closes the released connections. Call it when all ranks have left the round."""
    while _kept_open:
        _kept_open.popitem()[1].close()


def _destroy_others(distributed) -> None:
    """Destroys all groups except the default one."""
    default = distributed._get_default_group()
    for group in list(distributed._world.pg_map):
        if group is not default:
            distributed.destroy_process_group(group)


def _strike_off(distributed) -> None:
    """Removes all groups from PyTorch's tables, as PyTorch does after their shutdown."""
    distributed._update_default_pg(None)
    for books in (
        "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
    ):
        getattr(distributed._world, books).clear()
    distributed._unregister_all_process_groups()


def _quietly(action) -> None:
    try:
        action()
    except Exception:
        pass  # The group is already broken.
