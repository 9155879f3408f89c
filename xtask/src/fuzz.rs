//! The fuzz targets as plain tests: all are built, and each runs once over the seeds from the catalogs and test
//! data.
//!
//! They are a separate workspace; here it is built without the instrumentation that finds new inputs, into the
//! folder of the other builds. Fuzzing itself: docs/internals/fuzzing.md.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::check::Verdict;
use crate::{command, output, paths};

/// No input, and no single allocation for one, may take more memory than this (MiB): input from others must not
/// make the agent grow.
const MEMORY_BOUND: [&str; 2] = ["-rss_limit_mb=512", "-malloc_limit_mb=64"];

/// Builds all targets and runs each over its seeds. Each seed is a test.
pub fn seeds() -> Result<Verdict> {
    if !command::exists("c++", "--version") {
        return Ok(Verdict::skipped("libFuzzer is built by a C++ compiler, and there is no c++"));
    }
    let folder = paths::root().join("fuzz");
    // From the root, so that the flags for coverage in fuzz/.cargo are not read. Built like the rest, so that it
    // shares its dependencies; a seed is read once, however slowly.
    let mut build = command::cargo(
        "build --quiet --bins --examples --manifest-path fuzz/Cargo.toml --config profile.dev.opt-level=0 --config \
         profile.dev.package.\"*\".debug=false",
    );
    let built = paths::target().join("debug");
    let mut write = Command::new(built.join("examples/seeds"));
    for command in [build.arg("--target-dir").arg(paths::target()), &mut write] {
        if !command::run_watched(command)?.0.success() {
            return Ok(Verdict::of(false));
        }
    }
    let artifacts = paths::target().join("tmp");
    fs::create_dir_all(&artifacts)?;
    let (mut passed, mut failures) = (0, Vec::new());
    for target in files(&folder.join("fuzz_targets"))? {
        let name = target.file_stem().context("a target has no name")?;
        let seeds = files(&folder.join("corpus").join(name))?;
        let mut run = Command::new(built.join(name));
        run.arg(format!("-artifact_prefix={}/", artifacts.display())).args(MEMORY_BOUND).args(&seeds);
        let ended = run.output().with_context(|| format!("running {}", name.display()))?;
        if ended.status.success() {
            passed += seeds.len();
        } else {
            let printed = String::from_utf8_lossy(&ended.stderr);
            output::line(&format!("{}: {printed}", name.display()));
            failures.push(name.display().to_string());
        }
    }
    Ok(Verdict::counted(true, passed, failures.len()).naming(failures))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}
