//! The files of one rank's memory, and the lock of a pool.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_checkpoint_format::control::{CONTROL_BYTES, CONTROL_NAME, Control, ControlError};
use mainstay_checkpoint_format::{MAX_MANIFEST_BYTES, Manifest};
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};

use crate::os::ControlPage;

/// One rank's memory.
#[derive(Debug)]
pub(super) struct RankMemory {
    pub(super) rank: u32,
    pub(super) directory: PathBuf,
    page: ControlPage,
    /// The files of the slots, by index.
    pub(super) files: Vec<Arc<File>>,
    next_file: u64,
    /// Capacity of a slot's next new file, bytes.
    pub(super) requested_bytes: u64,
}

pub(super) fn rank_directory(pool: &Path, rank: u32) -> PathBuf {
    pool.join(format!("rank-{rank:05}"))
}

/// Path of a slot's file.
pub(super) fn slot_path(directory: &Path, index: usize, number: u64) -> PathBuf {
    directory.join(format!("slot-{index}.{number}"))
}

/// Path of the manifest of a sealed slot.
pub(super) fn manifest_path(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("slot-{index}.json"))
}

/// Creates a file with all its memory allocated: a lack of memory is an error here, not a signal during a copy.
pub(super) fn allocate(path: &Path, bytes: u64) -> io::Result<File> {
    let _ = fs::remove_file(path);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let length = i64::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
    match fallocate(&file, FallocateFlags::empty(), 0, length.max(1)) {
        Ok(()) => Ok(file),
        Err(error) => {
            let _ = fs::remove_file(path);
            Err(error.into())
        }
    }
}

impl RankMemory {
    /// Creates the directory of a rank with its page.
    pub(super) fn make(pool: &Path, rank: u32, world_size: u32, epoch: u64) -> io::Result<RankMemory> {
        let directory = rank_directory(pool, rank);
        DirBuilder::new().mode(0o700).create(&directory)?;
        let aside = directory.join(format!("{CONTROL_NAME}.new"));
        let file = allocate(&aside, CONTROL_BYTES as u64)?;
        let page = ControlPage::of(&file)?;
        let _ = Control::format(
            page.words().map_err(io::Error::other)?,
            rank,
            world_size,
            epoch,
            std::process::id(),
        );
        fs::rename(&aside, directory.join(CONTROL_NAME))?;
        Ok(RankMemory { rank, directory, page, files: Vec::new(), next_file: 0, requested_bytes: 0 })
    }

    /// Opens the memory that a launcher left behind.
    pub(super) fn open(directory: &Path) -> io::Result<RankMemory> {
        let path = directory.join(CONTROL_NAME);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let page = ControlPage::of(&file)?;
        let control = page.control().map_err(io::Error::other)?;
        let rank = u32::try_from(control.rank()).map_err(io::Error::other)?;
        let slots: Vec<_> = control.all().collect();
        let files = slots
            .iter()
            .map(|slot| crate::disk::open_own(&slot_path(directory, slot.index, slot.file)).map(Arc::new));
        let files = files.collect::<io::Result<Vec<_>>>()?;
        Ok(RankMemory {
            rank,
            directory: directory.to_owned(),
            page,
            files,
            next_file: 0,
            requested_bytes: 0,
        })
    }

    /// The page, which this process has created or checked.
    pub(super) fn control(&self) -> Result<Control<'_>, ControlError> {
        self.page.control()
    }

    /// The name of the next file of a slot.
    pub(super) fn next_file(&mut self) -> u64 {
        self.next_file += 1;
        self.next_file
    }

    /// Puts an allocated file into a slot that no rank may take now.
    pub(super) fn install(&mut self, index: usize, number: u64, file: File, bytes: u64) {
        let Ok(control) = self.page.control() else { return };
        let old = control.slot(index);
        control.set_file(index, number, bytes);
        let file = Arc::new(file);
        if index < self.files.len() {
            let _ = fs::remove_file(slot_path(&self.directory, index, old.file));
            self.files[index] = file;
        } else {
            self.files.push(file);
        }
    }

    /// Writes the manifest next to a slot atomically.
    pub(super) fn lay_manifest(&self, index: usize, manifest: &Manifest) -> io::Result<()> {
        let path = manifest_path(&self.directory, index);
        let aside = path.with_extension("new");
        fs::write(&aside, manifest.encode())?;
        fs::rename(&aside, path)
    }

    /// The manifest next to a slot, if it is intact.
    pub(super) fn manifest(&self, index: usize) -> Option<Manifest> {
        let path = manifest_path(&self.directory, index);
        let bytes = fs::metadata(&path).ok().filter(|found| found.len() <= MAX_MANIFEST_BYTES as u64);
        Manifest::decode(&bytes.and_then(|_| fs::read(&path).ok())?).ok()
    }
}

/// Takes the lock of a pool; none if another process holds it.
pub(super) fn lock_file(path: &Path) -> io::Result<Option<Flock<File>>> {
    let file = File::options().create(true).append(true).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => {
            // If the file was removed or created again meanwhile, this is not the pool's lock.
            let (mine, there) = (lock.metadata()?, fs::metadata(path));
            Ok(there.is_ok_and(|there| there.ino() == mine.ino()).then_some(lock))
        }
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error.into()),
    }
}

pub(super) fn lives(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}
