//! `mainstay job` and `mainstay inject`: orders for a running job.

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_proto::v1::InjectedFault;

use super::client::{AskError, Client};
use super::find::{Ask, find};
use super::{exit, output};

/// Order something for a running job
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay job restart --job exp --reason \"new NCCL settings\"
  mainstay job stop --job exp --reason \"wrong learning rate\"

Root and the job's own user may order; the job's journal keeps who and why.
Exit status: 0 done, 3 no such job, not now or not allowed, 64 the command line was not understood.")]
pub(super) struct Job {
    #[command(subcommand)]
    order: Order,
}

#[derive(Debug, clap::Subcommand)]
enum Order {
    /// Stop all ranks and start them anew; no budget is charged
    Restart(Place),
    /// Have the ranks save where they can, and end the job
    Stop(Place),
}

/// Do something to a rank of a test job that was started with --allow-inject
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay inject kill --rank 3 --job drill --reason \"weekly drill\"
  mainstay inject stop --rank 0 --job drill --reason \"is a hang found?\"

Exit status: 0 done, 3 no such job or rank, or the job did not opt in, 64 the command line was not understood.")]
pub(super) struct Inject {
    /// What is done to the rank's process
    fault: Fault,
    /// The rank
    #[arg(long, value_name = "RANK")]
    rank: u32,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Fault {
    /// SIGKILL
    Kill,
    /// SIGTERM
    Terminate,
    /// SIGSTOP: it hangs
    Stop,
    /// SIGCONT: a stopped one goes on
    Continue,
    /// SIGINT: a Python rank raises KeyboardInterrupt
    Interrupt,
}

#[derive(Debug, clap::Args)]
struct Place {
    /// The job; not needed where only one runs
    #[arg(long, value_name = "ID")]
    job: Option<String>,
    /// The job's socket, where it is not in its usual place
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Why; it is kept in the journal with who said it
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub(super) async fn job(args: Job) -> anyhow::Result<ExitCode> {
    match args.order {
        Order::Restart(place) => {
            let said = async { connect(&place).await?.restart_job(&place.reason).await };
            done(said.await, "restarting\n")
        }
        Order::Stop(place) => {
            let said = async { connect(&place).await?.stop_job(&place.reason).await };
            done(said.await, "stopping\n")
        }
    }
}

pub(super) async fn inject(args: Inject) -> anyhow::Result<ExitCode> {
    let fault = match args.fault {
        Fault::Kill => InjectedFault::Kill,
        Fault::Terminate => InjectedFault::Terminate,
        Fault::Stop => InjectedFault::Stop,
        Fault::Continue => InjectedFault::Continue,
        Fault::Interrupt => InjectedFault::Interrupt,
    };
    let said = async { connect(&args.place).await?.inject_fault(fault, args.rank, &args.place.reason).await };
    done(said.await, &format!("rank {}: done\n", args.rank))
}

/// The launcher of the job that is meant.
async fn connect(place: &Place) -> Result<Client, AskError> {
    let found = find(&Ask { socket: place.socket.clone(), json: false });
    let named = |job: Option<&String>| place.job.is_none() || job == place.job.as_ref();
    let launchers = found.places.iter().filter(|found| place.socket.is_some() || found.job.is_some());
    let mut answering = Vec::new();
    let mut why = None;
    for found in launchers.filter(|found| place.socket.is_some() || named(found.job.as_ref())) {
        match Client::connect(&found.socket).await {
            Ok(client) => answering.push((found, client)),
            Err(error) => why = why.or(Some(error)),
        }
    }
    match answering.pop() {
        Some((_, client)) if answering.is_empty() => Ok(client),
        Some((found, _)) => Err(AskError::Other {
            socket: found.socket.clone(),
            reason: "more than one job runs here: name one with --job".to_owned(),
        }),
        None => {
            let looked_at = found.looked_at.last().cloned().unwrap_or_default();
            Err(why.unwrap_or_else(|| AskError::Missing(looked_at.into())))
        }
    }
}

fn done(said: Result<(), AskError>, words: &str) -> anyhow::Result<ExitCode> {
    match said {
        Ok(()) => {
            output::print(words)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            output::note(&format!("error: {error}"));
            Ok(ExitCode::from(exit::UNKNOWN))
        }
    }
}
