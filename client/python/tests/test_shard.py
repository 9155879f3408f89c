"""A sealed shard, read from a file, from a new mapping and from an existing one; and the state of a shard whose tensors
were on a device."""

from __future__ import annotations

import os
import pickle

import pytest

from mainstay import _container, _native, _shard

numpy = pytest.importorskip("numpy")

CHUNK = 1 << 16
SIZE = 5 * CHUNK + 4321


@pytest.fixture
def shard(tmp_path):
    """A file, its content, and the checksums of its chunks."""
    content = numpy.random.default_rng(7).integers(0, 256, SIZE, numpy.uint8)
    path = tmp_path / "slot-0.1"
    path.write_bytes(content.tobytes())
    # For long inputs, the 64-bit XXH3 is the lower half of the 128-bit one.
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
        # New memory, existing memory, and gaps before, between and after them.
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


def test_a_file_shorter_than_recorded_is_an_error_and_no_signal(shard):
    path, _, sums = shard
    os.truncate(path, SIZE - CHUNK)
    for memory in (False, True):
        with pytest.raises(OSError):
            read(path, sums, memory)
    # A mapping that is too short for the file is not used.
    os.truncate(path, SIZE)
    short = _native.SlotMemory(path, CHUNK)
    assert read(path, sums, short) == len(sums) - 2


def sealed(path, state):
    """A shard of a state whose tensors were on a device; the host replaces the device. Returns its manifest."""
    parts = _container.split(state, {})
    told = pickle.loads(parts.rest)
    told["table"] = [(*entry[:-1], "cpu") for entry in told["table"]]
    rest = pickle.dumps(told, protocol=5)
    tensors = [(part.name, part.dtype, list(part.shape)) for _, part in parts.parts]
    header, offsets, total = _native.container_header([], [*tensors, (_container.STATE, "U8", [len(rest)])])
    content = bytearray(total)
    content[: len(header)] = header
    for at, (_, part) in zip(offsets, parts.parts):
        content[at : at + part.bytes] = _container.as_bytes(part.owner).numpy().tobytes()
    content[offsets[-1] :] = rest
    path.write_bytes(content)
    sums = [_native.checksum_bytes(bytes(content[at : at + CHUNK]))[16:] for at in range(0, total, CHUNK)]
    return {"files": {path.name: {"size": total}}, "chunk_bytes": CHUNK, "chunks": sums}


def test_a_tensor_from_a_device_is_loaded_there_from_a_file_and_from_memory(tmp_path):
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.arange(50_000, dtype=torch.float32).reshape(100, 500))
    rows = torch.arange(100, dtype=torch.int16)
    state = {"weights": weights, "tied": weights, "rows": rows, "some": rows[10:20], "step": 7, "empty": torch.empty(0)}
    path = tmp_path / "slot-0.1"
    manifest = sealed(path, state)
    size = manifest["files"][path.name]["size"]
    mapping = _native.SlotMemory(path, size)
    asked = []

    def map_it():
        asked.append(1)
        return mapping

    for memory in (False, mapping, True):
        with open(path, "rb") as file:
            loaded = _shard.Reader(file.fileno(), manifest, memory, map_it).state()
        assert torch.equal(loaded["weights"], weights) and isinstance(loaded["weights"], torch.nn.Parameter)
        assert loaded["tied"] is loaded["weights"] and loaded["step"] == 7
        assert torch.equal(loaded["rows"], rows) and loaded["empty"].numel() == 0
        loaded["rows"][10] = -1
        assert loaded["some"][0] == -1, "they share a storage"
    # The file is unchanged, and the mapping for saves was requested once.
    assert len(asked) == 1
    with open(path, "r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 1]))
    with open(path, "rb") as file, pytest.raises(_shard.Changed):
        _shard.Reader(file.fileno(), manifest, mapping).state()
