//! NVML behind a pipe: each line on standard input is a request, each line of the answer is JSON.
//!
//! A GPU that fails does not hide the others, and a value that a GPU does not offer is absent, not zero. Events of the
//! driver are passed on immediately, between the answers.

mod address;
mod calls;
mod details;
mod events;
mod fields;
mod gpu;
mod links;
mod lost;
mod notes;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, Write};
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_health::hardware::gpu::{DriverTrouble, GpuIdentity, ProbeAnswer, ProbeLine, ProbeRequest};
use mainstay_model::pci::PciAddress;
use nvml_wrapper::error::NvmlError;

use calls::Nvml;

/// The library's usual name.
const USUAL: &str = "libnvidia-ml.so.1";

/// Answers requests until their sender is gone.
///
/// # Errors
/// The pipe broke, or a request cannot be parsed.
pub fn serve(
    library: Option<OsString>,
    requests: impl BufRead,
    answers: impl Write + Send + 'static,
) -> io::Result<()> {
    let path = library.unwrap_or_else(|| USUAL.into());
    let lines = Lines(Arc::new(Mutex::new(Box::new(answers))));
    let mut probe = Probe { path, library: None, known: BTreeMap::new(), places: BTreeMap::new(), lines };
    for request in requests.lines() {
        let request: ProbeRequest = serde_json::from_str(&request?)?;
        probe.known.extend(request.known.iter().cloned());
        probe.places.extend(request.places.iter().cloned());
        let answer = probe.sample(&request)?;
        probe.lines.write(&ProbeLine::Answer(answer))?;
    }
    Ok(())
}

/// The output, for answers and events.
#[derive(Clone)]
struct Lines(Arc<Mutex<Box<dyn Write + Send>>>);

impl Lines {
    fn write(&self, line: &ProbeLine) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        // A panicking thread has written a complete line or none.
        let mut pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pipe.write_all(&text)?;
        pipe.flush()
    }
}

/// The initialized library. It stays so until this process ends.
struct Library {
    nvml: Nvml,
    newer: calls::Newer,
    driver: Option<String>,
}

impl Library {
    fn load(path: &OsStr) -> Result<Library, NvmlError> {
        let nvml = Nvml::begin(path)?;
        let driver = nvml.driver_version().ok();
        Ok(Library { nvml, newer: calls::Newer::load(path), driver })
    }

    fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    fn newer(&self) -> &calls::Newer {
        &self.newer
    }

    fn driver(&self) -> Option<&str> {
        self.driver.as_deref()
    }
}

struct Probe {
    path: OsString,
    library: Option<Arc<Library>>,
    /// By index in the driver's list: a lost GPU no longer reports its identity.
    known: BTreeMap<u32, GpuIdentity>,
    /// The bus addresses of GPUs by name, from the kernel driver.
    places: BTreeMap<String, PciAddress>,
    lines: Lines,
}

impl Probe {
    fn sample(&mut self, request: &ProbeRequest) -> io::Result<ProbeAnswer> {
        let (library, is_new) = match &self.library {
            Some(library) => (library.clone(), false),
            None => match Library::load(&self.path) {
                Ok(library) => (self.library.insert(Arc::new(library)).clone(), true),
                Err(error) => return Ok(trouble(&error)),
            },
        };
        let count = match calls::count(library.nvml()) {
            Ok(count) => count,
            // Other code has shut it down: initialize it again, once.
            Err(NvmlError::Uninitialized) if !is_new => {
                self.library = None;
                return self.sample(request);
            }
            Err(error) => return Ok(trouble(&error)),
        };
        self.lines.write(&ProbeLine::Counted(count))?;
        let read = self.read(&library, count, request)?;
        if is_new {
            // Only of GPUs that answer: one that hangs or is lost would block the others here.
            let place = |index: u32| Some((index, self.known.get(&index)?.address));
            let places: Vec<lost::GpuAddress> = read.into_iter().filter_map(place).collect();
            lost::watch(&library, &self.lines, places.clone());
            events::pass_on(&library, &self.lines, places);
        }
        Ok(ProbeAnswer::Gpus { driver: library.driver.clone(), gpus: Vec::new(), bound: Vec::new() })
    }

    /// Reads one GPU after the other and reports each at once, so that a hang affects no earlier reading. Returns the
    /// indexes of those that are able to answer.
    fn read(&mut self, library: &Library, count: u32, request: &ProbeRequest) -> io::Result<Vec<u32>> {
        let readable = |index: &u32| !request.skip.contains(index);
        let doubtful = |index: &u32| request.last.contains(index);
        let mut order: Vec<u32> = (0..count).filter(readable).collect();
        order.sort_by_key(|index| (doubtful(index), *index));
        let peers: Vec<u32> = order.iter().copied().filter(|index| !doubtful(index)).collect();
        let mut answering = Vec::new();
        for index in order {
            self.lines.write(&ProbeLine::Reading(index))?;
            // Each group of calls has the whole deadline, so that a slow driver does not count as hung. A broken pipe is
            // detected at the next line.
            let alive = || drop(self.lines.write(&ProbeLine::Reading(index)));
            let wanted = gpu::ReadRequest {
                details: request.details,
                peers: &peers,
                places: &self.places,
                alive: &alive,
            };
            let reading = gpu::read(library, index, &self.known, wanted);
            if let Some(identity) = &reading.identity {
                self.known.insert(index, identity.clone());
            }
            if reading.trouble.is_none() {
                answering.push(index);
            }
            self.lines.write(&ProbeLine::Gpu(Box::new(reading)))?;
        }
        Ok(answering)
    }
}

fn trouble(error: &NvmlError) -> ProbeAnswer {
    let trouble = match error {
        NvmlError::LibloadingError(_)
        | NvmlError::LibraryNotFound
        | NvmlError::FailedToLoadSymbol(_)
        | NvmlError::FunctionNotFound => DriverTrouble::LibraryMissing,
        NvmlError::DriverNotLoaded => DriverTrouble::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => DriverTrouble::VersionMismatch,
        NvmlError::NoPermission => DriverTrouble::NoPermission,
        NvmlError::GpuLost => DriverTrouble::GpuLost,
        NvmlError::ResetRequired => DriverTrouble::ResetRequired,
        _ => DriverTrouble::Other,
    };
    ProbeAnswer::Trouble { trouble, detail: error.to_string() }
}
