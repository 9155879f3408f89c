//! Logs on a file system that may stop answering.
//!
//! A process that has a file open there, or that waits for it, may be unkillable while it does not answer: the kernel
//! writes back open files when a process exits. So the ranks and the launcher write into a local directory, and another
//! process, the mirror, copies it into the log directory. Only the mirror can hang. It outlives its launcher until all
//! is copied.

mod copy;
mod process;

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mainstay_health::parse::mounts::{Mount, may_stop_answering, mount_of, parse_mounts};
use mainstay_model::id::Pid;
use serde::{Deserialize, Serialize};

pub use process::mirror;

/// The hidden subcommand that runs the mirror.
pub const SUBCOMMAND: &str = "log-mirror";

/// The most symbolic links that are followed in a path (`ELOOP`).
const MAX_LINKS: usize = 40;

/// How long the end of a job waits for the copies, and how long if the log directory does not answer by then.
const COPY_TIMEOUT: Duration = Duration::from_secs(5);
const SILENT_COPY_TIMEOUT: Duration = Duration::from_secs(1);

/// How long it then waits for the mirror's exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Asks the mirror to copy everything; answered by [`MirrorReport::Copied`] or [`MirrorReport::Left`].
const COPY: &str = "copy\n";

/// A line of the mirror.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MirrorReport {
    /// The run has its directories.
    Opened { published: PathBuf, local: PathBuf },
    /// The run cannot have them.
    Failed(String),
    /// The log directory does not answer.
    Silent,
    /// It answers again.
    Answers,
    /// All is copied, but for these bytes, for which there was no room while the log directory did not answer.
    Copied { lost: u64 },
    /// Not all could be copied.
    Left(String),
}

/// The launcher's handle of its mirror.
#[derive(Debug)]
pub struct LogMirror {
    child: Child,
    orders: ChildStdin,
    /// Answers to [`COPY`].
    answers: Receiver<MirrorReport>,
    silent: Arc<AtomicBool>,
    reported: bool,
    /// The log directory and its file system, in words.
    named: String,
    /// The run directory in which the launcher and the ranks write.
    pub(crate) local: PathBuf,
    /// The run directory in the log directory.
    pub(crate) published: PathBuf,
}

impl LogMirror {
    /// Starts the mirror for a run with this id. Waits until the log directory answers.
    ///
    /// # Errors
    /// The run's directory cannot be created, or the mirror not be started.
    pub(crate) fn start(
        log_dir: &Path,
        runtime_root: &Path,
        run_id: &str,
        mount: &Mount,
    ) -> io::Result<LogMirror> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(SUBCOMMAND).arg(std::path::absolute(log_dir)?).arg(std::path::absolute(runtime_root)?);
        // It may live longer than those who read the launcher's output.
        command.arg(run_id).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.current_dir("/").process_group(0).spawn()?;
        let orders = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut news = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let (published, local) = match next(&mut news) {
            Some(MirrorReport::Opened { published, local }) => (published, local),
            Some(MirrorReport::Failed(error)) => return Err(io::Error::other(error)),
            _ => return Err(io::Error::other("the process that copies the logs ended")),
        };
        let (answer, answers) = channel();
        let silent = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&silent);
        std::thread::Builder::new()
            .name("log-mirror".to_owned())
            .spawn(move || listen(&mut news, &heard, &answer))?;
        let named = format!(
            "the {} file system at {} ({}), with the log directory {}",
            mount.kind,
            mount.point.display(),
            mount.from,
            log_dir.display()
        );
        Ok(LogMirror { child, orders, answers, silent, reported: false, named, local, published })
    }

    /// The mirror's process.
    pub(crate) fn pid(&self) -> Pid {
        Pid(i32::try_from(self.child.id()).unwrap_or(0))
    }

    /// A line for people if the log directory stopped answering, or answers again.
    pub(crate) fn news(&mut self) -> Option<String> {
        let silent = self.silent.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.reported, silent) == silent {
            return None;
        }
        Some(match silent {
            true => format!(
                "{}, does not answer: logs and journal are in {} and are copied when it answers; training goes on",
                self.named,
                self.local.display()
            ),
            false => format!("{}, answers again", self.named),
        })
    }

    /// Has everything copied that is written by now. Returns a line for people if that is not possible.
    pub fn copy_all(&mut self) -> Option<String> {
        let within = if self.silent.load(Ordering::Relaxed) { SILENT_COPY_TIMEOUT } else { COPY_TIMEOUT };
        let asked = self.orders.write_all(COPY.as_bytes());
        let answer = asked.map_err(|_| RecvTimeoutError::Disconnected);
        let why = match answer.and_then(|()| self.answers.recv_timeout(within)) {
            Ok(MirrorReport::Copied { lost: 0 }) => return None,
            Ok(MirrorReport::Copied { lost }) => {
                return Some(format!(
                    "{lost} bytes of the ranks' output are not in {}: there was no room for them while its file system did \
                     not answer",
                    self.published.display()
                ));
            }
            Ok(MirrorReport::Left(why)) => why,
            Ok(_) | Err(RecvTimeoutError::Timeout) => format!("{}, does not answer", self.named),
            Err(RecvTimeoutError::Disconnected) => {
                format!("process {}, which copies them, is gone", self.child.id())
            }
        };
        Some(format!(
            "the logs in {} are not complete: {why}; they are in {}, and process {} copies them as soon as it can",
            self.published.display(),
            self.local.display(),
            self.child.id()
        ))
    }

    /// Ends the mirror, which copies what is left.
    pub fn end(self) {
        let LogMirror { mut child, orders, answers, .. } = self;
        drop(orders);
        let until = Instant::now() + EXIT_TIMEOUT;
        // The channel is closed with the mirror's output.
        while !matches!(answers.recv_timeout(EXIT_TIMEOUT), Err(RecvTimeoutError::Disconnected)) {
            if Instant::now() >= until {
                return;
            }
        }
        let _ = child.wait();
    }
}

fn next(news: &mut impl BufRead) -> Option<MirrorReport> {
    let mut line = String::new();
    news.read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

fn listen(news: &mut BufReader<ChildStdout>, silent: &AtomicBool, answers: &Sender<MirrorReport>) {
    while let Some(news) = next(news) {
        match news {
            MirrorReport::Silent => silent.store(true, Ordering::Relaxed),
            MirrorReport::Answers => silent.store(false, Ordering::Relaxed),
            answer => {
                // The launcher may have stopped waiting.
                let _ = answers.send(answer);
            }
        }
    }
}

/// The mount of a path, if it may stop answering. Nothing on such a mount is looked at.
pub(crate) fn silenceable_mount(path: &Path) -> Option<Mount> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    on_silenceable(&std::path::absolute(path).ok()?, &parse_mounts(&table), MAX_LINKS)
}

fn on_silenceable(path: &Path, mounts: &[Mount], links: usize) -> Option<Mount> {
    let mut at = PathBuf::from("/");
    let mut parts = path.components();
    while let Some(part) = parts.next() {
        match part {
            Component::ParentDir => {
                at.pop();
            }
            part => at.push(part),
        }
        if let Some(mount) = mount_of(mounts, &at).filter(|mount| may_stop_answering(&mount.kind)) {
            return Some(mount.clone());
        }
        if let Ok(target) = fs::read_link(&at) {
            // An absolute target replaces the path.
            let target = at.parent().unwrap_or(Path::new("/")).join(target).join(parts.as_path());
            return on_silenceable(&target, mounts, links.checked_sub(1)?);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_path_that_leads_to_a_network_file_system_is_found_without_looking_at_it() {
        let root = testing::tempdir().expect("a directory");
        let root = root.path().canonicalize().expect("it exists");
        // No such directory exists: whoever looked at it would find nothing.
        let table = format!(
            "1 1 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {}/home rw - nfs4 server:/home rw\n",
            root.display()
        );
        let mounts = parse_mounts(&table);
        fs::create_dir(root.join("local")).expect("a directory");
        symlink("../home/user", root.join("local/user")).expect("a link");
        symlink(root.join("local/user"), root.join("local/logs")).expect("a link");
        symlink("loop", root.join("loop")).expect("a link");
        let on = |path: &str| on_silenceable(&root.join(path), &mounts, MAX_LINKS).map(|mount| mount.kind);
        for path in
            ["home", "home/user/runs", "local/../home", "local/user/x", "local/logs/x", "home/../local"]
        {
            assert_eq!(on(path).as_deref(), Some("nfs4"), "{path}");
        }
        for path in ["", "local", "local/missing/runs", "loop/x"] {
            assert_eq!(on(path), None, "{path}");
        }
    }
}
