"""The client of a training rank.

    import mainstay

    for n, batch in enumerate(batches):
        with mainstay.section("forward"):
            ...
        mainstay.step(n, loss=loss_as_float)

Under ``mainstay run`` these calls write to the rank's heartbeat page with a few stores each. Elsewhere they do nothing
and cost next to nothing. They never raise or block: an invalid argument is ignored with one warning.
"""

from __future__ import annotations

from . import _hooks
from ._native import __version__, active, beat, data_at, on_save_request, pause, resume, save_requested, save_within, section, step, total_steps
from ._role import role
from ._section import expect_long

__all__ = [
    "Interrupted", "__version__", "active", "beat", "checkpoint", "data_at", "digest", "expect_long", "on_save_request",
    "on_world_change", "pause", "report_digest", "restartable", "resume", "role", "roles", "rounds", "save_requested", "save_within", "section", "status", "step",
    "total_steps", "wait_roles",
]  # fmt: skip

_MODULES = ("checkpoint", "dcp", "jax", "lightning", "policy", "torch", "transformers")

_hooks.start()


def status() -> dict:
    """Where the heartbeats of this process go: ``active``, ``page`` (path or None), ``refusal`` (text or None)."""
    return _hooks.status()


def digest(tensors):
    """A number that is equal for replicas with the same bits: see :mod:`mainstay._digest`."""
    from ._digest import digest as compute

    return compute(tensors)


def report_digest(tensors, *, every: int = 100):
    """Reports the digest of these tensors with every ``every``-th optimizer step: see :mod:`mainstay._digest`."""
    from ._digest import report_digest as begin

    return begin(tensors, every=every)


def on_world_change(callback):
    """Calls ``callback(old, new)`` when the job continues with another number of ranks: see :mod:`mainstay._world`."""
    from ._world import on_world_change as register

    return register(callback)


def __getattr__(name: str):
    # Loaded on first use: a script that only sends heartbeats does not pay for their imports.
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"mainstay.{name}")
    if name in ("Interrupted", "restartable", "rounds"):
        from . import _restartable

        return getattr(_restartable, name)
    if name in ("roles", "wait_roles"):
        from . import _roles

        return getattr(_roles, name)
    raise AttributeError(f"module 'mainstay' has no attribute {name!r}")


def __dir__() -> list:
    return sorted({*globals(), *__all__})
