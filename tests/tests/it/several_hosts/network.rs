//! The network of hosts with a namespace each, and the faults that can happen to it.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::links::{Links, Quality};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A namespace for each host, and between them a bridge with veths, or links that can be made bad.
pub struct Network {
    name: String,
    hosts: usize,
    links: Option<Links>,
}

impl Network {
    pub fn new(hosts: usize) -> Network {
        let network = Network::of(hosts);
        let bridge = &network.name;
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("link set {bridge} up"));
        for host in 0..hosts {
            let (namespace, outer) = (network.namespace(host), network.outer(host));
            ip(&format!("link add {outer} type veth peer name eth0 netns {namespace}"));
            ip(&format!("link set {outer} master {bridge} up"));
            network.open(host);
        }
        network
    }

    /// The same with links that can be made slow and lossy: see [`Network::set_link`].
    pub fn with_links(hosts: usize) -> Network {
        let mut network = Network::of(hosts);
        let devices: Vec<String> = (0..hosts).map(|host| network.outer(host)).collect();
        let links = Links::new(&devices);
        for (host, device) in devices.iter().enumerate() {
            links.set(host, Quality::GOOD, Quality::GOOD);
            ip(&format!("link set {device} netns {} name eth0", network.namespace(host)));
            network.open(host);
        }
        network.links = Some(links);
        network
    }

    fn of(hosts: usize) -> Network {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let network =
            Network { name: format!("m{}x{number}", std::process::id() % 100_000), hosts, links: None };
        (0..hosts).for_each(|host| ip(&format!("netns add {}", network.namespace(host))));
        network
    }

    /// Sets up the address of the host.
    fn open(&self, host: usize) {
        let namespace = self.namespace(host);
        ip(&format!("-n {namespace} addr add {}/24 dev eth0", self.address(host)));
        ip(&format!("-n {namespace} link set eth0 up"));
        ip(&format!("-n {namespace} link set lo up"));
    }

    pub fn namespace(&self, host: usize) -> String {
        format!("{}n{host}", self.name)
    }

    pub fn address(&self, host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }
}

/// Faults of a host.
impl Network {
    /// The host loses power: it sends nothing any more, not even a last packet of its kernel, and all its processes
    /// are gone.
    pub fn vanish(&self, host: usize) {
        self.vanish_together(&[host]);
    }

    /// The same for several hosts at once: none of them notices the loss of another.
    pub fn vanish_together(&self, hosts: &[usize]) {
        for host in hosts {
            match &self.links {
                Some(links) => links.set(*host, Quality::DEAD, Quality::DEAD),
                None => ip(&format!("link set {} down", self.outer(*host))),
            }
        }
        for host in hosts {
            while !self.signal(*host, Signal::SIGKILL) {}
        }
    }

    /// The host is back, with its disk.
    pub fn come_back(&self, host: usize) {
        ip(&format!("link set {} up", self.outer(host)));
    }

    /// Whether etcd on this host serves, with a majority of its members.
    pub fn serves(&self, host: usize, port: u16) -> bool {
        let endpoint = format!("http://{}:{port}", self.address(host));
        let mut asked = Command::new("ip");
        asked.args(["netns", "exec", &self.namespace(host), "etcdctl", "--endpoints", &endpoint]);
        let answer = asked.args(["endpoint", "health"]).env("ETCDCTL_API", "3").output();
        answer.expect("there is `etcdctl` (Debian: etcd-client)").status.success()
    }

    /// Freezes its processes: connections stay open, the kernel accepts new ones, and no process answers.
    pub fn freeze(&self, host: usize) {
        self.signal(host, Signal::SIGSTOP);
    }

    /// The processes continue.
    pub fn thaw(&self, host: usize) {
        self.signal(host, Signal::SIGCONT);
    }

    /// Sets the quality of what the host sends and of what others send to it. Only for networks with links.
    pub fn set_link(&self, host: usize, out: Quality, back: Quality) {
        self.links.as_ref().expect("a network with links").set(host, out, back);
    }

    /// Nothing that `from` sends reaches `to` from now on, and nobody notices: its packets go to no one's address.
    pub fn cut(&self, from: usize, to: usize) {
        let (namespace, to) = (self.namespace(from), self.address(to));
        ip(&format!("-n {namespace} neigh replace {to} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"));
    }

    /// Sends a signal to every process of a host; returns whether there is none.
    fn signal(&self, host: usize, signal: Signal) -> bool {
        let reported = Command::new("ip")
            .args(["netns", "pids", &self.namespace(host)])
            .output()
            .expect("there is `ip`");
        let pids = String::from_utf8_lossy(&reported.stdout).into_owned();
        let pids: Vec<i32> = pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        for pid in &pids {
            // One that has just ended needs none.
            let _ = kill(Pid::from_raw(*pid), signal);
        }
        pids.is_empty()
    }

    fn outer(&self, host: usize) -> String {
        format!("{}v{host}", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(host)]).status();
        }
        if self.links.is_none() {
            let _ = Command::new("ip").args(["link", "del", &self.name]).status();
        }
    }
}

fn ip(arguments: &str) {
    let reported = Command::new("ip").args(arguments.split_whitespace()).output().expect("there is `ip`");
    assert!(reported.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&reported.stderr));
}
