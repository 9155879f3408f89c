//! The cost of a heartbeat for the training process: from Rust, from C, from Python; compared with NVRx's client.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher, script_path};
use super::peers::NVRX_NAME;
use super::process::Running;
use crate::command;
use crate::paths;
use crate::progress::Progress;

/// Groups of four steps of the paired measurement with `--quick`, about 0.2 s each.
const QUICK_FOURS: &str = "60";

/// Measures everything that is available here. Each program reports a median of many batches; several runs of it
/// show how far runs differ.
pub fn measure(progress: &Progress, bed: &Bed, runs: usize, quick: bool, report: &mut Report) {
    let mut step = |ids: &[&str], work: &dyn Fn() -> Result<Vec<Figure>>| {
        if report.wants(ids) {
            let figures = progress.step(ids[0], work);
            report.part(ids[0], figures);
        }
    };
    step(&["heartbeat.rust", "heartbeat.section_rust"], &|| rust(runs));
    step(&["heartbeat.c", "heartbeat.section_c"], &|| c(bed, runs));
    let python_ids = [
        "heartbeat.python",
        "heartbeat.section_python",
        "heartbeat.python_step_loss",
        "heartbeat.step_overhead",
    ];
    step(&python_ids, &|| python(bed, runs));
    step(&["heartbeat.torch_step_overhead"], &|| torch(bed, runs));
    let paired_ids = ["heartbeat.torch_step_paired", "heartbeat.torch_step_paired_uncertain"];
    step(&paired_ids, &|| torch_paired(bed, runs, quick));
}

fn rust(runs: usize) -> Result<Vec<Figure>> {
    let program = paths::target().join("release/examples/beat_cost");
    let runs = repeat(runs, || json(Command::new(&program).env_remove("MAINSTAY_PAGE")))?;
    Ok(figures(
        &runs,
        &[("heartbeat_ns", "heartbeat.rust", "ns"), ("section_pair_ns", "heartbeat.section_rust", "ns")],
    ))
}

fn c(bed: &Bed, runs: usize) -> Result<Vec<Figure>> {
    let (sources, release) = (paths::root().join("client/c"), paths::target().join("release"));
    let program = release.join("beat_cost_c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut compile = Command::new(compiler);
    compile.arg("-O2").arg("-o").arg(&program).arg(sources.join("beat_cost.c")).arg("-I").arg(&sources);
    // The archive: then the measured code is certainly the code just built.
    compile.arg(release.join("libmainstay_client.a")).args(["-lpthread", "-ldl", "-lm", "-lgcc_s"]);
    command::output(&mut compile)?;
    let runs = repeat(runs, || {
        let page = Page::fresh(bed)?;
        json(Command::new(&program).env("MAINSTAY_PAGE", &page.path))
    })?;
    Ok(figures(
        &runs,
        &[("heartbeat_ns", "heartbeat.c", "ns"), ("section_pair_ns", "heartbeat.section_c", "ns")],
    ))
}

fn python(bed: &Bed, runs: usize) -> Result<Vec<Figure>> {
    let runs = repeat(runs, || {
        let page = Page::fresh(bed)?;
        json(
            Command::new(bed.venv.python()).arg(script_path("heartbeat.py")).env("MAINSTAY_PAGE", &page.path),
        )
    })?;
    let ours = figures(
        &runs,
        &[
            ("heartbeat_ns", "heartbeat.python", "ns"),
            ("section_pair_ns", "heartbeat.section_python", "ns"),
            ("step_loss_ns", "heartbeat.python_step_loss", "ns"),
            ("step_overhead_percent", "heartbeat.step_overhead", "% of 50 ms"),
        ],
    );
    let peer = if bed.peers.is_some() { nvrx(bed) } else { return Ok(ours) };
    let peer = peer.unwrap_or_else(|error| {
        eprintln!("{NVRX_NAME}: left out: {error:#}");
        Value::Null
    });
    let beside = |figure: Figure| match figure.id.as_str() {
        "heartbeat.python" if peer.is_object() => figure.beside(NVRX_NAME, &samples(&peer, "heartbeat_ns")),
        "heartbeat.section_python" if peer.is_object() => {
            figure.beside(NVRX_NAME, &samples(&peer, "section_pair_ns"))
        }
        _ => figure,
    };
    Ok(ours.into_iter().map(beside).collect())
}

/// The time that the hooks for PyTorch add to a step, hook by hook.
fn torch(bed: &Bed, runs: usize) -> Result<Vec<Figure>> {
    let watched = repeat(runs, || {
        let page = Page::fresh(bed)?;
        json(&mut unwatched(bed, &page, "heartbeat_torch.py"))
    })?;
    Ok(figures(&watched, &[("torch_step_overhead_percent", "heartbeat.torch_step_overhead", "% of 50 ms")]))
}

/// The same by steps with and without them, in pairs.
fn torch_paired(bed: &Bed, runs: usize, quick: bool) -> Result<Vec<Figure>> {
    let paired = repeat(runs, || {
        let page = Page::fresh(bed)?;
        let mut script = unwatched(bed, &page, "heartbeat_torch_paired.py");
        if quick {
            script.env("BENCH_FOURS", QUICK_FOURS);
        }
        json(&mut script)
    })?;
    let wanted = [
        ("torch_step_paired_percent", "heartbeat.torch_step_paired", "% of 50 ms"),
        ("uncertain_ns", "heartbeat.torch_step_paired_uncertain", "ns"),
    ];
    Ok(figures(&paired, &wanted))
}

/// A script that starts watching itself, so that it can measure before and after.
fn unwatched(bed: &Bed, page: &Page, script: &str) -> Command {
    let mut command = Command::new(bed.venv.python());
    command.arg(script_path(script)).env("MAINSTAY_PAGE", &page.path).env("MAINSTAY_TORCH", "0");
    command
}

/// One rank under ft_launcher, with its monitor running as in training.
fn nvrx(bed: &Bed) -> Result<Value> {
    let folder = paths::target().join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let result = folder.join("heartbeat_nvrx.json");
    let _ = fs::remove_file(&result);
    let mut command = bed.job(Launcher::Nvrx, 1, &folder, "heartbeat_nvrx.py")?;
    command.env("BENCH_RESULT", &result);
    let command = with_sections(&command);
    let mut running = Running::start(command, &folder.join("heartbeat_nvrx.log"))?;
    let text = running.wait_for("result", Duration::from_secs(120), || {
        let text = fs::read_to_string(&result).ok()?;
        serde_json::from_str(&text).ok()
    })?;
    Ok(text)
}

/// The same command with NVRx's section time-outs before the script: without them it does not record sections.
fn with_sections(command: &Command) -> Command {
    let arguments: Vec<_> = command.get_args().collect();
    let mut with = Command::new(command.get_program());
    if let Some((script, options)) = arguments.split_last() {
        with.args(options)
            .arg("--ft-rank-section-timeouts=forward:600")
            .arg("--ft-rank-out-of-section-timeout=600");
        with.arg(script);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => with.env(name, value),
            None => with.env_remove(name),
        };
    }
    with
}

/// A heartbeat page as a launcher makes it, gone when dropped. Each process claims a page once.
struct Page {
    path: PathBuf,
}

impl Page {
    fn fresh(bed: &Bed) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { memory.to_path_buf() } else { paths::target() };
        let path = folder.join(format!("mainstay-bench-{}", std::process::id()));
        let make = "import sys, time; from mainstay import _native; \
                    _native._testing_format_page(sys.argv[1], now=time.monotonic_ns())";
        command::output(Command::new(bed.venv.python()).args(["-c", make]).arg(&path))?;
        Ok(Self { path })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // It is in memory and has some kilobytes: a failed removal must not fail a benchmark.
        let _ = fs::remove_file(&self.path);
    }
}

fn repeat(runs: usize, mut once: impl FnMut() -> Result<Value>) -> Result<Vec<Value>> {
    (0..runs).map(|_| once()).collect()
}

fn json(command: &mut Command) -> Result<Value> {
    let printed = command::output(command)?;
    serde_json::from_str(&printed).with_context(|| format!("{} printed {printed:?}", command::words(command)))
}

/// A figure for each field that the runs report.
fn figures(runs: &[Value], wanted: &[(&str, &str, &str)]) -> Vec<Figure> {
    let of = |(field, id, unit): &(&str, &str, &str)| {
        let samples: Vec<f64> = runs.iter().filter_map(|run| run[field].as_f64()).collect();
        Figure::median(id, unit, &samples)
    };
    wanted.iter().filter_map(of).collect()
}

fn samples(value: &Value, field: &str) -> Vec<f64> {
    value[field].as_array().map(|all| all.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
}
