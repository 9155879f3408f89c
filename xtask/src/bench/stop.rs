//! Benches on one machine exclude each other, and a stopped bench ends everything that it has started.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use super::process::{family, is_over};
use crate::paths;

/// The time from SIGTERM to SIGKILL for started processes: a launcher ends its ranks in that time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether this process was asked to stop.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// Holds the lock of this machine's benches until it is dropped; the kernel frees it if this process dies.
pub fn alone() -> Result<File> {
    hold(&std::env::temp_dir().join("mainstay-bench.lock"))
}

fn hold(path: &Path) -> Result<File> {
    // The file of another user can be read and locked, but not written.
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .or_else(|error| File::open(path).map_err(|_| error))
        .with_context(|| format!("opening {}", path.display()))?;
    if file.try_lock().is_err() {
        let mut owner = String::new();
        let _ = file.read_to_string(&mut owner);
        let owner = owner.trim();
        bail!(
            "another bench runs on this machine ({owner}): wait for it or stop it, both would measure each other"
        );
    }
    let place = std::env::current_dir().unwrap_or_default();
    // Only a text for the message above: the lock is what counts.
    let _ = file.set_len(0);
    let _ = file.rewind();
    let _ = writeln!(file, "process {} in {}", std::process::id(), place.display());
    Ok(file)
}

/// From now on SIGINT, SIGTERM and SIGHUP end everything below this process first. Jobs are in separate process
/// groups, which a terminal's Ctrl-C does not reach.
pub fn end_children_with_us() -> Result<()> {
    // An orphan becomes a child of this process, and is found below it.
    prctl::set_child_subreaper(true).context("adopting orphans")?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("handling signals")?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            STOPPING.store(true, Ordering::Relaxed);
            eprintln!("signal {signal}: ending what was started; figures measured so far are kept");
            end_all();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Whether this process was asked to stop: nothing more is started then.
pub fn is_stopping() -> bool {
    STOPPING.load(Ordering::Relaxed)
}

/// A new folder in memory, after the removal of those of this name that killed benches left: they may hold
/// gigabytes. There is one bench at a time, so that none of them has an owner.
pub fn leftover_free(name: &str) -> Result<TempDir> {
    let memory = paths::memory();
    for entry in fs_err::read_dir(&memory)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(name) {
            let _ = fs_err::remove_dir_all(entry.path());
        }
    }
    tempfile::Builder::new().prefix(name).tempdir_in(memory).context("making a folder in memory")
}

/// Ends all processes below this one.
fn end_all() {
    let began = Instant::now();
    let mut asked = BTreeSet::new();
    loop {
        let own = std::process::id().cast_signed();
        let left: Vec<i32> = family(own).into_iter().filter(|pid| *pid != own && !is_over(*pid)).collect();
        if left.is_empty() {
            return;
        }
        let late = began.elapsed() > PATIENCE;
        for pid in &left {
            let signal = if late { Signal::SIGKILL } else { Signal::SIGTERM };
            if late || asked.insert(*pid) {
                // It may have ended in between.
                let _ = kill(Pid::from_raw(*pid), signal);
                // A stopped process receives no signal but SIGKILL and this one.
                let _ = kill(Pid::from_raw(*pid), Signal::SIGCONT);
            }
        }
        if began.elapsed() > PATIENCE * 2 {
            return eprintln!("some processes do not end: {left:?}");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_second_bench_is_refused_and_the_first_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lock");
        let first = hold(&path).expect("the first");
        let refused = hold(&path).expect_err("the second").to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        drop(first);
        // A parallel test that starts a program has a copy of the lock between fork and exec.
        while hold(&path).is_err() {
            thread::yield_now();
        }
    }

    /// In a separate process, because it adopts orphans and ends all processes below it.
    #[test]
    fn a_bench_that_is_stopped_ends_children_and_their_orphans() {
        if std::env::var_os("MAINSTAY_STOPPED_BENCH").is_some() {
            end_children_with_us().expect("signals");
            // One below the other, in another session.
            let script =
                "setsid sh -c 'trap \"echo ended; exit\" TERM; echo $$; while :; do sleep 1; done' & wait";
            let mut child = Command::new("sh").args(["-c", script]).spawn().expect("a shell");
            let _ = child.wait();
            loop {
                thread::park();
            }
        }
        let me = std::env::current_exe().expect("this test");
        let mut bench = Command::new(me)
            .args(["--exact", "bench::stop::tests::a_bench_that_is_stopped_ends_children_and_their_orphans"])
            .arg("--nocapture")
            .env("MAINSTAY_STOPPED_BENCH", "1")
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a bench");
        let out = bench.stdout.take().expect("its output");
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(out));
        let orphan: i32 =
            lines.find_map(|line| line.ok()?.trim().parse().ok()).expect("the orphan's process");
        kill(Pid::from_raw(bench.id().cast_signed()), Signal::SIGTERM).expect("stopping it");
        let status = bench.wait().expect("its end");
        assert_eq!(status.code(), Some(128 + 15));
        // It received SIGTERM, which started processes do not block.
        assert!(lines.any(|line| line.is_ok_and(|line| line == "ended")));
        // It ended before the bench did, and no process reaped it: the rest of it is no running process.
        assert!(is_over(orphan));
    }
}
