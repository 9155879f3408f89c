//! Building the program that the demo and the benchmarks run.

use std::process::Command;

use anyhow::Result;

use crate::command;
use crate::places;
use crate::say::Story;

/// Builds `mainstay` with all optimisations, unless a finished one was named by `MAINSTAY_BIN`.
pub fn release(story: &Story) -> Result<()> {
    if let Some(program) = places::given_mainstay() {
        story.note(&format!("Using {} (MAINSTAY_BIN)", program.display()));
        return Ok(());
    }
    let first =
        if places::mainstay("release").exists() { "" } else { "; the first build takes some minutes" };
    story.step(&format!("Building mainstay (cargo build --release{first})"), || {
        let mut cargo = Command::new("cargo");
        cargo.args(["build", "--release", "--package", "mainstay-agent"]).current_dir(places::root());
        command::run(&mut cargo)
    })
}
