"""Finds the whole steps in the launcher's memory and loads one of them.

A step is offered only if every rank's shard has an intact copy, in memory or, if that one is damaged, on disk. The
ranks of an attempt publish in the memory's control pages which shards they have verified, so that all reach the same
result and each byte is read once.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _disk, _pool, _seal


class Loaded(NamedTuple):
    """The state of this rank, loaded from memory."""

    state: Any


class MemorySteps:
    """The steps in memory for a job of this many ranks."""

    def __init__(self, directory: str, rank: int, world_size: int, epoch: int, copies: Dict[int, List[_pool.Copy]]):
        self._directory, self._rank, self._world_size, self._epoch = directory, rank, world_size, epoch
        self._steps: Dict[int, Tuple[tuple, Dict[int, _pool.Copy]]] = {}
        attempts: Dict[tuple, Dict[int, _pool.Copy]] = {}
        for of_rank in copies.values():
            for copy in of_rank:
                manifest = copy.manifest
                key = (manifest["step"], manifest["attempt"], manifest["job"])
                attempts.setdefault(key, {})[manifest["rank"]] = copy
        # The latest attempt that saved the whole step: a later attempt computed it again.
        for (step, attempt, job), shards in sorted(attempts.items(), key=lambda each: each[0][:2]):
            if all(rank in shards or self._on_disk(step, rank, job, attempt) for rank in range(world_size)):
                if self._disk_attempt(step, job) <= attempt:
                    self._steps[step] = ((job, attempt), shards)

    @classmethod
    def open(cls, directory: str, rank: int, world_size: int, epoch: int) -> "MemorySteps":
        """The steps of this job's memory. Empty if there is none or it cannot be read: then the disk is used."""
        memory = _pool.memory_of_rank(directory, rank)
        copies: Dict[int, List[_pool.Copy]] = {}
        if memory is not None and memory.lives():
            memory.prepare_behind()
            copies = _pool.sealed(os.environ[_pool.VARIABLE], world_size, read_manifest)
        return cls(directory, rank, world_size, epoch, copies)

    def has_any(self) -> bool:
        return bool(self._steps)

    def with_those_of(self, steps: list) -> list:
        """All steps, newest first."""
        return sorted({*steps, *self._steps}, reverse=True)

    def origin(self, step: int) -> Optional[tuple]:
        """Job, attempt and launch of a whole step in memory."""
        held = self._steps.get(step)
        if held is None:
            return None
        made_in, shards = held
        return (*made_in, next(iter(shards.values())).manifest.get("run"))

    def verify(self, step: int, say: Callable) -> Optional[tuple]:
        """Job, attempt and launch, if every shard of the step has an intact copy and one of them is in memory."""
        held = self._steps.get(step)
        if held is None:
            return None
        made_in, shards = held
        good = all(self._is_good(step, rank, made_in, shards.get(rank), say) for rank in range(self._world_size))
        return self.origin(step) if good else None

    def take(self, step: int, say: Callable, into=None):
        """This rank's shard of a step in memory, if every shard of the step has an intact copy: :class:`Loaded`, or
        manifest and open file. None otherwise. ``into`` is memory that the state may be loaded into."""
        held = self._steps.get(step)
        if held is None:
            return None
        made_in, shards = held
        mine = self._mine(step, made_in, shards.get(self._rank), say, into)
        others = (rank for rank in range(self._world_size) if rank != self._rank)
        if mine is not None and all(self._is_good(step, rank, made_in, shards.get(rank), say) for rank in others):
            return mine
        if mine is not None and not isinstance(mine, Loaded):
            mine[1].close()
        return None

    def _mine(self, step: int, made_in: tuple, copy: Optional[_pool.Copy], say: Callable, into):
        was_good = False
        if copy is not None:
            was_good = copy.control.checked(copy.slot, self._epoch)
            try:
                return Loaded(_pool.state_of(copy, self._epoch, into))
            except _pool.Spoilt as spoilt:
                say(f"step {step}: {spoilt}; reading it from the disk instead")
        if self._on_disk(step, self._rank, *made_in):
            on_disk = _seal.take_one(self._directory, step, self._rank)
            if on_disk is not None:
                return on_disk
        if was_good:
            # The other ranks may have loaded this step. A rank with a different step would be worse than a failed
            # attempt.
            raise RuntimeError(f"mainstay.checkpoint: step {step} of this rank changed after other ranks had read it")
        return None

    def _is_good(self, step: int, rank: int, made_in: tuple, copy: Optional[_pool.Copy], say: Callable) -> bool:
        if copy is not None:
            try:
                _pool.check(copy, self._epoch)
                return True
            except _pool.Spoilt as spoilt:
                say(f"step {step}: {spoilt}; reading it from the disk instead")
        return self._on_disk(step, rank, *made_in) and _seal.is_intact(self._directory, step, rank)

    def _on_disk(self, step: int, rank: int, job: str, attempt: int) -> bool:
        try:
            return bool(_disk.ask(_seal.made_in, self._directory, step, rank) == (job, attempt))
        except (_seal.Incomplete, _seal.Damaged, OSError):
            return False

    def _disk_attempt(self, step: int, job: str) -> int:
        try:
            of_job, attempt = _disk.ask(_seal.made_in, self._directory, step, self._rank)
        except (_seal.Incomplete, _seal.Damaged, OSError):
            return -1
        return attempt if of_job == job else -1


def read_manifest(path: str, rank: int) -> Optional[dict]:
    """The manifest of a slot, if it is intact."""
    try:
        return _seal.read_manifest(path, rank)
    except (_seal.Incomplete, _seal.Damaged):
        return None
