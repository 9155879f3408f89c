//! `cargo xtask gpu --pack`: the folder `target/gpu`, which checks on a GPU machine without a network what works
//! there.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use crate::dist::needs;
use crate::progress::Progress;
use crate::{build, paths, python};

/// The maximum size of the folder, in bytes: it must fit where 64 MiB are the limit.
const MOST: u64 = 60 << 20;

/// What is done for GPUs.
#[derive(clap::Args)]
pub struct Args {
    /// Build the folder target/gpu: program, wheel and acceptance program
    #[arg(long, required = true)]
    pack: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    debug_assert!(args.pack, "clap requires it");
    let progress = Progress::begin();
    build::release(&progress)?;
    let pack = paths::fresh(paths::target().join("gpu"))?;
    let sources = fs::read_dir(paths::root().join("agent/acceptance"))?;
    let mut files = sources.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    files.retain(|path| path.is_file());
    files.push(python::build_wheel(&progress)?);
    for file in files {
        fs::copy(&file, pack.join(file.file_name().context("a file has a name")?))?;
    }
    let program = pack.join("mainstay");
    fs::copy(paths::release_mainstay(), &program)?;
    let (major, minor) = needs::newest_glibc(&program)?;
    fs::write(pack.join("GLIBC"), format!("{major}.{minor}\n"))?;
    let sizes = fs::read_dir(&pack)?.map(|entry| Ok(entry?.metadata()?.len()));
    let size = sizes.sum::<Result<u64>>()?;
    ensure!(
        size <= MOST,
        "{} has {} MiB; at most {} MiB are allowed",
        pack.display(),
        size >> 20,
        MOST >> 20
    );
    let mib = size as f64 / f64::from(1 << 20);
    println!("{}\n{mib:.1} MiB; needs glibc {major}.{minor} or later", pack.display());
    Ok(ExitCode::SUCCESS)
}
