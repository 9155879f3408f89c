//! `cargo xtask dist`: what is released, in `target/dist`. Nothing is uploaded.

pub mod image;
pub mod needs;
pub mod sbom;
pub mod system;
pub mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::ValueEnum;
use fs_err as fs;

use self::system::System;
use crate::command::cmd;
use crate::progress::Progress;
use crate::release::git;
use crate::{command, paths, python};

/// The version of all crates.
const VERSION: &str = env!("CARGO_PKG_VERSION");

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
    /// The agent's image; needs buildah, and packages of Debian for its base.
    Image,
}

impl Args {
    fn wants(&self, kind: Kind) -> bool {
        self.only.is_empty() || self.only.contains(&kind)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::begin();
    let dist = Dist::new(&progress, &args.arch)?;
    remove_other_versions(&dist.out)?;
    let program = dist.program()?;
    dist.sbom()?;
    if args.wants(Kind::Wheel) {
        dist.wheel(&program)?;
    }
    if [Kind::Deb, Kind::Rpm, Kind::Tarball, Kind::Image].into_iter().any(|kind| args.wants(kind)) {
        let client = dist.client()?;
        let runs_here = if dist.is_of_this_machine() { program.clone() } else { paths::release_mainstay() };
        let system = System {
            program: &program,
            runs_here: &runs_here,
            client: &client,
            arch: dist.arch,
            quick: false,
        };
        let root = system.stage()?;
        let out = &dist.out;
        if args.wants(Kind::Tarball) {
            progress.step("Building the .tar.gz", || system.tarball(&root, out))?;
        }
        if args.wants(Kind::Rpm) {
            progress.step("Building the .rpm (rpmbuild)", || system.rpm(&root, out))?;
        }
        if args.wants(Kind::Image) {
            let other = (!dist.is_of_this_machine()).then_some("it is of another processor");
            match image::obstacle().or(other) {
                Some(why) => eprintln!("image: left out: {why}"),
                None => {
                    _ = progress.step("Building the image (buildah)", || {
                        image::build(&image::base()?, &root, dist.arch, out)
                    })?
                }
            }
        }
        // Last: it adds files of its own.
        if args.wants(Kind::Deb) {
            progress.step("Building the .deb (dpkg-deb, lintian)", || system.deb(&root, out))?;
        }
    }
    write_sums(&dist.out)?;
    println!("{}", dist.out.display());
    Ok(ExitCode::SUCCESS)
}

/// What is released for one processor.
pub struct Dist<'a> {
    progress: &'a Progress,
    /// Where Zig and maturin are.
    tools: PathBuf,
    pub out: PathBuf,
    /// Its name in Rust.
    arch: &'a str,
    target: String,
}

impl<'a> Dist<'a> {
    pub fn new(progress: &'a Progress, arch: &'a str) -> Result<Self> {
        let tools = python::DIST.ensure(progress)?.join("bin");
        let out = paths::target().join("dist");
        fs::create_dir_all(&out)?;
        Ok(Self { progress, tools, out, arch, target: format!("{arch}-unknown-linux-gnu") })
    }

    fn is_of_this_machine(&self) -> bool {
        self.arch == std::env::consts::ARCH
    }

    pub fn program(&self) -> Result<PathBuf> {
        let program = self.build("mainstay-agent --features cloud")?.join("mainstay");
        needs::check(&program, GLIBC)?;
        Ok(program)
    }

    /// The client library for C.
    pub fn client(&self) -> Result<PathBuf> {
        let client = self.build("mainstay-client")?.join("libmainstay_client.so");
        needs::check(&client, GLIBC)?;
        Ok(client)
    }

    pub fn wheel(&self, program: &Path) -> Result<PathBuf> {
        wheel::release(self.progress, &self.tools, &self.target, program, &self.out)
    }

    /// The bill of materials, checked against its schema.
    fn sbom(&self) -> Result<PathBuf> {
        let file = self.out.join(format!("mainstay-{VERSION}-{}.cdx.json", self.arch));
        sbom::write(&self.target, &git(&["log", "-1", "--format=%cI"])?, &file)?;
        let (python, script) = (self.tools.join("python"), paths::root().join("xtask/dist/check_sbom.py"));
        command::output(&mut cmd!("{python} {script} {file}"))?;
        Ok(file)
    }

    /// Builds a package of the workspace, linked for the oldest C library, and returns the folder of what was built.
    fn build(&self, package: &str) -> Result<PathBuf> {
        let ((major, minor), target) = (GLIBC, &self.target);
        let what = format!("Building {package} for {target}, glibc {major}.{minor} (cargo zigbuild)");
        self.progress.step(&what, || {
            let mut build = command::cargo(&format!("zigbuild --release --locked --package {package}"));
            build.args(["--target", &format!("{target}.{major}.{minor}")]);
            python::path_first(&mut build, &self.tools);
            reproducible(&mut build)?;
            command::run(&mut build)?;
            Ok(paths::target().join(target).join("release"))
        })
    }
}

/// `SHA256SUMS` is of one version.
fn remove_other_versions(out: &Path) -> Result<()> {
    for entry in fs::read_dir(out)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().contains(VERSION) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Makes what a command builds the same in every folder and at every time.
fn reproducible(command: &mut Command) -> Result<()> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let sources = home.context("no folder of cargo: set CARGO_HOME or HOME")?.join("registry/src");
    // Where the component rust-src is installed, the compiler names the standard library's files by their place in it.
    let sysroot = command::output(&mut cmd!("rustc --print sysroot"))?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
    let places = [(sources.as_path(), "/cargo"), (paths::root(), "/mainstay"), (library.as_path(), "/rust")];
    let flags = places.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
    // The flags are separated by this character.
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    command.env("SOURCE_DATE_EPOCH", git(&["log", "-1", "--format=%ct"])?);
    // Shown by `mainstay version`.
    command.env("MAINSTAY_COMMIT", git(&["rev-parse", "--short=12", "HEAD"])?);
    Ok(())
}

/// `SHA256SUMS` of all files.
fn write_sums(out: &Path) -> Result<()> {
    let mut names: Vec<_> = fs::read_dir(out)?.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
    names.retain(|name| name != "SHA256SUMS");
    names.sort();
    let text = command::output(Command::new("sha256sum").args(names).current_dir(out))?;
    Ok(fs::write(out.join("SHA256SUMS"), text)?)
}
