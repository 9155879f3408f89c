//! Building the program that the demo and the benchmarks run.

use anyhow::Result;

use crate::command;
use crate::paths;
use crate::progress::Progress;

/// Builds `mainstay` with all optimisations, unless `MAINSTAY_BIN` names a finished one.
pub fn release(progress: &Progress) -> Result<()> {
    if let Some(program) = paths::given_mainstay() {
        progress.note(&format!("Using {} (MAINSTAY_BIN)", program.display()));
        return Ok(());
    }
    let first = if paths::mainstay("release").exists() { "" } else { "; the first build takes some minutes" };
    progress.step(&format!("Building mainstay (cargo build --release{first})"), || {
        // As in the README: building a part of the workspace would select other features, and be another build.
        let mut cargo = command::cargo();
        cargo.args(["build", "--release"]).current_dir(paths::root());
        command::run(&mut cargo)
    })
}
