//! Checksums of checkpoint files: XXH3 with 128 bits, as 32 hexadecimal digits, most significant first.
//!
//! It finds torn writes and flipped bits at the speed of memory; it does not protect against forged files.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

use pyo3::prelude::*;
use twox_hash::XxHash3_128;

/// Large enough that the read call does not count, small enough to stay in the second-level cache.
const READ_BYTES: usize = 256 << 10;

/// `(bytes, checksum)` of the whole file behind an open descriptor, whose position stays where it is.
/// Other threads run meanwhile.
#[pyfunction]
fn checksum_file(py: Python<'_>, descriptor: RawFd) -> PyResult<(u64, String)> {
    py.detach(|| read_through(descriptor)).map_err(PyErr::from)
}

/// The checksum of `content`.
#[pyfunction]
fn checksum_bytes(content: &[u8]) -> String {
    digits(XxHash3_128::oneshot(content))
}

fn read_through(descriptor: RawFd) -> io::Result<(u64, String)> {
    // SAFETY: the descriptor is the caller's and stays open during the call; ManuallyDrop leaves it open after it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let mut hasher = XxHash3_128::new();
    let mut chunk = vec![0; READ_BYTES];
    let mut offset = 0;
    loop {
        match file.read_at(&mut chunk, offset) {
            Ok(0) => return Ok((offset, digits(hasher.finish_128()))),
            Ok(count) => {
                hasher.write(&chunk[..count]);
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn digits(checksum: u128) -> String {
    format!("{checksum:032x}")
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(checksum_file, module)?)?;
    module.add_function(wrap_pyfunction!(checksum_bytes, module)?)
}
