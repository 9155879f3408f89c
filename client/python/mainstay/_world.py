"""Callbacks for a world that has another size than before: what depends on the number of ranks is set anew.

The launcher reports with how many ranks the previous attempt ran, of this run or of the job's last one
(``MAINSTAY_PREVIOUS_WORLD_SIZE``); in process, a round's variables replace those of the round before.
"""

from __future__ import annotations

import os

PREVIOUS = "MAINSTAY_PREVIOUS_WORLD_SIZE"

_callbacks = []


def on_world_change(callback):
    """Has ``callback(old, new)`` called when the job continues with another number of ranks than it had before.

    In a new process at once, if the attempt before had another size; in a restartable function's process between two
    rounds, before the function is called again. What it raises passes. Returns the callback, so that it may decorate one.
    """
    if callback not in _callbacks:
        _callbacks.append(callback)
        old, new = _number(PREVIOUS), size()
        if old and new and old != new:
            callback(old, new)
    return callback


def size():
    """``WORLD_SIZE``; 0 where there is none."""
    return _number("WORLD_SIZE")


def changed(old: int) -> None:
    """A round begins that comes after one of ``old`` ranks."""
    new = size()
    if old and new and old != new:
        for callback in list(_callbacks):
            callback(old, new)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
