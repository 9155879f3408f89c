//! cargo-deny and cargo-audit: found on the path or in the user's cache, else compiled into the cache once.
//!
//! cargo-deny takes 160 s of CPU time to compile, cargo-audit 380 s more: more than four minutes on two cores for
//! the same database of advisories. So cargo-audit is compiled only with `MAINSTAY_CARGO_TOOLS=all`, and neither
//! with `off`. Continuous integration keeps the cache between runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;
use crate::paths;

/// Which missing tools to compile: `all`, `off`, else cargo-deny.
const VARIABLE: &str = "MAINSTAY_CARGO_TOOLS";

/// The path of a tool; the reason if it is missing, which is no fault of this repository.
///
/// # Errors
/// There is no folder for the cache.
pub fn find(tool: &str) -> Result<std::result::Result<PathBuf, String>> {
    if command::exists(tool, "--version") {
        return Ok(Ok(tool.into()));
    }
    let folder = paths::cache()?.join("cargo-tools");
    let program = folder.join("bin").join(tool);
    if program.exists() {
        return Ok(Ok(program));
    }
    let chosen = std::env::var(VARIABLE).unwrap_or_default();
    if chosen == "off" || (tool != "cargo-deny" && chosen != "all") {
        return Ok(Err(format!("{tool} is not installed: {VARIABLE}=all compiles it")));
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
    // Not in this checkout's target folder, which has its own settings; both tools share their common dependencies.
    let build = folder.join("target");
    cargo.args(["install", "--locked", "--root"]).arg(folder).arg("--target-dir").arg(&build).arg(tool);
    command::run(cargo.current_dir(folder))
}
