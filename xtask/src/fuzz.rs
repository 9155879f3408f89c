//! The fuzz targets as plain tests: all are built, and each runs once over the seeds from the catalogs and test data.
//!
//! They are a separate workspace; here it is built without the instrumentation that finds new inputs, into the
//! folder of the other builds. Fuzzing itself: docs/internals/fuzzing.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::check::Verdict;
use crate::command;
use crate::lint::cargo;
use crate::output;
use crate::paths;

/// No input, and no single allocation for one, may take more memory than this (MiB): input from others must not
/// make the agent grow.
const MEMORY_BOUND: [&str; 2] = ["-rss_limit_mb=512", "-malloc_limit_mb=64"];

/// Builds all targets and runs each over its seeds. Each seed is a test.
///
/// # Errors
/// The targets cannot be listed, or something cannot be run.
pub fn seeds() -> Result<Verdict> {
    if !command::exists("c++", "--version") {
        return Ok(Verdict::skipped("libFuzzer is built by a C++ compiler, and there is no c++"));
    }
    let folder = paths::root().join("fuzz");
    let mut build = cargo(&["build", "--quiet", "--bins", "--examples"]);
    // Built like the rest, so that it shares its dependencies; a seed is read once, however slowly.
    build.args(["--config", "profile.dev.opt-level=0", "--config", "profile.dev.package.\"*\".debug=false"]);
    build.arg("--manifest-path");
    // From the root, so that the flags for coverage in fuzz/.cargo are not read.
    build.arg(folder.join("Cargo.toml")).arg("--target-dir").arg(paths::target());
    let (status, _) = command::run_watched(&mut build)?;
    if !status.success() {
        return Ok(Verdict::of(false));
    }
    let built = paths::target().join("debug");
    let (written, _) = command::run_watched(&mut Command::new(built.join("examples/seeds")))?;
    if !written.success() {
        return Ok(Verdict::of(false));
    }
    let (mut passed, mut failures) = (0, Vec::new());
    for target in files(&folder.join("fuzz_targets"))? {
        let name = target.file_stem().context("a target has no name")?.to_owned();
        let seeds = files(&folder.join("corpus").join(&name))?;
        let mut run = Command::new(built.join(&name));
        let artifacts = paths::target().join("tmp");
        fs::create_dir_all(&artifacts).with_context(|| format!("creating {}", artifacts.display()))?;
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
    let listed = fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    let mut files: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}
