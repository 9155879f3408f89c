//! Messages of ranks that use NVRx's `RankMonitorClient`: a socket for each rank, which replaces NVRx's rank monitor.
//!
//! The messages go into a heartbeat page in the launcher's own memory, so that all readers of pages see the rank like any
//! other. A rank's message can at most end its own connection.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_heartbeat::{Claiming, Measures, PageSpec, PageWords, Writer};
use mainstay_wire::nvrx::{ClientMessage, Session, socket_name};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, spawn_local};

use mainstay_sys::clock;

use super::pages::page_in_memory;

/// The client's name in its page.
const LANGUAGE: &str = "nvrx";
const VERSION: &str = "RankMonitorClient";

/// Connections of one rank at a time; a client makes one.
const MAX_CONNECTIONS_PER_RANK: usize = 8;

/// A rank's socket; dropping it removes the socket and closes its connections.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    page: Arc<PageWords>,
    task: JoinHandle<()>,
}

impl Monitor {
    /// Creates the socket of a rank in `directory`. The rank's messages go into a new page.
    ///
    /// # Errors
    /// The socket cannot be created: its path has more than 107 bytes, or the directory cannot be written.
    pub fn listen(directory: &Path, spec: &PageSpec<'_>) -> io::Result<Monitor> {
        let path = directory.join(socket_name(spec.local_rank));
        let page = page_in_memory(spec)?;
        // From an earlier attempt, whose monitor is gone.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let task = spawn_local(accept(listener, page.clone()));
        Ok(Monitor { path, page, task })
    }

    /// The page that replaces the rank's own.
    pub fn page(&self) -> Arc<PageWords> {
        self.page.clone()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn accept(listener: UnixListener, page: Arc<PageWords>) {
    // Dropped, and so ended, with this task.
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS_PER_RANK => match accepted {
                Ok((stream, _)) => {
                    connections.spawn_local(serve(stream, page.clone()));
                }
                Err(error) => {
                    tracing::debug!(%error, "a rank's connection to its NVRx socket failed");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(mut stream: UnixStream, page: Arc<PageWords>) {
    let mut scribe = Scribe { page, pid: 0 };
    let mut session = Session::default();
    let (mut messages, mut answers) = (Vec::new(), Vec::new());
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut chunk).await {
        let received = session.receive(&chunk[..length], &mut messages, &mut answers);
        scribe.write(&mut messages);
        // A client that does not read its answers loses them; nothing waits for it.
        let _ = stream.try_write(&answers);
        answers.clear();
        if let Err(error) = received {
            tracing::warn!(pid = scribe.pid, %error, "a rank's NVRx connection is closed");
            break;
        }
    }
    session.end(&mut messages);
    scribe.write(&mut messages);
    scribe.close();
}

/// Writes a page for a rank.
struct Scribe {
    page: Arc<PageWords>,
    /// The rank's process; 0 until it has identified itself.
    pid: u32,
}

impl Scribe {
    fn write(&mut self, messages: &mut Vec<ClientMessage>) {
        for message in messages.drain(..) {
            self.report(message);
        }
    }

    fn report(&mut self, message: ClientMessage) {
        let now = clock::mono().0;
        // It is our own complete page, and only this task writes it at this time.
        let Ok(writer) = Writer::new(&self.page) else { return };
        if let ClientMessage::Connected { pid } = message {
            self.pid = pid;
            let _ = writer.claim(now, &claiming(pid));
            return;
        }
        let Some(mut page) = writer.try_write(claiming(self.pid).key()) else { return };
        match message {
            ClientMessage::Connected { .. } => {}
            ClientMessage::Beat => page.beat(now),
            ClientMessage::Enter(name) => {
                let id = page.intern(&name);
                page.enter(now, id);
            }
            ClientMessage::Leave(name) => {
                let id = page.intern(&name);
                page.leave(now, id);
            }
            ClientMessage::Step(step) => page.step(now, step, Measures::default()),
        }
    }

    fn close(&self) {
        if self.pid != 0
            && let Ok(writer) = Writer::new(&self.page)
            && let Some(mut page) = writer.try_write(claiming(self.pid).key())
        {
            page.close(clock::mono().0);
        }
    }
}

fn claiming(pid: u32) -> Claiming<'static> {
    Claiming { pid, start_ticks: 0, pid_namespace: 0, image: 0, version: VERSION, language: LANGUAGE }
}
