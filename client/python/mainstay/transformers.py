"""Hugging Face: ``Trainer(..., callbacks=[mainstay.transformers.MainstayCallback()])``, or no change at all.

Under ``mainstay run`` each trainer gets the callback automatically, unless ``MAINSTAY_TORCH=0``.
"""

from __future__ import annotations

from . import _native, section, step, torch
from ._framework import transformers as _transformers
from ._section import around

__all__ = ["MainstayCallback"]

_leads = None  # the callback that reports: one passed by the script takes precedence over the default one


class MainstayCallback(_transformers.TrainerCallback):
    """Reports steps by the trainer's ``global_step``, evaluation and checkpoints; a logged loss is reported with the
    next step."""

    def __init__(self) -> None:
        self._loss = None
        self._evaluating = False

    def on_train_begin(self, args, state, control, **named):
        # Callbacks that the script passes come after the default ones.
        global _leads
        _leads = self
        _native.total_steps(max(state.max_steps, 0))
        if not torch.watch(steps=False):
            return
        trainer = _transformers.Trainer
        save = getattr(trainer, "_save_checkpoint", None)
        if save is not None and not hasattr(save, "_mainstay"):
            trainer._save_checkpoint = around(section("checkpoint"), save)
            trainer._save_checkpoint._mainstay = True

    def on_step_begin(self, args, state, control, **named):
        self._evaluate(False)

    def on_step_end(self, args, state, control, **named):
        if _leads is not self:
            return control
        step(state.global_step, loss=self._loss)
        self._loss = None
        # True after the same step on all ranks.
        if _native.save_requested():
            control.should_save = control.should_training_stop = True
        return control

    def on_substep_end(self, args, state, control, **named):
        if _leads is self:
            _native.beat()

    def on_log(self, args, state, control, logs=None, **named):
        loss = (logs or {}).get("loss")
        if isinstance(loss, (int, float)):
            self._loss = loss

    def on_prediction_step(self, args, state, control, **named):
        self._evaluate(True)
        _native.beat()

    def on_evaluate(self, args, state, control, **named):
        self._evaluate(False)

    def on_predict(self, args, state, control, **named):
        self._evaluate(False)

    def on_train_end(self, args, state, control, **named):
        self._evaluate(False)

    def _evaluate(self, now: bool) -> None:
        if _leads in (None, self) and now != self._evaluating:
            self._evaluating = now
            evaluation = section("evaluation")
            evaluation.__enter__() if now else evaluation.__exit__(None, None, None)


class _ByDefault(MainstayCallback):
    """A separate class, because the trainer warns about two callbacks of one class."""


def watch_all(trainer_module) -> None:
    """Makes every ``Trainer`` that is created from now on report to Mainstay, if heartbeats of this process reach a
    page."""
    callbacks = trainer_module.DEFAULT_CALLBACKS
    if _native.active() and _ByDefault not in callbacks:
        callbacks.append(_ByDefault)
