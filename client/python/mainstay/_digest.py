"""Digests of parameters: replicas with the same bits have the same digest, on any device.

``src/digest.rs`` defines the digest. Native code reads tensors in host memory at memory speed. A CUDA kernel computes
those on a CUDA device, and the operations below those on other devices, in pieces, without waiting for the device.
"""

from __future__ import annotations

import sys

from . import _digest_kernel, _native

_WORDS = 1 << 22  # words of a piece: 32 MiB, plus three times that for intermediate results
_POSITIONS = 1 << 40
_LATER = 8  # steps after which the digest of a device's tensors is reported; by then it is complete


def _signed(value: int) -> int:
    return (value & (2**64 - 1)) - (2**64 if value & 2**63 else 0)


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = _signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53)


class Digest:
    """A digest that may still be computed on a device. ``int(digest)`` waits for it; :meth:`ready` returns whether it
    is complete."""

    def __init__(self, host: int, parts=()):
        self._host = host
        self._parts = parts  # (tensor of one int64 in host memory, event or None)

    def ready(self) -> bool:
        return all(event is None or event.query() for _, event in self._parts)

    def __int__(self) -> int:
        total = self._host
        for part, event in self._parts:
            if event is not None:
                event.synchronize()
            total += int(part)
        return total & (2**64 - 1)

    __index__ = __int__


def digest(tensors) -> Digest:
    """The digest of tensors, arrays, or all parameters and buffers of a module, in their order.

    Accepts torch tensors on any device, NumPy arrays, and objects with ``__array__`` (JAX). Else raises TypeError.
    """
    torch = sys.modules.get("torch")
    host, devices = 0, {}
    for number, tensor in enumerate(_flat(tensors, torch)):
        if torch is not None and isinstance(tensor, torch.Tensor):
            tensor = _plain(tensor, torch)
            if tensor.device.type == "cpu":
                host += _native.digest_memory(tensor.data_ptr(), tensor.numel(), number)
            else:
                part = _on_device(tensor, number, torch)
                known = devices.get(tensor.device)
                devices[tensor.device] = part if known is None else known.add_(part)
        else:
            host += _of_array(tensor, number)
    return Digest(host & (2**64 - 1), [_fetch(part, torch) for part in devices.values()])


def report_digest(tensors, *, every: int = 100):
    """Reports the digest of a module or of tensors with every ``every``-th optimizer step, to compare replicas.

    The digest of tensors in host memory is reported with the next step. That of tensors on a device is reported eight
    optimizer steps later, so that nothing waits. Returns an object whose ``remove()`` ends the reports.
    """
    from torch.optim import optimizer as optimizers

    reporter = _Reporter(tensors, max(1, int(every)))
    return optimizers.register_optimizer_step_post_hook(reporter.after_step)


class _Reporter:
    def __init__(self, tensors, every: int):
        import weakref

        self._tensors = tensors if _is_module(tensors) else list(tensors)
        self._every = every
        self._steps = 0
        self._lead = None
        self._waiting = None
        self._reference = weakref.ref

    def after_step(self, optimizer, _arguments, _named) -> None:
        if not _native.active():
            return
        try:
            lead = self._lead and self._lead()
            if lead is None:
                self._lead = self._reference(optimizer)
            elif lead is not optimizer:
                return
            self._step()
        except Exception as error:
            self._every = sys.maxsize
            self._waiting = None
            _warn(error)

    def _step(self) -> None:
        self._steps += 1
        if self._waiting is not None and self._steps >= self._waiting[0]:
            _native.next_digest(int(self._waiting[1]))
            self._waiting = None
        if self._steps % self._every == 0 and self._waiting is None:
            computed = digest(self._tensors)
            if computed._parts:
                self._waiting = (self._steps + _LATER, computed)
            else:
                _native.next_digest(int(computed))


def _flat(tensors, torch):
    if _is_module(tensors):
        yield from tensors.parameters()
        yield from tensors.buffers()
    elif isinstance(tensors, dict):
        for tensor in tensors.values():
            yield from _flat(tensor, torch)
    elif isinstance(tensors, (list, tuple)) or hasattr(tensors, "__next__"):
        for tensor in tensors:
            yield from _flat(tensor, torch)
    else:
        yield tensors


def _is_module(tensors) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensors, torch.nn.Module)


def _plain(tensor, torch):
    """The bytes of a tensor, or of the local part of a sharded one."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.dtype != torch.bool else tensor.to(torch.uint8)


def _of_array(array, number: int) -> int:
    import numpy

    array = numpy.asarray(array)
    if array.dtype.hasobject or (array.dtype.byteorder == ">" and array.dtype.itemsize > 1):
        raise TypeError(f"no digest of an array of {array.dtype}")
    array = numpy.ascontiguousarray(array)
    return _native.digest_memory(array.__array_interface__["data"][0], array.nbytes, number)


def _on_device(tensor, number: int, torch):
    """The digest as an int64 on the tensor's device, without waiting."""
    length = tensor.numel()
    tail = -length % 8
    if tail or tensor.storage_offset() % 8:
        tensor = torch.nn.functional.pad(tensor, (0, tail)) if tail else tensor.clone()
    words = tensor.view(torch.int64)
    first = number * _POSITIONS
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not _digest_kernel.add(words, first, (_GOLDEN, _FIRST, _SECOND), total):
        _add_by_operations(words, first, total, torch)
    return total.add_(_signed(_mix(length, first + _POSITIONS - 1)))


def _add_by_operations(words, first: int, total, torch) -> None:
    """Adds the digest of words to `total` with operations that every device supports."""
    positions = torch.arange(min(len(words), _WORDS), dtype=torch.int64, device=words.device)
    positions *= _signed(_GOLDEN)
    for at in range(0, len(words), _WORDS):
        piece = words[at : at + _WORDS]
        mixed = positions[: len(piece)] + _signed((first + at) * _GOLDEN)
        mixed ^= piece
        mixed *= _FIRST
        mixed ^= _shifted(mixed, 32)
        mixed *= _SECOND
        mixed ^= _shifted(mixed, 29)
        total += mixed.sum()


def _shifted(words, by: int):
    """A right shift as of unsigned numbers: that of int64 extends the sign."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(word: int, position: int) -> int:
    everything = 2**64 - 1
    mixed = (word ^ position * _GOLDEN) & everything
    mixed = mixed * _FIRST & everything
    mixed ^= mixed >> 32
    mixed = mixed * _SECOND & everything
    return mixed ^ mixed >> 29


def _fetch(part, torch):
    if part.device.type != "cuda":
        return part.cpu(), None
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(part.device))
    return host, event


def _warn(error: Exception) -> None:
    import warnings

    try:
        warnings.warn(f"mainstay.report_digest has ended: {error!r}; training is not affected", RuntimeWarning, 2)
    except Exception:
        pass
