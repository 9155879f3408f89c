"""Watches a PyTorch job: the sections of a step, counters of collectives, and steps if the script reports none.

    import mainstay.torch

    mainstay.torch.watch()

Under ``mainstay run`` this happens automatically as soon as the script imports torch (``MAINSTAY_TORCH=0`` turns it
off). This module does not change what torch computes, does not wait for a device, and raises nothing into training.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Optional

from ._framework import torch as _torch  # First: what follows needs it too.

from . import _native, _reconfigure, _torch_collectives, _torch_sections, _torch_store

__all__ = ["process_group", "watch"]

_watching = False


def process_group(backend: Optional[str] = None, *, timeout: Optional[timedelta] = None, **options: Any) -> Any:
    """The default process group of this round, instead of ``torch.distributed.init_process_group`` in a
    :func:`mainstay.restartable` function.

    With PyTorch 2.15 or later and ``backend="gloo"`` a rank that stays in its process keeps its group, and the group
    is reconfigured (``torch.distributed._reconfigure``, which PyTorch calls experimental);
    ``MAINSTAY_RECONFIGURE=0`` turns that off. Otherwise, outside of rounds, and with options that set the
    rendezvous, the group is created by ``init_process_group``. All ranks must call it.
    """
    return _reconfigure.process_group(backend, timeout=timeout, **options)


def watch(model: Any = None, *, steps: bool = True) -> bool:
    """Starts to watch; returns True if heartbeats of this process reach a page.

    ``model``: a module whose calls are the section ``forward``. ``DistributedDataParallel``, FSDP modules and the
    results of ``fully_shard`` are found automatically. ``steps``: each step of the first optimizer counts as a step
    of the rank, until the script calls :func:`mainstay.step` itself.
    """
    global _watching
    if not _native.active():
        return False
    try:
        if not _watching:
            _watching = True
            _torch_sections.install(steps)
            _torch_collectives.start()
            _torch_store.install()
        if isinstance(model, _torch.nn.Module):
            _torch_sections.watch_model(model)
    except Exception as error:
        _torch_sections.complain("watch", error)
    return True
