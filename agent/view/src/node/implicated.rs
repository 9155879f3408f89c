//! The failures of jobs that implicated this host, in the last days and over all users. The journal has them; here are
//! only their times.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::JobView;
use mainstay_model::entry::{Body, Entry};
use mainstay_model::id::BootId;
use mainstay_model::time::{Mono, Span, Wall};

/// How long a failure counts: as in NVRx's attribution of nodes.
pub const COUNTS_FOR: Span = Span::seconds(14 * 24 * 3600);

/// The most failures kept, the newest.
const MAX_FAILURES: usize = 64;

/// When failures happened that implicated this host. Shared with the snapshots.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Implicated(Arc<BTreeSet<(Wall, BootId, Mono)>>);

impl Implicated {
    /// Takes in a verdict on a job of this host. One that was changed by later evidence replaces the former.
    pub(super) fn take_in(&mut self, entry: &Entry, job: &JobView) {
        let Body::Verdict(verdict) = &entry.body else { return };
        let is_it = |(_, boot, at): &&(Wall, BootId, Mono)| *boot == entry.boot && *at == verdict.fault_at;
        let before = self.0.iter().find(is_it).cloned();
        // The launcher of a job of several hosts sees failures of all of them, the agent only those of its host.
        let is_here =
            verdict.culprit.is_some_and(|rank| job.ranks.contains_key(&rank)) && job.hosts.len() <= 1;
        let implicates = is_here && verdict.implicates_host();
        if before.is_none() && !implicates {
            return;
        }
        let failures = Arc::make_mut(&mut self.0);
        before.iter().for_each(|before| _ = failures.remove(before));
        if implicates {
            failures.insert((entry.at.wall, entry.boot.clone(), verdict.fault_at));
        }
        while failures.len() > MAX_FAILURES {
            failures.pop_first();
        }
    }

    /// When the failures happened that count at `now`, oldest first.
    pub fn recent(&self, now: Wall) -> impl Iterator<Item = Wall> {
        let since = now.0.saturating_sub_unsigned(COUNTS_FOR.0);
        self.0.iter().map(|(at, ..)| *at).filter(move |at| at.0 >= since)
    }
}

#[cfg(test)]
mod tests {
    use super::super::NodeView;
    use super::*;
    use mainstay_model::entry::{Fact, HostOfRanks, JobSpec, StartedRank};
    use mainstay_model::id::{Attempt, Incident, JobId, Pid, Rank};
    use mainstay_model::time::Stamp;
    use mainstay_model::verdict::{Cause, FaultDomain, Verdict};

    const DAY: i64 = 24 * 3_600_000_000_000;

    fn entry(at: Wall, body: Body) -> Entry {
        let at = Stamp { mono: Mono(1), wall: at };
        let job = Some(JobId("job".to_owned()));
        Entry { seq: 1, at, boot: BootId::default(), job, origin_seq: None, body }
    }

    fn started(hosts: &[&str]) -> Body {
        let rank = StartedRank { rank: Rank(3), local_rank: 0, pid: Pid(1), page: None, start_ticks: None };
        let host = |host: &&str| HostOfRanks {
            host: (*host).to_owned(),
            node_rank: 0,
            first_rank: Rank(0),
            ranks: 4,
        };
        let hosts = hosts.iter().map(host).collect();
        Body::Fact(Fact::AttemptStarted { attempt: Attempt(0), master_port: 1, ranks: vec![rank], hosts })
    }

    fn failed(culprit: u32, domain: FaultDomain, fault_at: u64) -> Verdict {
        let of =
            Verdict::new(Incident(1), Attempt(0), Cause::Signal { signal: 7 }, "it failed", Mono(fault_at));
        Verdict { culprit: Some(Rank(culprit)), domain, ..of }
    }

    /// The number of failures that count at `now`, after these verdicts, one each day.
    fn counted(hosts: &[&str], verdicts: Vec<Verdict>, now: Wall) -> usize {
        let mut view = NodeView::default();
        view.apply(&entry(Wall(0), Body::Fact(Fact::JobStarted(JobSpec::default()))));
        view.apply(&entry(Wall(0), started(hosts)));
        for (day, verdict) in (0..).zip(verdicts) {
            view.apply(&entry(Wall(day * DAY), Body::Verdict(verdict)));
        }
        view.implicated.recent(now).count()
    }

    #[test]
    fn hardware_and_platform_faults_of_ranks_here_count_for_fourteen_days() {
        use FaultDomain::{Hardware, Platform};
        let both = || vec![failed(3, Hardware, 1), failed(3, Platform, 2)];
        assert_eq!(counted(&[], both(), Wall(DAY)), 2);
        assert_eq!(counted(&["here"], both(), Wall(DAY)), 2);
        assert_eq!(counted(&[], both(), Wall(15 * DAY)), 1);
        assert_eq!(counted(&[], both(), Wall(16 * DAY)), 0);
    }

    #[test]
    fn faults_of_others_do_not_count_and_late_evidence_changes_a_count() {
        use FaultDomain::{Hardware, Infrastructure, Unknown, User};
        for other in [User, Infrastructure, Unknown] {
            assert_eq!(counted(&[], vec![failed(3, other, 1)], Wall(DAY)), 0, "{other:?}");
        }
        assert_eq!(counted(&[], vec![failed(2, Hardware, 1)], Wall(DAY)), 0, "the rank is not here");
        assert_eq!(
            counted(&["here", "there"], vec![failed(3, Hardware, 1)], Wall(DAY)),
            0,
            "a leader's view"
        );
        let anywhere = Verdict { deterministic: true, ..failed(3, Hardware, 1) };
        assert_eq!(counted(&[], vec![anywhere], Wall(DAY)), 0, "it recurs on any host");
        let changed = vec![failed(3, Hardware, 1), failed(3, User, 1)];
        assert_eq!(counted(&[], changed, Wall(DAY)), 0);
        let twice = vec![failed(3, Hardware, 1), failed(3, Hardware, 1)];
        assert_eq!(counted(&[], twice, Wall(DAY)), 1, "one failure");
    }
}
