//! A disk that fails at any operation, is full, or is read-only: older steps stay, no partial step is offered, and steps in
//! memory are written when the disk works again.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::common;

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI64, Ordering};

use common::rank::{Rank, until};
use common::{manifest, write_step};
use mainstay_checkpoint_format::control::Answer;
use mainstay_tier::disk::{self, Doubts, Keep, Pace, StdVolume};
use mainstay_tier::disk::{Sink, Volume};
use mainstay_tier::pool::{PoolOwner, Settings};
use mainstay_tier::seal::ReadAt;
use nix::libc::{EIO, ENOSPC, EROFS};

/// The real disk until a number of changes; then one change fails, or all following ones.
struct Failing {
    left: AtomicI64,
    errno: i32,
    for_good: bool,
}

impl Failing {
    fn change<T>(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        if left == 0 || (left < 0 && self.for_good) {
            return Err(io::Error::from_raw_os_error(self.errno));
        }
        make()
    }

    fn has_failed(&self) -> bool {
        self.left.load(Ordering::SeqCst) < 0
    }
}

struct FailingSink<'a>(&'a Failing, Box<dyn Sink + 'a>);

impl Sink for FailingSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.change(|| self.1.write(bytes))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.change(|| self.1.sync())
    }
}

impl Volume for Failing {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.change(|| StdVolume.make_directory(path))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let sink: Box<dyn Sink> = self.change(|| {
            static DISK: StdVolume = StdVolume;
            DISK.create(path)
        })?;
        Ok(Box::new(FailingSink(self, sink)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|| StdVolume.rename(from, to))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.change(|| StdVolume.sync_directory(path))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.change(|| StdVolume.remove_file(path))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.change(|| StdVolume.remove_directory(path))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        StdVolume.list(path)
    }

    fn is_directory(&self, path: &Path) -> bool {
        StdVolume.is_directory(path)
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        static DISK: StdVolume = StdVolume;
        DISK.open(path)
    }
}

#[test]
fn after_any_failure_of_a_write_the_previous_step_stays_and_the_next_try_succeeds() {
    let tried = Cell::new(0);
    for errno in [EIO, ENOSPC, EROFS] {
        for for_good in [false, true] {
            for at in 0.. {
                let home = testing::tempdir().unwrap();
                write_step(home.path(), 0, 10, 1, b"before");
                let volume = Failing { left: AtomicI64::new(at), errno, for_good };
                let (manifest, bytes) = manifest("job", 0, 20, 0, 1, b"after");
                let write = |volume: &dyn Volume| {
                    disk::write(volume, home.path(), &manifest, &bytes, &Pace::default(), &|| false)
                };
                let failed = write(&volume);
                if failed.is_ok() {
                    disk::prune(
                        &volume,
                        home.path(),
                        Keep { steps: 1, bytes: None },
                        &Doubts::default(),
                        None,
                    );
                }
                let offered = common::offered(&StdVolume, home.path()).map(|(step, _)| step);
                let may = if failed.is_ok() { &[Some(20)][..] } else { &[Some(10), Some(20)] };
                assert!(
                    may.contains(&offered),
                    "{offered:?} after errno {errno} at operation {at}: {failed:?}"
                );
                write(&StdVolume).unwrap_or_else(|error| panic!("operation {at}, errno {errno}: {error}"));
                assert_eq!(common::offered(&StdVolume, home.path()).map(|(step, _)| step), Some(20));
                tried.set(tried.get() + 1);
                if !volume.has_failed() {
                    break;
                }
            }
        }
    }
    assert!(tried.get() > 6 * 5, "{} operations failed", tried.get());
}

/// A separate small file system; none if this process may not mount one.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path) -> Option<Mounted> {
        fs::create_dir_all(at).unwrap();
        mount(&["-t", "tmpfs", "-o", "size=1m", "none"], at).then(|| Mounted(at.to_owned()))
    }

    /// A file system can become read-only only when no file of it is open for writing: the pool owner may still have one.
    fn remount(&self, how: &str) {
        until(|| mount(&["-o", &format!("remount,{how}")], &self.0), |remounted| *remounted);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mount(options: &[&str], at: &Path) -> bool {
    let mounted = Command::new("mount").args(options).arg(at).output();
    mounted.is_ok_and(|mounted| mounted.status.success())
}

fn pool_owner(pools: &Path, checkpoints: &Path) -> PoolOwner {
    let settings = Settings {
        root: pools.to_owned(),
        directory: checkpoints.to_owned(),
        job: "job".into(),
        run: "run".into(),
        world_size: 1,
        ranks: 0..1,
        keep: Keep { steps: 2, bytes: None },
        slots: 3,
        memory: None,
        rate: None,
    };
    PoolOwner::start(settings).expect("a pool owner")
}

fn offered(checkpoints: &Path) -> Option<u64> {
    common::offered(&StdVolume, checkpoints).map(|(step, _)| step)
}

#[test]
fn a_full_or_read_only_disk_loses_no_step_that_is_in_memory() {
    let (home, pools) = (testing::tempdir().unwrap(), testing::tempdir().unwrap());
    let Some(disk) = Mounted::new(&home.path().join("disk")) else {
        return testing::skip("this process may mount no file system");
    };
    let checkpoints = disk.0.join("steps");
    for fault in ["full", "ro"] {
        let pool_owner = pool_owner(pools.path(), &checkpoints);
        let rank = Rank::of(pool_owner.directory(), 0, 1);
        assert_eq!(rank.reserve(100_000), Answer::Granted);
        let step = offered(&checkpoints).unwrap_or(0) + 1;
        rank.save(step);
        until(|| offered(&checkpoints), |offered| *offered == Some(step));
        let filler = disk.0.join("filler");
        if fault == "full" {
            // Fill the file system.
            let mut size = 1 << 20;
            while size > 0 {
                size = if fs::write(&filler, vec![1; size]).is_ok() { 0 } else { size - 4096 };
            }
        } else {
            disk.remount("ro");
        }
        rank.save(step + 1);
        let mut messages = Vec::new();
        until(
            || {
                messages.extend(pool_owner.messages());
                !messages.is_empty()
            },
            |received| *received,
        );
        assert_eq!(offered(&checkpoints), Some(step), "what was there is there still");
        // The job continues to save, and each of its newest steps is in memory.
        rank.save(step + 2);
        until(|| rank.sealed(), |sealed| sealed.contains(&(step + 2)));
        if fault == "full" {
            fs::remove_file(&filler).unwrap();
        } else {
            disk.remount("rw");
        }
        assert_eq!(pool_owner.finish(), Vec::<String>::new());
        assert_eq!(offered(&checkpoints), Some(step + 2));
    }
}
