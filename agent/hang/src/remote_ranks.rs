//! Reports of the launchers of other hosts about their ranks. With them one judge sees all ranks of the job: a rank
//! that waits for a rank on another host looks like a rank that hangs.

use serde::{Deserialize, Serialize};

use crate::activity::Probe;
use crate::counters::Count;
use crate::phase::{PhaseId, Phases};
use crate::rank::RankSample;
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

/// The shortest interval between reports of a changed rank, in a job of up to [`SMALL`] hosts. Collective counters
/// change all the time, so the interval grows with the number of hosts.
const MIN_REPORT_INTERVAL: Span = Span::millis(200);
const SMALL: u64 = 256;

/// A rank that did not change is reported again after this time, in case the leader missed it. It is also the longest
/// interval between two reports.
const MAX_REPORT_INTERVAL: Span = Span::seconds(1);

/// How often a host reports changes, by the number of hosts.
fn apart(hosts: u32) -> Span {
    Span(
        (MIN_REPORT_INTERVAL.0.saturating_mul(hosts.into()) / SMALL)
            .clamp(MIN_REPORT_INTERVAL.0, MAX_REPORT_INTERVAL.0),
    )
}

/// A rank as its own host sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankSeen {
    /// The rank.
    pub rank: Rank,
    /// What its page shows. Phase numbers are those of the reporting host; the names are below.
    #[serde(rename = "sight")]
    pub sample: RankSample,
    /// The innermost open section. `None` if none is open.
    pub section: Option<String>,
    /// The name of an open section that is long by its name.
    pub long: Option<String>,
    /// Its collective counters.
    pub counts: Vec<Count>,
    /// What its processes do, if they were probed since the last report.
    pub probe: Option<Probe>,
}

impl RankSeen {
    /// The same with its times converted to another clock.
    pub fn on_clock(mut self, at: &dyn Fn(Mono) -> Mono) -> RankSeen {
        let RankSample { beat_at, since, quiet_until, .. } = self.sample;
        self.sample = RankSample {
            beat_at: at(beat_at),
            since: at(since),
            quiet_until: at(quiet_until),
            ..self.sample
        };
        if let Some(probe) = &mut self.probe {
            probe.at = at(probe.at);
        }
        self
    }

    /// The sample with this host's phase numbers.
    pub(crate) fn sight_here(&self, phases: &mut Phases) -> RankSample {
        let phase = self.section.as_ref().map_or(PhaseId::STEP, |name| phases.section(name));
        let long = self.long.as_ref().map(|name| phases.section(name));
        RankSample { phase, long, ..self.sample }
    }
}

/// What a host reports of its ranks to the judge on another host.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToReport {
    ranks: Vec<LastSample>,
    /// The shortest interval between reports, by the size of the job.
    apart: Span,
    reported_at: Mono,
    again: Mono,
}

#[derive(Clone, Debug, Default)]
struct LastSample {
    sample: RankSample,
    counts: Vec<Count>,
    probe: Option<Probe>,
    fresh: bool,
}

impl ToReport {
    /// For the ranks of a host in a job of `hosts` hosts.
    pub(crate) fn new(ranks: usize, hosts: u32) -> ToReport {
        ToReport { ranks: vec![LastSample::default(); ranks], apart: apart(hosts), ..ToReport::default() }
    }

    pub(crate) fn begin_attempt(&mut self, ranks: usize) {
        *self =
            ToReport { ranks: vec![LastSample::default(); ranks], apart: self.apart, ..ToReport::default() };
    }

    pub(crate) fn sample(&mut self, index: usize, sample: &RankSample, counts: &[Count]) {
        let Some(seen) = self.ranks.get_mut(index) else { return };
        if seen.sample != *sample || seen.counts != counts {
            (seen.sample, seen.fresh) = (*sample, true);
            seen.counts.clear();
            seen.counts.extend_from_slice(counts);
        }
    }

    pub(crate) fn probe(&mut self, index: usize, probe: Probe) {
        if let Some(seen) = self.ranks.get_mut(index) {
            (seen.probe, seen.fresh) = (Some(probe), true);
        }
    }

    /// The reports that are due now. `first` is the number of the first rank.
    pub(crate) fn due(&mut self, first: Rank, phases: &Phases, now: Mono) -> Vec<RankSeen> {
        let all = now.since(self.again) >= MAX_REPORT_INTERVAL;
        if !all && now.since(self.reported_at) < self.apart {
            return Vec::new();
        }
        if all {
            self.again = now;
        }
        let name = |phase: PhaseId| (phase > PhaseId::STEP).then(|| phases.name(phase).to_owned());
        let due = (first.0..).map(Rank).zip(&mut self.ranks).filter(|(_, seen)| all || seen.fresh);
        let due: Vec<RankSeen> = due
            .map(|(rank, seen)| {
                seen.fresh = false;
                RankSeen {
                    rank,
                    sample: seen.sample,
                    section: name(seen.sample.phase),
                    long: seen.sample.long.and_then(name),
                    counts: seen.counts.clone(),
                    probe: seen.probe.take(),
                }
            })
            .collect();
        if !due.is_empty() {
            self.reported_at = now;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::Limits;

    #[test]
    fn hosts_of_a_large_job_report_less_often() {
        assert_eq!(apart(1), MIN_REPORT_INTERVAL);
        assert_eq!(apart(256), MIN_REPORT_INTERVAL);
        assert_eq!(apart(512), Span::millis(400));
        assert_eq!(apart(12_500), MAX_REPORT_INTERVAL);

        let mut due = ToReport::new(1, 512);
        let at = |millis: u64| Mono(0).after(Span::seconds(60)).after(Span::millis(millis));
        let mut reports = |millis: u64, beats: u64| {
            due.sample(0, &RankSample { beats, ..RankSample::default() }, &[]);
            due.due(Rank(0), &Phases::new(Limits::default()), at(millis)).len()
        };
        assert_eq!(reports(0, 1), 1);
        assert_eq!(reports(300, 2), 0);
        assert_eq!(reports(400, 2), 1, "what changed meanwhile is reported then");
    }
}
