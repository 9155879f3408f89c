//! A library with the functions of CUDA's driver that the agent's probe calls (their C ABI). It works on the host's
//! memory and follows the script next to it, the file `cuda.json`:
//!
//! ```json
//! {"gpus": ["0000:3b:00.0"], "free": 67108864, "codes": {"cuInit": 100}, "hang": ["cuCtxSynchronize"],
//!  "copy_ms": 40, "wrong": "product"}
//! ```
//!
//! `codes` are returned by functions instead of doing their work; `copy_ms` is how long each copy within a GPU
//! takes; `wrong` is the operation with a wrong result: `memory` or `product`. Kernels are known by name, and only
//! those in the loaded module.

mod kernels;
mod script;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use script::{INVALID_DEVICE, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY, Script, called};

/// The script's name, next to the library.
pub const SCRIPT: &str = "cuda.json";

/// The library's name in the directory where cargo puts it: that of the test that uses it.
pub const LIBRARY: &str = "libfake_cuda.so";

/// Does the work, unless the script overrides it.
fn entered(function: &str, does: impl FnOnce(&Script) -> c_int) -> c_int {
    match called(function) {
        Ok(script) => does(&script),
        Err(code) => code,
    }
}

/// CUDA's `cuInit`.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    entered("cuInit", |_| 0)
}

/// CUDA's `cuDeviceGetByPCIBusId`.
///
/// # Safety
/// `address` is a text with a zero at its end, `device` a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetByPCIBusId(device: *mut c_int, address: *const c_char) -> c_int {
    entered("cuDeviceGetByPCIBusId", |script| {
        // SAFETY: the caller's promise.
        let wanted = unsafe { CStr::from_ptr(address) }.to_string_lossy().to_ascii_lowercase();
        let found = script.gpus.iter().position(|gpu| gpu.to_ascii_lowercase() == wanted);
        let Some(place) = found.and_then(|place| c_int::try_from(place).ok()) else { return INVALID_DEVICE };
        // SAFETY: the caller's promise.
        unsafe { device.write(place) };
        0
    })
}

/// CUDA's `cuDevicePrimaryCtxRetain`.
///
/// # Safety
/// `context` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    entered("cuDevicePrimaryCtxRetain", |_| {
        // SAFETY: the caller's promise. What it points at is never looked at.
        unsafe { context.write(std::ptr::without_provenance_mut(device.unsigned_abs() as usize + 1)) };
        0
    })
}

/// CUDA's `cuCtxSetCurrent`.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    entered("cuCtxSetCurrent", |_| if context.is_null() { INVALID_VALUE } else { 0 })
}

/// CUDA's `cuMemGetInfo_v2`.
///
/// # Safety
/// Both are places for numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    entered("cuMemGetInfo_v2", |script| {
        // SAFETY: the caller's promise.
        unsafe { (free.write(script.free), total.write(script.free.saturating_mul(2))) };
        0
    })
}

/// CUDA's `cuMemAlloc_v2`.
///
/// # Safety
/// `pointer` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> c_int {
    entered("cuMemAlloc_v2", |script| {
        if bytes == 0 || bytes > script.free {
            return OUT_OF_MEMORY;
        }
        // Whole words, which are freed with the process.
        let words: &'static mut [u32] = Box::leak(vec![0_u32; bytes.div_ceil(4)].into_boxed_slice());
        // SAFETY: the caller's promise.
        unsafe { pointer.write(words.as_mut_ptr().expose_provenance() as u64) };
        0
    })
}

fn place<T>(pointer: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(usize::try_from(pointer).unwrap_or(0))
}

/// CUDA's `cuMemsetD32_v2`.
///
/// # Safety
/// `pointer` is of `cuMemAlloc_v2`, with room for `count` words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32_v2(pointer: u64, value: c_uint, count: usize) -> c_int {
    entered("cuMemsetD32_v2", |_| {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(place::<u32>(pointer), count) }.fill(value);
        0
    })
}

/// CUDA's `cuMemcpyHtoD_v2`.
///
/// # Safety
/// Both have room for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
    entered("cuMemcpyHtoD_v2", |_| {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from.cast::<u8>(), place::<u8>(to), bytes) };
        0
    })
}

/// CUDA's `cuMemcpyDtoH_v2`.
///
/// # Safety
/// Both have room for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
    entered("cuMemcpyDtoH_v2", |_| {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(place::<u8>(from).cast_const(), to.cast::<u8>(), bytes) };
        0
    })
}

/// CUDA's `cuMemcpyDtoD_v2`.
///
/// # Safety
/// Both have room for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    entered("cuMemcpyDtoD_v2", |script| {
        std::thread::sleep(std::time::Duration::from_millis(script.copy_ms));
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(place::<u8>(from).cast_const(), place::<u8>(to), bytes) };
        if script.wrong == "memory" && bytes >= 4096 {
            // SAFETY: within what was just written.
            unsafe { *place::<u8>(to + 4000) ^= 4 };
        }
        0
    })
}

/// CUDA's `cuModuleLoadData`.
///
/// # Safety
/// `image` is a text with a zero at its end that stays, `module` a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    entered("cuModuleLoadData", |_| {
        // SAFETY: the caller's promise.
        unsafe { module.write(image.cast_mut()) };
        0
    })
}

/// CUDA's `cuModuleGetFunction`.
///
/// # Safety
/// `module` is of `cuModuleLoadData`, `name` a text with a zero at its end, `function` a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    entered("cuModuleGetFunction", |_| {
        // SAFETY: the caller's promise.
        let (image, name) = unsafe { (CStr::from_ptr(module.cast::<c_char>()), CStr::from_ptr(name)) };
        let (image, name) = (image.to_string_lossy(), name.to_string_lossy());
        let has = image.contains(&format!(".entry {name}("));
        match kernels::NAMES.iter().position(|known| has && *known == name) {
            Some(place) => {
                // SAFETY: the caller's promise. What it points at is never looked at.
                unsafe { function.write(std::ptr::without_provenance_mut(place + 1)) };
                0
            }
            None => NOT_FOUND,
        }
    })
}

/// CUDA's `cuLaunchKernel`.
///
/// # Safety
/// `function` is of `cuModuleGetFunction`, `parameters` has a pointer to each of its arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    _grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    entered("cuLaunchKernel", |script| {
        let threads = (u64::from(grid_x) * u64::from(block_x), u64::from(grid_y) * u64::from(block_y));
        // SAFETY: the caller's promise.
        unsafe { kernels::run(function.addr(), parameters, threads, script) }
    })
}

/// CUDA's `cuCtxSynchronize`.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    entered("cuCtxSynchronize", |_| 0)
}
