//! Slow jobs without a failure: the rank that makes the others wait is named, one that takes its turn is not.

use mainstay_model::entry::Body;
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::Rank;
use mainstay_tests::{Stage, has_client, journal};

/// In each step, a rank works for as long as `work` says and waits for the others until all have had their time.
/// The ranks meet by the clock: a rank that works longer waits less, as in a collective.
const TRAIN: &str = r#"
import mainstay
PERIOD = 0.16
if RANK == 0:
    mark("began", repr(time.monotonic() + 0.3))
wait_for("began")
began = float(open(MARKS + "/began").read())
step = 0
while not os.path.exists(MARKS + "/end") and step < STEPS:
    step += 1
    ends = began + step * PERIOD
    with mainstay.section("forward"):
        time.sleep(work(step))
    with mainstay.section("allreduce"):
        time.sleep(max(0.0, ends - time.monotonic()))
    mainstay.step(step)
"#;

fn findings(journal: &[mainstay_model::entry::Entry]) -> Vec<Finding> {
    let reported = journal.iter().filter_map(|entry| match &entry.body {
        Body::Finding(finding) => Some(finding.clone()),
        _ => None,
    });
    reported.collect()
}

#[test]
fn a_rank_with_more_work_than_its_peers_is_named() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = format!("STEPS = 2000\ndef work(step):\n    return 0.09 if RANK != 5 else 0.12\n{TRAIN}");
    let job = stage.python(&script).ranks(8).start();
    let found = job.wait_for("the slow rank", |entry| match &entry.body {
        Body::Finding(finding) if finding.what == FindingKind::SlowRank => Some(finding.clone()),
        _ => None,
    });
    stage.mark("end");
    assert_eq!(found.ranks, [Rank(5)], "{found:?}");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed("rank 5 is ");
}

/// As with PyTorch's hooks: gradients are exchanged in the backward pass, and no section waits. Rank 5 needs longer
/// between its sections.
const OUTSIDE: &str = r#"
import mainstay
PERIOD = 0.16
if RANK == 0:
    mark("began", repr(time.monotonic() + 0.3))
wait_for("began")
began = float(open(MARKS + "/began").read())
step = 0
while not os.path.exists(MARKS + "/end") and step < STEPS:
    step += 1
    with mainstay.section("forward"):
        time.sleep(0.005)
    with mainstay.section("backward" + DEVICE):
        time.sleep(0.001)
    with mainstay.section("backward"):
        time.sleep(max(0.0, began + step * PERIOD - time.monotonic()))
    mainstay.step(step)
    time.sleep(0.12 if RANK == 5 else 0.05)
"#;

#[test]
fn a_rank_that_is_slow_between_its_sections_is_named() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let job = stage.python(&format!("STEPS, DEVICE = 2000, ''\n{OUTSIDE}")).ranks(8).start();
    let found = job.wait_for("the slow rank", |entry| match &entry.body {
        Body::Finding(finding) if finding.what == FindingKind::SlowRank => Some(finding.clone()),
        _ => None,
    });
    stage.mark("end");
    assert_eq!(found.ranks, [Rank(5)], "{found:?}");
    job.end().assert_status(0);
}

/// With a device the host may wait for it, and so for other ranks, between its sections.
#[test]
fn with_a_device_the_time_between_sections_is_no_ranks_own() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let end = stage.python(&format!("STEPS, DEVICE = 60, '@device'\n{OUTSIDE}")).ranks(8).start().end();
    end.assert_status(0);
    let slow = findings(&end.journal).into_iter().any(|found| found.ranks == [Rank(5)]);
    assert!(!slow, "{end}");
}

#[test]
fn ranks_that_take_turns_are_reported_as_uneven_data() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script =
        format!("STEPS = 2000\ndef work(step):\n    return 0.08 if RANK != step * 3 % 8 else 0.13\n{TRAIN}");
    let job = stage.python(&script).ranks(8).start();
    let found = job.wait_for("uneven data", |entry| match &entry.body {
        Body::Finding(finding) => Some(finding.clone()),
        _ => None,
    });
    stage.mark("end");
    assert_eq!(
        (found.what, found.ranks.as_slice()),
        (FindingKind::DataImbalance, [].as_slice()),
        "{found:?}"
    );
    job.end().assert_status(0);
}

#[test]
fn no_rank_of_a_healthy_job_is_named() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = format!(
        "import random\nSTEPS = 60\ndef work(step):\n    return 0.08 * random.lognormvariate(0, 0.02)\n{TRAIN}"
    );
    let end = stage.python(&script).ranks(8).start().end();
    end.assert_status(0);
    // On a busy machine some rank is late in each step, and that may be reported; but no rank is the cause.
    let named: Vec<Finding> =
        findings(&end.journal).into_iter().filter(|finding| !finding.ranks.is_empty()).collect();
    assert!(named.is_empty(), "{named:?}");
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
}
