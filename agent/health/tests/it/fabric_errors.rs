//! Error counters of links, judged by their growth: each with the opposite case, which must cause no finding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Span;
use support::fabric::*;

use HealthState::{Degraded, Healthy};
use RecommendedAction::{ContactSupport, None as Nothing};

/// Raises a counter by `each` at every reading. Returns the state after the last one.
fn rises(counter: &str, each: u64, readings: u64) -> (HealthState, RecommendedAction) {
    let mut host = Host::with_ports(1);
    host.set(0, counter, 1_000_000);
    host.poll_times(10);
    let mut last = None;
    for reading in 1..=readings {
        host.set(0, counter, 1_000_000 + each * reading);
        last = Some(host.sees("fabric.mlx5_0/1"));
    }
    last.map(|seen| (seen.state, seen.action)).unwrap()
}

#[test]
fn high_error_rates_degrade_a_link_and_normal_ones_do_not() {
    let cable = (Degraded, ContactSupport);
    let well = (Healthy, Nothing);
    // Counter, growth per reading (every 10 s), number of readings.
    let cases = [
        ("symbol_error", 1, 119, well),
        ("symbol_error", 1, 120, cable),
        ("symbol_error", 500, 1, cable),
        ("link_error_recovery", 1, 29, well),
        ("link_error_recovery", 1, 60, cable),
        ("local_link_integrity_errors", 2, 1, well),
        ("local_link_integrity_errors", 1, 3, cable),
        ("excessive_buffer_overrun_errors", 2, 1, well),
        ("excessive_buffer_overrun_errors", 1, 3, cable),
        ("port_rcv_errors", 90, 30, well),
        ("port_rcv_errors", 110, 30, cable),
        ("port_xmit_discards", 900, 30, well),
        ("port_xmit_discards", 1100, 30, (Degraded, Nothing)),
        ("local_ack_timeout_err", 500, 1, well),
        ("local_ack_timeout_err", 11, 60, (Degraded, Nothing)),
        ("rx_icrc_encapsulated", 1, 9, well),
        ("rx_icrc_encapsulated", 1, 10, cable),
        ("roce_slow_restart", 50, 60, well),
        ("roce_slow_restart", 110, 60, (Degraded, Nothing)),
        ("rx_crc_errors", 120, 1, cable),
        ("rnr_nak_retry_err", 100_000, 60, well),
        ("req_transport_retries_exceeded", 100, 60, well),
        ("port_xmit_wait", 1_000_000, 60, well),
    ];
    for (counter, each, readings, expected) in cases {
        assert_eq!(rises(counter, each, readings), expected, "{counter} by {each} in {readings} readings");
    }
}

#[test]
fn too_many_errors_count_across_a_restart_until_their_window_ends() {
    let mut host = Host::settled(1);
    host.set(0, "symbol_error", 500);
    host.expect("fabric.mlx5_0/1", Degraded, ContactSupport);
    host.poll_times(5);
    assert_eq!(host.events("too_many_errors"), 1);
    host.restart(boot("first"));
    host.expect("fabric.mlx5_0/1", Degraded, ContactSupport);
    assert_eq!(host.events("too_many_errors"), 1);
    host.now = host.now.after(Span::seconds(HOUR));
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    host.restart(boot("second"));
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
}

#[test]
fn errors_of_a_link_that_goes_down_do_not_count() {
    let mut host = Host::settled(1);
    host.link(0).state = down("Polling");
    host.set(0, "symbol_error", 5000);
    host.poll();
    host.link(0).state = up();
    host.set(0, "symbol_error", 9000);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    host.set(0, "symbol_error", 9200);
    host.expect("fabric.mlx5_0/1", Degraded, ContactSupport);
}

#[test]
fn errors_from_before_the_first_reading_do_not_count() {
    let mut host = Host::with_ports(1);
    host.set(0, "symbol_error", 60_000);
    host.poll_times(100);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
}
