//! `mainstay demo`: a real training run loses a rank in the middle and ends with the same bits as one that did not. The
//! times are shown, not checked.

/// Prints a line. A reader that went away (`| head`) does not end the demo.
macro_rules! say {
    ($($text:tt)*) => {
        // Nothing can be done about it.
        drop($crate::output::print(&format!("{}\n", format_args!($($text)*))))
    };
}

mod cluster;
mod line;
mod program;
mod recovery;
mod report;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use self::program::Program;
use self::run::{Kill, Run};
use super::exit;

/// The interval of polling a journal. It only determines how soon its entries are seen.
const POLL_INTERVAL: Duration = Duration::from_millis(40);

/// A run of the demo takes seconds; a run that takes this long will not end.
const LIMIT: Duration = Duration::from_secs(300);

/// Show a recovery: train a small model, kill a rank in the middle, and compare the end with an undisturbed run
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay demo                2 ranks, one of which gets a SIGKILL
  mainstay demo --hosts 3      3 launchers: a rank is killed, a host is lost and replaced, a launcher is restarted

The ranks run PyTorch (DDP, gloo, CPU) if the Python has it, else a training loop in plain Python.

Exit status: 0 all checks passed, 1 a check failed, 3 the demo could not run, 64 the command line was not understood.")]
pub(super) struct Args {
    /// Steps to train in each of the two runs
    #[arg(long, value_name = "N", default_value_t = 160, value_parser = clap::value_parser!(u64).range(40..))]
    steps: u64,
    /// The rank that is killed in the middle
    #[arg(long, value_name = "RANK", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..2))]
    kill_rank: u32,
    /// Hosts of the job: several launchers on this machine, each with one rank, and one more as a spare
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: u8,
    /// The Python of the ranks, with the package mainstay; default: the one beside this program, else python3
    #[arg(long, value_name = "PROGRAM", env = "PYTHON_EXEC")]
    python: Option<PathBuf>,
    /// Train in plain Python also where PyTorch is installed
    #[arg(long)]
    plain: bool,
    /// A new or empty directory for the journals, logs and checkpoints; default: one in the temporary directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Show what the ranks and the launcher print instead of keeping it in files only
    #[arg(long, conflicts_with = "hosts")]
    verbose: bool,
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

impl Trained {
    fn read(result: &Path) -> anyhow::Result<Trained> {
        let text = std::fs::read_to_string(result)
            .with_context(|| format!("the training script left no {}", result.display()))?;
        serde_json::from_str(&text).with_context(|| format!("parsing {}", result.display()))
    }
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let folder = folder(args.dir.as_deref())?;
    let program = Program::find(args.python.as_deref(), args.plain, &folder)?;
    say!("Mainstay's demo: {}, with {}", purpose(args.hosts), program.described());
    say!("");
    let passed = match args.hosts {
        1 => one_host(&args, &program, &folder).await?,
        _ => cluster::run(&args, &program, &folder).await?,
    };
    say!("");
    say!("Journal, logs and checkpoints of both runs: {}", folder.display());
    say!("All of it took {:.0} s.", began.elapsed().as_secs_f64());
    Ok(ExitCode::from(if passed { exit::OK } else { exit::DEGRADED }))
}

fn purpose(hosts: u8) -> String {
    match hosts {
        1 => "a run of 2 ranks loses a rank in the middle, and ends as if it had not".to_owned(),
        _ => {
            format!("a run on {hosts} hosts loses a rank, a host and a launcher, and ends as if it had not")
        }
    }
}

/// Trains undisturbed, trains disturbed, compares.
async fn one_host(args: &Args, program: &Program, folder: &Path) -> anyhow::Result<bool> {
    say!("Training undisturbed, for the comparison: {} steps on 2 ranks", args.steps);
    let plain = Run::start(args, program, &folder.join("undisturbed"))?;
    let result = plain.result.clone();
    plain.follow(None).await?;
    let undisturbed = Trained::read(&result)?;
    say!("  final loss {:.6}", undisturbed.loss);

    say!("");
    // A little past the middle and not just after a checkpoint, so that there is something to lose.
    let kill = Kill { rank: args.kill_rank, at_step: args.steps / 2 + 5 };
    say!("The same again, and rank {} gets a SIGKILL about step {}", kill.rank, kill.at_step);
    let disturbed = Run::start(args, program, &folder.join("disturbed"))?;
    let result = disturbed.result.clone();
    let followed = disturbed.follow(Some(kill)).await?;
    Ok(report::print(&report::Report {
        kill,
        followed: &followed,
        undisturbed: &undisturbed,
        disturbed: &Trained::read(&result)?,
    }))
}

/// An empty directory for everything that the demo leaves.
fn folder(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let of_process = || std::env::temp_dir().join(format!("mainstay-demo-{}", std::process::id()));
    let folder = named.map_or_else(of_process, Path::to_owned);
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let folder = folder.canonicalize().with_context(|| format!("resolving {}", folder.display()))?;
    let mut entries = std::fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
    if entries.next().is_some() {
        bail!("--dir {}: it is not empty; name a new directory", folder.display());
    }
    Ok(folder)
}

/// Prints the conditions under which the demo has succeeded; whether all of them hold.
fn print_checks(checks: Vec<(String, bool)>) -> bool {
    say!("");
    let mut all = true;
    for (what, holds) in checks {
        say!("  {} {what}", if holds { "[ok]  " } else { "[FAIL]" });
        all &= holds;
    }
    all
}

/// What holds of both runs if the failures changed nothing.
fn equalities(undisturbed: &Trained, disturbed: &Trained) -> [(String, bool); 3] {
    [
        ("both runs trained the same steps".to_owned(), disturbed.steps == undisturbed.steps),
        ("the final loss is equal bit for bit".to_owned(), disturbed.loss_hex == undisturbed.loss_hex),
        (
            "every parameter is equal bit for bit".to_owned(),
            disturbed.parameters_sha256 == undisturbed.parameters_sha256,
        ),
    ]
}

fn print_losses(undisturbed: &Trained, disturbed: &Trained) {
    say!("");
    say!("Final loss  undisturbed: {:<22} {}", undisturbed.loss_hex, undisturbed.loss);
    say!("              disturbed: {:<22} {}", disturbed.loss_hex, disturbed.loss);
    let equal = undisturbed.loss_hex == disturbed.loss_hex;
    say!("            {}", if equal { "equal, bit for bit" } else { "NOT EQUAL" });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_content_is_refused_and_left_alone() {
        let dir = testing::tempdir().unwrap();
        let file = dir.path().join("mine");
        std::fs::write(&file, "kept").unwrap();
        assert!(folder(Some(dir.path())).is_err());
        assert_eq!(std::fs::read_to_string(file).unwrap(), "kept");
        let new = dir.path().join("new/one");
        assert_eq!(folder(Some(&new)).unwrap(), new.canonicalize().unwrap());
    }
}
