//! The Python environments: a heavy one with PyTorch, made once and kept in the user's cache, and a thin one for
//! this checkout laid over it, so that two checkouts never install their wheels over each other.
//!
//! Each has a stamp that is written last. A missing or different stamp means an interrupted or outdated install:
//! the environment is examined, and made again if it does not work. A lock file keeps two runs from making the same
//! environment at the same time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::command;
use crate::paths;
use crate::progress::Progress;

/// Python packages that the builds and the tests need in addition to PyTorch; small.
const TOOLS: &[&str] = &["numpy", "pytest", "maturin>=1.9,<2"];

/// Written into an environment as the last thing.
const STAMP: &str = "mainstay-stamp";

/// Prints an interpreter's version and packages, without importing anything large.
const WHO: &str = r#"
import importlib.util, json, sys
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({"version": list(sys.version_info[:3]), "prefix": sys.base_prefix,
                  "torch": has("torch"), "venv": has("venv") and has("ensurepip")}))
"#;

/// Fails unless everything that the environment is for can really be imported.
const WORKS: &str = "import torch, torch.distributed, numpy, pytest, maturin, pip";

/// The thin environment of this checkout.
pub struct Venv {
    dir: PathBuf,
    base: PathBuf,
}

impl Venv {
    /// A thin environment in `dir` over another one.
    pub fn over(base: PathBuf, dir: PathBuf) -> Result<Venv> {
        overlay(&base, &dir)?;
        Ok(Venv { dir, base })
    }

    /// The environment below it.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Its interpreter.
    pub fn python(&self) -> PathBuf {
        self.dir.join("bin/python")
    }

    /// A file in it, for stamps.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A program that was installed with the heavy environment, such as `maturin`.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.base.join("bin").join(name)
    }
}

/// An interpreter's report about itself.
#[derive(Deserialize)]
struct Interpreter {
    version: (u32, u32, u32),
    prefix: String,
    torch: bool,
    venv: bool,
}

/// Makes both environments, or finds existing ones.
pub fn ensure(progress: &Progress) -> Result<Venv> {
    let base = ensure_base(progress)?;
    let dir = paths::target().join("venv");
    overlay(&base, &dir)?;
    Ok(Venv { dir, base })
}

/// A separate environment that sees everything of the heavy one and installs nothing into it. The peers of the
/// benchmarks have such an environment too.
pub fn overlay(base: &Path, dir: &Path) -> Result<()> {
    // The distribution's name: one of another name would leave its files and entry points.
    let wanted = format!("for mainstay-train over {}\n{}", base.display(), read(&base.join(STAMP)));
    if read(&dir.join(STAMP)) == wanted {
        return Ok(());
    }
    remove(dir)?;
    let base_python = base.join("bin/python");
    let mut make = Command::new(&base_python);
    make.args(["-m", "venv", "--without-pip"]);
    if read(&base.join("pyvenv.cfg")).contains("include-system-site-packages = true") {
        make.arg("--system-site-packages");
    }
    command::output(make.arg(dir))?;

    // `site.addsitedir` rather than a bare path, so that the heavy environment's own .pth files count as well.
    let lines = |python: &Path| {
        let ask =
            "import sysconfig; print(sysconfig.get_path('purelib')); print(sysconfig.get_path('platlib'))";
        command::output(Command::new(python).args(["-I", "-c", ask]))
    };
    let mut pth = String::new();
    for site in lines(&base_python)?.lines() {
        let line = format!("import site; site.addsitedir({site:?})\n");
        if !pth.contains(&line) {
            pth.push_str(&line);
        }
    }
    let own = lines(&dir.join("bin/python"))?;
    let own = own.lines().next().context("an environment has a place for packages")?;
    write(&Path::new(own).join("mainstay-base.pth"), &pth)?;
    write(&dir.join(STAMP), &wanted)
}

/// The environment's Python comes first, as after `source bin/activate`; variables of an outer job are removed.
pub fn activate(command: &mut Command, venv: &Venv) {
    let bin = venv.file("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let joined = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)));
    if let Ok(joined) = joined {
        command.env("PATH", joined);
    }
    command.env("VIRTUAL_ENV", venv.file("")).env("PYTHON_EXEC", venv.python());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_a_job = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].contains(&&*text);
        if of_a_job
            || text.starts_with("TORCHELASTIC_")
            || text.starts_with("PET_")
            || text.starts_with("MAINSTAY_")
        {
            command.env_remove(name);
        }
    }
}

/// An environment of its own for tools, in the user's cache; returns its folder of programs.
///
/// # Errors
/// The package index cannot be reached.
pub fn of_tools(progress: &Progress, name: &str, packages: &[&str]) -> Result<PathBuf> {
    let dir = paths::cache()?.join(name);
    let recipe = packages.join("\n");
    if read(&dir.join(STAMP)) != recipe {
        let python = base_python();
        if !who(&python)?.venv {
            bail!("{python} has no venv module: install it, on Debian and Ubuntu as python3-venv");
        }
        command::output(Command::new(python).args(["-m", "venv", "--clear"]).arg(&dir))?;
        install(progress, &dir, &format!("Installing {} (once)", packages.join(", ")), packages)?;
        write(&dir.join(STAMP), &recipe)?;
    }
    Ok(dir.join("bin"))
}

/// The heavy environment, in the user's cache.
pub fn ensure_base(progress: &Progress) -> Result<PathBuf> {
    let cache = paths::cache()?;
    fs::create_dir_all(&cache).with_context(|| {
        format!("creating {}: set MAINSTAY_CACHE to a folder that can be written", cache.display())
    })?;
    let _lock = lock(&cache.join("venv.lock"), progress)?;
    let dir = cache.join("venv");

    let python = base_python();
    let host = who(&python)?;
    let recipe = recipe(&host)?;
    if read(&dir.join(STAMP)) == recipe && dir.join("bin/python").exists() {
        return Ok(dir);
    }
    if dir.exists() {
        let examine = format!(
            "Looking at the Python environment in {}, which has no stamp or an old one",
            dir.display()
        );
        if progress.step(&examine, || Ok(works(&dir, &host)))? {
            write(&dir.join(STAMP), &recipe)?;
            return Ok(dir);
        }
        progress.note("It is incomplete (an interrupted install?) or for another Python: making it again");
        remove(&dir)?;
    }
    if !host.venv {
        provide_venv_module(progress, &python, &host)?;
    }
    progress.step(&format!("Making a Python environment in {} (once)", dir.display()), || {
        let mut make = Command::new(&python);
        make.args(["-m", "venv"]);
        if host.torch {
            make.arg("--system-site-packages");
        }
        command::run_logged(make.arg(&dir), &cache.join("venv.log"))
    })?;
    install(
        progress,
        &dir,
        "Installing the build and test tools: numpy, pytest, maturin (about 30 MB, once)",
        TOOLS,
    )?;
    if host.torch {
        progress.note("This machine's python3 has PyTorch already: using it");
    } else {
        let torch = torch_for(host.version)?;
        let what = format!(
            "Installing {torch} (about 3 GB with the libraries it wants, once; some minutes on a fast line)"
        );
        install(progress, &dir, &what, &[&torch])?;
    }
    progress.step("Trying the environment: import torch", || {
        command::output(Command::new(dir.join("bin/python")).args(["-c", WORKS])).map(drop)
    })?;
    write(&dir.join(STAMP), &recipe)?;
    Ok(dir)
}

/// Installs packages with an environment's own pip; the log stays in the cache.
fn install(progress: &Progress, dir: &Path, what: &str, packages: &[&str]) -> Result<()> {
    progress.step(what, || {
        let mut pip = Command::new(dir.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"])
            .args(packages);
        command::run_logged(&mut pip, &dir.join("pip.log")).context(
            "pip could not install; is the package index reachable? (PIP_INDEX_URL names another one)",
        )
    })
}

/// The lock is held until the file is dropped; the kernel also releases it when the process dies.
fn lock(path: &Path, progress: &Progress) -> Result<File> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    if file.try_lock().is_err() {
        progress.note(&format!(
            "Another run prepares the Python environment ({}): waiting for it",
            path.display()
        ));
        file.lock().with_context(|| format!("locking {}", path.display()))?;
    }
    Ok(file)
}

/// The interpreter for all builds.
fn base_python() -> String {
    std::env::var("MAINSTAY_PYTHON").unwrap_or_else(|_| "python3".into())
}

fn who(python: &str) -> Result<Interpreter> {
    let printed = command::output(Command::new(python).args(["-c", WHO]))
        .context("python3 is needed (3.9 or later; MAINSTAY_PYTHON names another interpreter)")?;
    serde_json::from_str(&printed).with_context(|| format!("asking {python} for its version: {printed:?}"))
}

/// The stamp with which the environment can be used unchanged.
fn recipe(host: &Interpreter) -> Result<String> {
    let (major, minor, patch) = host.version;
    let torch = if host.torch { "the system's torch".to_string() } else { torch_for(host.version)? };
    Ok(format!("python {major}.{minor}.{patch} of {}\n{torch}\n{}\n", host.prefix, TOOLS.join(" ")))
}

/// One fixed release, so that results can be compared; later Pythons need a later one.
fn torch_for(version: (u32, u32, u32)) -> Result<String> {
    match version {
        (3, minor, _) if minor < 9 => bail!("python3 is 3.{minor}; 3.9 or later is needed (MAINSTAY_PYTHON)"),
        (3, minor, _) if minor < 14 => Ok("torch==2.8.0".into()),
        _ => Ok("torch>=2.9,<3".into()),
    }
}

/// Whether an environment of unknown history can be used: for this interpreter, and complete.
fn works(dir: &Path, host: &Interpreter) -> bool {
    let python = dir.join("bin/python");
    let same = who(&python.to_string_lossy())
        .is_ok_and(|inside| inside.version == host.version && inside.prefix == host.prefix);
    same && command::output(Command::new(python).args(["-c", WORKS])).is_ok()
}

/// Debian and Ubuntu package `venv` separately from Python.
fn provide_venv_module(progress: &Progress, python: &str, host: &Interpreter) -> Result<()> {
    let (major, minor, _) = host.version;
    let package = format!("python{major}.{minor}-venv");
    let by_hand = format!(
        "{python} has no venv module; install it, on Debian and Ubuntu by: apt-get install {package}"
    );
    if !nix::unistd::geteuid().is_root() || !command::exists("apt-get", "--version") {
        bail!("{by_hand}");
    }
    progress
        .step(&format!("Installing {package}: {python} comes without its venv module here"), || {
            let log = paths::cache()?.join("apt.log");
            let mut refresh = Command::new("apt-get");
            command::run_logged(refresh.args(["update", "-qq"]), &log)?;
            let mut install = Command::new("apt-get");
            install.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "-qq", &package]);
            command::run_logged(&mut install, &log)
        })
        .context(by_hand)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}
