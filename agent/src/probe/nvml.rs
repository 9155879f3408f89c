//! NVML behind a pipe: each line on standard input is a request, each answer is one line of JSON.
//!
//! A GPU that fails does not hide the others, and what one GPU does not offer is absent, not zero.

mod gpu;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, Write};

use mainstay_core::device::{DriverTrouble, GpuIdentity, GpuReading, ProbeAnswer};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Answers requests until their sender is gone.
///
/// # Errors
/// The pipe broke.
pub fn serve(library: Option<OsString>, requests: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    let mut probe = Probe { library, nvml: None, known: BTreeMap::new() };
    for request in requests.lines() {
        request?;
        serde_json::to_writer(&mut answers, &probe.sample())?;
        answers.write_all(b"\n")?;
        answers.flush()?;
    }
    Ok(())
}

struct Probe {
    library: Option<OsString>,
    nvml: Option<Nvml>,
    /// By place in the driver's list: a lost GPU does not tell any more which one it is.
    known: BTreeMap<u32, GpuIdentity>,
}

impl Probe {
    fn sample(&mut self) -> ProbeAnswer {
        let nvml = match self.nvml.take().map_or_else(|| load(self.library.as_ref()), Ok) {
            Ok(nvml) => nvml,
            Err(error) => return trouble(&error),
        };
        match read(&nvml, &mut self.known) {
            Ok(answer) => {
                // After a GPU failed, or was reset, the library has to begin anew to see it as it is.
                let well = matches!(&answer, ProbeAnswer::Gpus { gpus, .. } if gpus.iter().all(|gpu| gpu.trouble.is_none()));
                self.nvml = well.then_some(nvml);
                answer
            }
            Err(error) => trouble(&error),
        }
    }
}

fn load(library: Option<&OsString>) -> Result<Nvml, NvmlError> {
    match library {
        Some(path) => Nvml::builder().lib_path(path).init(),
        None => Nvml::init(),
    }
}

fn read(nvml: &Nvml, known: &mut BTreeMap<u32, GpuIdentity>) -> Result<ProbeAnswer, NvmlError> {
    let count = nvml.device_count()?;
    let gpus: Vec<GpuReading> = (0..count)
        .map(|index| {
            let reading = gpu::read(nvml, index, known.get(&index));
            if let Some(identity) = &reading.identity {
                known.insert(index, identity.clone());
            }
            reading
        })
        .collect();
    Ok(ProbeAnswer::Gpus { driver: nvml.sys_driver_version().ok(), gpus })
}

fn trouble(error: &NvmlError) -> ProbeAnswer {
    let trouble = match error {
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound | NvmlError::FailedToLoadSymbol(_) => {
            DriverTrouble::LibraryMissing
        }
        NvmlError::DriverNotLoaded => DriverTrouble::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => DriverTrouble::VersionMismatch,
        NvmlError::NoPermission => DriverTrouble::NoPermission,
        _ => DriverTrouble::Other,
    };
    ProbeAnswer::Trouble { trouble, detail: error.to_string() }
}
