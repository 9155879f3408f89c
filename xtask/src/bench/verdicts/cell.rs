//! One fault in one job.

use std::sync::atomic::{AtomicUsize, Ordering};

use mainstay_model::verdict::{Action, Decision, Verdict};
use tempfile::TempDir;

use super::table::Cell;
use crate::bench::prelude::*;

/// Limits with which hangs are found soon, even if a loaded machine takes long for a step.
const SOON: [&str; 4] =
    ["--hang-limit", "step=6s,unlearned=6s,first_step=40s,idle=10s", "--hang-limit", "confirm=1s"];

/// The result of a job with its fault.
#[derive(Debug, Default)]
pub struct Seen {
    pub verdict: Option<Verdict>,
    pub decision: Option<Decision>,
    /// Why there is none.
    pub problem: Option<String>,
    /// The program caught the fault and ended well: there was no failure to diagnose.
    pub survived: bool,
}

pub struct Place {
    python: PathBuf,
    folder: TempDir,
    may_mount: bool,
    has: Vec<String>,
    number: AtomicUsize,
}

impl Place {
    /// With the programs' interpreter.
    pub fn new(python: PathBuf) -> Result<Place> {
        let folder = tempfile::tempdir().context("making a folder")?;
        let may_mount = command::output(&mut cmd!("unshare --mount true")).is_ok();
        let modules = script_path("modules.py");
        let has = command::output(&mut cmd!("{python} {modules}"))?;
        let has = has.split_whitespace().map(str::to_owned).collect();
        Ok(Place { python, folder, may_mount, has, number: AtomicUsize::new(0) })
    }

    /// Whether this machine has what it needs: packages, and the right to mount and to make cgroups.
    pub fn can_run(&self, cell: &Cell) -> bool {
        let privileged = cell.fault.mounts || cell.fault.name == "oom";
        let needed = cell.program.needs.as_deref().and_then(|module| module.split('.').next());
        (self.may_mount || !privileged)
            && needed.is_none_or(|needed| self.has.iter().any(|had| had == needed))
    }

    /// Runs the job until it has decided, and ends it.
    pub fn run(&self, cell: &Cell) -> Seen {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.path().join(number.to_string());
        let seen = self.try_run(cell, &folder);
        let _ = fs::remove_dir_all(&folder);
        seen.unwrap_or_else(|error| Seen { problem: Some(format!("{error:#}")), ..Seen::default() })
    }

    fn try_run(&self, cell: &Cell, folder: &Path) -> Result<Seen> {
        for part in ["logs", "out", "marks"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let mut journal = Follower::new(&folder.join("logs"));
        let mut running = Running::start(self.command(cell, folder), &folder.join("launcher.log"))?;
        if let Some(signal) = cell.fault.signal {
            let mark = folder.join("marks/ready");
            let pid = running
                .wait_for("the place of the fault", || fs::read_to_string(&mark).ok()?.trim().parse().ok())?;
            strike(pid, Signal::try_from(signal).context("a signal of the table")?)?;
        }
        let decided = running.wait_for("decision", || journal.find(0, decision));
        let decision = match decided {
            Err(_) if running.ended().is_some_and(|status| status.success()) => {
                return Ok(Seen { survived: true, ..Seen::default() });
            }
            decided => Some(decided?),
        };
        let verdict = |entry: &Entry| match &entry.body {
            Body::Verdict(verdict) => Some(verdict.clone()),
            _ => None,
        };
        Ok(Seen { verdict: journal.entries.iter().find_map(verdict), decision, ..Seen::default() })
    }

    fn command(&self, cell: &Cell, folder: &Path) -> Command {
        let tests = paths::root().join("tests/healthy");
        let (program, ranks) = (paths::release_mainstay(), cell.program.ranks.to_string());
        let (logs, runtime) = (folder.join("logs"), folder.join("rt"));
        let mut run = cmd!(
            "{program} run --no-agent --max-restarts 3 --forget --shutdown-timeout 2s --nproc-per-node {ranks}
             --log-dir {logs} --runtime-dir {runtime}"
        );
        if cell.fault.hang {
            run.args(SOON);
        }
        if cell.program.shell {
            run.arg("--no-python").arg(tests.join("faults/train.sh"));
        }
        run.arg(tests.join("programs").join(format!("{}.py", cell.program.name)));
        run.args(&cell.program.arguments);
        self.environment(&mut run, cell, folder, &tests.join("faults"));
        // The launcher ends with the benchmark, however that ends.
        let mut outer = cmd!("setpriv --pdeathsig TERM");
        if cell.fault.mounts {
            outer.args(["unshare", "--mount", "--propagation", "private"]);
        }
        command::inside(outer, &run)
    }

    fn environment(&self, run: &mut Command, cell: &Cell, folder: &Path, faults: &Path) {
        let bin = self.python.parent().unwrap_or(Path::new("/usr/bin"));
        python::activate_folder(run, bin.parent().unwrap_or(bin));
        let out = folder.join("out");
        run.current_dir(&out).env("OUT", &out).env("PYTHONPATH", faults).envs([
            ("PYTHONDONTWRITEBYTECODE", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("FAULT", &cell.fault.name),
        ]);
        run.env("STEPS", (cell.after + 60).to_string()).env("FAULT_RANK", cell.rank().to_string());
        run.env("FAULT_AFTER", cell.after.to_string()).env("FAULT_MARKS", folder.join("marks"));
        run.env_remove("FAULT_WARNING").env_remove("FAULT_CLIENT").envs(&cell.program.variables);
        run.envs(cell.warning.then_some(("FAULT_WARNING", "1")));
        // As if the Python package were not installed.
        run.envs([if cell.program.client { ("FAULT_CLIENT", "1") } else { ("MAINSTAY_TORCH", "0") }]);
    }
}

/// Waiting is no decision yet.
fn decision(entry: &Entry) -> Option<Decision> {
    match &entry.body {
        Body::Decision(decision) if decision.action != Action::Wait => Some(decision.clone()),
        _ => None,
    }
}

impl Drop for Place {
    fn drop(&mut self) {
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
