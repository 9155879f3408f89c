//! The training program, and the Python that runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// With PyTorch, as a user would write it; and without.
const TORCH: &str = include_str!("train_torch.py");
const PLAIN: &str = include_str!("train_plain.py");

/// Exits with a status of its own where the package is missing, so that other errors keep their text.
const ASK: &str = "\
import importlib.util, sys
found = lambda name: importlib.util.find_spec(name) is not None
sys.exit(3) if not found('mainstay') else print(found('torch'))";
const NO_PACKAGE_EXIT: i32 = 3;

/// Variables of an outer job would make its ranks of the demo's.
const OF_A_JOB: [&str; 5] = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// Starts a launcher with the script of the demo.
pub(super) struct Program {
    mainstay: PathBuf,
    python: PathBuf,
    script: PathBuf,
    has_torch: bool,
}

impl Program {
    /// Asks the Python what it has, and writes the script into the folder.
    pub(super) fn find(named: Option<&Path>, plain: bool, folder: &Path) -> anyhow::Result<Program> {
        let mainstay = std::env::current_exe().context("finding this program's own file")?;
        // A wheel installs both into one directory.
        let beside = mainstay.parent().map(|bin| bin.join("python3")).filter(|python| python.exists());
        let beside = beside.filter(|python| has_torch(python).is_ok());
        let python = named.map(Path::to_owned).or(beside).unwrap_or_else(|| "python3".into());
        let has_torch = has_torch(&python)? && !plain;
        let script = folder.join("train.py");
        std::fs::write(&script, if has_torch { TORCH } else { PLAIN })
            .with_context(|| format!("writing {}", script.display()))?;
        Ok(Program { mainstay, python, script, has_torch })
    }

    pub(super) fn described(&self) -> &'static str {
        if self.has_torch { "PyTorch (DDP, gloo, CPU)" } else { "a training loop in plain Python" }
    }

    /// A launcher as a person would start it, with options of its own and of the script.
    pub(super) fn launcher(&self, options: &[String], script: &[String]) -> Command {
        let mut command = Command::new(&self.mainstay);
        command.arg("run").args(options).arg(&self.script).args(script).env("PYTHON_EXEC", &self.python);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let prefixes = ["TORCHELASTIC_", "PET_", "MAINSTAY_"];
            if OF_A_JOB.contains(&&*text) || prefixes.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command
    }

    /// The pause after each step, in seconds. Steps are seen by polling: without a pause a run could be over before its
    /// last fault.
    pub(super) fn pause(&self, hosts: u8) -> &'static str {
        match (hosts, self.has_torch) {
            (1, true) => "0",
            (1, false) => "0.02",
            _ => "0.1",
        }
    }
}

/// Whether this Python has PyTorch; it must have Mainstay's package.
fn has_torch(python: &Path) -> anyhow::Result<bool> {
    let output = Command::new(python)
        .args(["-c", ASK])
        .output()
        .with_context(|| format!("starting {} (--python names another one)", python.display()))?;
    if output.status.code() == Some(NO_PACKAGE_EXIT) {
        bail!(
            "{} has no package mainstay: install it with `{} -m pip install mainstay-train`, or name another Python with \
             --python",
            python.display(),
            python.display()
        );
    }
    if !output.status.success() {
        bail!("{}: {}", python.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout.starts_with(b"True"))
}
