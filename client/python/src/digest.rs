//! Digests of parameters, to compare replicas: the sum over all 64-bit words of a mix of word and position, modulo 2^64.
//!
//! The sum may be taken in any order, so a device computes it in parallel and gets the same number. A word that
//! differs always changes it, because the mix is one to one. It finds errors; it does not protect against forgery.
//! `mainstay/_digest.py` has the same in operations of torch, for tensors on a device; a test compares the two.

use pyo3::prelude::*;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const FIRST: u64 = 0xff51_afd7_ed55_8ccd;
const SECOND: u64 = 0xc4ce_b9fe_1a85_ec53;

/// The maximum number of words of one tensor; the last position is used for its length.
const MAX_POSITIONS: u64 = 1 << 40;

#[inline(always)]
fn mix(word: u64, position: u64) -> u64 {
    let mut mixed = word ^ position.wrapping_mul(GOLDEN);
    mixed = mixed.wrapping_mul(FIRST);
    mixed ^= mixed >> 32;
    mixed = mixed.wrapping_mul(SECOND);
    mixed ^ mixed >> 29
}

fn digest(bytes: &[u8], tensor: u64) -> u64 {
    let first = tensor.wrapping_mul(MAX_POSITIONS);
    let (words, tail) = bytes.as_chunks::<8>();
    let mut sum = mix(bytes.len() as u64, first.wrapping_add(MAX_POSITIONS - 1));
    for (index, word) in words.iter().enumerate() {
        sum = sum.wrapping_add(mix(u64::from_le_bytes(*word), first.wrapping_add(index as u64)));
    }
    if !tail.is_empty() {
        let mut word = [0; 8];
        word[..tail.len()].copy_from_slice(tail);
        sum = sum.wrapping_add(mix(u64::from_le_bytes(word), first.wrapping_add(words.len() as u64)));
    }
    sum
}

/// The digest of `length` bytes at `address`, as tensor number `tensor` of several. Other threads run meanwhile.
///
/// For this package alone, which holds the tensor that owns the memory for the whole call.
#[pyfunction]
fn digest_memory(py: Python<'_>, address: usize, length: usize, tensor: u64) -> u64 {
    if address == 0 || length == 0 {
        return digest(&[], tensor);
    }
    // SAFETY: the caller has a contiguous tensor or array of that many bytes there and holds it during the call.
    // Another thread may write into it meanwhile, as into any tensor; then the digest is meaningless, but any bytes
    // are valid.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, length) };
    py.detach(|| digest(bytes, tensor))
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(digest_memory, module)?)
}
