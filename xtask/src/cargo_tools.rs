//! cargo-deny and cargo-audit: found on the path or in the user's cache, and installed there if that is asked for.
//!
//! To compile them takes longer than a whole warm run of the suite, so a machine that lacks them skips their checks
//! unless `MAINSTAY_CARGO_TOOLS=install` is set. Continuous integration keeps the cache between runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::places;

/// Set to `install`, the tools are compiled where they are missing.
const VARIABLE: &str = "MAINSTAY_CARGO_TOOLS";

/// Where a tool is; none and the reason where it is missing.
///
/// # Errors
/// It could not be compiled.
pub fn find(tool: &str) -> Result<std::result::Result<PathBuf, String>> {
    if command::exists(tool, "--version") {
        return Ok(Ok(tool.into()));
    }
    let folder = places::cache()?.join("cargo-tools");
    let program = folder.join("bin").join(tool);
    if program.exists() {
        return Ok(Ok(program));
    }
    if std::env::var_os(VARIABLE).is_none_or(|value| value != "install") {
        return Ok(Err(format!(
            "{tool} is not installed: {VARIABLE}=install compiles it into {}",
            folder.display()
        )));
    }
    install(tool, &folder)?;
    Ok(Ok(program))
}

fn install(tool: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut cargo = Command::new("cargo");
    // Not in this checkout's target folder, which its own settings shape; both tools share what they have in common.
    let build = folder.join("target");
    cargo.args(["install", "--locked", "--root"]).arg(folder).arg("--target-dir").arg(&build).arg(tool);
    command::run(cargo.current_dir(folder))
}
