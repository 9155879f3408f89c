"""Distributed checkpoints of PyTorch stored in Mainstay: ``dcp.save(state, storage_writer=mainstay.dcp.Writer(step))``
and ``dcp.load(state, storage_reader=mainstay.dcp.Reader())``.

The output of ``dcp.save`` or ``dcp.async_save`` with any planner becomes one shard per rank, in the launcher's memory
or on disk. Replicas, durable storage and retention treat it like any other shard. The coordinator seals its own shard
last, with DCP's metadata in it, and only then is the step whole: an interrupted save leaves the older step. Loading
works on any number of ranks. It reads the shards that a rank needs and verifies every byte before use.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Union

from ._framework import torch  # First: what follows needs it too.

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from . import _memory_steps, _pool, _seal, _shard, checkpoint

__all__ = ["Reader", "Writer"]

_MARK = "__mainstay_dcp__"
_STEP = re.compile(r"(\d+)/*$")


class Where(NamedTuple):
    """The location of an item: the rank of the shard, and the name in it."""

    rank: int
    name: str


class Writer(StorageWriter):
    """Writes a step.

    The number is ``step``, or the end of a ``checkpoint_id`` (``"runs/a/step-100"``). `directory`: as for
    `mainstay.checkpoint.save`.
    """

    def __init__(self, step: Optional[int] = None, *, directory: Optional[str] = None):
        super().__init__()
        self._step = step if step is None else checkpoint._step_number(step)
        self._directory = directory
        self._leads = False
        self._held: Optional[dict] = None

    def reset(self, checkpoint_id: Union[str, os.PathLike, None] = None) -> None:
        self._held = None
        self._step = _step_of(checkpoint_id, self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._leads = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: List[SavePlan]) -> List[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        if self._step is None:
            raise ValueError("mainstay.dcp.Writer: no step: Writer(step), or a checkpoint_id that ends in its number")
        home = _home(self._directory)
        tensors: Dict[str, torch.Tensor] = {}
        blobs: Dict[str, bytes] = {}
        results = []
        for item in plan.items:
            name = _name(item.index)
            data = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                blobs[name] = data.getvalue()
                size = len(blobs[name])
            else:
                tensors[name] = _plain(data)
                size = data.numel() * data.element_size()
            results.append(WriteResult(item.index, size, Where(home.rank, name)))
        shard = {_MARK: 1, "tensors": tensors, "bytes": blobs}
        if self._leads:
            # Sealed in `finish` with data that only the coordinator has. Until then the step is not whole.
            self._held = shard
        else:
            _save(home, self._step, shard)
        done: Future = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: List[List[WriteResult]]) -> None:
        metadata.storage_data = {written.index: written.storage_data for of_rank in results for written in of_rank}
        metadata.storage_meta = self.storage_meta()
        shard, self._held = self._held, None
        _save(_home(self._directory), self._step, {**(shard or {_MARK: 1}), "metadata": pickle.dumps(metadata)})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike]) -> bool:
        return _STEP.search(os.fspath(checkpoint_id)) is not None


class Reader(StorageReader):
    """Reads a step: ``step``, or that of a ``checkpoint_id``, or the newest whole one, the same on all ranks.

    Before a step is chosen, each rank verifies all its shards on disk, and skips it if any byte has changed. Shards in
    memory are verified when they are read. Ranks choose together through torch.distributed if it is initialized.
    Pass ``together=False`` if not all of them load.
    """

    def __init__(self, step: Optional[int] = None, *, directory: Optional[str] = None, together: bool = True):
        super().__init__()
        self._wanted = step if step is None else checkpoint._step_number(step)
        self._directory = directory
        self._together = together
        self._shards: Optional[_Shards] = None
        self._data: dict = {}

    @property
    def step(self) -> Optional[int]:
        """The step that is being read; None before one is chosen."""
        return self._shards and self._shards.step

    def reset(self, checkpoint_id: Union[str, os.PathLike, None] = None) -> None:
        self._shards, self._data = None, {}
        self._wanted = _step_of(checkpoint_id, self._wanted)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with checkpoint._standing_still("restore"):
            home = _home(self._directory)
            if self._wanted is not None:
                self._shards = _Shards(home, self._wanted)
            else:
                self._shards = _newest(home, self._together and dist.is_available() and dist.is_initialized())
            return self._shards.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: List[LoadPlan]) -> List[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        by_rank: Dict[int, list] = {}
        for item in plan.items:
            where = self._data[item.storage_index]
            by_rank.setdefault(where.rank, []).append((where.name, item))
        with checkpoint._standing_still("restore"):
            for rank, items in sorted(by_rank.items()):
                # One shard at a time: each may take as much memory as this rank's own state.
                shard = self._shards.of_rank(rank)
                for name, item in items:
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(shard["bytes"][name]))
                        continue
                    part = shard["tensors"][name]
                    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                        part = part.narrow(dimension, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike]) -> bool:
        return Writer.validate_checkpoint_id(checkpoint_id)


class _Shards:
    """The shards of one step, in memory or on the disk of this host. Raises if any of them is missing or damaged."""

    def __init__(self, home, step: int):
        self.step = step
        self._home = home
        self._memory = _memory(home)
        self._kept: Dict[int, dict] = {}
        held = self._memory and self._memory._steps.get(step)
        self._copies = held[1] if held else {}
        self.world_size = _world_size(home.directory, step, self._copies)
        if not self._copies and not _seal.looks_whole(home.directory, step, self.world_size):
            raise _seal.Incomplete(f"step {step} in {home.directory} is not whole")

    def of_rank(self, rank: int) -> dict:
        if rank in self._kept:
            return self._kept[rank]
        return self._from_memory(rank) or self._from_disk(rank)

    def _from_memory(self, rank: int) -> Optional[dict]:
        copy = self._copies.get(rank)
        if copy is None:
            return None
        try:
            return _pool.state_of(copy, checkpoint._attempt())
        except _pool.Spoilt as spoilt:
            _warn(f"step {self.step}: {spoilt}; reading it from the disk instead")
            return None

    def _from_disk(self, rank: int) -> dict:
        taken = _seal.take_one(self._home.directory, self.step, rank)
        if taken is None:
            raise _seal.Damaged(
                f"the shard of rank {rank} of step {self.step} in {self._home.directory} is missing, or its bytes have changed "
                "since it was sealed; it is not loaded"
            )
        manifest, file = taken
        with file:
            if manifest["format"] == 2:
                return _shard.Reader(file.fileno(), manifest).state()
            # A file of this user that matches its manifest is as trusted as the script itself.
            return torch.load(file, map_location="cpu", weights_only=False)

    def verify(self) -> None:
        """Raises Damaged if a shard on disk differs from its seal. Shards in memory are verified when they are read."""
        for rank in range(self.world_size):
            if rank not in self._copies and not _seal.is_intact(self._home.directory, self.step, rank):
                raise _seal.Damaged(f"the shard of rank {rank} has changed since it was sealed")

    def metadata(self) -> Metadata:
        for rank in range(self.world_size):
            shard = self.of_rank(rank)
            if not isinstance(shard, dict) or _MARK not in shard:
                break
            if "metadata" in shard:
                # Kept, because it is needed again soon. The coordinator is almost always the first rank.
                self._kept = {rank: shard}
                return pickle.loads(shard["metadata"])
        raise _seal.Incomplete(f"step {self.step} in {self._home.directory} was not written by torch.distributed.checkpoint")


def _newest(home, together: bool) -> _Shards:
    memory = _memory(home)
    on_disk = checkpoint._steps_on_disk(home, "load", memory is not None and memory.has_any())
    steps = memory.with_those_of(on_disk) if memory else on_disk
    limit = None
    while True:
        found = _newest_good(home, [step for step in steps if limit is None or step <= limit])
        number = -1 if found is None else found.step
        # Every rank sees the same answers, so all make the same number of collective calls.
        numbers_of_all = _all_gathered(number) if together else [number]
        limit = min(numbers_of_all)
        if limit < 0:
            raise FileNotFoundError(f"mainstay.dcp.Reader: no whole step in {home.directory} on every rank")
        if max(numbers_of_all) == limit:
            return found


def _all_gathered(number: int) -> list:
    numbers_of_all = [None] * dist.get_world_size()
    dist.all_gather_object(numbers_of_all, number)
    return numbers_of_all


def _newest_good(home, steps: list) -> Optional[_Shards]:
    for step in steps:
        try:
            shards = _Shards(home, step)
            shards.verify()
            shards.metadata()
            return shards
        except _seal.Incomplete:
            continue
        except (_seal.Damaged, _shard.Changed, OSError) as damage:
            _warn(f"step {step} is skipped: {damage}; an older whole step is taken if there is one")
    return None


def _world_size(directory: str, step: int, copies: dict) -> int:
    for copy in copies.values():
        return copy.manifest["world_size"]
    home = _seal.step_directory(directory, step)
    for name in sorted(os.listdir(home)) if os.path.isdir(home) else []:
        if name.startswith("rank-"):
            path = os.path.join(home, name, _seal.MANIFEST)
            return _seal.read_manifest(path, int(name[len("rank-"):]))["world_size"]
    raise _seal.Incomplete(f"step {step} is not in {directory}")


def _memory(home):
    try:
        return _memory_steps.MemorySteps.open(home.directory, home.rank, home.world_size, checkpoint._attempt())
    except (OSError, ValueError):
        return None


def _home(directory: Optional[str]):
    home = checkpoint._home(directory)
    if dist.is_available() and dist.is_initialized():
        home = home._replace(rank=dist.get_rank(), world_size=dist.get_world_size())
    return home


def _save(home, step: int, shard: dict) -> None:
    """As `mainstay.checkpoint.save`, but raises errors: DCP reports them to all ranks. It waits for a file system that
    does not answer, as PyTorch's own writer does: an error would end the job."""
    with checkpoint._saving:
        identity = _seal.Identity(checkpoint._job(), checkpoint._attempt(), step, home.rank, home.world_size)
        facts, suffix, serialise = checkpoint._serialisation(shard)
        # Any rank may read any shard. On several hosts they are therefore stored on disk, which all hosts must share.
        if _has_one_host() and checkpoint._into_memory(home, identity, facts, shard, any_world=True):
            return
        checkpoint._quietly(_seal.clear_aside, home.directory, home.rank)
        _seal.write(home.directory, identity, facts, suffix, serialise, checkpoint._attempt)
        if _seal.looks_whole(home.directory, step, home.world_size):
            keep = checkpoint._number(checkpoint._KEEP, 2, at_least=1)
            counts = lambda step: checkpoint._doubtful(home, step) is None  # noqa: E731
            checkpoint._quietly(_seal.prune, home.directory, home.world_size, keep, counts)


def _has_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") in (None, os.environ.get("WORLD_SIZE"))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. A view of a larger storage is copied without the rest of the storage."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _name(index) -> str:
    offset = ",".join(map(str, index.offset)) if index.offset is not None else ""
    return f"{index.fqn}@{offset}" if offset else index.fqn


def _step_of(checkpoint_id: Union[str, os.PathLike, None], otherwise: Optional[int]) -> Optional[int]:
    if checkpoint_id is None:
        return otherwise
    found = _STEP.search(os.fspath(checkpoint_id))
    if found is None:
        raise ValueError(f"mainstay.dcp: checkpoint_id={os.fspath(checkpoint_id)!r} does not end in the number of a step")
    return int(found[1])


def _warn(text: str) -> None:
    warnings.warn(f"mainstay.dcp: {text}", RuntimeWarning, stacklevel=4)
