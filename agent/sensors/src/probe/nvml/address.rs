//! The PCI address of a GPU, or of the far end of a link.

use mainstay_model::pci::PciAddress;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::nvmlPciInfo_t;

use super::calls::{Handle, Nvml, NvmlResult, or, text_of};

/// The address of a GPU, from the newest variant of the function that the library has.
pub(super) fn address(nvml: &Nvml, gpu: Handle) -> NvmlResult<PciAddress> {
    let lib = nvml.lib();
    let older = || {
        or(gpu.get(&lib.nvmlDeviceGetPciInfo_v2, no_address()), || {
            gpu.get(&lib.nvmlDeviceGetPciInfo, no_address())
        })
    };
    let info = or(gpu.get(&lib.nvmlDeviceGetPciInfo_v3, no_address()), older)?;
    address_of(&info)
}

/// An empty address.
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

/// Decodes an address: older variants fill in only the short text, and some fill in only the numbers.
pub(super) fn address_of(info: &nvmlPciInfo_t) -> NvmlResult<PciAddress> {
    let (long, short) = (text_of(&info.busId), text_of(&info.busIdLegacy));
    let by_number = || {
        let (bus, device) = (u8::try_from(info.bus).ok()?, u8::try_from(info.device).ok()?);
        // No GPU has this address: it is the content of an unwritten struct.
        ((info.domain, bus, device) != (0, 0, 0)).then_some(PciAddress { domain: info.domain, bus, device })
    };
    PciAddress::parse(&long)
        .or_else(|| PciAddress::parse(&short))
        .or_else(by_number)
        .ok_or_else(|| NvmlError::FailedToLoadSymbol(format!("{long:?} is not a PCI address")))
}
