//! `cargo xtask bench NAME`: measures, and never judges. A figure that cannot be measured here is left out with
//! the reason.

mod agent;
mod attribute;
mod chaos;
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
mod install;
mod kernel_log;
mod large;
mod launchers;
mod prelude;
mod process;
mod replicate;
mod restart;
mod soak;
mod stop;
mod training;
mod verdicts;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use fs_err as fs;

use crate::progress::Progress;
use crate::python::{self, Venv};
use crate::{build, command, paths};
use figure::{Comparison, Figure, Of, Report};
use launchers::{Bed, Launcher};

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
    /// for `judge`, minutes for `chaos`.
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
    /// From an XID in the kernel log to the verdict in the API's stream, and the cost of a storm of lines. Part
    /// of detect.
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
    /// Faults of all kinds on three hosts, for half an hour (`--samples` minutes): what went wrong.
    Chaos,
    /// Useful work per time, with a SIGKILL every 20 s.
    Goodput,
    /// The cost of a save for training, and how soon a state is loaded: as ratios to one memcpy of the same
    /// bytes.
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
    /// What is released: its sizes, what it needs, and the time from the wheel to the end of the demo.
    Install,
}

impl Name {
    /// What it measures besides `mainstay`: a package and its targets.
    fn program(self) -> Option<&'static str> {
        Some(match self {
            Name::Heartbeat => "mainstay-client --lib --example beat_cost",
            Name::Agent | Name::Gpus | Name::Counters | Name::Detect => "fake-devices",
            Name::Judge => "mainstay-sim --example judge",
            Name::Simulate => "mainstay-sim --example simulate",
            Name::Attribute => "mainstay-diagnosis --example attribute_figures",
            Name::Replicate => "mainstay-tier --example replicate_cost",
            _ => return None,
        })
    }

    fn needs_program(self) -> bool {
        let others =
            [Name::Build, Name::Install, Name::Judge, Name::Simulate, Name::Attribute, Name::Replicate];
        !others.contains(&self)
    }

    /// Whether it starts ranks in our Python environment.
    fn needs_ranks(self) -> bool {
        let alone = [Name::KernelLog, Name::Gpus, Name::Counters, Name::Verdicts];
        self.needs_program() && !alone.contains(&self)
    }

    fn has_peers(self) -> bool {
        let without = [Name::Large, Name::FirstRestart, Name::Training, Name::Soak, Name::Chaos];
        self == Name::Replicate || self.needs_ranks() && !without.contains(&self)
    }

    fn parts(self) -> &'static [fn(&mut Bench, &Bed)] {
        match self {
            Name::Heartbeat => &[heartbeat::measure],
            Name::Agent => &[agent::measure, gpus::weigh],
            Name::Gpus => &[gpus::weigh],
            Name::Detect => {
                &[detect::measure, large::measure, hang::measure, kernel_log::measure, gpus::detect]
            }
            Name::Large => &[large::measure],
            Name::Hang => &[hang::measure],
            Name::Counters => &[gpus::detect],
            Name::KernelLog => &[kernel_log::measure],
            Name::Restart => {
                &[in_process::measure, restart::measure, restart::measure_first, goodput::measure]
            }
            Name::FirstRestart => &[restart::measure_first],
            Name::Hosts => &[hosts::measure],
            Name::InProcess => &[in_process::measure],
            Name::Soak => &[soak::measure],
            Name::Chaos => &[chaos::measure],
            Name::Goodput => &[goodput::measure],
            Name::Checkpoint => &[checkpoint::measure, training::measure_beside],
            Name::Training => &[training::measure],
            Name::Judge => &[judge],
            Name::Simulate => &[simulate],
            Name::Attribute => &[attribute::measure],
            Name::Verdicts => &[verdicts::measure],
            Name::Replicate => &[replicate::measure],
            Name::Build => &[build_from_nothing],
            Name::Install => &[install::measure],
        }
    }
}

/// What every bench uses: the options, and where its figures go.
pub struct Bench<'a> {
    args: &'a Args,
    progress: Progress,
    report: Report,
    /// Whether the samples asked for are those of other parts too.
    is_shared: bool,
}

impl Bench<'_> {
    /// Samples of a figure: those asked for, else the usual number or that of `--quick`.
    fn samples(&self, usual: usize, quick: usize) -> usize {
        self.args.samples.unwrap_or(if self.args.quick { quick } else { usual })
    }

    /// The same for samples that take long: those asked for may be many because of another part.
    fn at_most(&self, usual: usize, quick: usize) -> usize {
        self.samples(usual, quick).clamp(1, if self.is_shared { usual } else { usize::MAX })
    }

    /// Measures a part that makes its figures itself.
    fn part(&mut self, ids: &[&str], what: &str, work: impl FnOnce() -> Result<Vec<Figure>>) {
        if self.report.wants_some_of(ids) {
            let measured = self.progress.step(what, work);
            self.report.part(ids.first().copied().unwrap_or(what), measured);
        }
    }

    fn measure<T: 'static>(
        &mut self,
        figures: Vec<Of<T>>,
        what: &str,
        work: impl FnOnce() -> Result<Vec<T>>,
    ) {
        self.take(&mut Comparison::of(figures), None, what, work);
    }

    /// Adds measurements of ours or of a peer to a comparison, and reports its figures. False if there are none,
    /// or no time for them.
    fn take<T: 'static>(
        &mut self,
        comparison: &mut Comparison<T>,
        peer: Option<&str>,
        what: &str,
        work: impl FnOnce() -> Result<Vec<T>>,
    ) -> bool {
        if !self.report.wants(&comparison.ids()) {
            return false;
        }
        let what = format!("{}: {what}", comparison.ids().first().unwrap_or(&""));
        match self.progress.step(&what, work) {
            Ok(measured) => comparison.take(peer, measured),
            Err(error) => {
                eprintln!("{what}: left out: {error:#}");
                return false;
            }
        }
        self.report.add(comparison.figures());
        true
    }

    /// Measures each launcher in turn, ours so many times and the peers, which take longer, twice at most.
    fn by_launcher<T: 'static>(
        &mut self,
        bed: &Bed,
        figures: Vec<Of<T>>,
        what: &str,
        rounds: usize,
        mut work: impl FnMut(Launcher) -> Result<Vec<T>>,
    ) {
        let mut comparison = Comparison::of(figures);
        for launcher in bed.launchers() {
            let rounds = if launcher.peer().is_some() { rounds.min(2) } else { rounds };
            for round in 1..=rounds {
                let what = format!("{} ({what}, {round} of {rounds})", launcher.name());
                if !self.take(&mut comparison, launcher.peer(), &what, || work(launcher)) {
                    break;
                }
            }
            if comparison.ours.is_empty() {
                return;
            }
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    let _alone = stop::alone()?;
    stop::end_children_with_us()?;
    let file = args.json.clone().unwrap_or_else(|| paths::target().join("bench/figures.json"));
    fs::create_dir_all(file.parent().unwrap_or(&file))?;
    let report = Report::begin(args.only.clone(), file, args.quick);
    let bed = prepare(&progress, args)?;
    let mut bench = Bench { args, progress, report, is_shared: false };
    let mut without = Vec::new();
    for name in &args.names {
        // Before its time starts: with `--quick` a build must not use up the time of figures.
        if let Some(program) = name.program() {
            let mut build = command::cargo(&format!("build --release --locked --quiet -p {program}"));
            bench.progress.step(&format!("Building {program}"), || command::run(&mut build))?;
        }
        bench.report.next_bench();
        bench.is_shared = name.parts().len() > 1 || *name == Name::Hosts;
        name.parts().iter().for_each(|measure| measure(&mut bench, &bed));
        if bench.report.has_nothing() {
            without.extend(name.to_possible_value().map(|value| value.get_name().to_owned()));
        }
    }
    bench.report.print();
    if !without.is_empty() {
        eprintln!("no figure was measured of {}; the reasons are above", without.join(", "));
    }
    let not_found = bench.report.not_found();
    if !not_found.is_empty() {
        eprintln!("--only: no figure was measured whose name starts with {}", not_found.join(", "));
    }
    Ok(command::exit_code(without.is_empty() && not_found.is_empty()))
}

/// The program, our Python environment, and the peers' if available.
fn prepare(progress: &Progress, args: &Args) -> Result<Bed> {
    if args.names.iter().any(|name| name.needs_program()) {
        build::release(progress)?;
    }
    let wants_peers = !args.no_peers && !args.quick && args.names.iter().any(|name| name.has_peers());
    let needs_ranks = wants_peers || args.names.iter().any(|name| name.needs_ranks());
    let venv = if needs_ranks { python::TORCH.with_wheel(progress)? } else { Venv::default() };
    let made = wants_peers.then(|| python::PEERS.ensure(progress));
    let peers = made.and_then(|made| made.map_err(|error| eprintln!("peers: left out: {error:#}")).ok());
    Ok(Bed { venv, peers, torchrun: !args.no_peers })
}

/// The figures that an example of a crate prints, one a line.
fn example(name: &str, arguments: &[&str]) -> Result<Vec<Figure>> {
    let mut run = Command::new(paths::target().join("release/examples").join(name));
    let output = run.args(arguments).stderr(Stdio::inherit()).current_dir(paths::root()).output();
    let output = output.with_context(|| format!("starting {name}"))?;
    if !output.status.success() {
        bail!("{name} ended with {}", output.status);
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let figure = |line| serde_json::from_str(line).with_context(|| format!("a figure of {name}: {line}"));
    lines.lines().map(figure).collect()
}

/// The judges on simulated jobs: the time of a tick, and the numbers of right and false verdicts.
fn judge(bench: &mut Bench, _: &Bed) {
    let trials = bench.samples(300, 30).to_string();
    let what = format!("judge: simulated jobs, {trials} trials");
    bench.part(&["judge."], &what, || example("judge", &[&trials]));
}

/// The parts of the simulation, with the prefixes of their figures.
const SIMULATIONS: [(&str, &[&str]); 4] = [
    ("ettr", &["simulate.ettr_1"]),
    ("trace", &["simulate.ettr_trace", "simulate.trace"]),
    ("lost", &["simulate.false_lost", "simulate.suspected"]),
    ("leader", &["simulate.leader", "simulate.store", "simulate.round", "simulate.start", "simulate.record"]),
];

/// Jobs of 100,000 ranks: the cost of their leader, how soon all hosts restart, how often a living host is
/// considered lost, and the share of time in training, which is compared with restarts by a scheduler.
fn simulate(bench: &mut Bench, _: &Bed) {
    for (part, families) in SIMULATIONS {
        let arguments = if bench.args.quick { &[part, "quick"][..] } else { &[part] };
        let compared = |figure: Figure| match figure.peer_value {
            Some(value) => figure.beside("scheduler restarts", Some(value)),
            None => figure,
        };
        bench.part(families, &format!("simulate: {part}"), || {
            Ok(example("simulate", arguments)?.into_iter().map(compared).collect())
        });
    }
}

/// How long a release build takes in an empty folder, and how large the program is.
fn build_from_nothing(bench: &mut Bench, _: &Bed) {
    if bench.args.quick {
        return eprintln!("build: left out: a cold build is longer than --quick allows");
    }
    bench.part(&["build.cold_release", "build.binary"], "a cold build (some minutes)", || {
        let target = paths::fresh(paths::target().join("bench/cold"))?;
        // Downloading is not building.
        command::run(&mut command::cargo("fetch --locked --quiet"))?;
        let began = Instant::now();
        command::run(command::cargo("build --release --locked --quiet --target-dir").arg(&target))?;
        let seconds = began.elapsed().as_secs_f64();
        let mib = fs::metadata(target.join("release/mainstay"))?.len() as f64 / f64::from(1 << 20);
        fs::remove_dir_all(&target)?;
        let figures = [("build.cold_release", "s", seconds), ("build.binary", "MiB", mib)];
        Ok(figures.map(|(id, unit, value)| Figure::one(id, unit, value, 1)).into())
    });
}
