"""Watches a PyTorch job: sections of a step, counters of collectives, steps where the script tells none.

    import mainstay.torch

    mainstay.torch.watch()

Under ``mainstay run`` this happens by itself as soon as the script imports torch (``MAINSTAY_TORCH=0`` turns it off).
Nothing here changes what torch computes, waits for a device, or raises into training.
"""

from __future__ import annotations

import torch as _torch

from . import _native, _torch_collectives, _torch_sections, _torch_store

__all__ = ["watch"]

_watching = False


def watch(model=None, *, steps: bool = True) -> bool:
    """Begins to watch; True if heartbeats of this process reach a page.

    ``model``: a module whose calls are the section ``forward``. ``DistributedDataParallel``, FSDP modules and what
    ``fully_shard`` returns are found by themselves. ``steps``: each step of the first optimizer counts as a step of the
    rank, until the script calls :func:`mainstay.step` itself.
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
