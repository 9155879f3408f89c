//! Benches on one machine exclude each other, and a stopped bench ends everything that it has started.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;

use super::process::family;

/// The time from SIGTERM to SIGKILL for started processes: a launcher ends its ranks in that time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Holds the lock of this machine's benches until it is dropped; the kernel frees it if this process dies.
///
/// # Errors
/// Another bench runs: its figures and ours would measure each other.
pub fn alone() -> Result<File> {
    hold(&std::env::temp_dir().join("mainstay-bench.lock"))
}

fn hold(path: &Path) -> Result<File> {
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    // The file of another user can be read and locked, but not written.
    let mut file = open()
        .or_else(|error| File::open(path).map_err(|_| error))
        .with_context(|| format!("opening {}", path.display()))?;
    if file.try_lock().is_err() {
        let mut owner = String::new();
        let _ = file.read_to_string(&mut owner);
        bail!(
            "another bench runs on this machine ({}): wait for it or stop it, both would measure each other",
            owner.trim()
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
///
/// # Errors
/// The signals cannot be blocked, or the thread cannot be started.
pub fn end_children_with_us() -> Result<()> {
    // An orphan becomes a child of this process, and is found below it.
    prctl::set_child_subreaper(true).context("adopting orphans")?;
    // Not with a mask and sigwait: started programs inherit a mask, and would not receive SIGTERM either.
    let note = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores into an atomic, which is allowed in a signal handler.
        unsafe { sigaction(signal, &note) }.with_context(|| format!("handling {signal}"))?;
    }
    thread::Builder::new()
        .name("stop".to_owned())
        .spawn(|| {
            let signal = loop {
                match SIGNAL.load(Ordering::Relaxed) {
                    0 => thread::sleep(Duration::from_millis(50)),
                    signal => break signal,
                }
            };
            eprintln!("signal {signal}: ending what was started; figures measured so far are kept");
            end_all(PATIENCE);
            std::process::exit(128 + signal);
        })
        .context("starting a thread for signals")?;
    Ok(())
}

/// The signal that asked this process to stop; 0 for none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: i32) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// Whether this process was asked to stop: nothing more is started then.
pub fn is_stopping() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// Ends all processes below this one.
fn end_all(patience: Duration) {
    let began = Instant::now();
    let mut reported = std::collections::BTreeSet::new();
    loop {
        let left = below();
        if left.is_empty() {
            return;
        }
        let late = began.elapsed() > patience;
        for pid in left {
            let signal = if late { Signal::SIGKILL } else { Signal::SIGTERM };
            if late || reported.insert(pid) {
                // It may have ended in between.
                let _ = kill(Pid::from_raw(pid), signal);
                // A stopped process receives no signal but SIGKILL and this one.
                let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
            }
        }
        if began.elapsed() > patience * 2 {
            return eprintln!("some processes do not end: {:?}", below());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes below this one that still run. Ended ones wait for a parent that no longer polls.
fn below() -> Vec<i32> {
    let own = std::process::id().cast_signed();
    let runs = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    };
    family(own).into_iter().filter(|pid| *pid != own).filter(runs).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_second_bench_is_refused_and_the_first_is_named() {
        let path = std::env::temp_dir().join(format!("mainstay-lock-{}", std::process::id()));
        let first = hold(&path).expect("the first");
        let refused = hold(&path).expect_err("the second").to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        drop(first);
        // A parallel test that starts a program has a copy of the lock between fork and exec.
        while hold(&path).is_err() {
            thread::yield_now();
        }
        fs::remove_file(&path).expect("the lock file goes");
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
        let stat = fs::read_to_string(format!("/proc/{orphan}/stat")).unwrap_or_default();
        assert!(!stat.contains(") S") && !stat.contains(") R"), "{stat}");
    }
}
