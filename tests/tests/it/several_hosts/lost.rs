//! Hosts that vanish while they train: all of their processes and their network at once. The job can lose any host,
//! because etcd runs on some of its hosts.

use mainstay_checkpoint::copied_step::CopiedStep;
use mainstay_model::entry::{Fact, HostLoss};
use mainstay_tests::{End, Job, has_client, has_torch, is_root, processes, skipped};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::assert_undisturbed;
use super::cluster::Cluster;
use super::etcd::has_etcd;
use super::links::Quality;
use super::network::Network;
use crate::words::terminal;

/// A model that the ranks train together, the same bit for bit however often it is restarted: each sums the
/// gradients of all ranks in their order. Every step is saved. In attempt N of those in which hosts are lost, rank
/// 1 works forever in step 4 + 4 N, and the others wait for it. At the end they train once more without a failure, in
/// the same processes, because a second start of PyTorch takes longer.
const TRAINS: &str = r#"
import hashlib, torch, torch.distributed as dist
import mainstay

torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
dist.init_process_group("gloo")

def train(saved, is_watched):
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
    for step in range(0 if saved is None else saved["step"] + 1, 24):
        if is_watched and ATTEMPT < int(os.environ.get("LOSSES", "0")) and step == 4 + 4 * ATTEMPT:
            mark(f"waits.{ATTEMPT}.{RANK}")
            if RANK == 1:
                wait_for("never")
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + RANK))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad)
            parameter.grad = sum(parts)
        optimiser.step()
        if is_watched:
            mainstay.step(step, loss=loss.item())
            state = {"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
            assert mainstay.checkpoint.save(step, state)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()

saved = mainstay.checkpoint.load()
mark(f"from.{ATTEMPT}.{RANK}", 0 if saved is None else saved["step"] + 1)
mark(f"final.{RANK}", train(saved, is_watched=True))
mark(f"undisturbed.{RANK}", train(None, is_watched=False))
dist.destroy_process_group()
"#;

fn can_run() -> bool {
    if !has_torch() || !has_etcd() {
        return false;
    }
    if !is_root() {
        skipped("only root can make network namespaces");
    }
    is_root()
}

/// A job on hosts that vanish and come back.
struct Hosts {
    cluster: Cluster,
    /// By host; none while it is away.
    jobs: Vec<Option<Job>>,
    options: String,
    losses: String,
    /// Those that were away: their run has another directory.
    returned: Vec<usize>,
}

impl Hosts {
    /// Starts the job on this many hosts, of which the first run etcd. `losses`: in how many attempts hosts are
    /// lost.
    fn start(etcds: usize, hosts: usize, options: &str, losses: u32) -> Hosts {
        let cluster = Cluster::with_etcd_on(etcds, hosts).sharing_nothing();
        let mut all = Hosts {
            cluster,
            jobs: Vec::new(),
            options: options.to_owned(),
            losses: losses.to_string(),
            returned: Vec::new(),
        };
        all.jobs.resize_with(hosts, || None);
        (0..hosts).for_each(|host| all.launch(host));
        all
    }

    fn launch(&mut self, host: usize) {
        let variables = [("LOSSES", self.losses.as_str())];
        self.jobs[host] = Some(self.cluster.start_host_as(host, TRAINS, &self.options, &variables));
    }

    fn job(&self, host: usize) -> &Job {
        self.jobs[host].as_ref().expect("the host is there")
    }

    /// The host whose launcher leads: of all that printed it, the one with the highest epoch.
    fn leader(&self) -> usize {
        let epoch = |job: &Job| {
            let printed = job.printed();
            let epochs = printed.lines().filter(|line| line.contains(terminal::LEADS));
            epochs
                .filter_map(|line| line.rsplit("(epoch ").next()?.trim_end_matches(')').parse::<u64>().ok())
                .max()
        };
        let led = self.jobs.iter().enumerate().filter_map(|(host, job)| Some((epoch(job.as_ref()?)?, host)));
        led.max().expect("one of them leads").1
    }

    /// Waits until all ranks are in the step in which hosts are lost. Returns, by rank, its host.
    fn all_wait(&self, attempt: u32, ranks: u32) -> Vec<usize> {
        (0..ranks).map(|rank| self.cluster.host_with(&format!("waits.{attempt}.{rank}"))).collect()
    }

    /// Waits until hosts that were never away know that a step of this attempt has its copies.
    fn wait_for_copies(&self, hosts: &[usize], attempt: u32) {
        for host in hosts.iter().filter(|host| !self.returned.contains(host)) {
            self.job(*host).wait_for_fact("copies of a step of the attempt", |fact| match fact {
                Fact::Observed(seen) => {
                    CopiedStep::read(seen).is_some_and(|copied| copied.attempt >= u64::from(attempt))
                }
                _ => false,
            });
        }
    }

    fn vanish(&mut self, hosts: &[usize]) {
        self.cluster.network().vanish_together(hosts);
        for host in hosts {
            let job = self.jobs[*host].take().expect("the host is there");
            assert!(job.has_ended());
            // State that the kernel would have lost with the host.
            processes::wait_until("its processes are gone", || !processes::is_alive(job.launcher()));
        }
    }

    /// The host is available again, and its launcher is started.
    fn come_back(&mut self, host: usize) {
        self.cluster.network().come_back(host);
        self.returned.push(host);
        self.launch(host);
    }

    /// The ends of the remaining launchers.
    fn ends(self) -> (Cluster, Vec<End>) {
        let ends = self.cluster.ends(self.jobs.into_iter().flatten().collect());
        for end in &ends {
            end.assert_status(0);
        }
        (self.cluster, ends)
    }
}

/// The host on which each rank ended.
fn last_hosts(cluster: &Cluster) -> [usize; 3] {
    [0, 1, 2].map(|rank| cluster.host_with(&format!("undisturbed.{rank}")))
}

/// From which step the ranks of an attempt went on: the same for all.
fn from(cluster: &Cluster, attempt: u32, ranks: u32) -> u32 {
    let read = |rank| {
        let mark = format!("from.{attempt}.{rank}");
        cluster.read(cluster.host_with(&mark), &mark)
    };
    let all: Vec<String> = (0..ranks).map(read).collect();
    assert!(all.iter().all(|of| *of == all[0]), "one step for all ranks: {all:?}");
    all[0].parse().expect("a step")
}

#[test]
fn the_hosts_of_leader_store_and_rank_0_vanish_one_after_the_other_and_the_parameters_are_the_same() {
    if !can_run() {
        return;
    }
    // Three train, the fourth is a spare; three run etcd.
    let mut hosts = Hosts::start(3, 4, "--nnodes 3 --rdzv-conf lease=6", 3);
    for attempt in 0..3 {
        let at = hosts.all_wait(attempt, 3);
        hosts.wait_for_copies(&at, attempt);
        let leader = hosts.leader();
        let lost = match attempt {
            0 => leader,
            1 => *at.iter().find(|host| **host < 3 && **host != leader).expect("a host with etcd"),
            _ => at[0],
        };
        hosts.vanish(&[lost]);
        if attempt < 2 {
            hosts.all_wait(attempt + 1, 3);
            hosts.come_back(lost);
            hosts.job(lost).wait_until_printed(terminal::IS_SPARE);
            if lost < 3 {
                // Until its member of etcd is back, the loss of another one stops the store.
                processes::wait_until("its etcd serves", || hosts.cluster.network().serves(lost, 29400));
            }
        }
    }
    let (cluster, _) = hosts.ends();
    for attempt in 1..4 {
        let begin = from(&cluster, attempt, 3);
        assert!(
            begin > 4 * (attempt - 1),
            "attempt {attempt} goes on from a step of the one before: {begin}"
        );
    }
    assert_undisturbed(&cluster, &last_hosts(&cluster));
}

#[test]
fn two_of_five_hosts_vanish_at_once_with_the_leader_and_no_replicated_step_is_lost() {
    if !can_run() {
        return;
    }
    let mut hosts = Hosts::start(5, 5, "--nnodes 3 --rdzv-conf lease=6", 1);
    let at = hosts.all_wait(0, 3);
    hosts.wait_for_copies(&at, 0);
    hosts.vanish(&at[..2]);
    let (cluster, ends) = hosts.ends();
    for end in &ends {
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    assert!(from(&cluster, 1, 3) > 0, "from a copy in the memory of the host that is left");
    assert_undisturbed(&cluster, &last_hosts(&cluster));
}

/// Ranks that take a short step for as long as the test wants.
pub const STEPS: &str = r#"
import mainstay
for step in range(1_000_000):
    mainstay.step(step)
    if step == 100:
        mark(f"runs.{ATTEMPT}.{RANK}")
    time.sleep(0.02)
    if os.path.exists(MARKS + "/end"):
        break
"#;

#[test]
fn ranks_do_not_notice_that_all_stores_are_gone_for_longer_than_the_lease() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::with_etcd_on(3, 3);
    let jobs: Vec<Job> = (0..3)
        .map(|host| cluster.start_host_as(host, STEPS, "--nnodes 3 --rdzv-conf lease=6", &[]))
        .collect();
    for rank in 0..3 {
        cluster.host_with(&format!("runs.0.{rank}"));
    }
    jobs.iter().for_each(|job| signal_etcd(job, Signal::SIGSTOP));
    // The leader has lost its leadership.
    let leads = jobs.iter().position(|job| job.printed().contains(terminal::LEADS)).expect("a leader");
    jobs[leads].wait_until_printed(terminal::WITHOUT_LEADER);
    (0..3).for_each(|host| cluster.stage(host).mark("end"));
    jobs.iter().for_each(|job| signal_etcd(job, Signal::SIGCONT));
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 1, "{end}");
    }
}

/// Sends a signal to the member of etcd that a launcher runs.
fn signal_etcd(job: &Job, signal: Signal) {
    let is_etcd = |pid: &i32| processes::reported(*pid).contains("etcd --name");
    let etcd = processes::children(job.launcher()).into_iter().find(is_etcd);
    kill(Pid::from_raw(etcd.expect("etcd runs on this host")), signal).expect("our own process");
}

/// Injects a fault into one of four hosts that train, and checks what the leader reports. A fifth host takes its
/// place.
fn assert_lost(happens: impl Fn(&Network, usize, &Job), loss: HostLoss) {
    let cluster = Cluster::elastic_with_links(5);
    let start = |host| cluster.start_host_as(host, STEPS, "--nnodes 4", &[]);
    let jobs: Vec<Job> = (0..5).map(start).collect();
    let at: Vec<usize> = (0..4).map(|rank| cluster.host_with(&format!("runs.0.{rank}"))).collect();
    let (leader, lost) = (at[0], at[2]);
    happens(cluster.network(), lost, &jobs[lost]);
    jobs[leader].wait_for_fact(
        "the loss",
        |fact| matches!(fact, Fact::HostLost { loss: found, .. } if *found == loss),
    );
    let now: Vec<usize> = (0..4).map(|rank| cluster.host_with(&format!("runs.1.{rank}"))).collect();
    assert!(!now.contains(&lost), "the spare has taken its place");
    let (left, others): (Vec<_>, Vec<_>) = jobs.into_iter().enumerate().partition(|(host, _)| *host == lost);
    cluster.network().vanish(lost);
    assert!(left.iter().all(|(_, job)| job.has_ended()));
    others.iter().for_each(|(host, _)| cluster.stage(*host).mark("end"));
    for end in cluster.ends(others.into_iter().map(|(_, job)| job).collect()) {
        end.assert_status(0);
    }
}

#[test]
fn a_host_without_power_is_lost_when_others_cannot_reach_it_either() {
    if has_namespaces() {
        assert_lost(|network, host, _| network.vanish(host), HostLoss::Unreachable);
    }
}

#[test]
fn a_frozen_host_is_lost_though_its_kernel_accepts_connections() {
    if has_namespaces() {
        assert_lost(|network, host, _| network.freeze(host), HostLoss::Unresponsive);
    }
}

#[test]
fn a_host_that_goes_on_after_another_took_its_place_stops_its_ranks_and_becomes_a_spare() {
    if !has_namespaces() {
        return;
    }
    let cluster = Cluster::elastic_with_links(4);
    let start = |host| cluster.start_host_as(host, STEPS, "--nnodes 3", &[]);
    let jobs: Vec<Job> = (0..4).map(start).collect();
    let at: Vec<usize> = (0..3).map(|rank| cluster.host_with(&format!("runs.0.{rank}"))).collect();
    cluster.network().freeze(at[2]);
    jobs[at[0]].wait_for_fact("the loss", |fact| matches!(fact, Fact::HostLost { .. }));
    for rank in 0..3 {
        cluster.host_with(&format!("runs.1.{rank}"));
    }
    cluster.network().thaw(at[2]);
    jobs[at[2]].wait_until_printed(terminal::RANKS_STOPPED);
    jobs[at[2]].wait_until_printed(terminal::IS_SPARE);
    (0..4).filter(|host| *host != at[2]).for_each(|host| cluster.stage(host).mark("end"));
    for (host, end) in cluster.ends(jobs).iter().enumerate() {
        end.assert_status(0);
        if host != at[2] {
            assert_eq!(end.summary().attempts, 2, "it is lost once\n{end}");
        }
    }
}

#[test]
fn a_launcher_that_was_asked_to_stop_does_not_come_back_as_a_spare() {
    if !has_namespaces() {
        return;
    }
    let cluster = Cluster::elastic_with_links(4);
    let start = |host| cluster.start_host_as(host, STEPS, "--nnodes 3", &[]);
    let mut jobs: Vec<Job> = (0..4).map(start).collect();
    let at = (0..3).map(|rank| cluster.host_with(&format!("runs.0.{rank}"))).next_back().expect("a host");
    cluster.network().freeze(at);
    let others = (0..4).filter(|host| *host != at);
    jobs[others.clone().next().expect("three")]
        .wait_for_fact("the loss", |fact| matches!(fact, Fact::HostLost { .. }));
    for rank in 0..3 {
        cluster.host_with(&format!("runs.1.{rank}"));
    }
    jobs[at].signal(Signal::SIGTERM);
    cluster.network().thaw(at);
    let asked = jobs.remove(at);
    assert!(asked.has_ended(), "{}", asked.printed());
    others.for_each(|host| cluster.stage(host).mark("end"));
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "the request concerns only the host that was replaced\n{end}");
    }
    let end = asked.end();
    assert!(!end.stderr.contains(terminal::IS_SPARE), "{end}");
    end.assert_status(75);
}

#[test]
fn a_host_whose_launcher_was_killed_is_lost_when_others_find_none_there() {
    if has_namespaces() {
        assert_lost(|_, _, job| job.signal(Signal::SIGKILL), HostLoss::LauncherGone);
    }
}

#[test]
fn a_host_that_nothing_reaches_is_lost() {
    if has_namespaces() {
        let deafen = |network: &Network, host| network.set_link(host, Quality::GOOD, Quality::DEAD);
        assert_lost(|network, host, _| deafen(network, host), HostLoss::Unreachable);
    }
}

#[test]
fn a_host_of_which_nothing_arrives_is_lost() {
    if has_namespaces() {
        let mute = |network: &Network, host| network.set_link(host, Quality::DEAD, Quality::GOOD);
        assert_lost(|network, host, _| mute(network, host), HostLoss::Unreachable);
    }
}

pub fn has_namespaces() -> bool {
    if !has_client() {
        return false;
    }
    if !is_root() {
        skipped("only root can make network namespaces");
    }
    is_root()
}
