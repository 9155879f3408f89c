//! Launchers of one job in simulations: reproducible random numbers, members, and reports of ranks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_group::lead::Here;
use mainstay_group::round::Member;
use mainstay_model::entry::{Entry, ExitStatus, Fact, StartedRank};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::verdict::Action;

/// Random numbers (SplitMix64): the same seed yields the same sequence.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, of: u64) -> bool {
        self.next().is_multiple_of(of)
    }
}

/// One launcher per host with up to `most` ranks each; the first leads. `copies`: they store replicas for each other.
pub fn members(chance: &mut Chance, hosts: u32, most: usize, copies: bool) -> Vec<Member> {
    let member = |host| Member {
        launcher: format!("l{host}"),
        host: format!("h{host}"),
        node_rank: Some(host),
        ranks: 1 + chance.below(most) as u32,
        address: format!("h{host}"),
        replicas: if copies { format!("h{host}:1") } else { String::new() },
        listens: format!("h{host}:2"),
        leads: host == 0,
        ..Member::default()
    };
    (0..hosts).map(member).collect()
}

/// A leader's host that knows of no step and has no journal.
pub struct Nothing;

impl Here for Nothing {
    fn save_after(&self) -> Option<u64> {
        None
    }

    fn entries_after(&self, _have: u64, _most: usize) -> Option<Vec<Entry>> {
        Some(Vec::new())
    }
}

pub fn pid(rank: Rank) -> Pid {
    Pid(i32::try_from(rank.0).expect("few") + 100)
}

pub fn started(attempt: Attempt, master_port: u16, ranks: impl Iterator<Item = Rank>) -> Fact {
    let ranks =
        ranks.map(|rank| StartedRank { rank, local_rank: 0, pid: pid(rank), page: None, start_ticks: None });
    Fact::AttemptStarted { attempt, master_port, ranks: ranks.collect(), hosts: Vec::new() }
}

pub fn exited(attempt: Attempt, rank: Rank, status: ExitStatus, after_stop: bool) -> Fact {
    Fact::RankExited {
        attempt,
        rank,
        pid: pid(rank),
        status,
        step: None,
        data: None,
        after_stop,
        stderr_tail: Vec::new(),
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    }
}

/// The attempt that a decision in the journal starts, if it is a restart.
pub fn restart_of(action: &Action) -> Option<Attempt> {
    match action {
        Action::RestartInJob { attempt }
        | Action::RestartInProcess { attempt }
        | Action::RespawnRanks { attempt }
        | Action::RespawnHost { attempt }
        | Action::ReplaceHost { attempt } => Some(*attempt),
        _ => None,
    }
}

/// The search stops after this number of seeds that break a limit.
const SHOWN: u64 = 20;

/// Runs all seeds on all processors and returns their results. `MAINSTAY_SEED` selects one seed, `MAINSTAY_SEEDS` sets
/// their number.
///
/// # Panics
/// A seed breaks a limit. The message contains its number.
pub fn seeds<T: Send>(usual: u64, run: impl Fn(u64) -> T + Sync + std::panic::RefUnwindSafe) -> Vec<T> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, end) = match number("MAINSTAY_SEED") {
        Some(seed) => (seed, seed + 1),
        None => (0, number("MAINSTAY_SEEDS").unwrap_or(usual)),
    };
    // Kept while the seeds run. Otherwise each verdict reads the catalog again, which takes most of the time.
    let _catalog = Catalog::shared().expect("a test compiles it");
    let next = AtomicU64::new(first);
    let (tell_broken, told_broken) = mpsc::channel();
    let broken = AtomicU64::new(0);
    let some = || {
        let mut found = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || broken.load(Ordering::Relaxed) >= SHOWN {
                return found;
            }
            match std::panic::catch_unwind(|| run(seed)) {
                Ok(one) => found.push(one),
                Err(_) => {
                    broken.fetch_add(1, Ordering::Relaxed);
                    tell_broken.send(seed).expect("the receiver exists");
                }
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let all = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("a seed breaks a limit")).collect()
    });
    let mut broken: Vec<u64> = told_broken.try_iter().collect();
    broken.sort_unstable();
    assert!(
        broken.is_empty(),
        "seeds {broken:?} break a limit; run one again with MAINSTAY_SEED={}",
        broken[0]
    );
    all
}
