//! The same job under each launcher: ours, PyTorch's, NVIDIA's.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::cmd;
use crate::paths;
use crate::python::{Venv, activate};

/// The name of DLRover in the figures.
pub const DLROVER_NAME: &str = "DLRover 0.6.1";

/// The name of NVRx in the figures.
pub const NVRX_NAME: &str = "NVRx 0.4.1";

pub struct Bed {
    pub venv: Venv,
    /// The peers' environment, if there is one.
    pub peers: Option<PathBuf>,
    pub torchrun: bool,
}

/// The launcher that starts the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Launcher {
    /// `mainstay run`.
    Mainstay,
    /// `torchrun` with a separate store per attempt; without it, its restarts fail or hang now and then.
    Torchrun,
    /// NVRx's `ft_launcher`.
    Nvrx,
}

impl Launcher {
    pub fn name(self) -> &'static str {
        match self {
            Self::Mainstay => "mainstay",
            Self::Torchrun => "torchrun",
            Self::Nvrx => NVRX_NAME,
        }
    }

    /// Its name in the figures, if it is not ours.
    pub fn peer(self) -> Option<&'static str> {
        (self != Self::Mainstay).then(|| self.name())
    }
}

impl Bed {
    /// The launchers that can be measured here, ours first.
    pub fn launchers(&self) -> Vec<Launcher> {
        let mut all = vec![Launcher::Mainstay];
        all.extend(self.torchrun.then_some(Launcher::Torchrun));
        all.extend(self.peers.is_some().then_some(Launcher::Nvrx));
        all
    }

    /// A program of the peers' environment, or of an environment that does not exist.
    pub fn peers_tool(&self, name: &str) -> PathBuf {
        self.peers.as_deref().unwrap_or(Path::new("/no/peers")).join("bin").join(name)
    }

    /// A Python script of `xtask/bench` as a job, with unlimited restarts; `options` are options of the
    /// launcher.
    pub fn job(&self, launcher: Launcher, ranks: usize, logs: &Path, options: &str, script: &str) -> Command {
        let mut command = match launcher {
            Launcher::Mainstay => {
                self.mainstay(&format!("--nproc-per-node {ranks} --max-restarts 100000 {options}"), logs)
            }
            Launcher::Torchrun => self.torchrun(&format!("--standalone --nproc-per-node={ranks}")),
            Launcher::Nvrx => self.nvrx(&format!(
                "--nnodes=1 --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 {options}"
            )),
        };
        command.arg(script_path(script));
        command
    }

    /// `mainstay run` with these options, which have no blanks, and our Python.
    pub fn mainstay(&self, options: &str, logs: &Path) -> Command {
        let (program, options) = (paths::release_mainstay(), options.split_whitespace());
        self.prepared(cmd!("{program} run {options...} --log-dir {logs}"))
    }

    pub fn torchrun(&self, options: &str) -> Command {
        let (python, options) = (self.venv.python(), options.split_whitespace());
        let mut command =
            self.prepared(cmd!("{python} -m torch.distributed.run --max-restarts=100000 {options...}"));
        command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
        command
    }

    /// Of an option that is given twice, the last counts.
    pub fn nvrx(&self, options: &str) -> Command {
        let (program, options) = (self.peers_tool("ft_launcher"), options.split_whitespace());
        let mut command = self.prepared(cmd!(
            "{program} --max-restarts=100000 --ft-param-rank_heartbeat_timeout=600
             --ft-param-initial_rank_heartbeat_timeout=600 {options...}"
        ));
        command.env("PYTHON_EXEC", self.peers_tool("python"));
        command.envs(self.peers.iter().map(|peers| ("VIRTUAL_ENV", peers)));
        command
    }

    fn prepared(&self, mut command: Command) -> Command {
        activate(&mut command, &self.venv);
        command.current_dir(paths::target());
        command
    }
}

/// A script of `xtask/bench`.
pub fn script_path(name: &str) -> PathBuf {
    paths::root().join("xtask/bench").join(name)
}
