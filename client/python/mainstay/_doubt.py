"""Determines which checkpoints are doubtful: those that a launch of a job saved after the last step at which replicas
agreed, before a restart.

The launcher writes the list next to the checkpoints. ``MAINSTAY_CHECKPOINT_DOUBTFUL`` sets the policy: ``use`` them
with a warning (the default), ``skip`` those that a majority of replicas marks as doubtful, or ``skip-all``, which
also skips those for which only two replicas differ.
"""

from __future__ import annotations

import json
import os
from typing import Optional

from . import _seal

FILE = "doubtful.json"
POLICY = "MAINSTAY_CHECKPOINT_DOUBTFUL"
POLICIES = ("use", "skip", "skip-all")


def policy() -> str:
    """The policy that the environment sets; ValueError if it is none of :data:`POLICIES`."""
    wanted = os.environ.get(POLICY) or "use"
    if wanted not in POLICIES:
        raise ValueError(f"{POLICY}={wanted!r} is none of {', '.join(POLICIES)}")
    return wanted


def read(directory: str) -> list:
    """The recorded doubts about the checkpoints in `directory`; empty if they cannot be read."""
    try:
        with open(os.path.join(directory, FILE), encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def about(directory: str, step: int, rank: int, origin: Optional[tuple] = None) -> Optional[dict]:
    """Why this rank's shard of `step` is doubtful, the most certain reason first; None if it is not.

    ``origin`` is job, attempt and launch of a shard that is not on the disk.
    """
    entries = read(directory)
    if not entries:
        return None
    try:
        job, attempt, launch = origin or _seal.origin(directory, step, rank)
    except (_seal.Incomplete, _seal.Damaged, OSError):
        return None
    # A step that a later attempt or another launch saved under the same number was computed again.
    held = [
        entry
        for entry in entries
        if entry.get("job") == job
        and (not launch or entry.get("run") in (None, launch))
        and attempt <= entry.get("attempt", -1)
        and (entry.get("after") is None or step > entry["after"])
    ]
    return max(held, key=lambda entry: bool(entry.get("sure")), default=None)


def skips(entry: dict, wanted: str) -> bool:
    return wanted == "skip-all" or (wanted == "skip" and bool(entry.get("sure")))
