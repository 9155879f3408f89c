//! The calls themselves, by the shape of their arguments. The only unsafe code of the probe.
//!
//! A function that the library lacks is `FunctionNotFound`: older drivers lack many, and none of them is needed.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlFieldValue_t, nvmlProcessInfo_v1_t,
    nvmlProcessInfo_v2_t, nvmlReturn_t,
};

/// A function as it was looked up in the library, or why it is not there.
type Symbol<F, E> = Result<F, E>;
type Get<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T) -> nvmlReturn_t;
type GetAt<A, T> = unsafe extern "C" fn(nvmlDevice_t, A, *mut T) -> nvmlReturn_t;
type GetTwo<T> = unsafe extern "C" fn(nvmlDevice_t, *mut T, *mut T) -> nvmlReturn_t;
type GetText = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type GetList<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// What NVML calls return, with its words for what went wrong.
pub(super) type Answer<T> = Result<T, NvmlError>;

/// A GPU's handle, which lives as long as the library is loaded: as long as this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(nvmlDevice_t);

// SAFETY: NVML is thread-safe, and a handle is a name within it, not memory of ours.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

fn found<F: Copy, E>(symbol: &Symbol<F, E>) -> Answer<F> {
    symbol.as_ref().copied().map_err(|_| NvmlError::FunctionNotFound)
}

/// The version word of a versioned struct.
pub(super) const fn version<T>(number: u32) -> c_uint {
    size_of::<T>() as c_uint | (number << 24)
}

/// How many GPUs the driver counts.
pub(super) fn count(nvml: &Nvml) -> Answer<u32> {
    let lib = nvml.lib();
    let call = found(&lib.nvmlDeviceGetCount_v2).or_else(|_| found(&lib.nvmlDeviceGetCount))?;
    let mut count = 0;
    // SAFETY: the pointer is to an integer of ours of the size that the function writes.
    nvml_try(unsafe { call(&mut count) })?;
    Ok(count)
}

/// The GPU at a place of the driver's list.
pub(super) fn by_index(nvml: &Nvml, index: u32) -> Answer<Handle> {
    let lib = nvml.lib();
    let call =
        found(&lib.nvmlDeviceGetHandleByIndex_v2).or_else(|_| found(&lib.nvmlDeviceGetHandleByIndex))?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: the pointer is to a variable of ours of the size that the function writes.
    nvml_try(unsafe { call(index, &mut handle) })?;
    Ok(Handle(handle))
}

impl Handle {
    /// Calls what writes one value; `empty` is what stands there before, with its version where it has one.
    pub(super) fn get<T, E>(self, symbol: &Symbol<Get<T>, E>, empty: T) -> Answer<T> {
        let call = found(symbol)?;
        let mut value = empty;
        // SAFETY: the handle is of this library; the pointer is to a variable of the type that the function writes.
        nvml_try(unsafe { call(self.0, &mut value) })?;
        Ok(value)
    }

    /// Calls what writes one value for one of several: a sensor, a link.
    pub(super) fn get_at<A, T, E>(self, symbol: &Symbol<GetAt<A, T>, E>, at: A, empty: T) -> Answer<T> {
        let call = found(symbol)?;
        let mut value = empty;
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, at, &mut value) })?;
        Ok(value)
    }

    /// Calls what writes two values.
    pub(super) fn get_two<T: Copy + Default, E>(self, symbol: &Symbol<GetTwo<T>, E>) -> Answer<(T, T)> {
        let call = found(symbol)?;
        let (mut first, mut second) = (T::default(), T::default());
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, &mut first, &mut second) })?;
        Ok((first, second))
    }

    /// Calls what writes a text.
    pub(super) fn text<E>(self, symbol: &Symbol<GetText, E>) -> Answer<String> {
        let call = found(symbol)?;
        let mut text = [0 as c_char; 128];
        // SAFETY: as in `get`; the length that is given is one less than the buffer has, which so always ends in 0.
        nvml_try(unsafe { call(self.0, text.as_mut_ptr(), text.len() as c_uint - 1) })?;
        Ok(text_of(&text))
    }

    /// The errors of one kind of memory. Kinds by NVML's numbers.
    pub(super) fn ecc(
        self,
        nvml: &Nvml,
        corrected: bool,
        lifetime: bool,
        place: Option<c_uint>,
    ) -> Answer<u64> {
        let lib = nvml.lib();
        let (error, counter) = (c_uint::from(!corrected), c_uint::from(lifetime));
        let mut count: c_ulonglong = 0;
        let code = match place {
            Some(place) => {
                let call = found(&lib.nvmlDeviceGetMemoryErrorCounter)?;
                // SAFETY: as in `get`.
                unsafe { call(self.0, error, counter, place, &mut count) }
            }
            None => {
                let call = found(&lib.nvmlDeviceGetTotalEccErrors)?;
                // SAFETY: as in `get`.
                unsafe { call(self.0, error, counter, &mut count) }
            }
        };
        nvml_try(code)?;
        Ok(count)
    }

    /// Rows remapped after corrected and after uncorrected errors, whether some are pending, whether one failed.
    pub(super) fn remapped_rows(self, nvml: &Nvml) -> Answer<[u32; 4]> {
        let call = found(&nvml.lib().nvmlDeviceGetRemappedRows)?;
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: as in `get`, four times.
        nvml_try(unsafe { call(self.0, &mut corrected, &mut uncorrected, &mut pending, &mut failed) })?;
        Ok([corrected, uncorrected, pending, failed])
    }

    /// How many pages were retired for a cause, by NVML's numbers.
    pub(super) fn pages_retired(self, nvml: &Nvml, cause: c_uint) -> Answer<u32> {
        let call = found(&nvml.lib().nvmlDeviceGetRetiredPages)?;
        let mut count = 0;
        // SAFETY: as in `get`; with a count of 0 the function writes no addresses and tells how many there are.
        match nvml_try(unsafe { call(self.0, cause, &mut count, std::ptr::null_mut()) }) {
            Ok(()) | Err(NvmlError::InsufficientSize(_)) => Ok(count),
            Err(error) => Err(error),
        }
    }

    /// The errors of a kind on an NVLink.
    pub(super) fn link_errors(self, nvml: &Nvml, link: u32, kind: c_uint) -> Answer<u64> {
        let call = found(&nvml.lib().nvmlDeviceGetNvLinkErrorCounter)?;
        let mut count = 0;
        // SAFETY: as in `get`.
        nvml_try(unsafe { call(self.0, link, kind, &mut count) })?;
        Ok(count)
    }

    /// Processes with their memory, by the newest variant of the function that the library has.
    pub(super) fn processes(self, nvml: &Nvml) -> Answer<Vec<(u32, u64)>> {
        let lib = nvml.lib();
        let newer = found(&lib.nvmlDeviceGetComputeRunningProcesses_v3)
            .or_else(|_| found(&lib.nvmlDeviceGetComputeRunningProcesses_v2));
        if let Ok(call) = newer {
            let empty =
                nvmlProcessInfo_v2_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
            let all = self.list(call, empty)?;
            return Ok(all.into_iter().map(|one| (one.pid, one.usedGpuMemory)).collect());
        }
        let oldest = found(&lib.nvmlDeviceGetComputeRunningProcesses)?;
        let all = self.list(oldest, nvmlProcessInfo_v1_t { pid: 0, usedGpuMemory: 0 })?;
        Ok(all.into_iter().map(|one| (one.pid, one.usedGpuMemory)).collect())
    }

    /// A list of unknown length: asked for again with more room until it fits.
    fn list<T: Copy>(self, call: GetList<T>, empty: T) -> Answer<Vec<T>> {
        let mut room = 32;
        loop {
            let mut list = vec![empty; room];
            let mut count = room as c_uint;
            // SAFETY: as in `get`; the list has room for `count` elements.
            match nvml_try(unsafe { call(self.0, &mut count, list.as_mut_ptr()) }) {
                Ok(()) => {
                    list.truncate(count as usize);
                    return Ok(list);
                }
                Err(NvmlError::InsufficientSize(_)) if room < 8192 => {
                    room = (count as usize + 32).max(room * 2)
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the board's memory of its own configuration is intact.
    pub(super) fn validate_inforom(self, nvml: &Nvml) -> Answer<()> {
        let call = found(&nvml.lib().nvmlDeviceValidateInforom)?;
        // SAFETY: the handle is of this library.
        nvml_try(unsafe { call(self.0) })
    }

    /// How it reaches another GPU over NVLink, by NVML's numbers.
    pub(super) fn reaches(self, nvml: &Nvml, other: Handle) -> Answer<u32> {
        const OVER_NVLINK: c_uint = 2;
        let call = found(&nvml.lib().nvmlDeviceGetP2PStatus)?;
        let mut status = 0;
        // SAFETY: both handles are of this library; the pointer is to a variable of the type that the function writes.
        nvml_try(unsafe { call(self.0, other.0, OVER_NVLINK, &mut status) })?;
        Ok(status)
    }

    /// Several fields in one call; each has its own code.
    pub(super) fn fields(self, nvml: &Nvml, fields: &mut [nvmlFieldValue_t]) -> Answer<()> {
        let call = found(&nvml.lib().nvmlDeviceGetFieldValues)?;
        let count = c_int::try_from(fields.len()).map_err(|_| NvmlError::InvalidArg)?;
        // SAFETY: the handle is of this library; the array has `count` elements.
        nvml_try(unsafe { call(self.0, count, fields.as_mut_ptr()) })
    }
}

/// Functions that the bindings do not know yet.
#[derive(Debug, Default)]
pub(super) struct Newer {
    unrepairable: Option<Get<[c_uint; 4]>>,
}

impl Newer {
    /// Looks them up in the library that is loaded already.
    pub(super) fn of(library: &OsStr) -> Newer {
        // SAFETY: the library is loaded, so none of its initialisers runs here; it is never unloaded.
        let Ok(library) = (unsafe { libloading::Library::new(library) }) else { return Newer::default() };
        // SAFETY: the type is that of the function: a handle and a pointer to a struct of one integer, for which an
        // array of four has room.
        let unrepairable = unsafe { library.get(b"nvmlDeviceGetUnrepairableMemoryFlag_v1\0") };
        let newer = Newer { unrepairable: unrepairable.ok().map(|symbol| *symbol) };
        // The pointers are good for as long as the library is loaded.
        std::mem::forget(library);
        newer
    }

    /// Whether memory is damaged beyond repair.
    pub(super) fn unrepairable(&self, gpu: Handle) -> Answer<bool> {
        let symbol = self.unrepairable.ok_or(());
        gpu.get(&symbol, [0; 4]).map(|flags| flags[0] != 0)
    }
}

/// Events of some GPUs.
#[derive(Debug)]
pub(super) struct EventSet(nvmlEventSet_t);

// SAFETY: NVML is thread-safe, and the set is a name within it; it is waited for by one thread only.
unsafe impl Send for EventSet {}

impl EventSet {
    pub(super) fn new(nvml: &Nvml) -> Answer<EventSet> {
        let call = found(&nvml.lib().nvmlEventSetCreate)?;
        let mut set = std::ptr::null_mut();
        // SAFETY: the pointer is to a variable of ours of the size that the function writes.
        nvml_try(unsafe { call(&mut set) })?;
        Ok(EventSet(set))
    }

    /// Wants events of these kinds of a GPU.
    pub(super) fn register(&self, nvml: &Nvml, gpu: Handle, kinds: u64) -> Answer<()> {
        let call = found(&nvml.lib().nvmlDeviceRegisterEvents)?;
        // SAFETY: handle and set are of this library.
        nvml_try(unsafe { call(gpu.0, kinds, self.0) })
    }

    /// Waits for the next event: whose, its kind, its data, its instance. `Timeout` if there is none.
    pub(super) fn wait(&self, nvml: &Nvml, longest_ms: u32) -> Answer<(Handle, u64, u64, u32)> {
        let lib = nvml.lib();
        let call = found(&lib.nvmlEventSetWait_v2).or_else(|_| found(&lib.nvmlEventSetWait))?;
        let mut event = nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        // SAFETY: the set is of this library; the pointer is to a variable of the type that the function writes.
        nvml_try(unsafe { call(self.0, &mut event, longest_ms) })?;
        Ok((Handle(event.device), event.eventType, event.eventData, event.gpuInstanceId))
    }
}

/// A text that a function wrote into a buffer that ends in 0.
pub(super) fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|letter| letter.to_ne_bytes()[0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
