//! Error counters of a link: which matter, in which window, and what they mean.
//!
//! All are judged by their increase within a window. Increases while the link was down, or lost and regained between
//! two readings, are a consequence of that and do not count. Counters that only reflect the other end (exhausted
//! retries, `rnr_nak_retry_err`) are shown and never judged.

use std::collections::BTreeMap;

use super::ErrorLimits;
use super::sample::PortReading;
use mainstay_model::counter::Counter;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

/// The event for a counter that increased too much.
pub(super) const TOO_MANY: &str = "too_many_errors";

struct Rule {
    counter: &'static str,
    limit: fn(&ErrorLimits) -> u64,
    window: Span,
    meaning: &'static str,
    action: RecommendedAction,
}

/// Window for counters that are only shown.
const HOUR: Span = Span::seconds(3600);

/// Windows of the rules, by what the counter counts.
const DAMAGE: Span = HOUR;
const RECOVERY: Span = Span::seconds(600);
const PACKETS: Span = Span::seconds(300);

const CABLE: RecommendedAction = RecommendedAction::ContactSupport;
const TRAFFIC: RecommendedAction = RecommendedAction::None;

const RULES: [Rule; 10] = [
    rule("symbol_error", |limits| limits.symbol_errors, DAMAGE, "cable or transceiver", CABLE),
    rule(
        "link_error_recovery",
        |limits| limits.link_recoveries,
        RECOVERY,
        "the link is trained again and again: cable or transceiver",
        CABLE,
    ),
    rule(
        "local_link_integrity_errors",
        |limits| limits.link_integrity_errors,
        DAMAGE,
        "cable or transceiver",
        CABLE,
    ),
    rule(
        "excessive_buffer_overrun_errors",
        |limits| limits.buffer_overruns,
        DAMAGE,
        "flow control with the other end fails",
        CABLE,
    ),
    rule(
        "port_rcv_errors",
        |limits| limits.receive_errors,
        PACKETS,
        "packets arrive damaged: cable or transceiver",
        CABLE,
    ),
    rule(
        "port_xmit_discards",
        |limits| limits.transmit_discards,
        PACKETS,
        "packets are dropped: congestion, or the other end is gone",
        TRAFFIC,
    ),
    rule(
        "rx_icrc_encapsulated",
        |limits| limits.damaged_packets,
        DAMAGE,
        "packets arrive damaged, from here or from a switch on the way",
        CABLE,
    ),
    rule("rx_crc_errors", |limits| limits.crc_errors, DAMAGE, "cable or transceiver", CABLE),
    rule(
        "local_ack_timeout_err",
        |limits| limits.ack_timeouts,
        RECOVERY,
        "packets are lost on the way, or the other end does not answer",
        TRAFFIC,
    ),
    rule("roce_slow_restart", |limits| limits.slow_restarts, RECOVERY, "congestion", TRAFFIC),
];

/// Counters that are shown when they increase and never judged: the cause is at the other end or in the program.
pub(super) const UNJUDGED_COUNTERS: [&str; 5] = [
    "rnr_nak_retry_err",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "port_rcv_remote_physical_errors",
    "unresponsive_remote_events",
];

/// Counters that stop at their maximum, which the InfiniBand standard keeps small.
const STOPS_AT: [(&str, u64); 7] = [
    ("link_downed", 255),
    ("link_error_recovery", 255),
    ("local_link_integrity_errors", 15),
    ("excessive_buffer_overrun_errors", 15),
    ("symbol_error", 65_535),
    ("port_rcv_errors", 65_535),
    ("port_xmit_discards", 65_535),
];

const fn rule(
    counter: &'static str,
    limit: fn(&ErrorLimits) -> u64,
    window: Span,
    meaning: &'static str,
    action: RecommendedAction,
) -> Rule {
    Rule { counter, limit, window, meaning, action }
}

/// The counters of one link.
#[derive(Clone, Debug, Default)]
pub(super) struct Errors {
    counters: BTreeMap<&'static str, Counter>,
    /// Whether each rule is exceeded at present, by counter.
    over: BTreeMap<&'static str, bool>,
}

/// What the counters show.
#[derive(Debug, Default)]
pub(super) struct ErrorsFound {
    pub(super) problems: Vec<(HealthState, String, RecommendedAction)>,
    pub(super) evidence: Vec<Evidence>,
    /// Rules exceeded since this reading: the counter, its increase, and why it matters.
    pub(super) started: Vec<(&'static str, u64, String)>,
}

impl Errors {
    /// Restores a counter's increase before this start of the agent, from the journal.
    pub(super) fn recall(&mut self, counter: &str, at: Mono, grown: u64) {
        if let Some(rule) = RULES.iter().find(|rule| rule.counter == counter) {
            self.counters.entry(rule.counter).or_default().count(at, grown);
            self.over.insert(rule.counter, true);
        }
    }

    /// Processes the counters. An increase counts only if the link was `steady` since the last reading.
    pub(super) fn step(
        &mut self,
        at: Mono,
        link: &PortReading,
        steady: bool,
        limits: &ErrorLimits,
    ) -> ErrorsFound {
        let mut found = ErrorsFound::default();
        for rule in &RULES {
            let Some(value) = link.counters.get(rule.counter).copied() else {
                self.counters.remove(rule.counter);
                continue;
            };
            let window = rule.window;
            let counter = self.counters.entry(rule.counter).or_default();
            let grown = counter.step(value);
            counter.count(at, if steady { grown } else { 0 });
            let (sum, limit) = (counter.within(at, window), (rule.limit)(limits).max(1));
            let over = self.over.entry(rule.counter).or_default();
            // Cleared at half the limit, so that the rule does not toggle around its limit.
            let was_over = std::mem::replace(over, sum >= limit || (*over && sum > limit / 2));
            let within = minutes(window);
            if *over {
                let reason = format!(
                    "{} rose by {sum} within {within} (limit {limit}): {}",
                    rule.counter, rule.meaning
                );
                if !was_over {
                    found.started.push((rule.counter, sum, reason.clone()));
                }
                found.problems.push((HealthState::Degraded, reason, rule.action));
            }
            if sum > 0 || *over {
                found.report_growth(link, rule.counter, (value, sum), &within, Some(limit));
            }
        }
        for name in UNJUDGED_COUNTERS {
            let Some(value) = link.counters.get(name).copied() else { continue };
            let counter = self.counters.entry(name).or_default();
            let grown = counter.step(value);
            counter.count(at, grown);
            let sum = counter.within(at, HOUR);
            if sum > 0 {
                found.report_growth(link, name, (value, sum), &minutes(HOUR), None);
            }
        }
        for (name, most) in STOPS_AT {
            if link.counters.get(name) == Some(&most) {
                let source = source(link, name);
                let reading = format!("{most}, its largest value: it cannot count on");
                found.evidence.push(Evidence { source, reading, ..Evidence::default() });
            }
        }
        found
    }
}

impl ErrorsFound {
    /// Reports a counter's value and its increase.
    fn report_growth(
        &mut self,
        link: &PortReading,
        counter: &str,
        (value, grown): (u64, u64),
        within: &str,
        limit: Option<u64>,
    ) {
        self.evidence.push(Evidence {
            source: source(link, counter),
            reading: format!("{value}, {grown} more within {within}"),
            limit: limit.map(|limit| limit.to_string()),
            before: Some(value.saturating_sub(grown).to_string()),
            ..Evidence::default()
        });
    }
}

fn source(link: &PortReading, counter: &str) -> String {
    format!("{counter} of {}", link.name)
}

fn minutes(window: Span) -> String {
    format!("{} min", window.0 / 60_000_000_000)
}

/// The error counters that are used, so that no others are read.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|rule| rule.counter).chain(UNJUDGED_COUNTERS)
}
