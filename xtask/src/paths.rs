//! Paths of the repository, of cargo's output, and of files that are kept between checkouts.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The root of the repository.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// Where cargo builds for this checkout.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The `mainstay` program as cargo leaves it for a profile's folder, `debug` or `release`.
pub fn mainstay(profile: &str) -> PathBuf {
    target().join(profile).join("mainstay")
}

/// A finished program to use instead of building one: `MAINSTAY_BIN`.
pub fn given_mainstay() -> Option<PathBuf> {
    non_empty("MAINSTAY_BIN")
}

/// The program that the demo and the benchmarks run.
pub fn release_mainstay() -> PathBuf {
    given_mainstay().unwrap_or_else(|| mainstay("release"))
}

/// The folder for large files that all checkouts share, such as PyTorch: `MAINSTAY_CACHE`, or `mainstay` in the
/// user's cache folder.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = non_empty("MAINSTAY_CACHE") {
        return Ok(dir);
    }
    if let Some(dir) = non_empty("XDG_CACHE_HOME") {
        return Ok(dir.join("mainstay"));
    }
    let home = non_empty("HOME").context("no place for the cache: set MAINSTAY_CACHE or HOME")?;
    Ok(home.join(".cache/mainstay"))
}

fn non_empty(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
