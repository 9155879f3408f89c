//! The fabric judge on samples: rules, each with the opposite case, which must cause no finding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::host::fabric::{Expected, FabricSample, LinkState, PortReading};
use mainstay_health::host::os::Reading;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};
use proptest::prelude::*;
use support::fabric::*;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode};

#[test]
fn a_host_without_a_fabric_has_no_components() {
    let mut host = Host::with_ports(0);
    assert_eq!(host.poll(), []);
    assert!(host.journal.is_empty());
}

#[test]
fn working_ports_are_healthy_from_the_first_reading_and_learned_once() {
    let mut host = Host::with_ports(8);
    for _ in 0..50 {
        for component in host.poll() {
            assert_eq!((component.state, component.action), (Healthy, Nothing), "{component:?}");
            assert_eq!(component.read_at, Some(host.now));
        }
    }
    testing::snapshot!(
        "reasons",
        "fabric: working ports are healthy from the first reading and learned once",
        host.sees("fabric").reason
    );
    assert_eq!((host.events("port_learned"), host.journal.len()), (8, 8));
}

#[test]
fn a_port_that_was_up_is_expected_and_one_that_never_was_is_not_in_use() {
    let mut host = Host::with_ports(2);
    host.link(1).state = down("Disabled");
    host.poll_times(100);
    testing::snapshot!(
        "reasons",
        "fabric: a port that was up is expected and one that never was is not in use",
        host.expect("fabric.mlx5_1/1", Healthy, Nothing)
    );
    testing::snapshot!(
        "reasons",
        "fabric: a port that was up is expected and one that never was is not in use 2",
        host.expect("fabric", Healthy, Nothing)
    );
    host.link(0).state = down("Polling");
    host.poll_times(5);
    let reason = host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    testing::snapshot!(
        "reasons",
        "fabric: a port that was up is expected and one that never was is not in use 3",
        reason
    );
    host.expect("fabric", Unhealthy, ContactSupport);
}

#[test]
fn a_port_that_the_operator_expects_counts_even_if_it_was_never_up() {
    let mut host = Host::new(vec![port(0)], &["mlx5_0/1=400"]);
    host.link(0).state = down("Polling");
    assert_eq!(host.sees("fabric.mlx5_0/1").state, Unknown);
    host.poll_times(4);
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
}

#[test]
fn a_short_loss_changes_no_state_and_a_long_one_clears_with_a_delay() {
    let mut host = Host::settled(1);
    host.link(0).state = down("Polling");
    assert!(host.expect("fabric.mlx5_0/1", Healthy, Nothing).contains("counts from 30s"));
    host.poll_times(2);
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    host.link(0).state = up();
    testing::snapshot!(
        "reasons",
        "fabric: a short loss changes no state and a long one clears with a delay",
        host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport)
    );
    host.poll_times(5);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    assert_eq!((host.events("port_down"), host.events("port_up")), (1, 1));
}

#[test]
fn a_port_in_init_points_to_the_subnet_manager() {
    let mut host = Host::settled(1);
    let state = LinkState { active: false, logical: "INIT".into(), physical: Some("LinkUp".into()) };
    host.link(0).state = Reading::Value(state);
    host.poll_times(4);
    assert!(host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport).contains("subnet manager"));
}

#[test]
fn three_flaps_within_twelve_hours_count_and_two_do_not() {
    let mut host = Host::settled(2);
    host.blink(0);
    host.blink(0);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    host.now = host.now.after(Span::seconds(11 * HOUR));
    host.blink(0);
    let reason = host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    assert!(reason.contains("3 times within 12h"), "{reason}");
    host.expect("fabric.mlx5_1/1", Healthy, Nothing);
    host.now = host.now.after(Span::seconds(2 * HOUR));
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
}

#[test]
fn flaps_are_remembered_across_restarts_of_the_agent_and_the_host() {
    let mut host = Host::settled(1);
    for _ in 0..3 {
        host.blink(0);
    }
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    host.restart(boot("first"));
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    host.restart(boot("second"));
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    // The wall clock advances by 2.8 h at the reboot. Twelve hours later the flaps no longer count.
    host.now = host.now.after(Span::seconds(12 * HOUR));
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
}

#[test]
fn flaps_of_a_card_do_not_count_for_its_replacement() {
    let mut host = Host::settled(1);
    for _ in 0..3 {
        host.blink(0);
    }
    host.restart(boot("second"));
    host.link(0).identity.serial = Some("guid-new".into());
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    assert_eq!(host.events("hardware_replaced"), 1);
}

#[test]
fn a_port_that_is_down_stays_unhealthy_across_a_restart() {
    let mut host = Host::settled(1);
    host.link(0).state = down("Polling");
    host.poll_times(5);
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    host.restart(boot("first"));
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    assert_eq!(host.events("port_down"), 1);
    host.link(0).state = up();
    host.poll();
    assert_eq!(host.events("port_up"), 1);
}

#[test]
fn losses_between_two_readings_are_found_by_the_counter() {
    let mut host = Host::settled(1);
    host.set(0, "link_downed", 2);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    assert_eq!(host.events("port_flapped"), 1);
    host.set(0, "link_downed", 3);
    host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
}

#[test]
fn a_loss_that_is_both_seen_and_counted_is_one_flap() {
    for counted_late in [false, true] {
        let mut host = Host::settled(1);
        for number in 1..=2 {
            host.link(0).state = down("Polling");
            host.set(0, "link_downed", if counted_late { number - 1 } else { number });
            host.poll();
            host.link(0).state = up();
            host.set(0, "link_downed", number);
            host.poll();
        }
        host.expect("fabric.mlx5_0/1", Healthy, Nothing);
        host.blink(0);
        host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    }
}

#[test]
fn a_counter_that_was_reset_or_is_saturated_reports_no_loss() {
    let mut host = Host::settled(1);
    host.set(0, "link_downed", 255);
    host.poll_times(5000);
    host.set(0, "link_downed", 0);
    let component = host.sees("fabric.mlx5_0/1");
    assert_eq!(component.state, Healthy, "{}", component.reason);
    host.set(0, "link_downed", 255);
    let component = host.sees("fabric.mlx5_0/1");
    let readings: Vec<&str> = component.evidence.iter().map(|evidence| evidence.reading.as_str()).collect();
    testing::snapshot!("reasons", "fabric: a saturated counter", readings.join("\n"));
}

#[test]
fn links_that_come_up_at_boot_do_not_flap() {
    let mut host = Host::settled(1);
    host.restart(boot("second"));
    host.now = Mono(0);
    for _ in 0..4 {
        host.blink(0);
    }
    host.link(0).state = down("Polling");
    host.poll_times(5);
    assert!(host.expect("fabric.mlx5_0/1", Unknown, Nothing).contains("just booted"));
    host.link(0).state = up();
    host.poll_times(30);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
}

#[test]
fn a_slower_port_is_degraded_and_a_new_faster_rate_is_learned() {
    let mut host = Host::settled(2);
    host.link(0).rate = Reading::Value(200.0);
    host.poll_times(2);
    let reason = host.expect("fabric.mlx5_0/1", Degraded, ContactSupport);
    assert!(reason.contains("200 Gb/s instead of 400 Gb/s"), "{reason}");
    host.restart(boot("second"));
    host.poll_times(2);
    host.expect("fabric.mlx5_0/1", Degraded, ContactSupport);
    host.link(0).rate = Reading::Value(400.0);
    host.poll_times(2);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);

    host.link(1).rate = Reading::Value(800.0);
    host.poll_times(10);
    host.link(1).rate = Reading::Value(400.0);
    host.poll_times(2);
    host.expect("fabric.mlx5_1/1", Degraded, ContactSupport);
}

#[test]
fn the_rate_of_a_port_that_is_down_is_ignored() {
    let mut host = Host::settled(1);
    host.link(0).state = down("Polling");
    host.link(0).rate = Reading::Value(10.0);
    host.poll_times(5);
    let reason = host.expect("fabric.mlx5_0/1", Unhealthy, ContactSupport);
    assert!(!reason.contains("Gb/s"), "{reason}");
}

#[test]
fn a_port_that_was_always_slow_is_healthy_and_mentioned() {
    let mut host = Host::with_ports(8);
    host.link(3).rate = Reading::Value(200.0);
    host.poll_times(10);
    let reason = host.expect("fabric", Healthy, Nothing);
    testing::snapshot!("reasons", "fabric: a port that was always slow is healthy and mentioned", reason);
    host.expect("fabric.mlx5_3/1", Healthy, Nothing);
}

#[test]
fn a_missing_port_counts_from_the_third_reading() {
    let mut host = Host::settled(2);
    host.sample.links.pop();
    host.expect("fabric.mlx5_1/1", Unknown, Nothing);
    host.expect("fabric.mlx5_1/1", Unknown, Nothing);
    let reason = host.expect("fabric.mlx5_1/1", Unhealthy, RebootNode);
    testing::snapshot!("reasons", "fabric: a missing port counts from the third reading", reason);
    host.poll_times(10);
    assert_eq!(host.events("device_missing"), 1);
    host.sample.slots = [("0000:01:00.0".to_owned(), Some("mlx5_core".to_owned()))].into();
    testing::snapshot!(
        "reasons",
        "fabric: a missing port counts from the third reading 2",
        host.sees("fabric.mlx5_1/1").reason
    );

    host.restart(boot("second"));
    host.poll_times(2);
    let reason = host.expect("fabric.mlx5_1/1", Unhealthy, ContactSupport);
    testing::snapshot!("reasons", "fabric: a missing port counts from the third reading 3", reason);
    assert!(host.expect("fabric", Unhealthy, ContactSupport).contains("1 of 2"));
    host.sample.links.push(port(1));
    host.expect("fabric.mlx5_1/1", Healthy, Nothing);
}

#[test]
fn a_port_that_is_missing_for_two_readings_does_not_count() {
    let mut host = Host::settled(2);
    let gone = host.sample.links.pop().unwrap();
    host.poll_times(2);
    host.sample.links.push(gone);
    host.poll_times(20);
    host.expect("fabric.mlx5_1/1", Healthy, Nothing);
    assert_eq!(host.events("device_missing"), 0);
}

#[test]
fn a_replaced_card_is_learned_again_and_a_renamed_one_is_not() {
    let mut host = Host::settled(2);
    host.link(0).identity.serial = Some("guid-new".into());
    host.link(0).rate = Reading::Value(200.0);
    host.link(1).name = "ibp1s0/1".into();
    host.poll_times(20);
    host.expect("fabric.mlx5_0/1", Healthy, Nothing);
    host.expect("fabric.ibp1s0/1", Healthy, Nothing);
    testing::snapshot!(
        "reasons",
        "fabric: a replaced card is learned again and a renamed one is not",
        host.expect("fabric", Healthy, Nothing)
    );
    assert_eq!((host.events("hardware_replaced"), host.events("renamed")), (1, 1));
}

#[test]
fn a_dead_card_stays_missing_if_others_take_its_name_and_address() {
    let mut host = Host::settled(3);
    host.restart(boot("second"));
    host.sample.links = vec![port(0), PortReading { identity: port(2).identity, ..port(1) }];
    host.link(1).identity.place = Some("0000:01:00.0".into());
    host.poll_times(3);
    let reason = host.expect("fabric", Unhealthy, ContactSupport);
    testing::snapshot!(
        "reasons",
        "fabric: a dead card stays missing if others take its name and address",
        reason
    );
    host.expect("fabric.guid-1/1", Unhealthy, ContactSupport);
    host.expect("fabric.mlx5_1/1", Healthy, Nothing);
    host.sample.links = vec![port(0), port(1), port(2)];
    testing::snapshot!(
        "reasons",
        "fabric: a dead card stays missing if others take its name and address 2",
        host.expect("fabric", Healthy, Nothing)
    );
}

#[test]
fn another_machine_with_the_same_disk_has_no_history() {
    let mut host = Host::with_ports(2);
    host.sample.host = Some("one".into());
    host.poll_times(10);
    host.sample = FabricSample { host: Some("other".into()), ..FabricSample::default() };
    assert_eq!(host.poll(), []);
}

#[test]
fn an_excluded_port_is_no_longer_expected() {
    let mut host = Host::settled(2);
    host.sample.links.pop();
    host.sample.passed_over = [("mlx5_1".to_owned(), "fabric.exclude".to_owned())].into();
    host.poll_times(5);
    testing::snapshot!(
        "reasons",
        "fabric: an excluded port is no longer expected",
        host.expect("fabric", Healthy, Nothing)
    );
}

#[test]
fn virtual_functions_are_not_expected() {
    let mut host = Host::settled(1);
    host.sample.links.push(PortReading { virtual_function: true, ..port(5) });
    host.poll_times(20);
    host.sample.links.pop();
    host.poll_times(5);
    host.expect("fabric", Healthy, Nothing);
}

#[test]
fn an_unreadable_port_is_unknown() {
    let mut host = Host::settled(1);
    host.link(0).state = Reading::Failed("reading /sys/class/infiniband/mlx5_0: Input/output error".into());
    assert!(host.expect("fabric.mlx5_0/1", Unknown, Nothing).contains("Input/output error"));
    host.sample =
        FabricSample { unreadable: Some("listing: permission denied".into()), ..FabricSample::default() };
    host.poll_times(5);
    host.expect("fabric.mlx5_0/1", Unknown, Nothing);
    host.expect("fabric", Unknown, Nothing);
}

#[test]
fn a_simultaneous_loss_of_all_links_points_to_the_switch() {
    let mut host = Host::settled(4);
    for number in 0..4 {
        host.link(number).state = down("Polling");
    }
    host.poll_times(4);
    let reason = host.expect("fabric", Unhealthy, ContactSupport);
    testing::snapshot!("reasons", "fabric: a simultaneous loss of all links points to the switch", reason);
    host.link(3).state = up();
    host.poll_times(10);
    let reason = host.expect("fabric", Unhealthy, ContactSupport);
    assert!(reason.contains("3 of 4"), "{reason}");
}

#[test]
fn expected_ports_are_parsed_or_refused() {
    let read = |text| Expected::parse(text).map(|expected| (expected.component(), expected.rate));
    assert_eq!(read("mlx5_0/1=400"), Ok(("fabric.mlx5_0/1".to_owned(), Some(400.0))));
    assert_eq!(read("eth0"), Ok(("net.eth0".to_owned(), None)));
    for wrong in ["", "mlx5_0/", "/1", "mlx5_0/one", "eth0=", "eth0=fast", "eth0=-1", "eth0=inf"] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

proptest! {
    #[test]
    fn an_expected_port_that_is_out_is_not_healthy(
        poll_times in proptest::collection::vec((any::<bool>(), any::<bool>(), any::<u8>()), 1..80)
    ) {
        let mut host = Host::settled(1);
        let mut out_for = 0_u32;
        for (there, active, counter) in poll_times {
            let mut link = port(0);
            link.counters.insert("link_downed".into(), counter.into());
            if !active {
                link.state = down("Polling");
            }
            host.sample.links = if there { vec![link] } else { vec![] };
            let component = host.sees("fabric.mlx5_0/1");
            out_for = if there && active { 0 } else { out_for + 1 };
            // 30 s down, three readings missing, or a mix of both.
            if out_for > 6 {
                prop_assert!(component.state != Healthy, "{component:?}");
            }
            prop_assert!(!component.reason.is_empty() && component.since <= host.now);
        }
    }
}
