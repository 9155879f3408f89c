//! `mainstay doctor`: what is readable on this host, what is not, and why.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::{Gid, Group};
use serde_json::{Value, json};

use super::find::{Ask, SocketAt, find};
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
    found: Found,
    detail: String,
}

/// Whether it can be used. Absence is no fault.
enum Found {
    Usable,
    Absent {
        /// A command that adds it, where one command does.
        fix: Option<String>,
    },
    Unusable {
        /// The command that makes it usable.
        fix: String,
    },
}

impl Finding {
    fn usable(what: &'static str, detail: impl Into<String>) -> Finding {
        Finding { what, found: Found::Usable, detail: detail.into() }
    }

    fn absent(what: &'static str, detail: impl Into<String>, fix: Option<&str>) -> Finding {
        Finding { what, found: Found::Absent { fix: fix.map(str::to_owned) }, detail: detail.into() }
    }

    fn unusable(what: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { what, found: Found::Unusable { fix: fix.into() }, detail: detail.into() }
    }

    fn word(&self) -> &'static str {
        match self.found {
            Found::Usable => "ok",
            Found::Absent { .. } => "absent",
            Found::Unusable { .. } => "no",
        }
    }

    fn fix(&self) -> Option<&str> {
        match &self.found {
            Found::Usable => None,
            Found::Absent { fix } => fix.as_deref(),
            Found::Unusable { fix } => Some(fix),
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.gpu {
        return accept(args);
    }
    let container = container();
    let mut findings = vec![
        kernel_log(container),
        memory_pressure(),
        readable("control groups (v2)", "/sys/fs/cgroup/cgroup.controllers"),
    ];
    findings.extend(nvidia(container));
    findings.push(etcd());
    findings.extend(container.map(in_container));
    let found = find(args.ask.socket.as_deref());
    findings.extend(found.places.iter().map(server));
    match found.places.iter().find(|place| place.job.is_none()) {
        Some(agent) => findings.extend(acts_for_users(&agent.socket)),
        None => {
            let installed = UNITS.iter().any(|unit| Path::new(unit).exists());
            let fix = installed.then_some("sudo systemctl enable --now mainstay");
            let detail = "none found; jobs run without one, with less knowledge of the host";
            findings.push(Finding::absent("agent socket", detail, fix));
        }
    }
    let is_unusable = |finding: &Finding| matches!(finding.found, Found::Unusable { .. });
    let status = if findings.iter().any(is_unusable) { exit::DEGRADED } else { exit::OK };
    output::print(&match args.ask.form.structured() {
        Some(form) => form.document(as_json(&findings, status)),
        None => as_text(&findings),
    })?;
    Ok(ExitCode::from(status))
}

/// Where packages and people put the agent's unit.
const UNITS: [&str; 3] = [
    "/etc/systemd/system/mainstay.service",
    "/usr/lib/systemd/system/mainstay.service",
    "/lib/systemd/system/mainstay.service",
];

fn kernel_log(container: Option<&str>) -> Finding {
    let path = "/dev/kmsg";
    let what = "kernel log";
    match opened(path) {
        Ok(()) => Finding::usable(what, path),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Finding::absent(what, format!("{path}: {error}"), None)
        }
        Err(error) => {
            let restricted = std::fs::read_to_string("/proc/sys/kernel/dmesg_restrict");
            let fix = match restricted {
                _ if container.is_some() => format!("docker run --device {path} --cap-add SYSLOG IMAGE"),
                Ok(value) if value.trim() == "1" => "sudo sysctl -w kernel.dmesg_restrict=0".to_owned(),
                _ => readable_by_all(path),
            };
            Finding::unusable(what, format!("{path}: {error}"), fix)
        }
    }
}

/// Kernels that have it may be started without it.
fn memory_pressure() -> Finding {
    let (what, path) = ("memory pressure", "/proc/pressure/memory");
    match opened(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::EOPNOTSUPP) => {
            let fix = if Path::new("/usr/sbin/grubby").exists() {
                "sudo grubby --update-kernel=ALL --args=psi=1  # then restart the host"
            } else {
                "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX psi=1\"' | sudo tee -a /etc/default/grub && \
                 sudo update-grub  # then restart the host"
            };
            Finding::unusable(what, format!("{path}: the kernel was started without psi=1"), fix)
        }
        _ => readable(what, path),
    }
}

/// The driver, its device and its libraries.
fn nvidia(container: Option<&str>) -> [Finding; 4] {
    let driver = readable("NVIDIA kernel driver", "/proc/driver/nvidia/version");
    let is_loaded = matches!(driver.found, Found::Usable);
    let gpus = if is_loaded { 0 } else { nvidia_gpus() };
    let driver = match driver.found {
        Found::Absent { .. } if gpus > 0 && container.is_none() => {
            let detail = format!("not loaded: this host has {gpus} GPUs of NVIDIA");
            Finding::unusable(driver.what, detail, "sudo modprobe nvidia")
        }
        _ => driver,
    };
    let device = match readable("NVIDIA control device", "/dev/nvidiactl") {
        Finding { what, found: Found::Absent { .. }, detail } if is_loaded && container.is_none() => {
            Finding::unusable(what, detail, "sudo nvidia-modprobe -u -c 0")
        }
        Finding { what, found: Found::Absent { .. } | Found::Unusable { .. }, detail }
            if is_loaded && container.is_some() =>
        {
            Finding::unusable(what, detail, "docker run --gpus all IMAGE")
        }
        device => device,
    };
    let libraries = [("NVML library", "libnvidia-ml.so.1"), ("CUDA driver library", "libcuda.so.1")];
    let [nvml, cuda] = libraries.map(|(what, name)| library(what, name));
    [driver, device, nvml, cuda]
}

/// GPUs of NVIDIA on the PCI bus, with or without a driver.
fn nvidia_gpus() -> usize {
    let holds =
        |file: PathBuf, start: &str| std::fs::read_to_string(file).is_ok_and(|text| text.starts_with(start));
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    // Class 03: display controllers.
    let is_gpu =
        |device: &Path| holds(device.join("vendor"), "0x10de") && holds(device.join("class"), "0x03");
    devices.filter(|device| is_gpu(&device.path())).count()
}

/// A server whose socket was found.
fn server(place: &SocketAt) -> Finding {
    let what = if place.job.is_none() { "agent socket" } else { "launcher socket" };
    let path = place.socket.display().to_string();
    let Err(error) = std::os::unix::net::UnixStream::connect(&place.socket) else {
        return Finding::usable(what, path);
    };
    let fix = match error.kind() {
        ErrorKind::PermissionDenied => {
            let group = std::fs::metadata(&place.socket).ok().map(|socket| Gid::from_raw(socket.gid()));
            let group = group.and_then(|id| Group::from_gid(id).ok().flatten());
            let group = group.map_or_else(|| "mainstay".to_owned(), |group| group.name);
            format!("sudo usermod --append --groups {group} $USER  # then log in again")
        }
        // Its launcher was killed.
        _ if place.job.is_some() => format!("rm {}", quoted(&path)),
        _ if place.socket.starts_with("/run/mainstay") => "sudo systemctl restart mainstay".to_owned(),
        _ => format!("mainstay agent --socket {}", quoted(&path)),
    };
    Finding::unusable(what, format!("{path}: {error}"), fix)
}

/// The program that keeps the store of a job that survives any host.
fn etcd() -> Finding {
    let Some(program) = cluster::etcd(&std::env::var_os("PATH").unwrap_or_default()) else {
        let fix = Path::new("/usr/bin/apt-get").exists().then_some("sudo apt-get install etcd-server");
        let detail = "not on PATH: a job of several hosts ends with the host of its store; on three of them etcd keeps the store";
        return Finding::absent("etcd", detail, fix);
    };
    Finding::usable("etcd", program.display().to_string())
}

/// The runtime of the container that this runs in.
fn container() -> Option<&'static str> {
    let marks = [
        ("/.dockerenv", "Docker"),
        ("/run/.containerenv", "Podman"),
        ("/run/host/container-manager", "systemd"),
    ];
    let marked = marks.iter().find(|(mark, _)| Path::new(mark).exists()).map(|(_, runtime)| *runtime);
    let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").map(|_| "Kubernetes");
    in_pod.or(marked)
}

/// What cannot be seen from a container.
fn in_container(runtime: &str) -> Finding {
    let detail = format!(
        "of {runtime}: processes of other containers and the kernel log are seen only if they are shared with it, and the \
         host name is its own (NODE_NAME names the node)"
    );
    Finding::usable("container", detail)
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
    let what = "checkpoints of users";
    Some(match acts || reads {
        true => Finding::usable(what, detail),
        false => Finding::unusable(what, detail, LET_READ),
    })
}

/// A drop-in of the agent's unit. The shipped unit has the capability.
const LET_READ: &str = r"sudo mkdir -p /etc/systemd/system/mainstay.service.d && printf '[Service]\nAmbientCapabilities=CAP_DAC_READ_SEARCH\nCapabilityBoundingSet=CAP_DAC_READ_SEARCH\n' | sudo tee /etc/systemd/system/mainstay.service.d/checkpoints.conf && sudo systemctl daemon-reload && sudo systemctl restart mainstay";

/// From linux/capability.h: read files that other users may not read.
const CAP_DAC_READ_SEARCH: u64 = 1 << 2;

/// From linux/capability.h: change group and user.
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;

fn readable(what: &'static str, path: &str) -> Finding {
    match opened(path) {
        Ok(()) => Finding::usable(what, path),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Finding::absent(what, format!("{path}: {error}"), None)
        }
        Err(error) => Finding::unusable(what, format!("{path}: {error}"), readable_by_all(path)),
    }
}

/// The first byte shows it: some kernel files can be opened but not read. A device is only opened.
fn opened(path: &str) -> io::Result<()> {
    let mut file = File::open(path)?;
    match path.starts_with("/dev/") {
        true => Ok(()),
        false => file.read(&mut [0; 1]).map(drop),
    }
}

fn readable_by_all(path: &str) -> String {
    format!("sudo chmod a+r {}", quoted(path))
}

/// As one word of a shell. No path has the character that this cannot quote, NUL.
fn quoted(path: &str) -> Cow<'_, str> {
    shlex::try_quote(path).unwrap_or(Cow::Borrowed(path))
}

/// Only looks for the file: a vendor's library is never loaded into this process.
fn library(what: &'static str, name: &str) -> Finding {
    let usual =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"];
    let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&set).chain(usual.map(PathBuf::from));
    match folders.find(|folder| folder.join(name).exists()) {
        Some(folder) => readable(what, &folder.join(name).display().to_string()),
        None => Finding::absent(what, format!("{name} is in none of the usual folders"), None),
    }
}

fn as_text(findings: &[Finding]) -> String {
    let line = |of: &Finding| {
        let fix = of.fix().map(|fix| format!("{:<34}fix: {}\n", "", output::clean(fix)));
        let line = format!("{:<6}  {:<24}  {}\n", of.word(), of.what, output::clean(&of.detail));
        line + &fix.unwrap_or_default()
    };
    findings.iter().map(line).collect()
}

fn as_json(findings: &[Finding], status: u8) -> Value {
    let one = |of: &Finding| {
        let mut one = json!({ "what": of.what, "found": of.word(), "detail": of.detail });
        if let Some(fix) = of.fix() {
            one["fix"] = json!(fix);
        }
        one
    };
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
