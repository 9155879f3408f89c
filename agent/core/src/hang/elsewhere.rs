//! What launchers of other hosts report of their ranks, so that one judge of hangs has all ranks of the job: a rank that waits
//! for one on another host looks as one that hangs.

use serde::{Deserialize, Serialize};

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};
use crate::hang::activity::Probe;
use crate::hang::counters::Count;
use crate::hang::phase::{PhaseId, Phases};
use crate::hang::rank::Sight;

/// What changed of a rank is reported so often at most.
const APART: Span = Span::millis(200);

/// What did not change is reported again after this time: the leader may have missed it.
const AGAIN: Span = Span::seconds(1);

/// A rank as its own host sees it. Fields are added, never renamed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSeen {
    /// Which.
    pub rank: Rank,
    /// What its page shows. Phases are numbers of that host, and named below.
    pub sight: Sight,
    /// The innermost open section; none if it is at the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
    /// An open section that is long by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long: Option<String>,
    /// Its collective counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<Count>,
    /// What its processes do, where that was looked at since the last report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
}

impl RankSeen {
    /// With its times on another clock.
    pub fn on_clock(mut self, at: &dyn Fn(Mono) -> Mono) -> RankSeen {
        let Sight { beat_at, since, quiet_until, .. } = self.sight;
        self.sight =
            Sight { beat_at: at(beat_at), since: at(since), quiet_until: at(quiet_until), ..self.sight };
        if let Some(probe) = &mut self.probe {
            probe.at = at(probe.at);
        }
        self
    }

    /// The sight with the numbers that phases have here.
    pub(crate) fn sight_here(&self, phases: &mut Phases) -> Sight {
        let phase = self.section.as_ref().map_or(PhaseId::STEP, |name| phases.section(name));
        let long = self.long.as_ref().map(|name| phases.section(name));
        Sight { phase, long, ..self.sight }
    }
}

/// What a host has to report of its ranks to the judge on another host.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToReport {
    ranks: Vec<Seen>,
    reported: Mono,
    again: Mono,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    sight: Sight,
    counts: Vec<Count>,
    probe: Option<Probe>,
    fresh: bool,
}

impl ToReport {
    pub(crate) fn begin_attempt(&mut self, ranks: usize) {
        *self = ToReport { ranks: vec![Seen::default(); ranks], ..ToReport::default() };
    }

    pub(crate) fn sight(&mut self, place: usize, sight: &Sight, counts: &[Count]) {
        let Some(seen) = self.ranks.get_mut(place) else { return };
        if seen.sight != *sight || seen.counts != counts {
            (seen.sight, seen.fresh) = (*sight, true);
            seen.counts.clear();
            seen.counts.extend_from_slice(counts);
        }
    }

    pub(crate) fn probe(&mut self, place: usize, probe: Probe) {
        if let Some(seen) = self.ranks.get_mut(place) {
            (seen.probe, seen.fresh) = (Some(probe), true);
        }
    }

    /// What is to be reported now; `first` is the number of the first rank.
    pub(crate) fn due(&mut self, first: Rank, phases: &Phases, now: Mono) -> Vec<RankSeen> {
        let all = now.since(self.again) >= AGAIN;
        if !all && now.since(self.reported) < APART {
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
                    sight: seen.sight,
                    section: name(seen.sight.phase),
                    long: seen.sight.long.and_then(name),
                    counts: seen.counts.clone(),
                    probe: seen.probe.take(),
                }
            })
            .collect();
        if !due.is_empty() {
            self.reported = now;
        }
        due
    }
}
