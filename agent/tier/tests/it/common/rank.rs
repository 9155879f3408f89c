//! A simulated rank that uses the same control page as a real one.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::control::{Answer, BELL_NAME, Control, ControlWords, Slot, State};

use super::container;

/// A rank that behaves like the client.
pub struct Rank {
    pool: PathBuf,
    home: PathBuf,
    rank: u32,
    world_size: u32,
    pub epoch: u64,
    /// Bytes of its state.
    pub size: usize,
}

impl Rank {
    pub fn of(pool: &Path, rank: u32, world_size: u32) -> Rank {
        let home = pool.join(format!("rank-{rank:05}"));
        Rank { pool: pool.to_owned(), home, rank, world_size, epoch: 0, size: 5000 }
    }

    /// Accesses the page through the file, word by word: a test needs no mapping. Changes are written back as one process would make them.
    pub fn with<T>(&self, act: impl FnOnce(&Control<'_>) -> T) -> T {
        let file = OpenOptions::new().read(true).write(true).open(self.home.join("control")).unwrap();
        let page = mapped(&file);
        act(&Control::new(&page).expect("a page"))
    }

    pub fn ring(&self) {
        let _ = UnixDatagram::unbound().unwrap().send_to(b"!", self.pool.join(BELL_NAME));
    }

    pub fn reserve(&self, bytes: u64) -> Answer {
        let number = self.with(|page| page.ask(bytes));
        self.ring();
        until(|| self.with(|page| page.answer(number)), |answer| *answer != Answer::None)
    }

    pub fn take(&self, step: u64) -> Slot {
        let taken = || {
            let bytes = self.bytes(step).len() as u64;
            let slot = self.with(|page| page.take(bytes, self.epoch, step, self.world_size.into()));
            self.with(|page| page.set_waits(slot.is_none()));
            self.ring();
            slot
        };
        until(taken, Option::is_some).unwrap()
    }

    pub fn bytes(&self, step: u64) -> Vec<u8> {
        let state = vec![step as u8 ^ self.rank as u8; self.size];
        container("job", self.epoch, step, self.rank, self.world_size, &state)
    }

    pub fn file(&self, slot: &Slot) -> File {
        let path = self.home.join(format!("slot-{}.{}", slot.index, slot.file));
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    pub fn fill(&self, slot: &Slot, step: u64) -> bool {
        self.fill_in(&self.file(slot), slot, step)
    }

    /// Fills a slot through an open file, like a rank that keeps it mapped.
    pub fn fill_in(&self, file: &File, slot: &Slot, step: u64) -> bool {
        let bytes = self.bytes(step);
        file.write_all_at(&bytes, 0).unwrap();
        let filled = self.with(|page| page.fill(slot, bytes.len() as u64)).is_some();
        self.ring();
        filled
    }

    pub fn save(&self, step: u64) {
        let slot = self.take(step);
        assert!(self.fill(&slot, step));
    }

    pub fn sealed(&self) -> Vec<u64> {
        let slots: Vec<Slot> = self.with(|page| page.all().collect());
        let mut steps: Vec<u64> =
            slots.iter().filter(|slot| slot.state == State::Sealed).map(|slot| slot.step).collect();
        steps.sort_unstable();
        steps
    }
}

/// A shared mapping of the page, for one step of a test.
fn mapped(file: &File) -> Page {
    use nix::sys::mman::{MapFlags, ProtFlags, mmap};
    let length = std::num::NonZeroUsize::new(4096).unwrap();
    let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new shared mapping of a page of this length; it is unmapped in drop.
    Page(unsafe { mmap(None, length, both, MapFlags::MAP_SHARED, file, 0).unwrap() })
}

struct Page(std::ptr::NonNull<std::ffi::c_void>);

impl std::ops::Deref for Page {
    type Target = ControlWords;

    fn deref(&self) -> &ControlWords {
        // SAFETY: mapped as long as `self`, page aligned, and accessed as atomics only.
        unsafe { Control::words_at(self.0.as_ptr().cast(), 4096).unwrap() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference is left.
        unsafe { nix::sys::mman::munmap(self.0, 4096).unwrap() };
    }
}

pub fn until<T>(mut look: impl FnMut() -> T, good: impl Fn(&T) -> bool) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let seen = look();
        if good(&seen) {
            return seen;
        }
        assert!(Instant::now() < end, "it did not come to pass within a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}
