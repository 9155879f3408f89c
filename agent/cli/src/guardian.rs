//! The hidden subcommand that a launcher starts as its guardian.

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_launcher::ranks::guardian;

/// Guards a launcher
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What all processes of the job carry in their environment: NAME=VALUE
    mark: String,
    /// The job's cgroup
    cgroup: Option<PathBuf>,
    /// The memory with the job's checkpoints: what is in it is brought to the disk
    #[arg(long)]
    pool: Option<PathBuf>,
}

/// Waits until the launcher, at the other end of standard input, is gone.
pub fn run(args: &Args) -> ExitCode {
    let left = guardian::stand_guard(std::io::stdin().lock(), &args.mark, args.cgroup.as_deref());
    if let (true, Some(pool)) = (left, &args.pool) {
        // The launcher's lock is released with the last of its threads, possibly a moment after its end of the
        // pipe.
        for _ in 0..50 {
            match mainstay_tier::pool::recover(pool) {
                Ok(None) if pool.exists() => std::thread::sleep(std::time::Duration::from_millis(100)),
                // Standard error is the launcher's: anyone who still reads it sees the lines.
                Ok(Some(recovered)) => {
                    recovered.lines().iter().for_each(|line| eprintln!("mainstay: {line}"));
                    break;
                }
                _ => break,
            }
        }
    }
    ExitCode::SUCCESS
}
