//! One fault in one job.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::table::Cell;
use crate::bench::process::Running;
use crate::command;
use crate::journal::{Entry, Follower, Verdict};
use crate::paths;

/// From the start of a job to its decision: imports, 200 steps, a hang.
const LIMIT: Duration = Duration::from_secs(240);

/// Limits with which hangs are found soon, even if a loaded machine takes long for a step.
const SOON: [&str; 4] =
    ["--hang-limit", "step=6s,unlearned=6s,first_step=40s,idle=10s", "--hang-limit", "confirm=1s"];

/// The result of a job with its fault.
#[derive(Debug, Default)]
pub struct Seen {
    /// The first verdict.
    pub verdict: Option<Verdict>,
    /// The first decision: what and why.
    pub decision: Option<(String, String)>,
    /// Why there is none.
    pub problem: Option<String>,
    /// The program caught the fault and ended well: there was no failure to diagnose.
    pub survived: bool,
}

/// Where cells are run.
pub struct Bench {
    python: PathBuf,
    folder: PathBuf,
    may_mount: bool,
    has: Vec<String>,
    number: AtomicUsize,
}

impl Bench {
    /// With the programs' interpreter.
    pub fn new(python: PathBuf) -> Result<Bench> {
        let folder = std::env::temp_dir().join(format!("mainstay-verdicts-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let mut unshare = Command::new("unshare");
        let may_mount = command::output(unshare.args(["--mount", "true"])).is_ok();
        let ask = "import importlib.util as u\n\
                   for name in 'lightning transformers accelerate jax flax wandb safetensors megatron'.split():\n    \
                   print(name if u.find_spec(name) else '')";
        let has = command::output(Command::new(&python).args(["-c", ask]))?;
        let has = has.lines().map(str::to_owned).collect();
        Ok(Bench { python, folder, may_mount, has, number: AtomicUsize::new(0) })
    }

    /// Whether this machine has what it needs: packages, and the right to mount and to make cgroups.
    pub fn can_run(&self, cell: &Cell) -> bool {
        let privileged = cell.fault.mounts || cell.fault.name == "oom";
        let needed = cell.program.needs.as_deref().map(|module| module.split('.').next().unwrap_or(module));
        (self.may_mount || !privileged)
            && needed.is_none_or(|needed| self.has.iter().any(|had| had == needed))
    }

    /// Runs the job until it has decided, and ends it.
    pub fn run(&self, cell: &Cell) -> Seen {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(number.to_string());
        let seen = self.try_run(cell, &folder);
        let _ = fs::remove_dir_all(&folder);
        seen.unwrap_or_else(|error| Seen { problem: Some(format!("{error:#}")), ..Seen::default() })
    }

    fn try_run(&self, cell: &Cell, folder: &Path) -> Result<Seen> {
        for part in ["logs", "out", "marks"] {
            let part = folder.join(part);
            fs::create_dir_all(&part).with_context(|| format!("creating {}", part.display()))?;
        }
        let mut journal = Follower::new(&folder.join("logs"));
        let mut running = Running::start(self.command(cell, folder)?, &folder.join("launcher.log"))?;
        if let Some(signal) = cell.fault.signal {
            let mark = folder.join("marks/ready");
            let pid = running.wait_for("the place of the fault", LIMIT, || fs::read_to_string(&mark).ok())?;
            let pid: i32 = pid.trim().parse().with_context(|| format!("reading {}", mark.display()))?;
            let signal = Signal::try_from(signal).context("a signal of the table")?;
            kill(Pid::from_raw(pid), signal).with_context(|| format!("sending {signal} to {pid}"))?;
        }
        let decided = running.wait_for("decision", LIMIT, || {
            journal.poll().ok()?;
            journal.entries.iter().find_map(Entry::decision)
        });
        let decided = match decided {
            Err(_) if running.ended().is_some_and(|status| status.success()) => {
                return Ok(Seen { survived: true, ..Seen::default() });
            }
            decided => decided?,
        };
        let verdict = journal.entries.iter().find_map(Entry::verdict);
        Ok(Seen { verdict, decision: Some(decided), ..Seen::default() })
    }

    fn command(&self, cell: &Cell, folder: &Path) -> Result<Command> {
        let tests = paths::root().join("tests/healthy");
        // The launcher ends with the benchmark, however that ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM"]);
        if cell.fault.mounts {
            command.args(["unshare", "--mount", "--propagation", "private"]);
        }
        command.arg(paths::release_mainstay()).args(["run", "--no-agent", "--max-restarts", "3", "--forget"]);
        command.args(["--shutdown-timeout", "2s", "--nproc-per-node", &cell.program.ranks.to_string()]);
        command.arg("--log-dir").arg(folder.join("logs")).arg("--runtime-dir").arg(folder.join("rt"));
        if cell.fault.hang {
            command.args(SOON);
        }
        let script = tests.join("programs").join(format!("{}.py", cell.program.name));
        if cell.program.shell {
            let wrapper = folder.join("train.sh");
            let text = "#!/bin/sh\nset -e\necho \"starting on $(uname -s)\"\npython3 \"$@\"\necho finished\n";
            fs::write(&wrapper, text).with_context(|| format!("writing {}", wrapper.display()))?;
            fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("making {} executable", wrapper.display()))?;
            command.arg("--no-python").arg(wrapper);
        }
        command.arg(script).args(&cell.program.arguments);
        self.environment(&mut command, cell, folder, &tests.join("faults"));
        Ok(command)
    }

    fn environment(&self, command: &mut Command, cell: &Cell, folder: &Path, faults: &Path) {
        let bin = self.python.parent().unwrap_or(Path::new("/usr/bin"));
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .current_dir(folder.join("out"))
            .env("PATH", format!("{}:{path}", bin.display()))
            .env("VIRTUAL_ENV", bin.parent().unwrap_or(bin))
            .env("PYTHONPATH", faults)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("OMP_NUM_THREADS", "1")
            .env("HF_HUB_OFFLINE", "1")
            .env("OUT", folder.join("out"))
            .env("STEPS", (cell.after + 60).to_string())
            .env("FAULT", &cell.fault.name)
            .env("FAULT_RANK", cell.rank().to_string())
            .env("FAULT_AFTER", cell.after.to_string())
            .env("FAULT_MARKS", folder.join("marks"))
            .envs(&cell.program.variables);
        for name in [
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "FAULT_WARNING",
            "FAULT_CLIENT",
        ] {
            command.env_remove(name);
        }
        if cell.warning {
            command.env("FAULT_WARNING", "1");
        }
        if cell.program.client {
            command.env("FAULT_CLIENT", "1");
        } else {
            // As if the Python package were not installed.
            command.env("MAINSTAY_TORCH", "0");
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
        // The groups of ranks that the kernel killed; one that still has processes cannot be removed.
        for place in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"] {
            for entry in fs::read_dir(place).into_iter().flatten().flatten() {
                if entry.file_name().to_string_lossy().starts_with("mainstay-matrix-") {
                    let _ = fs::remove_dir(entry.path());
                }
            }
        }
    }
}
