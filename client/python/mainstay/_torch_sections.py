"""Reports the parts of a step of a PyTorch job as sections: data, forward, backward, optimizer, evaluation.

Gates of the native module (``gates.rs``) do the work of the hooks. When a hook is called, the model's computation has
emptied the CPU caches, and each additional Python frame costs microseconds. If CUDA is in use, a pair of events around
each section measures the time on the device. The events are read when they are complete; nothing waits for them.
"""

from __future__ import annotations

import collections
import functools
import sys
import weakref

import torch
from torch.optim import optimizer as _optimizer

import mainstay

from mainstay_auto import when_imported

from . import _native, _role

_FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_Module = torch.nn.Module
# The cheapest check. PyTorch 2.1 has only the other one.
_compiling = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
_complained = False


class _Timer:
    """Measures a section's time on the device. Its gate calls both ends in the steps that are timed."""

    __slots__ = ("_section", "_start")

    def __init__(self, name: str):
        self._section = mainstay.section(f"{name}@device")
        self._start = None

    def begin(self) -> None:
        self._start = _clock.mark()

    def end(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            _clock.between(self._section, start, _clock.mark())


class _DeviceClock:
    """Pairs of CUDA events, read once they are complete. Only some steps are timed: events cost host time."""

    KEPT = 64  # the maximum number of pairs that wait for the device; with more, no further steps are timed

    def __init__(self):
        self._spans = collections.deque()
        self._free = []
        self._broken = False

    def mark(self):
        """Records an event on the current stream. None during the capture of a graph, which an event would end."""
        if self._broken:
            return None
        try:
            if torch.cuda.is_current_stream_capturing():
                return None
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        except Exception as error:
            # A device error that the script has not seen yet. The script must see it first.
            self._broken = True
            complain("timing on the device", error)
            return None

    def between(self, section, start, end) -> None:
        if end is None:
            self._free.append(start)
        else:
            self._spans.append((section, start, end))

    def look(self):
        """Reports the sections that the device has finished. Returns whether to time the next step, None without a
        device."""
        if self._broken or not torch.cuda.is_initialized():
            return None
        try:
            spans = self._spans
            while spans and spans[0][2].query():
                section, start, end = spans.popleft()
                _native.spend(section, int(start.elapsed_time(end) * 1e6))
                self._free += (start, end)
            return len(spans) < self.KEPT
        except Exception as error:
            self._broken = True
            complain("timing on the device", error)
            return None


_clock = _DeviceClock()
_forward = _evaluation = None  # the gates for calls of a watched model: (enter, leave)
_hooked = weakref.WeakKeyDictionary()  # by module: the handles of its hooks
_lead = None  # the optimizer whose steps count


def install(steps: bool) -> None:
    """Installs the hooks, once per process. Must be called by the training thread."""
    global _forward, _evaluation
    on_device = torch.version.cuda is not None or torch.version.hip is not None

    def timer(name):
        timer = _Timer(name) if on_device else None
        return timer and (timer.begin, timer.end)

    def gate(name, timed=True):
        return _native.gate(mainstay.section(name), timer(name) if timed else None)

    _forward, _evaluation = gate("forward"), gate("evaluation", timed=False)
    before, after = _native.optimizer_gates(
        mainstay.section("optimizer"), timer("optimizer"), _follow if steps else None, _clock.look if on_device else None
    )
    _optimizer.register_optimizer_step_pre_hook(before)
    _optimizer.register_optimizer_step_post_hook(after)
    torch.autograd.backward = _around(torch.autograd.backward, *gate("backward"))
    data = gate("data", timed=False)
    when_imported("torch.nn.parallel.distributed", _hook_data_parallel)
    when_imported("torch.utils.data.dataloader", lambda module: _hook_data_loader(module, data))
    when_imported("torch.distributed.device_mesh", _hook_meshes)
    when_imported("torch.distributed.pipelining.stage", _hook_pipelines)
    when_imported("torch.distributed.checkpoint.state_dict", _hook_state_dicts)
    for name in _FSDP_MODULES:
        when_imported(name, _hook_fully_sharded)


def _follow(optimizer) -> None:
    """Counts this optimizer's steps from now on, until it is freed."""
    global _lead

    def freed(_reference, forget=_native.forget_lead):
        forget()

    try:
        _lead = weakref.ref(optimizer, freed)
    except TypeError as error:
        # Without a weak reference, a new optimizer could not be distinguished from a freed one.
        complain("counting steps", error)
        raise


def watch_model(model) -> None:
    """Reports the calls of ``model`` as ``forward``, or as ``evaluation`` while it is not training."""
    if model in _hooked or hasattr(type(model).__call__, "_mainstay"):
        return
    # Only the outermost of nested modules is watched. FSDP wraps from the inside out.
    for inner in [inner for inner in model.modules() if inner in _hooked]:
        for handle in _hooked.pop(inner):
            handle.remove()
    _hooked[model] = (
        model.register_forward_pre_hook(_before_forward),
        model.register_forward_hook(_after_forward, always_call=True),
    )


# Functions at module level, so that a model with hooks can be copied and pickled.
def _before_forward(module, _arguments) -> None:
    if not _compiling() and _forward is not None:
        (_forward if module.training else _evaluation)[0]()


def _after_forward(module, _arguments, _result) -> None:
    if not _compiling() and _forward is not None:
        (_forward if module.training else _evaluation)[1]()


def _hook_data_parallel(module) -> None:
    """Watches the calls of all instances through their class. This costs one frame, whereas the hooks of a module are a
    slow path."""
    kind = module.DistributedDataParallel
    if hasattr(kind.__call__, "_mainstay"):
        return

    def __call__(self, *inputs, **named):
        if _compiling():
            return _Module.__call__(self, *inputs, **named)
        enter, leave = _forward if self.training else _evaluation
        enter()
        try:
            return _Module.__call__(self, *inputs, **named)
        finally:
            leave()

    __call__._mainstay = True
    kind.__call__ = __call__


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

    # `fully_shard.state(module)` is part of its API.
    watched.__dict__.update(vars(shard))
    watched._mainstay = True
    for name in _FSDP_MODULES:
        holder = sys.modules.get(name)
        if holder is not None and getattr(holder, "fully_shard", None) is shard:
            holder.fully_shard = watched


def _hook_construction(kind) -> None:
    """Watches every instance of a wrapper class from its construction on."""
    _after_construction(kind, watch_model)


def _after_construction(kind, action) -> None:
    """Calls ``action`` with each new instance of a class. Its errors cause a warning only."""
    construct = kind.__init__
    if hasattr(construct, "_mainstay"):
        return

    @functools.wraps(construct)
    def constructed(self, *arguments, **named):
        construct(self, *arguments, **named)
        _attempt(action, self)

    constructed._mainstay = True
    kind.__init__ = constructed


def _hook_data_loader(module, gate) -> None:
    iterator = module._BaseDataLoaderIter
    iterator.__next__ = _around(iterator.__next__, *gate)


def _hook_meshes(module) -> None:
    """Stores the first meshes. The pipeline dimension of a mesh gives this rank's stage."""

    def remember(mesh):
        if len(_role.meshes) < 8:
            _role.meshes.append(mesh)

    _after_construction(module.DeviceMesh, remember)


def _hook_pipelines(module) -> None:
    """Stores this rank's position in its pipeline. A reference to the stage would keep its model alive."""

    def remember(stage):
        if stage.group_size > 1:
            _role.pipeline_rank = stage.group_rank

    _after_construction(module._PipelineStageBase, remember)


def _hook_state_dicts(module) -> None:
    """To read or load the state of an optimizer without any, PyTorch calls its ``step`` with a learning rate of 0. An
    optimizer that keeps none, such as SGD, is stepped in this way at every save."""
    initialise = getattr(module, "_init_optim_state", None)
    if initialise is not None:
        module._init_optim_state = _around(initialise, _native.begin_no_steps, _native.end_no_steps)


def _around(function, enter, leave):
    """``function`` with ``enter()`` and ``leave()`` around its calls."""
    if hasattr(function, "_mainstay"):
        return function

    @functools.wraps(function)
    def inside(*arguments, **named):
        enter()
        try:
            return function(*arguments, **named)
        finally:
            leave()

    inside._mainstay = True
    return inside


def _attempt(action, *arguments) -> None:
    try:
        action(*arguments)
    except Exception as error:
        complain(action.__name__, error)


def complain(what: str, error: Exception) -> None:
    """Warns, once per process."""
    global _complained
    if _complained:
        return
    _complained = True
    import warnings

    try:
        warnings.warn(f"mainstay.torch: {what} failed: {error!r}; training is not affected", RuntimeWarning, 2)
    except Exception:
        pass
