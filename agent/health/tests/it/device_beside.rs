//! GPUs compared with each other and with second opinions: each test has an opposite case, which must cause no finding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::collections::BTreeMap;

use mainstay_health::hardware::gpu::{
    Clocks, DeviceLimits, ExpectedGpus, GpuReading, GpuTrouble, Opinion, PcieLink, PeerAccess, RemappedRows,
    Sampled,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Evidence, HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use support::gpus::{FIRST, Host, LINK, SECOND, address, gpu};

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice};

/// Checks that a change of the first GPU counts after `poll_times` readings, and is over soon after it is undone.
#[track_caller]
fn odd_one(poll_times: u32, action: RecommendedAction, change: impl Fn(&mut GpuReading)) -> String {
    let mut host = Host::new();
    host.poll_times(3);
    change(host.first());
    host.poll_times(poll_times - 1);
    assert_eq!(host.not_healthy(), Vec::<String>::new(), "reported too soon");
    host.poll();
    let reason = host.expect(FIRST, Degraded, action);
    let sure = host.find(FIRST).unwrap().confidence;
    assert!(sure < 1.0, "an inference with the confidence of a driver report: {sure}");
    host.expect(SECOND, Healthy, Nothing);
    host.gpus[0] = gpu(0);
    host.poll_times(4);
    assert_eq!(host.not_healthy(), Vec::<String>::new(), "the finding stays");
    reason
}

#[track_caller]
fn silent(change: impl Fn(&mut [GpuReading])) {
    let mut host = Host::new();
    host.poll_times(3);
    for _ in 0..100 {
        change(&mut host.gpus);
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

fn clocks(sm: u32) -> Sampled<Clocks> {
    Sampled::Value(Clocks { sm, memory: 2619 })
}

#[test]
fn a_busy_gpu_that_is_slower_than_its_siblings_for_minutes_is_degraded() {
    let reason = odd_one(30, ContactSupport, |gpu| gpu.clocks = clocks(1200));
    testing::snapshot!(
        "reasons",
        "device_beside: a busy gpu that is slower than its siblings for minutes is degraded",
        reason
    );
    // Power caps cause small differences.
    silent(|gpus| gpus[0].clocks = clocks(1600));
    // An idle GPU has low clocks.
    silent(|gpus| {
        gpus[0].clocks = clocks(345);
        gpus[0].utilization = Sampled::Value(0);
    });
    // All GPUs are slow: none is an outlier.
    silent(|gpus| gpus.iter_mut().for_each(|gpu| gpu.clocks = clocks(900)));
    // Its siblings are idle.
    silent(|gpus| {
        gpus[0].clocks = clocks(900);
        gpus[1..].iter_mut().for_each(|gpu| gpu.utilization = Sampled::Value(0));
    });
    // Another model, and a split GPU (MIG).
    silent(|gpus| {
        gpus[0].clocks = clocks(900);
        gpus[0].identity.as_mut().unwrap().name = "NVIDIA L4".into();
    });
    silent(|gpus| {
        gpus[0].clocks = clocks(900);
        gpus[0].mig = Sampled::Value(true);
    });
}

#[test]
fn a_short_difference_from_siblings_is_no_finding() {
    let mut host = Host::new();
    for round in 0..200 {
        host.first().clocks = clocks(if round % 20 == 0 { 1980 } else { 600 });
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

#[test]
fn of_two_gpus_neither_is_an_outlier() {
    let mut host = Host::new();
    host.gpus.truncate(2);
    host.first().clocks = clocks(600);
    host.poll_times(60);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_busy_gpu_that_is_hotter_than_its_busy_siblings_is_degraded() {
    let reason = odd_one(30, ContactSupport, |gpu| gpu.temperature = Sampled::Value(82));
    testing::snapshot!(
        "reasons",
        "device_beside: a busy gpu that is hotter than its busy siblings is degraded",
        reason
    );
    // The position in the airflow.
    silent(|gpus| gpus[0].temperature = Sampled::Value(75));
    silent(|gpus| gpus.iter_mut().for_each(|gpu| gpu.temperature = Sampled::Value(85)));
    silent(|gpus| {
        gpus[0].temperature = Sampled::Value(82);
        gpus[1..].iter_mut().for_each(|gpu| gpu.utilization = Sampled::Value(1));
    });
}

#[test]
fn a_pcie_link_with_a_lower_maximum_than_all_siblings_is_degraded() {
    let link = |generation, width| {
        let link = Sampled::Value(PcieLink { generation, width });
        move |gpu: &mut GpuReading| (gpu.pcie, gpu.pcie_max) = (link.clone(), link.clone())
    };
    let reason = odd_one(30, ContactSupport, link(5, 8));
    testing::snapshot!(
        "reasons",
        "device_beside: a pcie link with a lower maximum than all siblings is degraded",
        reason
    );
    odd_one(30, ContactSupport, link(3, 16));
    // Slots of two kinds.
    silent(|gpus| gpus[..4].iter_mut().for_each(link(4, 8)));
    // The library does not know the link.
    silent(|gpus| gpus[0].pcie_max = Sampled::Value(PcieLink { generation: 0, width: 0 }));
}

#[test]
fn a_power_limit_below_that_of_all_siblings_is_reported() {
    let set =
        |limit| move |gpu: &mut GpuReading| gpu.details.as_mut().unwrap().power_limit = Sampled::Value(limit);
    let reason = odd_one(30, Nothing, set(400_000));
    testing::snapshot!(
        "reasons",
        "device_beside: a power limit below that of all siblings is reported",
        reason
    );
    silent(|gpus| gpus.iter_mut().for_each(set(400_000)));
    silent(|gpus| set(690_000)(&mut gpus[0]));
}

fn reaches(gpus: &mut [GpuReading], one: usize, other: usize, status: u32) {
    for (own, peer) in [(one, other), (other, one)] {
        let details = gpus[own].details.as_mut().unwrap();
        let peer = address(u32::try_from(peer).unwrap());
        details.peers.retain(|access| access.peer != peer);
        details.peers.push(PeerAccess { peer, status });
    }
}

#[test]
fn a_gpu_that_no_longer_reaches_its_peers_is_unhealthy_and_its_peers_are_not() {
    let mut host = Host::new();
    host.poll_times(3);
    (1..8).for_each(|peer| reaches(&mut host.gpus, 0, peer, 5));
    host.poll();
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    testing::snapshot!(
        "reasons",
        "device_beside: a gpu that no longer reaches its peers is unhealthy and its peers are not",
        reason
    );
    host.expect(SECOND, Healthy, Nothing);
    let component = host.find(FIRST).unwrap();
    testing::snapshot!(
        "reasons",
        "device_beside: reached peers before",
        component.evidence[0].before.as_deref().unwrap()
    );
    (1..8).for_each(|peer| reaches(&mut host.gpus, 0, peer, 0));
    host.poll();
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn one_failed_pair_of_peers_makes_both_gpus_unhealthy() {
    let mut host = Host::new();
    host.poll_times(3);
    reaches(&mut host.gpus, 0, 1, 5);
    host.poll();
    host.expect(FIRST, Unhealthy, RebootNode);
    host.expect(SECOND, Unhealthy, RebootNode);
    host.expect("gpu.0000:03:00", Healthy, Nothing);
}

#[test]
fn peers_that_were_never_reached_or_are_switched_off_are_no_fault() {
    // Cards without NVLink.
    let mut host = Host::new();
    for own in 0..8 {
        (0..own).for_each(|peer| reaches(&mut host.gpus, own, peer, 5));
    }
    host.poll_times(20);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    for status in [4, 6] {
        silent(|gpus| (1..8).for_each(|peer| reaches(gpus, 0, peer, status)));
    }
}

#[test]
fn unreachable_peers_are_not_reported_for_a_gpu_with_a_more_specific_fault() {
    let mut host = Host::new();
    host.poll_times(3);
    (1..8).for_each(|peer| reaches(&mut host.gpus, 0, peer, 5));
    host.first().trouble = Some(GpuTrouble::Lost);
    host.poll();
    assert_eq!(host.not_healthy().len(), 1);
    testing::snapshot!("reasons", "device_beside: a lost gpu", host.find(FIRST).unwrap().reason);
    let mut host = Host::new();
    host.poll_times(3);
    (1..8).for_each(|peer| reaches(&mut host.gpus, 0, peer, 5));
    host.first().nvlinks[3].up = Sampled::Value(false);
    host.poll();
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    testing::snapshot!(
        "reasons",
        "device_beside: unreachable peers are not reported for a gpu with a more specific fault",
        reason
    );
}

#[test]
fn peers_are_remembered_across_restarts() {
    let mut host = Host::new();
    host.poll_times(3);
    let mut after = Host::new();
    for fact in &host.facts {
        if let Fact::Observed(observation) = fact {
            after.judge.recall(observation);
        }
    }
    (1..8).for_each(|peer| reaches(&mut after.gpus, 0, peer, 5));
    after.poll();
    after.expect(FIRST, Unhealthy, RebootNode);
}

fn opinion(state: HealthState, action: RecommendedAction, checks: &[&str]) -> Opinion {
    Opinion {
        state,
        action,
        reason: "memory error (DCGM 4)".into(),
        evidence: Evidence::new("DCGM error 4", "1 volatile double-bit ECC error"),
        checks: checks.iter().map(|check| (*check).to_owned()).collect(),
    }
}

fn give_opinion(host: &mut Host, opinion: Opinion) {
    host.judge.second_opinions(BTreeMap::from([(address(0), vec![opinion])]));
}

#[test]
fn a_second_opinion_that_our_reading_contradicts_is_only_evidence() {
    let mut host = Host::new();
    host.poll();
    give_opinion(&mut host, opinion(Unhealthy, ResetDevice, &["ecc_uncorrected"]));
    host.expect(FIRST, Healthy, Nothing);
    let evidence = host.find(FIRST).unwrap().evidence;
    assert!(evidence.iter().any(|evidence| evidence.source == "DCGM error 4"), "{evidence:?}");
}

#[test]
fn a_fault_that_both_sources_report_is_shown_once() {
    let mut host = Host::new();
    host.poll();
    host.first().ecc_volatile = Sampled::Value(1);
    host.poll();
    give_opinion(&mut host, opinion(Unhealthy, ResetDevice, &["ecc_uncorrected"]));
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    testing::snapshot!("reasons", "device_beside: a fault that both sources report is shown once", reason);
    assert!((host.find(FIRST).unwrap().confidence - 1.0).abs() < f64::EPSILON);
}

#[test]
fn a_second_opinion_counts_where_we_have_no_reading_of_our_own() {
    for (name, opinion) in [
        ("of no check", opinion(Degraded, ContactSupport, &[])),
        ("not read", opinion(Degraded, ContactSupport, &["pages_retired"])),
    ] {
        let mut host = Host::new();
        host.poll();
        give_opinion(&mut host, opinion);
        let reason = host.expect(FIRST, Degraded, ContactSupport);
        assert_eq!(reason, "memory error (DCGM 4)", "{name}");
        let sure = host.find(FIRST).unwrap().confidence;
        assert!((sure - 0.7).abs() < f64::EPSILON, "{name}: {sure}");
        host.judge.second_opinions(BTreeMap::new());
        host.expect(FIRST, Healthy, Nothing);
    }
    // A GPU without any reading.
    let mut host = Host::new();
    give_opinion(&mut host, opinion(Unhealthy, ReplaceNode, &["row_remap_failed"]));
    host.expect(FIRST, Unhealthy, ReplaceNode);
    // An opinion that is no worse than our own finding adds nothing.
    let mut host = Host::new();
    host.first().trouble = Some(GpuTrouble::Lost);
    host.poll();
    give_opinion(&mut host, opinion(Unhealthy, RebootNode, &[]));
    testing::snapshot!(
        "reasons",
        "device_beside: a second opinion counts where we have no reading of our own",
        host.expect(FIRST, Unhealthy, RebootNode)
    );
}

#[test]
fn evidence_shows_the_earlier_value_as_long_as_the_fault_lasts() {
    let mut host = Host::new();
    host.poll_times(3);
    host.first().ecc_volatile = Sampled::Value(2);
    host.first().remapped =
        Sampled::Value(RemappedRows { corrected: 1, uncorrected: 3, pending: true, failed: false });
    host.poll_times(5);
    let component = host.find(FIRST).unwrap();
    let evidence_of = |source: &str| {
        let found = component.evidence.iter().find(|evidence| evidence.source == source);
        let found = found.unwrap_or_else(|| panic!("no {source}: {:?}", component.evidence));
        (found.before.clone(), found.reading.clone(), found.limit.clone())
    };
    let expected = |before: &str, reading: &str, limit: &str| {
        (Some(before.to_owned()), reading.to_owned(), Some(limit.to_owned()))
    };
    assert_eq!(evidence_of("NVML uncorrected ECC errors, volatile"), expected("0", "2", "0"));
    assert_eq!(evidence_of("NVML row remapping pending"), expected("no", "yes", "no"));
    host.first().nvlinks[3].up = Sampled::Value(false);
    host.poll_times(2);
    let link = host.find(LINK).unwrap();
    assert_eq!(link.evidence[0].before.as_deref(), Some("up"));
}

#[test]
fn a_fault_at_the_first_reading_has_no_earlier_value() {
    let mut host = Host::new();
    host.first().ecc_volatile = Sampled::Value(2);
    host.poll();
    let component = host.find(FIRST).unwrap();
    assert_eq!(component.evidence[0].before, None, "{:?}", component.evidence);
}

#[test]
fn calls_that_hang_for_one_gpu_do_not_affect_the_others() {
    let mut host = Host::new();
    host.poll_times(3);
    let since = host.now;
    host.first().trouble = Some(GpuTrouble::Hangs(since));
    host.poll();
    host.expect(FIRST, Unknown, Nothing);
    host.expect(SECOND, Healthy, Nothing);
    host.poll_after(60);
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    testing::snapshot!(
        "reasons",
        "device_beside: calls that hang for one gpu do not affect the others",
        reason
    );
    host.expect(SECOND, Healthy, Nothing);
    host.expect("gpu.driver", Healthy, Nothing);
    host.first().trouble = None;
    host.poll_times(3);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_gpu_that_the_driver_cannot_open_is_first_unknown_and_then_unhealthy() {
    let refused = GpuTrouble::Unopened("an unknown error".into());
    let mut host = Host::new();
    host.poll_times(3);
    host.first().trouble = Some(refused);
    host.poll_times(2);
    host.expect(FIRST, Unknown, Nothing);
    host.poll();
    host.expect(FIRST, Unhealthy, RebootNode);
    for (trouble, action) in [(GpuTrouble::NoPower, ContactSupport), (GpuTrouble::NoInterrupts, RebootNode)] {
        let mut host = Host::new();
        host.first().trouble = Some(trouble);
        host.poll();
        host.expect(FIRST, Unhealthy, action);
    }
    // Other failures leave it unknown, however long they last.
    let mut host = Host::new();
    host.first().trouble = Some(GpuTrouble::Other("the operation timed out".into()));
    host.poll_times(50);
    host.expect(FIRST, Unknown, Nothing);
}

#[test]
fn a_gpu_without_an_identity_is_unknown_unless_it_is_lost_or_needs_a_reset() {
    for (trouble, state, action) in [
        (GpuTrouble::Lost, Unhealthy, RebootNode),
        (GpuTrouble::ResetRequired, Unhealthy, ResetDevice),
        (GpuTrouble::Other("no address".into()), Unknown, Nothing),
        (GpuTrouble::NoPermission, Unknown, Nothing),
    ] {
        let mut host = Host::new();
        host.first().identity = None;
        host.first().trouble = Some(trouble);
        host.poll();
        host.expect("gpu.driver", state, action);
    }
}

#[test]
fn a_gpu_without_any_reading_is_unknown() {
    let mut host = Host::new();
    let identity = host.first().identity.clone();
    *host.first() = GpuReading { identity, ..GpuReading::default() };
    host.poll();
    host.expect(FIRST, Unknown, Nothing);
    host.expect(SECOND, Healthy, Nothing);
    // One reading is enough.
    host.first().temperature = Sampled::Value(40);
    host.poll();
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_driver_that_reports_no_gpu_is_unknown() {
    let mut host = Host::new();
    host.gpus.clear();
    host.poll();
    host.expect("gpu.driver", Unknown, Nothing);
}

#[test]
fn a_gpu_that_only_the_kernel_lists_is_missing() {
    let mut host = Host::new();
    host.bound = (0..8).map(address).collect();
    host.poll();
    host.expect("gpu.driver", Healthy, Nothing);
    host.gpus.pop();
    let mut fresh = Host::new();
    fresh.gpus.pop();
    fresh.bound = host.bound.clone();
    fresh.poll();
    let reason = fresh.expect("gpu.driver", Unhealthy, RebootNode);
    testing::snapshot!("reasons", "device_beside: a gpu that only the kernel lists is missing", reason);
    // A list without any common GPU belongs to another host.
    let mut other = Host::new();
    other.bound = vec![PciAddress { domain: 1, bus: 7, device: 0 }];
    other.poll();
    other.expect("gpu.driver", Healthy, Nothing);
}

#[test]
fn readings_that_fail_by_design_on_a_split_gpu_are_no_fault() {
    let mut host = Host::new();
    host.poll_times(3);
    host.first().mig = Sampled::Value(true);
    host.first().remapped = Sampled::Failed("in use".into());
    host.first().ecc_volatile = Sampled::Failed("an unknown error".into());
    host.first().nvlinks.iter_mut().for_each(|link| link.up = Sampled::Failed("an unknown error".into()));
    host.poll_times(5);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    host.first().mig = Sampled::Value(false);
    host.poll();
    host.expect(FIRST, Unknown, Nothing);
}

#[test]
fn a_link_that_is_no_longer_reported_is_unknown_and_not_down() {
    let mut host = Host::new();
    host.poll_times(3);
    host.first().nvlinks.remove(3);
    host.poll();
    host.expect(FIRST, Unknown, Nothing);
    host.expect(LINK, Unknown, Nothing);
    host.first().nvlinks = gpu(0).nvlinks;
    host.poll_times(3);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    // If the number of links is configured, the link is missing.
    let mut fresh =
        Host::with(DeviceLimits::default(), ExpectedGpus { nvlinks: 18, ..ExpectedGpus::default() });
    fresh.first().nvlinks.remove(3);
    fresh.poll();
    fresh.expect(FIRST, Unhealthy, ResetDevice);
}

#[test]
fn a_link_that_recovers_often_is_degraded_and_one_that_does_rarely_is_not() {
    let run = |per_minute: u64| {
        let mut host = Host::new();
        for minute in 0..10 {
            host.details().links[3].recovered = Some(3 + minute * per_minute);
            host.poll_after(60);
        }
        host
    };
    run(10).expect(LINK, Degraded, ResetDevice);
    assert_eq!(run(1).not_healthy(), Vec::<String>::new());
}

#[test]
fn informational_readings_are_evidence_and_no_finding() {
    let mut host = Host::new();
    host.details().gsp = Sampled::Value(false);
    host.poll_times(20);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    let evidence = host.find(FIRST).unwrap().evidence;
    assert!(
        evidence.iter().any(|evidence| evidence.source == "NVML GSP firmware" && evidence.reading == "off"),
        "{evidence:?}"
    );
}
