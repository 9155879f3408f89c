//! The project's own commands: `cargo xtask demo | test | lint | bench | gpu | dist | release | wheel`.

mod bench;
mod build;
mod cargo_tools;
mod check;
mod command;
mod demo;
mod dist;
mod fingerprint;
mod fuzz;
mod gpu;
mod healthy;
mod journal;
mod lint;
mod output;
mod packages;
mod paths;
mod progress;
mod python;
mod release;
mod test;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// What is done with this repository, besides what cargo does.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the program and run `mainstay demo`.
    Demo(demo::Args),
    /// Check everything: lints, unit tests, scenarios with real ranks, the Python package, the systemd files.
    Test(test::Args),
    /// Check formatting, lints, licences and the systemd files only.
    Lint,
    /// Measure.
    Bench(bench::Args),
    /// Run real training programs in many ways and store the output of those that end well in
    /// tests/healthy/runs.
    Healthy(healthy::Args),
    /// Build the GPU acceptance program's folder, target/gpu.
    Gpu(gpu::Args),
    /// Build what is released into target/dist: the wheel with the program, packages, the image.
    Dist(dist::Args),
    /// Check, set the version, close the changelog's section and tag. Nothing is pushed.
    Release(release::Args),
    /// Build the Python package into target/wheels and install it into target/venv.
    Wheel,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => test::run(&args),
        Task::Lint => {
            let mut checks = check::Checks::default();
            lint::source(&mut checks);
            lint::systemd(&mut checks);
            Ok(command::exit_code(checks.conclude()))
        }
        Task::Bench(args) => bench::run(&args),
        Task::Healthy(args) => healthy::make(&args),
        Task::Gpu(args) => gpu::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::Release(args) => release::run(&args),
        Task::Wheel => {
            let progress = progress::Progress::begin();
            let venv = python::TORCH.with_wheel(&progress)?;
            let wheel = python::build_wheel(&progress)?;
            println!("{}\ninstalled for {}", wheel.display(), venv.python().display());
            Ok(ExitCode::SUCCESS)
        }
    }
}
