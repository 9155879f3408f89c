//! GPUs with their last readings.

use mainstay_health::hardware::gpu::{GpuProcess, GpuView};
use mainstay_model::component_id::ComponentId;
use mainstay_model::time::Stamp;
use mainstay_proto::v1;

use super::health::{action, state};
use super::{age, duration};

/// A GPU as an API message.
pub fn device(gpu: &GpuView, now: Stamp) -> v1::Device {
    let reading = gpu.reading.as_ref();
    let identity = reading.and_then(|reading| reading.identity.as_ref());
    // Readings of a GPU in trouble are not reliable.
    let reported = reading.filter(|reading| reading.trouble.is_none());
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    let memory = reported.and_then(|reported| reported.memory.value().copied());
    let processes =
        reported.and_then(|reported| reported.processes.value()).map(Vec::as_slice).unwrap_or_default();
    v1::Device {
        component: ComponentId::Gpu(gpu.address).to_string(),
        index: reading.map(|reading| reading.index),
        pci_address: gpu.address.to_string(),
        model: identity.map(|of| of.name.clone()).unwrap_or_default(),
        uuid: identity.map(|of| of.uuid.clone()).unwrap_or_default(),
        serial: identity.and_then(|of| of.serial.clone()),
        state: state(gpu.state).into(),
        reason: gpu.reason.clone(),
        recommended_action: action(gpu.action).into(),
        temperature: reported.and_then(|reported| reported.temperature.value().copied()),
        memory_temperature: reported.and_then(|reported| reported.memory_temperature.value().copied()),
        power: reported.and_then(|reported| reported.power.value().copied()).map(watts),
        power_limit: gpu.power_limit.map(watts),
        utilization: reported.and_then(|reported| reported.utilization.value().copied()),
        memory_used: memory.map(|(used, _)| used),
        memory_total: memory.map(|(_, total)| total),
        ecc_uncorrected: reported.and_then(|reported| reported.ecc_volatile.value().copied()),
        ecc_corrected: reported.and_then(|reported| reported.ecc_corrected.value().copied()),
        links_up: gpu.links.map(|(up, _)| up),
        links_expected: gpu.links.map(|(_, expected)| expected),
        processes: processes.iter().map(process).collect(),
        split: reported.and_then(|reported| reported.mig.value().copied()),
        read_age: gpu.read_at.and_then(|at| age(at, now)).map(duration),
        notes: gpu.notes.clone(),
    }
}

fn process(process: &GpuProcess) -> v1::DeviceProcess {
    v1::DeviceProcess { pid: process.pid.0.into(), memory: process.memory }
}
