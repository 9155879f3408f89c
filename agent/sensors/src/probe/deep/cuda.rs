//! Probes a GPU with CUDA's driver API, which comes with the driver. It writes a pattern to the GPU's memory, copies and
//! compares it there, and computes a product of matrices with a known result. No toolkit is needed: the kernels are PTX,
//! which the driver compiles. This process exists for the probe and ends with it.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::time::Instant;

use libloading::{Library, Symbol};
use mainstay_health::host::preflight::deep::{Measured, Probed, What};

const KERNELS: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernels.ptx"), "\0").as_bytes())
{
    Ok(text) => text,
    // At compile time.
    Err(_) => panic!("the kernels are text without a zero in it"),
};

/// Memory that is written and copied: at most a quarter of the free memory.
const BYTES: usize = 256 << 20;
const COPIES: u32 = 10;
/// Rows and columns of the matrices.
const SIZE: u32 = 256;
const THREADS: u32 = 256;
const SEED: u32 = 0x5eed;

/// CUDA's codes that give more detail than a failure (cuda.h).
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
const ECC_UNCORRECTABLE: c_int = 214;
const NO_KERNEL: [c_int; 4] = [200, 209, 218, 222];

enum CudaError {
    /// The library lacks a function.
    Lacks(&'static str),
    /// A call failed.
    Code(&'static str, c_int),
    /// A result is wrong.
    Wrong(String),
}

type Device = c_int;
type Pointer = u64;
type Handle = *mut c_void;

/// Probes the GPU at a PCI address.
pub(super) fn probe(address: &str, library: Option<&OsStr>) -> Probed {
    let name = library.unwrap_or(OsStr::new("libcuda.so.1"));
    // SAFETY: loading runs the library's initialisers. NVIDIA's library is made for any program, and this process has no state to lose.
    let library = match unsafe { Library::new(name) } {
        Ok(library) => library,
        Err(error) => return Probed::Absent(format!("no CUDA driver here: {error}")),
    };
    match work(&Cuda { library: &library }, address) {
        Ok(measured) => Probed::Done(measured),
        Err(CudaError::Wrong(what)) => Probed::Wrong(what),
        Err(CudaError::Lacks(function)) => Probed::Untried(format!("the driver's library lacks {function}")),
        Err(CudaError::Code("cuInit", NO_DEVICE)) => Probed::Absent("CUDA sees no GPU".to_owned()),
        Err(CudaError::Code(_, INVALID_DEVICE)) => {
            Probed::Absent(format!("CUDA does not see the GPU {address}"))
        }
        Err(CudaError::Code(function, code)) => {
            let output = format!("{function} returned {code}");
            match code {
                OUT_OF_MEMORY => Probed::Untried(format!("no memory of the GPU is free: {output}")),
                ECC_UNCORRECTABLE => Probed::Wrong(format!("memory that cannot be corrected: {output}")),
                code if NO_KERNEL.contains(&code) => {
                    Probed::Untried(format!("the driver does not take our kernels: {output}"))
                }
                _ => Probed::Refused(format!("the GPU refuses: {output}")),
            }
        }
    }
}

/// The driver's functions, looked up when they are called.
struct Cuda<'a> {
    library: &'a Library,
}

/// Declares a function of the driver as a method that checks its code.
macro_rules! functions {
    ($( fn $method:ident = $symbol:literal ( $( $argument:ident : $type:ty ),* ); )*) => {
        #[expect(clippy::too_many_arguments, reason = "a launch has as many as that in CUDA")]
        impl Cuda<'_> {
            $( fn $method(&self, $( $argument: $type ),*) -> Result<(), CudaError> {
                type Function = unsafe extern "C" fn($( $type ),*) -> c_int;
                // SAFETY: the type is that of cuda.h for this name; a suffix (_v2) fixes its meaning permanently.
                let function: Symbol<'_, Function> = unsafe { self.library.get($symbol.as_bytes()) }
                    .map_err(|_| CudaError::Lacks($symbol))?;
                // SAFETY: pointers among the arguments are to values of ours that outlive the call; handles are from
                // earlier calls of the driver.
                match unsafe { function($( $argument ),*) } {
                    0 => Ok(()),
                    code => Err(CudaError::Code($symbol, code)),
                }
            } )*
        }
    };
}

functions! {
    fn init = "cuInit"(flags: c_uint);
    fn device_at = "cuDeviceGetByPCIBusId"(device: *mut Device, address: *const c_char);
    fn retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: Device);
    fn set_current = "cuCtxSetCurrent"(context: Handle);
    fn memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    fn allocate = "cuMemAlloc_v2"(pointer: *mut Pointer, bytes: usize);
    fn set = "cuMemsetD32_v2"(pointer: Pointer, value: c_uint, count: usize);
    fn upload = "cuMemcpyHtoD_v2"(to: Pointer, from: *const c_void, bytes: usize);
    fn download = "cuMemcpyDtoH_v2"(to: *mut c_void, from: Pointer, bytes: usize);
    fn copy = "cuMemcpyDtoD_v2"(to: Pointer, from: Pointer, bytes: usize);
    fn load = "cuModuleLoadData"(module: *mut Handle, image: *const c_void);
    fn find = "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
    fn launch_raw = "cuLaunchKernel"(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
    fn synchronize = "cuCtxSynchronize"();
}

fn work(cuda: &Cuda<'_>, address: &str) -> Result<Vec<Measured>, CudaError> {
    cuda.init(0)?;
    let mut device = 0;
    let address =
        CString::new(address).map_err(|_| CudaError::Code("cuDeviceGetByPCIBusId", INVALID_DEVICE))?;
    cuda.device_at(&raw mut device, address.as_ptr())?;
    let mut context = std::ptr::null_mut();
    cuda.retain(&raw mut context, device)?;
    cuda.set_current(context)?;
    let mut module = std::ptr::null_mut();
    cuda.load(&raw mut module, KERNELS.as_ptr().cast())?;
    // Allocations are freed when this process ends.
    let copied = memory(cuda, module)?;
    let product = product(cuda, module)?;
    Ok(vec![Measured { what: What::Copy, value: copied }, Measured { what: What::Product, value: product }])
}

/// Bytes copied per second within the GPU's memory.
fn memory(cuda: &Cuda<'_>, module: Handle) -> Result<f64, CudaError> {
    let (mut free, mut total) = (0, 0);
    cuda.memory_info(&raw mut free, &raw mut total)?;
    let bytes = BYTES.min(free / 4) / 1024 * 1024;
    if bytes == 0 {
        return Err(CudaError::Code("cuMemGetInfo_v2", OUT_OF_MEMORY));
    }
    let words = u32::try_from(bytes / 4).unwrap_or(u32::MAX);
    let (one, other, errors) = (allocate(cuda, bytes)?, allocate(cuda, bytes)?, allocate(cuda, 4)?);
    let grid = (words.div_ceil(THREADS), 1);
    launch(
        cuda,
        module,
        c"mainstay_fill",
        grid,
        (THREADS, 1),
        &mut [Value::Long(one), words.into(), SEED.into()],
    )?;
    cuda.synchronize()?;
    let began = Instant::now();
    for _ in 0..COPIES {
        cuda.copy(other, one, bytes)?;
    }
    cuda.synchronize()?;
    let speed = f64::from(COPIES) * bytes as f64 / began.elapsed().as_secs_f64();
    cuda.set(errors, 0, 1)?;
    let compared = &mut [Value::Long(other), words.into(), SEED.into(), Value::Long(errors)];
    launch(cuda, module, c"mainstay_compare", grid, (THREADS, 1), compared)?;
    cuda.synchronize()?;
    let mut wrong = [0_u32];
    cuda.download(wrong.as_mut_ptr().cast(), errors, 4)?;
    match wrong {
        [0] => Ok(speed),
        [wrong] => Err(CudaError::Wrong(format!(
            "{wrong} of {words} words of the GPU's memory differ from what was written"
        ))),
    }
}

/// Seconds for one product.
fn product(cuda: &Cuda<'_>, module: Handle) -> Result<f64, CudaError> {
    let size = SIZE as usize;
    let values = |row: usize, column: usize, modulus: usize| -> Vec<f32> {
        (0..size * size)
            .map(|index| ((index / size * row + index % size * column) % modulus) as f32)
            .collect()
    };
    let (left, right) = (values(31, 17, 7), values(13, 11, 5));
    let bytes = size * size * 4;
    let places = [allocate(cuda, bytes)?, allocate(cuda, bytes)?, allocate(cuda, bytes)?];
    cuda.upload(places[0], left.as_ptr().cast(), bytes)?;
    cuda.upload(places[1], right.as_ptr().cast(), bytes)?;
    let grid = (SIZE.div_ceil(16), SIZE.div_ceil(16));
    let arguments =
        &mut [Value::Long(places[0]), Value::Long(places[1]), Value::Long(places[2]), SIZE.into()];
    let began = Instant::now();
    launch(cuda, module, c"mainstay_product", grid, (16, 16), arguments)?;
    cuda.synchronize()?;
    let seconds = began.elapsed().as_secs_f64();
    let mut found = vec![0_f32; size * size];
    cuda.download(found.as_mut_ptr().cast(), places[2], bytes)?;
    // Small integers are exact in floating point, in any order of addition.
    let expected = |index: usize| -> f32 {
        (0..size).map(|inner| left[index / size * size + inner] * right[inner * size + index % size]).sum()
    };
    match found.iter().enumerate().filter(|(index, value)| **value != expected(*index)).count() {
        0 => Ok(seconds),
        wrong => {
            Err(CudaError::Wrong(format!("the GPU computed {wrong} wrong values of a product of matrices")))
        }
    }
}

fn allocate(cuda: &Cuda<'_>, bytes: usize) -> Result<Pointer, CudaError> {
    let mut pointer = 0;
    cuda.allocate(&raw mut pointer, bytes)?;
    Ok(pointer)
}

/// An argument of a kernel.
enum Value {
    Long(u64),
    Int(u32),
}

impl From<u32> for Value {
    fn from(value: u32) -> Value {
        Value::Int(value)
    }
}

fn launch(
    cuda: &Cuda<'_>,
    module: Handle,
    kernel: &CStr,
    (grid_x, grid_y): (u32, u32),
    (block_x, block_y): (u32, u32),
    arguments: &mut [Value],
) -> Result<(), CudaError> {
    let mut function = std::ptr::null_mut();
    cuda.find(&raw mut function, module, kernel.as_ptr())?;
    let index = |value: &mut Value| match value {
        Value::Long(value) => std::ptr::from_mut(value).cast::<c_void>(),
        Value::Int(value) => std::ptr::from_mut(value).cast::<c_void>(),
    };
    let mut places: Vec<*mut c_void> = arguments.iter_mut().map(index).collect();
    let none = std::ptr::null_mut();
    cuda.launch_raw(
        function,
        grid_x,
        grid_y,
        1,
        block_x,
        block_y,
        1,
        0,
        none,
        places.as_mut_ptr(),
        std::ptr::null_mut(),
    )
}
