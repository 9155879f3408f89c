"""The digest of words on a CUDA device, by one kernel that reads each word once: PyTorch's operations write
intermediate results to memory and take 25 times as long.

The kernel is PTX that the driver compiles when a context first needs it: no compiler is required. If it cannot be
loaded, ``_digest`` computes with PyTorch's operations.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Optional, Tuple

#: Each thread reads every N-th word, four at a time, where N is the number of threads. A block adds up in shared memory
#: and then adds once to the sum.
_PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry mainstay_digest(
    .param .u64 words, .param .u64 count, .param .u64 position, .param .u64 golden,
    .param .u64 first, .param .u64 second, .param .u64 sum)
{
    .reg .pred %p<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<40>;
    .shared .align 8 .b64 of_block;

    ld.param.u64 %rd1, [words];
    ld.param.u64 %rd2, [count];
    ld.param.u64 %rd3, [position];
    ld.param.u64 %rd4, [golden];
    ld.param.u64 %rd5, [first];
    ld.param.u64 %rd6, [second];
    ld.param.u64 %rd7, [sum];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd7, %rd7;

    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %nctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    mov.u64 %rd8, 0;
    @!%p1 st.shared.u64 [of_block], %rd8;
    bar.sync 0;

    // %rd9: the word's number; %rd10: words in one round; %rd11: its address; %rd12: its position times golden.
    mad.wide.u32 %rd9, %r3, %r2, 0;
    cvt.u64.u32 %rd13, %r1;
    add.u64 %rd9, %rd9, %rd13;
    mul.wide.u32 %rd10, %r2, %r4;
    shl.b64 %rd14, %rd9, 3;
    add.u64 %rd11, %rd1, %rd14;
    add.u64 %rd15, %rd3, %rd9;
    mul.lo.u64 %rd12, %rd15, %rd4;
    mul.lo.u64 %rd16, %rd10, %rd4;
    shl.b64 %rd17, %rd10, 3;
    // %rd18: the number behind which no four rounds are left.
    mad.lo.u64 %rd18, %rd10, 3, 0;
    mov.u64 %rd19, 0;

FOUR:
    add.u64 %rd20, %rd9, %rd18;
    setp.ge.u64 %p2, %rd20, %rd2;
    @%p2 bra ONE;
    ld.global.nc.u64 %rd21, [%rd11];
    add.u64 %rd11, %rd11, %rd17;
    ld.global.nc.u64 %rd22, [%rd11];
    add.u64 %rd11, %rd11, %rd17;
    ld.global.nc.u64 %rd23, [%rd11];
    add.u64 %rd11, %rd11, %rd17;
    ld.global.nc.u64 %rd24, [%rd11];
    add.u64 %rd11, %rd11, %rd17;

    xor.b64 %rd21, %rd21, %rd12;
    add.u64 %rd12, %rd12, %rd16;
    xor.b64 %rd22, %rd22, %rd12;
    add.u64 %rd12, %rd12, %rd16;
    xor.b64 %rd23, %rd23, %rd12;
    add.u64 %rd12, %rd12, %rd16;
    xor.b64 %rd24, %rd24, %rd12;
    add.u64 %rd12, %rd12, %rd16;

    mul.lo.u64 %rd21, %rd21, %rd5;
    mul.lo.u64 %rd22, %rd22, %rd5;
    mul.lo.u64 %rd23, %rd23, %rd5;
    mul.lo.u64 %rd24, %rd24, %rd5;
    shr.u64 %rd25, %rd21, 32;
    shr.u64 %rd26, %rd22, 32;
    shr.u64 %rd27, %rd23, 32;
    shr.u64 %rd28, %rd24, 32;
    xor.b64 %rd21, %rd21, %rd25;
    xor.b64 %rd22, %rd22, %rd26;
    xor.b64 %rd23, %rd23, %rd27;
    xor.b64 %rd24, %rd24, %rd28;
    mul.lo.u64 %rd21, %rd21, %rd6;
    mul.lo.u64 %rd22, %rd22, %rd6;
    mul.lo.u64 %rd23, %rd23, %rd6;
    mul.lo.u64 %rd24, %rd24, %rd6;
    shr.u64 %rd25, %rd21, 29;
    shr.u64 %rd26, %rd22, 29;
    shr.u64 %rd27, %rd23, 29;
    shr.u64 %rd28, %rd24, 29;
    xor.b64 %rd21, %rd21, %rd25;
    xor.b64 %rd22, %rd22, %rd26;
    xor.b64 %rd23, %rd23, %rd27;
    xor.b64 %rd24, %rd24, %rd28;
    add.u64 %rd19, %rd19, %rd21;
    add.u64 %rd19, %rd19, %rd22;
    add.u64 %rd19, %rd19, %rd23;
    add.u64 %rd19, %rd19, %rd24;
    add.u64 %rd9, %rd20, %rd10;
    bra FOUR;

ONE:
    setp.ge.u64 %p3, %rd9, %rd2;
    @%p3 bra ADD;
    ld.global.nc.u64 %rd21, [%rd11];
    xor.b64 %rd21, %rd21, %rd12;
    mul.lo.u64 %rd21, %rd21, %rd5;
    shr.u64 %rd25, %rd21, 32;
    xor.b64 %rd21, %rd21, %rd25;
    mul.lo.u64 %rd21, %rd21, %rd6;
    shr.u64 %rd25, %rd21, 29;
    xor.b64 %rd21, %rd21, %rd25;
    add.u64 %rd19, %rd19, %rd21;
    add.u64 %rd11, %rd11, %rd17;
    add.u64 %rd12, %rd12, %rd16;
    add.u64 %rd9, %rd9, %rd10;
    bra ONE;

ADD:
    red.shared.add.u64 [of_block], %rd19;
    bar.sync 0;
    @%p1 bra END;
    ld.shared.u64 %rd29, [of_block];
    red.global.add.u64 [%rd7], %rd29;
END:
    ret;
}
"""

_THREADS = 256
#: Several blocks for each multiprocessor of the largest cards.
_BLOCKS = 2048

_functions: Dict[int, Optional[Tuple[Any, Any]]] = {}


def add(words, position: int, constants: Tuple[int, int, int], total) -> bool:
    """Adds the digest of int64 words on a device to ``total``, an int64 on that device, without waiting.

    ``position`` is that of the first word. Returns False, and adds nothing, if the kernel is unavailable."""
    import torch

    if words.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    with torch.cuda.device(words.device):
        loaded = _loaded(words.device.index)
        if loaded is None:
            return False
        driver, function = loaded
        blocks = max(1, min(_BLOCKS, -(-len(words) // _THREADS)))
        numbers = (words.data_ptr(), len(words), position, *constants, total.data_ptr())
        held = [ctypes.c_uint64(number & (2**64 - 1)) for number in numbers]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(number) for number in held))
        size = [ctypes.c_uint(number) for number in (blocks, 1, 1, _THREADS, 1, 1, 0)]
        stream = ctypes.c_void_p(torch.cuda.current_stream(words.device).cuda_stream)
        return driver.cuLaunchKernel(function, *size, stream, addresses, None) == 0


def _loaded(device: int) -> Optional[Tuple[Any, Any]]:
    """The driver and the kernel for the context of a device, which must be the current one."""
    if device not in _functions:
        try:
            _functions[device] = _load()
        except Exception:
            _functions[device] = None
    return _functions[device]


def _load() -> Optional[Tuple[Any, Any]]:
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(_PTX)) != 0:
        return None
    if driver.cuModuleGetFunction(ctypes.byref(function), module, b"mainstay_digest") != 0:
        return None
    return driver, function
