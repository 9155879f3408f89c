//! Hosts for a job: separate directories for each, and on request a network namespace on a common bridge.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use mainstay_tests::{End, Job, Plan, Stage, Waiting, is_root};

use super::network::Network;

static NUMBER: AtomicU32 = AtomicU32::new(0);

pub struct Cluster {
    stages: Vec<Stage>,
    id: String,
    port: u16,
    network: Option<Network>,
    /// Options for a meeting point other than the first host.
    meets: Option<String>,
    /// Whether all of them save checkpoints into one directory.
    shares: bool,
}

impl Cluster {
    /// Hosts that share the machine's network.
    pub fn new(hosts: usize) -> Cluster {
        Cluster::of(hosts, None)
    }

    /// Hosts that share the machine's network and meet as these options set.
    pub fn meeting_at(hosts: usize, options: &str) -> Cluster {
        Cluster { meets: Some(options.to_owned()), ..Cluster::of(hosts, None) }
    }

    /// Hosts with a network namespace each.
    pub fn in_namespaces(hosts: usize) -> Cluster {
        Cluster::of(hosts, Some(Network::new(hosts)))
    }

    /// Hosts with a network namespace each; the first ones run etcd.
    pub fn with_etcd_on(first: usize, hosts: usize) -> Cluster {
        Cluster::with_etcd(first, hosts, Network::new(hosts))
    }

    /// The same with links that can be made slow and lossy.
    pub fn with_links_and_etcd_on(first: usize, hosts: usize) -> Cluster {
        Cluster::with_etcd(first, hosts, Network::with_links(hosts))
    }

    fn with_etcd(first: usize, hosts: usize, network: Network) -> Cluster {
        let endpoints: Vec<String> =
            (0..first).map(|host| format!("{}:29400", network.address(host))).collect();
        let meets = Some(format!("--rdzv-endpoint {}", endpoints.join(",")));
        Cluster { meets, ..Cluster::of(hosts, Some(network)) }
    }

    /// Hosts as of [`Cluster::with_links`]; more than the job needs may join.
    pub fn elastic_with_links(hosts: usize) -> Cluster {
        let network = Network::with_links(hosts);
        let meets = Some(format!("--rdzv-backend c10d --rdzv-endpoint {}:29400", network.address(0)));
        Cluster { meets, ..Cluster::of(hosts, Some(network)) }
    }

    /// Hosts with a network namespace each and links that can be made slow and lossy; they meet at the first of them.
    pub fn with_links(hosts: usize) -> Cluster {
        Cluster::of(hosts, Some(Network::with_links(hosts)))
    }

    /// The network of hosts that have namespaces.
    pub fn network(&self) -> &Network {
        self.network.as_ref().expect("hosts of this cluster have namespaces")
    }

    fn of(hosts: usize, network: Option<Network>) -> Cluster {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let id = format!("hosts-{}-{number}", std::process::id());
        let port = testing::free_port();
        Cluster {
            stages: (0..hosts).map(|_| Stage::new()).collect(),
            id,
            port,
            network,
            meets: None,
            shares: true,
        }
    }

    /// The same where no directory is shared: each host saves checkpoints into its own.
    pub fn sharing_nothing(self) -> Cluster {
        Cluster { shares: false, ..self }
    }

    pub fn stage(&self, host: usize) -> &Stage {
        &self.stages[host]
    }

    /// A mark that a rank has left on a host.
    pub fn read(&self, host: usize, mark: &str) -> String {
        let path = self.stages[host].marks().join(mark);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Waits until a rank of one of the hosts has left a mark, and returns which host.
    pub fn host_with(&self, mark: &str) -> usize {
        let directories = self.stages.iter().map(|stage| stage.marks()).collect();
        let look = || self.stages.iter().position(|stage| stage.marks().join(mark).exists());
        let found = Waiting { directories, process: None }.until(look);
        found.unwrap_or_else(|failed| panic!("waiting for the mark {mark}: {failed:?}"))
    }

    /// Starts the launchers of all hosts, the leader last: hosts come in any order.
    pub fn start(&self, script: &str, options: &str, variables: &[(&str, &str)]) -> Vec<Job> {
        let hosts = (0..self.stages.len()).rev();
        let mut jobs: Vec<Job> =
            hosts.map(|host| self.start_host(host, script, options, variables)).collect();
        jobs.reverse();
        jobs
    }

    pub fn start_host(&self, host: usize, script: &str, options: &str, variables: &[(&str, &str)]) -> Job {
        let options = format!("--nnodes {} --node-rank {host} {options}", self.stages.len());
        self.start_host_as(host, script, &options, variables)
    }

    pub fn start_host_as(&self, host: usize, script: &str, options: &str, variables: &[(&str, &str)]) -> Job {
        self.plan(host, script, options, variables).start()
    }

    /// The launcher of a host, before it is started.
    pub fn plan(&self, host: usize, script: &str, options: &str, variables: &[(&str, &str)]) -> Plan<'_> {
        let leader = self.network.as_ref().map_or("127.0.0.1".to_owned(), |network| network.address(0));
        let shared = self.stages[0].work().join("checkpoints");
        let meets = self.meets.clone();
        let meets = meets.unwrap_or_else(|| format!("--master-addr {leader} --master-port {}", self.port));
        let shared =
            if self.shares { format!("--checkpoint-dir {}", shared.display()) } else { String::new() };
        let options = format!("{meets} {shared} {options}");
        let mut plan = self.stages[host].python(script).named(&self.id).options(&options);
        for (name, value) in variables {
            plan = plan.variable(name, value);
        }
        let namespace = self.network.as_ref().map(|network| network.namespace(host));
        let mut under: Vec<&str> = Vec::new();
        under.extend(namespace.iter().flat_map(|name| ["ip", "netns", "exec", name.as_str()]));
        let rename = format!("hostname {}; exec \"$@\"", self.host_name(host));
        if is_root() {
            under.extend(["unshare", "--uts", "sh", "-c", &rename, "sh"]);
        }
        if !under.is_empty() {
            plan = plan.under(&under);
            // Gloo would use the address of the host's name, which has none.
            plan = plan.variable("GLOO_SOCKET_IFNAME", if self.network.is_some() { "eth0" } else { "lo" });
        }
        plan
    }

    /// The name of a host; only root can give hosts names of their own.
    pub fn host_name(&self, host: usize) -> String {
        match is_root() {
            true => format!("h{host}"),
            false => nix::unistd::gethostname().expect("it has a name").to_string_lossy().into_owned(),
        }
    }

    /// A text without the names of the hosts.
    pub fn masked(&self, text: &str) -> String {
        let text = text.replace(&self.id, "RUN").replace(&self.port.to_string(), "PORT");
        (0..self.stages.len())
            .fold(text, |text, host| text.replace(&self.host_name(host), &format!("HOST{host}")))
    }

    /// Waits for the end of all launchers, then looks at what each has left.
    pub fn ends(&self, jobs: Vec<Job>) -> Vec<End> {
        let ended: Vec<bool> = jobs.iter().map(Job::has_ended).collect();
        let ends: Vec<End> = jobs.into_iter().map(Job::end).collect();
        assert!(ended.iter().all(|ended| *ended), "{}", ends[0]);
        ends
    }
}
