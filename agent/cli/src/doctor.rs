//! `mainstay doctor`: what is readable on this host, what is not, and why.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde_json::{Value, json};

use super::find::{Ask, find};
use super::run::cluster;
use super::{exit, output};

/// Show what can be read on this host, what cannot and why
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay doctor                                what can be read here
  mainstay doctor --gpu --out /tmp/report        prove what works on this host's GPUs; takes up to 10 minutes

Exit status: 0 everything that is there can be read (with --gpu: no check failed), 1 something cannot be read
(a check failed), 3 the checks could not be run, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    ask: Ask,
    /// Run the acceptance program against the GPUs; writes report.json and report.md
    #[arg(long)]
    gpu: bool,
    /// Where the reports of --gpu go
    #[arg(long, value_name = "DIR", default_value = "mainstay-gpu-report", requires = "gpu")]
    out: PathBuf,
    /// The Python that runs --gpu; with torch for the training checks
    #[arg(long, value_name = "PROGRAM", default_value = "python3", requires = "gpu")]
    python: PathBuf,
    /// Only these parts of --gpu, comma-separated: nvml, commands, deep, weight, training, faults, checkpoint, jax
    #[arg(long, value_name = "PARTS", requires = "gpu")]
    parts: Option<String>,
}

/// The acceptance program. The folder of `cargo xtask gpu --pack` has the same files.
const PROGRAM: [(&str, &str); 8] = [
    ("accept.py", include_str!("../../acceptance/accept.py")),
    ("report.py", include_str!("../../acceptance/report.py")),
    ("readings.py", include_str!("../../acceptance/readings.py")),
    ("training.py", include_str!("../../acceptance/training.py")),
    ("kernels.py", include_str!("../../acceptance/kernels.py")),
    ("rank.py", include_str!("../../acceptance/rank.py")),
    ("checkpoint.py", include_str!("../../acceptance/checkpoint.py")),
    ("jax_rank.py", include_str!("../../acceptance/jax_rank.py")),
];

/// One thing that was checked.
struct Finding {
    what: &'static str,
    /// Whether it can be used; none if it is absent, which is no fault.
    usable: Option<bool>,
    detail: String,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.gpu {
        return accept(args);
    }
    let mut findings = vec![
        readable("kernel log", "/dev/kmsg"),
        readable("memory pressure", "/proc/pressure/memory"),
        readable("control groups (v2)", "/sys/fs/cgroup/cgroup.controllers"),
        readable("NVIDIA kernel driver", "/proc/driver/nvidia/version"),
        readable("NVIDIA control device", "/dev/nvidiactl"),
        library("NVML library", "libnvidia-ml.so.1"),
        library("CUDA driver library", "libcuda.so.1"),
    ];
    findings.push(etcd());
    findings.extend(container());
    let found = find(args.ask.socket.as_deref());
    let agent = found.places.iter().find(|place| place.job.is_none());
    findings.extend(found.places.iter().map(|place| Finding {
        what: if place.job.is_none() { "agent socket" } else { "launcher socket" },
        usable: Some(std::os::unix::net::UnixStream::connect(&place.socket).is_ok()),
        detail: place.socket.display().to_string(),
    }));
    findings.extend(agent.and_then(|place| acts_for_users(&place.socket)));
    if agent.is_none() {
        let detail = "none found; jobs run without one, with less knowledge of the host".to_owned();
        findings.push(Finding { what: "agent socket", usable: None, detail });
    }
    let status =
        if findings.iter().any(|finding| finding.usable == Some(false)) { exit::DEGRADED } else { exit::OK };
    output::print(&match args.ask.form.structured() {
        Some(form) => form.document(as_json(&findings, status)),
        None => as_text(&findings),
    })?;
    Ok(ExitCode::from(status))
}

/// The program that keeps the store of a job that survives any host.
fn etcd() -> Finding {
    let found = cluster::etcd(&std::env::var_os("PATH").unwrap_or_default());
    let usable = found.is_some().then_some(true);
    let detail = found.map_or_else(
        || {
            "not on PATH: a job of several hosts ends with the host of its store; on three of them etcd keeps the store \
             (Debian and Ubuntu: etcd-server)"
                .to_owned()
        },
        |program| program.display().to_string(),
    );
    Finding { what: "etcd", usable, detail }
}

/// The container that this runs in, and what cannot be seen from there.
fn container() -> Option<Finding> {
    let marks = [
        ("/.dockerenv", "Docker"),
        ("/run/.containerenv", "Podman"),
        ("/run/host/container-manager", "systemd"),
    ];
    let marked = marks.iter().find(|(mark, _)| Path::new(mark).exists()).map(|(_, runtime)| *runtime);
    let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").map(|_| "Kubernetes");
    let runtime = in_pod.or(marked)?;
    let detail = format!(
        "of {runtime}: processes of other containers and the kernel log are seen only if they are shared with it, and the \
         host name is its own (NODE_NAME names the node)"
    );
    Some(Finding { what: "container", usable: Some(true), detail })
}

/// Whether the agent may act as the users whose checkpoints it replicates and restores.
fn acts_for_users(socket: &Path) -> Option<Finding> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let agent = getsockopt(&stream, PeerCredentials).ok()?;
    if agent.uid() == 0 || agent.uid() == nix::unistd::geteuid().as_raw() {
        return None;
    }
    let text = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap_or_default();
    let held = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = held.and_then(|held| u64::from_str_radix(held.trim(), 16).ok()).unwrap_or(0);
    let all = CAP_SETUID | CAP_SETGID;
    let acts = held & all == all;
    let reads = held & CAP_DAC_READ_SEARCH != 0;
    let detail = if acts {
        "the agent may act as the users of jobs".to_owned()
    } else {
        let closed = match reads {
            true => "",
            false => ", except what other users may not read: that needs CAP_DAC_READ_SEARCH",
        };
        format!(
            "the agent runs as user {}: it replicates checkpoints in directories that launchers hand over{closed}, and restores \
             into files that launchers lend",
            agent.uid()
        )
    };
    Some(Finding { what: "checkpoints of users", usable: Some(acts || reads), detail })
}

/// From linux/capability.h: read files that other users may not read.
const CAP_DAC_READ_SEARCH: u64 = 1 << 2;

/// From linux/capability.h: change group and user.
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;

fn readable(what: &'static str, path: &str) -> Finding {
    // The first byte shows it: some kernel files can be opened but not read. A device is only opened.
    let opened = File::open(path).and_then(|mut file| match path.starts_with("/dev/") {
        true => Ok(0),
        false => file.read(&mut [0; 1]),
    });
    match opened {
        Ok(_) => Finding { what, usable: Some(true), detail: path.to_owned() },
        Err(error) => Finding {
            what,
            usable: (error.kind() != ErrorKind::NotFound).then_some(false),
            detail: format!("{path}: {error}"),
        },
    }
}

/// Only looks for the file: a vendor's library is never loaded into this process.
fn library(what: &'static str, name: &str) -> Finding {
    let usual =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"];
    let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&set).chain(usual.map(PathBuf::from));
    match folders.find(|folder| folder.join(name).exists()) {
        Some(folder) => readable(what, &folder.join(name).display().to_string()),
        None => Finding { what, usable: None, detail: format!("{name} is in none of the usual folders") },
    }
}

fn word(usable: Option<bool>) -> &'static str {
    match usable {
        Some(true) => "ok",
        Some(false) => "no",
        None => "absent",
    }
}

fn as_text(findings: &[Finding]) -> String {
    let line =
        |of: &Finding| format!("{:<6}  {:<24}  {}\n", word(of.usable), of.what, output::clean(&of.detail));
    findings.iter().map(line).collect()
}

fn as_json(findings: &[Finding], status: u8) -> Value {
    let one = |of: &Finding| json!({ "what": of.what, "found": word(of.usable), "detail": of.detail });
    let all: Vec<Value> = findings.iter().map(one).collect();
    json!({ "exit_status": status, "findings": all })
}

/// Runs the acceptance program and returns its exit status.
fn accept(args: &Args) -> anyhow::Result<ExitCode> {
    let folder = args.out.join("program");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    for (name, text) in PROGRAM {
        let file = folder.join(name);
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    }
    let program = std::env::current_exe().context("finding this program's own file")?;
    let status = python(args, &folder, &program)
        .status()
        .with_context(|| format!("starting {} (--python)", args.python.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::UNKNOWN);
    Ok(ExitCode::from(code))
}

fn python(args: &Args, folder: &Path, program: &Path) -> Command {
    let mut command = Command::new(&args.python);
    command.arg(folder.join("accept.py")).arg("--mainstay").arg(program).arg("--out").arg(&args.out);
    if let Some(parts) = &args.parts {
        command.arg("--parts").arg(parts);
    }
    command
}
