"""The wait for rank 0's store, without PyTorch: the function that it wraps is mocked."""

from __future__ import annotations

import socket
import types

import pytest

from mainstay import _torch_store


@pytest.fixture
def held():
    """A port as the launcher reserves it: bound, without a listener."""
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        yield port


@pytest.fixture
def naps(held, monkeypatch):
    """Rank 0 starts to listen during the third nap of the other rank."""
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            held.listen()

    monkeypatch.setattr(_torch_store.time, "sleep", nap)
    monkeypatch.delenv("MAINSTAY_ATTEMPT", raising=False)
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


def test_the_first_rank_and_stores_of_others_are_not_waited_for(connect, held, naps):
    port = held.getsockname()[1]
    assert connect("127.0.0.1", port, 0, 2, None) == (0, 0)
    assert connect("10.0.0.1", port, 1, 2, None) == (1, 0)


@pytest.fixture
def of_four(naps, monkeypatch):
    """Two of the four ranks are on another host."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MAINSTAY_ATTEMPT", "1")


@pytest.mark.usefixtures("of_four")
def test_a_rank_of_another_host_asks_by_connecting_and_leaves_at_once(connect, held, naps):
    assert connect("127.0.0.1", held.getsockname()[1], 3, 4, None) == (3, 3)
    held.settimeout(5)
    asked, _ = held.accept()
    with asked:
        asked.settimeout(5)
        assert asked.recv(1) == b""


@pytest.mark.usefixtures("of_four")
@pytest.mark.parametrize(("name", "value"), [("MAINSTAY_ATTEMPT", None), ("WORLD_SIZE", "100000"), ("WORLD_SIZE", "x")])
def test_a_rank_of_another_host_leaves_it_to_pytorch(connect, held, monkeypatch, name, value):
    """A rank of another launcher, and a rank of a job that is too large for polling."""
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    assert connect("127.0.0.1", held.getsockname()[1], 3, 4, None) == (3, 0)


@pytest.mark.usefixtures("of_four")
def test_a_host_without_an_address_is_left_to_pytorch(connect, naps, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert connect("no-such-host.invalid", 1, 3, 4, None) == (3, 0)


def test_what_is_called_otherwise_is_passed_on(connect, held):
    port = held.getsockname()[1]
    assert connect(host="127.0.0.1", port=port, rank=1) == (1, 0)
