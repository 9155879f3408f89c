//! What the configuration takes from its environment. It comes as an argument: nothing here reads the process's
//! own.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::document::FILE_VARIABLE;
use super::{Config, ConfigError, Origin, Problem};

/// The environment of the agent's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The environment variables.
    pub variables: BTreeMap<String, String>,
    /// The user that the process runs as.
    pub uid: u32,
    /// The configuration file that is read if it exists and none is named.
    pub default_file: PathBuf,
}

impl Environment {
    /// The environment from variables and user id as `main` reads them, with `/etc/mainstay/agent.toml` as default file.
    pub fn new(variables: impl IntoIterator<Item = (String, String)>, uid: u32) -> Environment {
        let default_file = PathBuf::from("/etc/mainstay/agent.toml");
        Environment { variables: variables.into_iter().collect(), uid, default_file }
    }

    /// What systemd/mainstay.service has in place of this environment.
    pub fn of_shipped_unit(&self) -> Environment {
        let directories = [("RUNTIME_DIRECTORY", "/run/mainstay"), ("STATE_DIRECTORY", "/var/lib/mainstay")];
        let variables = directories.map(|(name, path)| (name.to_owned(), path.to_owned()));
        Environment { variables: variables.into(), ..self.clone() }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        // The XDG specification requires relative paths to be ignored.
        self.variables.get(name).map(PathBuf::from).filter(|path| path.is_absolute())
    }

    /// The directory that systemd made for its service (`RuntimeDirectory=` and the like, systemd.exec(5)): the first, if
    /// the unit names several.
    fn of_the_unit(&self, name: &str) -> Option<PathBuf> {
        let first = self.variables.get(name)?.split(':').next()?;
        Some(PathBuf::from(first)).filter(|path| path.is_absolute())
    }

    /// The configuration file's path and text. None only if no file is named and there is none in the default places:
    /// the unit's directory and `default_file`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn config_file(&self, named: Option<&Path>) -> Result<Option<(PathBuf, String)>, ConfigError> {
        let variable = self.variables.get(FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let named = named.map(Path::to_owned).or(variable);
        let is_named = named.is_some();
        let of_the_unit =
            || self.of_the_unit("CONFIGURATION_DIRECTORY").map(|folder| folder.join("agent.toml"));
        let places = match named {
            Some(path) => vec![path],
            None => of_the_unit().into_iter().chain([self.default_file.clone()]).collect(),
        };
        for path in places {
            match read(&path) {
                Ok(text) => return Ok(Some((path, text))),
                Err(error) if error.kind() == ErrorKind::NotFound && !is_named => {}
                Err(error) => {
                    let origin = Origin::File { path, line: None };
                    let what = format!("it cannot be read: {error}");
                    return Err(ConfigError { problems: vec![Problem { origin, key: None, what }] });
                }
            }
        }
        Ok(None)
    }

    /// Fills in the paths that are empty.
    pub(super) fn fill_in(&self, config: &mut Config) {
        if config.state_dir.as_os_str().is_empty() {
            config.state_dir = self.state_dir();
        }
        if config.socket.as_os_str().is_empty() {
            config.socket = self.socket();
        }
    }

    /// The default state directory.
    pub fn state_dir(&self) -> PathBuf {
        if let Some(state) = self.of_the_unit("STATE_DIRECTORY") {
            return state;
        }
        if self.uid == 0 {
            return "/var/lib/mainstay".into();
        }
        let home_state = || self.path("HOME").map(|home| home.join(".local/state"));
        match self.path("XDG_STATE_HOME").or_else(home_state) {
            Some(state) => state.join("mainstay"),
            None => self.temporary().join("state"),
        }
    }

    /// The default path of the agent's socket. Launchers and clients look for it by the same rule; that of the shipped
    /// unit is the path of root's agent.
    pub fn socket(&self) -> PathBuf {
        if let Some(run) = self.of_the_unit("RUNTIME_DIRECTORY") {
            return run.join("agent.sock");
        }
        if self.uid == 0 {
            return "/run/mainstay/agent.sock".into();
        }
        match self.path("XDG_RUNTIME_DIR") {
            Some(run) => run.join("mainstay/agent.sock"),
            None => self.temporary().join("agent.sock"),
        }
    }

    fn temporary(&self) -> PathBuf {
        format!("/tmp/mainstay-{}", self.uid).into()
    }
}

/// A configuration has at most this many bytes.
const MAX_BYTES: u64 = 16 << 20;

/// A FIFO would be waited for, and a device may have no end.
fn read(path: &Path) -> io::Result<String> {
    if std::fs::metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is a FIFO"));
    }
    let mut text = String::new();
    let length = File::open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    if length as u64 == MAX_BYTES {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("it has more than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_configuration_is_neither_waited_for_nor_endless() {
        let (pipe, _writer) = io::pipe().expect("a pipe");
        let fifo = format!("/proc/self/fd/{}", pipe.as_raw_fd());
        assert_eq!(read(Path::new(&fifo)).expect_err("a FIFO").kind(), ErrorKind::InvalidInput);
        assert_eq!(read(Path::new("/dev/zero")).expect_err("no end").kind(), ErrorKind::InvalidData);
        assert_eq!(read(Path::new("/dev/null")).expect("an empty configuration"), "");
    }
}
