"""The release of NCCL groups, which no test machine has: PyTorch's types are checked for the functions that we call,
and its tables with the backends are mocked."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import types

import pytest

from mainstay import _collectives_release as release

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


class ProcessGroupNCCL:
    """A backend whose collective ends only when it is aborted, and whose shutdown waits for the collective."""

    def __init__(self, told, abort=lambda: None):
        self._told, self._abort, self.aborted = told, abort, threading.Event()

    def abort(self):
        self._abort()
        self._told.append("aborted")
        self.aborted.set()


class Gloo:
    """A backend without abort."""

    def abort(self):
        raise RuntimeError("gloo does not support abort")


class Group:
    def __init__(self, *backends):
        self._backends, self._device_types = backends, range(len(backends))

    def _get_backend(self, device):
        if self._backends[device] is None:
            raise RuntimeError("no backend for it yet")
        return self._backends[device]


@pytest.fixture
def torch_with(monkeypatch):
    """Stores these groups in the tables of a mocked PyTorch."""

    def play(*groups, destroy=None):
        names = ("pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")
        world = types.SimpleNamespace(pg_map={group: "" for group in groups}, group_count=len(groups))
        for name in names:
            setattr(world, name, {"something": 1})
        played = types.SimpleNamespace(_world=world, default=bool(groups), registered=True)
        played.is_initialized = lambda: played.default
        played._update_default_pg = lambda group: setattr(played, "default", group is not None)
        played._unregister_all_process_groups = lambda: setattr(played, "registered", False)
        played.destroy_process_group = destroy or (lambda: setattr(played, "default", False))
        monkeypatch.setitem(release.sys.modules, release._DISTRIBUTED, played)
        return played

    yield play
    release._aborts.clear()


def test_each_backend_of_nccl_is_aborted_once_also_inside_a_wrapper_and_nothing_else_is(torch_with):
    told = []
    one, other, wrapped = (ProcessGroupNCCL(told) for _ in range(3))
    wrapper = types.SimpleNamespace(wrapped_pg=wrapped)
    torch_with(Group(None), Group(Gloo(), one), Group(one, one), Group(other), Group(wrapper))
    release.release()
    release.release()
    for backend in (one, other, wrapped):
        assert backend.aborted.wait(60)
    release.destroy()
    assert told == ["aborted"] * 3


def test_an_abort_that_waits_for_the_device_holds_up_no_other_and_is_waited_for_before_groups_are_destroyed(torch_with):
    told, device = [], threading.Event()
    slow, quick = ProcessGroupNCCL(told, abort=lambda: device.wait(60)), ProcessGroupNCCL(told)
    torch_with(Group(slow), Group(quick), destroy=lambda: told.append("destroyed"))
    release.release()
    assert quick.aborted.wait(60)
    leaving = threading.Thread(target=release.destroy)
    leaving.start()
    device.set()
    leaving.join(60)
    assert told == ["aborted", "aborted", "destroyed"]


def test_groups_that_refuse_to_be_destroyed_are_forgotten_and_those_that_do_not_are_left_to_pytorch(torch_with):
    def refuse():
        raise RuntimeError("CUDA error")

    played = torch_with(Group(Gloo()), destroy=refuse)
    release.destroy()
    assert (played.default, played.registered, played._world.pg_map, played._world.pg_names) == (False, False, {}, {})
    played = torch_with(Group(Gloo()))
    release.destroy()
    assert (played.default, played.registered, played._world.group_count) == (False, True, 0)


@needs_torch
def test_pytorch_has_the_functions_that_are_called(python):
    # torch reads the level of detail at import.
    code = """
    import os, socket
    import torch, torch.distributed as dist
    from torch.distributed import distributed_c10d as inside
    from mainstay import _collectives_release as release
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    (group,) = inside._world.pg_map
    backends = {group._get_backend(device) for device in group._device_types}
    assert {type(backend).__name__ for backend in backends} == {"_ProcessGroupWrapper"}, backends
    assert [type(backend.wrapped_pg).__name__ for backend in backends] == ["ProcessGroupGloo"]
    if dist.is_nccl_available():
        assert inside.ProcessGroupNCCL.__name__ == "ProcessGroupNCCL" and callable(inside.ProcessGroupNCCL.abort)
    release._strike_off(inside)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    dist.new_group([0])
    release.destroy()
    assert not dist.is_initialized() and inside._world.group_count == 0
    print("all there")
    """
    assert python(code, TORCH_DISTRIBUTED_DEBUG="DETAIL").stdout.strip().endswith("all there")


def test_a_released_connection_stays_open_for_the_peer_until_all_ranks_have_left():
    listener = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    peer.setblocking(False)
    number = mine.detach()
    kept = release._shut(number, os.readlink(f"/proc/self/fd/{number}"), socket.SHUT_RD)
    release._kept_open["socket"] = kept
    assert os.read(number, 1) == b"", "what waits to receive is released"
    os.close(number)  # as Gloo does after the end of the connection
    # Two sends: to a closed connection, the first would succeed and the second would fail.
    peer.send(b"a")
    peer.send(b"b")
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    release.close()
    peer.settimeout(60)
    with pytest.raises(ConnectionResetError):
        # The sent bytes are unread, so the kernel resets the connection.
        peer.recv(1)
