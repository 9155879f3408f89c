//! `mainstay ack`, `silence` and `unsilence`: actions of an operator on a component.

use std::path::PathBuf;
use std::process::ExitCode;

use clap_complete::ArgValueCandidates;
use mainstay_model::units::Period;

use super::completions;
use super::order::{self, done};

/// Acknowledge the fault of a component: it does not count until it recurs or gets worse
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay ack gpu.0000:3b:00 --reason \"ticket 4711, board is ordered\"

Exit status: 0 done, 3 no agent, no such component or not allowed, 64 the command line was not understood.")]
pub(super) struct Ack {
    /// The component, as `mainstay status` names it
    #[arg(add = ArgValueCandidates::new(completions::components))]
    component: String,
    /// Reason; stored in the journal with the user
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    place: Agent,
}

/// Silence a component for a while: it does not count for the state of the node
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay silence host.disk --reason \"filling it on purpose\" --for 2h

Exit status: 0 done, 3 no agent, no such component or not allowed, 64 the command line was not understood.")]
pub(super) struct Silence {
    /// The component, as `mainstay status` names it
    #[arg(add = ArgValueCandidates::new(completions::components))]
    component: String,
    /// Reason; stored in the journal with the user
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// For how long, at most 30 days: 90s, 30m, 2h, 1d
    #[arg(long = "for", value_name = "TIME", value_parser = period)]
    period: Period,
    #[command(flatten)]
    place: Agent,
}

/// End the silence of a component
#[derive(Debug, clap::Args)]
pub(super) struct Unsilence {
    /// The component, as `mainstay status` names it
    #[arg(add = ArgValueCandidates::new(completions::components))]
    component: String,
    #[command(flatten)]
    place: Agent,
}

#[derive(Debug, clap::Args)]
struct Agent {
    /// Ask the agent on this socket, and no other
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    socket: Option<PathBuf>,
}

pub(super) async fn ack(args: Ack) -> anyhow::Result<ExitCode> {
    let response =
        async { order::agent(args.place.socket).await?.acknowledge(&args.component, &args.reason).await };
    done(response.await, &format!("{}: acknowledged\n", args.component))
}

pub(super) async fn silence(args: Silence) -> anyhow::Result<ExitCode> {
    let nanos = args.period.0.0;
    let duration = prost_types::Duration {
        seconds: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
        // The remainder of a division by 10^9 fits.
        nanos: (nanos % 1_000_000_000) as i32,
    };
    let response = async {
        order::agent(args.place.socket).await?.silence(&args.component, &args.reason, duration).await
    };
    done(response.await, &format!("{}: silenced for {}\n", args.component, args.period))
}

pub(super) async fn unsilence(args: Unsilence) -> anyhow::Result<ExitCode> {
    let response = async { order::agent(args.place.socket).await?.unsilence(&args.component).await };
    done(response.await, &format!("{}: no longer silenced\n", args.component))
}

fn period(text: &str) -> Result<Period, String> {
    Period::parse(text)
}
