"""Callbacks for a changed world size, to update settings that depend on the number of ranks.

The launcher passes the number of ranks of the previous attempt, of this launch or of the job's last launch
(``MAINSTAY_PREVIOUS_WORLD_SIZE``). In process, the variables of a round replace those of the previous round.
"""

from __future__ import annotations

import os

PREVIOUS = "MAINSTAY_PREVIOUS_WORLD_SIZE"

_callbacks = []


def on_world_change(callback):
    """Calls ``callback(old, new)`` when the job continues with another number of ranks than it had before.

    In a new process it is called at once if the previous attempt had another size. In the process of a restartable
    function it is called between two rounds, before the function is called again. Exceptions of the callback
    propagate. Returns the callback, so that it can be used as a decorator.
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
    """Calls the callbacks at the start of a round that follows one of ``old`` ranks."""
    new = size()
    if old and new and old != new:
        for callback in list(_callbacks):
            callback(old, new)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
