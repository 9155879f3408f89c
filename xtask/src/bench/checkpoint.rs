//! Checkpoints: the cost of a save for training, and how soon a state is loaded, as ratios to one warm memcpy of
//! the same bytes just before. Compared with torch.save, DCP's async_save, NVRx's local manager, alone and with
//! replication, and DLRover's flash checkpoints, all on the same tmpfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::{Bed, script_path};
use super::peers::{DLROVER_NAME, NVRX_NAME};
use super::process::Running;
use crate::paths;
use crate::progress::Progress;

const SCRIPT: &str = "checkpoint.py";

/// One tool at one size.
const LIMIT: Duration = Duration::from_secs(300);

/// Sizes of a rank's state, by the name of their figures, and how often each is saved at most: a large one waits
/// for the disk each time.
const SIZES: [(&str, f64, usize); 2] = [("1g", 1.0, usize::MAX), ("4g", 4.0, 4)];

/// Peers by the script's names and by those of the figures; some need an environment of their own.
const PEERS: [(&str, &str); 5] = [
    ("torch_save", "torch.save"),
    ("dcp_async", "dcp.async_save"),
    ("nvrx", NVRX_NAME),
    ("nvrx_replicated", "NVRx 0.4.1, replicated between two ranks"),
    ("dlrover", DLROVER_NAME),
];

/// The peers that come with PyTorch.
const OF_PYTORCH: [&str; 2] = ["torch_save", "dcp_async"];

/// The size of a peer's state: the largest of which several fit into a small host.
const PEERS_UP_TO_GIB: f64 = 1.0;

/// Measures each size `samples` times; only those of at most `most_gib`.
pub fn measure(progress: &Progress, bed: &Bed, samples: usize, most_gib: f64, report: &mut Report) {
    // A smaller state replaces both if that is requested, under its own name.
    let sizes = SIZES.into_iter().filter(|(_, gib, _)| *gib <= most_gib);
    let mut sizes: Vec<(&str, f64, usize)> = sizes.collect();
    if sizes.is_empty() {
        sizes.push(("small", most_gib, usize::MAX));
    }
    for (name, gib, most) in sizes {
        let samples = samples.min(most);
        let step = |tool: &str| {
            let reported = format!("checkpoint: {tool}, {gib} GiB ({samples} saves and loads)");
            progress
                .step(&reported, || timed(bed, tool, gib, samples))
                .map_err(|error| eprintln!("{reported}: left out: {error:#}"))
                .ok()
        };
        if !wanted(report) {
            continue;
        }
        let Some(ours) = step("mainstay") else { continue };
        report.add(figures(name, &ours, &[]));
        let mut peers: Vec<(&str, Times)> = Vec::new();
        for (tool, peer) in PEERS {
            let here = OF_PYTORCH.contains(&tool) || bed.peers.is_some();
            if !bed.torchrun || gib > PEERS_UP_TO_GIB || !here || !wanted(report) {
                continue;
            }
            peers.extend(step(tool).map(|times| (peer, times)));
            report.add(figures(name, &ours, &peers));
        }
    }
}

fn wanted(report: &Report) -> bool {
    let families =
        ["checkpoint.save", "checkpoint.first_save", "checkpoint.behind", "checkpoint.restore_memory"];
    families.iter().any(|family| report.wants_some_of(family))
}

/// Our figures, compared with each peer that was measured.
fn figures(name: &str, ours: &Times, peers: &[(&str, Times)]) -> Vec<Figure> {
    let of = |id: String, unit: &str, of: &dyn Fn(&Times) -> Vec<f64>| -> Vec<Figure> {
        let Some(figure) = Figure::median(&id, unit, &of(ours)) else { return Vec::new() };
        match peers {
            [] => vec![figure],
            _ => peers.iter().map(|(peer, times)| figure.beside(peer, &of(times))).collect(),
        }
    };
    let mut all = vec![
        of(format!("checkpoint.save_stall_{name}"), "x memcpy", &|times| times.ratios("save")),
        of(format!("checkpoint.first_save_{name}"), "x memcpy", &|times| times.ratios("first")),
        of(format!("checkpoint.save_stall_s_{name}"), "s", &|times| times.seconds("save")),
        of(format!("checkpoint.behind_s_{name}"), "s", &|times| times.behind()),
        // Into existing tensors, as a training script has them when it loads; dcp.load does nothing else.
        of(restore(name, ""), "x memcpy", &|times| times.speeds("load into")),
        of(restore(name, "_s"), "s", &|times| times.seconds("load into")),
    ];
    if peers.is_empty() {
        // Into memory that no process has used before: new pages limit the speed.
        all.push(of(restore(name, "_new"), "x memcpy", &|times| times.speeds("load")));
        // The cost of the kernel's new pages alone, in the same unit: no restore into new memory is faster than
        // that.
        all.push(of(restore(name, "_new_pages"), "x memcpy", &|times| times.speeds("new memory")));
    }
    all.concat()
}

/// The name of a restore figure; figures without a size are for 1 GiB.
fn restore(size: &str, what: &str) -> String {
    let size = if size == "1g" { String::new() } else { format!("_{size}") };
    format!("checkpoint.restore_memory{what}{size}")
}

struct Times(Vec<Event>);

#[derive(Deserialize)]
struct Event {
    what: String,
    #[serde(default)]
    copy: f64,
    #[serde(default)]
    took: f64,
    #[serde(default)]
    behind: f64,
}

impl Times {
    fn of<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Event> {
        self.0.iter().filter(move |event| event.what == what)
    }

    fn ratios(&self, what: &str) -> Vec<f64> {
        self.of(what).map(|event| event.took / event.copy).collect()
    }

    fn speeds(&self, what: &str) -> Vec<f64> {
        self.of(what).map(|event| event.copy / event.took).collect()
    }

    fn seconds(&self, what: &str) -> Vec<f64> {
        self.of(what).map(|event| event.took).collect()
    }

    /// From the call until the step can be offered.
    fn behind(&self) -> Vec<f64> {
        self.of("save").map(|event| event.behind).collect()
    }
}

fn timed(bed: &Bed, tool: &str, gib: f64, samples: usize) -> Result<Times> {
    let folder = paths::target().join("bench/checkpoint");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let out = folder.join("events.jsonl");
    let mut command = command(bed, tool, gib, &folder)?;
    let place = Place::new()?;
    command
        .arg(script_path(SCRIPT))
        .args([tool, &gib.to_string(), &samples.to_string()])
        .arg(&out)
        .arg(&place.0);
    let mut running = Running::start(command, &folder.join("log"))?;
    let done = || read(&out).iter().any(|event| event.what == "done").then_some(());
    running.wait_for("the end of its saves", LIMIT, done)?;
    let times = Times(read(&out));
    if times.of("save").count() != samples {
        bail!("{} of {samples} saves came to pass\n{}", times.of("save").count(), running.printed());
    }
    Ok(times)
}

/// Where peers keep their checkpoints: memory, which a killed peer does not free.
struct Place(PathBuf);

impl Place {
    fn new() -> Result<Place> {
        let place = Path::new("/dev/shm").join(format!("mainstay-bench-checkpoint-{}", std::process::id()));
        fs::create_dir_all(&place).with_context(|| format!("creating {}", place.display()))?;
        Ok(Place(place))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A failed removal is no worse than before.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// On a small host a large state leaves room for two slots only; then each save reaches the disk before the next.
const THREE_SLOTS_UP_TO_GIB: f64 = 1.0;

fn command(bed: &Bed, tool: &str, gib: f64, folder: &Path) -> Result<Command> {
    Ok(match tool {
        "mainstay" => {
            let mut command = Command::new(paths::release_mainstay());
            // The launcher computes the checksums of one save while the next memcpy is measured, as in production;
            // the disk is measured separately.
            command.args(["run", "--no-agent", "--no-warm", "--max-restarts", "0"]);
            let slots = if gib <= THREE_SLOTS_UP_TO_GIB { 3 } else { 2 };
            if slots == 3 {
                command.args(["--checkpoint-bandwidth", "50M"]);
            }
            // Room for the slots of that size, and a little more.
            let memory = (gib * 1.02 * f64::from(slots) * 1024.0) as u64 + 64;
            command.args([
                "--checkpoint-slots",
                &slots.to_string(),
                "--checkpoint-memory",
                &format!("{memory}M"),
            ]);
            command.arg("--log-dir").arg(folder.join("logs")).arg("--no-python").arg(bed.venv.python());
            command
        }
        tool if OF_PYTORCH.contains(&tool) => Command::new(bed.venv.python()),
        _ => Command::new(bed.peers.as_ref().context("no peers")?.join("bin/python")),
    })
}

fn read(events: &Path) -> Vec<Event> {
    let text = fs::read_to_string(events).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
