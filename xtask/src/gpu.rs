//! `cargo xtask gpu --pack`: the folder `target/gpu`, which checks on a GPU machine without a network what works
//! there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::progress::Progress;
use crate::{build, command, paths, venv, wheel};

/// The maximum size of the folder, in bytes: it must fit where 64 MiB are the limit.
const MOST: u64 = 60 << 20;

/// What is done for GPUs.
#[derive(clap::Args)]
pub struct Args {
    /// Build the folder target/gpu: program, wheel and acceptance program
    #[arg(long, required = true)]
    pack: bool,
}

/// Builds the folder.
///
/// # Errors
/// Something cannot be built or copied, or the folder became too large.
pub fn run(args: &Args) -> Result<ExitCode> {
    debug_assert!(args.pack, "clap requires it");
    let progress = Progress::begin();
    build::release(&progress)?;
    let wheel = wheel::build(&progress, &venv::ensure(&progress)?)?;
    let pack = paths::target().join("gpu");
    if pack.exists() {
        fs::remove_dir_all(&pack).with_context(|| format!("emptying {}", pack.display()))?;
    }
    fs::create_dir_all(&pack).with_context(|| format!("creating {}", pack.display()))?;
    let sources = paths::root().join("agent/acceptance");
    for entry in fs::read_dir(&sources).with_context(|| format!("reading {}", sources.display()))? {
        let path = entry?.path();
        if path.is_file() {
            copy(&path, &pack)?;
        }
    }
    copy(&wheel, &pack)?;
    let program = pack.join("mainstay");
    fs::copy(paths::release_mainstay(), &program).context("copying the program")?;
    let glibc = newest_glibc(&program)?;
    fs::write(pack.join("GLIBC"), format!("{glibc}\n")).context("writing GLIBC")?;
    let size = size_of(&pack)?;
    if size > MOST {
        bail!("{} has {} MiB; at most {} MiB are allowed", pack.display(), size >> 20, MOST >> 20);
    }
    println!("{}\n{:.1} MiB; needs glibc {glibc} or later", pack.display(), size as f64 / f64::from(1 << 20));
    Ok(ExitCode::SUCCESS)
}

fn copy(file: &Path, to: &Path) -> Result<PathBuf> {
    let name = file.file_name().with_context(|| format!("{} has no name", file.display()))?;
    let copy = to.join(name);
    fs::copy(file, &copy).with_context(|| format!("copying {}", file.display()))?;
    Ok(copy)
}

/// The newest version of glibc of which the program needs a symbol.
fn newest_glibc(program: &Path) -> Result<String> {
    let reported = command::output(Command::new("objdump").arg("-T").arg(program))?;
    let numbers =
        |version: &str| version.split('.').filter_map(|part| part.parse().ok()).collect::<Vec<u32>>();
    let versions = reported
        .split("GLIBC_")
        .skip(1)
        .map(|rest| rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect::<String>());
    versions.max_by_key(|version| numbers(version)).context("objdump names no version of glibc")
}

fn size_of(folder: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(folder)? {
        size += entry?.metadata()?.len();
    }
    Ok(size)
}
