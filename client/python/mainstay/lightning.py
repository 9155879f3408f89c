"""PyTorch Lightning: ``Trainer(callbacks=[mainstay.lightning.MainstayCallback()])``, or no change at all.

Lightning finds the callback automatically through the package's entry points. If the environment names no heartbeat
page, there is no callback.

``Trainer(plugins=[mainstay.lightning.MainstayCheckpointIO()])`` seals Lightning's own checkpoints: each is whole or
does not exist, and every byte is verified when it is loaded.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, List, Type

from . import _disk, _native, _seal, section, step, torch
from . import checkpoint as _checkpoint
from ._framework import imported
from ._section import around

__all__ = ["MainstayCallback", "MainstayCheckpointIO", "callbacks", "callbacks_of_pytorch_lightning"]


@functools.lru_cache(maxsize=None)
def _made_for(base):
    """The callback for one of the two packages under whose name Lightning is installed."""

    class MainstayCallback(base):
        """Reports steps, their loss if it is in host memory, evaluation and checkpoints."""

        def __init__(self):
            self._newest = None
            self._evaluating = 0
            self._leads = False

        def setup(self, trainer, pl_module, stage=None):
            # If the script passed one and Lightning found another through the entry point, the first reports.
            ours = [callback for callback in trainer.callbacks if isinstance(callback, MainstayCallback)]
            self._leads = ours[:1] == [self]
            if not self._leads:
                return
            torch.watch(steps=False)
            saving = trainer.save_checkpoint
            if _native.active() and not hasattr(saving, "_mainstay"):
                trainer.save_checkpoint = around(section("checkpoint"), saving)
                trainer.save_checkpoint._mainstay = True

        def on_train_start(self, trainer, pl_module):
            self._newest = trainer.global_step
            if self._leads:
                _native.total_steps(_total_steps(trainer))

        def on_train_batch_end(self, trainer, pl_module, outputs, *others):
            number = trainer.global_step
            if not self._leads:
                return
            if number != self._newest:
                self._newest = number
                step(number, loss=_loss(outputs))
                self._save_if_asked(trainer)
            else:
                _native.beat()

        def _save_if_asked(self, trainer):
            # True after the same step on all ranks: they save and stop together.
            if not trainer.should_stop and _native.save_requested():
                directory = os.environ.get("MAINSTAY_CHECKPOINT_DIR") or trainer.default_root_dir
                trainer.save_checkpoint(os.path.join(directory, "mainstay-save.ckpt"))
                trainer.should_stop = True

        def on_validation_start(self, trainer, pl_module):
            if not self._leads:
                return
            self._evaluating += 1
            section("evaluation").__enter__()

        def on_validation_end(self, trainer, pl_module):
            if self._evaluating:
                self._evaluating -= 1
                section("evaluation").__exit__(None, None, None)

        on_test_start = on_predict_start = on_validation_start
        on_test_end = on_predict_end = on_validation_end

        def on_exception(self, trainer, pl_module, exception):
            while self._evaluating:
                self.on_validation_end(trainer, pl_module)

    return MainstayCallback


def _total_steps(trainer) -> int:
    """The value of ``global_step`` at the end of the training; 0 if there is none."""
    try:
        total = trainer.estimated_stepping_batches
    except Exception:
        return 0
    # Without a limit it is infinite.
    return total if isinstance(total, int) and total > 0 else 0


def _loss(outputs):
    """The loss of a training step, if it can be read without waiting."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    device = getattr(loss, "device", None)
    if getattr(device, "type", None) != "cpu" or loss.numel() != 1:
        return None
    return float(loss.detach())


def callbacks() -> List[Any]:
    """For Lightning's entry point ``lightning.pytorch.callbacks_factory``."""
    if not _native.active():
        return []
    from lightning.pytorch import Callback

    return [_made_for(Callback)()]


def callbacks_of_pytorch_lightning() -> List[Any]:
    """For the entry point ``pytorch_lightning.callbacks_factory``."""
    if not _native.active():
        return []
    from pytorch_lightning import Callback

    return [_made_for(Callback)()]


@functools.lru_cache(maxsize=None)
def _io_made_for(base):
    """The plugin for one of the two packages under whose name Lightning is installed."""

    class MainstayCheckpointIO(base):
        """Each checkpoint is a directory in Mainstay's layout, with one rank: Lightning passes the state of all.

        A file that Lightning wrote before is still loaded. Write errors are raised, as with Lightning's own plugin.
        """

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            state = checkpoint
            if storage_options is not None:
                raise TypeError("mainstay.lightning.MainstayCheckpointIO takes no storage_options")
            path = os.path.abspath(os.fspath(path))
            number = int(state.get("global_step", 0))
            attempt = _checkpoint._attempt()
            identity = _seal.Identity(_checkpoint._job(), attempt, number, 0, 1)
            facts, suffix, serialise = _checkpoint._serialisation(state)
            before = _out_of_the_way(path)
            _seal.clear_aside(path, 0)
            _seal.write(path, identity, facts, suffix, serialise, lambda: attempt)
            # A name such as "last.ckpt" stands for one checkpoint: the previous one is removed when this one is whole.
            _forget_newer(path, number)
            _checkpoint._quietly(_seal.prune, path, 1, 1)
            if before is not None:
                _checkpoint._quietly(os.unlink, before)

        def load_checkpoint(self, path, map_location=lambda storage, loc: storage, weights_only=None):
            import torch

            path = os.path.abspath(os.fspath(path))
            with _checkpoint._standing_still("restore"):
                read = functools.partial(torch.load, map_location=map_location, weights_only=weights_only)
                return self._load(path, read)

        @staticmethod
        def _load(path, read):
            if not os.path.isdir(path):
                return read(path)
            damage = None
            for number in _seal.steps(path):
                try:
                    _, file = _seal.take(path, number, 0, 1)
                except _seal.Incomplete:
                    continue
                except _seal.Damaged as found:
                    damage = damage or found
                    continue
                with file:
                    return read(file)
            if damage is not None:
                raise RuntimeError(f"{path} is damaged and is not loaded: {damage}")
            raise FileNotFoundError(f"{path} holds no checkpoint that was written to its end")

        def remove_checkpoint(self, path):
            _disk.remove_tree(os.path.abspath(os.fspath(path)))

    return MainstayCheckpointIO


def _out_of_the_way(path: str):
    """Renames a file with the name of the new directory, and returns its new name. It is kept until the directory is
    whole."""
    if not os.path.isfile(path):
        return None
    before = f"{path}.before"
    os.replace(path, before)
    return before


def _forget_newer(path: str, number: int) -> None:
    """Removes higher steps. Training that was restarted from an older step saves lower numbers, and the last save
    counts."""
    for other in _seal.steps(path):
        if other > number:
            _checkpoint._quietly(_seal._remove_step, path, other)


# Made on first use, from the classes of the package that the script imports.
MainstayCallback: Type[Any]
MainstayCheckpointIO: Type[Any]


def _made_on_first_use(name: str) -> Any:
    by_old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if name == "MainstayCallback":
        package = imported("pytorch_lightning" if by_old_name else "lightning.pytorch")
        globals()[name] = _made_for(package.Callback)
        return globals()[name]
    if name == "MainstayCheckpointIO":
        package = "lightning_fabric.plugins" if by_old_name else "lightning.fabric.plugins"
        globals()[name] = _io_made_for(imported(package).CheckpointIO)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # A type checker would accept every name.
    __getattr__ = _made_on_first_use
