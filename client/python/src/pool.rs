//! The memory of the launcher's keeper, as a rank uses it: its control page, its slots, and copies of many ranges
//! at once. `mainstay/_pool.py` decides what to store where; this module has the page's atomics and the copies.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::ptr::NonNull;

use mainstay_checkpoint_format::container::{self, Tensor};
use mainstay_checkpoint_format::control::{Answer, CONTROL_BYTES, Checked, Control, Slot, State};
use mainstay_checkpoint_format::{MAX_MANIFEST_BYTES, Manifest};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::copying::{self, Destination, Piece, Sealed, Source};

/// A file mapped for reading and writing, for as long as this value lives.
#[derive(Debug)]
struct Mapping {
    start: NonNull<std::ffi::c_void>,
    length: NonZeroUsize,
    owner: u32,
}

// SAFETY: the mapping is plain memory, valid until drop and bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; the control page is accessed as atomics, a slot only by the process that has taken it.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, length: usize, protection: ProtFlags) -> io::Result<Mapping> {
        let length = NonZeroUsize::new(length).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < length.get() as u64 {
            // Touching memory beyond a file's end would end this process.
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file is shorter than it should be",
            ));
        }
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing of ours.
        let start = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, file, 0)? };
        Ok(Mapping { start, length, owner: std::process::id() })
    }

    fn advise(&self, advice: MmapAdvise) -> io::Result<()> {
        // SAFETY: the range is our mapping; none of the advices given here changes what it holds.
        unsafe { madvise(self.start, self.length.get(), advice) }?;
        Ok(())
    }
}

fn both() -> ProtFlags {
    ProtFlags::PROT_READ | ProtFlags::PROT_WRITE
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child the range may belong to other memory by now: slots are not inherited by children.
        if self.owner == std::process::id() {
            // SAFETY: start and length are those of our mapping, which nothing refers to any more.
            let _ = unsafe { munmap(self.start, self.length.get()) };
        }
    }
}

/// A slot as it was read.
#[pyclass(frozen, name = "Slot", module = "mainstay._native")]
struct PySlot(Slot);

#[pymethods]
impl PySlot {
    #[getter]
    fn index(&self) -> usize {
        self.0.index
    }

    #[getter]
    fn state(&self) -> &'static str {
        match self.0.state {
            State::Free => "free",
            State::Filling => "filling",
            State::Filled => "filled",
            State::Sealing => "sealing",
            State::Sealed => "sealed",
            State::Damaged => "damaged",
        }
    }

    #[getter]
    fn file(&self) -> u64 {
        self.0.file
    }

    #[getter]
    fn capacity(&self) -> u64 {
        self.0.capacity
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch
    }

    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    #[getter]
    fn used(&self) -> u64 {
        self.0.used
    }

    #[getter]
    fn world_size(&self) -> u64 {
        self.0.world_size
    }
}

/// The control page of one rank's memory.
#[pyclass(frozen, name = "Control", module = "mainstay._native")]
struct PyControl(Mapping);

impl PyControl {
    fn page(&self) -> PyResult<Control<'_>> {
        // SAFETY: the mapping lives as long as `self`; the file is in a directory that only this user may write and is never
        // truncated by the keeper; this process touches it only through Control.
        let page = unsafe { Control::from_raw(self.0.start.as_ptr().cast(), self.0.length.get()) };
        page.map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

#[pymethods]
impl PyControl {
    /// Maps the page in `path`.
    #[new]
    fn open(path: PathBuf) -> PyResult<PyControl> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let control = PyControl(Mapping::new(&file, CONTROL_BYTES, both())?);
        control.page()?;
        Ok(control)
    }

    fn epoch(&self) -> PyResult<u64> {
        Ok(self.page()?.epoch())
    }

    fn keeper(&self) -> PyResult<u64> {
        Ok(self.page()?.pool_owner())
    }

    fn ask(&self, bytes: u64) -> PyResult<u64> {
        Ok(self.page()?.ask(bytes))
    }

    /// `None` while there is none.
    fn answer(&self, number: u64) -> PyResult<Option<bool>> {
        Ok(match self.page()?.answer(number) {
            Answer::None => None,
            Answer::Granted => Some(true),
            Answer::NoRoom | Answer::Failed => Some(false),
        })
    }

    fn slots(&self) -> PyResult<Vec<PySlot>> {
        Ok(self.page()?.all().map(PySlot).collect())
    }

    fn set_waits(&self, waits: bool) -> PyResult<()> {
        self.page()?.set_waits(waits);
        Ok(())
    }

    /// Takes a free slot that is large enough; `None` where there is none.
    fn take(&self, bytes: u64, epoch: u64, step: u64, world_size: u64) -> PyResult<Option<PySlot>> {
        Ok(self.page()?.take(bytes, epoch, step, world_size).map(PySlot))
    }

    /// Marks a slot as filled. False if the keeper took it back meanwhile.
    fn fill(&self, taken: &PySlot, used: u64) -> PyResult<bool> {
        Ok(self.page()?.fill(&taken.0, used).is_some())
    }

    /// Gives back a taken slot without filling it.
    fn abandon(&self, taken: &PySlot) -> PyResult<()> {
        let page = self.page()?;
        _ = page.advance(&taken.0, State::Free);
        Ok(())
    }

    fn is_still(&self, before: &PySlot) -> PyResult<bool> {
        Ok(self.page()?.is_still(&before.0))
    }

    /// The check result of this attempt's readers for a sealed slot: `None` if none has read it.
    fn checked(&self, slot: &PySlot, epoch: u64) -> PyResult<Option<bool>> {
        Ok(match self.page()?.checked(&slot.0, epoch) {
            Checked::No => None,
            Checked::Good => Some(true),
            Checked::Bad => Some(false),
        })
    }

    fn report_checked(&self, slot: &PySlot, epoch: u64, good: bool) -> PyResult<()> {
        self.page()?.report_checked(&slot.0, epoch, good);
        Ok(())
    }

    /// Claims the check of a slot for this process; false if another reader of this attempt has claimed it.
    fn begin_check(&self, slot: &PySlot, epoch: u64) -> PyResult<bool> {
        Ok(self.page()?.begin_check(&slot.0, epoch))
    }
}

/// A slot's memory.
#[pyclass(frozen, name = "SlotMemory", module = "mainstay._native")]
struct SlotMemory(Mapping);

#[pymethods]
impl SlotMemory {
    /// Maps the first `bytes` of a slot's file, and populates all its pages in this process's tables, so that the
    /// copy causes no page fault. Forked children do not inherit it.
    #[new]
    fn open(py: Python<'_>, path: PathBuf, bytes: usize) -> PyResult<SlotMemory> {
        let mapped = py.detach(|| {
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            let mapping = Mapping::new(&file, bytes, both())?;
            mapping.advise(MmapAdvise::MADV_DONTFORK)?;
            // Before Linux 5.14 the first copy pays for the pages.
            let _ = mapping.advise(MmapAdvise::MADV_POPULATE_WRITE);
            io::Result::Ok(mapping)
        });
        Ok(SlotMemory(mapped?))
    }

    #[getter]
    fn address(&self) -> usize {
        self.0.start.as_ptr() as usize
    }

    #[getter]
    fn length(&self) -> usize {
        self.0.length.get()
    }

    /// Copies pieces `(offset here, address, length)` into it, with as many threads. Other Python threads run meanwhile.
    ///
    /// For this package alone, which holds the owners of all addresses for the whole call.
    fn copy(&self, py: Python<'_>, pieces: Vec<(usize, usize, usize)>, threads: usize) -> PyResult<()> {
        let fits = |&(offset, _, length): &(usize, usize, usize)| {
            offset.checked_add(length).is_some_and(|end| end <= self.0.length.get())
        };
        if !pieces.iter().all(fits) {
            return Err(PyValueError::new_err("a piece lies beyond the slot"));
        }
        let base = self.address();
        let pieces =
            pieces.into_iter().map(|(offset, from, length)| Piece { to: base + offset, from, length });
        let pieces: Vec<Piece> = pieces.collect();
        // SAFETY: the destinations are in our mapping by the check above, which only the holder of the slot writes; the sources are
        // tensors, arrays and bytes that the caller holds.
        py.detach(|| unsafe { copying::copy(&pieces, threads) });
        Ok(())
    }
}

/// The header of a container: `(bytes, offset of each tensor, bytes of the whole file)`.
#[pyfunction]
fn container_header(
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, String, Vec<u64>)>,
) -> PyResult<(Vec<u8>, Vec<u64>, u64)> {
    let tensors = tensors.into_iter().map(|(name, dtype, shape)| Tensor { name, dtype, shape }).collect();
    let (bytes, header) = container::encode(&metadata.into_iter().collect(), tensors)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok((bytes, header.tensors.iter().map(|tensor| tensor.at).collect(), header.file_bytes))
}

/// A tensor of a container: name, dtype, shape, offset, bytes.
type TensorRow = (String, String, Vec<u64>, u64, u64);

/// The tensors of a container as `(name, dtype, shape, offset, bytes)`, by its header's bytes.
#[pyfunction]
fn container_tensors(header: &[u8], file_bytes: u64) -> PyResult<Vec<TensorRow>> {
    let header =
        container::decode(header, file_bytes).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let reported = |placed: container::PlacedTensor| {
        (placed.tensor.name, placed.tensor.dtype, placed.tensor.shape, placed.at, placed.bytes)
    };
    Ok(header.tensors.into_iter().map(reported).collect())
}

/// What is wrong with a manifest; `None` if it is intact.
#[pyfunction]
fn manifest_complaint(content: &[u8]) -> Option<String> {
    if content.len() > MAX_MANIFEST_BYTES {
        return Some("it is longer than any manifest".to_owned());
    }
    Manifest::decode(content).err().map(|error| error.to_string())
}

/// Reads chunks `first` to before `end` of a file of `size` bytes that was sealed in chunks with these checksums:
/// pieces `(offset, length, address, whether its memory is new)` are stored at their addresses, the rest is only
/// checked. Returns the first chunk whose bytes differ, or `None`. Other Python threads run meanwhile.
///
/// If `memory` is given (the file's mapping, or true), the file is in memory and is read through a mapping; such a
/// file belongs to the launcher and never becomes shorter.
///
/// For this package only, which holds the owners of all addresses for the whole call.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each of them is a plain fact of one file")]
fn read_verified(
    py: Python<'_>,
    descriptor: i32,
    size: u64,
    chunk: u64,
    sums: Vec<u64>,
    range: (usize, usize),
    pieces: Vec<(u64, u64, usize, bool)>,
    threads: usize,
    memory: FileMemory<'_>,
) -> PyResult<Option<usize>> {
    if chunk == 0 || size.div_ceil(chunk) != sums.len() as u64 {
        return Err(PyValueError::new_err("the checksums are not those of so many bytes"));
    }
    let mut at = 0;
    for &(offset, length, ..) in &pieces {
        let end = offset.checked_add(length).filter(|end| offset >= at && *end <= size);
        at = end.ok_or_else(|| PyValueError::new_err("pieces overlap, or lie beyond the file"))?;
    }
    let pieces: Vec<Destination> = pieces
        .into_iter()
        .map(|(offset, length, address, is_new)| Destination { offset, length, address, is_new })
        .collect();
    // SAFETY: the descriptor is the caller's and stays open during the call; ManuallyDrop leaves it open after it.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let fresh;
    let source = match &memory {
        FileMemory::Mapped(mapped) if mapped.length() as u64 >= size => {
            Source::Mapped { start: mapped.address(), populate: false }
        }
        FileMemory::Whether(true) if size > 0 => {
            let length = usize::try_from(size).map_err(|_| PyValueError::new_err("the file is too large"))?;
            fresh = Mapping::new(&file, length, ProtFlags::PROT_READ)?;
            Source::Mapped { start: fresh.start.as_ptr() as usize, populate: true }
        }
        _ => Source::File(&file),
    };
    let sealed = Sealed { size, chunk, sums: &sums };
    // SAFETY: the caller holds the destinations, which are its own new tensors and buffers, the open descriptor and the mapping, which
    // is as long as the file.
    let bad =
        py.detach(|| unsafe { copying::read_verified(&source, &sealed, range.0..range.1, &pieces, threads) });
    Ok(bad?)
}

/// Whether a file is in memory, and its mapping where there is one already.
#[derive(FromPyObject)]
enum FileMemory<'py> {
    Mapped(PyRef<'py, SlotMemory>),
    Whether(bool),
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySlot>()?;
    module.add_class::<PyControl>()?;
    module.add_class::<SlotMemory>()?;
    module.add_function(wrap_pyfunction!(container_header, module)?)?;
    module.add_function(wrap_pyfunction!(container_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(manifest_complaint, module)?)?;
    module.add_function(wrap_pyfunction!(read_verified, module)?)
}
