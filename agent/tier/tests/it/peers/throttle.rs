//! Replicas wait when they have used their share of training time, and are sent when no job trains.

use std::time::Duration;

use mainstay_checkpoint::lag::LagReason;
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_model::time::{Mono, Span};
use mainstay_sys::clock::mono;

use super::support::{CHUNK, Host, hosts, until};

/// Duration of a step without replication.
const USUAL: Span = Span::millis(1);

/// Two hosts. The first sends a shard in about a second.
fn pair(slowdown: f64) -> Vec<Host> {
    let hosts = hosts(2, |_, settings| {
        (settings.rate, settings.streams, settings.slowdown) = (4 * CHUNK, 1, slowdown);
    });
    hosts[0].wait_for_peers(1);
    hosts
}

/// Reports `count` consecutive steps from `from` to now.
fn steps(host: &Host, from: Mono, count: u64) {
    let took = mono().since(from).0 / count;
    let at = |number: u64| Mono(from.0 + number * took);
    let steps: Vec<StepTime> = (0..count)
        .map(|number| StepTime { start: at(number), end: at(number + 1), saving: Span::default() })
        .collect();
    host.service().record_steps("job", &steps);
}

/// Its job trains without replication, then during a replication, with far longer steps.
fn learn(host: &Host) {
    steps(host, Mono(mono().0 - 100 * USUAL.0), 100);
    let began = mono();
    host.save(0, 10, &[0], 1);
    host.wait_for_copies(10, 2);
    steps(host, began, 200);
}

#[test]
fn replicas_over_their_share_of_training_time_wait_until_training_stops() {
    let hosts = pair(0.001);
    let host = &hosts[0];
    learn(host);
    let overhead = host.service().overhead();
    assert!(overhead.per_second.is_some_and(|price| price > 0.5), "{overhead:?}");
    // Each replica costs far more than the budget. Whether the first one is counted depends on whether its transfer ended before
    // or after its steps were reported.
    let mut step = 10;
    let mut from = mono();
    until("a replica to wait, while training goes on", || {
        steps(host, from, 1);
        from = mono();
        host.service().nudge();
        let waits = !host.service().overhead().held.is_zero();
        if !waits && host.least_copies(step) == 2 {
            step += 10;
            host.save(0, step, &[0], 1);
        }
        waits
    });
    let lag = host.service().lags().remove(0);
    assert_eq!((lag.copies.saved, lag.copies.copied.map(|(key, _)| key.step)), (step, Some(step - 10)));
    assert_eq!(lag.reason, LagReason::Slowdown, "{}", lag.why);
    assert_eq!(host.least_copies(step), 1);
    assert!(host.service().overhead().paid > Duration::from_millis(100));
    // No further steps are reported.
    host.wait_for_copies(step, 2);
}

#[test]
fn without_a_limit_replicas_never_wait() {
    let hosts = pair(0.0);
    let host = &hosts[0];
    learn(host);
    for step in [20, 30, 40] {
        host.save(0, step, &[0], 1);
        until("the replica, while training goes on", || {
            steps(host, Mono(mono().0 - USUAL.0), 1);
            host.least_copies(step) == 2
        });
    }
    assert!(host.service().overhead().held.is_zero());
}

#[test]
fn the_reason_for_missing_copies_is_reported_and_ends_when_the_peer_answers() {
    let mut both = hosts(2, |_, _| {});
    let (host, other) = both.split_at_mut(1);
    let (host, other) = (&host[0], &mut other[0]);
    host.wait_for_peers(1);
    other.service = None;
    host.save(0, 10, &[0], 1);
    let lag = || host.service().lags().pop();
    until("the lost peer to be named", || {
        host.service().nudge();
        lag().is_some_and(|lag| lag.reason == LagReason::Peer && lag.why.contains(&other.name))
    });
    let waits = lag().unwrap().copies.waits;
    until("the wait to grow", || lag().unwrap().copies.waits > waits);
    other.start();
    host.wait_for_copies(10, 2);
    let lag = lag().unwrap();
    assert_eq!((lag.copies.waits, lag.copies.copied.map(|(key, _)| key.step)), (Span::default(), Some(10)));
}
