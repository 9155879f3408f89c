//! The clock: whether it jumps, and whether it is synchronized.

use super::limits::{BOOT_GRACE, JUMP_WINDOW};
use super::sample::SystemSample;
use super::{ClockLimits, lasting};
use crate::host::os::Reading;
use crate::host::os::findings::Findings;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::id::BootId;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span, Stamp};

const CLOCK: &str = "host.clock";
const SYNCHRONISED: &str = "synchronised";

#[derive(Clone, Debug, Default)]
pub(super) struct ClockWatch {
    /// How far the wall clock was ahead of the clock since boot, in nanoseconds.
    ahead: Option<i128>,
    jumped: Option<(Mono, i128)>,
    /// It was synchronized once: a time service runs on this host.
    is_kept: bool,
    adrift_since: Option<Mono>,
}

impl ClockWatch {
    pub(super) fn recall(&mut self, observed: &[(Stamp, BootId, Observation)]) {
        self.is_kept = observed
            .iter()
            .any(|(.., observation)| observation.component == CLOCK && observation.event == SYNCHRONISED);
    }

    pub(super) fn judge(
        &mut self,
        limits: &ClockLimits,
        at: Mono,
        sample: &SystemSample,
        facts: &mut Vec<Observation>,
    ) -> Findings {
        let mut findings = Findings::default();
        self.judge_jumps(limits, at, sample, &mut findings, facts);
        match &sample.clock {
            Reading::Value(clock) => {
                if clock.synchronised && !self.is_kept {
                    self.is_kept = true;
                    let detail = "the clock is synchronized".to_owned();
                    facts.push(observed(SYNCHRONISED, Weight::Info, detail));
                }
                let source = clock.source.as_deref().unwrap_or("unknown hardware");
                findings.evidence(
                    "adjtimex",
                    format!(
                        "{}, wrong by at most {}, by {source}",
                        if clock.synchronised { "synchronised" } else { "not synchronised" },
                        clock.max_error
                    ),
                    Some(limits.max_error.to_string()),
                );
                self.judge_keeping(limits, at, clock.synchronised, clock.max_error, &mut findings);
                judge_source(source, clock.has_fast, &mut findings);
            }
            Reading::NotAvailable(why) => {
                findings.note(format!("judged without the kernel's estimate: {why}"))
            }
            Reading::Failed(why) => findings.unreadable(why.clone()),
        }
        findings
    }

    fn judge_keeping(
        &mut self,
        limits: &ClockLimits,
        at: Mono,
        synchronised: bool,
        max_error: Span,
        findings: &mut Findings,
    ) {
        let adrift = !synchronised || max_error > limits.max_error.0;
        if !adrift {
            self.adrift_since = None;
            findings.summary("the clock is synchronized".to_owned());
            return;
        }
        if !self.is_kept {
            findings.summary("no time service that synchronises the clock was found".to_owned());
            return;
        }
        let since = *self.adrift_since.get_or_insert(at);
        let lasted = at.since(since);
        let what = if synchronised {
            format!("the clock may be wrong by {max_error} (limit {})", limits.max_error)
        } else {
            format!("the clock has not been synchronised for {}", lasting(lasted))
        };
        if lasted >= limits.unsynchronised_after.0 {
            findings.problem(HealthState::Degraded, what, RecommendedAction::RestartProcess);
        } else {
            findings.summary(what);
        }
    }

    fn judge_jumps(
        &mut self,
        limits: &ClockLimits,
        at: Mono,
        sample: &SystemSample,
        findings: &mut Findings,
        facts: &mut Vec<Observation>,
    ) {
        if let Some(since_boot) = sample.since_boot {
            let ahead = i128::from(sample.wall.0) - i128::from(since_boot.0);
            let jump = self.ahead.replace(ahead).map_or(0, |before| ahead - before);
            if jump.unsigned_abs() >= u128::from(limits.jump.0.0) {
                let booting = Span(at.0) < BOOT_GRACE;
                let weight = if booting { Weight::Info } else { Weight::Warning };
                let mut observation =
                    observed("clock_jump", weight, format!("the wall clock jumped by {}", seconds(jump)));
                observation.values.insert("seconds".to_owned(), seconds(jump));
                facts.push(observation);
                if !booting {
                    self.jumped = Some((at, jump));
                }
            }
        }
        let lately = self.jumped.filter(|(when, _)| at.since(*when) < JUMP_WINDOW);
        if let Some((when, jump)) = lately {
            let ago = lasting(at.since(when));
            findings.problem(
                HealthState::Degraded,
                format!(
                    "the wall clock jumped by {} {ago} ago: times in logs do not fit together",
                    seconds(jump)
                ),
                RecommendedAction::None,
            );
        }
    }
}

/// Programs read the clock all the time. With these clock sources each read takes a microsecond or more, and only one
/// CPU can read at a time. Guests have the source that their hypervisor gives them.
fn judge_source(source: &str, has_fast: bool, findings: &mut Findings) {
    if !matches!(source, "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") {
        return;
    }
    let slow = format!("each reading of it is slow, since it runs by {source}");
    if has_fast {
        let why = "though the CPUs have a fast counter that does not stop (tsc)";
        findings.problem(HealthState::Degraded, format!("{slow}, {why}"), RecommendedAction::RebootNode);
    } else {
        findings.note(slow);
    }
}

fn seconds(nanoseconds: i128) -> String {
    format!("{:+.3} s", nanoseconds as f64 / 1e9)
}

fn observed(event: &str, weight: Weight, detail: String) -> Observation {
    Observation {
        component: CLOCK.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    }
}
