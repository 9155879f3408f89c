"""The parts of a step of a PyTorch job as sections: data, forward, backward, optimizer, evaluation.

Each hook is a few calls into the native module (some hundred nanoseconds). Where CUDA is in use, a pair of events around
each section tells how long the device took for it; they are asked later, when they are complete, and never waited for.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import weakref

import torch
from torch.optim import optimizer as _optimizer

import mainstay

from mainstay_auto import when_imported

from . import _native, _role

_FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_complained = False


class _Section:
    """A section with its time on the device. Entered again before it was left (an exception), it is left first."""

    __slots__ = ("_device", "_enter", "_leave", "_open", "_start")

    def __init__(self, name: str, on_device: bool):
        section = mainstay.section(name)
        self._enter, self._leave = section.__enter__, section.__exit__
        self._device = mainstay.section(f"{name}@device") if on_device else None
        self._open = 0
        self._start = None

    def enter(self) -> None:
        self._open += 1
        if self._open == 1:
            self._enter()
            if self._device is not None:
                self._start = _clock.mark()

    def leave(self) -> None:
        if not self._open:
            return
        self._open -= 1
        if not self._open:
            self._leave()
            if self._start is not None:
                _clock.between(self._device, self._start, _clock.mark())
                self._start = None

    def reset(self) -> None:
        """For sections whose end an exception may have skipped."""
        if self._open:
            self._open = 1
            self.leave()


class _DeviceClock:
    """Pairs of CUDA events, read once they are complete. Marks every so many steps, as events cost the host time."""

    EVERY = 4  # steps
    KEPT = 64  # pairs waiting for the device; beyond that nothing more is marked

    def __init__(self):
        self._spans = collections.deque()
        self._free = []
        self._steps = 0
        self._on = False

    def mark(self):
        """An event on the current stream, or None. Never during a graph's capture, which it would end."""
        if not self._on:
            return None
        try:
            if torch.cuda.is_current_stream_capturing():
                return None
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        except Exception as error:
            # An error of the device that the script has not met yet: it is the script's to meet.
            self._on = False
            self.EVERY = sys.maxsize
            complain("timing on the device", error)
            return None

    def between(self, section, start, end) -> None:
        if end is None:
            self._free.append(start)
        else:
            self._spans.append((section, start, end))

    def step(self) -> None:
        """A step is complete: tells what the device has finished, and says whether the next one is marked."""
        spans = self._spans
        while spans and spans[0][2].query():
            section, start, end = spans.popleft()
            _native.spend(section, int(start.elapsed_time(end) * 1e6))
            self._free += (start, end)
        self._steps += 1
        self._on = self._steps % self.EVERY == 0 and len(spans) < self.KEPT and torch.cuda.is_initialized()


_clock = _DeviceClock()
_forward = _evaluation = _backward = _optimizing = _data = None
_hooked = weakref.WeakKeyDictionary()  # module: its hooks' handles
_thread = 0
begun = 0  # optimizer steps


def install(steps: bool) -> None:
    """Puts the hooks in place, once for the life of the process."""
    global _forward, _evaluation, _backward, _optimizing, _data, _thread
    _thread = threading.get_ident()
    _forward, _backward, _optimizing = (_Section(name, True) for name in ("forward", "backward", "optimizer"))
    _evaluation, _data = _Section("evaluation", False), _Section("data", False)

    counter = _StepCounter() if steps else None

    def before_step(_optimizer, _arguments, _named) -> None:
        global begun
        begun += 1
        _optimizing.reset()
        _optimizing.enter()

    def after_step(optimizer, _arguments, _named) -> None:
        _optimizing.leave()
        if counter is not None:
            counter.step(optimizer)
        _clock.step()

    _optimizer.register_optimizer_step_pre_hook(_guarded(before_step))
    _optimizer.register_optimizer_step_post_hook(_guarded(after_step))
    torch.autograd.backward = _around(torch.autograd.backward, _backward)
    when_imported("torch.nn.parallel.distributed", _hook_data_parallel)
    when_imported("torch.utils.data.dataloader", _hook_data_loader)
    when_imported("torch.distributed.device_mesh", _hook_meshes)
    for name in _FSDP_MODULES:
        when_imported(name, _hook_fully_sharded)


class _StepCounter:
    """Counts the steps of the first optimizer, for a script that tells none.

    The first one is not told: only by the second is it clear that the script does not do so itself.
    """

    def __init__(self):
        self._lead = None
        self._count = 0

    def step(self, optimizer) -> None:
        lead = self._lead and self._lead()
        if lead is None:
            self._lead = weakref.ref(optimizer)
        elif lead is not optimizer:
            return
        number = self._count
        self._count += 1
        if number:
            _native.hook_step(number)


def watch_model(model) -> None:
    """Counts the calls of ``model`` as ``forward``, or as ``evaluation`` while it is not training."""
    if model in _hooked:
        return
    # Of modules within modules (FSDP wraps from the inside out) only the outermost is watched.
    for inner in [inner for inner in model.modules() if inner in _hooked]:
        for handle in _hooked.pop(inner):
            handle.remove()

    def before(module, _arguments) -> None:
        if not torch.compiler.is_compiling() and _in_training_thread():
            (_forward if module.training else _evaluation).enter()

    def after(module, _arguments, _result) -> None:
        if not torch.compiler.is_compiling() and _in_training_thread():
            (_forward if module.training else _evaluation).leave()

    _hooked[model] = (model.register_forward_pre_hook(before), model.register_forward_hook(after, always_call=True))


def _hook_data_parallel(module) -> None:
    _hook_construction(module.DistributedDataParallel)


def _hook_fully_sharded(module) -> None:
    if hasattr(module, "FullyShardedDataParallel"):
        _hook_construction(module.FullyShardedDataParallel)
    shard = getattr(module, "fully_shard", None)
    if shard is None or hasattr(shard, "_mainstay"):
        return

    @functools.wraps(shard)
    def watched(target, *arguments, **named):
        result = shard(target, *arguments, **named)
        if isinstance(result, torch.nn.Module):
            _attempt(watch_model, result)
        return result

    # `fully_shard.state(module)` is part of its face.
    watched.__dict__.update(vars(shard))
    watched._mainstay = True
    for name in _FSDP_MODULES:
        holder = sys.modules.get(name)
        if holder is not None and getattr(holder, "fully_shard", None) is shard:
            holder.fully_shard = watched


def _hook_construction(kind) -> None:
    """Watches every instance of a wrapper class from its construction on."""
    if hasattr(kind.__init__, "_mainstay"):
        return
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self, *arguments, **named):
        construct(self, *arguments, **named)
        _attempt(watch_model, self)

    constructed._mainstay = True
    kind.__init__ = constructed


def _hook_data_loader(module) -> None:
    iterator = module._BaseDataLoaderIter
    iterator.__next__ = _around(iterator.__next__, _data)


def _hook_meshes(module) -> None:
    """Remembers the first meshes: their dimension for pipeline parallelism tells this rank's stage."""
    construct = module.DeviceMesh.__init__
    if hasattr(construct, "_mainstay"):
        return

    @functools.wraps(construct)
    def constructed(self, *arguments, **named):
        construct(self, *arguments, **named)
        if len(_role.meshes) < 8:
            _role.meshes.append(self)

    constructed._mainstay = True
    module.DeviceMesh.__init__ = constructed


def _around(function, section):
    """``function`` with ``section`` around its calls from the thread that trains."""
    if hasattr(function, "_mainstay"):
        return function
    enter, leave = section.enter, section.leave

    @functools.wraps(function)
    def inside(*arguments, **named):
        if not _in_training_thread():
            return function(*arguments, **named)
        enter()
        try:
            return function(*arguments, **named)
        finally:
            leave()

    inside._mainstay = True
    return inside


def _in_training_thread(ident=threading.get_ident) -> bool:
    return ident() == _thread


def _guarded(hook):
    """A hook whose own failure is told once and never raised into training."""

    @functools.wraps(hook)
    def guarded(*arguments):
        try:
            hook(*arguments)
        except Exception as error:
            complain(hook.__name__, error)

    return guarded


def _attempt(action, *arguments) -> None:
    try:
        action(*arguments)
    except Exception as error:
        complain(action.__name__, error)


def complain(what: str, error: Exception) -> None:
    """One warning in the life of the process."""
    global _complained
    if _complained:
        return
    _complained = True
    import warnings

    try:
        warnings.warn(f"mainstay.torch: {what} failed: {error!r}; training is not affected", RuntimeWarning, 2)
    except Exception:
        pass
