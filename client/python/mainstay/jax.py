"""JAX: ``train_step = mainstay.jax.watch_step(jax.jit(train_step))``.

JAX dispatches work to the device and returns. A step counts once its results are ready, which is polled without
waiting.
"""

from __future__ import annotations

import atexit
import collections
from typing import Any, Callable, Optional, TypeVar

from . import _native, section, step
from ._framework import jax as _jax
from ._section import expect_long

__all__ = ["watch_step"]

_F = TypeVar("_F", bound=Callable[..., Any])


def watch_step(function: _F, *, first: int = 0, loss: Optional[Callable[[Any], Any]] = None) -> _F:
    """Returns ``function``, whose calls are the steps ``first``, ``first + 1``, ... of this rank.

    The first call, in which JAX compiles, is expected to take long. ``loss``: selects the loss from the result of
    ``function``; it is read once it is ready.
    """
    if not _native.active():
        return function
    watch = _Watch(first, loss)
    compiling, running = expect_long("compile"), section("dispatch")

    def watched(*arguments, **named):
        with compiling if watch.number == first else running:
            result = function(*arguments, **named)
        watch.dispatched(result)
        return result

    watched.__wrapped__ = function
    watched.__name__ = getattr(function, "__name__", "step")
    atexit.register(watch.report)
    return watched


class _Watch:
    """Pending steps: one array of each, until it is ready."""

    def __init__(self, first: int, loss):
        self.number = first
        self._loss = loss
        self._pending = collections.deque()

    def dispatched(self, result) -> None:
        try:
            leaves = [leaf for leaf in _jax.tree_util.tree_leaves(result) if hasattr(leaf, "is_ready")]
            loss = self._loss(result) if self._loss is not None else None
            # Keeps only the smallest array: a reference to a large one would delay its release.
            witness = min(leaves, key=lambda leaf: leaf.size, default=None)
        except Exception:
            witness = loss = None
        self._pending.append((self.number, witness, loss))
        self.number += 1
        self.report()

    def report(self) -> None:
        """Reports the completed steps."""
        while self._pending:
            number, witness, loss = self._pending[0]
            if not _ready(witness) or not _ready(loss):
                return
            self._pending.popleft()
            step(number, loss=_number(loss))


def _ready(array) -> bool:
    try:
        return not hasattr(array, "is_ready") or array.is_deleted() or array.is_ready()
    except Exception:
        return True


def _number(loss):
    try:
        return None if loss is None else float(loss)
    except Exception:
        return None
