"""Callbacks for a world of another size than before: settings that depend on the number of ranks are updated.

The launcher passes the number of ranks of the previous attempt, of this run or of the job's last one
(``MAINSTAY_PREVIOUS_WORLD_SIZE``); in process, a round's variables replace those of the previous round.
"""

from __future__ import annotations

import os

PREVIOUS = "MAINSTAY_PREVIOUS_WORLD_SIZE"

_callbacks = []


def on_world_change(callback):
    """Calls ``callback(old, new)`` when the job continues with another number of ranks than it had before.

    In a new process at once, if the previous attempt had another size; in a restartable function's process between
    two rounds, before the function is called again. Its exceptions propagate. Returns the callback, so that it can
    be used as a decorator.
    """
    if callback not in _callbacks:
        _callbacks.append(callback)
        old, new = _number(PREVIOUS), size()
        if old and new and old != new:
            callback(old, new)
    return callback


def size():
    """``WORLD_SIZE``; 0 if it is not set."""
    return _number("WORLD_SIZE")


def changed(old: int) -> None:
    """A round starts after one of ``old`` ranks."""
    new = size()
    if old and new and old != new:
        for callback in list(_callbacks):
            callback(old, new)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
