//! `cargo xtask demo`: a real training run loses a rank in the middle and ends with the same bits as one that did
//! not. Exit status 0 means that all checks passed; the times are shown, not checked.

mod hosts;
mod job;
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::build;
use crate::journal::{self, Summary};
use crate::paths;
use crate::progress::Progress;
use crate::venv::{self, Venv};
use crate::wheel;
use job::{Job, Kill};

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Steps to train in each of the two runs.
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u64).range(40..))]
    steps: u64,
    /// The rank that is killed in the middle.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..2))]
    kill_rank: u64,
    /// Hosts of the job: several launchers on this machine, each with one rank. A rank is killed, a host vanishes and a spare
    /// takes its place, and a launcher is killed and started again.
    #[arg(long, default_value_t = 1, value_parser = hosts_of)]
    hosts: usize,
    /// Show what the ranks and the launcher print instead of keeping it in files only.
    #[arg(long)]
    verbose: bool,
}

fn hosts_of(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|hosts| (1..=8).contains(hosts)).ok_or_else(|| "from 1 to 8 hosts".to_owned())
}

/// What the training script writes at its end.
#[derive(Clone, Debug, Deserialize, PartialEq)]
struct Trained {
    steps: u64,
    loss: f64,
    loss_hex: String,
    resumed_from: u64,
    parameters_sha256: String,
}

/// Builds, trains undisturbed, trains disturbed, compares.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    if args.hosts > 1 {
        println!(
            "Mainstay's demo: a PyTorch run on {} hosts loses a rank, a host and a launcher, and ends as if it had not.",
            args.hosts
        );
    } else {
        println!(
            "Mainstay's demo: a 2-rank PyTorch run loses a rank in the middle, and ends as if it had not."
        );
    }
    if !paths::release_mainstay().exists() {
        println!(
            "A first run builds the program (some minutes) and may fetch PyTorch (about 3 GB); later runs do not."
        );
    }
    println!();
    let venv = prepare(&progress)?;

    let folder = paths::target().join("demo");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }

    if args.hosts > 1 {
        let held = hosts::run(&progress, &venv, args, &folder)?;
        return Ok(end(&progress, &folder, held));
    }

    println!();
    progress.note(&format!("Training undisturbed, for the comparison: {} steps on 2 ranks", args.steps));
    let plain = Run::in_folder(&folder.join("undisturbed"))?;
    plain.job(&venv, args)?.follow(None)?;
    let undisturbed = plain.trained()?;
    progress.note(&format!("  final loss {:.6}", undisturbed.loss));

    println!();
    let middle = kill_step(args.steps);
    progress.note(&format!("The same again, and rank {} gets a SIGKILL about step {middle}", args.kill_rank));
    let hurt = Run::in_folder(&folder.join("disturbed"))?;
    let kill = Kill { rank: args.kill_rank, at_step: middle };
    let followed = hurt.job(&venv, args)?.follow(Some(kill))?;
    let disturbed = hurt.trained()?;
    let summary = Summary::read(&hurt.logs)?;

    let held = report::print(&report::RunSummary {
        kill,
        followed: &followed,
        summary: &summary,
        undisturbed: &undisturbed,
        disturbed: &disturbed,
    });
    Ok(end(&progress, &folder, held))
}

fn end(progress: &Progress, folder: &Path, held: bool) -> ExitCode {
    println!();
    println!("Journal, logs and checkpoints of both runs: {}", folder.display());
    println!("All of it took {:.0} s.", progress.elapsed().as_secs_f64());
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prepares everything that training needs.
fn prepare(progress: &Progress) -> Result<Venv> {
    build::release(progress)?;
    let venv = venv::ensure(progress)?;
    wheel::install(progress, &venv)?;
    Ok(venv)
}

/// A little past the middle and not just after a checkpoint, so that there is something to lose.
fn kill_step(steps: u64) -> u64 {
    steps / 2 + 5
}

/// A run's place on disk.
struct Run {
    logs: PathBuf,
    result: PathBuf,
}

impl Run {
    fn in_folder(folder: &Path) -> Result<Self> {
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
        Ok(Self { logs, result: folder.join("result.json") })
    }

    /// The launcher with the training script, as a person would start it.
    fn job(&self, venv: &Venv, args: &Args) -> Result<Job> {
        let mut command = Command::new(paths::release_mainstay());
        command
            .args(["run", "--nproc-per-node", "2", "--max-restarts", "3", "--log-dir"])
            .arg(&self.logs)
            .arg(paths::root().join("xtask/demo/train.py"))
            .args(["--steps", &args.steps.to_string()])
            .arg("--result")
            .arg(&self.result);
        activate(&mut command, venv);
        Job::start(command, &self.logs, args)
    }

    fn trained(&self) -> Result<Trained> {
        let text = fs::read_to_string(&self.result)
            .with_context(|| format!("the training script left no {}", self.result.display()))?;
        serde_json::from_str(&text).with_context(|| format!("parsing {}", self.result.display()))
    }
}

/// The environment's Python comes first, as after `source bin/activate`; variables of an outer job are removed.
pub fn activate(command: &mut Command, venv: &Venv) {
    let bin = venv.file("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let joined = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)));
    if let Ok(joined) = joined {
        command.env("PATH", joined);
    }
    command.env("VIRTUAL_ENV", venv.file("")).env("PYTHON_EXEC", venv.python());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_a_job = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].contains(&&*text);
        if of_a_job
            || text.starts_with("TORCHELASTIC_")
            || text.starts_with("PET_")
            || text.starts_with("MAINSTAY_")
        {
            command.env_remove(name);
        }
    }
}

/// The result of following a run to its end.
pub struct Followed {
    /// When the signal was sent, on [`journal::now`]'s clock.
    pub killed_at: Option<u64>,
    /// The job's newest step at that time.
    pub killed_at_step: u64,
    /// The whole journal.
    pub entries: Vec<journal::Entry>,
}
