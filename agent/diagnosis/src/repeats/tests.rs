//! Which failures are remembered, and for which programs.

use super::*;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::time::{Stamp, Wall};
use mainstay_model::verdict::{Doubts, FaultDomain};

fn verdict(fingerprint: &str, step: u64, fault_at: u64) -> Verdict {
    Verdict {
        incident: Incident(1),
        attempt: Attempt(0),
        headline: String::new(),
        cause: Cause::Exception { exception: "ValueError".into(), fingerprint: fingerprint.into() },
        domain: FaultDomain::Unknown,
        class: None,
        deterministic: false,
        doubts: Doubts::default(),
        confidence: 0.5,
        culprit_confidence: None,
        cannot_run: false,
        culprit: None,
        host: None,
        victims: Vec::new(),
        step: Some(step),
        data: None,
        heartbeats: true,
        fault_at: Mono(fault_at),
        detected_at: Mono(fault_at),
        evidence: Vec::new(),
    }
}

fn entry(job: &str, boot: &str, verdict: Verdict) -> Entry {
    Entry {
        seq: 1,
        at: Stamp { mono: verdict.fault_at, wall: Wall(0) },
        boot: BootId(boot.into()),
        job: Some(JobId(job.into())),
        origin_seq: None,
        body: Body::Verdict(verdict),
    }
}

#[test]
fn failures_are_counted_by_job_step_and_boot_and_the_present_one_is_not() {
    let mut repeats = Repeats::default();
    repeats.take_in(&entry("a", "first", verdict("x", 7, 10)));
    repeats.take_in(&entry("a", "second", verdict("x", 8, 10)));
    repeats.take_in(&entry("b", "second", verdict("x", 1, 11)));
    repeats.take_in(&entry("a", "second", verdict("y", 7, 12)));
    let now = verdict("x", 7, 20);
    repeats.take_in(&entry("a", "second", now.clone()));
    repeats.take_in(&entry("a", "second", now.clone()));
    let seen = repeats.before(&JobId("a".into()), &BootId("second".into()), &now, &RemoteFailures::default());
    let expected = SeenBefore {
        in_this_job: 2,
        at_this_step: 1,
        in_other_boots: 1,
        other_jobs: 1,
        ..SeenBefore::default()
    };
    assert_eq!(seen, Some(expected));
    let new = verdict("z", 7, 21);
    assert_eq!(
        repeats.before(&JobId("a".into()), &BootId("second".into()), &new, &RemoteFailures::default()),
        None
    );
}

#[test]
fn the_same_data_at_another_step_and_other_data_at_the_same_step_are_distinguished() {
    let failed = |step, data, at| Verdict { data, ..verdict("x", step, at) };
    let seen = |earlier: &[Verdict], now: Verdict| {
        let mut repeats = Repeats::default();
        earlier.iter().for_each(|verdict| repeats.take_in(&entry("a", "boot", verdict.clone())));
        let seen = repeats
            .before(&JobId("a".into()), &BootId("boot".into()), &now, &RemoteFailures::default())
            .unwrap_or_default();
        (seen.in_this_job, seen.at_this_step, seen.at_this_data, seen.at_other_data)
    };
    let earlier =
        [failed(7, Some(64), 10), failed(9, Some(64), 11), failed(9, Some(80), 12), failed(9, None, 13)];
    assert_eq!(seen(&earlier, failed(9, Some(64), 20)), (4, 3, 1, 1));
    assert_eq!(seen(&earlier, failed(9, None, 20)), (4, 3, 0, 0), "what is not told is not compared");
}

#[test]
fn a_changed_program_is_a_new_chance_and_an_unchanged_one_is_not() {
    let started = |program: Option<&str>| {
        let spec = JobSpec { program: program.map(Into::into), ..JobSpec::default() };
        Entry { body: Body::Fact(Fact::JobStarted(spec)), ..entry("a", "boot", verdict("x", 7, 1)) }
    };
    let seen = |second: Option<&str>| {
        let mut repeats = Repeats::default();
        repeats.take_in(&started(Some("one")));
        repeats.take_in(&entry("a", "boot", verdict("x", 7, 10)));
        repeats.take_in(&started(second));
        let now = verdict("x", 7, 20);
        repeats.take_in(&entry("a", "boot", now.clone()));
        repeats
            .before(&JobId("a".into()), &BootId("boot".into()), &now, &RemoteFailures::default())
            .map(|seen| seen.in_this_job)
    };
    assert_eq!(seen(Some("two")), None);
    assert_eq!(seen(Some("one")), Some(1));
    // An unreadable program counts as unchanged.
    assert_eq!(seen(None), Some(1));
}

#[test]
fn runs_of_one_program_are_one_job_and_those_of_other_programs_or_users_are_others() {
    let started = |job: &str, command: &str, uid: u32| {
        let command = command.split(' ').map(str::to_owned).collect();
        let program = Some("same".into());
        let spec = JobSpec { command, uid, program, ..JobSpec::default() };
        Entry { body: Body::Fact(Fact::JobStarted(spec)), ..entry(job, "boot", verdict("x", 7, 1)) }
    };
    let seen = |earlier: &[(&str, &str, u32)]| {
        let mut repeats = Repeats::default();
        for (n, (job, command, uid)) in (10..).zip(earlier) {
            repeats.take_in(&started(job, command, *uid));
            repeats.take_in(&entry(job, "boot", verdict("x", 7, n)));
        }
        repeats.take_in(&started("exp.9", "python train.py --lr 1", 1000));
        repeats.before(
            &JobId("exp.9".into()),
            &BootId("boot".into()),
            &verdict("x", 7, 30),
            &RemoteFailures::default(),
        )
    };
    let again = [("exp", "python train.py --lr 1", 1000), ("exp.2", "python train.py --lr 2", 1000)];
    let expected = SeenBefore { in_this_job: 2, at_this_step: 2, ..SeenBefore::default() };
    assert_eq!(seen(&again), Some(expected));
    let others = [("a", "python eval.py", 1000), ("b", "python train.py --lr 1", 1001)];
    assert_eq!(seen(&others), Some(SeenBefore { other_jobs: 2, ..SeenBefore::default() }));
}

#[test]
fn other_hosts_count_for_runs_on_one_host_and_earlier_runs_started_before_this_one() {
    let at = |seconds: i64, entry: Entry| Entry { at: Stamp { wall: Wall(seconds), ..entry.at }, ..entry };
    let started = |world_size: u32| {
        let spec = JobSpec { world_size, local_world_size: 2, ..JobSpec::default() };
        Entry { body: Body::Fact(Fact::JobStarted(spec)), ..entry("a", "boot", verdict("x", 7, 1)) }
    };
    let seen = |world_size: u32| {
        let mut repeats = Repeats::default();
        let failed = |step, fault_at| Verdict { heartbeats: true, ..verdict("x", step, fault_at) };
        // The scheduler starts it again under its old name.
        for (seconds, entry) in [
            (10, started(world_size)),
            (20, entry("a", "boot", failed(7, 20))),
            (30, started(world_size)),
            (40, entry("a", "boot", failed(7, 40))),
        ] {
            repeats.take_in(&at(seconds, entry));
        }
        let recent = repeats.recent();
        let failures = recent
            .first()
            .map(|failure| ("b".to_owned(), vec![RemoteFailure { at: Wall(5), ..failure.clone() }]));
        let elsewhere = RemoteFailures { answered_by: 1, failures: failures.into_iter().collect() };
        let now = failed(7, 50);
        let seen = repeats.before(&JobId("a".into()), &BootId("boot".into()), &now, &elsewhere);
        let seen = seen.unwrap_or_default();
        (recent.len(), seen.in_this_job, seen.in_earlier_runs, seen.elsewhere.len(), seen.answered_by)
    };
    assert_eq!(seen(2), (2, 2, 1, 1, 1));
    assert_eq!(seen(4), (0, 2, 1, 0, 0), "ranks of other hosts fail with those of this one");
}

#[test]
fn memory_is_bounded() {
    let mut repeats = Repeats::default();
    for n in 0..5_000 {
        repeats.take_in(&entry("a", "boot", verdict(&format!("f{n}"), 1, n)));
        repeats.take_in(&entry("a", "boot", verdict("always", 1, n)));
    }
    assert!(repeats.failures.len() <= MAX_FINGERPRINTS && repeats.order.len() <= MAX_FINGERPRINTS);
    assert!(repeats.failures.values().all(|failures| failures.len() <= MAX_FAILURES));
}
