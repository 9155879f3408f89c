//! XIDs that both an NVML event and the kernel log report: each is one fact.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::hardware::gpu::GpuEvent;
use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::Span;
use support::gpus::{FIRST, Host};

use HealthState::{Degraded, Healthy, Unhealthy};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode};

fn event(code: u64) -> GpuEvent {
    GpuEvent { gpu: PciAddress::parse("0000:01:00"), kind: 8, data: code, instance: None }
}

fn line(host: &mut Host, rest: &str) -> bool {
    let line = format!("NVRM: Xid (PCI:0000:01:00): {rest}");
    let (at, fact) = LogReader::default().read(host.now, &Record::parse(&line), 1).unwrap();
    host.judge.take_in(at, &fact)
}

#[test]
fn an_event_counts_at_once_and_is_reported_a_second_later() {
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &event(79));
    let reason = host.expect(FIRST, Unhealthy, RebootNode);
    testing::snapshot!(
        "reasons",
        "device_events: an event counts at once and is reported a second later",
        reason
    );
    assert_eq!(host.judge.due(host.now, true), []);
    let due = host.judge.due(host.now.after(Span::seconds(1)), true);
    assert!(matches!(&due[..], [(_, Fact::Xid(xid))] if xid.code == 79 && xid.by_event), "{due:?}");
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    host.expect(FIRST, Unhealthy, RebootNode);
    // If the kernel log is not read, there is nothing to wait for.
    host.judge.event(host.now.after(Span::seconds(60)), &event(79));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(60)), false).len(), 1);
}

#[test]
fn a_log_line_and_its_event_are_one_xid_in_either_order() {
    for line_first in [true, false] {
        let mut host = Host::new();
        host.poll();
        if line_first {
            assert!(line(&mut host, "119, pid=7, name=python, Timeout after 6s"));
            host.judge.event(host.now, &event(119));
        } else {
            host.judge.event(host.now, &event(119));
            assert!(line(&mut host, "119, pid=7, name=python, Timeout after 6s"));
        }
        assert_eq!(host.judge.due(host.now.after(Span::seconds(60)), true), []);
        let component = host.find(FIRST).unwrap();
        testing::snapshot!(
            "reasons",
            "device_events: a log line and its event are one xid in either order",
            component.reason
        );
        assert!(component.evidence[0].reading.contains("Timeout after 6s"), "{component:?}");
    }
}

#[test]
fn a_log_line_with_its_own_timestamp_is_the_same_xid() {
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &event(119));
    let text = "4,1,1000,-;NVRM: Xid (PCI:0000:01:00): 119, pid=7, name=python, Timeout after 6s";
    let (at, fact) = LogReader::default().read(host.now, &Record::parse(text), 1).unwrap();
    assert_ne!(at, host.now);
    assert!(host.judge.receive(host.now, at, &fact));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
}

#[test]
fn a_late_log_line_is_reported_only_if_it_has_more_details() {
    for (rest, news) in [("79, GPU has fallen off the bus.", false), ("79, pid=7, name=python, off", true)] {
        let mut host = Host::new();
        host.poll();
        host.judge.event(host.now, &event(79));
        host.now = host.now.after(Span::seconds(2));
        assert_eq!(host.judge.due(host.now, true).len(), 1);
        assert_eq!(line(&mut host, rest), news);
        host.expect(FIRST, Unhealthy, RebootNode);
        assert!(!host.find(FIRST).unwrap().reason.contains("times"));
    }
}

#[test]
fn other_codes_other_gpus_and_later_events_are_separate_xids() {
    let mut host = Host::new();
    host.poll();
    assert!(line(&mut host, "79, pid=7, name=python, off"));
    host.judge.event(host.now, &event(119));
    host.judge.event(host.now, &GpuEvent { gpu: PciAddress::parse("0000:02:00"), ..event(79) });
    host.now = host.now.after(Span::seconds(30));
    host.judge.event(host.now, &event(79));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(1)), true).len(), 3);
    testing::snapshot!(
        "reasons",
        "device_events: other codes other gpus and later events are separate xids",
        host.find(FIRST).unwrap().reason
    );
}

#[test]
fn an_xid_whose_severity_is_in_the_line_waits_for_the_line() {
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &event(145));
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    assert!(line(&mut host, "145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000082 0x00000100 0x0 0x0)"));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
    host.now = host.now.after(Span::seconds(60));
    host.judge.event(host.now, &event(145));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true).len(), 1);
    host.expect(FIRST, Degraded, ContactSupport);
    // NVML reports a code that it does not know as 999. The log line, if any, has the real code.
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &event(999));
    assert!(line(&mut host, "31, pid=7, name=python, MMU Fault"));
    assert_eq!(host.judge.due(host.now.after(Span::seconds(9)), true), []);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}

#[test]
fn an_event_without_a_gpu_counts_for_the_only_gpu_or_for_none() {
    let no_one = GpuEvent { gpu: None, ..event(79) };
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &no_one);
    let due = host.judge.due(host.now, true);
    assert!(
        matches!(&due[..], [(_, Fact::Observed(observation))] if observation.event == "xid_of_unknown_gpu" && observation.detail.contains("XID 79")),
        "{due:?}"
    );
    assert_eq!((host.not_healthy(), host.judge.due(host.now, true)), (Vec::new(), Vec::new()));
    let mut host = Host::new();
    host.gpus.truncate(1);
    host.poll();
    host.judge.event(host.now, &no_one);
    host.expect(FIRST, Unhealthy, RebootNode);
    // There is no XID 0, and none this large.
    let mut host = Host::new();
    host.poll();
    for code in [0, 1 << 40] {
        host.judge.event(host.now, &event(code));
    }
    assert_eq!(
        (host.not_healthy(), host.judge.due(host.now.after(Span::seconds(9)), true)),
        (Vec::new(), Vec::new())
    );
}

#[test]
fn a_failed_program_is_counted_once() {
    let mut host = Host::new();
    host.poll();
    host.judge.event(host.now, &event(31));
    line(&mut host, "31, pid=7, name=python, MMU Fault");
    let reason = host.expect(FIRST, Healthy, Nothing);
    testing::snapshot!("reasons", "device_events: a failed program is counted once", reason);
    // Events of other kinds are no XIDs, whatever their number.
    host.judge.event(host.now, &GpuEvent { kind: 2, ..event(48) });
    let due = host.judge.due(host.now.after(Span::seconds(9)), true);
    assert!(!due.iter().any(|(_, fact)| matches!(fact, Fact::Xid(_))), "{due:?}");
    host.expect(FIRST, Healthy, Nothing);
}

#[test]
fn other_events_are_reported_once_a_minute_and_are_no_fault() {
    let mut host = Host::new();
    host.poll();
    let other = |kind| GpuEvent { kind, ..event(0) };
    for _ in 0..50 {
        host.judge.event(host.now, &other(0x200));
        host.now = host.now.after(Span::seconds(1));
    }
    host.judge.event(host.now, &other(0x4000));
    // A change of clocks is ignored, and so is an XID without a number.
    host.judge.event(host.now, &other(0x10));
    host.judge.event(host.now, &other(0x8));
    let observed: Vec<(String, String)> = host
        .judge
        .due(host.now, true)
        .into_iter()
        .filter_map(|(_, fact)| match fact {
            Fact::Observed(observation) => Some((observation.component, observation.detail)),
            _ => None,
        })
        .collect();
    let details: Vec<String> =
        observed.iter().map(|(component, detail)| format!("{component}: {detail}")).collect();
    testing::snapshot!("reasons", "device_events: other events of the driver", details.join("\n"));
    assert_eq!(host.judge.due(host.now, true), []);
    host.poll();
    host.judge.event(host.now, &other(0x200));
    assert_eq!(host.judge.due(host.now, true).len(), 1);
    assert_eq!(host.not_healthy(), Vec::<String>::new());
}
