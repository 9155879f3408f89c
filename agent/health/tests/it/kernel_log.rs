//! Reading the kernel log: which lines are facts, how storms of lines are limited, and that no line makes it fail.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::time::{Mono, Span};
use proptest::prelude::*;

fn read(reader: &mut LogReader, now: Mono, line: &str) -> Option<(Mono, Fact)> {
    reader.read(now, &Record::parse(line), 7)
}

#[test]
fn an_xid_is_recorded_during_a_storm_of_other_lines() {
    let mut reader = LogReader::default();
    let mut facts = 0;
    for n in 0..100_000u64 {
        let line = format!("4,{n},{n},-;pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0");
        facts += usize::from(read(&mut reader, Mono(n * 1000), &line).is_some());
    }
    assert!(facts < 40, "{facts} facts of a storm");
    let now = Mono(100_000_000);
    let xid = read(&mut reader, now, "2,100001,100,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=a, off");
    assert!(matches!(xid, Some((Mono(100_000), Fact::Xid(_)))));
    let later = now.after(Span::seconds(10));
    let held_back = reader.held_back(later);
    let Some(Fact::KernelLinesLeftOut { of, count }) = held_back.first() else {
        panic!("not reported: {held_back:?}")
    };
    assert_eq!((of.as_str(), *count + facts as u64), ("aer_corrected", 100_000));
    assert_eq!(reader.held_back(later.after(Span::seconds(10))), []);
}

#[test]
fn an_oom_kill_logged_in_two_lines_is_one_fact() {
    let mut reader = LogReader::default();
    let first = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/j,task_memcg=/j,task=python,pid=77,uid=0";
    let second = "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB";
    assert!(read(&mut reader, Mono(1), first).is_some());
    assert!(read(&mut reader, Mono(2), second).is_none());
    assert!(read(&mut reader, Mono(3), second).is_some(), "some kernels log only the second line");
}

#[test]
fn a_timestamp_in_the_future_is_replaced_by_the_present() {
    let mut reader = LogReader::default();
    let line = "[99999.0] NVRM: Xid (PCI:0000:01:00): 79, off";
    assert_eq!(read(&mut reader, Mono(5), line).map(|(at, _)| at), Some(Mono(5)));
}

#[test]
fn a_very_long_line_is_truncated() {
    let mut reader = LogReader::default();
    let line = format!("NVRM: Xid (PCI:0000:01:00): 79, {}", "é".repeat(100_000));
    let Some((_, Fact::Xid(xid))) = read(&mut reader, Mono(5), &line) else { panic!("no XID") };
    assert!(xid.place.line.len() <= 1024);
}

proptest! {
    #[test]
    fn facts_survive_the_journal(bytes in prop::collection::vec(any::<u8>(), 0..200), head in prop::sample::select(vec![
        "", "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=1, name=", "NVRM: Xid (PCI:0000:01:00): 149, NETIR Fatal Link 3 (0x1 0x2) ",
        "nvidia-nvswitch1: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 1 ", "INFO: task a:1 blocked for more than ", "oom-kill:,task=", "EDAC MC0: 1 CE x on ",
    ])) {
        let line = format!("4,1,1,-;{head}{}", String::from_utf8_lossy(&bytes));
        if let Some((_, fact)) = LogReader::default().read(Mono(9), &Record::parse(&line), 3) {
            let body = Body::Fact(fact);
            let written = serde_json::to_string(&body).unwrap();
            prop_assert_eq!(serde_json::from_str::<Body>(&written).unwrap(), body);
        }
    }
}
