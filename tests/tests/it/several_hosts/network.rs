//! The network of hosts with a namespace each, and what can happen to it.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A bridge with a veth to each namespace.
pub struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    pub fn new(hosts: usize) -> Network {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let network = Network { name: format!("m{}x{number}", std::process::id() % 100_000), hosts };
        let bridge = &network.name;
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("link set {bridge} up"));
        for host in 0..hosts {
            let (namespace, outer) = (network.namespace(host), network.outer(host));
            ip(&format!("netns add {namespace}"));
            ip(&format!("link add {outer} type veth peer name eth0 netns {namespace}"));
            ip(&format!("link set {outer} master {bridge} up"));
            ip(&format!("-n {namespace} addr add {}/24 dev eth0", network.address(host)));
            ip(&format!("-n {namespace} link set eth0 up"));
            ip(&format!("-n {namespace} link set lo up"));
        }
        network
    }

    pub fn namespace(&self, host: usize) -> String {
        format!("{}n{host}", self.name)
    }

    pub fn address(&self, host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }
}

/// What can happen to a host.
impl Network {
    /// Power is off: nothing leaves the host any more, not even a farewell of its kernel, and all its processes are gone.
    pub fn vanish(&self, host: usize) {
        ip(&format!("link set {} down", self.outer(host)));
        while !self.signal(host, Signal::SIGKILL) {}
    }

    /// It is there again, with the disk that it had.
    pub fn come_back(&self, host: usize) {
        ip(&format!("link set {} up", self.outer(host)));
    }

    /// Whether etcd on this host serves, with most of the others.
    pub fn serves(&self, host: usize, port: u16) -> bool {
        let endpoint = format!("http://{}:{port}", self.address(host));
        let mut asked = Command::new("ip");
        asked.args(["netns", "exec", &self.namespace(host), "etcdctl", "--endpoints", &endpoint]);
        let answer = asked.args(["endpoint", "health"]).env("ETCDCTL_API", "3").output();
        answer.expect("there is `etcdctl` (Debian: etcd-client)").status.success()
    }

    /// Its processes stand still: connections stay open, the kernel accepts new ones, and nothing is answered.
    pub fn freeze(&self, host: usize) {
        self.signal(host, Signal::SIGSTOP);
    }

    /// What others send does not arrive at the host; what it sends arrives.
    pub fn deafen(&self, host: usize) {
        self.drop_at(host, "");
    }

    /// What the host sends arrives nowhere; what others send does.
    pub fn mute(&self, host: usize) {
        for other in (0..self.hosts).filter(|other| *other != host) {
            self.drop_at(other, &format!("-s {}", self.address(host)));
        }
    }

    /// One packet of twenty is lost, in each direction.
    pub fn degrade(&self, host: usize) {
        let namespace = self.namespace(host);
        for chain in ["INPUT -i", "OUTPUT -o"] {
            let some = "-m statistic --mode random --probability 0.05";
            ip(&format!("netns exec {namespace} iptables -A {chain} eth0 {some} -j DROP"));
        }
    }

    fn drop_at(&self, host: usize, what: &str) {
        ip(&format!("netns exec {} iptables -A INPUT -i eth0 {what} -j DROP", self.namespace(host)));
    }

    /// Sends a signal to every process of a host; whether there is none.
    fn signal(&self, host: usize, signal: Signal) -> bool {
        let told = Command::new("ip")
            .args(["netns", "pids", &self.namespace(host)])
            .output()
            .expect("there is `ip`");
        let pids = String::from_utf8_lossy(&told.stdout).into_owned();
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
        let _ = Command::new("ip").args(["link", "del", &self.name]).status();
    }
}

fn ip(arguments: &str) {
    let told = Command::new("ip").args(arguments.split_whitespace()).output().expect("there is `ip`");
    assert!(told.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&told.stderr));
}
