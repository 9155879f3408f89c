//! File system events: an event for each exit note, and for each growth of a log file.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use crate::readable::readable;

/// A watched directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(i32);

/// A file in a watched directory was written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteEvent {
    /// Which directory.
    pub watch: WatchId,
    /// The file's name; none if the kernel lost events and everything should be checked.
    pub name: Option<CString>,
}

/// A set of watched directories.
#[derive(Debug)]
pub struct Watcher {
    fd: AsyncFd<OwnedFd>,
}

impl Watcher {
    /// An empty set. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The user's limit of inotify instances is reached (`fs.inotify.max_user_instances`).
    pub fn new() -> io::Result<Watcher> {
        Ok(Watcher { fd: readable(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?)? })
    }

    /// Watches the directory for files that are written to.
    ///
    /// # Errors
    /// The directory does not exist, or the user's limit of watches is reached.
    pub fn watch(&self, directory: &Path) -> io::Result<WatchId> {
        let flags = WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO;
        Ok(WatchId(inotify::add_watch(self.fd.get_ref(), directory, flags)?))
    }

    /// Ends a watch. A watch that has already ended is no error.
    pub fn forget(&self, watch: WatchId) {
        let _ = inotify::remove_watch(self.fd.get_ref(), watch.0);
    }

    /// The next batch of events. Cancel safe.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn next(&self) -> io::Result<Vec<WriteEvent>> {
        loop {
            let mut ready = self.fd.readable().await?;
            if let Ok(events) = ready.try_io(|fd| read_events(fd.get_ref())) {
                return events;
            }
        }
    }
}

/// Reads one buffer full of events; `WouldBlock` when there are none.
fn read_events(fd: &OwnedFd) -> io::Result<Vec<WriteEvent>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    let mut events = Vec::new();
    loop {
        let event = reader.next()?;
        events.push(WriteEvent { watch: WatchId(event.wd()), name: event.file_name().map(CString::from) });
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}
