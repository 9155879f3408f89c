//! The real Slurm on network namespaces, one for each node and one for the controller: its daemons, and munge.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use mainstay_tests::{Stage, processes, skipped};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::network::Network;

/// The host of the controller, from which jobs are submitted.
const CONTROLLER: &str = "ctl";

const PROGRAMS: [(&str, &str); 3] = [("slurmctld", "-V"), ("slurmd", "-V"), ("munged", "-V")];

/// Whether Debian's packages of Slurm are installed; reports a skip if not.
pub fn has_slurm() -> bool {
    let is_there = |(program, version): &(&str, &str)| {
        Command::new(program).arg(version).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    PROGRAMS.iter().all(is_there) || {
        skipped("there is no Slurm (Debian: slurmctld, slurmd, slurm-client and munge)");
        false
    }
}

/// Stopped with all its daemons when it is dropped.
pub struct Slurm {
    pub network: Network,
    nodes: usize,
    stage: Stage,
    daemons: Vec<Child>,
}

impl Slurm {
    /// Nodes, from node1, that are idle.
    pub fn start(nodes: usize) -> Slurm {
        Slurm::configured(nodes, |_| String::new())
    }

    /// The same with more lines of slurm.conf, which may name files of the stage.
    pub fn configured(nodes: usize, more: impl Fn(&Slurm) -> String) -> Slurm {
        let (network, stage) = (Network::new(nodes + 1), Stage::new());
        let mut slurm = Slurm { network, nodes, stage, daemons: Vec::new() };
        slurm.configure(&more(&slurm));
        let munge = slurm.file("munge");
        let file = |name: &str| munge.join(name);
        fs::write(file("key"), [7; 1024]).expect("a key");
        let mode = |path: &Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(path, mode).expect("our own file");
        };
        mode(&file("key"), 0o600);
        mode(&munge, 0o755);
        let mut munged = Command::new("munged");
        munged.args(["--force", "--foreground", "--num-threads=2"]);
        for name in ["socket", "key-file", "log-file", "pid-file", "seed-file"] {
            munged.arg(format!("--{name}={}", file(name.split('-').next().unwrap_or(name)).display()));
        }
        slurm.daemon("munged", munged);
        processes::wait_until("munge's socket", || file("socket").exists());
        let controller = slurm.on(nodes, "exec slurmctld -D");
        slurm.daemon("slurmctld", controller);
        for host in 0..nodes {
            let node = slurm.on(host, &format!("exec slurmd -D -N node{}", host + 1));
            slurm.daemon(&format!("node{}", host + 1), node);
        }
        processes::wait_until("idle nodes", || {
            let states =
                slurm.on(nodes, "sinfo --noheader --Node --format %T").output().expect("there is sinfo");
            String::from_utf8_lossy(&states.stdout).lines().filter(|state| *state == "idle").count() == nodes
        });
        slurm
    }

    fn configure(&self, more: &str) {
        let spools = (1..=self.nodes).map(|node| format!("spool.node{node}"));
        for directory in ["munge".to_owned(), "state".to_owned()].into_iter().chain(spools) {
            fs::create_dir(self.file(&directory)).expect("a directory");
        }
        let name = nix::unistd::gethostname().expect("a name").to_string_lossy().into_owned();
        let work = self.stage.work().display().to_string();
        let nodes: String = (0..self.nodes)
            .map(|host| {
                let (number, address) = (host + 1, self.network.address(host));
                format!("NodeName=node{number} NodeHostname={name} NodeAddr={address} CPUs=2 State=UNKNOWN\n")
            })
            .collect();
        let configuration = format!(
            "ClusterName=test\nSlurmctldHost={CONTROLLER}({address})\nSlurmUser=root\nSlurmdUser=root\n\
             AuthInfo=socket={work}/munge/socket\nStateSaveLocation={work}/state\nSlurmdSpoolDir={work}/spool.%n\n\
             SlurmctldPidFile={work}/slurmctld.pid\nSlurmdPidFile={work}/%n.pid\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\n\
             SlurmdTimeout=10\n\
             {nodes}PartitionName=all Nodes=ALL Default=YES State=UP\n{more}",
            address = self.network.address(self.nodes),
        );
        fs::write(self.file("slurm.conf"), configuration).expect("a file");
        let node = |host| format!("{} node{}\n", self.network.address(host), host + 1);
        let hosts: String = (0..self.nodes).map(node).collect();
        let hosts = format!("{hosts}{} {CONTROLLER}\n", self.network.address(self.nodes));
        fs::write(self.file("hosts"), format!("127.0.0.1 localhost\n{hosts}")).expect("a file");
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.stage.work().join(name)
    }

    fn daemon(&mut self, name: &str, mut command: Command) {
        let log = File::create(self.file(&format!("{name}.log"))).expect("a file");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a file")).stderr(log);
        self.daemons.push(command.spawn().unwrap_or_else(|error| panic!("{name}: {error}")));
    }

    /// A command of the shell on a host that knows the names of the nodes.
    fn on(&self, host: usize, line: &str) -> Command {
        let hosts = self.file("hosts");
        // Not by `ip netns exec`, which hides the control groups from slurmd.
        let namespace = format!("--net=/run/netns/{}", self.network.namespace(host));
        // The nodes have the name of the machine, by which Slurm would take the host of srun for the first node.
        let name = if host == self.nodes { format!("hostname {CONTROLLER} && ") } else { String::new() };
        let line = format!("{name}mount --bind {} /etc/hosts && {line}", hosts.display());
        let mut command = Command::new("nsenter");
        command.args([&namespace, "unshare", "--mount", "--uts", "sh", "-c", &line]);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("SLURM_CONF", self.file("slurm.conf")).env("HOME", self.stage.home());
        command.env("MARKS", self.stage.marks()).current_dir(self.stage.work());
        command
    }

    /// Runs a command of the shell next to the controller to its end.
    pub fn run(&self, line: &str) -> Output {
        self.on(self.nodes, line).output().expect("there is a shell")
    }

    /// Starts a command of the shell next to the controller.
    pub fn spawn(&self, line: &str) -> Child {
        let mut command = self.on(self.nodes, line);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("there is a shell")
    }

    pub fn stage(&self) -> &Stage {
        &self.stage
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // A test that failed may have left a job.
        let _ = self.on(self.nodes, "scancel --user=root").status();
        for daemon in self.daemons.iter_mut().rev() {
            // Each ends what it has started.
            if let Ok(pid) = i32::try_from(daemon.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
            let _ = daemon.wait();
        }
    }
}
