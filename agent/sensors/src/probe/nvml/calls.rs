//! The calls themselves, by the types of their arguments. The only unsafe code of the probe.
//!
//! A function that the library lacks returns `FunctionNotFound`: older drivers lack many, and none of them is required.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlFieldValue_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlReturn_t,
};

/// A function that was looked up in the library, or why it is missing.
type Symbol<F, E> = Result<F, E>;
type Get<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T) -> nvmlReturn_t;
type GetAt<A, T> = unsafe extern "C" fn(nvmlDevice_t, A, *mut T) -> nvmlReturn_t;
type GetTwo<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T, *mut T) -> nvmlReturn_t;
type GetText = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type Wait = unsafe extern "C" fn(nvmlEventSet_t, *mut nvmlEventData_t, c_uint) -> nvmlReturn_t;
type GetList<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// The result of an NVML call, with NVML's error.
pub(super) type NvmlResult<T> = Result<T, NvmlError>;

/// A GPU's handle, which is valid while the library is loaded: until this process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(nvmlDevice_t);

// SAFETY: NVML is thread-safe, and a handle is an identifier within it, not memory of ours.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

fn function<F: Copy, E>(symbol: &Symbol<F, E>) -> NvmlResult<F> {
    symbol.as_ref().copied().map_err(|_| NvmlError::FunctionNotFound)
}

/// The initialized library. It stays so until this process ends.
pub(super) enum Nvml {
    /// As the wrapper initializes it.
    Usual(nvml_wrapper::Nvml),
    /// A library with only an older function for that.
    Old(NvmlLib),
}

impl Nvml {
    /// Loads the library at `path` and initializes it, with the first that it has of three functions.
    pub(super) fn begin(path: &OsStr) -> NvmlResult<Nvml> {
        match nvml_wrapper::Nvml::builder().lib_path(path).init() {
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
                Nvml::begin_as_of_old(path)
            }
            started => started.map(Nvml::Usual),
        }
    }

    fn begin_as_of_old(path: &OsStr) -> NvmlResult<Nvml> {
        // SAFETY: the wrapper has already loaded the library, so its initialisers have run before.
        let lib = unsafe { NvmlLib::new(path) }?;
        let code = if let Ok(begin) = function(&lib.nvmlInit) {
            // SAFETY: the function takes no arguments and may be called first.
            unsafe { begin() }
        } else {
            let begin = function(&lib.nvmlInitWithFlags)?;
            // SAFETY: as above; no flags is equivalent to the other two.
            unsafe { begin(0) }
        };
        nvml_try(code)?;
        Ok(Nvml::Old(lib))
    }

    pub(super) fn lib(&self) -> &NvmlLib {
        match self {
            Nvml::Usual(nvml) => nvml.lib(),
            Nvml::Old(lib) => lib,
        }
    }

    /// The version of the driver.
    pub(super) fn driver_version(&self) -> NvmlResult<String> {
        let call = function(&self.lib().nvmlSystemGetDriverVersion)?;
        let mut text = [0 as c_char; 128];
        // SAFETY: the length passed is one less than the buffer's, so the buffer always ends in 0.
        nvml_try(unsafe { call(text.as_mut_ptr(), text.len() as c_uint - 1) })?;
        Ok(text_of(&text))
    }
}

/// Whether a GPU, or this version of the driver, does not offer the requested value. To an older library an unknown value
/// is an invalid argument.
pub(super) fn is_not_offered(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::FunctionNotFound
            | NvmlError::InvalidArg
            | NvmlError::NotFound
            | NvmlError::NoData
            | NvmlError::VgpuEccNotSupported
            // An unknown version of a struct; a function that was removed.
            | NvmlError::UnexpectedVariant(25 | 26)
    )
}

/// The result of one function, or of another one if a library lacks the first. The first may exist by name only.
pub(super) fn or<T>(result: NvmlResult<T>, other: impl FnOnce() -> NvmlResult<T>) -> NvmlResult<T> {
    match result {
        Err(error) if is_not_offered(&error) => {
            // If the second is missing too, the first error has more information.
            other().map_err(|second| if is_not_offered(&second) { error } else { second })
        }
        result => result,
    }
}

/// The version word of a versioned struct.
pub(super) const fn version<T>(number: u32) -> c_uint {
    size_of::<T>() as c_uint | (number << 24)
}

/// The number of GPUs in the driver's list.
pub(super) fn count(nvml: &Nvml) -> NvmlResult<u32> {
    /// More than any host has: a library that reports more cannot be believed, and takes too long.
    const MOST: u32 = 512;
    let lib = nvml.lib();
    let by = |call: NvmlResult<unsafe extern "C" fn(*mut c_uint) -> nvmlReturn_t>| {
        let (call, mut count) = (call?, 0);
        // SAFETY: the pointer is to an integer of ours of the size that the function writes.
        nvml_try(unsafe { call(&mut count) })?;
        Ok(count.min(MOST))
    };
    or(by(function(&lib.nvmlDeviceGetCount_v2)), || by(function(&lib.nvmlDeviceGetCount)))
}

/// The GPU at an index of the driver's list.
pub(super) fn by_index(nvml: &Nvml, index: u32) -> NvmlResult<Handle> {
    let lib = nvml.lib();
    let by = |call: NvmlResult<unsafe extern "C" fn(c_uint, *mut nvmlDevice_t) -> nvmlReturn_t>| {
        let (call, mut handle) = (call?, std::ptr::null_mut());
        // SAFETY: the pointer is to a variable of ours of the size that the function writes.
        nvml_try(unsafe { call(index, &mut handle) })?;
        Ok(Handle(handle))
    };
    or(by(function(&lib.nvmlDeviceGetHandleByIndex_v2)), || by(function(&lib.nvmlDeviceGetHandleByIndex)))
}

impl Handle {
    /// Calls a function that writes one value; `empty` is the initial value, with its version if it has one.
    pub(super) fn get<T, E>(self, symbol: &Symbol<Get<T>, E>, empty: T) -> NvmlResult<T> {
        let call = function(symbol)?;
        let mut value = empty;
        // SAFETY: the handle is from this library; the pointer is to a variable of the type that the function writes.
        nvml_try(unsafe { call(self.0, &mut value) })?;
        Ok(value)
    }

    /// Calls a function that writes one value for one of several items: a sensor, a link.
    pub(super) fn get_at<A, T, E>(self, symbol: &Symbol<GetAt<A, T>, E>, at: A, empty: T) -> NvmlResult<T> {
        let call = function(symbol)?;
        let mut value = empty;
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, at, &mut value) })?;
        Ok(value)
    }

    /// Calls a function that writes two values.
    pub(super) fn get_two<T: Copy + Default, E>(self, symbol: &Symbol<GetTwo<T>, E>) -> NvmlResult<(T, T)> {
        let call = function(symbol)?;
        let (mut first, mut second) = (T::default(), T::default());
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, &mut first, &mut second) })?;
        Ok((first, second))
    }

    /// Calls a function that writes a text.
    pub(super) fn text<E>(self, symbol: &Symbol<GetText, E>) -> NvmlResult<String> {
        let call = function(symbol)?;
        let mut text = [0 as c_char; 128];
        // SAFETY: as in `get`; the length passed is one less than the buffer's, so the buffer always ends in 0.
        nvml_try(unsafe { call(self.0, text.as_mut_ptr(), text.len() as c_uint - 1) })?;
        Ok(text_of(&text))
    }

    /// The errors of one kind of memory. Kinds are NVML's numbers.
    pub(super) fn ecc(
        self,
        nvml: &Nvml,
        corrected: bool,
        lifetime: bool,
        place: Option<c_uint>,
    ) -> NvmlResult<u64> {
        let lib = nvml.lib();
        let (error, counter) = (c_uint::from(!corrected), c_uint::from(lifetime));
        let mut count: c_ulonglong = 0;
        let code = match place {
            Some(place) => {
                let call = function(&lib.nvmlDeviceGetMemoryErrorCounter)?;
                // SAFETY: as in `get`.
                unsafe { call(self.0, error, counter, place, &mut count) }
            }
            None => {
                let call = function(&lib.nvmlDeviceGetTotalEccErrors)?;
                // SAFETY: as in `get`.
                unsafe { call(self.0, error, counter, &mut count) }
            }
        };
        nvml_try(code)?;
        Ok(count)
    }

    /// Rows remapped after corrected and after uncorrected errors, whether some are pending, whether one failed.
    pub(super) fn remapped_rows(self, nvml: &Nvml) -> NvmlResult<[u32; 4]> {
        let call = function(&nvml.lib().nvmlDeviceGetRemappedRows)?;
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: as in `get`, four times.
        nvml_try(unsafe { call(self.0, &mut corrected, &mut uncorrected, &mut pending, &mut failed) })?;
        Ok([corrected, uncorrected, pending, failed])
    }

    /// How many pages were retired for a cause, given as NVML's number.
    pub(super) fn pages_retired(self, nvml: &Nvml, cause: c_uint) -> NvmlResult<u32> {
        // Room for all that a GPU may retire (64), and more: some libraries refuse a smaller list.
        const ROOM: usize = 1024;
        let lib = nvml.lib();
        let (mut addresses, mut times) = ([0; ROOM], [0; ROOM]);
        let mut older = || {
            let (call, mut count) = (function(&lib.nvmlDeviceGetRetiredPages)?, ROOM as c_uint);
            // SAFETY: as in `get`; the list has room for `count` addresses.
            counted(unsafe { call(self.0, cause, &mut count, addresses.as_mut_ptr()) }, count)
        };
        let older_result = older();
        or(older_result, || {
            let (call, mut count) = (function(&lib.nvmlDeviceGetRetiredPages_v2)?, ROOM as c_uint);
            // SAFETY: as above, for two lists.
            let code = unsafe { call(self.0, cause, &mut count, addresses.as_mut_ptr(), times.as_mut_ptr()) };
            counted(code, count)
        })
    }

    /// Total and used memory, in bytes. The first form of the function counts the driver's reserved memory as used: 616 MiB
    /// on an idle H200.
    pub(super) fn memory(self, nvml: &Nvml) -> NvmlResult<(u64, u64)> {
        let lib = nvml.lib();
        let version = version::<nvmlMemory_v2_t>(2);
        let none = nvmlMemory_v2_t { version, total: 0, reserved: 0, free: 0, used: 0 };
        let result =
            self.get(&lib.nvmlDeviceGetMemoryInfo_v2, none).map(|memory| (memory.total, memory.used));
        or(result, || {
            let none = nvmlMemory_t { total: 0, free: 0, used: 0 };
            self.get(&lib.nvmlDeviceGetMemoryInfo, none).map(|memory| (memory.total, memory.used))
        })
    }

    /// The errors of a kind on an NVLink.
    pub(super) fn link_errors(self, nvml: &Nvml, link: u32, kind: c_uint) -> NvmlResult<u64> {
        let call = function(&nvml.lib().nvmlDeviceGetNvLinkErrorCounter)?;
        let mut count = 0;
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, link, kind, &mut count) })?;
        counter(Ok(count))
    }

    /// Processes with their memory, from the newest variant of the function that the library has.
    pub(super) fn processes(self, nvml: &Nvml) -> NvmlResult<Vec<(u32, u64)>> {
        let lib = nvml.lib();
        let newer = |call: NvmlResult<GetList<nvmlProcessInfo_v2_t>>| {
            let empty =
                nvmlProcessInfo_v2_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
            let all = self.list(call?, empty)?;
            Ok(all.into_iter().map(|one| (one.pid, one.usedGpuMemory)).collect())
        };
        let oldest = || {
            let call = function(&lib.nvmlDeviceGetComputeRunningProcesses)?;
            let all = self.list(call, nvmlProcessInfo_v1_t { pid: 0, usedGpuMemory: 0 })?;
            Ok(all.into_iter().map(|one| (one.pid, one.usedGpuMemory)).collect())
        };
        or(newer(function(&lib.nvmlDeviceGetComputeRunningProcesses_v3)), || {
            or(newer(function(&lib.nvmlDeviceGetComputeRunningProcesses_v2)), oldest)
        })
    }

    /// A list of unknown length: requested again with more room until it fits.
    fn list<T: Copy>(self, call: GetList<T>, empty: T) -> NvmlResult<Vec<T>> {
        let mut capacity = 32;
        loop {
            let mut list = vec![empty; capacity];
            let mut count = capacity as c_uint;
            // SAFETY: as in `get`; the list has room for `count` elements.
            match nvml_try(unsafe { call(self.0, &mut count, list.as_mut_ptr()) }) {
                Ok(()) => {
                    list.truncate(count as usize);
                    return Ok(list);
                }
                Err(NvmlError::InsufficientSize(_)) if capacity < 8192 => {
                    capacity = (count as usize + 32).max(capacity * 2)
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the board's configuration memory is intact.
    pub(super) fn validate_inforom(self, nvml: &Nvml) -> NvmlResult<()> {
        let call = function(&nvml.lib().nvmlDeviceValidateInforom)?;
        // SAFETY: the handle is of this library.
        nvml_try(unsafe { call(self.0) })
    }

    /// The status of the path to another GPU over NVLink, as NVML's number.
    pub(super) fn reaches(self, nvml: &Nvml, other: Handle) -> NvmlResult<u32> {
        const OVER_NVLINK: c_uint = 2;
        let call = function(&nvml.lib().nvmlDeviceGetP2PStatus)?;
        let mut status = 0;
        // SAFETY: both handles are of this library; the pointer is to a variable of the type that the function writes.
        nvml_try(unsafe { call(self.0, other.0, OVER_NVLINK, &mut status) })?;
        Ok(status)
    }

    /// Reads several fields in one call; each has a separate code.
    pub(super) fn fields(self, nvml: &Nvml, fields: &mut [nvmlFieldValue_t]) -> NvmlResult<()> {
        let call = function(&nvml.lib().nvmlDeviceGetFieldValues)?;
        let count = c_int::try_from(fields.len()).map_err(|_| NvmlError::InvalidArg)?;
        // SAFETY: the handle is of this library; the array has `count` elements.
        nvml_try(unsafe { call(self.0, count, fields.as_mut_ptr()) })
    }
}

/// Functions that the bindings lack.
#[derive(Debug, Default)]
pub(super) struct Newer {
    unrepairable: Option<Get<[c_uint; 4]>>,
}

impl Newer {
    /// Looks them up in the loaded library.
    pub(super) fn load(library: &OsStr) -> Newer {
        // SAFETY: the library is loaded, so none of its initialisers runs here; it is never unloaded.
        let Ok(library) = (unsafe { libloading::Library::new(library) }) else { return Newer::default() };
        // SAFETY: the type is that of the function: a handle and a pointer to a struct of one integer, for which an array
        // of four has room.
        let unrepairable = unsafe { library.get(b"nvmlDeviceGetUnrepairableMemoryFlag_v1\0") };
        let newer = Newer { unrepairable: unrepairable.ok().map(|symbol| *symbol) };
        // The pointers are valid while the library is loaded.
        std::mem::forget(library);
        newer
    }

    /// Whether memory is damaged beyond repair.
    pub(super) fn unrepairable(&self, gpu: Handle) -> NvmlResult<bool> {
        let symbol = self.unrepairable.ok_or(());
        flag(gpu.get(&symbol, [0; 4]).map(|flags| flags[0]))
    }
}

/// Events of some GPUs.
#[derive(Debug)]
pub(super) struct EventSet(nvmlEventSet_t);

// SAFETY: NVML is thread-safe, and the set is an identifier within it; only one thread waits for it.
unsafe impl Send for EventSet {}

impl EventSet {
    pub(super) fn new(nvml: &Nvml) -> NvmlResult<EventSet> {
        let call = function(&nvml.lib().nvmlEventSetCreate)?;
        let mut set = std::ptr::null_mut();
        // SAFETY: the pointer is to a variable of ours of the size that the function writes.
        nvml_try(unsafe { call(&mut set) })?;
        Ok(EventSet(set))
    }

    /// Subscribes to events of these kinds of a GPU.
    pub(super) fn register(&self, nvml: &Nvml, gpu: Handle, kinds: u64) -> NvmlResult<()> {
        let call = function(&nvml.lib().nvmlDeviceRegisterEvents)?;
        // SAFETY: handle and set are from this library.
        nvml_try(unsafe { call(gpu.0, kinds, self.0) })
    }

    /// Waits for the next event: its GPU, kind, data and instance. `Timeout` if there is none.
    pub(super) fn wait(&self, nvml: &Nvml, longest_ms: u32) -> NvmlResult<(Option<Handle>, u64, u64, u32)> {
        let lib = nvml.lib();
        let by = |call: NvmlResult<Wait>| {
            let call = call?;
            let mut event = nvmlEventData_t {
                device: std::ptr::null_mut(),
                eventType: 0,
                eventData: 0,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            };
            // SAFETY: the set is from this library; the pointer is to a variable of the type that the function writes.
            nvml_try(unsafe { call(self.0, &mut event, longest_ms) })?;
            let device = Some(Handle(event.device)).filter(|device| !device.0.is_null());
            Ok((device, event.eventType, event.eventData, event.gpuInstanceId))
        };
        or(by(function(&lib.nvmlEventSetWait_v2)), || by(function(&lib.nvmlEventSetWait)))
    }
}

/// A counter; all bits set means no value (NVML_VALUE_NOT_AVAILABLE).
pub(super) fn counter(result: NvmlResult<u64>) -> NvmlResult<u64> {
    match result {
        Ok(u64::MAX) => Err(NvmlError::NotSupported),
        result => result,
    }
}

/// The same for a shorter counter.
pub(super) fn short_counter(result: NvmlResult<u32>) -> NvmlResult<u32> {
    match result {
        Ok(u32::MAX) => Err(NvmlError::NotSupported),
        result => result,
    }
}

/// True or false; any other number means neither.
pub(super) fn flag(result: NvmlResult<u32>) -> NvmlResult<bool> {
    match result? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(NvmlError::NotSupported),
    }
}

/// The length of a list, of which more or fewer elements may have been written.
fn counted(code: nvmlReturn_t, count: c_uint) -> NvmlResult<u32> {
    match nvml_try(code) {
        Ok(()) | Err(NvmlError::InsufficientSize(_)) => Ok(count),
        Err(error) => Err(error),
    }
}

/// Decodes a text that a function wrote to a buffer that ends in 0.
pub(super) fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|letter| letter.to_ne_bytes()[0]).collect();
    let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
    // It is printed on terminals.
    text.chars().filter(|letter| !letter.is_control()).collect::<String>().trim().to_owned()
}
