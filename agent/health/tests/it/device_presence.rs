//! Presence of GPUs: expected, missing, replaced, lost and found again, and readings that are too old.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::gpu::{
    DeviceLimits, DeviceReport, ExpectedGpus, GpuTrouble, RemappedRows, Sampled,
};
use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Span;
use support::gpus::{FIRST, Host, LINK, SECOND, gpu};

use HealthState::{Healthy, Unhealthy, Unknown};
use RecommendedAction::{None as Nothing, RebootNode, ReplaceNode, ResetDevice};

#[test]
fn deviations_from_the_expected_gpus_are_reported() {
    let expected = ExpectedGpus {
        gpus: 9,
        nvlinks: 18,
        driver: "580.1".into(),
        vbios: "97.00".into(),
        mig: "on".into(),
        persistence: true,
    };
    let mut host = Host::with(DeviceLimits::default(), expected.clone());
    host.details().persistence = Sampled::Value(false);
    host.first().nvlinks[3].up = Sampled::Value(false);
    host.poll();
    let driver = host.expect("gpu.driver", Unhealthy, RebootNode);
    testing::snapshot!("reasons", "device_presence: deviations from the expected gpus are reported", driver);
    let reason = host.expect(FIRST, Unhealthy, ResetDevice);
    testing::snapshot!("reasons", "device_presence: deviations of a GPU", reason);
    let reason = host.expect(LINK, Unhealthy, ResetDevice);
    testing::snapshot!(
        "reasons",
        "device_presence: deviations from the expected gpus are reported 2",
        reason
    );

    let fits = ExpectedGpus {
        gpus: 8,
        driver: "570.1".into(),
        vbios: "96.00".into(),
        mig: "off".into(),
        ..expected
    };
    let mut host = Host::with(DeviceLimits::default(), fits);
    host.poll_times(5);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_gpu_that_disappears_is_missing_unless_fewer_gpus_are_expected() {
    let mut host = Host::new();
    host.poll();
    host.gpus.pop();
    host.poll();
    host.expect("gpu.0000:08:00", Unhealthy, RebootNode);
    assert!(host.events().contains(&"gpu_missing"));
    host.gpus.push(gpu(7));
    host.poll();
    assert_eq!(host.not_healthy(), Vec::<String>::new());

    let mut other = Host::with(DeviceLimits::default(), ExpectedGpus { gpus: 7, ..ExpectedGpus::default() });
    other.poll();
    other.gpus.pop();
    other.poll();
    assert_eq!(other.not_healthy(), Vec::<String>::new());
}

#[test]
fn a_board_in_another_slot_is_not_missing() {
    let mut host = Host::new();
    host.poll_times(3);
    let moved = PciAddress { domain: 0, bus: 0x80, device: 0 };
    host.gpus[7].identity.as_mut().unwrap().address = moved;
    host.poll();
    assert!(host.events().iter().all(|event| *event != "gpu_missing"));
}

#[test]
fn a_new_board_has_none_of_the_faults_of_the_old_one() {
    let mut host = Host::new();
    host.first().remapped =
        Sampled::Value(RemappedRows { corrected: 0, uncorrected: 1, pending: false, failed: true });
    host.poll();
    let (at, xid) = LogReader::default()
        .read(host.now, &Record::parse("NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, off"), 1)
        .unwrap();
    host.judge.take_in(at, &xid);
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.gpus[0] = gpu(0);
    host.first().identity.as_mut().unwrap().uuid = "GPU-new".into();
    host.poll();
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    assert!(host.events().contains(&"gpu_replaced"));
}

#[test]
fn an_intermittently_lost_gpu_is_unhealthy_until_it_stays() {
    let mut host = Host::new();
    host.poll_times(3);
    for round in 0..9 {
        host.first().trouble = (round % 3 == 0).then_some(GpuTrouble::Lost);
        host.poll();
        host.expect(FIRST, Unhealthy, RebootNode);
    }
    host.first().trouble = None;
    host.poll_times(3);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_finding_lasts_while_its_reading_fails() {
    let mut host = Host::new();
    let failed = RemappedRows { corrected: 0, uncorrected: 1, pending: false, failed: true };
    host.first().remapped = Sampled::Value(failed);
    host.poll();
    host.first().remapped = Sampled::Failed("an internal driver error occurred".into());
    host.poll_times(20);
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.judge.report(host.now, DeviceReport::Silent { since: host.now, reading: None });
    host.expect(FIRST, Unhealthy, ReplaceNode);
    host.expect(SECOND, Unknown, Nothing);
}

#[test]
fn an_old_reading_does_not_count() {
    let mut host = Host::new();
    host.poll();
    host.now = host.now.after(Span::seconds(50));
    host.expect(FIRST, Healthy, Nothing);
    host.now = host.now.after(Span::seconds(20));
    let reason = host.expect(FIRST, Unknown, Nothing);
    assert!(reason.contains("last read 70"), "{reason}");
    // With a longer interval, a reading stays valid longer.
    let mut seldom = Host::new();
    (0..3).for_each(|_| seldom.poll_after(600));
    seldom.now = seldom.now.after(Span::seconds(700));
    seldom.expect(FIRST, Healthy, Nothing);
}

#[test]
fn on_a_bus_without_gpus_the_known_ones_are_missing() {
    let mut host = Host::new();
    host.poll_times(3);
    host.judge.report(host.now, DeviceReport::NoGpus);
    host.expect(FIRST, Unhealthy, RebootNode);
}
