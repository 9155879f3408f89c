//! The Python environments that ranks of the tests run in.

use std::path::PathBuf;

use crate::bare;
use crate::check::{Checks, Verdict};
use crate::frameworks;
use crate::nvrx;
use crate::progress::Progress;
use crate::venv::{self, Venv};
use crate::wheel;

/// The environments that could be made; none if no test needs them.
#[derive(Default)]
pub struct Environments {
    /// PyTorch and the wheel.
    pub python: Option<Venv>,
    /// The frameworks that the package has hooks for, too.
    pub frameworks: Option<Venv>,
    /// The wheel without PyTorch.
    pub bare: Option<Venv>,
    /// NVRx's client.
    nvrx: Option<PathBuf>,
}

impl Environments {
    /// Makes them.
    pub fn prepare(checks: &mut Checks) -> Environments {
        let python = python(checks);
        let Some(base) = &python else { return Environments::default() };
        // Tests that need these are skipped where they cannot be installed.
        let frameworks = optional(checks, "Lightning, Transformers, JAX, Orbax (pip)", |progress| {
            frameworks::ensure(progress, base)
        });
        let bare = optional(checks, "Python environment without PyTorch (pip)", |progress| {
            bare::ensure(progress, base)
        });
        let nvrx = optional(checks, "NVRx's client (pip)", |progress| nvrx::ensure(progress, base));
        Environments { python, frameworks, bare, nvrx }
    }

    /// The variables that name the interpreters to tests.
    pub fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let named = [
            ("MAINSTAY_TEST_PYTHON", self.python.as_ref().map(Venv::python)),
            ("MAINSTAY_TEST_FRAMEWORKS", self.frameworks.as_ref().map(Venv::python)),
            ("MAINSTAY_TEST_NVRX", self.nvrx.clone()),
        ];
        named.into_iter().filter_map(|(name, python)| Some((name, python?))).collect()
    }
}

/// The environment with the wheel in it; none, with a recorded failure, if it cannot be made.
fn python(checks: &mut Checks) -> Option<Venv> {
    let mut made = None;
    checks.run("Python environment and wheel", || {
        let progress = Progress::begin();
        let venv = venv::ensure(&progress)?;
        wheel::install(&progress, &venv)?;
        made = Some(venv);
        Ok(Verdict::of(true))
    });
    made
}

/// Makes an environment without which tests are skipped.
fn optional<T>(
    checks: &mut Checks,
    name: &str,
    make: impl FnOnce(&Progress) -> anyhow::Result<T>,
) -> Option<T> {
    let mut made = None;
    checks.run(name, || {
        Ok(match make(&Progress::begin()) {
            Ok(environment) => {
                made = Some(environment);
                Verdict::of(true)
            }
            Err(error) => Verdict::skipped(&format!("{error:#}")),
        })
    });
    made
}
