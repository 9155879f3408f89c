//! What is released, built as `cargo xtask dist` builds it: sizes, what it needs of a host, and how soon a person has
//! seen it work.

use super::prelude::*;
use crate::dist::{Dist, image, needs, system::System};
use crate::lint;
use crate::progress::Progress;

const MEGABYTE: f64 = 1e6;

pub fn measure(bench: &mut Bench, _: &Bed) {
    let security = || Ok(vec![Figure::one("install.unit_security", "of 10", lint::exposure()?, 1)]);
    bench.part(&["install.unit_security"], "install: the unit (systemd-analyze security)", security);
    if bench.args.quick {
        return eprintln!("install: the rest is left out: a build is longer than --quick allows");
    }
    let rounds = bench.samples(3, 1);
    let arch = std::env::consts::ARCH;
    bench.part(
        &["install.wheel_to_demo_s", "install.wheel_mb", "install.glibc"],
        "install: the wheel (some minutes if it is not built)",
        || {
            let progress = Progress::begin();
            let dist = Dist::new(&progress, arch)?;
            let program = dist.program()?;
            let wheel = dist.wheel(&program)?;
            let (major, minor) = needs::newest_glibc(&program)?;
            let base = python::TORCH.ensure(&progress)?;
            let times: Result<Vec<f64>> = (0..rounds).map(|_| to_demo(&base, &wheel)).collect();
            let figures = [
                Figure::median("install.wheel_to_demo_s", "s", &times?),
                Some(Figure::one("install.wheel_mb", "MB", fs::metadata(&wheel)?.len() as f64 / MEGABYTE, 1)),
                Some(Figure::one("install.glibc", "version", f64::from(major) + f64::from(minor) / 100.0, 1)),
            ];
            Ok(figures.into_iter().flatten().collect())
        },
    );
    bench.part(&["install.image_mb"], "install: the image (buildah)", || {
        let progress = Progress::begin();
        let dist = Dist::new(&progress, arch)?;
        if let Some(why) = image::obstacle() {
            anyhow::bail!("{why}");
        }
        let (program, client) = (dist.program()?, dist.client()?);
        let system = System { program: &program, runs_here: &program, client: &client, arch, quick: false };
        let image = image::build(&image::base()?, &system.stage()?, arch, &dist.out)?;
        Ok(vec![Figure::one("install.image_mb", "MB", image.bytes as f64 / MEGABYTE, 1)])
    });
}

/// Seconds from a Python that has PyTorch to the end of the demo, as the page of the installation has it.
fn to_demo(base: &Path, wheel: &Path) -> Result<f64> {
    let folder = paths::fresh(paths::target().join("bench/install"))?;
    let venv = folder.join("venv");
    python::overlay(base, &venv)?;
    let (python, mainstay, trained) =
        (venv.join("bin/python"), venv.join("bin/mainstay"), folder.join("demo"));
    let began = Instant::now();
    let mut pip = cmd!("{python} -m pip install --disable-pip-version-check --no-index --quiet {wheel}");
    command::run_logged(&mut pip, &folder.join("pip.log"))?;
    let mut demo = cmd!("{mainstay} demo --dir {trained}");
    command::run_logged(demo.env_remove("PYTHON_EXEC"), &folder.join("demo.log"))?;
    Ok(began.elapsed().as_secs_f64())
}
