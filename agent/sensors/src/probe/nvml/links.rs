//! The NVLinks of one GPU.

use mainstay_health::hardware::gpu::{LinkErrors, LinkReading};
use nvml_wrapper::error::NvmlError;

use mainstay_model::pci::PciAddress;

use super::address::{address_of, no_address};
use super::calls::{Handle, Nvml, NvmlResult, or};
use super::fields::{self, LINK_5, LINK_ERRORS};
use super::notes::Notes;

/// The maximum number of links of a GPU (NVML_NVLINK_MAX_LINKS).
const LINKS: u32 = 18;

/// NVML's numbers for kinds of errors, if there are no fields: retransmissions, recoveries, damaged packets (flits, data).
const ERROR_KINDS: [u32; 4] = [0, 1, 2, 3];

/// The links of the GPU. A link that cannot be read does not count as down.
pub(super) fn states(nvml: &Nvml, gpu: Handle, notes: &mut Notes) -> Vec<LinkReading> {
    let mut links = Vec::new();
    for link in 0..LINKS {
        match gpu.get_at(&nvml.lib().nvmlDeviceGetNvLinkState, link, 0) {
            // A link that is not wired on the board.
            Err(NvmlError::NotSupported) => {}
            // The first link that the GPU does not have.
            Err(NvmlError::InvalidArg | NvmlError::FunctionNotFound) => break,
            state => links.push(LinkReading { link, up: notes.take(state.map(|state| state != 0)) }),
        }
        if notes.is_fatal() {
            break;
        }
    }
    links
}

/// The errors of these links.
pub(super) fn errors(nvml: &Nvml, gpu: Handle, links: &[u32], alive: &dyn Fn()) -> Vec<LinkErrors> {
    let wanted: Vec<(u32, u32)> = links
        .iter()
        .flat_map(|link| LINK_ERRORS.iter().chain(&LINK_5).map(|field| (*field, *link)))
        .collect();
    let values = fields::read(nvml, gpu, &wanted);
    let each = LINK_ERRORS.len() + LINK_5.len();
    let mut has_counters = true;
    links
        .iter()
        .zip(values.chunks(each))
        .map(|(link, values)| {
            alive();
            let count =
                |place: usize| values.get(place)?.as_ref().ok().and_then(|count| u64::try_from(*count).ok());
            let rate = |place: usize| Some(fields::error_rate(*values.get(place)?.as_ref().ok()?));
            let mut errors = LinkErrors {
                link: *link,
                replays: count(0),
                recoveries: count(1),
                crc: count(2),
                recovered: count(3),
                recovery_failed: count(4),
                effective_ber: rate(5),
                symbol_ber: rate(6),
                damaged_packets: [count(7), count(8)].into_iter().flatten().reduce(u64::saturating_add),
                remote: far_end(nvml, gpu, *link).ok(),
            };
            // Some libraries know the numbers of the fields, but only the old functions count.
            let nothing =
                [errors.replays, errors.recoveries, errors.crc].iter().all(|count| count.unwrap_or(0) == 0);
            if nothing && has_counters {
                has_counters = older(nvml, gpu, &mut errors);
            }
            errors
        })
        .collect()
}

/// Reads the counters of drivers that do not know the fields. Returns whether they exist.
fn older(nvml: &Nvml, gpu: Handle, errors: &mut LinkErrors) -> bool {
    let [replays, recoveries, flits, data] =
        ERROR_KINDS.map(|kind| gpu.link_errors(nvml, errors.link, kind).ok());
    let crc = match (flits, data) {
        (None, None) => None,
        (flits, data) => Some(flits.unwrap_or(0).saturating_add(data.unwrap_or(0))),
    };
    errors.replays = errors.replays.max(replays);
    errors.recoveries = errors.recoveries.max(recoveries);
    errors.crc = errors.crc.max(crc);
    replays.is_some() || recoveries.is_some() || crc.is_some()
}

/// The far end, from the newest variant of the function that the library has.
fn far_end(nvml: &Nvml, gpu: Handle, link: u32) -> NvmlResult<PciAddress> {
    let lib = nvml.lib();
    let newer = gpu.get_at(&lib.nvmlDeviceGetNvLinkRemotePciInfo_v2, link, no_address());
    let info = or(newer, || gpu.get_at(&lib.nvmlDeviceGetNvLinkRemotePciInfo, link, no_address()))?;
    address_of(&info)
}
