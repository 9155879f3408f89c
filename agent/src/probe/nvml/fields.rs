//! Values by number: many of them in one call, some of them for each link.

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlValue_t};

use super::calls::{Answer, Handle, Nvml, is_not_offered, or};

/// The GPU itself; links are scopes of their own.
pub(super) const WHOLE: u32 = 0;

/// Temperature of the memory.
pub(super) const MEMORY_TEMPERATURE: u32 = 82;
/// What the driver says the GPU needs; it survives a restart of the agent, as XID 154 does not.
pub(super) const RECOVERY_ACTION: u32 = 230;
/// Margin below which clocks are held down.
pub(super) const SLOWDOWN_MARGIN: u32 = 194;

/// Time for which heat, and the power supply's brake, held clocks down. NVIDIA gave these other numbers with 580.82.
pub(super) fn slowdown_times(driver: Option<&str>) -> [u32; 2] {
    let mut parts = driver.unwrap_or_default().split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version >= (580, 82) { [270, 271] } else { [252, 253] }
}

/// ECC errors, of those that were corrected and those that were not since the last reset, and of a whole life.
pub(super) const ECC_CORRECTED: u32 = 3;
pub(super) const ECC_VOLATILE: u32 = 4;
pub(super) const ECC_AGGREGATE: u32 = 6;
/// Pages taken out of use after many corrected errors, after one that could not be corrected, and whether some wait.
pub(super) const PAGES_RETIRED: [u32; 2] = [29, 30];
pub(super) const PAGES_PENDING: u32 = 31;
/// PCIe packets that were sent again.
pub(super) const PCIE_REPLAYS: u32 = 94;
/// Rows remapped after corrected and after uncorrected errors, whether some wait, whether one failed.
pub(super) const REMAPPED_ROWS: [u32; 4] = [142, 143, 144, 145];

/// What a function says, or, where a library lacks it, the field of that number.
pub(super) fn or_field(nvml: &Nvml, gpu: Handle, reported: Answer<u64>, field: u32) -> Answer<u64> {
    or(reported, || whole(nvml, gpu, field))
}

/// One field of the GPU as a whole, which counts something.
pub(super) fn whole(nvml: &Nvml, gpu: Handle, field: u32) -> Answer<u64> {
    let reported = read(nvml, gpu, &[(field, WHOLE)]).pop().unwrap_or(Err(NvmlError::NotSupported))?;
    u64::try_from(reported).map_err(|_| NvmlError::NotSupported)
}

/// Counters of a link: packets sent again, recoveries, damaged packets.
pub(super) const LINK_ERRORS: [u32; 3] = [161, 162, 163];
/// Of links of the fifth generation: recoveries that worked and that failed, error rates of bits and of symbols, packets
/// that came damaged, errors that the link itself found.
pub(super) const LINK_5: [u32; 6] = [213, 214, 220, 222, 208, 211];

/// Reads fields of scopes, in this order; each is a whole number or why there is none.
pub(super) fn read(nvml: &Nvml, gpu: Handle, wanted: &[(u32, u32)]) -> Vec<Answer<i64>> {
    let mut fields: Vec<nvmlFieldValue_t> = wanted
        .iter()
        .map(|&(field, scope)| nvmlFieldValue_t {
            fieldId: field,
            scopeId: scope,
            timestamp: 0,
            latencyUsec: 0,
            valueType: 0,
            // A library that leaves a field alone has not told it.
            nvmlReturn: 3,
            value: nvmlValue_t { ullVal: 0 },
        })
        .collect();
    // As many as one call takes everywhere.
    const AT_ONCE: usize = 64;
    let mut read = Vec::new();
    for some in fields.chunks_mut(AT_ONCE) {
        match gpu.fields(nvml, some) {
            Ok(()) => read.extend(some.iter().map(number)),
            // Some libraries refuse them all for one that they do not know, in one word or the other.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported | NvmlError::NotFound) if some.len() > 1 => {
                read.extend(some.chunks_mut(1).map(|one| {
                    gpu.fields(nvml, one)?;
                    one.first().map_or(Err(NvmlError::NotSupported), number)
                }))
            }
            Err(error) => read.extend(some.iter().map(|_| Err(again(&error)))),
        }
    }
    read
}

fn number(field: &nvmlFieldValue_t) -> Answer<i64> {
    nvml_try(field.nvmlReturn)?;
    let value = &field.value;
    // SAFETY: all members of the union are plain numbers, for which every pattern of bits is a value; the type says
    // which one the library wrote, and it was all zero before.
    unsafe {
        match field.valueType {
            // No reading is as small as a whole number looks that was written without its type, which is then 0.
            0 if value.dVal.is_subnormal() => Ok(value.ullVal.cast_signed()),
            0 => Ok(value.dVal as i64),
            1 => Ok(value.uiVal.into()),
            // No counter comes that far; a negative number in the wrong type does.
            2 | 3 => Ok(value.ullVal.cast_signed()),
            4 => Ok(value.sllVal),
            5 => Ok(value.siVal.into()),
            6 => Ok(value.usVal.into()),
            _ => Err(NvmlError::NotSupported),
        }
    }
}

/// Error rates come as 4 bits of mantissa over 8 bits of exponent: m times 10 to the minus e. The lowest that can be
/// told has the exponent 255 and means none.
pub(super) fn error_rate(encoded: i64) -> f64 {
    let (mantissa, exponent) = ((encoded >> 8) & 0xf, encoded & 0xff);
    if exponent == 0xff { 0.0 } else { mantissa as f64 * 10f64.powi(-(exponent as i32)) }
}

/// The wrapper's errors cannot be copied; of those of a whole call only these matter.
fn again(error: &NvmlError) -> NvmlError {
    match error {
        NvmlError::GpuLost => NvmlError::GpuLost,
        NvmlError::ResetRequired => NvmlError::ResetRequired,
        error if is_not_offered(error) => NvmlError::NotSupported,
        NvmlError::NoPermission => NvmlError::NoPermission,
        NvmlError::Timeout => NvmlError::Timeout,
        NvmlError::UnexpectedVariant(code) => NvmlError::UnexpectedVariant(*code),
        // What was found before stands: it was not said to be over.
        _ => NvmlError::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_slowdown_times_follow_the_driver() {
        for old in [None, Some("550.54.15"), Some("580.65.06"), Some("odd")] {
            assert_eq!(slowdown_times(old), [252, 253], "{old:?}");
        }
        for new in ["580.82.07", "580.126.09", "590.10", "600"] {
            assert_eq!(slowdown_times(Some(new)), [270, 271], "{new}");
        }
    }

    #[test]
    fn error_rates_are_decoded() {
        assert_eq!(error_rate(0xfff), 0.0);
        assert_eq!(error_rate(0), 0.0);
        assert!((error_rate(0x50c) - 5e-12).abs() < 1e-20);
    }
}
