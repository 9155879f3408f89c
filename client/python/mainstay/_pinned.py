"""Pins launcher memory for the CUDA driver, which then copies directly at the speed of the bus."""

from __future__ import annotations

import ctypes
import sys
from typing import Optional

_pinned: set = set()
_warned = False


def pin(memory) -> None:
    """Pins a mapping, once. If the driver refuses, copies go through its own buffers, which is slower but correct."""
    if memory.address in _pinned:
        return
    _pinned.add(memory.address)
    refusal = _register(memory)
    if refusal is not None:
        _forget_error()
        _tell(refusal)


def unpin(memory) -> None:
    """Unpins a mapping. Call it before the memory is freed, so that the driver does not write there afterwards."""
    if memory.address not in _pinned:
        return
    _pinned.discard(memory.address)
    try:
        runtime = sys.modules["torch"].cuda.cudart()
        if runtime.cudaHostUnregister(memory.address) != runtime.cudaError.success:
            _forget_error()
    except Exception:
        pass


def bytes_of(memory, at: int, count: int):
    """A tensor of bytes that is a part of a mapping. The mapping must outlive it."""
    import torch

    whole = (ctypes.c_ubyte * memory.length).from_address(memory.address)
    return torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=at)


def synchronize(devices) -> None:
    """Waits for the copies that were started on these devices. Without any, a program may have no torch at all."""
    for device in devices:
        if device.type == "cuda":
            sys.modules["torch"].cuda.current_stream(device).synchronize()


def _register(memory) -> Optional[str]:
    """Pins the memory. Returns the reason if the driver refuses, else None."""
    try:
        runtime = sys.modules["torch"].cuda.cudart()
        code = runtime.cudaHostRegister(memory.address, memory.length, 0)
        return None if code == runtime.cudaError.success else str(runtime.cudaGetErrorString(code))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _forget_error() -> None:
    """Clears the error of a failed call, which the runtime keeps and PyTorch would raise after its next kernel."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart.so" in line}
        for path in paths:
            ctypes.CDLL(path).cudaGetLastError()
    except Exception:
        pass


def _tell(refusal: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(
            "mainstay.checkpoint: the CUDA driver does not pin the launcher's memory, so that saves of tensors on the GPU take longer: "
            f"{refusal}",
            file=sys.stderr,
        )
