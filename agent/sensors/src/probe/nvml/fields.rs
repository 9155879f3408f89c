//! Values by field number: many of them in one call, some of them for each link.

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlValue_t};

use super::calls::{Handle, Nvml, NvmlResult, is_not_offered, or};

/// The GPU itself; each link has a separate scope.
pub(super) const GPU_SCOPE: u32 = 0;

/// Temperature of the memory.
pub(super) const MEMORY_TEMPERATURE: u32 = 82;
/// The recovery action that the driver reports for the GPU; it survives a restart of the agent, as XID 154 does not.
pub(super) const RECOVERY_ACTION: u32 = 230;
/// The margin below which clocks are reduced.
pub(super) const SLOWDOWN_MARGIN: u32 = 194;

/// Time for which heat and the power supply's brake reduced the clocks. NVIDIA changed these numbers in 580.82.
pub(super) fn slowdown_times(driver: Option<&str>) -> [u32; 2] {
    let mut parts = driver.unwrap_or_default().split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version >= (580, 82) { [270, 271] } else { [252, 253] }
}

/// Corrected and uncorrected ECC errors, since the last reset and over the lifetime.
pub(super) const ECC_CORRECTED: u32 = 3;
pub(super) const ECC_VOLATILE: u32 = 4;
pub(super) const ECC_AGGREGATE: u32 = 6;
/// Pages retired after many corrected errors and after an uncorrectable one, and whether some are pending.
pub(super) const PAGES_RETIRED: [u32; 2] = [29, 30];
pub(super) const PAGES_PENDING: u32 = 31;
/// Retransmitted PCIe packets.
pub(super) const PCIE_REPLAYS: u32 = 94;
/// Rows remapped after corrected and after uncorrected errors, whether some are pending, whether one failed.
pub(super) const REMAPPED_ROWS: [u32; 4] = [142, 143, 144, 145];

/// The result of a function or, if a library lacks it, the field with that number.
pub(super) fn or_field(nvml: &Nvml, gpu: Handle, result: NvmlResult<u64>, field: u32) -> NvmlResult<u64> {
    or(result, || whole(nvml, gpu, field))
}

/// A field of the GPU as a whole that is a counter.
pub(super) fn whole(nvml: &Nvml, gpu: Handle, field: u32) -> NvmlResult<u64> {
    let value = read(nvml, gpu, &[(field, GPU_SCOPE)]).pop().unwrap_or(Err(NvmlError::NotSupported))?;
    u64::try_from(value).map_err(|_| NvmlError::NotSupported)
}

/// Counters of a link: retransmitted packets, recoveries, damaged packets.
pub(super) const LINK_ERRORS: [u32; 3] = [161, 162, 163];
/// For links of the fifth generation: successful and failed recoveries, error rates of bits and of symbols, damaged packets
/// received, errors that the link itself found.
pub(super) const LINK_5: [u32; 6] = [213, 214, 220, 222, 208, 211];

/// Reads fields of scopes, in this order; each is an integer or the reason why there is none.
pub(super) fn read(nvml: &Nvml, gpu: Handle, wanted: &[(u32, u32)]) -> Vec<NvmlResult<i64>> {
    let mut fields: Vec<nvmlFieldValue_t> = wanted
        .iter()
        .map(|&(field, scope)| nvmlFieldValue_t {
            fieldId: field,
            scopeId: scope,
            timestamp: 0,
            latencyUsec: 0,
            valueType: 0,
            // A library that does not write a field has not reported it.
            nvmlReturn: 3,
            value: nvmlValue_t { ullVal: 0 },
        })
        .collect();
    // The most that every driver accepts in one call.
    const MAX_FIELDS_PER_CALL: usize = 64;
    let mut read = Vec::new();
    for some in fields.chunks_mut(MAX_FIELDS_PER_CALL) {
        match gpu.fields(nvml, some) {
            Ok(()) => read.extend(some.iter().map(number)),
            // Some libraries refuse all fields because of an unknown one, with one error or another.
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

fn number(field: &nvmlFieldValue_t) -> NvmlResult<i64> {
    nvml_try(field.nvmlReturn)?;
    let value = &field.value;
    // SAFETY: all members of the union are plain numbers, valid for every bit pattern; the type names the one that the
    // library wrote, and the union was all zero before.
    unsafe {
        match field.valueType {
            // A subnormal is an integer that was written without its type, which is then 0: no reading is that small.
            0 if value.dVal.is_subnormal() => Ok(value.ullVal.cast_signed()),
            0 => Ok(value.dVal as i64),
            1 => Ok(value.uiVal.into()),
            // A value this large is a negative number with the wrong type: no counter reaches it.
            2 | 3 => Ok(value.ullVal.cast_signed()),
            4 => Ok(value.sllVal),
            5 => Ok(value.siVal.into()),
            6 => Ok(value.usVal.into()),
            _ => Err(NvmlError::NotSupported),
        }
    }
}

/// Error rates are encoded as 4 bits of mantissa above 8 bits of exponent: m times 10 to the minus e. The lowest rate has
/// the exponent 255 and means none.
pub(super) fn error_rate(encoded: i64) -> f64 {
    let (mantissa, exponent) = ((encoded >> 8) & 0xf, encoded & 0xff);
    if exponent == 0xff { 0.0 } else { mantissa as f64 * 10f64.powi(-(exponent as i32)) }
}

/// The wrapper's errors cannot be copied; for a whole call only these matter.
fn again(error: &NvmlError) -> NvmlError {
    match error {
        NvmlError::GpuLost => NvmlError::GpuLost,
        NvmlError::ResetRequired => NvmlError::ResetRequired,
        error if is_not_offered(error) => NvmlError::NotSupported,
        NvmlError::NoPermission => NvmlError::NoPermission,
        NvmlError::Timeout => NvmlError::Timeout,
        NvmlError::UnexpectedVariant(code) => NvmlError::UnexpectedVariant(*code),
        // Keeps earlier results: no error says that they are no longer valid.
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
