"""The wait for rank 0's store, without PyTorch: what it is called around is played."""

from __future__ import annotations

import socket
import types

import pytest

from mainstay import _torch_store


@pytest.fixture
def held():
    """A port as the launcher holds it: bound, and nobody listens."""
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        yield port


@pytest.fixture
def naps(held, monkeypatch):
    """Rank 0 listens while the other rank takes its third nap."""
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            held.listen()

    monkeypatch.setattr(_torch_store.time, "sleep", nap)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    return naps


@pytest.fixture
def connect(naps):
    module = types.SimpleNamespace(_create_c10d_store=lambda host, port, rank, *more, **named: (rank, len(naps)))
    _torch_store._wait_in(module)
    return lambda *arguments, **named: module._create_c10d_store(*arguments, **named)


def test_another_rank_connects_as_soon_as_the_first_listens(connect, held, naps):
    port = held.getsockname()[1]
    assert connect("127.0.0.1", port, 1, 2, None) == (1, 3)
    assert connect("127.0.0.1", port, 1, 2, None) == (1, 3), "it listens already"


def test_the_first_rank_and_stores_of_other_hosts_are_not_waited_for(connect, held, naps, monkeypatch):
    port = held.getsockname()[1]
    assert connect("127.0.0.1", port, 0, 2, None) == (0, 0)
    assert connect("10.0.0.1", port, 1, 2, None) == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert connect("127.0.0.1", port, 1, 4, None) == (1, 0)


def test_what_is_called_otherwise_is_passed_on(connect, held):
    port = held.getsockname()[1]
    assert connect(host="127.0.0.1", port=port, rank=1) == (1, 0)
