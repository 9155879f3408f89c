"""Two kernels that fail, launched through the driver API in PyTorch's context: no compiler is needed."""

import ctypes

PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 word)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
AGAIN:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.ne.u32 %p1, %r1, 1;
    @%p1 bra AGAIN;
    ret;
}

.visible .entry poke(.param .u64 word)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def launch(name, torch):
    """Launches `spin`, which waits for a word that is never written, or `poke`, which writes to an unmapped address."""
    driver = ctypes.CDLL("libcuda.so.1")
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()

    def call(what, *arguments):
        status = getattr(driver, what)(*arguments)
        if status != 0:
            raise SystemExit(f"{what} of {name} failed with CUDA status {status}")

    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    pointer = ctypes.c_uint64(word.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
    sizes = [ctypes.c_uint(1)] * 6
    call("cuLaunchKernel", function, *sizes, ctypes.c_uint(0), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), arguments, None)
    return word
