//! Tools that cargo installs: found on the path or in the user's cache, else compiled into the cache once.
//!
//! cargo-deny takes 160 s of CPU time to compile, cargo-audit 380 s more: more than four minutes on two cores
//! for the same database of advisories. So cargo-audit is compiled only with `MAINSTAY_CARGO_TOOLS=all`, and
//! none with `off`. Continuous integration keeps the cache between runs.

use std::path::PathBuf;

use anyhow::Result;
use fs_err as fs;

use crate::{command, paths};

pub struct Tool {
    name: &'static str,
    /// Whether it is compiled without `MAINSTAY_CARGO_TOOLS=all`.
    is_usual: bool,
    /// Further options of `cargo install`.
    options: &'static str,
}

/// Licences, bans, sources and advisories.
pub const DENY: Tool = Tool { name: "cargo-deny", is_usual: true, options: "" };

/// Advisories for any lock file.
pub const AUDIT: Tool = Tool { name: "cargo-audit", is_usual: false, options: "" };

/// Builds the documentation as a site; without its server and its search.
pub const MDBOOK: Tool = Tool { name: "mdbook", is_usual: true, options: "--no-default-features" };

/// Which missing tools to compile: `all`, `off`, else the usual ones.
const VARIABLE: &str = "MAINSTAY_CARGO_TOOLS";

/// The path of a tool; the reason if it is missing, which is no fault of this repository.
pub fn find(tool: &Tool) -> Result<std::result::Result<PathBuf, String>> {
    let name = tool.name;
    if command::exists(name, "--version") {
        return Ok(Ok(name.into()));
    }
    let folder = paths::cache()?.join("cargo-tools");
    let program = folder.join("bin").join(name);
    if program.exists() {
        return Ok(Ok(program));
    }
    let chosen = std::env::var(VARIABLE).unwrap_or_default();
    if chosen == "off" || (!tool.is_usual && chosen != "all") {
        return Ok(Err(format!("{name} is not installed: {VARIABLE}=all compiles it")));
    }
    println!("compiling {name} into {} (once, some minutes; {VARIABLE}=off skips it)", folder.display());
    fs::create_dir_all(&folder)?;
    // Not in this checkout's target folder, which has its own settings; the tools share their common
    // dependencies.
    let mut cargo = command::cargo(&format!("install --locked {name} {}", tool.options));
    cargo.arg("--root").arg(&folder).arg("--target-dir").arg(folder.join("target")).current_dir(&folder);
    let failed = |error| format!("{name} is not installed, and cargo could not install it: {error:#}");
    Ok(command::run(&mut cargo).map(|()| program).map_err(failed))
}
