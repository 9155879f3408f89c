//! Why a launcher is not attached to an agent, and what a person can do about it.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    NoSocket,
    NotPermitted {
        /// The group that may, if it is not every one's.
        group: Option<String>,
    },
    NobodyListens,
    /// The agent there is not to be trusted, does not answer, or refuses.
    Other(String),
}

impl Absence {
    /// From the error of an attempt to attach.
    pub(crate) fn from_error(socket: &Path, error: &anyhow::Error) -> Absence {
        let cause = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
        match cause {
            // An error of ours has no number: it says which user serves the socket.
            Some(cause) if cause.raw_os_error().is_some() => Absence::from_io(socket, cause),
            Some(cause) => Absence::Other(cause.to_string()),
            None => Absence::Other(refusal(error)),
        }
    }

    fn from_io(socket: &Path, error: &io::Error) -> Absence {
        match error.kind() {
            ErrorKind::NotFound => Absence::NoSocket,
            ErrorKind::PermissionDenied => Absence::NotPermitted { group: group_of(socket) },
            ErrorKind::ConnectionRefused => Absence::NobodyListens,
            _ => Absence::Other(error.to_string()),
        }
    }

    /// Whether a file of this name is missing; `None` if one is there.
    pub(crate) fn if_missing(socket: &Path) -> Option<Absence> {
        std::fs::symlink_metadata(socket).err().map(|error| Absence::from_io(socket, &error))
    }
}

/// The message of the agent, without the layers around it.
fn refusal(error: &anyhow::Error) -> String {
    let status = error.chain().find_map(|cause| cause.downcast_ref::<tonic::Status>());
    status.map_or_else(|| format!("{error:#}"), |status| status.message().to_owned())
}

/// The group of the socket, or of the directory that this user cannot look into.
fn group_of(socket: &Path) -> Option<String> {
    let found = socket.ancestors().find_map(|path| std::fs::metadata(path).ok())?;
    let gid = Gid::from_raw(found.gid());
    let name = Group::from_gid(gid).ok().flatten().map_or_else(|| gid.to_string(), |group| group.name);
    (found.mode() & 0o030 != 0).then_some(name)
}

/// One line for all sockets that were tried, and the one thing to do.
pub(crate) fn describe(tried: &[(PathBuf, Absence)]) -> String {
    let told = tried.iter().find(|(_, absence)| *absence != Absence::NoSocket);
    let Some((socket, absence)) = told else {
        let sockets: Vec<String> = tried.iter().map(|(socket, _)| socket.display().to_string()).collect();
        return format!(
            "no socket at {}; to have one, start `mainstay agent` on this host, or name its socket with --socket",
            sockets.join(", ")
        );
    };
    let socket = socket.display();
    match absence {
        Absence::NoSocket => format!("{socket}: no socket"),
        Absence::NotPermitted { group: Some(group) } => {
            format!("{socket}: permission denied; have your user added to the group {group}")
        }
        Absence::NotPermitted { group: None } => {
            format!(
                "{socket}: permission denied; the agent permits it to a group (socket_gid in its configuration)"
            )
        }
        Absence::NobodyListens => {
            format!(
                "{socket}: no agent listens there; start it (systemctl status mainstay shows why it ended)"
            )
        }
        Absence::Other(why) => format!("{socket}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_there_is_named_before_those_that_are_missing() {
        let home = testing::tempdir().unwrap();
        let (missing, dead) = (home.path().join("missing"), home.path().join("dead"));
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        assert_eq!(Absence::if_missing(&missing), Some(Absence::NoSocket));
        assert_eq!(Absence::if_missing(&dead), None);
        let refused = std::os::unix::net::UnixStream::connect(&dead).unwrap_err();
        let refused = Absence::from_error(&dead, &anyhow::Error::new(refused).context("connecting"));
        assert_eq!(refused, Absence::NobodyListens);
        let all = [(missing, Absence::NoSocket), (dead.clone(), refused)];
        assert!(describe(&all).starts_with(&dead.display().to_string()), "{}", describe(&all));
        assert!(describe(&all[..1]).contains("no socket"), "{}", describe(&all[..1]));
    }

    #[test]
    fn a_socket_of_a_group_names_the_group_that_may_use_it() {
        let home = testing::tempdir().unwrap();
        let socket = home.path().join("agent.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let ours = Group::from_gid(nix::unistd::getegid()).unwrap().map(|group| group.name);
        let denied =
            || anyhow::Error::new(io::Error::from_raw_os_error(nix::libc::EACCES)).context("connecting");
        for (mode, group) in [(0o660, ours), (0o600, None)] {
            std::fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(Absence::from_error(&socket, &denied()), Absence::NotPermitted { group }, "{mode:o}");
        }
    }

    #[test]
    fn an_agent_that_is_not_trusted_is_no_error_of_the_system() {
        let error = anyhow::Error::new(io::Error::new(ErrorKind::PermissionDenied, "user 7 serves it"));
        let absence = Absence::from_error(Path::new("/run/agent.sock"), &error.context("connecting"));
        assert_eq!(absence, Absence::Other("user 7 serves it".to_owned()));
    }
}
