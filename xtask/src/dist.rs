//! `cargo xtask dist`: what is released, in `target/dist`. Nothing is uploaded.

pub mod needs;
pub mod system;
pub mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::ValueEnum;
use fs_err as fs;

use self::system::System;
use crate::progress::Progress;
use crate::{command, paths, python};

/// The oldest C library on which programs run: that of RHEL 8. Wheels name it in their tag.
const GLIBC: (u32, u32) = (2, 28);

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// Only these (may be repeated).
    #[arg(long, value_enum)]
    only: Vec<Kind>,
    /// The processor.
    #[arg(long, value_parser = ["x86_64", "aarch64"], default_value = std::env::consts::ARCH)]
    arch: String,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Kind {
    /// The program and the Python package: `pip install mainstay-train`.
    Wheel,
    /// For Debian and Ubuntu.
    Deb,
    /// For RHEL, Rocky, Fedora and SUSE; needs rpmbuild.
    Rpm,
    /// Files and a script that installs them.
    Tarball,
}

impl Args {
    fn wants(&self, kind: Kind) -> bool {
        self.only.is_empty() || self.only.contains(&kind)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    let tools = python::DIST.ensure(&progress)?.join("bin");
    let out = paths::target().join("dist");
    fs::create_dir_all(&out)?;
    let arch = args.arch.as_str();
    let target = format!("{arch}-unknown-linux-gnu");
    let build = |package| build(&progress, &tools, &target, package);
    let program = build("mainstay-agent --features cloud")?.join("mainstay");
    needs::check(&program, GLIBC)?;
    if args.wants(Kind::Wheel) {
        wheel::release(&progress, &tools, &target, &program, &out)?;
    }
    if [Kind::Deb, Kind::Rpm, Kind::Tarball].into_iter().any(|kind| args.wants(kind)) {
        let ours = paths::release_mainstay();
        let runs_here = if arch == std::env::consts::ARCH { &program } else { &ours };
        let client = build("mainstay-client")?.join("libmainstay_client.so");
        needs::check(&client, GLIBC)?;
        let system = System { program: &program, runs_here, client: &client, arch, quick: false };
        progress.step("Building packages (dpkg-deb, rpmbuild, tar)", || {
            let root = system.stage()?;
            if args.wants(Kind::Tarball) {
                system.tarball(&root, &out)?;
            }
            if args.wants(Kind::Rpm) {
                system.rpm(&root, &out)?;
            }
            // Last: it adds files of its own.
            if args.wants(Kind::Deb) {
                system.deb(&root, &out)?;
            }
            Ok(())
        })?;
    }
    write_sums(&out)?;
    println!("{}", out.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds a package of the workspace, linked for the oldest C library, and returns the folder of what was built.
fn build(progress: &Progress, tools: &Path, target: &str, package: &str) -> Result<PathBuf> {
    let (major, minor) = GLIBC;
    let what = format!("Building {package} for {target}, glibc {major}.{minor} (cargo zigbuild)");
    progress.step(&what, || {
        let mut build = command::cargo(&format!("zigbuild --release --locked --package {package}"));
        build.args(["--target", &format!("{target}.{major}.{minor}")]);
        python::path_first(&mut build, tools);
        command::run(&mut build)?;
        Ok(paths::target().join(target).join("release"))
    })
}

/// `SHA256SUMS` of all files.
fn write_sums(out: &Path) -> Result<()> {
    let mut names: Vec<_> = fs::read_dir(out)?.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
    names.retain(|name| name != "SHA256SUMS");
    names.sort();
    let text = command::output(Command::new("sha256sum").args(names).current_dir(out))?;
    Ok(fs::write(out.join("SHA256SUMS"), text)?)
}
