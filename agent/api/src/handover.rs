//! Receives directories of checkpoints from launchers, and files lent for shards to be restored. The kernel reports
//! the owner of the calling process. What is handed over is used only for later requests of that user, and only if
//! this agent may not act as that user.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mainstay_tier::peer::Users;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::listen::UnixSocket;
use mainstay_sys::handover::{Contents, receive};

/// How long a caller may take.
const CALLER_TIMEOUT: Duration = Duration::from_secs(1);

/// Callers of one user at once.
const MAX_CALLERS_PER_USER: usize = 4;

/// Callers at once.
const ALL: usize = 64;

/// Callers that are being served, by user.
type Callers = Arc<Mutex<BTreeMap<u32, usize>>>;

/// Accepts directories for as long as the process lives.
///
/// # Errors
/// The thread cannot be started.
pub fn take(socket: UnixSocket, users: Arc<Users>) -> io::Result<()> {
    let callers = Callers::default();
    let listen = move || {
        let listener = match socket.blocking() {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "no directories are taken from launchers"),
        };
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // An error such as too many open files would repeat at once.
                std::thread::sleep(CALLER_TIMEOUT);
                continue;
            };
            let Ok(credentials) = getsockopt(&stream, PeerCredentials) else { continue };
            let Some(place) = CallerPermit::take(&callers, credentials.uid()) else { continue };
            let users = Arc::clone(&users);
            let work = move || {
                let uid = place.uid;
                if let Err(error) = serve(&stream, &users, uid) {
                    tracing::debug!(uid, %error, "no directories came");
                }
                drop(place);
            };
            if let Err(error) = std::thread::Builder::new().name("handover".to_owned()).spawn(work) {
                tracing::warn!(%error, "directories that a launcher handed over were not taken");
            }
        }
    };
    std::thread::Builder::new().name("handovers".to_owned()).spawn(listen).map(drop)
}

fn serve(mut stream: &UnixStream, users: &Users, uid: u32) -> io::Result<()> {
    stream.set_read_timeout(Some(CALLER_TIMEOUT))?;
    stream.set_write_timeout(Some(CALLER_TIMEOUT))?;
    let (names, directories) = receive(stream)?;
    let names = match serde_json::from_slice(&names)? {
        Contents::Directories(names) => names,
        Contents::Files { token, first } => {
            return match users.lend(uid, &token, first, directories) {
                Ok(()) => Ok(()),
                Err(error) => stream.write_all(error.to_string().as_bytes()),
            };
        }
    };
    if names.len() != directories.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a name for each directory"));
    }
    let mut refused = Vec::new();
    for (name, directory) in names.iter().zip(directories) {
        if let Err(error) = users.hand_over(uid, name, directory) {
            refused.push(error.to_string());
        }
    }
    stream.write_all(refused.join("; ").as_bytes())
}

/// The place of one caller.
struct CallerPermit {
    callers: Callers,
    uid: u32,
}

impl CallerPermit {
    fn take(callers: &Callers, uid: u32) -> Option<CallerPermit> {
        let mut all = callers.lock().unwrap_or_else(PoisonError::into_inner);
        let of_user = all.get(&uid).copied().unwrap_or(0);
        if of_user >= MAX_CALLERS_PER_USER || all.values().sum::<usize>() >= ALL {
            return None;
        }
        all.insert(uid, of_user + 1);
        Some(CallerPermit { callers: Arc::clone(callers), uid })
    }
}

impl Drop for CallerPermit {
    fn drop(&mut self) {
        let mut all = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_user) = all.get_mut(&self.uid) {
            *of_user -= 1;
            if *of_user == 0 {
                all.remove(&self.uid);
            }
        }
    }
}
