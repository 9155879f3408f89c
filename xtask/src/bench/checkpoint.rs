//! Checkpoints: the cost of a save for training, and how soon a state is loaded, as ratios to one warm memcpy of
//! the same bytes just before. Compared with torch.save, DCP's async_save, NVRx's local manager, alone and with
//! replication, and DLRover's flash checkpoints, all on the same tmpfs.

use serde::Deserialize;

use super::launchers::DLROVER_NAME;
use super::prelude::*;

/// One tool at one size.
const LIMIT: Duration = Duration::from_secs(300);

/// Sizes of a rank's state, by the name of their figures, and how often each is saved at most: a large one waits
/// for the disk each time.
const SIZES: [(&str, f64, usize); 2] = [("1g", 1.0, usize::MAX), ("4g", 4.0, 4)];

/// Peers by the script's names and by those of the figures. The first two come with PyTorch, the others need an
/// environment of their own.
const PEERS: [(&str, &str); 5] = [
    ("torch_save", "torch.save"),
    ("dcp_async", "dcp.async_save"),
    ("nvrx", NVRX_NAME),
    ("nvrx_replicated", "NVRx 0.4.1, replicated between two ranks"),
    ("dlrover", DLROVER_NAME),
];
const OF_PYTORCH: usize = 2;

/// The size of a peer's state: the largest of which several fit into a small host. On such a host a larger one
/// leaves room for two of our slots only; then each save reaches the disk before the next.
const SEVERAL_UP_TO_GIB: f64 = 1.0;

#[derive(Deserialize)]
struct Event {
    what: String,
    #[serde(default)]
    copy: f64,
    #[serde(default)]
    took: f64,
    #[serde(default)]
    behind: f64,
    #[serde(skip)]
    is_ours: bool,
}

/// Measures each size that is not too large.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let samples = bench.samples(9, 3);
    let most_gib = if bench.args.quick { bench.args.most_gib.min(1.0) } else { bench.args.most_gib };
    // A smaller state replaces both if that is requested, under its own name.
    let mut sizes: Vec<_> = SIZES.into_iter().filter(|(_, gib, _)| *gib <= most_gib).collect();
    if sizes.is_empty() {
        sizes.push(("small", most_gib, usize::MAX));
    }
    for (name, gib, most) in sizes {
        let samples = samples.min(most);
        let what = |tool: &str| format!("{tool}, {gib} GiB ({samples} saves and loads)");
        let mut comparison = Comparison::of(figures(name));
        if !bench.take(&mut comparison, None, &what("mainstay"), || timed(bed, "mainstay", gib, samples)) {
            continue;
        }
        let here = if bed.peers.is_some() { PEERS.len() } else { OF_PYTORCH };
        for (tool, peer) in PEERS.into_iter().take(here) {
            if bed.torchrun && gib <= SEVERAL_UP_TO_GIB {
                bench.take(&mut comparison, Some(peer), &what(peer), || timed(bed, tool, gib, samples));
            }
        }
    }
}

fn figures(size: &str) -> Vec<Of<Event>> {
    // Those of restores without a size are for 1 GiB.
    let suffix = if size == "1g" { String::new() } else { format!("_{size}") };
    let of = |id: String, unit, what: &'static str, value: fn(&Event) -> f64| {
        Of::median(id, unit, move |event: &Event| if event.what == what { value(event) } else { f64::NAN })
    };
    let alone = |id: &str, what: &'static str| {
        of(format!("checkpoint.restore_memory{id}{suffix}"), "x memcpy", what, |event| {
            if event.is_ours { event.copy / event.took } else { f64::NAN }
        })
    };
    let ratio = |event: &Event| event.took / event.copy;
    vec![
        of(format!("checkpoint.save_stall_{size}"), "x memcpy", "save", ratio),
        of(format!("checkpoint.first_save_{size}"), "x memcpy", "first", ratio),
        of(format!("checkpoint.save_stall_s_{size}"), "s", "save", |event| event.took),
        // From the call until the step can be offered.
        of(format!("checkpoint.behind_s_{size}"), "s", "save", |event| event.behind),
        // Into existing tensors, as a training script has them when it loads; dcp.load does nothing else.
        of(format!("checkpoint.restore_memory{suffix}"), "x memcpy", "load into", |of| of.copy / of.took),
        of(format!("checkpoint.restore_memory_s{suffix}"), "s", "load into", |event| event.took),
        // Into memory that no process has used before: new pages limit the speed. Then the cost of the kernel's
        // new pages alone, in the same unit: no restore into new memory is faster than that.
        alone("_new", "load"),
        alone("_new_pages", "new memory"),
    ]
}

fn timed(bed: &Bed, tool: &str, gib: f64, samples: usize) -> Result<Vec<Event>> {
    let folder = paths::fresh(paths::target().join("bench/checkpoint"))?;
    // Where peers keep their checkpoints: memory, which a killed peer does not free.
    let place = leftover_free("mainstay-bench-checkpoint")?;
    let mut events: Lines<Event> = Lines::of(folder.join("events.jsonl"));
    let mut command = command(bed, tool, gib, &folder);
    command.arg(script_path("checkpoint.py")).args([tool, &gib.to_string(), &samples.to_string()]);
    command.arg(&events.path).arg(place.path());
    let mut running = Running::start(command, &folder.join("log"))?;
    running.wait_within(LIMIT, "the end of its saves", || {
        events.poll();
        events.all.iter().any(|event| event.what == "done").then_some(())
    })?;
    let saves = events.all.iter().filter(|event| event.what == "save").count();
    ensure!(saves == samples, "{saves} of {samples} saves came to pass\n{}", running.printed());
    events.all.iter_mut().for_each(|event| event.is_ours = tool == "mainstay");
    Ok(events.all)
}

fn command(bed: &Bed, tool: &str, gib: f64, folder: &Path) -> Command {
    if tool != "mainstay" {
        let is_of_pytorch = PEERS[..OF_PYTORCH].iter().any(|(name, _)| *name == tool);
        return Command::new(if is_of_pytorch { bed.venv.python() } else { bed.peers_tool("python") });
    }
    // The launcher computes the checksums of one save while the next memcpy is measured, as in production; the
    // disk is measured separately.
    let (slots, bandwidth) =
        if gib <= SEVERAL_UP_TO_GIB { (3, "--checkpoint-bandwidth 50M") } else { (2, "") };
    // Room for the slots of that size, and a little more.
    let memory = (gib * 1.02 * f64::from(slots) * 1024.0) as u64 + 64;
    let options = format!(
        "--no-agent --no-warm --max-restarts 0 {bandwidth} --checkpoint-slots {slots} --checkpoint-memory {memory}M"
    );
    let mut command = bed.mainstay(&options, &folder.join("logs"));
    command.arg("--no-python").arg(bed.venv.python());
    command
}
