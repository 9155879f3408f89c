//! One GPU, read.

use mainstay_core::device::{GpuIdentity, GpuReading, GpuTrouble, PcieLink, Read, RemappedRows};
use mainstay_core::id::Pid;
use mainstay_core::pci::PciAddress;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};

/// The most links that a GPU has (NVML_NVLINK_MAX_LINKS).
const LINKS: u32 = 18;

/// NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: it survives a restart of the agent, as XID 154 does not.
const RECOVERY_ACTION: FieldId = FieldId(230);

/// Reads the GPU at a place of the driver's list; `known` is who was there before.
pub(super) fn read(nvml: &Nvml, index: u32, known: Option<&GpuIdentity>) -> GpuReading {
    let mut reading = GpuReading { index, identity: known.cloned(), ..GpuReading::default() };
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => {
            reading.trouble = Some(trouble(&error));
            return reading;
        }
    };
    match identity(&device) {
        Ok(identity) => reading.identity = Some(identity),
        Err(error) => {
            reading.trouble = Some(trouble(&error));
            return reading;
        }
    }
    // Some calls go on answering for a GPU that is lost: one that says so counts for all.
    let mut fatal = None;
    let mut note = |error: &NvmlError| {
        if matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired) && fatal.is_none() {
            fatal = Some(trouble(error));
        }
    };
    let ecc = |counter| device.total_ecc_errors(MemoryError::Uncorrected, counter);
    reading.ecc_volatile = got(ecc(EccCounter::Volatile), &mut note);
    reading.ecc_aggregate = got(ecc(EccCounter::Aggregate), &mut note);
    reading.remapped = got(remapped_rows(nvml, &device), &mut note);
    reading.pages_pending = got(device.are_pages_pending_retired(), &mut note);
    reading.recovery_action = got(recovery_action(&device), &mut note);
    reading.temperature = got(device.temperature(TemperatureSensor::Gpu), &mut note);
    reading.power = got(device.power_usage(), &mut note);
    reading.clock_reasons = got(device.current_throttle_reasons().map(|reasons| reasons.bits()), &mut note);
    let link = |generation: Result<u32, NvmlError>, width: Result<u32, NvmlError>| {
        Ok(PcieLink { generation: generation?, width: width? })
    };
    reading.pcie = got(link(device.current_pcie_link_gen(), device.current_pcie_link_width()), &mut note);
    reading.pcie_max = got(link(device.max_pcie_link_gen(), device.max_pcie_link_width()), &mut note);
    reading.pcie_replays = got(device.pcie_replay_counter(), &mut note);
    reading.mig = got(device.mig_mode().map(|mode| mode.current != 0), &mut note);
    reading.utilization = got(device.utilization_rates().map(|rates| rates.gpu), &mut note);
    reading.memory = got(device.memory_info().map(|memory| (memory.used, memory.total)), &mut note);
    let processes = device.running_compute_processes();
    let pids =
        processes.map(|all| all.iter().filter_map(|one| i32::try_from(one.pid).ok().map(Pid)).collect());
    reading.processes = got(pids, &mut note);
    reading.nvlinks = nvlinks(&device, &mut note);
    reading.trouble = fatal;
    reading
}

fn identity(device: &Device<'_>) -> Result<GpuIdentity, NvmlError> {
    let bus = device.pci_info()?.bus_id;
    let address = PciAddress::parse(&bus)
        .ok_or_else(|| NvmlError::FailedToLoadSymbol(format!("{bus:?} is no PCI address")))?;
    Ok(GpuIdentity { address, uuid: device.uuid()?, name: device.name()?, serial: device.serial().ok() })
}

fn got<T>(result: Result<T, NvmlError>, note: &mut impl FnMut(&NvmlError)) -> Read<T> {
    match result {
        Ok(value) => Read::Value(value),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            Read::NotOffered
        }
        Err(error) => {
            note(&error);
            Read::Failed(error.to_string())
        }
    }
}

fn trouble(error: &NvmlError) -> GpuTrouble {
    match error {
        NvmlError::GpuLost => GpuTrouble::Lost,
        NvmlError::ResetRequired => GpuTrouble::ResetRequired,
        NvmlError::NoPermission => GpuTrouble::NoPermission,
        error => GpuTrouble::Other(error.to_string()),
    }
}

/// What the wrapper does not wrap.
fn remapped_rows(nvml: &Nvml, device: &Device<'_>) -> Result<RemappedRows, NvmlError> {
    let missing = |error: &_| NvmlError::FailedToLoadSymbol(format!("nvmlDeviceGetRemappedRows: {error}"));
    let call = nvml.lib().nvmlDeviceGetRemappedRows.as_ref().map_err(missing)?;
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: the handle is of a device of this library, which lives as long as `nvml`; the four pointers are to
    // integers of ours of the size that the function writes.
    let code = unsafe { call(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed) };
    nvml_wrapper::error::nvml_try(code)?;
    Ok(RemappedRows { corrected, uncorrected, pending: pending != 0, failed: failed != 0 })
}

fn recovery_action(device: &Device<'_>) -> Result<u64, NvmlError> {
    let mut values = device.field_values_for(&[RECOVERY_ACTION])?;
    let value = values.pop().ok_or(NvmlError::NotSupported)??.value;
    match value {
        Ok(SampleValue::U32(number)) => Ok(number.into()),
        Ok(SampleValue::U64(number)) => Ok(number),
        // A driver that does not know the field answers it with an error of its own.
        _ => Err(NvmlError::NotSupported),
    }
}

/// The links that the GPU has; the first that it does not know ends them.
fn nvlinks(device: &Device<'_>, note: &mut impl FnMut(&NvmlError)) -> Vec<(u32, bool)> {
    let mut links = Vec::new();
    for link in 0..LINKS {
        match device.link_wrapper_for(link).is_active() {
            Ok(up) => links.push((link, up)),
            Err(error) => {
                note(&error);
                break;
            }
        }
    }
    links
}
