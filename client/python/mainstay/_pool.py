"""The memory of the launcher's keeper. A save is one copy into it, and a load reads it before any disk.

Under ``mainstay run`` ``MAINSTAY_CHECKPOINT_POOL`` names its directory. Without it, or if there is no room, the
functions here return None and the rank writes to the disk itself.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional

from . import _container, _disk, _native, _pinned, _shard

VARIABLE = "MAINSTAY_CHECKPOINT_POOL"
_WAIT = "MAINSTAY_CHECKPOINT_WAIT"

#: The maximum duration of a reservation, for terabytes. A keeper that is gone is noticed earlier.
_RESERVED_WITHIN_S = 300.0

#: Free bytes in a slot for a state that grows a little from step to step.
_SPARE = 1 << 20


class Late(Exception):
    """The attempt of the shard ended before all of it was copied."""


class NoSlot(Exception):
    """No slot became free in time; the text says how long the rank waited."""


class Memory:
    """One rank's memory, mapped into this process."""

    def __init__(self, pool: str, rank: int):
        self._pool = pool
        self._home = os.path.join(pool, f"rank-{rank:05d}")
        self.control = _native.Control(os.path.join(self._home, "control"))
        self._mapped: Dict[int, tuple] = {}
        self._mapping = threading.Lock()
        self._refused: Optional[int] = None
        self._noted: Optional[bool] = None

    def note_world(self, any_number: bool) -> None:
        """Records in the pool whether another number of ranks can load what this job saves. Launchers of several hosts
        keep the number of ranks of a job that cannot."""
        if self._noted or self._noted is any_number:
            return
        self._noted = any_number
        try:
            # "x": a save must not replace the value that a load has written.
            with open(os.path.join(self._pool, "world"), "w" if any_number else "x", encoding="ascii") as file:
                file.write("any" if any_number else "same")
        except OSError:
            pass

    def ring(self) -> None:
        """Wakes the keeper. A keeper that misses this looks by itself a little later."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
                bell.setblocking(False)
                bell.sendto(b"!", os.path.join(self._pool, "bell"))
        except OSError:
            pass

    def lives(self) -> bool:
        try:
            os.kill(self.control.keeper(), 0)
        except OSError:
            return False
        return True

    def reserve(self, size: int) -> bool:
        """Ensures that there are slots of this many bytes, mapped with all their pages. Returns whether there are."""
        slots = self.control.slots()
        if len(slots) < 2 or any(slot.capacity < size for slot in slots):
            if self._refused is not None and size >= self._refused:
                return False
            number = self.control.ask(size)
            self.ring()
            end = time.monotonic() + _RESERVED_WITHIN_S
            while self.control.answer(number) is None:
                if time.monotonic() > end or not self.lives():
                    return False
                time.sleep(0.001)
            if not self.control.answer(number):
                self._refused = size
                return False
        self.prepare()
        return True

    def prepare(self) -> None:
        """Maps all slots, so that the first copy causes no page faults."""
        for slot in self.control.slots():
            if slot.capacity and slot.state in ("free", "sealed"):
                try:
                    self.map(slot)
                except OSError:
                    pass  # The slot has another file by now. The thread that takes it maps it.

    def prepare_behind(self) -> None:
        """As :meth:`prepare`, in a background thread. Starts it only if there is something to map."""
        if self.control.slots() and not self._mapped:
            threading.Thread(target=self.prepare, name="mainstay-checkpoint", daemon=True).start()

    def map(self, slot):
        with self._mapping:
            known = self._mapped.get(slot.index)
            if known is not None and known[0] == (slot.file, slot.capacity):
                return known[1]
            if known is not None:
                _pinned.unpin(self._mapped.pop(slot.index)[1])
            path = os.path.join(self._home, f"slot-{slot.index}.{slot.file}")
            mapped = _native.SlotMemory(path, slot.capacity)
            self._mapped[slot.index] = ((slot.file, slot.capacity), mapped)
            return mapped

    def holds(self, path: str) -> bool:
        """Whether the path is a file of this memory."""
        return os.path.dirname(path) == self._home

    def mapped(self, slot, path: str):
        """The mapping of a slot whose file is at `path`; None if it is not mapped."""
        known = self._mapped.get(slot.index)
        return known[1] if self.holds(path) and known is not None and known[0] == (slot.file, slot.capacity) else None

    def take(self, size: int, identity):
        """Takes a slot for this many bytes; None if there is not enough memory for one. Raises Late, NoSlot."""
        epoch, end = identity.attempt, None
        try:
            while True:
                if self.control.epoch() != epoch:
                    raise Late(f"it is of attempt {epoch}, and the launcher is at attempt {self.control.epoch()}")
                slot = self.control.take(size, epoch, identity.step, identity.world_size)
                if slot is not None:
                    return slot
                if not self.lives():
                    return None
                slots = self.control.slots()
                if not any(slot.capacity >= size for slot in slots) and not self.reserve(size + _SPARE + size // 64):
                    return None
                end = end or time.monotonic() + _patience()
                if time.monotonic() > end:
                    raise NoSlot(f"no memory became free within {_patience():g} s")
                if any(slot.capacity >= size for slot in slots):
                    self.control.set_waits(True)
                    self.ring()
                    time.sleep(0.001)
        finally:
            self.control.set_waits(False)

    def save(self, state: Any, identity, facts: dict, attempt) -> Optional[bool]:
        """Copies a state into a slot. None without memory for it. Raises Late, NoSlot, and what pickling raises."""
        labels = {name: str(value) for name, value in identity._asdict().items()}
        if facts.get("alike"):
            labels["alike"] = facts["alike"]
        labels.update({f"software.{name}": version for name, version in facts["software"].items()})
        parts = _container.split(state, {"mainstay": "1", **labels})
        slot = self.take(parts.total, identity)
        if slot is None:
            return None
        try:
            self._copy(self.map(slot), parts)
            now = attempt()
            if now != identity.attempt:
                raise Late(f"it is of attempt {identity.attempt}, and this rank has gone on to attempt {now}")
        except BaseException:
            self.control.abandon(slot)
            raise
        if not self.control.fill(slot, parts.total):
            raise Late(f"it is of attempt {identity.attempt}, which was over before all of it was copied")
        self.ring()
        return True

    def _copy(self, memory, parts) -> None:
        pieces, on_devices = [], []
        for at, part in parts.parts:
            if part.address is None:
                on_devices.append((at, part))
            elif part.bytes:
                pieces.append((at, part.address, part.bytes))
        finish = _begin_from_devices(memory, on_devices)
        small = [(0, parts.header), (parts.rest_at, parts.rest)]
        held = []
        for at, content in small:
            array = _address_of(content)
            held.append((content, array))
            pieces.append((at, array, len(content)))
        memory.copy(pieces, _shard.threads())
        finish()


def size_for(state: Any) -> int:
    """The size of a slot for states like this one, in bytes."""
    total = _container.split(state, {}).total
    return total + _SPARE + total // 64


def _address_of(content: bytes) -> int:
    import ctypes

    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value


def _begin_from_devices(memory, parts: list):
    """Starts the copies of tensors on devices directly into the slot; the returned function waits for them."""
    if not parts:
        return lambda: None
    import torch

    _pinned.pin(memory)
    devices = set()
    for at, part in parts:
        if not part.bytes:
            continue
        source = part.owner
        target = _pinned.bytes_of(memory, at, part.bytes)
        target.copy_(source.reshape(-1).view(torch.uint8), non_blocking=True)
        devices.add(source.device)
    return lambda: _pinned.synchronize(devices)


def _patience() -> float:
    try:
        return max(0.0, float(os.environ.get(_WAIT) or 10))
    except ValueError:
        return 10.0


_open: Dict[tuple, Optional[Memory]] = {}


def memory_of_rank(directory: str, rank: int) -> Optional[Memory]:
    """This rank's memory for checkpoints in `directory`; None if there is none."""
    pool = os.environ.get(VARIABLE)
    if not pool:
        return None
    # A forked child has none of its parent's mappings.
    key = (os.getpid(), pool, directory, rank)
    if key not in _open:
        try:
            with open(os.path.join(pool, "pool.json"), encoding="utf-8") as file:
                about = json.load(file)
            _open[key] = Memory(pool, rank) if is_same(about["directory"], directory) else None
        except (OSError, ValueError, KeyError, TypeError):
            _open[key] = None
    return _open[key]


def is_same(one: str, other: str) -> bool:
    """Whether two paths name one directory. Looks at the file system only if their words differ."""
    one, other = os.path.abspath(one), os.path.abspath(other)
    if one == other:
        return True
    try:
        return bool(_disk.ask(os.path.realpath, one) == _disk.ask(os.path.realpath, other))
    except _disk.Silent:
        return False


class Copy(NamedTuple):
    """A sealed shard in memory: its rank, its slot and its manifest."""

    control: Any
    slot: Any
    manifest: dict
    path: str


def sealed(pool: str, world_size: int, read_manifest) -> Dict[int, List[Copy]]:
    """The sealed shards in memory by rank, after the keeper has sealed the slots that were filled at the time of the
    call."""
    pages = {}
    for rank in range(world_size):
        home = os.path.join(pool, f"rank-{rank:05d}")
        try:
            pages[rank] = (home, _native.Control(os.path.join(home, "control")))
        except (OSError, ValueError):
            return {}
    _settle([control for _, control in pages.values()], pool)
    found: Dict[int, List[Copy]] = {}
    for rank, (home, control) in pages.items():
        found[rank] = []
        for slot in control.slots():
            if slot.state != "sealed":
                continue
            manifest = read_manifest(os.path.join(home, f"slot-{slot.index}.json"), rank)
            says = manifest and (manifest["attempt"], manifest["step"], manifest["world_size"])
            if says == (slot.epoch, slot.step, world_size) and control.is_still(slot):
                path = os.path.join(home, f"slot-{slot.index}.{slot.file}")
                found[rank].append(Copy(control, slot, manifest, path))
    return found


def own(directory: str, rank: int, root: str, read_manifest) -> Optional[Copy]:
    """This rank's shard with this root, if it is in the launcher's memory."""
    memory = memory_of_rank(directory, rank)
    if memory is None or not memory.lives():
        return None
    memory.prepare_behind()
    home = os.path.join(os.environ[VARIABLE], f"rank-{rank:05d}")
    for slot in memory.control.slots():
        manifest = read_manifest(os.path.join(home, f"slot-{slot.index}.json"), rank) if slot.state == "sealed" else None
        if manifest and manifest.get("root") == root and memory.control.is_still(slot):
            return Copy(memory.control, slot, manifest, os.path.join(home, f"slot-{slot.index}.{slot.file}"))
    return None


def _settle(pages: list, pool: str) -> None:
    """Waits for the keeper to seal the slots that are filled now. It does not wait for slots that ranks of this attempt
    fill later: they may never pause."""

    def unsealed() -> set:
        return {
            (rank, slot.index, slot.epoch, slot.step)
            for rank, control in enumerate(pages)
            for slot in control.slots()
            if slot.state in ("filled", "sealing") or (slot.state == "filling" and slot.epoch < control.epoch())
        }

    waits_for = unsealed()
    end = time.monotonic() + _RESERVED_WITHIN_S
    while waits_for and time.monotonic() < end:
        try:
            os.kill(pages[0].keeper(), 0)
        except OSError:
            return
        time.sleep(0.002)
        waits_for &= unsealed()


def _mapped(copy: Copy):
    """The mapping of a copy's slot, if this process has it for its saves."""
    for memory in _of_this_process():
        mapped = memory.mapped(copy.slot, copy.path)
        if mapped is not None:
            return mapped
    return None


def _map(copy: Copy):
    """As :func:`_mapped`, but maps the slot if this rank saves there. None if it does not, or if the slot has
    another file by now."""
    for memory in _of_this_process():
        if memory.holds(copy.path):
            try:
                memory.map(copy.slot)
            except OSError:
                return None
            return memory.mapped(copy.slot, copy.path)
    return None


def _of_this_process() -> list:
    return [memory for (process, *_), memory in list(_open.items()) if memory is not None and process == os.getpid()]


class Spoilt(Exception):
    """A copy in memory does not match its seal; the text names its rank."""


def state_of(copy: Copy, epoch: int, into=None) -> Any:
    """Loads the state of a copy, verifies every byte and publishes the result to the other ranks. Raises Spoilt, and
    any error of unpickling."""
    known = copy.control.checked(copy.slot, epoch)
    if known is False:
        raise Spoilt(f"{copy.path}: another rank found that it has changed since it was sealed")
    copy.control.begin_check(copy.slot, epoch)
    return _checked(copy, epoch, lambda reader: reader.state(into))


def check(copy: Copy, epoch: int) -> None:
    """Raises Spoilt if any byte differs from the seal. A slot that another rank of this attempt has verified is not
    read again."""
    end = time.monotonic() + 10 + copy.slot.used / 1e8
    mine = copy.control.begin_check(copy.slot, epoch)
    while not mine and time.monotonic() < end and copy.control.checked(copy.slot, epoch) is None:
        time.sleep(0.001)
    known = copy.control.checked(copy.slot, epoch)
    if known is False:
        raise Spoilt(f"{copy.path}: another rank found that it has changed since it was sealed")
    if known is None:
        _checked(copy, epoch, lambda reader: reader.verify())


def _checked(copy: Copy, epoch: int, read) -> Any:
    try:
        descriptor = os.open(copy.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Spoilt(f"{copy.path}: {error.strerror}") from None
    try:
        result = read(_shard.Reader(descriptor, copy.manifest, _mapped(copy) or True, lambda: _map(copy)))
    except _shard.Changed as changed:
        if not copy.control.is_still(copy.slot):
            raise Spoilt(f"{copy.path} holds another step by now") from None
        copy.control.report_checked(copy.slot, epoch, False)
        raise Spoilt(f"{copy.path}: {changed}") from None
    finally:
        os.close(descriptor)
    if not copy.control.is_still(copy.slot):
        raise Spoilt(f"{copy.path} holds another step by now")
    copy.control.report_checked(copy.slot, epoch, True)
    return result
