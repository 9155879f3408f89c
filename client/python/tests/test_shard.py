"""A sealed shard, read from a file, from a mapping of it that is made for the call, and from one that is there already."""

from __future__ import annotations

import os

import pytest

from mainstay import _native

numpy = pytest.importorskip("numpy")

CHUNK = 1 << 16
SIZE = 5 * CHUNK + 4321


@pytest.fixture
def shard(tmp_path):
    """A file, its content, and the checksums of its chunks."""
    content = numpy.random.default_rng(7).integers(0, 256, SIZE, numpy.uint8)
    path = tmp_path / "slot-0.1"
    path.write_bytes(content.tobytes())
    # Of long inputs XXH3 with 64 bits is the lower half of that with 128 bits.
    sums = [int(_native.checksum_bytes(content[at : at + CHUNK].tobytes())[16:], 16) for at in range(0, SIZE, CHUNK)]
    return path, content, sums


def ways(path):
    return False, True, _native.SlotMemory(path, SIZE)


def read(path, sums, memory, pieces=(), size=SIZE):
    with open(path, "rb") as file:
        chunks = (0, len(sums))
        return _native.read_verified(file.fileno(), size, CHUNK, sums, chunks, list(pieces), 2, memory)


def address(array):
    return array.__array_interface__["data"][0]


def test_every_way_of_reading_gives_the_same_bytes(shard):
    path, content, sums = shard
    for memory in ways(path):
        # New memory, memory that is there, and gaps before, between and behind them.
        new, there = numpy.empty(2 * CHUNK + 100, numpy.uint8), numpy.zeros(CHUNK, numpy.uint8)
        pieces = [(1000, len(new), address(new), True), (3 * CHUNK, CHUNK, address(there), False)]
        assert read(path, sums, memory, pieces) is None
        assert (new == content[1000 : 1000 + len(new)]).all()
        assert (there == content[3 * CHUNK : 4 * CHUNK]).all()


def test_what_has_changed_is_found_in_every_way(shard):
    path, content, sums = shard
    with open(path, "r+b") as file:
        file.seek(4 * CHUNK + 17)
        file.write(bytes([content[4 * CHUNK + 17] ^ 1]))
    for memory in ways(path):
        assert read(path, sums, memory) == 4


def test_a_file_that_is_shorter_than_it_says_is_an_error_and_no_signal(shard):
    path, _, sums = shard
    os.truncate(path, SIZE - CHUNK)
    for memory in (False, True):
        with pytest.raises(OSError):
            read(path, sums, memory)
    # A mapping that is too short for the file is not used.
    os.truncate(path, SIZE)
    short = _native.SlotMemory(path, CHUNK)
    assert read(path, sums, short) == len(sums) - 2
