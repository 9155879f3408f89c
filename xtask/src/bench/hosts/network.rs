//! Where the hosts of a job are: a network namespace for each, joined by a bridge, or else all on the loopback
//! address.

use nix::sys::signal::kill;
use nix::unistd::Pid;

use crate::bench::prelude::*;

/// How often the processes of a host that loses power are searched for at most: a killed process may just have
/// forked.
const VANISHES_WITHIN: u32 = 1000;

/// The network of one job's hosts. The namespaces go when it is dropped.
pub struct Network {
    hosts: usize,
    port: u16,
    /// Name of the bridge, which the names of all that belongs to it start with.
    bridge: Option<String>,
}

impl Network {
    /// A namespace per host, where this process may make them.
    pub fn new(hosts: usize) -> Result<Network> {
        // Dropping it removes whatever was set up.
        let network = Network { hosts, port: 29_400, bridge: Some(format!("msb{}", std::process::id())) };
        match network.set_up() {
            Ok(()) => Ok(network),
            Err(error) => {
                eprintln!("hosts: no network namespaces, all hosts are on the loopback address: {error:#}");
                Network::loopback(hosts)
            }
        }
    }

    pub fn loopback(hosts: usize) -> Result<Network> {
        Ok(Network { hosts, port: free_port()?, bridge: None })
    }

    fn set_up(&self) -> Result<()> {
        let Some(bridge) = &self.bridge else { return Ok(()) };
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("link set {bridge} up"))?;
        for host in 0..self.hosts {
            let (namespace, outer) = (format!("{bridge}n{host}"), format!("{bridge}v{host}"));
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("link add {outer} type veth peer name eth0 netns {namespace}"))?;
            ip(&format!("link set {outer} master {bridge} up"))?;
            ip(&format!("-n {namespace} addr add {}/24 dev eth0", self.address(host)))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        Ok(())
    }

    pub fn address(&self, host: usize) -> String {
        match self.bridge {
            Some(_) => format!("10.79.0.{}", host + 1),
            None => "127.0.0.1".to_owned(),
        }
    }

    /// Where the hosts meet, on the first of them: its address and a port.
    pub fn meeting(&self) -> (String, u16) {
        (self.address(0), self.port)
    }

    /// Endpoints on the first hosts, one on each.
    pub fn endpoints(&self, count: usize, port: u16) -> Result<String> {
        let endpoint = |host| match self.bridge {
            Some(_) => Ok(format!("{}:{port}", self.address(host))),
            None => free_port().map(|free| format!("127.0.0.1:{free}")),
        };
        Ok((0..count).map(endpoint).collect::<Result<Vec<String>>>()?.join(","))
    }

    /// Whether each host has a separate namespace.
    pub fn has_namespaces(&self) -> bool {
        self.bridge.is_some()
    }

    /// A host loses power: its link is down, and all of its processes are killed at once. Without namespaces
    /// these are its launcher and all its descendants.
    pub fn vanish(&self, host: usize, launcher: i32) -> Result<()> {
        if let Some(bridge) = &self.bridge {
            ip(&format!("link set {bridge}v{host} down"))?;
        }
        for round in 0.. {
            let processes = self.processes_of(host, launcher)?;
            if processes.is_empty() {
                break;
            }
            ensure!(round < VANISHES_WITHIN, "processes of host {host} do not end: {processes:?}");
            for pid in processes {
                // It may have ended in this moment.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            if self.bridge.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn processes_of(&self, host: usize, launcher: i32) -> Result<Vec<i32>> {
        let Some(bridge) = &self.bridge else { return Ok(family(launcher).into_iter().collect()) };
        let space = format!("{bridge}n{host}");
        let reported = command::output(&mut cmd!("ip netns pids {space}"))?;
        let pids = reported.lines().filter_map(|line| line.trim().parse().ok());
        Ok(pids.filter(|pid| !is_over(*pid)).collect())
    }

    /// The command, to run on a host. It has a name of its own, as each real host has, so that messages which
    /// name hosts can be read. Gloo uses the address of the host's name, which all namespaces share.
    pub fn on(&self, host: usize, command: Command) -> Command {
        let Some(bridge) = &self.bridge else { return command };
        let (space, named) =
            (format!("{bridge}n{host}"), format!("hostname host-{host} && exec \"$0\" \"$@\""));
        let mut entered =
            command::inside(cmd!("ip netns exec {space} unshare --uts sh -c {named}"), &command);
        entered.env("GLOO_SOCKET_IFNAME", "eth0");
        entered
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let Some(bridge) = &self.bridge else { return };
        // Missing or never created parts need no removal.
        for host in 0..self.hosts {
            // A namespace is removed after its last process, and its end of the link with it: the next network
            // has the same names.
            let _ = ip(&format!("link del {bridge}v{host}"));
            let _ = ip(&format!("netns del {bridge}n{host}"));
        }
        let _ = ip(&format!("link del {bridge}"));
    }
}

fn ip(arguments: &str) -> Result<()> {
    command::output(Command::new("ip").args(arguments.split_whitespace())).map(drop)
}
