//! Run directories of `mainstay run`: the output of the ranks in the attempt that failed. Everything else in such a
//! directory is written by Mainstay, or is a checkpoint, and shows nothing about the program.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use mainstay_diagnosis::attribution::exit::{Exit, Status};
use mainstay_model::entry::{Body, Entry, ExitStatus, Fact};
use mainstay_model::id::{Attempt, Rank};

use crate::{explain, output};

/// The directory of an attempt in a run directory, without its number.
const ATTEMPT: &str = "attempt_";

/// An attempt of a run.
pub(super) struct AttemptLogs {
    /// The ranks' directories.
    pub(super) ranks: Vec<(PathBuf, Rank)>,
    /// How its ranks ended, those that ended by themselves and left no note.
    pub(super) exits: Vec<Exit>,
}

/// The attempt to read if this is a run directory, or the directory of an attempt in one.
pub(super) fn attempt_of(dir: &Path) -> Option<AttemptLogs> {
    if is_run(dir) {
        let entries = journal(dir);
        let number = failed_or_newest(&entries).or_else(|| attempts(dir).max())?;
        output::note(&format!(
            "{}: a run of mainstay: only the output of its ranks in attempt {number} is read; mainstay explain shows \
             the launcher's verdict",
            dir.display()
        ));
        return Some(logs(&dir.join(format!("{ATTEMPT}{number}")), number, &entries));
    }
    let number = number_of(dir)?;
    let run = dir.parent().filter(|run| is_run(run))?;
    Some(logs(dir, number, &journal(run)))
}

fn is_run(dir: &Path) -> bool {
    dir.join("journal").is_dir() && (dir.join("launcher.log").is_file() || attempts(dir).next().is_some())
}

fn attempts(run: &Path) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    entries.filter_map(|entry| number_of(&entry.path()))
}

fn number_of(attempt: &Path) -> Option<u32> {
    attempt.file_name()?.to_str()?.strip_prefix(ATTEMPT)?.parse().ok()
}

/// The entries of a run's journal; without a readable journal the ranks have their local numbers.
fn journal(run: &Path) -> Vec<Entry> {
    explain::read(run).unwrap_or_else(|error| {
        output::note(&format!("{}: {error:#}; ranks have their numbers on their host", run.display()));
        Vec::new()
    })
}

/// The attempt of the last failure, or the newest attempt.
fn failed_or_newest(entries: &[Entry]) -> Option<u32> {
    let failed = entries.iter().rev().find_map(|entry| match &entry.body {
        Body::Verdict(verdict) => Some(verdict.attempt.0),
        _ => None,
    });
    let started = || {
        facts(entries).filter_map(|fact| match fact {
            Fact::AttemptStarted { attempt, .. } => Some(attempt.0),
            _ => None,
        })
    };
    failed.or_else(|| started().max())
}

fn facts(entries: &[Entry]) -> impl Iterator<Item = &Fact> {
    entries.iter().filter_map(|entry| match &entry.body {
        Body::Fact(fact) => Some(fact),
        _ => None,
    })
}

fn logs(dir: &Path, number: u32, entries: &[Entry]) -> AttemptLogs {
    let wanted = Attempt(number);
    let mut first_rank = Rank(0);
    let mut started = Vec::new();
    let mut raised = BTreeSet::new();
    let mut ended = Vec::new();
    for fact in facts(entries) {
        match fact {
            Fact::JobStarted(spec) => first_rank = spec.first_rank,
            Fact::AttemptStarted { attempt, ranks, .. } if *attempt == wanted => {
                started = ranks.iter().map(|rank| (rank.local_rank, rank.rank)).collect();
            }
            Fact::RankRaised { attempt, rank, .. } if *attempt == wanted => _ = raised.insert(*rank),
            Fact::RankExited { attempt, rank, status, after_stop: false, .. }
                if *attempt == wanted && !status.is_success() =>
            {
                ended.push((*rank, *status));
            }
            _ => {}
        }
    }
    ended.retain(|(rank, _)| !raised.contains(rank));
    let exits = ended.into_iter().zip(0..).map(|((rank, status), order)| {
        let status = match status {
            ExitStatus::Code(code) => Status::Code(code),
            ExitStatus::Signal(signal) => Status::Signal(signal),
        };
        Exit { rank: Some(rank.0), status, order: Some(order) }
    });
    // The leader of several hosts has the ranks of all of them in its journal, and the files of its own.
    let rank_of = |local: u32| {
        let own = Rank(first_rank.0 + local);
        let mut known = started.iter().filter(|(of, _)| *of == local).map(|(_, rank)| *rank);
        let first = known.next();
        if first.is_none() || known.any(|rank| rank == own) { own } else { first.unwrap_or(own) }
    };
    let mut ranks: Vec<(PathBuf, Rank)> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let local = entry.file_name().to_str()?.parse().ok()?;
            Some((entry.path(), rank_of(local)))
        })
        .collect();
    ranks.sort_by_key(|(_, rank)| *rank);
    AttemptLogs { ranks, exits: exits.collect() }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::{JobSpec, StartedRank};
    use mainstay_model::id::{BootId, Pid};
    use mainstay_model::time::Stamp;

    use super::*;

    fn entry(fact: Fact) -> Entry {
        Entry {
            seq: 1,
            at: Stamp::default(),
            boot: BootId::default(),
            job: None,
            origin_seq: None,
            body: Body::Fact(fact),
        }
    }

    /// The ranks of the directories `0` and `1` on a host with this first rank, if these ranks were started.
    fn ranks(first: u32, started: &[(u32, u32)]) -> Vec<u32> {
        let dir = testing::tempdir().expect("a directory");
        for local in ["0", "1"] {
            std::fs::create_dir(dir.path().join(local)).expect("a rank's directory");
        }
        let spec = JobSpec { first_rank: Rank(first), ..JobSpec::default() };
        let rank = |(local_rank, rank): &(u32, u32)| StartedRank {
            rank: Rank(*rank),
            local_rank: *local_rank,
            pid: Pid(1),
            page: None,
            start_ticks: None,
        };
        let ranks = started.iter().map(rank).collect();
        let attempt = Fact::AttemptStarted { attempt: Attempt(3), master_port: 1, ranks, hosts: Vec::new() };
        let read = logs(dir.path(), 3, &[entry(Fact::JobStarted(spec)), entry(attempt)]);
        read.ranks.iter().map(|(_, rank)| rank.0).collect()
    }

    #[test]
    fn the_journal_has_the_numbers_of_ranks_in_a_job_of_several_hosts() {
        assert_eq!(ranks(8, &[(0, 4), (1, 5)]), [4, 5], "the host had other ranks in this attempt");
        assert_eq!(
            ranks(2, &[(0, 0), (1, 1), (0, 2), (1, 3)]),
            [2, 3],
            "the leader has the ranks of all hosts"
        );
        assert_eq!(ranks(2, &[]), [2, 3]);
    }
}
