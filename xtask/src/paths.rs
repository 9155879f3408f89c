//! Paths of the repository, of cargo's output, and of files that are kept between checkouts.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;

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
    let of = |name: &str, below: &str| non_empty(name).map(|folder| folder.join(below));
    of("MAINSTAY_CACHE", "")
        .or_else(|| of("XDG_CACHE_HOME", "mainstay"))
        .or_else(|| of("HOME", ".cache/mainstay"))
        .context("no place for the cache: set MAINSTAY_CACHE or HOME")
}

/// Where memory can be used as files.
pub fn memory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { env::temp_dir() }
}

pub fn fresh(folder: PathBuf) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn non_empty(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
