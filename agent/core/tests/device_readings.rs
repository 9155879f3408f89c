//! The judge of GPUs over what the driver tells: sentences, each with the opposite case that must stay silent.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod support;

use mainstay_core::device::{
    DeviceLimits, DeviceReport, EccCount, EccPlace, ExpectedGpus, FabricInfo, GpuEvent, GpuReading,
    GpuTrouble, PcieLink, Read, RemappedRows, SlowdownTimes, SramErrors,
};
use mainstay_core::entry::Fact;
use mainstay_core::health::{HealthState, RecommendedAction};
use mainstay_core::observation::Observation;
use mainstay_core::parse::kmsg::Record;
use mainstay_core::parse::log::LogReader;
use mainstay_core::pci::PciAddress;
use mainstay_core::settings::Percent;
use mainstay_core::time::{Mono, Span};
use support::gpus::{FIRST, Host, LINK, SECOND, gpu};

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice};

/// What one change of the first GPU leads to after so many looks, that it is silent one look before, and that it is
/// over when it is taken back.
#[track_caller]
fn check(
    looks: u32,
    state: HealthState,
    action: RecommendedAction,
    change: impl Fn(&mut GpuReading),
) -> String {
    let mut host = Host::new();
    host.looks(3);
    change(host.first());
    for _ in 1..looks {
        host.look();
        assert_eq!(host.ill(), Vec::<String>::new(), "too soon");
    }
    host.look();
    let reason = host.expect(FIRST, state, action);
    host.expect(SECOND, Healthy, Nothing);
    host.looks(20);
    host.expect(FIRST, state, action);
    host.gpus[0] = gpu(0);
    host.look();
    host.expect(FIRST, state, action);
    host.looks(100);
    assert_eq!(host.ill(), Vec::<String>::new(), "it stays");
    reason
}

#[track_caller]
fn silent(change: impl Fn(&mut GpuReading)) {
    silent_with(DeviceLimits::default(), change);
}

#[track_caller]
fn silent_with(limits: DeviceLimits, change: impl Fn(&mut GpuReading)) {
    let mut host = Host::with(limits, ExpectedGpus::default());
    host.looks(3);
    change(host.first());
    for _ in 0..60 {
        host.look();
        assert_eq!(host.ill(), Vec::<String>::new());
    }
}

/// What a GPU never told is no fault of it.
#[track_caller]
fn never_offered(change: impl Fn(&mut GpuReading)) {
    let mut host = Host::new();
    change(host.first());
    host.looks(60);
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn what_was_told_and_is_not_any_more_is_unknown_and_no_fault_is_over_by_it() {
    never_offered(|gpu| (gpu.ecc_volatile, gpu.remapped) = (Read::NotOffered, Read::NotOffered));
    let mut host = Host::new();
    host.looks(3);
    host.first().remapped = Read::NotOffered;
    host.look();
    host.expect(FIRST, Unknown, Nothing);
    host.gpus[0] = gpu(0);
    host.first().recovery_action = Read::Value(1);
    host.look();
    host.expect(FIRST, Unhealthy, ResetDevice);
    host.first().recovery_action = Read::NotOffered;
    host.looks(20);
    host.expect(FIRST, Unhealthy, ResetDevice);
    // Where it is split, or without ECC, that is by design.
    host.gpus[0] = gpu(0);
    host.looks(10);
    host.first().mig = Read::Value(true);
    host.first().remapped = Read::NotOffered;
    host.look();
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn gpus_that_are_well_are_well_for_a_day() {
    let mut host = Host::new();
    (0..1440).for_each(|_| host.look_after(60));
    assert_eq!(host.ill(), Vec::<String>::new());
    assert_eq!(host.events(), vec!["gpu_learned"; 8]);
}

#[test]
fn memory_errors_that_could_not_be_corrected_ask_for_a_reset() {
    let reason = check(1, Unhealthy, ResetDevice, |gpu| gpu.ecc_volatile = Read::Value(2));
    assert_eq!(reason, "2 memory errors that could not be corrected since its last reset");
    silent(|gpu| gpu.ecc_aggregate = Read::Value(900));
    // Some drivers count by place alone, or know of more there.
    check(1, Unhealthy, ResetDevice, |gpu| {
        let count = EccCount { place: EccPlace::Dram, corrected: false, lifetime: false, count: 1 };
        gpu.details.as_mut().unwrap().ecc.push(count);
    });
}

#[test]
fn the_memory_on_the_chip_is_judged_by_the_drivers_threshold() {
    check(1, Unhealthy, ReplaceNode, |gpu| {
        gpu.details.as_mut().unwrap().sram = Read::Value(SramErrors {
            uncorrected_lifetime: 9,
            threshold_exceeded: true,
            ..SramErrors::default()
        });
    });
    silent(|gpu| {
        gpu.details.as_mut().unwrap().sram = Read::Value(SramErrors {
            uncorrected_lifetime: 9,
            corrected: 1_000_000,
            ..SramErrors::default()
        });
    });
}

#[test]
fn rows_that_wait_are_for_the_next_reset_and_rows_that_failed_for_replacement() {
    let rows = |pending, failed, uncorrected| {
        Read::Value(RemappedRows { corrected: 0, uncorrected, pending, failed })
    };
    check(1, Degraded, ResetDevice, |gpu| gpu.remapped = rows(true, false, 1));
    check(1, Unhealthy, ReplaceNode, |gpu| gpu.remapped = rows(false, true, 1));
    check(1, Degraded, ContactSupport, |gpu| gpu.remapped = rows(false, false, 512));
    silent(|gpu| gpu.remapped = rows(false, false, 511));
    check(1, Unhealthy, ReplaceNode, |gpu| gpu.unrepairable = Read::Value(true));
}

#[test]
fn pages_of_older_gpus_are_counted() {
    check(1, Degraded, ResetDevice, |gpu| gpu.pages_pending = Read::Value(true));
    never_offered(|gpu| gpu.pages_pending = Read::NotOffered);
    let retired = |count| {
        move |gpu: &mut GpuReading| gpu.details.as_mut().unwrap().pages_retired = Read::Value((1, count))
    };
    check(1, Degraded, ReplaceNode, retired(62));
    silent(retired(10));
}

#[test]
fn corrected_errors_are_judged_by_their_rate() {
    let mut host = Host::new();
    host.first().ecc_corrected = Read::Value(70_000_000);
    host.looks(3);
    assert_eq!(host.ill(), Vec::<String>::new());
    for step in 1..=3 {
        host.first().ecc_corrected = Read::Value(70_000_000 + step * 600_000);
        host.look();
    }
    host.expect(FIRST, Degraded, Nothing);
    host.looks(400);
    assert_eq!(host.ill(), Vec::<String>::new());
    host.first().ecc_corrected = Read::Value(0);
    host.looks(3);
    assert_eq!(host.ill(), Vec::<String>::new(), "it began anew");
}

#[test]
fn what_the_driver_says_it_needs_counts() {
    for (number, state, action) in
        [(1, Unhealthy, ResetDevice), (2, Unhealthy, RebootNode), (4, Degraded, ResetDevice)]
    {
        check(1, state, action, |gpu| gpu.recovery_action = Read::Value(number));
    }
    silent(|gpu| gpu.recovery_action = Read::NotOffered);
}

#[test]
fn heat_counts_when_it_stays() {
    check(3, Degraded, ContactSupport, |gpu| gpu.temperature = Read::Value(90));
    check(3, Degraded, ContactSupport, |gpu| gpu.memory_temperature = Read::Value(99));
    // Held against its siblings elsewhere.
    let alone = DeviceLimits { sibling_heat: 100, ..DeviceLimits::default() };
    silent_with(alone.clone(), |gpu| gpu.temperature = Read::Value(87));
    // Without a limit of its own nothing is too hot.
    silent_with(alone, |gpu| {
        gpu.temperature = Read::Value(99);
        gpu.details.as_mut().unwrap().hottest = Read::NotOffered;
    });
    // The margin of some boards is at or below 0 though they are well.
    silent(|gpu| gpu.margin = Read::Value(-5));
    let mut host =
        Host::with(DeviceLimits { judge_margin: true, ..DeviceLimits::default() }, ExpectedGpus::default());
    host.first().margin = Read::Value(-5);
    host.looks(3);
    host.expect(FIRST, Degraded, ContactSupport);
}

#[test]
fn one_hot_reading_is_none() {
    let mut host = Host::new();
    for round in 0..30 {
        host.first().temperature = Read::Value(if round % 3 == 0 { 60 } else { 95 });
        host.look();
        assert_eq!(host.ill(), Vec::<String>::new());
    }
}

#[test]
fn slowing_down_is_counted_in_minutes() {
    let mut host = Host::new();
    host.look();
    for (reason, ill) in [(0x40, true), (0x8, true), (0x4, false), (0x1, false), (0x20, false)] {
        let mut host = Host::new();
        for minute in 1..=7 {
            host.first().clock_reasons = Read::Value(reason);
            host.look_after(60);
            assert_eq!(!host.ill().is_empty(), ill && minute >= 6, "{reason:#x} after {minute} minutes");
        }
        host.first().clock_reasons = Read::Value(4);
        (0..10).for_each(|_| host.look_after(60));
        assert_eq!(host.ill(), Vec::<String>::new(), "{reason:#x}");
    }
}

#[test]
fn time_counters_miss_nothing_between_readings() {
    let check = |per_minute: u64, ill: bool| {
        let mut host = Host::new();
        for minute in 1..=12 {
            let thermal = 5_000_000_000 + minute * per_minute;
            host.first().slowdown = Read::Value(SlowdownTimes { thermal, brake: 0 });
            host.look_after(60);
        }
        assert_eq!(!host.ill().is_empty(), ill, "{per_minute} ns a minute");
    };
    check(6_000_000_000, true);
    check(1_000_000, false);
    check(0, false);
}

#[test]
fn the_brake_of_one_gpu_is_its_own_and_that_of_several_is_the_racks() {
    let mut host = Host::new();
    host.look();
    for _ in 0..7 {
        host.first().clock_reasons = Read::Value(0x88);
        host.look_after(60);
    }
    let reason = host.expect(FIRST, Degraded, ContactSupport);
    assert!(reason.contains("the power supply's brake"), "{reason}");
    assert_eq!(host.find("gpu.power"), None);
    for _ in 0..7 {
        host.gpus[1].clock_reasons = Read::Value(0x88);
        host.look_after(60);
    }
    host.expect("gpu.power", Degraded, ContactSupport);
    host.expect(FIRST, Healthy, Nothing);
    host.expect(SECOND, Healthy, Nothing);
    host.gpus = (0..8).map(gpu).collect();
    (0..12).for_each(|_| host.look_after(60));
    host.expect("gpu.power", Healthy, Nothing);
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn a_pcie_link_is_held_against_its_best_only_under_load() {
    let narrow = Read::Value(PcieLink { generation: 5, width: 8 });
    let reason = check(3, Degraded, ContactSupport, |gpu| gpu.pcie = narrow.clone());
    assert_eq!(
        reason,
        "under load its PCIe link has generation 5 with 8 lanes of generation 5 with 16 lanes"
    );
    check(3, Degraded, ContactSupport, |gpu| gpu.pcie = Read::Value(PcieLink { generation: 3, width: 16 }));
    silent(|gpu| {
        gpu.pcie = Read::Value(PcieLink { generation: 1, width: 8 });
        gpu.utilization = Read::Value(3);
    });
    silent(|gpu| gpu.pcie = Read::Value(PcieLink { generation: 0, width: 0 }));
    silent_with(DeviceLimits { pcie_load: Percent(100.0), ..DeviceLimits::default() }, |gpu| {
        gpu.pcie = narrow.clone()
    });
}

#[test]
fn pcie_replays_are_judged_by_generation_and_lanes() {
    // Generation 5 with 16 lanes: 31 a minute are normal.
    let check = |per_minute: u32, ill: bool| {
        let mut host = Host::new();
        for minute in 1..=10 {
            host.first().pcie_replays = Read::Value(7 + minute * per_minute);
            host.look_after(60);
        }
        assert_eq!(!host.ill().is_empty(), ill, "{per_minute} a minute");
    };
    check(40, true);
    check(30, false);
    // One burst, long ago.
    silent(|gpu| gpu.pcie_replays = Read::Value(100_000));
}

#[test]
fn a_link_is_missed_that_was_up_in_several_readings() {
    let mut host = Host::new();
    host.looks(3);
    host.first().nvlinks[3].up = Read::Value(false);
    host.look();
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    assert_eq!(reason, "NVLink 3 down, 17 of 18 up");
    host.expect(LINK, Unhealthy, ResetDevice);
    let others = host.judge.components(host.now).into_iter().filter(|of| of.name.starts_with("nvlink."));
    assert_eq!(others.count(), 1);
    host.first().nvlinks[3].up = Read::Value(true);
    host.looks(2);
    host.expect(LINK, Unhealthy, ResetDevice);
    host.look();
    host.expect(LINK, Healthy, Nothing);
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn links_that_a_board_never_had_are_not_missed() {
    let never = |gpu: &mut GpuReading| gpu.nvlinks = Vec::new();
    for change in
        [never, |gpu: &mut GpuReading| gpu.nvlinks.iter_mut().for_each(|of| of.up = Read::Value(false))]
    {
        let mut host = Host::new();
        host.gpus.iter_mut().for_each(change);
        host.looks(50);
        assert_eq!(host.ill(), Vec::<String>::new());
    }
}

#[test]
fn a_split_gpu_and_links_that_cannot_be_read_are_not_down() {
    silent(|gpu| {
        gpu.mig = Read::Value(true);
        gpu.nvlinks.iter_mut().for_each(|of| of.up = Read::Value(false));
    });
    let mut host = Host::new();
    host.looks(3);
    host.first().nvlinks[3].up = Read::Failed("an internal driver error occurred".into());
    host.look();
    let reason = host.expect(FIRST, Unknown, Nothing);
    assert!(reason.starts_with("the state of its NVLinks cannot be read"), "{reason}");
    assert_eq!(host.find(LINK), None);
}

#[test]
fn what_links_should_be_up_is_remembered_over_restarts() {
    let mut host = Host::new();
    host.looks(3);
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
    assert_eq!(after.judge.components(after.now), [], "nothing is known of them yet");
    after.first().nvlinks[3].up = Read::Value(false);
    after.gpus.pop();
    after.look();
    after.expect(FIRST, Unhealthy, ResetDevice);
    after.expect("gpu.0000:08:00", Unhealthy, RebootNode);
    assert_eq!(after.facts.len(), 2, "{:?}", after.facts);

    // Of another board in the same place nothing is remembered.
    let mut repaired = Host::new();
    learned.iter().for_each(|observation| repaired.judge.recall(observation));
    repaired.first().identity.as_mut().unwrap().uuid = "GPU-new".into();
    repaired.first().nvlinks[3].up = Read::Value(false);
    repaired.looks(10);
    assert_eq!(repaired.ill(), Vec::<String>::new());
}

#[test]
fn errors_on_a_link_are_judged_by_what_is_added() {
    let run = |per_minute: u64, minutes: u64| {
        let mut host = Host::new();
        for minute in 0..=minutes {
            host.details().links[3].replays = Some(1_000_000 + minute * per_minute);
            host.look_after(60);
        }
        host
    };
    let mut host = run(200, 5);
    let reason = host.expect(LINK, Degraded, ResetDevice);
    assert_eq!(reason, "NVLink 3: 200 damaged or repeated packets a minute");
    host.expect(FIRST, Degraded, ResetDevice);
    assert_eq!(run(10, 20).ill(), Vec::<String>::new());
    // A jump at one reading, and errors of long ago.
    silent(|gpu| gpu.details.as_mut().unwrap().links[3].crc = Some(143_746));
    (0..10).for_each(|_| host.look_after(60));
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn recoveries_that_fail_and_error_rates_are_of_the_link() {
    let mut host = Host::new();
    host.looks(3);
    host.details().links[3].recovery_failed = Some(2);
    host.look();
    host.expect(LINK, Unhealthy, ResetDevice);
    (0..80).for_each(|_| host.look_after(60));
    assert_eq!(host.ill(), Vec::<String>::new(), "an old one is no news");
    check(3, Degraded, ContactSupport, |gpu| {
        gpu.details.as_mut().unwrap().links[3].effective_ber = Some(1e-9)
    });
    silent(|gpu| gpu.details.as_mut().unwrap().links[3].effective_ber = Some(1e-13));
}

#[test]
fn the_fabric_has_its_time_after_a_boot() {
    let waiting = FabricInfo { state: 2, status: 0, health_mask: 0, health_summary: 0 };
    let mut host = Host::new();
    host.now = Mono(0);
    host.gpus.iter_mut().for_each(|gpu| gpu.fabric = Read::Value(waiting));
    host.looks(29);
    assert_eq!(host.ill(), Vec::<String>::new());
    host.looks(4);
    host.expect(FIRST, Degraded, RebootNode);

    let failed = FabricInfo { state: 3, status: 999, health_mask: 0, health_summary: 0 };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = Read::Value(failed));
    let bad_routes = FabricInfo { state: 3, status: 0, health_mask: 0x1a, health_summary: 1 };
    check(3, Unhealthy, ResetDevice, |gpu| gpu.fabric = Read::Value(bad_routes));
    let small = FabricInfo { state: 3, status: 0, health_mask: 0, health_summary: 3 };
    check(3, Degraded, Nothing, |gpu| gpu.fabric = Read::Value(small));
    silent(|gpu| {
        gpu.fabric = Read::Value(FabricInfo { state: 0, status: 3, health_mask: 0, health_summary: 0 })
    });
    silent(|gpu| gpu.fabric = Read::NotOffered);
    // A GPU alone has no fabric to be part of.
    let mut alone = Host::new();
    alone.gpus.truncate(1);
    alone.first().fabric = Read::Value(waiting);
    alone.looks(50);
    assert_eq!(alone.ill(), Vec::<String>::new());
}

#[test]
fn a_damaged_inforom_is_for_support_and_persistence_is_a_note() {
    check(1, Degraded, ContactSupport, |gpu| {
        gpu.details.as_mut().unwrap().inforom_valid = Read::Value(false)
    });
    silent(|gpu| gpu.details.as_mut().unwrap().persistence = Read::Value(false));
    let mut host = Host::new();
    host.details().persistence = Read::Value(false);
    host.look();
    let evidence = host.find(FIRST).unwrap().evidence;
    assert!(evidence.iter().any(|of| of.source == "NVML persistence mode"), "{evidence:?}");
}

#[test]
fn what_is_expected_is_asked_for() {
    let expected = ExpectedGpus {
        gpus: 9,
        nvlinks: 18,
        driver: "580.1".into(),
        vbios: "97.00".into(),
        mig: "on".into(),
        persistence: true,
    };
    let mut host = Host::with(DeviceLimits::default(), expected.clone());
    host.details().persistence = Read::Value(false);
    host.first().nvlinks[3].up = Read::Value(false);
    host.look();
    let driver = host.expect("gpu.driver", Unhealthy, RebootNode);
    assert_eq!(driver, "driver 570.1, 8 GPUs; 9 are expected; driver 580.1 is expected");
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    for words in
        ["VBIOS is 96.00, not 97.00", "MIG is off, not on", "persistence mode is off", "NVLink 3 down"]
    {
        assert!(reason.contains(words), "{reason}");
    }
    let reason = host.expect(LINK, Unhealthy, ResetDevice);
    assert_eq!(reason, "NVLink 3 down: 18 should be up");

    let fits = ExpectedGpus {
        gpus: 8,
        driver: "570.1".into(),
        vbios: "96.00".into(),
        mig: "off".into(),
        ..expected
    };
    let mut host = Host::with(DeviceLimits::default(), fits);
    host.looks(5);
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn a_host_with_fewer_gpus_than_before_misses_one_unless_fewer_are_expected() {
    let mut host = Host::new();
    host.look();
    host.gpus.pop();
    host.look();
    host.expect("gpu.0000:08:00", Unhealthy, RebootNode);
    assert!(host.events().contains(&"gpu_missing"));
    host.gpus.push(gpu(7));
    host.look();
    assert_eq!(host.ill(), Vec::<String>::new());

    let mut told = Host::with(DeviceLimits::default(), ExpectedGpus { gpus: 7, ..ExpectedGpus::default() });
    told.look();
    told.gpus.pop();
    told.look();
    assert_eq!(told.ill(), Vec::<String>::new());
}

#[test]
fn a_board_in_another_slot_is_not_missed() {
    let mut host = Host::new();
    host.looks(3);
    let moved = PciAddress { domain: 0, bus: 0x80, device: 0 };
    host.gpus[7].identity.as_mut().unwrap().address = moved;
    host.look();
    assert!(host.events().iter().all(|event| *event != "gpu_missing"));
}

#[test]
fn a_new_board_has_no_past() {
    let mut host = Host::new();
    host.first().remapped =
        Read::Value(RemappedRows { corrected: 0, uncorrected: 1, pending: false, failed: true });
    host.look();
    let (at, xid) = LogReader::default()
        .read(host.now, &Record::parse("NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, off"), 1)
        .unwrap();
    host.judge.take_in(at, &xid);
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.gpus[0] = gpu(0);
    host.first().identity.as_mut().unwrap().uuid = "GPU-new".into();
    host.look();
    assert_eq!(host.ill(), Vec::<String>::new());
    assert!(host.events().contains(&"gpu_replaced"));
}

#[test]
fn a_lost_gpu_that_comes_and_goes_is_lost_until_it_stays() {
    let mut host = Host::new();
    host.looks(3);
    for round in 0..9 {
        host.first().trouble = (round % 3 == 0).then_some(GpuTrouble::Lost);
        host.look();
        host.expect(FIRST, Unhealthy, RebootNode);
    }
    host.first().trouble = None;
    host.looks(3);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn what_was_found_stands_while_it_cannot_be_read() {
    let mut host = Host::new();
    let failed = RemappedRows { corrected: 0, uncorrected: 1, pending: false, failed: true };
    host.first().remapped = Read::Value(failed);
    host.look();
    host.first().remapped = Read::Failed("an internal driver error occurred".into());
    host.looks(20);
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.judge.report(host.now, DeviceReport::Silent { since: host.now, reading: None });
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.expect(SECOND, Unknown, Nothing);
}

#[test]
fn an_old_reading_is_none() {
    let mut host = Host::new();
    host.look();
    host.now = host.now.after(Span::seconds(50));
    host.expect(FIRST, Healthy, Nothing);
    host.now = host.now.after(Span::seconds(20));
    let reason = host.expect(FIRST, Unknown, Nothing);
    assert!(reason.contains("last read 70"), "{reason}");
    // One that is asked seldom is not old so soon.
    let mut seldom = Host::new();
    (0..3).for_each(|_| seldom.look_after(600));
    seldom.now = seldom.now.after(Span::seconds(700));
    seldom.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_bus_without_gpus_misses_those_that_were_there() {
    let mut host = Host::new();
    host.looks(3);
    host.judge.report(host.now, DeviceReport::NoGpus);
    host.expect(FIRST, Unhealthy, RebootNode);
}

fn event(code: u64) -> GpuEvent {
    GpuEvent { gpu: PciAddress::parse("0000:01:00"), kind: 8, data: code, instance: None }
}

fn line(host: &mut Host, rest: &str) -> bool {
    let line = format!("NVRM: Xid (PCI:0000:01:00): {rest}");
    let (at, fact) = LogReader::default().read(host.now, &Record::parse(&line), 1).unwrap();
    host.judge.take_in(at, &fact)
}

#[test]
fn an_event_counts_at_once_and_is_told_a_little_later() {
    let mut host = Host::new();
    host.look();
    host.judge.event(host.now, &event(79));
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    assert_eq!(reason, "XID 79: the GPU has fallen off the bus");
    assert_eq!(host.judge.due(host.now, true), []);
    let told = host.judge.due(host.now.after(Span::seconds(1)), true);
    assert!(matches!(&told[..], [(_, Fact::Xid(xid))] if xid.code == 79 && xid.by_event), "{told:?}");
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    host.expect(FIRST, Unhealthy, RebootNode);
    // Where nobody reads the log there is nothing to wait for.
    host.judge.event(host.now.after(Span::seconds(60)), &event(79));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(60)), false).len(), 1);
}

#[test]
fn line_and_event_are_one_xid_whichever_comes_first() {
    for line_first in [true, false] {
        let mut host = Host::new();
        host.look();
        if line_first {
            assert!(line(&mut host, "119, pid=7, name=python, Timeout after 6s"));
            host.judge.event(host.now, &event(119));
        } else {
            host.judge.event(host.now, &event(119));
            assert!(line(&mut host, "119, pid=7, name=python, Timeout after 6s"));
        }
        assert_eq!(host.judge.due(host.now.after(Span::seconds(60)), true), []);
        let component = host.find(FIRST).unwrap();
        assert_eq!(component.reason, "XID 119: the GPU's system processor does not answer", "{line_first}");
        assert!(component.evidence[0].reading.contains("Timeout after 6s"), "{component:?}");
    }
}

#[test]
fn a_log_with_times_of_its_own_tells_of_the_same_xid() {
    let mut host = Host::new();
    host.look();
    host.judge.event(host.now, &event(119));
    let text = "4,1,1000,-;NVRM: Xid (PCI:0000:01:00): 119, pid=7, name=python, Timeout after 6s";
    let (at, fact) = LogReader::default().read(host.now, &Record::parse(text), 1).unwrap();
    assert_ne!(at, host.now);
    assert!(host.judge.hear(host.now, at, &fact));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
}

#[test]
fn a_line_that_comes_late_is_told_only_if_it_has_more_to_say() {
    for (rest, news) in [("79, GPU has fallen off the bus.", false), ("79, pid=7, name=python, off", true)] {
        let mut host = Host::new();
        host.look();
        host.judge.event(host.now, &event(79));
        host.now = host.now.after(Span::seconds(2));
        assert_eq!(host.judge.due(host.now, true).len(), 1);
        assert_eq!(line(&mut host, rest), news);
        host.expect(FIRST, Unhealthy, RebootNode);
        assert!(!host.find(FIRST).unwrap().reason.contains("times"));
    }
}

#[test]
fn other_codes_other_gpus_and_later_ones_are_others() {
    let mut host = Host::new();
    host.look();
    assert!(line(&mut host, "79, pid=7, name=python, off"));
    host.judge.event(host.now, &event(119));
    host.judge.event(host.now, &GpuEvent { gpu: PciAddress::parse("0000:02:00"), ..event(79) });
    host.now = host.now.after(Span::seconds(30));
    host.judge.event(host.now, &event(79));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(1)), true).len(), 3);
    assert!(host.find(FIRST).unwrap().reason.contains("XID 79: the GPU has fallen off the bus, 2 times"));
}

#[test]
fn what_only_a_line_can_weigh_waits_for_it() {
    let mut host = Host::new();
    host.look();
    host.judge.event(host.now, &event(145));
    assert_eq!(host.ill(), Vec::<String>::new());
    assert!(line(&mut host, "145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000082 0x00000100 0x0 0x0)"));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    assert_eq!(host.ill(), Vec::<String>::new());
    host.now = host.now.after(Span::seconds(60));
    host.judge.event(host.now, &event(145));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true).len(), 1);
    host.expect(FIRST, Degraded, ContactSupport);
    // A code that NVML does not know is told by the line, if there is one.
    let mut host = Host::new();
    host.look();
    host.judge.event(host.now, &event(999));
    assert!(line(&mut host, "31, pid=7, name=python, MMU Fault"));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    assert_eq!(host.ill(), Vec::<String>::new());
}

#[test]
fn a_program_that_fails_is_counted_once() {
    let mut host = Host::new();
    host.look();
    host.judge.event(host.now, &event(31));
    line(&mut host, "31, pid=7, name=python, MMU Fault");
    let reason = host.expect(FIRST, Healthy, Nothing);
    assert!(reason.ends_with("python failed on it (XID 31)"), "{reason}");
    // Events of other kinds are no XIDs: the next reading tells.
    host.judge.event(host.now, &GpuEvent { kind: 2, ..event(48) });
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
}
