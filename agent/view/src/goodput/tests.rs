use mainstay_diagnosis::root_rank::start_failed;
use mainstay_hang::HangKind;
use mainstay_model::entry::ExitStatus;
use mainstay_model::finding::FindingKind;
use mainstay_model::hang::Hang;
use mainstay_model::id::{Attempt, BootId, Pid, Rank};
use mainstay_model::verdict::{Cause, DecidedBy, FaultDomain};
use mainstay_sim::productive::{Failure, Job};
use proptest::prelude::*;

use super::*;

/// Seconds.
const S: u64 = 1_000_000_000;

/// The wall clock is that of the monotonic clock and this.
const WALL: i64 = 1_700_000_000_000_000_000;

fn stamp(mono: u64) -> Stamp {
    Stamp { mono: Mono(mono), wall: wall(mono) }
}

fn wall(mono: u64) -> Wall {
    Wall(WALL.saturating_add_unsigned(mono))
}

fn entry(at: u64, body: Body) -> Entry {
    let job = Some(JobId("j".to_owned()));
    Entry { seq: 1, at: stamp(at), boot: BootId::default(), job, origin_seq: None, body }
}

fn books(entries: impl IntoIterator<Item = (u64, Body)>) -> Books {
    let mut books = Books::default();
    entries.into_iter().for_each(|(at, body)| books.entry(&entry(at, body)));
    books
}

fn seconds(books: &Books, state: TimeCategory) -> f64 {
    let of = |((category, _), booked): (&(TimeCategory, Charge), &Booked)| {
        (*category == state).then_some(booked.span.as_seconds())
    };
    books.closed(None).booked.iter().filter_map(of).sum()
}

fn sum(books: &Books, now: Option<Wall>) -> u64 {
    books.booked(now).values().map(|booked| booked.span.0).sum()
}

fn launched(ranks: u32) -> Body {
    let spec = JobSpec { world_size: ranks, local_world_size: ranks, ..JobSpec::default() };
    Body::Fact(Fact::JobStarted(spec))
}

fn attempt(number: u32) -> Body {
    let (attempt, ranks, hosts) = (Attempt(number), Vec::new(), Vec::new());
    Body::Fact(Fact::AttemptStarted { attempt, master_port: 1, ranks, hosts })
}

fn connected() -> Body {
    Body::Fact(Fact::RankConnected { attempt: Attempt(0), rank: Rank(0), client: String::new() })
}

fn stepping(step: u64) -> Body {
    Body::Fact(Fact::RanksStepping { attempt: Attempt(0), step, counted: false, restoring: Span::default() })
}

fn progress(step: u64) -> Body {
    Body::Fact(Fact::Progress { attempt: Attempt(0), step, loss: None, saving: Span::default(), saves: 0 })
}

fn exited(status: ExitStatus, step: u64, after_stop: bool) -> Body {
    Body::Fact(Fact::RankExited {
        attempt: Attempt(0),
        rank: Rank(0),
        pid: Pid(1),
        status,
        step: Some(step),
        data: None,
        after_stop,
        stderr_tail: Vec::new(),
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    })
}

fn attempt_ended() -> Body {
    Body::Fact(Fact::AttemptEnded { attempt: Attempt(0), orphans_killed: 0, waiting: Vec::new() })
}

fn verdict(incident: u64, cause: Cause, fault_at: u64, detected_at: u64) -> Body {
    let of = start_failed(Incident(incident), Attempt(0), "why", Mono(fault_at));
    Body::Verdict(Verdict { cause, detected_at: Mono(detected_at), ..of })
}

fn decision(incident: u64, action: Action) -> Body {
    Body::Decision(Decision {
        incident: Incident(incident),
        action,
        after: Span::default(),
        rule: mainstay_model::verdict::Rule::default(),
        why: String::new(),
        by: DecidedBy::Launcher,
        agent_evidence: false,
    })
}

fn job_ended(exit: i32) -> Body {
    Body::Fact(Fact::JobEnded { exit, reason: String::new() })
}

fn restart() -> Action {
    Action::RestartInJob { attempt: Attempt(1) }
}

/// A hang of 300 s that was confirmed after 290 s; the job resumes at step 51.
fn with_a_hang() -> Vec<(u64, Body)> {
    let cause = Cause::Hang { hang: HangKind::AllStill, place: "step".to_owned() };
    vec![
        (0, launched(4)),
        (S, attempt(0)),
        (5 * S, connected()),
        (20 * S, stepping(1)),
        (30 * S, progress(21)),
        (110 * S, progress(101)),
        (410 * S, exited(ExitStatus::Signal(9), 105, true)),
        (411 * S, attempt_ended()),
        (411 * S, verdict(1, cause, 114 * S, 404 * S)),
        (412 * S, decision(1, restart())),
        (413 * S, attempt(1)),
        (414 * S, connected()),
        (420 * S, stepping(51)),
        (475 * S, progress(106)),
        (485 * S, progress(116)),
        (486 * S, exited(ExitStatus::Code(0), 117, false)),
        (487 * S, attempt_ended()),
        (488 * S, job_ended(0)),
    ]
}

#[test]
fn a_hang_is_charged_from_the_last_step_that_was_completed() {
    let books = books(with_a_hang());
    let of = |state| seconds(&books, state);
    assert_eq!(of(TimeCategory::Undetected), 290.0);
    assert_eq!(of(TimeCategory::Stopping), 7.0);
    assert_eq!(of(TimeCategory::Deciding), 1.0);
    assert_eq!(of(TimeCategory::Starting), 5.0 + 1.0 + 1.0);
    assert_eq!(of(TimeCategory::Initialising), 15.0 + 6.0);
    // Steps 52 to 105 of 52 to 106 were done before, and take 54 of 55 s.
    assert_eq!(of(TimeCategory::LostWork), 54.0);
    assert_eq!(of(TimeCategory::Training), 94.0 + 1.0 + 10.0 + 1.0);
    assert_eq!(sum(&books, None), 488 * S);
    let hang = &books.causes[0];
    assert_eq!((hang.kind, hang.detected_after), ("hang", Span::seconds(290)));
    assert_eq!(hang.recovered_after, Some(Span::seconds(420 - 114)));
    assert_eq!(books.lost_steps, [(Some(0), 55)].into());
    assert_eq!(books.steps, 117);
    let charged: u64 =
        books.booked(None).iter().filter(|((_, of), _)| of == &Some(0)).map(|(_, of)| of.span.0).sum();
    assert_eq!(charged, (290 + 7 + 1 + 1 + 1 + 6 + 54) * S);
    let ranks: u128 = books.booked(None).values().map(|booked| booked.of_ranks).sum();
    assert_eq!(ranks, 4 * 488 * u128::from(S));
}

#[test]
fn a_window_takes_in_its_part() {
    let mut last = Books::within(wall(400 * S), wall(450 * S));
    with_a_hang().into_iter().for_each(|(at, body)| last.entry(&entry(at, body)));
    assert_eq!(seconds(&last, TimeCategory::Undetected), 4.0);
    assert_eq!(sum(&last, None), 50 * S);
}

#[test]
fn a_requeued_job_is_idle_between_its_launches_because_of_the_failure() {
    let host_lost = Cause::HostLost { host: "node-7".to_owned() };
    let mut entries = vec![
        (0, launched(8)),
        (S, attempt(0)),
        (2 * S, connected()),
        (10 * S, stepping(1)),
        (20 * S, exited(ExitStatus::Signal(9), 11, false)),
        (21 * S, attempt_ended()),
        (21 * S, verdict(1, host_lost, 20 * S, 20 * S)),
        (22 * S, decision(1, Action::HandBack { exit: 75 })),
        (23 * S, job_ended(75)),
    ];
    assert_eq!(sum(&books(entries.clone()), Some(wall(500 * S))), 23 * S, "whether it comes back is unknown");
    entries.extend([
        (100 * S, launched(8)),
        (101 * S, attempt(0)),
        (102 * S, connected()),
        (110 * S, stepping(1)),
        (130 * S, progress(21)),
    ]);
    let books = books(entries);
    assert_eq!(seconds(&books, TimeCategory::Idle), 77.0);
    assert_eq!((books.launches, books.steps, books.lost_steps.get(&Some(0))), (2, 21, Some(&11)));
    assert_eq!(books.causes[0].host.as_deref(), Some("node-7"));
    assert_eq!(books.causes[0].recovered_after, Some(Span::seconds(90)));
    assert_eq!(sum(&books, None), 130 * S);
}

#[test]
fn after_a_job_that_was_done_another_one_begins() {
    let one = |from: u64| {
        [
            (from, launched(1)),
            (from + S, attempt(0)),
            (from + 2 * S, stepping(1)),
            (from + 9 * S, job_ended(0)),
        ]
    };
    let books = books(one(0).into_iter().chain(one(1000 * S)));
    assert_eq!((sum(&books, None), books.steps), (18 * S, 2));
}

#[test]
fn what_a_slow_host_costs_is_charged_to_the_finding() {
    let slow = Finding {
        finding: 1,
        attempt: Attempt(0),
        what: FindingKind::SlowHost,
        over: false,
        headline: "host b is slow".to_owned(),
        domain: FaultDomain::Hardware,
        confidence: 0.9,
        ranks: Vec::new(),
        device: None,
        host: Some("b".to_owned()),
        stage: None,
        since_step: 1,
        step: 10,
        cost_percent: Some(20.0),
        evidence: Vec::new(),
        last_agreed_step: None,
        doubtful_steps: Vec::new(),
    };
    let saving = Body::Fact(Fact::Progress {
        attempt: Attempt(0),
        step: 101,
        loss: None,
        saving: Span::seconds(10),
        saves: 4,
    });
    let books = books([
        (0, launched(1)),
        (0, attempt(0)),
        (10 * S, stepping(1)),
        (10 * S, Body::Finding(slow)),
        (120 * S, saving),
    ]);
    assert_eq!(seconds(&books, TimeCategory::Slowdown), 20.0);
    assert_eq!(seconds(&books, TimeCategory::Checkpointing), 10.0);
    // Four saves of 2.5 s.
    let place = STALL_BOUNDS.iter().position(|bound| *bound == 3.0).unwrap();
    assert_eq!(books.stalls[place], Stalls { saves: 4, total: Span::seconds(10) });
    assert_eq!(seconds(&books, TimeCategory::Training), 80.0);
    assert_eq!((books.causes[0].kind, books.causes[0].host.as_deref()), ("slow_host", Some("b")));
}

#[test]
fn a_job_without_heartbeats_has_coarse_books() {
    let books = books([
        (0, launched(1)),
        (S, attempt(0)),
        (90 * S, exited(ExitStatus::Code(1), 0, false)),
        (91 * S, attempt_ended()),
        (91 * S, verdict(1, Cause::ExitCode { code: 1 }, 90 * S, 90 * S)),
        (92 * S, decision(1, Action::Stop { exit: 1 })),
        (92 * S, job_ended(1)),
    ]);
    assert!(!books.measured);
    assert_eq!(books.accounting(None).goodput, None);
    assert_eq!(seconds(&books, TimeCategory::Unmeasured), 89.0);
    assert_eq!(sum(&books, None), 92 * S);
}

#[test]
fn repeated_steps_of_a_program_that_does_not_number_them_are_the_most_that_is_possible() {
    let again = Body::Fact(Fact::RanksStepping {
        attempt: Attempt(1),
        step: 1,
        counted: true,
        restoring: Span::default(),
    });
    let books = books([
        (0, launched(1)),
        (0, attempt(0)),
        (
            S,
            Body::Fact(Fact::RanksStepping {
                attempt: Attempt(0),
                step: 1,
                counted: true,
                restoring: Span::default(),
            }),
        ),
        (11 * S, exited(ExitStatus::Signal(9), 119, false)),
        (11 * S, attempt_ended()),
        (11 * S, verdict(1, Cause::Signal { signal: 9 }, 11 * S, 11 * S)),
        (11 * S, decision(1, restart())),
        (12 * S, attempt(1)),
        (13 * S, again),
        (23 * S, progress(99)),
    ]);
    let accounting = books.accounting(None);
    assert_eq!((accounting.counted, accounting.steps, accounting.steps_lost), (true, 119, 99));
}

#[test]
fn a_restore_is_a_state_of_its_own() {
    let restored = |attempt| Fact::RanksStepping {
        attempt: Attempt(attempt),
        step: 8,
        counted: false,
        restoring: Span::seconds(30),
    };
    let entries =
        [(0, launched(1)), (0, attempt(0)), (2 * S, connected()), (42 * S, Body::Fact(restored(0)))];
    let books_of = books(entries.clone());
    assert_eq!(seconds(&books_of, TimeCategory::Restoring), 30.0);
    assert_eq!(seconds(&books_of, TimeCategory::Initialising), 10.0);
    let late = books([entries[0].clone(), entries[1].clone(), (32 * S, connected()), entries[3].clone()]);
    assert_eq!(seconds(&late, TimeCategory::Restoring), 10.0, "no more than the time since ranks beat");
    assert_eq!(sum(&late, None), 42 * S);
}

#[test]
fn a_hang_that_passed_is_charged_too() {
    let hang = Hang {
        kind: HangKind::AllStill,
        culprits: Vec::new(),
        hosts: Vec::new(),
        victims: Vec::new(),
        since: Mono(20 * S),
        confirmed: Mono(50 * S),
        phase: String::new(),
        limit: Span::seconds(30),
        step: None,
        confidence: 1.0,
        evidence: Vec::new(),
    };
    let books = books([
        (0, launched(1)),
        (0, attempt(0)),
        (10 * S, stepping(1)),
        (50 * S, Body::Fact(Fact::RanksHung { attempt: Attempt(0), hang: Box::new(hang), acts: false })),
        (60 * S, Body::Fact(Fact::HangPassed { attempt: Attempt(0), after: Span::seconds(10) })),
        (70 * S, progress(21)),
    ]);
    assert_eq!(seconds(&books, TimeCategory::Undetected), 40.0);
    assert_eq!(seconds(&books, TimeCategory::Training), 20.0);
}

/// The books of simulated jobs of 16,000 ranks with failures in bursts have the time that the simulation has.
#[test]
fn the_books_of_simulated_jobs_balance() {
    let failures = [
        Failure { share: 0.6, detect: 4.0, restart: 20.0 },
        Failure { share: 0.4, detect: 300.0, restart: 200.0 },
    ];
    let job = Job {
        hosts: 2048.0,
        rate: 0.01,
        failures: &failures,
        communicators: 30.0,
        stall: 0.0,
        saved_after: 20.0,
        step: 1.0,
    };
    for seed in 0..8 {
        let days = 20.0;
        let runs = job.runs(days, seed);
        let ns = |seconds: f64| (seconds * 1e9) as u64;
        let (mut entries, mut number, mut base) = (vec![(0, launched(16_384))], 0, 0_u64);
        let mut failed_at = None;
        for (run, incident) in runs.iter().zip(0_u64..) {
            if incident > 0 {
                let since = *failed_at.get_or_insert(run.failed_at);
                let (at, found) = (ns(since), ns(run.failed_at + run.detected_after));
                if ns(run.ends) <= found {
                    // It fails again before that is detected.
                    continue;
                }
                failed_at = None;
                entries.push((at, exited(ExitStatus::Signal(9), number, false)));
                entries.push((found, attempt_ended()));
                entries.push((found, verdict(incident, Cause::Signal { signal: 9 }, at, found)));
                entries.push((found, decision(incident, restart())));
                entries.push((found, attempt(1)));
            } else {
                entries.push((0, attempt(0)));
            }
            number = base;
            if run.ends > run.trains_from {
                entries.push((ns(run.trains_from), connected()));
                entries.push((ns(run.trains_from), stepping(base)));
                number = base + run.trained as u64;
                entries.push((ns(run.ends), progress(number)));
                base += run.kept as u64;
            }
        }
        let books = books(entries);
        let (end, wall) = (ns(days * 86_400.0), sum(&books, None));
        assert!(wall.abs_diff(end) <= end / 1000, "seed {seed}: {wall} of {end}");
        let training = seconds(&books, TimeCategory::Training) / (days * 86_400.0);
        let truth = job.productive(days, seed);
        assert!((training - truth).abs() < 0.001, "seed {seed}: {training} and not {truth}");
    }
}

fn body() -> impl Strategy<Value = Body> {
    let hang = |since| Hang {
        kind: HangKind::AllStill,
        culprits: Vec::new(),
        hosts: Vec::new(),
        victims: Vec::new(),
        since: Mono(since),
        confirmed: Mono(since),
        phase: String::new(),
        limit: Span::default(),
        step: None,
        confidence: 1.0,
        evidence: Vec::new(),
    };
    let at = || 0..2000_u64;
    prop_oneof![
        (1..5_u32).prop_map(launched),
        (0..3_u32).prop_map(attempt),
        Just(connected()),
        (0..40_u64, 0..300_u64).prop_map(|(step, restoring)| Body::Fact(Fact::RanksStepping {
            attempt: Attempt(0),
            step,
            counted: false,
            restoring: Span(restoring)
        })),
        (0..40_u64, 0..300_u64).prop_map(|(step, saving)| Body::Fact(Fact::Progress {
            attempt: Attempt(0),
            step,
            loss: None,
            saving: Span(saving),
            saves: step % 3,
        })),
        (any::<bool>(), 0..40_u64, any::<bool>()).prop_map(|(well, step, after_stop)| {
            exited(if well { ExitStatus::Code(0) } else { ExitStatus::Signal(9) }, step, after_stop)
        }),
        Just(attempt_ended()),
        (0..4_u64, at(), at()).prop_map(|(incident, fault_at, detected_at)| {
            verdict(incident, Cause::OutOfMemory, fault_at, detected_at)
        }),
        (
            0..4_u64,
            prop::sample::select(vec![restart(), Action::Wait, Action::HandBack { exit: 75 }]),
            0..300_u64
        )
            .prop_map(|(incident, action, after)| {
                let Body::Decision(decided) = decision(incident, action) else { unreachable!() };
                Body::Decision(Decision { after: Span(after), ..decided })
            }),
        (at(), any::<bool>()).prop_map(move |(since, acts)| Body::Fact(Fact::RanksHung {
            attempt: Attempt(0),
            hang: Box::new(hang(since)),
            acts
        })),
        Just(Body::Fact(Fact::HangPassed { attempt: Attempt(0), after: Span(1) })),
        Just(Body::Fact(Fact::StopRequested { by: String::new(), exit: 143 })),
        Just(Body::Fact(Fact::LauncherLost { pid: Pid(1) })),
        prop::sample::select(vec![0, 75]).prop_map(job_ended),
    ]
}

proptest! {
    /// For any entries in any order at any times each nanosecond is in one state, and windows add up.
    #[test]
    fn the_books_balance(
        entries in prop::collection::vec((0_u64..2000, body()), 0..60),
        ordered in any::<bool>(),
        now in prop::option::of(0_u64..4000),
        cut in 0_u64..2500,
    ) {
        let mut entries = entries;
        if ordered {
            entries.sort_by_key(|(at, _)| *at);
        }
        // The time of the job by a simpler count: from entry to entry, unless the job was done.
        let (mut expected, mut seen, mut runs, mut idle) = (0, None, false, Some(0));
        for (at, body) in &entries {
            let launch = matches!(body, Body::Fact(Fact::JobStarted(_)));
            let Some(before) = seen else {
                (seen, runs) = if launch { (Some(*at), true) } else { (None, false) };
                continue;
            };
            let after = (*at).max(before);
            match (runs, launch) {
                (true, _) => expected += after - before,
                (false, true) => expected += idle.map_or(0, |since| after - since),
                (false, false) => continue,
            }
            (seen, runs) = (Some(after), true);
            match body {
                Body::Fact(Fact::JobEnded { exit, .. }) => (runs, idle) = (false, (*exit != 0).then_some(after)),
                Body::Fact(Fact::LauncherLost { .. }) => (runs, idle) = (false, Some(after)),
                _ => {}
            }
        }
        if let (true, Some(seen), Some(now)) = (runs, seen, now) {
            expected += now.saturating_sub(seen);
        }
        let mut whole = Books::default();
        let mut windows = [Books::within(Wall(i64::MIN), wall(cut)), Books::within(wall(cut), Wall(i64::MAX))];
        for (at, body) in entries {
            let entry = entry(at, body);
            whole.entry(&entry);
            windows.iter_mut().for_each(|books| books.entry(&entry));
        }
        let now = now.map(wall);
        prop_assert_eq!(sum(&whole, now), expected);
        let mut added: BTreeMap<(TimeCategory, Charge), u64> = BTreeMap::new();
        for (key, booked) in windows.iter().flat_map(|books| books.booked(now)) {
            *added.entry(key).or_default() += booked.span.0;
        }
        let spans: BTreeMap<_, _> = whole.booked(now).into_iter().map(|(key, booked)| (key, booked.span.0)).collect();
        prop_assert_eq!(added, spans);
    }
}
