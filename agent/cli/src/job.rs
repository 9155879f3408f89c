//! `mainstay job` and `mainstay inject`: orders for a running job.

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_proto::v1::{InjectFaultRequest, InjectedFault};

use super::client::{AskError, Client};
use super::find::JobName;
use super::order::{self, done};

/// Restart or stop a running job, or exclude a rank's GPU
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay job restart --job exp --reason \"new NCCL settings\"
  mainstay job stop --job exp --reason \"wrong learning rate\"
  mainstay job exclude-rank 3 --job exp --reason \"its GPU is slow\"

Root and the job's own user may order; the job's journal keeps who and why.
Exit status: 0 done, 3 no such job, not now or not allowed, 64 the command line was not understood.")]
pub(super) struct Job {
    #[command(subcommand)]
    order: Order,
}

#[derive(Debug, clap::Subcommand)]
enum Order {
    /// Stop all ranks and start them again; no budget is charged
    Restart(JobTarget),
    /// Have the ranks save where they can, and end the job
    Stop(JobTarget),
    /// Stop using a rank's GPU: all ranks start again without it, where another GPU can take its place
    ExcludeRank {
        /// The rank; its GPU is the one at its place (LOCAL_RANK) among those that the job sees
        #[arg(value_name = "RANK")]
        rank: u32,
        #[command(flatten)]
        place: JobTarget,
    },
}

/// Inject a fault into a rank of a test job that was started with --allow-inject
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay inject kill --rank 3 --job drill --reason \"weekly drill\"
  mainstay inject stop --rank 0 --job drill --reason \"is a hang found?\"
  mainstay inject exception --rank 1 --at-step 500 --job drill --reason \"in process?\"
  mainstay inject slow --by 30 --rank 2 --job drill --reason \"is it found?\"

Exit status: 0 done, 3 no such job or rank, or the job did not opt in, 64 the command line was not understood.")]
pub(super) struct Inject {
    /// What is done to the rank's process
    fault: Fault,
    /// The rank
    #[arg(long, value_name = "RANK")]
    rank: u32,
    /// Inject after the rank has completed this step; default: immediately
    #[arg(long, value_name = "STEP")]
    at_step: Option<u64>,
    /// Percentage of time that a slow rank loses
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=95))]
    by: Option<u32>,
    #[command(flatten)]
    place: JobTarget,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Fault {
    /// SIGKILL
    Kill,
    /// SIGTERM
    Terminate,
    /// SIGSTOP: it hangs
    Stop,
    /// SIGCONT: a stopped one continues
    Continue,
    /// SIGINT: a Python rank raises KeyboardInterrupt
    Interrupt,
    /// None of its files can grow any more
    DiskFull,
    /// Its main thread raises (a Python rank that imports mainstay or torch, as for all that follow)
    Exception,
    /// Its main thread stops; the others wait for it in their next collective
    Hang,
    /// It loses a share of its time (--by)
    Slow,
    /// Its connections to other ranks break
    Network,
    /// Its GPU has a memory error that could not be corrected (where the agent's gpu.library is the one for drills)
    Ecc,
}

#[derive(Debug, clap::Args)]
struct JobTarget {
    #[command(flatten)]
    job: JobName,
    /// The job's socket, where it is not in its usual place
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Reason; stored in the journal with the user
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub(super) async fn job(args: Job) -> anyhow::Result<ExitCode> {
    match args.order {
        Order::Restart(place) => {
            let response = async { connect(&place).await?.restart_job(&place.reason).await };
            done(response.await, "restarting\n")
        }
        Order::Stop(place) => {
            let response = async { connect(&place).await?.stop_job(&place.reason).await };
            done(response.await, "stopping\n")
        }
        Order::ExcludeRank { rank, place } => {
            let response = async { connect(&place).await?.exclude_rank(rank, &place.reason).await };
            done(response.await, &format!("rank {rank}: restarting without its GPU\n"))
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
        Fault::DiskFull => InjectedFault::DiskFull,
        Fault::Exception => InjectedFault::Exception,
        Fault::Hang => InjectedFault::Hang,
        Fault::Slow => InjectedFault::Slow,
        Fault::Network => InjectedFault::Network,
        Fault::Ecc => InjectedFault::Ecc,
    };
    let request = InjectFaultRequest {
        fault: fault.into(),
        rank: args.rank,
        reason: args.place.reason.clone(),
        at_step: args.at_step,
        slow_percent: args.by,
    };
    let response = async { connect(&args.place).await?.inject_fault(request).await };
    let state = if args.at_step.is_some() { "waits for its step" } else { "done" };
    done(response.await, &format!("rank {}: {state}\n", args.rank))
}

async fn connect(place: &JobTarget) -> Result<Client, AskError> {
    order::launcher(place.socket.clone(), place.job.get().map(String::as_str)).await
}
