//! Where a GPU, or what a link leads to, sits on the PCI bus.

use mainstay_core::base::pci::PciAddress;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::nvmlPciInfo_t;

use super::calls::{Answer, Handle, Nvml, or, text_of};

/// Where a GPU sits, by the newest variant of the function that the library has.
pub(super) fn address(nvml: &Nvml, gpu: Handle) -> Answer<PciAddress> {
    let lib = nvml.lib();
    let older = || {
        or(gpu.get(&lib.nvmlDeviceGetPciInfo_v2, no_address()), || {
            gpu.get(&lib.nvmlDeviceGetPciInfo, no_address())
        })
    };
    let info = or(gpu.get(&lib.nvmlDeviceGetPciInfo_v3, no_address()), older)?;
    address_of(&info)
}

/// An address that has not been told.
pub(super) fn no_address() -> nvmlPciInfo_t {
    nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    }
}

/// An address as it was told: older variants write the short text only, and some write numbers alone.
pub(super) fn address_of(info: &nvmlPciInfo_t) -> Answer<PciAddress> {
    let (long, short) = (text_of(&info.busId), text_of(&info.busIdLegacy));
    let by_number = || {
        let (bus, device) = (u8::try_from(info.bus).ok()?, u8::try_from(info.device).ok()?);
        // No GPU sits there: it is what stands in a struct that nobody wrote to.
        ((info.domain, bus, device) != (0, 0, 0)).then_some(PciAddress { domain: info.domain, bus, device })
    };
    PciAddress::parse(&long)
        .or_else(|| PciAddress::parse(&short))
        .or_else(by_number)
        .ok_or_else(|| NvmlError::FailedToLoadSymbol(format!("{long:?} is no PCI address")))
}
