//! The kernels of the probe, as the host computes them.

use std::ffi::{c_int, c_void};

use crate::place;
use crate::script::{INVALID_VALUE, Script};

/// The kernels by their numbers, from 1.
pub(crate) const NAMES: [&str; 3] = ["mainstay_fill", "mainstay_compare", "mainstay_product"];

fn word(place: usize, seed: u32) -> u32 {
    let place = u32::try_from(place).unwrap_or(u32::MAX);
    place.wrapping_mul(0x9e37_79b1) ^ seed
}

/// # Safety
/// `parameters` has a pointer to each argument of the kernel, whose own pointers have room for what it works on.
pub(crate) unsafe fn run(
    kernel: usize,
    parameters: *mut *mut c_void,
    threads: (u64, u64),
    script: &Script,
) -> c_int {
    // SAFETY: the caller's promise, for each of these.
    let long = |at: usize| unsafe { (*parameters.add(at)).cast::<u64>().read() };
    // SAFETY: as above.
    let int = |at: usize| unsafe { (*parameters.add(at)).cast::<u32>().read() };
    match kernel {
        1 | 2 => {
            let (count, seed) = (int(1) as usize, int(2));
            if threads.0 < count as u64 {
                return INVALID_VALUE;
            }
            // SAFETY: as above.
            let words = unsafe { std::slice::from_raw_parts_mut(place::<u32>(long(0)), count) };
            if kernel == 1 {
                words.iter_mut().enumerate().for_each(|(place, of)| *of = word(place, seed));
            } else {
                let wrong = words.iter().enumerate().filter(|(place, of)| **of != word(*place, seed)).count();
                // SAFETY: as above.
                unsafe { *place::<u32>(long(3)) += u32::try_from(wrong).unwrap_or(u32::MAX) };
            }
            0
        }
        3 => {
            let size = int(3) as usize;
            if threads.0 < size as u64 || threads.1 < size as u64 {
                return INVALID_VALUE;
            }
            let all = size * size;
            // SAFETY: as above.
            let (left, right, result) = unsafe {
                (
                    std::slice::from_raw_parts(place::<f32>(long(0)), all),
                    std::slice::from_raw_parts(place::<f32>(long(1)), all),
                    std::slice::from_raw_parts_mut(place::<f32>(long(2)), all),
                )
            };
            for (place, of) in result.iter_mut().enumerate() {
                let (row, column) = (place / size, place % size);
                *of = (0..size).map(|inner| left[row * size + inner] * right[inner * size + column]).sum();
            }
            if script.wrong == "product" {
                result[all / 2] += 1.0;
            }
            0
        }
        _ => INVALID_VALUE,
    }
}
