//! Slow and hanging drivers, and probes that break.

use std::time::Duration;

use mainstay_health::hardware::gpu::{DeviceReport, GpuTrouble, ProbeAnswer};
use mainstay_model::entry::Fact;
use mainstay_model::health::HealthState::{Healthy, Unhealthy, Unknown};
use mainstay_model::health::RecommendedAction::{None as Nothing, RebootNode};
use mainstay_model::time::{Mono, Span};
use mainstay_sensors::source::device::DeviceSource;
use serde_json::json;

use super::host::{FIRST, Host, SECOND, plan};

#[test]
fn a_driver_that_is_slow_is_not_one_that_hangs() {
    let mut host = Host::with_deadline(3, Duration::from_secs(3));
    host.set("/slow_ms", json!(10));
    assert_eq!(host.gpus().len(), 3);
    host.expect("gpu.driver", Healthy, Nothing);
}

#[test]
fn a_driver_that_hangs_is_a_fact_and_is_asked_again() {
    let mut host = Host::with_deadline(1, Duration::from_secs(5));
    host.gpus();
    host.set("/hang", json!(["nvmlDeviceGetTemperature"]));
    let (report, facts) = host.look();
    let since = host.now;
    assert_eq!(report, DeviceReport::Silent { since, reading: Some(0) });
    assert_eq!(facts, [Fact::GpuDriverSilent { since }]);
    host.expect("gpu.driver", Unknown, Nothing);
    host.expect(FIRST, Unknown, Nothing);

    host.now = host.now.after(Span::seconds(60));
    let (report, facts) = host.look();
    assert_eq!((report, facts), (DeviceReport::Silent { since, reading: Some(0) }, Vec::new()));
    let reason = host.expect("gpu.driver", Unhealthy, RebootNode);
    testing::snapshot!("components", "a driver that has hung for long", reason);

    host.set("/hang", json!([]));
    // A hanging probe is not gone at once; no other one is started until it is.
    let facts = loop {
        match host.look() {
            (DeviceReport::Silent { .. }, _) => {}
            (DeviceReport::Answered(_), facts) => break facts,
            (other, _) => panic!("{other:?}"),
        }
    };
    assert!(matches!(facts[0], Fact::GpuDriverAnswered { .. }));
    host.expect("gpu.driver", Healthy, Nothing);
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn a_probe_that_is_no_probe_is_broken() {
    let mut broken = plan(Some("/nowhere".into()), Duration::from_secs(60));
    broken.program = "/bin/false".into();
    let report = DeviceSource::new(broken.clone()).sample(Mono(1));
    assert!(matches!(report, DeviceReport::Broken(_)), "{report:?}");
    broken.program = "/nowhere/mainstay".into();
    let DeviceReport::Broken(why) = DeviceSource::new(broken).sample(Mono(1)) else { panic!("started") };
    assert!(why.contains("/nowhere/mainstay") && why.contains("No such file"), "{why}");
}

#[test]
fn calls_that_hang_for_one_gpu_take_no_other_along() {
    let mut host = Host::with_deadline(3, Duration::from_secs(5));
    host.gpus();
    host.set("/gpus/1/hang", json!(["nvmlDeviceGetTemperature"]));
    let since = host.now.after(Span::seconds(10));
    assert_eq!(host.look().0, DeviceReport::Silent { since, reading: Some(1) });
    // The others are read while it hangs, and also when it is tried again.
    for wait in [10, 60, 10] {
        host.now = host.now.after(Span::seconds(wait));
        let gpus = loop {
            match host.look().0 {
                DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) => break gpus,
                // A hanging probe is not gone at once.
                DeviceReport::Silent { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(gpus[1].trouble, Some(GpuTrouble::Hangs(since)));
        assert_eq!((gpus[0].trouble.as_ref(), gpus[2].trouble.as_ref()), (None, None));
        host.expect(FIRST, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
    host.expect(SECOND, Unhealthy, RebootNode);
    host.set("/gpus/1/hang", json!([]));
    host.now = host.now.after(Span::seconds(60));
    host.look_for_a_while();
    host.expect(SECOND, Healthy, Nothing);
}

#[test]
fn a_gpu_that_hangs_from_the_start_hides_no_other() {
    let mut host = Host::with_deadline(2, Duration::from_secs(5));
    host.set("/gpus/0/hang", json!(["nvmlDeviceGetUUID"]));
    assert!(matches!(host.look().0, DeviceReport::Silent { reading: Some(0), .. }));
    while matches!(host.look().0, DeviceReport::Silent { .. }) {}
    host.expect(SECOND, Healthy, Nothing);
    // It was tried again.
    (0..7).for_each(|_| drop(host.look()));
    host.expect("gpu.driver", Unknown, Nothing);
}

#[test]
fn events_that_cannot_be_had_hold_up_no_reading() {
    for hang in [
        json!({"hang": ["nvmlEventSetCreate"]}),
        json!({"hang": ["nvmlEventSetWait_v2"]}),
        json!({"gpus": [{"uuid": "GPU-0", "pci": "00000000:01:00.0", "hang": ["nvmlDeviceRegisterEvents"]}]}),
    ] {
        let mut host = Host::with_deadline(1, Duration::from_secs(30));
        host.script.as_object_mut().unwrap().extend(hang.as_object().unwrap().clone());
        host.write();
        host.gpus();
        host.expect(FIRST, Healthy, Nothing);
        host.expect("gpu.driver", Healthy, Nothing);
    }
}

#[test]
fn a_gpu_whose_calls_are_slow_together_does_not_hang() {
    // All calls for it together take longer than the deadline, and none of them alone does.
    let mut host = Host::with_deadline(1, Duration::from_secs(2));
    host.set("/slow_ms", json!(60));
    assert_eq!(host.gpus()[0].trouble, None);
    host.expect(FIRST, Healthy, Nothing);
}
