//! DCGM behind a pipe: each line on standard input is a request, each answer is one line of JSON. The first request loads
//! the library. The connection to the host engine is created again after each failure.

mod policy;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_double, c_int, c_longlong, c_uint, c_ushort};
use std::io::{self, BufRead, Write};

use libloading::{Library, Symbol};
use mainstay_health::hardware::dcgm::{DcgmHealth, DcgmReport, Incident};
use mainstay_model::pci::PciAddress;
use policy::Policy;

/// The host engine to ask.
#[derive(Clone, Debug)]
pub struct Engine {
    /// The library; none for the usual one.
    pub library: Option<OsString>,
    /// The host engine, as `host:port`; none to run one within the probe.
    pub address: Option<String>,
    /// Whether to set policies if no one has set any.
    pub policies: bool,
}

/// Answers requests until their sender is gone.
///
/// # Errors
/// The pipe broke.
pub fn serve(engine: &Engine, requests: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    let mut connection = None;
    for request in requests.lines() {
        request?;
        let report = match connection.take().map_or_else(|| Connection::open(engine), Ok) {
            Ok(mut open) => match open.check() {
                Ok(health) => {
                    connection = Some(open);
                    DcgmReport::Health(health)
                }
                Err(why) => DcgmReport::Failed(why),
            },
            Err(report) => report,
        };
        serde_json::to_writer(&mut answers, &report)?;
        answers.write_all(b"\n")?;
        answers.flush()?;
    }
    Ok(())
}

type Handle = usize;

/// DCGM_GROUP_ALL_GPUS.
const ALL_GPUS: usize = 0x7fff_ffff;
/// All parts that it watches, without those that exist only in later versions (DCGM_HEALTH_WATCH_ALL).
const ALL_SYSTEMS: c_uint = 0xffff_ffff;
/// Requests no list of errors per GPU.
const NO_STATUS: usize = 0;
/// DCGM_FE_GPU.
const OF_GPU: c_uint = 1;
/// More GPUs than any version supports (DCGM_MAX_NUM_DEVICES is 32).
const MOST_GPUS: usize = 64;
/// Watch interval in microseconds, and how long values are kept in seconds: three minutes cover the slowest of its checks.
const WATCH_EVERY: c_longlong = 10_000_000;
const KEEP_FOR: c_double = 180.0;

/// The version word of DCGM's structs (dcgm_structs.h): each starts with its size and the number of its version.
fn version(size: usize, number: c_uint) -> c_uint {
    size as c_uint | number << 24
}

#[repr(C)]
struct ConnectV2 {
    version: c_uint,
    persist: c_uint,
    timeout_ms: c_uint,
    is_unix: c_uint,
}

#[repr(C)]
struct HealthSet {
    version: c_uint,
    group: usize,
    systems: c_uint,
    update_interval: c_longlong,
    max_keep_age: c_double,
}

#[repr(C)]
struct EmbeddedV1 {
    version: c_uint,
    mode: c_int,
    handle: Handle,
    log_file: *const c_char,
    severity: c_int,
    deny_count: c_uint,
    deny: [c_uint; 10],
}

#[repr(C)]
struct RawIncident {
    system: c_uint,
    health: c_uint,
    message: [u8; 1024],
    code: c_uint,
    entity_group: c_uint,
    entity: c_uint,
}

/// The head of a response; as many incidents follow as its version has room for.
#[repr(C)]
struct ResponseHead {
    version: c_uint,
    health: c_uint,
    count: c_uint,
}

/// A kind of entity and its number.
#[repr(C)]
struct EntityPair {
    group: c_uint,
    entity: c_uint,
}

/// A value of a field, as text.
#[repr(C)]
struct FieldValue {
    version: c_uint,
    group: c_uint,
    entity: c_uint,
    field: c_ushort,
    kind: c_ushort,
    status: c_int,
    unused: c_uint,
    at: c_longlong,
    text: [u8; 4096],
}

/// DCGM_FI_DEV_PCI_BUSID, read from the driver and not from DCGM's memory (DCGM_FV_FLAG_LIVE_DATA).
const PCI_BUSID: c_ushort = 57;
const LIVE: c_uint = 1;

/// Versions of the response, with the number of incidents that each has room for.
const RESPONSES: [(c_uint, usize); 2] = [(5, 1024), (4, 64)];

struct Connection {
    library: Library,
    handle: Handle,
    /// The version of the response that it supports: the first that it accepts.
    response: Option<(c_uint, usize)>,
    first: bool,
    /// The bus addresses of its GPUs.
    addresses: BTreeMap<u32, PciAddress>,
}

/// Calls a function of the library and turns its code into an error.
macro_rules! call {
    ($library:expr, $name:literal, ($($type:ty),*), ($($argument:expr),*)) => {{
        type Function = unsafe extern "C" fn($($type),*) -> c_int;
        // SAFETY: the type is that of dcgm_agent.h for this name.
        let function: Result<Symbol<'_, Function>, _> = unsafe { $library.get($name.as_bytes()) };
        match function.map(|function| {
            // SAFETY: versioned structs contain their size, and pointers are to values of ours that outlive the call.
            unsafe { function($($argument),*) }
        }) {
            Ok(0) => Ok(()),
            Ok(code) => Err(format!("{}: {}", $name, error_text($library, code))),
            Err(_) => Err(format!("the library lacks {}", $name)),
        }
    }};
}

/// DCGM's text for an error.
fn error_text(library: &Library, code: c_int) -> String {
    // SAFETY: as above.
    let Ok(function) =
        (unsafe { library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"errorString") })
    else {
        return format!("error {code}");
    };
    // SAFETY: it returns text that is never freed, or null.
    let text = unsafe { function(code) };
    if text.is_null() {
        return format!("error {code}");
    }
    // SAFETY: the text is not null and ends with zero.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({code})")
}

impl Connection {
    fn open(engine: &Engine) -> Result<Connection, DcgmReport> {
        let library = load(engine.library.as_deref()).map_err(DcgmReport::Absent)?;
        call!(&library, "dcgmInit", (), ()).map_err(DcgmReport::Failed)?;
        let handle = match &engine.address {
            Some(address) => connect(&library, address).map_err(DcgmReport::Absent)?,
            None => embed(&library).map_err(DcgmReport::Failed)?,
        };
        let addresses = BTreeMap::new();
        let connection = Connection { library, handle, response: None, first: true, addresses };
        connection.watch().map_err(DcgmReport::Failed)?;
        if engine.policies {
            // Some kinds of boards have no policies; then there are no events.
            let _ = connection.set_policies();
        }
        connection.listen();
        Ok(connection)
    }

    fn watch(&self) -> Result<(), String> {
        let mut set = HealthSet {
            version: version(size_of::<HealthSet>(), 2),
            group: ALL_GPUS,
            systems: ALL_SYSTEMS,
            update_interval: WATCH_EVERY,
            max_keep_age: KEEP_FOR,
        };
        let set: *mut HealthSet = &raw mut set;
        call!(&self.library, "dcgmHealthSet_v2", (Handle, *mut HealthSet), (self.handle, set))
    }

    fn check(&mut self) -> Result<DcgmHealth, String> {
        let gpus = self.gpus()?;
        let incidents = self.incidents()?;
        if gpus.iter().any(|gpu| !self.addresses.contains_key(gpu)) {
            // If the library does not report them, it is asked again next time; until then its GPUs have its own numbers.
            self.addresses = self.addresses_of(&gpus).unwrap_or_default();
        }
        let (first, addresses) = (std::mem::replace(&mut self.first, false), self.addresses.clone());
        Ok(DcgmHealth { gpus, incidents, first, addresses, violations: policy::take() })
    }

    /// Sets policies that only report, unless there are any: existing policies are kept.
    fn set_policies(&self) -> Result<(), String> {
        let gpus = self.gpus()?;
        let mut known: Vec<Policy> = gpus.iter().map(|_| Policy::none()).collect();
        let count = c_int::try_from(known.len()).map_err(|error| error.to_string())?;
        call!(
            &self.library,
            "dcgmPolicyGet",
            (Handle, usize, c_int, *mut Policy, usize),
            (self.handle, ALL_GPUS, count, known.as_mut_ptr(), NO_STATUS)
        )?;
        if known.is_empty() || known.iter().any(Policy::is_set) {
            return Ok(());
        }
        let mut ours = Policy::notifying();
        let ours: *mut Policy = &raw mut ours;
        call!(
            &self.library,
            "dcgmPolicySet",
            (Handle, usize, *mut Policy, usize),
            (self.handle, ALL_GPUS, ours, NO_STATUS)
        )
    }

    /// Subscribes to violations of policies, also of those that others have set. Power at the cap is no violation worth reporting.
    fn listen(&self) {
        let received = call!(
            &self.library,
            "dcgmPolicyRegister_v2",
            (Handle, usize, c_uint, policy::Callback, u64),
            (self.handle, ALL_GPUS, policy::CONDITIONS, policy::note, 0)
        );
        // Some kinds of boards have no policies.
        drop(received);
    }

    fn addresses_of(&self, gpus: &[u32]) -> Result<BTreeMap<u32, PciAddress>, String> {
        let mut entities: Vec<EntityPair> =
            gpus.iter().map(|gpu| EntityPair { group: OF_GPU, entity: *gpu }).collect();
        let mut fields = [PCI_BUSID];
        let mut values: Vec<FieldValue> = gpus
            .iter()
            .map(|gpu| FieldValue {
                version: version(size_of::<FieldValue>(), 2),
                group: OF_GPU,
                entity: *gpu,
                field: PCI_BUSID,
                kind: 0,
                // Not reported unless the library overwrites it.
                status: -1,
                unused: 0,
                at: 0,
                text: [0; 4096],
            })
            .collect();
        let count = entities.len() as c_uint;
        call!(
            &self.library,
            "dcgmEntitiesGetLatestValues",
            (Handle, *mut EntityPair, c_uint, *mut c_ushort, c_uint, c_uint, *mut FieldValue),
            (self.handle, entities.as_mut_ptr(), count, fields.as_mut_ptr(), 1, LIVE, values.as_mut_ptr())
        )?;
        let readable = values.iter().filter(|value| value.status == 0);
        let placed = readable.filter_map(|value| {
            let text = CStr::from_bytes_until_nul(&value.text).ok()?.to_str().ok()?;
            Some((value.entity, PciAddress::parse(text)?))
        });
        Ok(placed.collect())
    }

    fn gpus(&self) -> Result<Vec<u32>, String> {
        let (mut ids, mut count) = ([0; MOST_GPUS], 0);
        let arguments = (self.handle, ids.as_mut_ptr(), &raw mut count);
        call!(
            &self.library,
            "dcgmGetAllSupportedDevices",
            (Handle, *mut c_uint, *mut c_int),
            (arguments.0, arguments.1, arguments.2)
        )?;
        let count = usize::try_from(count).unwrap_or(0).min(MOST_GPUS);
        Ok(ids[..count].to_vec())
    }

    fn incidents(&mut self) -> Result<Vec<Incident>, String> {
        let mut refused = String::new();
        for (number, capacity) in self.response.map_or(RESPONSES.to_vec(), |known| vec![known]) {
            match self.incidents_of(number, capacity) {
                Ok(incidents) => {
                    self.response = Some((number, capacity));
                    return Ok(incidents);
                }
                Err(why) if refused.is_empty() => refused = why,
                Err(_) => {}
            }
        }
        Err(refused)
    }

    fn incidents_of(&self, number: c_uint, capacity: usize) -> Result<Vec<Incident>, String> {
        let size = size_of::<ResponseHead>() + capacity * size_of::<RawIncident>();
        // A megabyte: on the heap, as words so that it is aligned.
        let mut memory = vec![0_u32; size.div_ceil(4)];
        memory[0] = version(size, number);
        call!(
            &self.library,
            "dcgmHealthCheck",
            (Handle, usize, *mut u32),
            (self.handle, ALL_GPUS, memory.as_mut_ptr())
        )?;
        let count = (memory[2] as usize).min(capacity);
        let words = size_of::<RawIncident>() / 4;
        let incidents = memory[size_of::<ResponseHead>() / 4..].chunks_exact(words).take(count);
        Ok(incidents.map(incident).collect())
    }
}

/// Decodes an incident from its words: system, health, 1024 bytes of message, code, kind of entity, entity.
fn incident(words: &[u32]) -> Incident {
    const MESSAGE: usize = 1024 / 4;
    let bytes: Vec<u8> = words[2..2 + MESSAGE].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let after = &words[2 + MESSAGE..];
    Incident {
        gpu: (after[1] == OF_GPU).then_some(after[2]),
        system: words[0],
        health: words[1],
        code: after[0],
        message: String::from_utf8_lossy(&bytes[..end]).trim().to_owned(),
    }
}

fn load(named: Option<&OsStr>) -> Result<Library, String> {
    let names = match named {
        Some(name) => vec![name],
        None => vec![OsStr::new("libdcgm.so.4"), OsStr::new("libdcgm.so.3")],
    };
    let mut missing = String::new();
    for name in names {
        // SAFETY: the library runs its initialisers when it is loaded; this process exists for that.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => missing = error.to_string(),
        }
    }
    Err(missing)
}

fn connect(library: &Library, address: &str) -> Result<Handle, String> {
    let text = CString::new(address).map_err(|_| "the address has a zero in it".to_owned())?;
    let mut parameters = ConnectV2 {
        version: version(size_of::<ConnectV2>(), 2),
        persist: 0,
        timeout_ms: 2000,
        is_unix: c_uint::from(address.starts_with('/')),
    };
    let mut handle = 0;
    let (parameters, place): (*mut ConnectV2, *mut Handle) = (&raw mut parameters, &raw mut handle);
    call!(
        library,
        "dcgmConnect_v2",
        (*const c_char, *mut ConnectV2, *mut Handle),
        (text.as_ptr(), parameters, place)
    )?;
    Ok(handle)
}

fn embed(library: &Library) -> Result<Handle, String> {
    let mut parameters = EmbeddedV1 {
        version: version(size_of::<EmbeddedV1>(), 1),
        // It polls by itself.
        mode: 1,
        handle: 0,
        log_file: std::ptr::null(),
        // Nothing is logged.
        severity: 0,
        deny_count: 0,
        deny: [0; 10],
    };
    let place: *mut EmbeddedV1 = &raw mut parameters;
    call!(library, "dcgmStartEmbedded_v2", (*mut EmbeddedV1), (place))?;
    Ok(parameters.handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_laid_out_as_the_library_expects() {
        assert_eq!(size_of::<RawIncident>(), 1044);
        assert_eq!(size_of::<ResponseHead>() + 1024 * size_of::<RawIncident>(), 1_069_068);
        assert_eq!(version(1_069_068, 5), 0x0510_500c);
        assert_eq!((size_of::<HealthSet>(), size_of::<ConnectV2>(), size_of::<EmbeddedV1>()), (40, 16, 72));
        assert_eq!(std::mem::offset_of!(RawIncident, code), 8 + 1024);
        assert_eq!(std::mem::offset_of!(RawIncident, entity_group), 1036);
        assert_eq!((size_of::<FieldValue>(), std::mem::offset_of!(FieldValue, text)), (4128, 32));
    }
}
