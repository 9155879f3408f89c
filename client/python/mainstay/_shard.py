"""Reads a sealed shard of format 2 from any file that starts with it. Every byte is verified when it is read, before
anything is unpickled."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Optional

from . import _container, _native, _pinned


class Changed(Exception):
    """The bytes do not match the seal; the text names the position."""


#: The maximum number of threads of a load, during which the job computes nothing else.
_READERS = 8


def threads(most: int = 4) -> int:
    """The number of threads that copy at once: a rank's share of the processors, at most ``most``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    share = (os.cpu_count() or 1) // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(1, min(most, share))


class Reader:
    """A shard with an intact manifest, in an open descriptor.

    If ``memory`` is set, the file is in the launcher's memory and is read through a mapping: the given one, or a new
    one if it is True. ``map_it`` returns the mapping that this rank's saves use, if any: devices copy from it."""

    def __init__(self, descriptor: int, manifest: dict, memory: Any = False, map_it: Callable = lambda: None):
        (self._file,) = manifest["files"].values()
        self._descriptor = descriptor
        self._memory = memory
        self._map_it = map_it
        self._chunk = manifest["chunk_bytes"]
        self._sums = [int(digits, 16) for digits in manifest["chunks"]]
        self._size = self._file["size"]

    def verify(self) -> None:
        """Raises Changed if any byte differs from the sealed one."""
        self._read(0, len(self._sums), [])

    def state(self, into: Optional[_container.Targets] = None) -> Any:
        """Returns the state, in the memory of ``into`` where that fits. Raises Changed, and what unpickling raises."""
        header = self._bytes(0, 8)
        header = self._bytes(0, 8 + int.from_bytes(header, "little"))
        table = _container.layout(bytes(header), self._size)
        _, _, at, length = table.pop(_container.STATE)
        rest = self._bytes(at, length)
        how = {name: (kind, more) for kind, name, *more in _container.table_of(rest)}
        mapping = self._mapping_for_devices(how.values())
        rooms, pieces, from_mapping, from_host = {}, [], [], []
        for name, (dtype, shape, at, length) in table.items():
            kind, more = how.get(name, ("tensor", ()))
            given = into.room(name, kind, dtype, shape) if into is not None else None
            device = _container.device_of(kind, more) if given is None and length else None
            if device is not None:
                rooms[name] = _container.on_device(into, name, kind, dtype, shape, device)
            if device is not None and mapping is not None:
                from_mapping.append((rooms[name], _pinned.bytes_of(mapping, at, length)))
                continue
            element = more[0] if kind in ("array", "jax") else None
            held, address = given or _container.room(kind, dtype, shape, element)
            if length:
                pieces.append((at, length, address, given is None))
            if device is not None:
                from_host.append((rooms[name], _container.as_bytes(held)))
            else:
                rooms[name] = held
        # Devices copy while the host verifies the same bytes.
        devices = _begin_to_devices(from_mapping, into)
        try:
            self._read(0, len(self._sums), sorted(pieces))
            devices |= _begin_to_devices(from_host, into)
        finally:
            _pinned.synchronize(devices)
        return _container.join(rest, rooms.__getitem__)

    def _mapping_for_devices(self, how):
        """The mapping that devices copy from, if there are devices and the file is in memory. The host then needs no
        second copy."""
        devices = {_container.device_of(kind, more) for kind, more in how} - {None}
        if not self._memory or not devices:
            return None
        if self._memory is True:
            self._memory = self._map_it() or True
        if self._memory is True or self._memory.length < self._size:
            return None
        if any(device.startswith("cuda") for device in devices):
            _pinned.pin(self._memory)
        return self._memory

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
                self._descriptor, self._size, self._chunk, self._sums, (first, end), pieces, threads(_READERS), self._memory
            )
        except (OSError, ValueError) as error:
            raise Changed(f"it cannot be read: {error}") from None
        if bad is not None:
            raise Changed(f"its bytes have changed since it was sealed (chunk {bad} of {len(self._sums)})")


def _begin_to_devices(copies: list, into: Optional[_container.Targets]) -> set:
    """Starts copies to their destinations; returns the devices to wait for."""
    devices = set()
    for target, source in copies:
        if into is not None:
            into.written = True
        _container.as_bytes(target).copy_(source, non_blocking=True)
        devices.add(target.device)
    return devices
