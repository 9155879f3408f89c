//! Building the program that the demo and the benchmarks run.

use anyhow::Result;

use crate::progress::Progress;
use crate::{command, paths};

/// Builds `mainstay` with all optimisations, unless `MAINSTAY_BIN` names a finished one.
pub fn release(progress: &Progress) -> Result<()> {
    if let Some(program) = paths::given_mainstay() {
        progress.note(&format!("Using {} (MAINSTAY_BIN)", program.display()));
        return Ok(());
    }
    let first = if paths::mainstay("release").exists() { "" } else { "; the first build takes some minutes" };
    // As in the README: building a part of the workspace would select other features, and be another build.
    progress.step(&format!("Building mainstay (cargo build --release{first})"), || {
        command::run(&mut command::cargo("build --release"))
    })
}
