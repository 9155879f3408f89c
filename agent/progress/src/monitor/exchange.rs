//! Slow links of a running job. The rank that waits least came last, so its wait is the duration of the exchange
//! itself. If that grows permanently and no rank's own time does, the cause is not a slow rank but the link between
//! them.

use std::collections::VecDeque;

use crate::straggler::{Names, median, spread_around_median};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::Attempt;
use mainstay_model::verdict::FaultDomain;

/// Steps that represent the present.
const NOW: usize = 16;

/// Steps before them that represent the usual.
const BASELINE_STEPS: usize = 48;

/// A smaller growth of the exchange is ignored: transfers scatter.
const MIN_GROWTH: f32 = 1.25;

/// The growth must cost this share of a step.
const COSTS: f32 = 0.02;

/// Standard deviations of a mean of [`NOW`] steps.
const MIN_DEVIATIONS: f32 = 6.7;

/// Own work may have grown by at most this share of the growth of the exchange. Otherwise the job now does something
/// else.
const OF_WORK: f32 = 1.0 / 3.0;

/// One step: ln of the exchange time, ln of the ranks' own time, seconds of the step.
type Step = (u64, f32, f32, f32);

/// Watches the exchanges of one job.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchange {
    steps: VecDeque<Step>,
    /// The open finding, with the usual level and the level that it rose to.
    open: Option<(Finding, f32, f32)>,
}

impl Exchange {
    /// Records a step: how long each rank waited and worked, in seconds, NaN if unknown. Returns the finding to
    /// report.
    pub(super) fn step(
        &mut self,
        step: u64,
        waits: &[f32],
        own: &[f32],
        took: f32,
        (number, attempt, names): (u64, Attempt, &Names),
    ) -> Option<Finding> {
        // A missing rank may have come last.
        let least =
            waits.iter().copied().reduce(f32::min).filter(|_| waits.iter().all(|wait| *wait > 0.0))?;
        let work = median(&mut own.iter().copied().filter(|own| *own > 0.0).collect::<Vec<_>>());
        if !work.is_finite() || took.is_nan() {
            return None;
        }
        self.steps.push_back((step, least.ln(), work.ln(), took));
        if self.steps.len() > NOW + BASELINE_STEPS {
            self.steps.pop_front();
        }
        if self.steps.len() < NOW + BASELINE_STEPS / 2 {
            return None;
        }
        match &self.open {
            Some((_, usual, risen)) => {
                let now = self.middle(self.steps.len() - NOW.., |step| step.1);
                if now > usual + (risen - usual) / 2.0 {
                    return None;
                }
                let (before, ..) = self.open.take()?;
                let headline = format!("ended at step {step}: {}", before.headline);
                Some(Finding { over: true, step, headline, ..before })
            }
            None => self.finding(step, number, attempt, names),
        }
    }

    fn middle(&self, steps: impl std::ops::RangeBounds<usize>, which: fn(&Step) -> f32) -> f32 {
        median(&mut self.steps.range(steps).map(which).collect::<Vec<_>>())
    }

    fn finding(&mut self, step: u64, number: u64, attempt: Attempt, names: &Names) -> Option<Finding> {
        let before = self.steps.len() - NOW;
        let (usual, now) = (self.middle(..before, |step| step.1), self.middle(before.., |step| step.1));
        let noise =
            spread_around_median(&mut self.steps.range(..before).map(|step| step.1).collect::<Vec<_>>());
        let grew = now - usual;
        // The longer half of the present steps must not decide alone.
        let mut present: Vec<f32> = self.steps.range(before..).map(|step| step.1).collect();
        present.sort_unstable_by(f32::total_cmp);
        let lasting = present.get(NOW / 4).is_some_and(|low| low - usual > grew / 2.0);
        let worked = self.middle(before.., |step| step.2) - self.middle(..before, |step| step.2);
        let took = self.middle(before.., |step| step.3);
        let cost = (now.exp() - usual.exp()) / took;
        let sure = grew > MIN_DEVIATIONS * noise / (NOW as f32).sqrt() * 1.25;
        if grew < MIN_GROWTH.ln() || !sure || !lasting || worked > grew * OF_WORK || cost < COSTS {
            return None;
        }
        let since = self.steps.iter().rev().take_while(|step| step.1 > usual + grew / 2.0).last()?.0;
        let ranks = names.ranks.len();
        let finding = Finding {
            finding: number,
            attempt,
            what: FindingKind::SlowLink,
            over: false,
            headline: format!(
                "communication between ranks takes {:.0} % longer since step {since}, and no rank computes longer: a link is slow; \
                 without it a step would be {:.1} % shorter",
                (grew.exp() - 1.0) * 100.0,
                cost * 100.0,
            ),
            domain: FaultDomain::Infrastructure,
            confidence: 0.7,
            ranks: Vec::new(),
            device: None,
            host: None,
            stage: None,
            since_step: since,
            step,
            cost_percent: Some((f64::from(cost) * 1000.0).round() / 10.0),
            evidence: vec![
                format!(
                    "the rank that waits least of {ranks}, the last to arrive, waits {:.1} ms, and {:.1} ms before: that is the time \
                     of the communication itself",
                    now.exp() * 1e3,
                    usual.exp() * 1e3,
                ),
                format!("over {NOW} steps against {before}; noise from step to step {:.1} %", noise * 100.0),
                format!("the ranks' own work changed by {:.1} %", (worked.exp() - 1.0) * 100.0),
            ],
            last_agreed_step: None,
            doubtful_steps: Vec::new(),
        };
        self.open = Some((finding.clone(), usual, now));
        Some(finding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::id::Rank;

    /// In each step all ranks work for `own` seconds, the last one a little longer, and the transfer takes `moving`.
    fn findings(steps: impl Fn(u64) -> (f32, f32)) -> Vec<Finding> {
        let names = Names { ranks: (0..4).map(Rank).collect(), ..Names::default() };
        let mut exchange = Exchange::default();
        let mut found = Vec::new();
        for step in 1..=200 {
            let (own, moving) = steps(step);
            let wobble = |rank: u64| ((rank * 37 + step * 101) % 17) as f32 / 17.0 * 0.004;
            let own: Vec<f32> = (0..4).map(|rank| own * (1.0 + wobble(rank))).collect();
            let latest = own.iter().copied().fold(0.0, f32::max);
            let waits: Vec<f32> = own.iter().map(|own| latest - own + moving).collect();
            let number = found.len() as u64 + 1;
            found.extend(exchange.step(step, &waits, &own, latest + moving, (number, Attempt(0), &names)));
        }
        found
    }

    #[test]
    fn a_link_that_becomes_slow_is_reported_and_over() {
        let found = findings(|step| (0.1, if (80..150).contains(&step) { 0.04 } else { 0.02 }));
        let [began, over] = &found[..] else { panic!("{found:?}") };
        assert_eq!((began.what, began.since_step, began.over), (FindingKind::SlowLink, 80, false));
        assert!(
            began.step <= 95 && began.cost_percent.is_some_and(|cost| (12.0..18.0).contains(&cost)),
            "{began:?}"
        );
        assert!(over.over && over.finding == began.finding, "{over:?}");
    }

    #[test]
    fn longer_sequences_and_slower_ranks_are_no_slow_link() {
        assert_eq!(findings(|step| if step < 80 { (0.1, 0.02) } else { (0.2, 0.04) }), []);
        assert_eq!(findings(|step| (if step < 80 { 0.1 } else { 0.13 }, 0.02)), []);
    }

    #[test]
    fn a_steady_link_and_single_long_transfers_are_left_alone() {
        assert_eq!(findings(|_| (0.1, 0.02)), []);
        assert_eq!(findings(|step| (0.1, if step % 9 == 0 { 0.2 } else { 0.02 })), []);
    }
}
