"""Reads a sealed shard of format 2 from any file that begins with it: every byte is checked where it arrives, and nothing is unpickled
before it was."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional

from . import _container, _native


class Changed(Exception):
    """The bytes are not those that were sealed; the text says where."""


def threads() -> int:
    """So many copy at once: a rank's share of the processors, four at most."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    share = (os.cpu_count() or 1) // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(1, min(4, share))


class Reader:
    """A shard whose manifest is intact, behind an open descriptor. ``memory`` says that its file is the launcher's, in memory: then it
    is read in a mapping, the given one or one of its own."""

    def __init__(self, descriptor: int, manifest: dict, memory: Any = False):
        (self._file,) = manifest["files"].values()
        self._descriptor = descriptor
        self._memory = memory
        self._chunk = manifest["chunk_bytes"]
        self._sums = [int(digits, 16) for digits in manifest["chunks"]]
        self._size = self._file["size"]

    def verify(self) -> None:
        """Raises Changed unless every byte is as it was sealed."""
        self._read(0, len(self._sums), [])

    def state(self, into: Optional[_container.Targets] = None) -> Any:
        """The state, in the memory of ``into`` where that fits. Raises Changed, and what unpickling raises."""
        header = self._bytes(0, 8)
        header = self._bytes(0, 8 + int.from_bytes(header, "little"))
        table = _container.layout(bytes(header), self._size)
        _, _, at, length = table.pop(_container.STATE)
        rest = self._bytes(at, length)
        how = {name: (kind, more) for kind, name, *more in _container.table_of(rest)}
        rooms, pieces = {}, []
        for name, (dtype, shape, at, length) in table.items():
            kind, more = how.get(name, ("tensor", ()))
            element = more[0] if kind in ("array", "jax") else None
            given = into.room(name, kind, dtype, shape) if into is not None else None
            rooms[name], address = given or _container.room(kind, dtype, shape, element)
            if length:
                pieces.append((at, length, address, given is None))
        self._read(0, len(self._sums), sorted(pieces))
        return _container.join(rest, rooms.__getitem__)

    def _bytes(self, at: int, length: int) -> bytearray:
        if at + length > self._size:
            raise Changed("it is shorter than it says")
        content = bytearray(length)
        if length:
            address = ctypes.addressof((ctypes.c_char * length).from_buffer(content))
            self._read(at // self._chunk, (at + length - 1) // self._chunk + 1, [(at, length, address, False)])
        return content

    def _read(self, first: int, end: int, pieces: list) -> None:
        try:
            bad: Optional[int] = _native.read_verified(
                self._descriptor, self._size, self._chunk, self._sums, (first, end), pieces, threads(), self._memory
            )
        except (OSError, ValueError) as error:
            raise Changed(f"it cannot be read: {error}") from None
        if bad is not None:
            raise Changed(f"its bytes have changed since it was sealed (chunk {bad} of {len(self._sums)})")
