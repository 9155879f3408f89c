//! The GPU judge on readings of the driver: rules, each with the opposite case, which must cause no finding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::gpu::{
    DeviceLimits, EccCount, EccPlace, ExpectedGpus, FabricInfo, GpuReading, PcieLink, RemappedRows, Sampled,
    SlowdownTimes, SramErrors,
};
use mainstay_model::entry::Fact;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::observation::Observation;
use mainstay_model::time::Mono;
use support::gpus::{FIRST, Host, LINK, SECOND, gpu};

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{
    ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice, RestartProcess,
};

/// Checks that a change of the first GPU causes this state after `poll_times` readings and none before, and that it is over
/// some time after the change is undone. Returns the reason.
#[track_caller]
fn check(
    poll_times: u32,
    state: HealthState,
    action: RecommendedAction,
    change: impl Fn(&mut GpuReading),
) -> String {
    let mut host = Host::new();
    host.poll_times(3);
    change(host.first());
    for _ in 1..poll_times {
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new(), "reported too soon");
    }
    host.poll();
    let reason = host.expect(FIRST, state, action);
    host.expect(SECOND, Healthy, Nothing);
    host.poll_times(20);
    host.expect(FIRST, state, action);
    host.gpus[0] = gpu(0);
    host.poll();
    host.expect(FIRST, state, action);
    host.poll_times(100);
    assert_eq!(host.not_healthy(), Vec::<String>::new(), "the finding stays");
    reason
}

#[track_caller]
fn silent(change: impl Fn(&mut GpuReading)) {
    silent_with(DeviceLimits::default(), change);
}

#[track_caller]
fn silent_with(limits: DeviceLimits, change: impl Fn(&mut GpuReading)) {
    let mut host = Host::with(limits, ExpectedGpus::default());
    host.poll_times(3);
    change(host.first());
    for _ in 0..60 {
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

/// Checks that a reading that a GPU never offered is no fault.
#[track_caller]
fn never_offered(change: impl Fn(&mut GpuReading)) {
    let mut host = Host::new();
    change(host.first());
    host.poll_times(60);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_reading_that_is_no_longer_offered_is_unknown_and_clears_no_fault() {
    never_offered(|gpu| (gpu.ecc_volatile, gpu.remapped) = (Sampled::NotOffered, Sampled::NotOffered));
    let mut host = Host::new();
    host.poll_times(3);
    host.first().remapped = Sampled::NotOffered;
    host.poll();
    host.expect(FIRST, Unknown, Nothing);
    host.gpus[0] = gpu(0);
    host.first().recovery_action = Sampled::Value(1);
    host.poll();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.first().recovery_action = Sampled::NotOffered;
    host.poll_times(20);
    host.expect(FIRST, Unhealthy, ResetDevice);
    // On a split GPU (MIG), or with ECC off, this is by design.
    host.gpus[0] = gpu(0);
    host.poll_times(10);
    host.first().mig = Sampled::Value(true);
    host.first().remapped = Sampled::NotOffered;
    host.poll();
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn healthy_gpus_stay_healthy_for_a_day() {
    let mut host = Host::new();
    (0..1440).for_each(|_| host.poll_after(60));
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    assert_eq!(host.events(), vec!["gpu_learned"; 8]);
}

#[test]
fn uncorrected_memory_errors_need_a_reset() {
    let reason = check(1, Unhealthy, ResetDevice, |gpu| gpu.ecc_volatile = Sampled::Value(2));
    testing::snapshot!("reasons", "device_readings: uncorrected memory errors need a reset", reason);
    silent(|gpu| gpu.ecc_aggregate = Sampled::Value(900));
    // Some drivers count only by location, or count more there.
    check(1, Unhealthy, ResetDevice, |gpu| {
        let count = EccCount { place: EccPlace::Dram, corrected: false, lifetime: false, count: 1 };
        gpu.details.as_mut().unwrap().ecc.push(count);
    });
}

#[test]
fn sram_is_judged_by_the_threshold_of_the_driver() {
    check(1, Unhealthy, ReplaceNode, |gpu| {
        gpu.details.as_mut().unwrap().sram = Sampled::Value(SramErrors {
            uncorrected_lifetime: 9,
            threshold_exceeded: true,
            ..SramErrors::default()
        });
    });
    silent(|gpu| {
        gpu.details.as_mut().unwrap().sram = Sampled::Value(SramErrors {
            uncorrected_lifetime: 9,
            corrected: 1_000_000,
            ..SramErrors::default()
        });
    });
}

#[test]
fn sram_errors_need_a_reset_or_a_replacement_if_there_were_many_before() {
    let errors = |uncorrected, uncorrected_lifetime| {
        move |gpu: &mut GpuReading| {
            let errors = SramErrors { uncorrected, uncorrected_lifetime, ..SramErrors::default() };
            gpu.details.as_mut().unwrap().sram = Sampled::Value(errors);
        }
    };
    check(1, Unhealthy, ResetDevice, errors(1, 4));
    let reason = check(1, Unhealthy, ReplaceNode, errors(1, 5));
    testing::snapshot!(
        "reasons",
        "device_readings: sram errors need a reset or a replacement if there were many before",
        reason
    );
    silent(errors(0, 500));
}

#[test]
fn a_reading_that_keeps_failing_is_reported() {
    let failed = "an unknown error".to_owned();
    let reason = check(3, Degraded, ContactSupport, |gpu| gpu.power = Sampled::Failed(failed.clone()));
    testing::snapshot!("reasons", "device_readings: a reading that keeps failing is reported", reason);
    let reason = check(3, Degraded, Nothing, |gpu| gpu.processes = Sampled::Failed(failed.clone()));
    testing::snapshot!("reasons", "device_readings: a reading that keeps failing is reported 2", reason);
    silent(|gpu| (gpu.power, gpu.processes) = (Sampled::NotOffered, Sampled::NotOffered));
    // By design on a split GPU (MIG), or only in every second reading.
    silent(|gpu| {
        gpu.mig = Sampled::Value(true);
        (gpu.power, gpu.processes) = (Sampled::Failed(failed.clone()), Sampled::Failed(failed.clone()));
    });
    let mut host = Host::new();
    for poll in 0..60 {
        host.first().power = if poll % 2 == 0 { Sampled::Failed(failed.clone()) } else { Sampled::Value(1) };
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

#[test]
fn pending_row_remaps_need_a_reset_and_failed_ones_a_replacement() {
    let rows = |pending, failed, uncorrected| {
        Sampled::Value(RemappedRows { corrected: 0, uncorrected, pending, failed })
    };
    check(1, Degraded, ResetDevice, |gpu| gpu.remapped = rows(true, false, 1));
    check(1, Unhealthy, ReplaceNode, |gpu| gpu.remapped = rows(false, true, 1));
    check(1, Degraded, ContactSupport, |gpu| gpu.remapped = rows(false, false, 512));
    silent(|gpu| gpu.remapped = rows(false, false, 511));
    check(1, Unhealthy, ReplaceNode, |gpu| gpu.unrepairable = Sampled::Value(true));
}

#[test]
fn retired_pages_of_older_gpus_are_counted() {
    check(1, Degraded, ResetDevice, |gpu| gpu.pages_pending = Sampled::Value(true));
    never_offered(|gpu| gpu.pages_pending = Sampled::NotOffered);
    let retired = |count| {
        move |gpu: &mut GpuReading| gpu.details.as_mut().unwrap().pages_retired = Sampled::Value((1, count))
    };
    check(1, Degraded, ReplaceNode, retired(62));
    silent(retired(10));
}

#[test]
fn corrected_errors_are_judged_by_their_rate() {
    let mut host = Host::new();
    host.first().ecc_corrected = Sampled::Value(70_000_000);
    host.poll_times(3);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    for step in 1..=3 {
        host.first().ecc_corrected = Sampled::Value(70_000_000 + step * 600_000);
        host.poll();
    }
    host.expect(FIRST, Degraded, Nothing);
    host.poll_times(400);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    host.first().ecc_corrected = Sampled::Value(0);
    host.poll_times(3);
    assert_eq!(host.not_healthy(), Vec::<String>::new(), "the counter started again");
}

#[test]
fn the_recovery_action_of_the_driver_counts() {
    for (number, state, action) in [
        (1, Unhealthy, ResetDevice),
        (2, Unhealthy, RebootNode),
        (3, Degraded, RestartProcess),
        (4, Degraded, ResetDevice),
        (5, Degraded, ContactSupport),
        (6, Unhealthy, ResetDevice),
        (7, Unhealthy, RebootNode),
        (8, Degraded, ContactSupport),
    ] {
        check(1, state, action, |gpu| gpu.recovery_action = Sampled::Value(number));
    }
    silent(|gpu| gpu.recovery_action = Sampled::Value(0));
    silent(|gpu| gpu.recovery_action = Sampled::NotOffered);
}

#[test]
fn a_temperature_above_the_limit_counts_if_it_lasts() {
    check(3, Degraded, ContactSupport, |gpu| gpu.temperature = Sampled::Value(90));
    check(3, Degraded, ContactSupport, |gpu| gpu.memory_temperature = Sampled::Value(99));
    // The comparison with siblings has its own test.
    let alone = DeviceLimits { sibling_heat: 100, ..DeviceLimits::default() };
    silent_with(alone.clone(), |gpu| gpu.temperature = Sampled::Value(87));
    // Without a limit of the GPU no temperature is too high.
    silent_with(alone, |gpu| {
        gpu.temperature = Sampled::Value(99);
        gpu.details.as_mut().unwrap().hottest = Sampled::NotOffered;
    });
    // Some healthy boards report a margin of 0 or less.
    silent(|gpu| gpu.margin = Sampled::Value(-5));
    let mut host =
        Host::with(DeviceLimits { judge_margin: true, ..DeviceLimits::default() }, ExpectedGpus::default());
    host.first().margin = Sampled::Value(-5);
    host.poll_times(3);
    host.expect(FIRST, Degraded, ContactSupport);
}

#[test]
fn fewer_than_three_hot_readings_in_a_row_do_not_count() {
    let mut host = Host::new();
    for round in 0..30 {
        host.first().temperature = Sampled::Value(if round % 3 == 0 { 60 } else { 95 });
        host.poll();
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

#[test]
fn a_gpu_slowed_down_by_heat_or_power_for_six_minutes_is_degraded() {
    let mut host = Host::new();
    host.poll();
    for (reason, not_healthy) in [(0x40, true), (0x8, true), (0x4, false), (0x1, false), (0x20, false)] {
        let mut host = Host::new();
        for minute in 1..=7 {
            host.first().clock_reasons = Sampled::Value(reason);
            host.poll_after(60);
            assert_eq!(
                !host.not_healthy().is_empty(),
                not_healthy && minute >= 6,
                "{reason:#x} after {minute} minutes"
            );
        }
        host.first().clock_reasons = Sampled::Value(4);
        (0..10).for_each(|_| host.poll_after(60));
        assert_eq!(host.not_healthy(), Vec::<String>::new(), "{reason:#x}");
    }
}

#[test]
fn slowdown_counters_include_the_time_between_readings() {
    let check = |per_minute: u64, not_healthy: bool| {
        let mut host = Host::new();
        for minute in 1..=12 {
            let thermal = 5_000_000_000 + minute * per_minute;
            host.first().slowdown = Sampled::Value(SlowdownTimes { thermal, brake: 0 });
            host.poll_after(60);
        }
        assert_eq!(!host.not_healthy().is_empty(), not_healthy, "{per_minute} ns a minute");
    };
    check(6_000_000_000, true);
    check(1_000_000, false);
    check(0, false);
}

#[test]
fn a_power_brake_on_one_gpu_counts_for_it_and_on_several_for_gpu_power() {
    let mut host = Host::new();
    host.poll();
    for _ in 0..7 {
        host.first().clock_reasons = Sampled::Value(0x88);
        host.poll_after(60);
    }
    let reason = host.expect(FIRST, Degraded, ContactSupport);
    testing::snapshot!(
        "reasons",
        "device_readings: a power brake on one gpu counts for it and on several for gpu power",
        reason
    );
    assert_eq!(host.find("gpu.power"), None);
    for _ in 0..7 {
        host.gpus[1].clock_reasons = Sampled::Value(0x88);
        host.poll_after(60);
    }
    host.expect("gpu.power", Degraded, ContactSupport);
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
    host.gpus = (0..8).map(gpu).collect();
    (0..12).for_each(|_| host.poll_after(60));
    host.expect("gpu.power", Healthy, Nothing);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_pcie_link_is_compared_with_its_maximum_only_under_load() {
    let narrow = Sampled::Value(PcieLink { generation: 5, width: 8 });
    let reason = check(3, Degraded, ContactSupport, |gpu| gpu.pcie = narrow.clone());
    testing::snapshot!(
        "reasons",
        "device_readings: a pcie link is compared with its maximum only under load",
        reason
    );
    check(3, Degraded, ContactSupport, |gpu| {
        gpu.pcie = Sampled::Value(PcieLink { generation: 3, width: 16 })
    });
    silent(|gpu| {
        gpu.pcie = Sampled::Value(PcieLink { generation: 1, width: 8 });
        gpu.utilization = Sampled::Value(3);
    });
    silent(|gpu| gpu.pcie = Sampled::Value(PcieLink { generation: 0, width: 0 }));
    silent(|gpu| {
        gpu.pcie = narrow.clone();
        gpu.utilization = Sampled::Value(49);
    });
}

#[test]
fn pcie_replays_are_judged_by_generation_and_lanes() {
    // Generation 5 with 16 lanes: 31 a minute are normal.
    let check = |per_minute: u32, not_healthy: bool| {
        let mut host = Host::new();
        for minute in 1..=10 {
            host.first().pcie_replays = Sampled::Value(7 + minute * per_minute);
            host.poll_after(60);
        }
        assert_eq!(!host.not_healthy().is_empty(), not_healthy, "{per_minute} a minute");
    };
    check(40, true);
    check(30, false);
    // The normal rate grows with the generation, up to 6, and with the lanes.
    let of_link = |generation, width, per_minute: u32| {
        let mut host = Host::new();
        let link = Sampled::Value(PcieLink { generation, width });
        host.gpus.iter_mut().for_each(|gpu| (gpu.pcie, gpu.pcie_max) = (link.clone(), link.clone()));
        for minute in 1..=10 {
            host.first().pcie_replays = Sampled::Value(7 + minute * per_minute);
            host.poll_after(60);
        }
        !host.not_healthy().is_empty()
    };
    for (generation, width, normal) in
        [(1, 16, 3), (2, 16, 5), (3, 16, 8), (4, 16, 16), (5, 16, 31), (6, 16, 62), (4, 8, 8), (7, 16, 62)]
    {
        assert!(of_link(generation, width, normal + 1), "generation {generation}, {width} lanes: too many");
        assert!(
            !of_link(generation, width, normal),
            "generation {generation}, {width} lanes: {normal} are normal"
        );
    }
    // A single burst.
    silent(|gpu| gpu.pcie_replays = Sampled::Value(100_000));
}

#[test]
fn links_may_train_for_some_minutes_after_a_boot() {
    let mut host =
        Host::with(DeviceLimits::default(), ExpectedGpus { nvlinks: 18, ..ExpectedGpus::default() });
    host.now = Mono(60_000_000_000);
    host.first().nvlinks[3].up = Sampled::Value(false);
    host.poll_times(5);
    host.expect(FIRST, Unknown, Nothing);
    // It lasts.
    host.now = Mono(300_000_000_000);
    host.poll();
    host.expect(FIRST, Unhealthy, ResetDevice);

    let mut trained =
        Host::with(DeviceLimits::default(), ExpectedGpus { nvlinks: 18, ..ExpectedGpus::default() });
    trained.now = Mono(60_000_000_000);
    trained.first().nvlinks[3].up = Sampled::Value(false);
    trained.poll();
    trained.first().nvlinks[3].up = Sampled::Value(true);
    trained.poll_times(3);
    assert_eq!(trained.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_link_that_was_up_in_several_readings_is_expected() {
    let mut host = Host::new();
    host.poll_times(3);
    host.first().nvlinks[3].up = Sampled::Value(false);
    host.poll();
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    testing::snapshot!(
        "reasons",
        "device_readings: a link that was up in several readings is expected",
        reason
    );
    host.expect(LINK, Unhealthy, ResetDevice);
    let others =
        host.judge.components(host.now).into_iter().filter(|component| component.name.starts_with("nvlink."));
    assert_eq!(others.count(), 1);
    host.first().nvlinks[3].up = Sampled::Value(true);
    host.poll_times(2);
    host.expect(LINK, Unhealthy, ResetDevice);
    host.poll();
    host.expect(LINK, Healthy, Nothing);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn links_that_a_board_never_had_are_not_missing() {
    let never = |gpu: &mut GpuReading| gpu.nvlinks = Vec::new();
    for change in [never, |gpu: &mut GpuReading| {
        gpu.nvlinks.iter_mut().for_each(|link| link.up = Sampled::Value(false))
    }] {
        let mut host = Host::new();
        host.gpus.iter_mut().for_each(change);
        host.poll_times(50);
        assert_eq!(host.not_healthy(), Vec::<String>::new());
    }
}

#[test]
fn links_of_a_split_gpu_and_unreadable_links_are_not_down() {
    silent(|gpu| {
        gpu.mig = Sampled::Value(true);
        gpu.nvlinks.iter_mut().for_each(|link| link.up = Sampled::Value(false));
    });
    let mut host = Host::new();
    host.poll_times(3);
    host.first().nvlinks[3].up = Sampled::Failed("an internal driver error occurred".into());
    host.poll();
    let reason = host.expect(FIRST, Unknown, Nothing);
    testing::snapshot!(
        "reasons",
        "device_readings: links of a split gpu and unreadable links are not down",
        reason
    );
    assert_eq!(host.find(LINK), None);
}

#[test]
fn expected_links_are_remembered_across_restarts() {
    let mut host = Host::new();
    host.poll_times(3);
    let learned: Vec<Observation> = host
        .facts
        .iter()
        .filter_map(|fact| match fact {
            Fact::Observed(observation) => Some(observation.clone()),
            _ => None,
        })
        .collect();
    let mut after = Host::new();
    learned.iter().for_each(|observation| after.judge.recall(observation));
    assert_eq!(after.judge.components(after.now), [], "no component before the first reading");
    after.first().nvlinks[3].up = Sampled::Value(false);
    after.gpus.pop();
    after.poll();
    after.expect(FIRST, Unhealthy, ResetDevice);
    after.expect("gpu.0000:08:00", Unhealthy, RebootNode);
    assert_eq!(after.facts.len(), 2, "{:?}", after.facts);

    // For another board in the same slot nothing is remembered.
    let mut repaired = Host::new();
    learned.iter().for_each(|observation| repaired.judge.recall(observation));
    repaired.first().identity.as_mut().unwrap().uuid = "GPU-new".into();
    repaired.first().nvlinks[3].up = Sampled::Value(false);
    repaired.poll_times(10);
    assert_eq!(repaired.not_healthy(), Vec::<String>::new());
}

#[test]
fn link_errors_are_judged_by_their_growth() {
    let run = |per_minute: u64, minutes: u64| {
        let mut host = Host::new();
        for minute in 0..=minutes {
            host.details().links[3].replays = Some(1_000_000 + minute * per_minute);
            host.poll_after(60);
        }
        host
    };
    // NVLink 5 has a separate counter of damaged packets.
    let fifth = |per_minute: u64| {
        let mut host = Host::new();
        for minute in 0..=5 {
            let link = &mut host.details().links[3];
            (link.replays, link.crc, link.recoveries) = (None, None, None);
            link.damaged_packets = Some(70_000 + minute * per_minute);
            host.poll_after(60);
        }
        host
    };
    fifth(200).expect(LINK, Degraded, ResetDevice);
    assert_eq!(fifth(20).not_healthy(), Vec::<String>::new());
    let mut host = run(200, 5);
    let reason = host.expect(LINK, Degraded, ResetDevice);
    testing::snapshot!("reasons", "device_readings: link errors are judged by their growth", reason);
    host.expect(FIRST, Degraded, ResetDevice);
    assert_eq!(run(10, 20).not_healthy(), Vec::<String>::new());
    // A jump in a single reading, and errors that stopped.
    silent(|gpu| gpu.details.as_mut().unwrap().links[3].crc = Some(143_746));
    (0..10).for_each(|_| host.poll_after(60));
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn failed_recoveries_and_error_rates_count_for_the_link() {
    let mut host = Host::new();
    host.poll_times(3);
    host.details().links[3].recovery_failed = Some(2);
    host.poll();
    host.expect(LINK, Unhealthy, ResetDevice);
    (0..80).for_each(|_| host.poll_after(60));
    assert_eq!(host.not_healthy(), Vec::<String>::new(), "an old failure no longer counts");
    check(3, Degraded, ContactSupport, |gpu| {
        gpu.details.as_mut().unwrap().links[3].effective_ber = Some(1e-9)
    });
    silent(|gpu| gpu.details.as_mut().unwrap().links[3].effective_ber = Some(1e-13));
    // The symbol error rate counts like the bit error rate. The lowest value that can be reported is no error.
    check(3, Degraded, ContactSupport, |gpu| gpu.details.as_mut().unwrap().links[3].symbol_ber = Some(3e-11));
    silent(|gpu| gpu.details.as_mut().unwrap().links[3].symbol_ber = Some(1.5e-254));
}

#[test]
fn the_fabric_has_a_grace_period_after_a_boot_and_then_its_health_counts() {
    let waiting = FabricInfo { state: 2, status: 0, health_mask: 0, health_summary: 0 };
    let mut host = Host::new();
    host.now = Mono(0);
    host.gpus.iter_mut().for_each(|gpu| gpu.fabric = Sampled::Value(waiting));
    host.poll_times(29);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    host.poll_times(4);
    host.expect(FIRST, Degraded, RebootNode);

    let failed = FabricInfo { state: 3, status: 999, health_mask: 0, health_summary: 0 };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = Sampled::Value(failed));
    let bad_routes = FabricInfo { state: 3, status: 0, health_mask: 0x1a, health_summary: 1 };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = Sampled::Value(bad_routes));
    // Two bits for each part of the fabric's health: 1 is bad, 2 is good, 0 is not reported. Four bits report a wrong
    // configuration: 1 is none.
    for (shift, state, action) in
        [(0, Degraded, Nothing), (2, Degraded, Nothing), (4, Unhealthy, ResetDevice), (6, Degraded, Nothing)]
    {
        let with = |bits: u32| {
            Sampled::Value(FabricInfo { state: 3, status: 0, health_mask: bits << shift, health_summary: 0 })
        };
        let reason = check(3, state, action, |gpu| gpu.fabric = with(1));
        testing::snapshot!("reasons", format!("device_readings: health of the fabric, bit {shift}"), reason);
        silent(|gpu| gpu.fabric = with(2));
    }
    let configured = |how: u32| {
        Sampled::Value(FabricInfo { state: 3, status: 0, health_mask: how << 8, health_summary: 0 })
    };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = configured(2));
    silent(|gpu| gpu.fabric = configured(1));
    let not_healthy = FabricInfo { state: 3, status: 0, health_mask: 0, health_summary: 2 };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = Sampled::Value(not_healthy));
    let small = FabricInfo { state: 3, status: 0, health_mask: 0, health_summary: 3 };
    check(3, Degraded, Nothing, |gpu| gpu.fabric = Sampled::Value(small));
    silent(|gpu| {
        gpu.fabric = Sampled::Value(FabricInfo { state: 0, status: 3, health_mask: 0, health_summary: 0 })
    });
    silent(|gpu| gpu.fabric = Sampled::NotOffered);
    // A single GPU has no fabric.
    let mut alone = Host::new();
    alone.gpus.truncate(1);
    alone.first().fabric = Sampled::Value(waiting);
    alone.poll_times(50);
    assert_eq!(alone.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_pending_repair_needs_a_reset() {
    let pending = |channel, processors| {
        move |gpu: &mut GpuReading| {
            gpu.details.as_mut().unwrap().repairs = Sampled::Value((channel, processors))
        }
    };
    let reason = check(1, Degraded, ResetDevice, pending(true, false));
    testing::snapshot!("reasons", "device_readings: a pending repair needs a reset", reason);
    let reason = check(1, Degraded, ResetDevice, pending(false, true));
    testing::snapshot!("reasons", "device_readings: a pending repair needs a reset 2", reason);
    silent(pending(false, false));
    silent(|gpu| gpu.details.as_mut().unwrap().repairs = Sampled::Failed("an unknown error".into()));
}

#[test]
fn a_damaged_inforom_needs_support_and_persistence_mode_is_only_evidence() {
    check(1, Degraded, ContactSupport, |gpu| {
        gpu.details.as_mut().unwrap().inforom_valid = Sampled::Value(false)
    });
    silent(|gpu| gpu.details.as_mut().unwrap().persistence = Sampled::Value(false));
    let mut host = Host::new();
    host.details().persistence = Sampled::Value(false);
    host.poll();
    let evidence = host.find(FIRST).unwrap().evidence;
    assert!(evidence.iter().any(|evidence| evidence.source == "NVML persistence mode"), "{evidence:?}");
}
