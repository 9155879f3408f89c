//! `cargo xtask bench NAME`: measures, and never judges. A figure that cannot be measured here is left out with the
//! reason.

mod agent;
mod attribute;
mod build;
mod checkpoint;
mod detect;
mod events;
mod figure;
mod goodput;
mod gpus;
mod hang;
mod heartbeat;
pub mod hosts;
mod in_process;
mod judge;
mod kernel_log;
mod large;
mod launchers;
mod peers;
mod process;
mod replicate;
mod replicate_nvrx;
mod restart;
mod simulate;
mod soak;
mod stop;
mod training;
mod verdicts;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::build as building;
use crate::command;
use crate::paths;
use crate::progress::Progress;
use crate::venv;
use crate::wheel;
use figure::Report;
use launchers::Bed;

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// What to measure.
    #[arg(value_enum, required = true)]
    names: Vec<Name>,
    /// Write the figures to this file, each as soon as it is measured [default: target/bench/figures.json]
    #[arg(long)]
    json: Option<PathBuf>,
    /// Samples per figure, where it is a matter of choice: kills for `detect`, faults for `restart`, jobs
    /// for `judge`.
    #[arg(long)]
    samples: Option<usize>,
    /// States of `checkpoint` are of this size in GiB at most: 0.1 to see that it works.
    #[arg(long, default_value_t = 4.0)]
    most_gib: f64,
    /// Only figures whose names start with one of these, such as `heartbeat.rust,detect.hang`.
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Of `verdicts`, only cells whose name contains this, such as `sigkill` or `gpt`.
    #[arg(long, default_value = "")]
    cells: String,
    /// Of `verdicts`, one part of several, such as `2/4`: each part has every fault and every program.
    #[arg(long)]
    part: Option<verdicts::Part>,
    /// Each bench in less than three minutes: fewer samples, wider intervals, no peer but torchrun.
    #[arg(long)]
    quick: bool,
    /// Measure no peers.
    #[arg(long)]
    no_peers: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Name {
    /// The cost of a heartbeat in Rust, C and Python.
    Heartbeat,
    /// Memory and CPU of the agent with 8 beating ranks.
    Agent,
    /// Memory and CPU of the agent with 8 GPUs, 144 NVLinks and 8 cards, simulated by a library. Part of agent.
    Gpus,
    /// From the death of a rank to the fact in the journal.
    Detect,
    /// From the SIGKILL of a rank with much memory to the fact, and to the end of its process. Part of detect.
    Large,
    /// From the SIGSTOP of a rank to the verdict that it hangs, compared with NVRx. Part of detect.
    Hang,
    /// From a counter of NVML to the verdict in the API's stream. Part of detect.
    Counters,
    /// From an XID in the kernel log to the verdict in the API's stream, and the cost of a storm of lines. Part of
    /// detect.
    KernelLog,
    /// From a fault to the first Python line and to the first step of the new ranks; then what Goodput measures.
    Restart,
    /// The same for the first SIGKILL of a job, after 15 s and 3 s after its ranks' first line. Part of restart.
    FirstRestart,
    /// A job of several hosts: restarts, a lost leader, and a round of 64 launchers.
    Hosts,
    /// From a rank that raises to all ranks in their function again, in process. Part of restart.
    InProcess,
    /// Real jobs with random, nested faults: what went wrong.
    Soak,
    /// Useful work per time, with a SIGKILL every 20 s.
    Goodput,
    /// The cost of a save for training, and how soon a state is loaded: as ratios to one memcpy of the same bytes.
    Checkpoint,
    /// The cost for training while its steps are sent to a peer. Part of checkpoint.
    Training,
    /// The judges on simulated jobs of up to 131,072 ranks.
    Judge,
    /// Jobs of 100,000 ranks, simulated: their leader, their rounds, hosts wrongly considered lost, time in
    /// training.
    Simulate,
    /// How fast logs are read, how soon there is a verdict, and how right it is on labelled cases.
    Attribute,
    /// Real programs with faults of known cause: the verdicts and the decisions.
    Verdicts,
    /// A checkpoint's shard to a peer and back, compared with plain TCP.
    Replicate,
    /// A cold release build, and the size of the program.
    Build,
}

impl Name {
    /// Whether it needs neither the program nor ranks, or builds and starts them itself.
    fn needs_no_program(self) -> bool {
        matches!(
            self,
            Name::Build | Name::Judge | Name::Simulate | Name::Attribute | Name::Replicate | Name::Verdicts
        )
    }

    /// What it measures besides `mainstay`, as arguments of `cargo build --release`.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Name::Heartbeat => &["-p mainstay-client --example beat_cost", "-p mainstay-client"],
            Name::Agent | Name::Gpus | Name::Counters | Name::Detect => &["-p fake-devices"],
            Name::Judge => &["-p mainstay-sim --example judge"],
            Name::Simulate => &["-p mainstay-sim --example simulate"],
            Name::Attribute => &["-p mainstay-diagnosis --example attribute_figures"],
            Name::Replicate => &["-p mainstay-tier --example replicate_cost"],
            _ => &[],
        }
    }

    /// Whether it needs the program and no ranks.
    fn is_of_the_agent_alone(self) -> bool {
        matches!(self, Name::KernelLog | Name::Gpus | Name::Counters)
    }
}

impl Args {
    /// Samples of a figure: those asked for, else the usual number or that of `--quick`.
    fn samples(&self, usual: usize, quick: usize) -> usize {
        self.samples.unwrap_or(if self.quick { quick } else { usual })
    }

    /// The same with a bound, for samples that take long.
    fn at_most(&self, usual: usize, quick: usize) -> usize {
        self.samples(usual, quick).clamp(1, usual)
    }
}

/// Measures everything that was requested.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    let _alone = stop::alone()?;
    stop::end_children_with_us()?;
    let file = args.json.clone().unwrap_or_else(|| paths::target().join("bench/figures.json"));
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let mut report = Report::begin(args.only.clone(), file, args.quick);
    let needs_ranks = args.names.iter().any(|name| !name.needs_no_program() && !name.is_of_the_agent_alone());
    let bed = if needs_ranks { Some(prepare(&progress, args)?) } else { None };
    if bed.is_none() && args.names.iter().any(|name| name.is_of_the_agent_alone()) {
        building::release(&progress)?;
    }
    for name in &args.names {
        build_programs(&progress, *name)?;
        report.next_bench();
        match (name, &bed) {
            (Name::Build, _) if args.quick => {
                eprintln!("build: left out: a cold build is longer than --quick allows");
            }
            (Name::Build, _) => build::measure(&progress, &mut report),
            (Name::Replicate, _) => {
                replicate::measure(&progress, args.samples(7, 1), args.quick, !args.no_peers, &mut report);
            }
            (Name::Verdicts, _) => {
                verdicts::measure(&progress, &args.cells, args.part, args.quick, &mut report)
            }
            (Name::Attribute, _) => attribute::measure(&progress, !args.no_peers && !args.quick, &mut report),
            (Name::Simulate, _) => simulate::measure(&progress, args.quick, &mut report),
            (Name::Judge, _) => judge::measure(&progress, args.samples(300, 30), &mut report),
            (Name::Heartbeat, Some(bed)) => {
                heartbeat::measure(&progress, bed, args.at_most(5, 2), args.quick, &mut report);
            }
            (Name::Agent, Some(bed)) => {
                agent::measure(&progress, bed, &mut report);
                gpus::weigh(&progress, &mut report);
            }
            (Name::Gpus, _) => gpus::weigh(&progress, &mut report),
            (Name::Counters, _) => gpus::detect(&progress, args.at_most(20, 3), &mut report),
            (Name::Detect, Some(bed)) => {
                detect::measure(&progress, bed, args.samples(1000, 100), &mut report);
                large::measure(&progress, bed, args.at_most(7, 2), &mut report);
                hang::measure(&progress, bed, args.at_most(20, 2), &mut report);
                kernel_log::measure(&progress, args.samples(1000, 100), &mut report);
                gpus::detect(&progress, args.at_most(20, 3), &mut report);
            }
            (Name::Large, Some(bed)) => {
                large::measure(&progress, bed, args.samples(7, 2), &mut report);
            }
            (Name::Hang, Some(bed)) => {
                hang::measure(&progress, bed, args.samples(20, 2), &mut report);
            }
            (Name::KernelLog, _) => kernel_log::measure(&progress, args.samples(1000, 100), &mut report),
            (Name::Restart, Some(bed)) => {
                in_process::measure(&progress, bed, args.samples(20, 5), args.quick, &mut report);
                restart::measure(&progress, bed, args.samples(5, 2), &mut report);
                restart::measure_first(&progress, bed, args.at_most(5, 2), &mut report);
                goodput::measure(&progress, bed, args.quick, &mut report);
            }
            (Name::FirstRestart, Some(bed)) => {
                restart::measure_first(&progress, bed, args.samples(5, 2), &mut report);
            }
            (Name::Hosts, Some(bed)) => hosts::measure(&progress, bed, args, &mut report),
            (Name::InProcess, Some(bed)) => {
                in_process::measure(&progress, bed, args.samples(20, 5), args.quick, &mut report);
            }
            (Name::Checkpoint, Some(bed)) => {
                let most_gib = if args.quick { args.most_gib.min(1.0) } else { args.most_gib };
                checkpoint::measure(&progress, bed, args.samples(9, 3), most_gib, &mut report);
                // A pair of jobs takes some four minutes: `training --quick` is a separate bench.
                if !args.quick {
                    training::measure(&progress, bed, 2, &mut report);
                }
            }
            (Name::Training, Some(bed)) => {
                training::measure(&progress, bed, args.samples(3, 1), &mut report);
            }
            (Name::Soak, Some(bed)) => soak::measure(&progress, bed, args.samples(1000, 10), &mut report),
            (Name::Goodput, Some(bed)) => goodput::measure(&progress, bed, args.quick, &mut report),
            (_, None) => {}
        }
    }
    report.print();
    if report.is_empty() {
        eprintln!("no figure was measured; the reasons are above");
        return Ok(ExitCode::FAILURE);
    }
    let not_found = report.not_found();
    if !not_found.is_empty() {
        eprintln!("--only: no figure was measured whose name starts with {}", not_found.join(", "));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds what a bench runs, before its time starts: with `--quick` a build must not use up the time of figures.
fn build_programs(progress: &Progress, name: Name) -> Result<()> {
    for program in name.programs() {
        progress.step(&format!("Building: {program}"), || {
            let mut build = command::cargo();
            build.args(["build", "--quiet", "--release", "--locked"]).args(program.split(' '));
            command::run(build.current_dir(paths::root()))
        })?;
    }
    Ok(())
}

/// The program, our Python environment, and the peers' if available.
fn prepare(progress: &Progress, args: &Args) -> Result<Bed> {
    building::release(progress)?;
    let venv = venv::ensure(progress)?;
    wheel::install(progress, &venv)?;
    let wants_peers = args.names.iter().any(|name| {
        matches!(
            name,
            Name::Heartbeat
                | Name::Agent
                | Name::Detect
                | Name::Hang
                | Name::Restart
                | Name::Hosts
                | Name::InProcess
                | Name::Checkpoint
                | Name::Goodput
        )
    });
    let peers = if args.no_peers || args.quick || !wants_peers { None } else { peers::ensure(progress) };
    Ok(Bed { venv, peers, torchrun: !args.no_peers })
}
