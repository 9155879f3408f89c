//! The project's own commands: `cargo xtask demo | test | lint | bench | wheel`.

mod command;
mod demo;
mod fingerprint;
mod journal;
mod places;
mod say;
mod status;
mod venv;
mod wheel;

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
    /// Train a small model on two ranks, kill one in the middle, and compare the end with an undisturbed run.
    Demo(demo::Args),
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
        Task::Wheel => {
            let story = say::Story::begin();
            let venv = venv::ensure(&story)?;
            let wheel = wheel::build(&story, &venv)?;
            wheel::install(&story, &venv)?;
            println!("{}\ninstalled for {}", wheel.display(), venv.python().display());
            Ok(ExitCode::SUCCESS)
        }
    }
}
