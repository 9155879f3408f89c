//! The same job under each launcher: ours, PyTorch's, NVIDIA's.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::peers::NVRX_NAME;
use crate::paths;
use crate::venv::{Venv, activate};

/// The environments of the benchmarks.
pub struct Bed {
    /// Ours, with the wheel.
    pub venv: Venv,
    /// The peers' environment, if there is one.
    pub peers: Option<PathBuf>,
    /// Whether torchrun is measured too.
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

/// One host of a job on several.
pub struct OneOf {
    /// Its number.
    pub number: usize,
    /// The number of hosts, as in `--nnodes`.
    pub nodes: String,
    /// Its address.
    pub address: String,
    /// The address of the first, where they meet.
    pub first: String,
    /// The port there.
    pub port: u16,
}

impl Launcher {
    /// Its name in the figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mainstay => "mainstay",
            Self::Torchrun => "torchrun",
            Self::Nvrx => NVRX_NAME,
        }
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

    /// A Python script of this folder as a job, with unlimited restarts.
    pub fn job(&self, launcher: Launcher, ranks: usize, logs: &Path, script: &str) -> Result<Command> {
        let ranks = ranks.to_string();
        let mut command = match launcher {
            Launcher::Mainstay => {
                let mut command = Command::new(paths::release_mainstay());
                command
                    .args(["run", "--nproc-per-node", &ranks, "--max-restarts", "100000", "--log-dir"])
                    .arg(logs);
                command
            }
            Launcher::Torchrun => {
                let mut command = Command::new(self.venv.python());
                command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &ranks]);
                command.args(["--max-restarts", "100000"]);
                command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
                command
            }
            Launcher::Nvrx => {
                let peers = self.peers.as_deref().unwrap_or(Path::new(""));
                let mut command = Command::new(peers.join("bin/ft_launcher"));
                command.args(["--nnodes=1", &format!("--nproc-per-node={ranks}"), "--max-restarts=100000"]);
                command.args(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]);
                command.args([
                    "--ft-param-rank_heartbeat_timeout=600",
                    "--ft-param-initial_rank_heartbeat_timeout=600",
                ]);
                command
            }
        };
        self.prepare(launcher, &mut command);
        command.arg(script_path(script)).current_dir(paths::target());
        Ok(command)
    }

    /// The launcher of one host of a job, without its script. The hosts meet at the address of the first.
    pub fn on_host(&self, launcher: Launcher, host: &OneOf, ranks: usize, logs: &Path) -> Command {
        let OneOf { number, nodes, address, first, port } = host;
        let ranks = ranks.to_string();
        let mut command = match launcher {
            Launcher::Mainstay => {
                let mut command = Command::new(paths::release_mainstay());
                command.args(["run", "--no-agent", "--nnodes", nodes, "--node-rank", &number.to_string()]);
                command.args(["--master-addr", first, "--master-port", &port.to_string()]);
                command.args(["--nproc-per-node", &ranks, "--max-restarts", "100000", "--log-dir"]).arg(logs);
                command
            }
            Launcher::Torchrun => {
                let mut command = Command::new(self.venv.python());
                command.args(["-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", &ranks]);
                command.args(["--rdzv-backend", "c10d", "--rdzv-id", "bench", "--local-addr", address]);
                command.args(["--rdzv-endpoint", &format!("{first}:{port}"), "--max-restarts", "100000"]);
                // It searches for itself by name, and all namespaces have the same name.
                command.args(["--rdzv-conf", &format!("is_host={}", *number == 0)]);
                command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
                command
            }
            Launcher::Nvrx => {
                let peers = self.peers.as_deref().unwrap_or(Path::new(""));
                let mut command = Command::new(peers.join("bin/ft_launcher"));
                command.args([&format!("--nnodes={nodes}"), &format!("--nproc-per-node={ranks}")]);
                command.args(["--rdzv-backend=c10d", "--rdzv-id=bench", "--max-restarts=100000"]);
                command.args([format!("--rdzv-endpoint={first}:{port}"), format!("--local-addr={address}")]);
                command.arg(format!("--rdzv-conf=is_host={}", *number == 0));
                command.args([
                    "--ft-param-rank_heartbeat_timeout=600",
                    "--ft-param-initial_rank_heartbeat_timeout=600",
                ]);
                command
            }
        };
        self.prepare(launcher, &mut command);
        command.current_dir(paths::target());
        command
    }

    /// Its Python environment.
    fn prepare(&self, launcher: Launcher, command: &mut Command) {
        activate(command, &self.venv);
        if launcher == Launcher::Nvrx
            && let Some(peers) = &self.peers
        {
            command.env("PYTHON_EXEC", peers.join("bin/python")).env("VIRTUAL_ENV", peers);
        }
    }
}

/// A script of `xtask/bench`.
pub fn script_path(name: &str) -> PathBuf {
    paths::root().join("xtask/bench").join(name)
}
