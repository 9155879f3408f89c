"""PyTorch Lightning: ``Trainer(callbacks=[mainstay.lightning.MainstayCallback()])``, or nothing at all.

Lightning finds the callback by itself through the package's entry points. Where no heartbeat page is named, there is none.
"""

from __future__ import annotations

import functools
import os
import sys

from . import _native, section, step, torch
from ._section import around

__all__ = ["MainstayCallback", "callbacks", "callbacks_of_pytorch_lightning"]


@functools.lru_cache(maxsize=None)
def _made_for(base):
    """The callback for one of the two packages under whose name Lightning is installed."""

    class MainstayCallback(base):
        """Tells steps, their loss where it is in host memory, evaluation and checkpoints."""

        def __init__(self):
            self._newest = None
            self._evaluating = 0
            self._leads = False

        def setup(self, trainer, pl_module, stage=None):
            # One given by name and one found by the entry point: the first of them speaks.
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
            # True after the same step on all ranks: saving and stopping are things that they do together.
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


def _loss(outputs):
    """The loss of a training step if reading it waits for nothing."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    device = getattr(loss, "device", None)
    if getattr(device, "type", None) != "cpu" or loss.numel() != 1:
        return None
    return float(loss.detach())


def callbacks() -> list:
    """For Lightning's entry point ``lightning.pytorch.callbacks_factory``."""
    if not _native.active():
        return []
    from lightning.pytorch import Callback

    return [_made_for(Callback)()]


def callbacks_of_pytorch_lightning() -> list:
    """For the entry point ``pytorch_lightning.callbacks_factory``."""
    if not _native.active():
        return []
    from pytorch_lightning import Callback

    return [_made_for(Callback)()]


def __getattr__(name: str):
    if name == "MainstayCallback":
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
        globals()[name] = _made_for(Callback)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
