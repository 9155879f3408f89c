//! cargo-deny and cargo-audit: found on the path or in the user's cache, else compiled into the cache once.
//!
//! `MAINSTAY_CARGO_TOOLS=off` leaves them out on a machine that lacks them. Continuous integration keeps the cache
//! between runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::places;

/// Set to `off`, tools that are missing are not compiled.
const VARIABLE: &str = "MAINSTAY_CARGO_TOOLS";

/// Where a tool is; the reason where it is missing, which is no fault of this repository.
///
/// # Errors
/// There is no folder for the cache.
pub fn find(tool: &str) -> Result<std::result::Result<PathBuf, String>> {
    if command::exists(tool, "--version") {
        return Ok(Ok(tool.into()));
    }
    let folder = places::cache()?.join("cargo-tools");
    let program = folder.join("bin").join(tool);
    if program.exists() {
        return Ok(Ok(program));
    }
    if std::env::var_os(VARIABLE).is_some_and(|value| value == "off") {
        return Ok(Err(format!("{tool} is not installed, and {VARIABLE} is off")));
    }
    println!("compiling {tool} into {} (once, some minutes; {VARIABLE}=off skips it)", folder.display());
    Ok(match install(tool, &folder) {
        Ok(()) => Ok(program),
        Err(error) => Err(format!("{tool} is not installed, and cargo could not install it: {error:#}")),
    })
}

fn install(tool: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut cargo = Command::new("cargo");
    // Not in this checkout's target folder, which its own settings shape; both tools share what they have in common.
    let build = folder.join("target");
    cargo.args(["install", "--locked", "--root"]).arg(folder).arg("--target-dir").arg(&build).arg(tool);
    command::run(cargo.current_dir(folder))
}
