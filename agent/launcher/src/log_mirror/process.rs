//! The mirror's process. Its main thread copies and may hang; another one notices that, and keeps the local directory
//! small.

use std::fs::{self, File};
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mainstay_journal::store::learned;
use mainstay_sys::clock;
use mainstay_sys::private_directory::private_directory;
use nix::fcntl::Flock;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::statvfs::statvfs;

use super::MirrorReport;
use super::copy::{Copier, Progress, make_room};
use crate::paths::{self, new_run_dir};

/// How often the local directory is read.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// How often copying is tried that fails after the launcher has ended, and for how long.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

/// After this time without an answer the log directory counts as silent.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes of output in the local directory, and their largest share of its file system, which may be memory.
const MAX_LOCAL_BYTES: u64 = 512 << 20;
const SHARE_DIVISOR: u64 = 4;

/// The name of local directories, which are in the runtime directory.
const LOCAL_NAME: &str = "logs-";

enum Order {
    Copy,
    End,
}

/// Creates the run's directory in the log directory, and copies into it what the launcher, at the other end of standard
/// input, and its ranks write into a local directory.
pub fn mirror(log_dir: &Path, runtime_root: &Path, run_id: &str) {
    let mut ended_by_others = SigSet::empty();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGXCPU,
    ] {
        ended_by_others.add(signal);
    }
    // What ends a job is sent to all its processes; this one ends when all is copied.
    let _ = ended_by_others.thread_block();
    let opened = open_local(runtime_root)
        .map_err(|error| format!("creating a directory in {}: {error}", runtime_root.display()))
        .and_then(|(home, lock)| match new_run_dir(log_dir, run_id) {
            Ok(published) => Ok((published, home, lock)),
            Err(error) => {
                let _ = fs::remove_dir_all(home);
                Err(error.to_string())
            }
        });
    let (published, home, lock) = match opened {
        Ok(opened) => opened,
        Err(error) => return report(&MirrorReport::Failed(error)),
    };
    let (Some(log_dir), Some(run)) = (published.parent(), published.file_name()) else { return };
    if published.to_str().is_none() || home.to_str().is_none() {
        return report(&MirrorReport::Failed("its path is not UTF-8".to_owned()));
    }
    // The run's directory has the same name in both.
    let local = home.join(run);
    if let Err(error) = fs::create_dir(&local) {
        return report(&MirrorReport::Failed(format!("{}: {error}", local.display())));
    }
    report(&MirrorReport::Opened { published: published.clone(), local });
    learned::forget_the_oldest(&log_dir.join(learned::DIRECTORY));

    let progress = Arc::new(Mutex::new(Progress::default()));
    let watched = (Arc::clone(&progress), home.clone());
    let watching = std::thread::Builder::new().name("watch".to_owned());
    // Without it, neither silence is reported nor room made.
    let _ = watching.spawn(move || watch(&watched.0, &watched.1));
    let (order, orders) = channel();
    let reading = std::thread::Builder::new().name("orders".to_owned());
    let read = reading.spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let sent = if line == super::COPY.trim_end() { order.send(Order::Copy) } else { Ok(()) };
            if sent.is_err() {
                return;
            }
        }
        let _ = order.send(Order::End);
    });
    let names = [Path::new(run), Path::new(learned::DIRECTORY)];
    let mut copier = Copier::new(&home, log_dir, &names, progress);
    if read.is_err() || !serve(&mut copier, &orders) {
        // What is not copied stays until another mirror starts here.
        return;
    }
    let _ = fs::remove_dir_all(&home);
    drop(lock);
}

/// Copies until the launcher has ended and all is copied. Returns false if it can not be copied.
fn serve(copier: &mut Copier, orders: &Receiver<Order>) -> bool {
    loop {
        match orders.recv_timeout(POLL_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {
                // Tried again at the next look, and reported at the job's end.
                let _ = copier.pass(false);
            }
            Ok(Order::Copy) => match copier.pass(true) {
                Ok(()) => report(&MirrorReport::Copied { lost: copier.lost() }),
                Err(error) => report(&MirrorReport::Left(error)),
            },
            Ok(Order::End) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let began = Instant::now();
    while copier.pass(true).is_err() {
        if began.elapsed() >= RETRY_TIMEOUT {
            return false;
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    true
}

/// Reports whether the log directory answers, and makes room in the local one.
fn watch(progress: &Mutex<Progress>, local: &Path) {
    let mut silent = false;
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let waits = {
            let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            make_room(local, room(local), &mut progress);
            progress.asked.is_some_and(|asked| asked.elapsed() >= SILENCE_TIMEOUT)
        };
        if waits != silent {
            silent = waits;
            report(if silent { &MirrorReport::Silent } else { &MirrorReport::Answers });
        }
    }
}

fn room(local: &Path) -> u64 {
    let all = statvfs(local).map_or(u64::MAX, |of| of.blocks().saturating_mul(of.fragment_size()));
    MAX_LOCAL_BYTES.min(all / SHARE_DIVISOR)
}

/// Standard output is the launcher, which may have ended.
fn report(news: &MirrorReport) {
    if let Ok(mut line) = serde_json::to_vec(news) {
        line.push(b'\n');
        let mut out = io::stdout().lock();
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

/// Creates a local directory, and removes those of mirrors that were killed.
fn open_local(root: &Path) -> io::Result<(PathBuf, Flock<File>)> {
    private_directory(root)?;
    // Between its creation and its lock a directory looks like one that was left.
    let turn = paths::turn(root);
    if turn.is_some() {
        let entries = fs::read_dir(root)?.flatten();
        for left in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(LOCAL_NAME)) {
            if paths::lock(&left.path()).is_ok() {
                let _ = fs::remove_dir_all(left.path());
            }
        }
    }
    let name = format!("{LOCAL_NAME}{}.{:x}", std::process::id(), clock::now().wall.0);
    let directory = root.join(name);
    private_directory(&directory)?;
    let lock = paths::lock(&directory)?;
    Ok((directory, lock))
}
