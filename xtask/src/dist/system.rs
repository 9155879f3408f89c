//! Packages of distributions: one tree of files, as a .deb, an .rpm and a .tar.gz. Their scripts and
//! descriptions are in `xtask/dist`.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use flate2::{Compression, write::GzEncoder};
use fs_err as fs;

use super::{GLIBC, VERSION};
use crate::command::{self, cmd};
use crate::paths;
use crate::release::git;

/// Files of the repository in the packages.
const FILES: [(&str, &str); 6] = [
    ("systemd/mainstay.service", "usr/lib/systemd/system/mainstay.service"),
    ("systemd/mainstay.sysusers", "usr/lib/sysusers.d/mainstay.conf"),
    ("systemd/mainstay.tmpfiles", "usr/lib/tmpfiles.d/mainstay.conf"),
    ("LICENSE", "usr/share/doc/mainstay/LICENSE"),
    ("client/c/mainstay.h", "usr/include/mainstay.h"),
    ("client/c/example.c", "usr/share/doc/mainstay/examples/example.c"),
];

pub struct System<'a> {
    pub program: &'a Path,
    /// A program that runs here, for manual pages and completions.
    pub runs_here: &'a Path,
    /// The client library for C.
    pub client: &'a Path,
    /// Its name in Rust: x86_64 or aarch64.
    pub arch: &'a str,
    /// Compressed as little as possible, for tests.
    pub quick: bool,
}

impl System<'_> {
    fn name(&self) -> String {
        format!("mainstay-{VERSION}-{}", self.arch)
    }

    pub fn stage(&self) -> Result<PathBuf> {
        let root = paths::fresh(paths::target().join("dist-root").join(self.name()))?;
        let doc = root.join("usr/share/doc/mainstay");
        write(&root.join("usr/bin/mainstay"), &fs::read(self.program)?, 0o755)?;
        for (from, to) in FILES {
            write(&root.join(to), &fs::read(paths::root().join(from))?, 0o644)?;
        }
        let library = root.join("usr/lib/mainstay/libmainstay_client.so");
        write(&library, &fs::read(self.client)?, 0o755)?;
        let package = self.template("mainstay.pc", &[])?;
        write(&root.join("usr/share/pkgconfig/mainstay.pc"), package.as_bytes(), 0o644)?;
        fs::create_dir_all(root.join("etc/mainstay"))?;
        let prints = |arguments: &[&str]| command::output(Command::new(self.runs_here).args(arguments));
        write(&doc.join("agent.toml"), prints(&["config", "--default"])?.as_bytes(), 0o644)?;
        for (shell, to) in [
            ("bash", "usr/share/bash-completion/completions/mainstay"),
            ("zsh", "usr/share/zsh/site-functions/_mainstay"),
            ("fish", "usr/share/fish/vendor_completions.d/mainstay.fish"),
        ] {
            write(&root.join(to), prints(&["completions", shell])?.as_bytes(), 0o644)?;
        }
        let (program, pages) = (self.runs_here, root.join("usr/share/man/man1"));
        command::output(&mut cmd!("{program} man {pages}"))?;
        command::output(&mut cmd!("gzip -9nr {pages}"))?;
        Ok(root)
    }

    /// A file of `xtask/dist`, filled in.
    fn template(&self, name: &str, more: &[(&str, &str)]) -> Result<String> {
        let read = |name: &str| fs::read_to_string(paths::root().join("xtask/dist").join(name));
        let glibc = format!("{}.{}", GLIBC.0, GLIBC.1);
        let arch = if self.arch == "x86_64" { "amd64" } else { "arm64" };
        let (installed, removing) = (read("installed.sh")?, read("removing.sh")?);
        let known = [
            ("@VERSION@", VERSION),
            ("@ARCH@", arch),
            ("@GLIBC@", &glibc),
            ("@INSTALLED@", installed.trim_end()),
            ("@REMOVING@", removing.trim_end()),
        ];
        let fill = |text: String, (name, value): &(&str, &str)| text.replace(name, value);
        Ok(known.iter().chain(more).fold(read(name)?, fill))
    }

    /// The package of Debian and Ubuntu; lintian checks it where it is installed.
    pub fn deb(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        let (doc, control) = (root.join("usr/share/doc/mainstay"), root.join("DEBIAN"));
        let date = git(&["log", "-1", "--format=%cD"])?;
        let mut changelog = GzEncoder::new(Vec::new(), Compression::best());
        changelog.write_all(self.template("changelog", &[("@DATE@", &date)])?.as_bytes())?;
        write(&doc.join("changelog.gz"), &changelog.finish()?, 0o644)?;
        write(&doc.join("copyright"), self.template("copyright", &[])?.as_bytes(), 0o644)?;
        let description = self.template("description", &[])?.trim_end().replace('\n', "\n ");
        let fields = format!("{} {description}\n", self.template("control", &[])?);
        write(&control.join("control"), fields.as_bytes(), 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            write(&control.join(script), self.template(script, &[])?.as_bytes(), 0o755)?;
        }
        let arch = if self.arch == "x86_64" { "amd64" } else { "arm64" };
        let deb = out.join(format!("mainstay_{VERSION}_{arch}.deb"));
        let compression = if self.quick { ["-Zgzip", "-z1"] } else { ["-Zxz", "-z9"] };
        let mut build = cmd!("dpkg-deb --build --root-owner-group {compression...} {root} {deb}");
        command::output(build.env("SOURCE_DATE_EPOCH", git(&["log", "-1", "--format=%ct"])?))?;
        fs::remove_dir_all(&control)?;
        if !self.quick && command::exists("lintian", "--version") {
            command::run(&mut cmd!("lintian --fail-on error --allow-root {deb}"))?;
        }
        Ok(deb)
    }

    /// The package of RHEL, Rocky, Fedora and SUSE.
    pub fn rpm(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        let top = paths::target().join("dist-rpm");
        let spec = top.join("mainstay.spec");
        let description = self.template("description", &[])?;
        let more = [("@DESCRIPTION@", description.trim_end()), ("@ROOT@", &root.display().to_string())];
        write(&spec, self.template("mainstay.spec", &more)?.as_bytes(), 0o644)?;
        let name = format!("mainstay-{VERSION}-1.{}.rpm", self.arch);
        let target = format!("{}-linux", self.arch);
        let defines = [
            format!("_topdir {}", top.display()),
            format!("_rpmdir {}", out.display()),
            format!("_rpmfilename {name}"),
        ];
        let defines = defines.iter().flat_map(|define| ["--define", define]);
        let mut build = cmd!("rpmbuild -bb --quiet --target {target} {defines...} {spec}");
        build.env("SOURCE_DATE_EPOCH", git(&["log", "-1", "--format=%ct"])?);
        command::run_logged(&mut build, &paths::target().join("logs/rpmbuild.log"))?;
        Ok(out.join(name))
    }

    /// The tree itself, with a script that installs it.
    pub fn tarball(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        let script = root.join("install.sh");
        write(&script, self.template("install.sh", &[])?.as_bytes(), 0o644)?;
        let name = self.name();
        let tarball = out.join(format!("{name}.tar.gz"));
        let parent = root.parent().context("a tree has a parent")?;
        let date = git(&["log", "-1", "--format=@%ct"])?;
        command::output(&mut cmd!(
            "tar --sort=name --owner=0 --group=0 --numeric-owner --mtime={date} -I 'gzip -9n' -C {parent}
             -cf {tarball} {name}"
        ))?;
        fs::remove_file(script)?;
        Ok(tarball)
    }
}

pub fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::create_dir_all(path.parent().context("a file is in a folder")?)?;
    fs::write(path, bytes)?;
    Ok(fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::image;

    #[test]
    fn a_package_has_the_files_of_root_and_the_tarball_installs_the_same() {
        if !command::exists("dpkg-deb", "--version") {
            eprintln!("test skipped: xtask::dist::system: there is no dpkg-deb");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder").keep();
        let script = folder.join("mainstay");
        let text = b"#!/bin/sh\n[ \"$1\" != man ] || { mkdir -p \"$2\" && echo page > \"$2/mainstay.1\"; }\n";
        write(&script, text, 0o755).expect("written");
        // MAINSTAY_BIN packs a real program, to try it by hand.
        let program = paths::given_mainstay().unwrap_or(script);
        let client = folder.join("libmainstay_client.so");
        write(&client, b"", 0o755).expect("written");
        let arch = std::env::consts::ARCH;
        let system = System { program: &program, runs_here: &program, client: &client, arch, quick: true };
        let root = system.stage().expect("a tree");
        let tarball = system.tarball(&root, &folder).expect("a tarball");
        if command::exists("rpmbuild", "--version") {
            let rpm = system.rpm(&root, &folder).expect("a package");
            let listed = command::output(&mut cmd!("rpm --query --list --package {rpm}")).expect("its files");
            for file in ["/usr/bin/mainstay", "/usr/lib/mainstay/libmainstay_client.so", "/etc/mainstay"] {
                assert!(listed.lines().any(|line| line == file), "{file}: {listed}");
            }
        } else {
            eprintln!("test skipped: xtask::dist::system: there is no rpmbuild");
        }
        let deb = system.deb(&root, &folder).expect("a package");

        let listed =
            command::output(Command::new("dpkg-deb").arg("--contents").arg(&deb)).expect("its files");
        assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
        let installed = folder.join("installed");
        command::output(Command::new("tar").arg("-xf").arg(&tarball).arg("-C").arg(&folder))
            .expect("unpacked");
        let install = folder.join(system.name()).join("install.sh");
        command::output(Command::new("sh").arg(install).env("DESTDIR", &installed)).expect("installed");
        for file in
            ["usr/bin/mainstay", "usr/lib/systemd/system/mainstay.service", "usr/share/pkgconfig/mainstay.pc"]
        {
            assert!(listed.contains(&format!("./{file}")), "{file}: {listed}");
            assert!(installed.join(file).exists(), "{file}");
        }
        match image::obstacle().map_or_else(image::base, |why| Err(anyhow::anyhow!(why))) {
            Ok(base) => {
                let built = image::build(&base, &root, arch, &folder).expect("an image");
                let archive = &built.archive;
                let listed = command::output(&mut cmd!("tar --list --file {archive}")).expect("its files");
                assert!(listed.lines().any(|line| line == "./index.json"), "{listed}");
                assert!(built.bytes > fs::metadata(&program).expect("the program").len());
                assert!(
                    !base.join("bin/sh").exists() && base.join("etc/ssl/certs/ca-certificates.crt").exists()
                );
                println!("{}: {} bytes of files", archive.display(), built.bytes);
            }
            Err(why) => eprintln!("test skipped: xtask::dist::system: {why:#}"),
        }
        match paths::given_mainstay() {
            Some(_) => println!("{}", deb.display()),
            None => fs::remove_dir_all(&folder).expect("removed"),
        }
    }
}
