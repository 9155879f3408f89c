//! The NVLinks of one GPU. The links that should be up are learned from healthy readings; each faulty link is a
//! component.

use std::collections::{BTreeMap, BTreeSet};

use super::details::LinkErrors;
use super::limits::{DeviceLimits, FABRIC_GRACE, NVLINK_FAILED_FOR, NVLINK_WINDOW, taken_back};
use super::reading::{GpuReading, Sampled};
use super::rules::Rules;
use super::rules::SAMPLED;
use super::watch::{Change, CheckResult, Growth, Problem, Watch};
use crate::state::ReportedState;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Mono;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, ResetDevice};

#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    /// Links that were up in several readings; links that the board does not have were never up.
    learned: BTreeSet<u32>,
    /// The links that were up in the last readings, and the number of these readings in a row.
    candidate: (BTreeSet<u32>, u32),
    up: BTreeSet<u32>,
    links: BTreeMap<u32, Link>,
    /// The expected number of links.
    expected: usize,
}

#[derive(Clone, Debug, Default)]
struct Link {
    down: Watch,
    errors: Watch,
    failed: Watch,
    rate: Watch,
    damaged: Growth,
    recoveries: Growth,
    failures: Growth,
    remote: Option<PciAddress>,
    /// Set once the link was faulty: from then on it is shown, also when it is healthy again.
    shown: Option<ReportedState>,
}

impl Links {
    /// Restores the links that should be up, as learned before a restart.
    pub(super) fn recall(&mut self, learned: BTreeSet<u32>) {
        self.learned = learned;
    }

    /// Restores a finding of a check such as `nvlink_down 3` from before a restart; `None`: it was over. Returns
    /// whether the check exists.
    pub(super) fn recall_finding(&mut self, check: &str, problem: Option<Problem>, until: Mono) -> bool {
        let Some((what, link)) = check.split_once(' ') else { return false };
        let Ok(link) = link.parse() else { return false };
        let state = self.links.entry(link).or_default();
        let watch = match what {
            "nvlink_down" => &mut state.down,
            "nvlink_errors" => &mut state.errors,
            "nvlink_recovery_failed" => &mut state.failed,
            "nvlink_error_rate" => &mut state.rate,
            _ => return false,
        };
        *watch = Watch::default();
        if let Some(problem) = problem {
            watch.hold(problem, until);
        }
        true
    }

    pub(super) fn learned(&self) -> &BTreeSet<u32> {
        &self.learned
    }

    /// The number of links that are up and that should be up; `None` for a GPU without links.
    pub(super) fn counts(&self) -> Option<(usize, usize)> {
        (!self.links.is_empty()).then_some((self.up.len(), self.expected))
    }

    pub(super) fn take_in(
        &mut self,
        at: Mono,
        reading: &GpuReading,
        rules: Rules<'_>,
    ) -> Vec<(String, Change)> {
        let split = reading.mig.value() == Some(&true);
        let readable = reading.nvlinks.iter().all(|link| !matches!(link.up, Sampled::Failed(_)));
        let is_up = |link: &&super::LinkReading| link.up.value() == Some(&true);
        if readable && !matches!(reading.mig, Sampled::Failed(_)) {
            self.up = reading.nvlinks.iter().filter(is_up).map(|link| link.link).collect();
            if !split {
                self.learn(rules.limits.worsen_after);
            }
        }
        let wanted = rules.expected.nvlinks as usize;
        self.expected = if wanted > 0 { wanted } else { self.learned.union(&self.up).count() };
        if split {
            self.expected = self.up.len();
        }
        let listed = reading.nvlinks.iter().map(|link| link.link);
        // If the expected number is configured, a link that is not even listed counts as missing.
        let counted = 0..u32::try_from(wanted).unwrap_or(0);
        let all: BTreeSet<u32> = listed.chain(self.learned.iter().copied()).chain(counted).collect();
        let mut changes = Vec::new();
        for link in all {
            let link_reading = reading.nvlinks.iter().find(|reading| reading.link == link);
            let should = if wanted > 0 { self.up.len() < wanted } else { self.learned.contains(&link) };
            let result = match link_reading.map(|reading| &reading.up) {
                _ if split => CheckResult::NotApplicable,
                Some(Sampled::Value(true)) => CheckResult::Healthy,
                Some(Sampled::Failed(_)) => CheckResult::Unread,
                // The driver does not report the link as down; it no longer reports it at all.
                Some(Sampled::NotOffered) | None if wanted == 0 => {
                    CheckResult::from_problem(should.then(|| {
                        let reason =
                            format!("NVLink {link} was up before, and the driver no longer reports it");
                        Problem::new(Unknown, reason, RecommendedAction::None).by(
                            "NVML NVLink state",
                            "not told",
                            "up",
                        )
                    }))
                }
                Some(Sampled::Value(false)) if at.0 < FABRIC_GRACE.0 => {
                    CheckResult::from_problem(should.then(|| {
                        let reason =
                            format!("NVLink {link} is not up yet: links train for some minutes after a boot");
                        let problem = Problem::new(Unknown, reason, RecommendedAction::None);
                        problem.by("NVML NVLink state", "down", "up")
                    }))
                }
                Some(Sampled::Value(false) | Sampled::NotOffered) | None => {
                    CheckResult::from_problem(should.then(|| {
                        let why = if wanted > 0 {
                            format!(": {wanted} should be up")
                        } else {
                            " that was up before".to_owned()
                        };
                        let reason = format!("NVLink {link} down{why}");
                        let problem = Problem::new(Unhealthy, reason, ResetDevice);
                        let before = self.learned.contains(&link).then_some("up");
                        problem.by("NVML NVLink state", "down", "up").was(before)
                    }))
                }
            };
            let state = self.links.entry(link).or_default();
            push(&mut changes, link, "nvlink_down", state.down.step(result, rules.at_once()));
        }
        if let Some(details) = reading.details.as_ref().filter(|_| !split) {
            for errors in &details.links {
                self.links.entry(errors.link).or_default().errors(at, errors, rules, &mut changes);
            }
        }
        changes
    }

    /// Links that were up in `after` readings in a row should be up.
    fn learn(&mut self, after: u32) {
        let (candidate, times) = &mut self.candidate;
        if *candidate == self.up {
            *times = times.saturating_add(1);
        } else {
            (*candidate, *times) = (self.up.clone(), 1);
        }
        if *times >= after {
            self.learned.extend(&self.up);
        }
    }

    /// All link problems as one problem of the GPU.
    pub(super) fn problem(&self) -> Option<Problem> {
        let held: Vec<(u32, &Problem)> = self
            .links
            .iter()
            .flat_map(|(number, link)| link.problems().map(|problem| (*number, problem)))
            .collect();
        let worst =
            held.iter().map(|(_, problem)| problem).max_by_key(|problem| (problem.state, problem.action))?;
        let is_down = |problem: &Problem| problem.state == Unhealthy;
        let down: Vec<String> = self
            .links
            .iter()
            .filter(|(_, link)| link.down.problem().is_some_and(is_down))
            .map(|(number, _)| number.to_string())
            .collect();
        let mut reason = Vec::new();
        if !down.is_empty() {
            let (up, expected) = (self.up.len(), self.expected);
            reason.push(format!("NVLink {} down, {up} of {expected} up", down.join(", ")));
        }
        reason.extend(
            held.iter()
                .filter(|(number, problem)| {
                    let down = |link: &Link| {
                        link.down.problem().is_some_and(|held| held == *problem && is_down(held))
                    };
                    self.links.get(number).is_some_and(|link| !down(link))
                })
                .map(|(_, problem)| problem.reason.clone()),
        );
        let weighty = held.iter().map(|(_, problem)| problem).filter(|problem| problem.state == worst.state);
        let sure = weighty.map(|problem| problem.confidence).fold(0.0, f64::max);
        let mut whole = Problem::new(worst.state, reason.join("; "), worst.action).sure(sure);
        // Enough for a reader; each faulty link has a component with all evidence.
        const MAX_SHOWN_LINKS: usize = 4;
        let evidence = held.iter().flat_map(|(number, problem)| {
            problem.evidence.iter().map(move |evidence| Evidence {
                source: format!("{} (link {number})", evidence.source),
                ..evidence.clone()
            })
        });
        whole.evidence = evidence.take(MAX_SHOWN_LINKS).collect();
        Some(whole)
    }

    /// Whether the check has found a problem on one of the links.
    pub(super) fn holds(&self, check: &str) -> bool {
        let held = |link: &Link| match check {
            "nvlink_down" => link.down.problem().is_some(),
            "nvlink_errors" => {
                link.errors.problem().is_some()
                    || link.failed.problem().is_some()
                    || link.rate.problem().is_some()
            }
            _ => false,
        };
        self.links.values().any(held)
    }

    pub(super) fn summary(&self) -> Option<String> {
        let (up, expected) = self.counts()?;
        Some(format!("{up} up, {expected} expected"))
    }

    /// A component for each link that is or was faulty.
    pub(super) fn components(&mut self, gpu: PciAddress, now: Mono, read_at: Option<Mono>) -> Vec<Component> {
        let mut components = Vec::new();
        for (number, link) in &mut self.links {
            let problems: Vec<Problem> = link.problems().cloned().collect();
            if problems.is_empty() && link.shown.is_none() {
                continue;
            }
            let state = problems.iter().map(|problem| problem.state).max().unwrap_or(Healthy);
            let action = problems.iter().map(|problem| problem.action).max().unwrap_or_default();
            let weighty = problems.iter().filter(|problem| problem.state == state);
            let confidence = weighty.map(|problem| problem.confidence).reduce(f64::max).unwrap_or(1.0);
            let mut reasons: Vec<String> = problems.iter().map(|problem| problem.reason.clone()).collect();
            if reasons.is_empty() {
                reasons.push("up and healthy again".to_owned());
            }
            if let Some(remote) = link.remote {
                reasons.push(format!("its other end is {remote}"));
            }
            components.push(Component {
                name: format!("nvlink.{gpu}/{number}"),
                state,
                reason: reasons.join("; "),
                action,
                evidence: problems.into_iter().flat_map(|problem| problem.evidence).collect(),
                read_at,
                since: link.shown.get_or_insert_default().since(state, now),
                confidence,
                ..Component::default()
            });
        }
        components
    }
}

fn push(changes: &mut Vec<(String, Change)>, link: u32, what: &str, change: Change) {
    if change != Change::None {
        changes.push((format!("{what} {link}"), change));
    }
}

impl Link {
    fn problems(&self) -> impl Iterator<Item = &Problem> {
        [&self.down, &self.failed, &self.errors, &self.rate].into_iter().filter_map(Watch::problem)
    }

    fn errors(
        &mut self,
        at: Mono,
        counts: &LinkErrors,
        rules: Rules<'_>,
        changes: &mut Vec<(String, Change)>,
    ) {
        let limits = rules.limits;
        self.remote = counts.remote.or(self.remote);
        let errors = self.damaged(at, counts, limits);
        push(changes, counts.link, "nvlink_errors", self.errors.step(errors, rules.at_once()));
        let failed = counts.recovery_failed.map_or(CheckResult::NotApplicable, |count| {
            let grown = self.failures.step(at, count, NVLINK_FAILED_FOR);
            let reason = format!("NVLink {}: {} recoveries failed", counts.link, grown.by);
            CheckResult::from_problem((grown.by > 0).then(|| {
                let problem = Problem::new(Unhealthy, reason, ResetDevice);
                problem.gained("NVML NVLink recoveries that failed", &grown, 0)
            }))
        });
        push(
            changes,
            counts.link,
            "nvlink_recovery_failed",
            self.failed.step_at(at, failed, rules.at_once()),
        );
        push(
            changes,
            counts.link,
            "nvlink_error_rate",
            self.rate.step(rate(counts, limits), rules.patient()),
        );
    }

    /// Judges the increase within a window: counters do not fall before a reset, and one old error is not news.
    fn damaged(&mut self, at: Mono, counts: &LinkErrors, limits: &DeviceLimits) -> CheckResult {
        if counts.replays.is_none()
            && counts.crc.is_none()
            && counts.recoveries.is_none()
            && counts.recovered.is_none()
            && counts.damaged_packets.is_none()
        {
            return CheckResult::NotApplicable;
        }
        let kinds = [counts.replays, counts.crc, counts.damaged_packets].into_iter().flatten();
        let damaged = kinds.fold(0, u64::saturating_add);
        let damaged = self.damaged.step(at, damaged, NVLINK_WINDOW);
        let recoveries = counts.recoveries.unwrap_or(0).saturating_add(counts.recovered.unwrap_or(0));
        let recoveries = self.recoveries.step(at, recoveries, NVLINK_WINDOW);
        let checked = [
            (damaged, limits.nvlink_errors_per_minute, "damaged or repeated packets"),
            (recoveries, limits.nvlink_recoveries_per_minute, "recoveries"),
        ];
        let ill = checked
            .iter()
            .copied()
            .find(|(grown, limit, _)| grown.goes_on() && grown.per_minute() >= f64::from(*limit));
        let near =
            checked.iter().any(|(grown, limit, _)| grown.per_minute() >= taken_back(f64::from(*limit)));
        let judged = CheckResult::from_problem(ill.map(|(grown, limit, what)| {
            let reason = format!("NVLink {}: {:.0} {what} a minute", counts.link, grown.per_minute());
            Problem::new(Degraded, reason, ResetDevice).sure(SAMPLED).gained(
                &format!("NVML NVLink {what}"),
                &grown,
                format!("{limit} a minute"),
            )
        }));
        judged.unless_near(near)
    }
}

/// The error rate after correction, by bits or symbols, whichever is higher.
fn rate(counts: &LinkErrors, limits: &DeviceLimits) -> CheckResult {
    let limit = limits.nvlink_error_rate;
    let rates = [("bit", counts.effective_ber), ("symbol", counts.symbol_ber)];
    let reported_of = rates.into_iter().filter_map(|(what, rate)| Some((what, rate?)));
    let Some((what, rate)) = reported_of.max_by(|(_, one), (_, other)| one.total_cmp(other)) else {
        return CheckResult::NotApplicable;
    };
    let reason = format!("NVLink {}: error rate after correction is {rate:.0e} per {what}", counts.link);
    CheckResult::from_problem((rate > limit).then(|| {
        Problem::new(Degraded, reason, ContactSupport).by(
            &format!("NVML NVLink {what} error rate after correction"),
            format!("{rate:.1e}"),
            format!("{limit:.0e}"),
        )
    }))
    .unless_near(rate > taken_back(limit))
}
