//! The cost of a heartbeat for the training process: from Rust, from C, from Python; compared with NVRx's
//! client.

use serde_json::Value;

use super::prelude::*;

/// Groups of four steps of the paired measurement with `--quick`, about 0.2 s each.
const QUICK_FOURS: &str = "60";

/// Measures everything that is available here. Each program reports a median of many batches; several runs of it
/// show how far runs differ.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let (runs, quick) = (bench.at_most(5, 2), bench.args.quick);
    let pair = |language: &str| {
        vec![
            Of::field("heartbeat_ns", &format!("heartbeat.{language}"), "ns"),
            Of::field("section_pair_ns", &format!("heartbeat.section_{language}"), "ns"),
        ]
    };
    let release = paths::target().join("release");
    bench.measure(pair("rust"), "Rust", || {
        let mut program = Command::new(release.join("examples/beat_cost"));
        (0..runs).map(|_| json(program.env_remove("MAINSTAY_PAGE"))).collect()
    });
    bench.measure(pair("c"), "C", || {
        let program = compile(&release)?;
        repeat(bed, runs, || cmd!("{program}"))
    });
    let mut comparison = Comparison::of(pair("python"));
    comparison.figures.extend([
        Of::field("step_loss_ns", "heartbeat.python_step_loss", "ns"),
        Of::field("step_overhead_percent", "heartbeat.step_overhead", "% of 50 ms"),
    ]);
    let python = |script: &str| {
        let (python, script) = (bed.venv.python(), script_path(script));
        cmd!("{python} {script}")
    };
    bench.take(&mut comparison, None, "Python", || repeat(bed, runs, || python("heartbeat.py")));
    if bed.peers.is_some() {
        bench.take(&mut comparison, Some(NVRX_NAME), NVRX_NAME, || nvrx(bed));
    }
    // These scripts start watching themselves, so that they can measure before and after.
    let unwatched = |script: &str| {
        let mut command = python(script);
        command.env("MAINSTAY_TORCH", "0").envs(quick.then_some(("BENCH_FOURS", QUICK_FOURS)));
        command
    };
    let figures =
        vec![Of::field("torch_step_overhead_percent", "heartbeat.torch_step_overhead", "% of 50 ms")];
    bench.measure(figures, "the hooks for PyTorch, one by one", || {
        repeat(bed, runs, || unwatched("heartbeat_torch.py"))
    });
    let figures = vec![
        Of::field("torch_step_paired_percent", "heartbeat.torch_step_paired", "% of 50 ms"),
        Of::field("uncertain_ns", "heartbeat.torch_step_paired_uncertain", "ns"),
    ];
    bench.measure(figures, "the same by steps with and without them, in pairs", || {
        repeat(bed, runs, || unwatched("heartbeat_torch_paired.py"))
    });
}

/// The client in C, with the archive: then the measured code is certainly the code just built.
fn compile(release: &Path) -> Result<PathBuf> {
    let (sources, program) = (paths::root().join("client/c"), release.join("beat_cost_c"));
    let (source, archive) = (sources.join("beat_cost.c"), release.join("libmainstay_client.a"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut compile =
        cmd!("{compiler} -O2 -o {program} {source} -I {sources} {archive} -lpthread -ldl -lm -lgcc_s");
    command::output(&mut compile)?;
    Ok(program)
}

/// One rank under ft_launcher, with its monitor running as in training. Without time-outs of sections it does
/// not record them.
fn nvrx(bed: &Bed) -> Result<Vec<Value>> {
    let folder = paths::fresh(paths::target().join("bench/heartbeat"))?;
    let result = folder.join("nvrx.json");
    let sections = "--ft-rank-section-timeouts=forward:600 --ft-rank-out-of-section-timeout=600";
    let mut command = bed.job(Launcher::Nvrx, 1, &folder, sections, "heartbeat_nvrx.py");
    command.env("BENCH_RESULT", &result);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    running.wait_for("result", || serde_json::from_str(&fs::read_to_string(&result).ok()?).ok())
}

/// Runs a program some times, each with a heartbeat page as a launcher makes it: each process claims a page
/// once.
fn repeat(bed: &Bed, runs: usize, command: impl Fn() -> Command) -> Result<Vec<Value>> {
    let folder = tempfile::tempdir_in(paths::memory()).context("making a folder for pages")?;
    let page = folder.path().join("page");
    let (python, make) = (bed.venv.python(), script_path("fresh_page.py"));
    let once = |_| {
        command::output(&mut cmd!("{python} {make} {page}"))?;
        json(command().env("MAINSTAY_PAGE", &page))
    };
    (0..runs).map(once).collect()
}

fn json(command: &mut Command) -> Result<Value> {
    let printed = command::output(command)?;
    serde_json::from_str(&printed).with_context(|| format!("{} printed {printed:?}", command::words(command)))
}
