//! Times of one rank in one step of a trace.

/// Times of one rank in one step.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    pub(super) work: Vec<(f64, f64)>,
    pub(super) wait: Vec<(f64, f64)>,
    pub(super) pause: Vec<(f64, f64)>,
    pub(super) whole: Option<f64>,
    pub(super) whole_start: Option<f64>,
}

impl Times {
    pub(super) fn measure(&mut self, work_named: bool, waits_named: bool) -> Measured {
        let work = union(&mut self.work);
        let wait = union(&mut self.wait);
        let pause = union(&mut self.pause);
        let all = self.work.iter().chain(&self.wait).chain(&self.pause);
        let (first, last) =
            all.fold((f64::MAX, f64::MIN), |(first, last), (from, to)| (first.min(*from), last.max(*to)));
        let took = self.whole.unwrap_or(if last > first { last - first } else { 0.0 });
        let own = if work_named {
            work
        } else if waits_named {
            took - wait - pause
        } else {
            took - pause
        };
        let known = |seconds: f64| (seconds > 0.0).then_some(seconds as f32);
        Measured { own: known(own), wait: (!self.wait.is_empty()).then_some(wait as f32), took: known(took) }
    }
}

/// Seconds of one rank in one step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    pub(super) own: Option<f32>,
    pub(super) wait: Option<f32>,
    pub(super) took: Option<f32>,
}

/// The total time that the spans cover together.
fn union(spans: &mut [(f64, f64)]) -> f64 {
    spans.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut covered, mut until) = (0.0, f64::NEG_INFINITY);
    for (from, to) in spans.iter() {
        covered += (to - from.max(until)).max(0.0);
        until = until.max(*to);
    }
    covered
}
