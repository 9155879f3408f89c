//! Packages of distributions: one tree of files, as a .deb, an .rpm and a .tar.gz.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::GLIBC;
use crate::command;
use crate::paths;

/// The version of all crates.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What the packages say about themselves.
const SUMMARY: &str = "keeps large training jobs running";
const DESCRIPTION: &str = "\
Mainstay starts the ranks of a training job, detects crashes, hangs and slow
ranks, explains each failure, and restarts the ranks if a restart can help.
The agent monitors the host and keeps copies of checkpoints. The package has
the program and the unit of the agent, which it does not start.";
const HOMEPAGE: &str = "https://github.com/mainstay-dev/mainstay";
const MAINTAINER: &str = "Mainstay developers <mainstay-dev@users.noreply.github.com>";

/// After the installation and after an upgrade, as root. A running agent is replaced by the new one; ranks and launchers
/// run on.
const INSTALLED: &str = "\
if [ -d /run/systemd/system ]; then
    systemd-sysusers mainstay.conf
    systemd-tmpfiles --create mainstay.conf
    systemctl daemon-reload
    systemctl try-restart mainstay.service
else
    systemd-sysusers mainstay.conf || true
fi
";

/// Before the removal, not before an upgrade.
const REMOVING: &str = "\
if [ -d /run/systemd/system ]; then
    systemctl disable --now mainstay.service
fi
";

/// The packages of one processor.
pub struct System<'a> {
    /// The program.
    pub program: &'a Path,
    /// A program that runs here, for manual pages and completions.
    pub runs_here: &'a Path,
    /// Its name in Rust: x86_64 or aarch64.
    pub arch: &'a str,
    /// Compressed as little as possible, for tests.
    pub quick: bool,
}

impl System<'_> {
    fn name(&self) -> String {
        format!("mainstay-{VERSION}-{}", self.arch)
    }

    /// Makes the tree of files.
    pub fn stage(&self) -> Result<PathBuf> {
        let root = paths::target().join("dist-root").join(self.name());
        if root.exists() {
            fs::remove_dir_all(&root).with_context(|| format!("emptying {}", root.display()))?;
        }
        let sources = paths::root();
        install(self.program, &root.join("usr/bin/mainstay"), 0o755)?;
        for (from, to) in [
            ("systemd/mainstay.service", "usr/lib/systemd/system/mainstay.service"),
            ("systemd/mainstay.sysusers", "usr/lib/sysusers.d/mainstay.conf"),
            ("systemd/mainstay.tmpfiles", "usr/lib/tmpfiles.d/mainstay.conf"),
            ("LICENSE", "usr/share/doc/mainstay/LICENSE"),
            ("client/c/mainstay.h", "usr/include/mainstay.h"),
        ] {
            install(&sources.join(from), &root.join(to), 0o644)?;
        }
        let etc = root.join("etc/mainstay");
        fs::create_dir_all(&etc).with_context(|| format!("creating {}", etc.display()))?;
        let defaults = command::output(Command::new(self.runs_here).args(["config", "--default"]))?;
        write(&root.join("usr/share/doc/mainstay/agent.toml"), defaults.as_bytes())?;
        for (shell, to) in [
            ("bash", "usr/share/bash-completion/completions/mainstay"),
            ("zsh", "usr/share/zsh/site-functions/_mainstay"),
            ("fish", "usr/share/fish/vendor_completions.d/mainstay.fish"),
        ] {
            let script = command::output(Command::new(self.runs_here).args(["completions", shell]))?;
            write(&root.join(to), script.as_bytes())?;
        }
        let pages = root.join("usr/share/man/man1");
        command::output(Command::new(self.runs_here).arg("man").arg(&pages))?;
        command::output(Command::new("gzip").args(["-9nr"]).arg(&pages))?;
        Ok(root)
    }

    /// The package of Debian and Ubuntu; lintian checks it where it is installed.
    pub fn deb(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        let arch = if self.arch == "x86_64" { "amd64" } else { "arm64" };
        let (doc, control) = (root.join("usr/share/doc/mainstay"), root.join("DEBIAN"));
        let date = git(&["log", "-1", "--format=%cD"])?;
        let changes = format!(
            "mainstay ({VERSION}) unstable; urgency=medium\n\n  * See {HOMEPAGE}/blob/main/CHANGELOG.md\n\n -- {MAINTAINER}  {date}\n"
        );
        write(&doc.join("changelog.gz"), &gzipped(changes.as_bytes())?)?;
        write(&doc.join("copyright"), COPYRIGHT.as_bytes())?;
        write(
            &root.join("usr/share/lintian/overrides/mainstay"),
            b"# Backtraces in bug reports need the names.\nmainstay: unstripped-binary-or-object [usr/bin/mainstay]\n",
        )?;
        let description = DESCRIPTION.replace('\n', "\n ");
        let (major, minor) = GLIBC;
        let fields = format!(
            "Package: mainstay\nVersion: {VERSION}\nArchitecture: {arch}\nMaintainer: {MAINTAINER}\nSection: admin\n\
             Priority: optional\nHomepage: {HOMEPAGE}\nDepends: libc6 (>= {major}.{minor}), libgcc-s1 | libgcc1\n\
             Recommends: systemd\nDescription: {SUMMARY}\n {description}\n"
        );
        write(&control.join("control"), fields.as_bytes())?;
        let scripts = [
            ("postinst", format!("if [ \"$1\" = configure ]; then\n{INSTALLED}fi\n")),
            ("prerm", format!("if [ \"$1\" = remove ]; then\n{REMOVING}fi\n")),
            (
                "postrm",
                "if [ -d /run/systemd/system ]; then\n    systemctl daemon-reload\nfi\n\
                 if [ \"$1\" = purge ]; then\n    rm -rf /var/lib/mainstay /run/mainstay /etc/mainstay\nfi\n"
                    .to_owned(),
            ),
        ];
        for (name, script) in scripts {
            let path = control.join(name);
            write(&path, format!("#!/bin/sh\nset -e\n{script}").as_bytes())?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("changing {}", path.display()))?;
        }
        let deb = out.join(format!("mainstay_{VERSION}_{arch}.deb"));
        let mut build = Command::new("dpkg-deb");
        build.args(["--build", "--root-owner-group", if self.quick { "-Zgzip" } else { "-Zxz" }]);
        build.args([if self.quick { "-z1" } else { "-z9" }]).arg(root).arg(&deb);
        command::output(build.env("SOURCE_DATE_EPOCH", git(&["log", "-1", "--format=%ct"])?))?;
        fs::remove_dir_all(&control).with_context(|| format!("removing {}", control.display()))?;
        if !self.quick && command::exists("lintian", "--version") {
            command::run(Command::new("lintian").args(["--fail-on", "error", "--allow-root"]).arg(&deb))?;
        }
        Ok(deb)
    }

    /// The package of RHEL, Rocky, Fedora and SUSE.
    pub fn rpm(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        let top = paths::target().join("dist-rpm");
        let spec = top.join("mainstay.spec");
        let root = root.display();
        let (major, minor) = GLIBC;
        let text = format!(
            "Name: mainstay\nVersion: {VERSION}\nRelease: 1\nSummary: {SUMMARY}\nLicense: Apache-2.0\nURL: {HOMEPAGE}\n\
             AutoReqProv: no\nRequires: glibc >= {major}.{minor}, libgcc\n%description\n{DESCRIPTION}\n\
             %install\ncp -a {root}/. %{{buildroot}}\n\
             %files\n%dir /etc/mainstay\n/usr/bin/mainstay\n/usr/include/mainstay.h\n/usr/lib/systemd/system/mainstay.service\n\
             /usr/lib/sysusers.d/mainstay.conf\n/usr/lib/tmpfiles.d/mainstay.conf\n/usr/share/bash-completion/completions/mainstay\n\
             /usr/share/zsh/site-functions/_mainstay\n/usr/share/fish/vendor_completions.d/mainstay.fish\n\
             %doc /usr/share/doc/mainstay\n/usr/share/man/man1/*\n\
             %post\n{INSTALLED}%preun\nif [ \"$1\" = 0 ]; then\n{REMOVING}fi\n"
        );
        write(&spec, text.as_bytes())?;
        let mut build = Command::new("rpmbuild");
        build.args(["-bb", "--quiet", "--target", &format!("{}-linux", self.arch)]);
        for define in [
            format!("_topdir {}", top.display()),
            format!("_rpmdir {}", out.display()),
            format!("_rpmfilename mainstay-{VERSION}-1.{}.rpm", self.arch),
            // The program is finished: nothing is stripped, compressed or moved again.
            "__os_install_post %{nil}".to_owned(),
            "debug_package %{nil}".to_owned(),
            "_build_id_links none".to_owned(),
            "_buildhost mainstay".to_owned(),
            "use_source_date_epoch_as_buildtime 1".to_owned(),
            "clamp_mtime_to_source_date_epoch 1".to_owned(),
        ] {
            build.args(["--define", &define]);
        }
        build.arg(&spec).env("SOURCE_DATE_EPOCH", git(&["log", "-1", "--format=%ct"])?);
        command::run_logged(&mut build, &paths::target().join("logs/rpmbuild.log"))?;
        Ok(out.join(format!("mainstay-{VERSION}-1.{}.rpm", self.arch)))
    }

    /// The tree itself, with a script that installs it.
    pub fn tarball(&self, root: &Path, out: &Path) -> Result<PathBuf> {
        write(&root.join("install.sh"), INSTALL.as_bytes())?;
        let name = self.name();
        let tarball = out.join(format!("{name}.tar.gz"));
        let mut tar = Command::new("tar");
        let parent = root.parent().context("a tree has a parent")?;
        let date = git(&["log", "-1", "--format=@%ct"])?;
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", &format!("--mtime={date}")]);
        tar.args(["-I", "gzip -9n", "-C"]).arg(parent).arg("-cf").arg(&tarball).arg(&name);
        command::output(&mut tar)?;
        fs::remove_file(root.join("install.sh")).context("removing install.sh")?;
        Ok(tarball)
    }
}

/// Installs the tarball, below `DESTDIR` if that is set.
const INSTALL: &str = "\
#!/bin/sh
# Installs Mainstay below / (or $DESTDIR); `install.sh --remove` removes it. The agent is not started.
set -eu
cd \"$(dirname \"$0\")\"
root=${DESTDIR:-}
if [ \"${1:-}\" = --remove ]; then
    [ -n \"$root\" ] || [ ! -d /run/systemd/system ] || systemctl disable --now mainstay.service || true
    find usr -type f | while read -r file; do rm -f \"$root/$file\"; done
    exit
fi
find usr etc -type d | while read -r directory; do install -d \"$root/$directory\"; done
find usr -type f | while read -r file; do install -m \"$(stat -c %a \"$file\")\" \"$file\" \"$root/$file\"; done
if [ -z \"$root\" ] && [ -d /run/systemd/system ]; then
    systemd-sysusers mainstay.conf
    systemd-tmpfiles --create mainstay.conf
    systemctl daemon-reload
    systemctl try-restart mainstay.service
fi
";

const COPYRIGHT: &str = "\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: mainstay
Source: https://github.com/mainstay-dev/mainstay

Files: *
Copyright: The Mainstay developers
License: Apache-2.0
 On Debian systems, the text of the license is in
 /usr/share/common-licenses/Apache-2.0.
";

fn install(from: &Path, to: &Path, mode: u32) -> Result<()> {
    write(to, &fs::read(from).with_context(|| format!("reading {}", from.display()))?)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))
        .with_context(|| format!("changing {}", to.display()))
}

/// Writes a file that all users may read.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
        .with_context(|| format!("changing {}", path.display()))
}

fn gzipped(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = Command::new("gzip");
    let mut child =
        gzip.arg("-9n").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("starting gzip")?;
    // A few lines fit into the pipe.
    child.stdin.take().context("its input")?.write_all(bytes).context("writing to gzip")?;
    let output = child.wait_with_output().context("reading from gzip")?;
    ensure!(output.status.success(), "gzip ended with {}", output.status);
    Ok(output.stdout)
}

fn git(arguments: &[&str]) -> Result<String> {
    let printed = command::output(Command::new("git").args(arguments).current_dir(paths::root()))?;
    Ok(printed.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_has_the_files_of_root_and_the_tarball_installs_the_same() {
        if !command::exists("dpkg-deb", "--version") {
            eprintln!("test skipped: xtask::dist::system: there is no dpkg-deb");
            return;
        }
        let folder = std::env::temp_dir().join(format!("xtask-system-{}", std::process::id()));
        let script = folder.join("mainstay");
        write(
            &script,
            b"#!/bin/sh\n[ \"$1\" != man ] || { mkdir -p \"$2\" && echo page > \"$2/mainstay.1\"; }\n",
        )
        .expect("written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("executable");
        // MAINSTAY_BIN packs a real program, to try it by hand.
        let program = paths::given_mainstay().unwrap_or(script);
        let system =
            System { program: &program, runs_here: &program, arch: std::env::consts::ARCH, quick: true };
        let root = system.stage().expect("a tree");
        let tarball = system.tarball(&root, &folder).expect("a tarball");
        let deb = system.deb(&root, &folder).expect("a package");

        let listed =
            command::output(Command::new("dpkg-deb").arg("--contents").arg(&deb)).expect("its files");
        assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
        let installed = folder.join("installed");
        command::output(Command::new("tar").arg("-xf").arg(&tarball).arg("-C").arg(&folder))
            .expect("unpacked");
        let install = folder.join(system.name()).join("install.sh");
        command::output(Command::new("sh").arg(install).env("DESTDIR", &installed)).expect("installed");
        for file in ["usr/bin/mainstay", "usr/lib/systemd/system/mainstay.service", "etc/mainstay"] {
            assert!(listed.contains(&format!("./{file}")), "{file}: {listed}");
            assert!(installed.join(file).exists(), "{file}");
        }
        match paths::given_mainstay() {
            Some(_) => println!("{}", deb.display()),
            None => fs::remove_dir_all(&folder).expect("removed"),
        }
    }
}
