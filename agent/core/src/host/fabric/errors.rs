//! Error counters of a link: which matter, within which window, and what a person makes of them.
//!
//! All are judged by what they grew by within a window. What they grew by while the link was down, or lost and found
//! between two readings, is the echo of that and not counted. Counters that only tell of the other end (retries
//! that ran out, `rnr_nak_retry_err`) are shown and never judged.

use std::collections::BTreeMap;

use super::ErrorLimits;
use super::sample::LinkReading;
use crate::base::counter::Counter;
use crate::base::time::{Mono, Span};
use crate::model::health::{Evidence, HealthState, RecommendedAction};

/// The event that a counter has grown too much.
pub(super) const TOO_MANY: &str = "too_many_errors";

struct Rule {
    counter: &'static str,
    limit: fn(&ErrorLimits) -> u64,
    window: Window,
    meaning: &'static str,
    action: RecommendedAction,
}

/// What is only shown is shown for so long.
const HOUR: Span = Span::seconds(3600);

/// A window by the settings.
type Window = fn(&ErrorLimits) -> Span;
const DAMAGE: Window = |limits| limits.damage_window.0;
const RECOVERY: Window = |limits| limits.recovery_window.0;
const PACKETS: Window = |limits| limits.packet_window.0;

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

/// Counters that are shown when they grow and never judged: the cause is at the other end, or in the program.
pub(super) const SHOWN: [&str; 5] = [
    "rnr_nak_retry_err",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "port_rcv_remote_physical_errors",
    "unresponsive_remote_events",
];

/// Counters that stop at their largest value, which is small by InfiniBand's standard.
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
    window: Window,
    meaning: &'static str,
    action: RecommendedAction,
) -> Rule {
    Rule { counter, limit, window, meaning, action }
}

/// The counters of one link.
#[derive(Clone, Debug, Default)]
pub(super) struct Errors {
    counters: BTreeMap<&'static str, Counter>,
    /// Rules that hold at present, by counter.
    over: BTreeMap<&'static str, bool>,
}

/// What the counters come to.
#[derive(Debug, Default)]
pub(super) struct ErrorsFound {
    pub(super) problems: Vec<(HealthState, String, RecommendedAction)>,
    pub(super) evidence: Vec<Evidence>,
    /// Rules that hold since this reading: the counter, what it grew by, and why that matters.
    pub(super) started: Vec<(&'static str, u64, String)>,
}

impl Errors {
    /// What a counter grew by before this start of the agent, as the journal tells.
    pub(super) fn recall(&mut self, counter: &str, at: Mono, grown: u64) {
        if let Some(rule) = RULES.iter().find(|rule| rule.counter == counter) {
            self.counters.entry(rule.counter).or_default().count(at, grown);
            self.over.insert(rule.counter, true);
        }
    }

    /// Takes in the counters. Their growth counts only if the link was `steady` since the last reading.
    pub(super) fn step(
        &mut self,
        at: Mono,
        link: &LinkReading,
        steady: bool,
        limits: &ErrorLimits,
    ) -> ErrorsFound {
        let mut found = ErrorsFound::default();
        for rule in &RULES {
            let Some(value) = link.counters.get(rule.counter).copied() else {
                self.counters.remove(rule.counter);
                continue;
            };
            let window = (rule.window)(limits);
            let counter = self.counters.entry(rule.counter).or_default();
            let grown = counter.step(value);
            counter.count(at, if steady { grown } else { 0 });
            let (sum, limit) = (counter.within(at, window), (rule.limit)(limits).max(1));
            let over = self.over.entry(rule.counter).or_default();
            // It is taken back at half the limit, so that it does not go back and forth around it.
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
        for name in SHOWN {
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
    /// What a counter stands at, and by how much it grew.
    fn report_growth(
        &mut self,
        link: &LinkReading,
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
        });
    }
}

fn source(link: &LinkReading, counter: &str) -> String {
    format!("{counter} of {}", link.name)
}

fn minutes(window: Span) -> String {
    format!("{} min", window.0 / 60_000_000_000)
}

/// The counters that the judge of links knows, so that no other is read.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|rule| rule.counter).chain(SHOWN)
}
