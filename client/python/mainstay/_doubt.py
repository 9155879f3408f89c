"""Which checkpoints are doubtful: those that a launch of a job saved after the last step at which replicas agreed, before a restart.

The launcher writes it beside the checkpoints. ``MAINSTAY_CHECKPOINT_DOUBTFUL`` says what is made of it: ``use`` them with a
warning (as without it), or ``skip`` those of which a majority of replicas says so, or ``skip-all``, those too where only two differ.
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
    """What the environment asks for; ValueError if that is none of :data:`POLICIES`."""
    wanted = os.environ.get(POLICY) or "use"
    if wanted not in POLICIES:
        raise ValueError(f"{POLICY}={wanted!r} is none of {', '.join(POLICIES)}")
    return wanted


def told(directory: str) -> list:
    """What was said of the checkpoints in `directory`; nothing if that cannot be read."""
    try:
        with open(os.path.join(directory, FILE), encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def about(directory: str, step: int, rank: int, origin: Optional[tuple] = None) -> Optional[dict]:
    """Why this rank's shard of `step` is doubtful, the surest reason first; None if it is not.

    ``origin`` is job, attempt and launch of a shard that is not on the disk.
    """
    entries = told(directory)
    if not entries:
        return None
    try:
        job, attempt, launch = origin or _seal.origin(directory, step, rank)
    except (_seal.Incomplete, _seal.Damaged, OSError):
        return None
    # What a later attempt or another launch saved under the same number was computed anew.
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
