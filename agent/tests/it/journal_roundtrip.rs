//! Property: every entry is read back from its line unchanged.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use mainstay_journal::store::journal::{JournalLine, decode, encode};
use mainstay_model::entry::{
    Body, Entry, ExitStatus, Fact, HostOfRanks, JobOwner, JobSpec, Note, StartedRank,
};
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::health::{Component, Evidence, HealthChange, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_model::verdict::{
    Action, Cause, DecidedBy, Decision, Doubts, FaultDomain, Outcome, Rule, Verdict,
};
use mainstay_recovery::policy::{Budget, CauseKind, Experience, Rung, Settings};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

/// Any text that a program or a person may produce, including line ends and control characters.
fn text() -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..24).prop_map(String::from_iter)
}

fn number() -> impl Strategy<Value = f64> {
    // JSON cannot represent infinities and NaN.
    prop_oneof![prop::num::f64::NORMAL, prop::num::f64::SUBNORMAL, prop::num::f64::ZERO]
}

fn rank() -> impl Strategy<Value = Rank> {
    any::<u32>().prop_map(Rank)
}

fn attempt() -> impl Strategy<Value = Attempt> {
    any::<u32>().prop_map(Attempt)
}

fn pid() -> impl Strategy<Value = Pid> {
    any::<i32>().prop_map(Pid)
}

fn mono() -> impl Strategy<Value = Mono> {
    any::<u64>().prop_map(Mono)
}

fn span() -> impl Strategy<Value = Span> {
    any::<u64>().prop_map(Span)
}

fn incident() -> impl Strategy<Value = Incident> {
    any::<u64>().prop_map(Incident)
}

fn exit_status() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![any::<i32>().prop_map(ExitStatus::Code), any::<i32>().prop_map(ExitStatus::Signal)]
}

fn budget() -> impl Strategy<Value = Budget> {
    (any::<u32>(), option::of(span())).prop_map(|(max_restarts, window)| Budget { max_restarts, window })
}

fn policy() -> impl Strategy<Value = Settings> {
    let cause = proptest::sample::select(CauseKind::ALL.as_slice());
    let rungs = proptest::sample::subsequence(Rung::ALL.as_slice(), 0..=Rung::ALL.len());
    let by_cause = proptest::collection::btree_map(cause, budget(), 0..3);
    let rest = (option::of(span()), any::<i32>(), any::<bool>(), any::<u64>());
    (budget(), by_cause, rungs, rest).prop_map(
        |(budget, by_cause, rungs, (ready_within, hand_back_exit, dry_run, seed))| Settings {
            budget,
            by_cause,
            rungs: rungs.into(),
            ready_within,
            hand_back_exit,
            dry_run,
            seed,
        },
    )
}

fn experience() -> impl Strategy<Value = Experience> {
    let cause = proptest::sample::select(CauseKind::ALL.as_slice());
    let rung = proptest::sample::select(Rung::ALL.as_slice());
    (cause, rung, number(), number(), number()).prop_map(|(cause, rung, tried, helped, seconds)| Experience {
        cause,
        rung,
        tried,
        helped,
        seconds,
    })
}

fn job_spec() -> impl Strategy<Value = JobSpec> {
    let who = (any::<[u32; 4]>(), rank(), pid());
    let places = (text(), text(), option::of(text()), option::of(text()), text(), text());
    let restarts = (option::of(policy()), vec(experience(), 0..3));
    let owner = [text(), text(), text(), text(), text(), text()];
    let all = (vec(text(), 0..4), who, places, restarts, (any::<bool>(), owner));
    all.prop_map(|(command, (numbers, first_rank, launcher), places, (policy, earlier), (follows, owner))| {
        let [user, slurm_job_id, slurm_job_name, slurm_partition, namespace, pod] = owner;
        JobSpec {
            command,
            world_size: numbers[0],
            local_world_size: numbers[1],
            first_rank,
            max_restarts: numbers[2],
            launcher,
            uid: numbers[3],
            run_dir: places.0,
            started_in: places.4,
            run: places.5,
            checkpoint_dir: places.1,
            page_dir: places.2,
            program: places.3.map(String::into_boxed_str),
            policy,
            earlier,
            follows,
            owner: Box::new(JobOwner { user, slurm_job_id, slurm_job_name, slurm_partition, namespace, pod }),
        }
    })
}

fn started_rank() -> impl Strategy<Value = StartedRank> {
    (rank(), any::<u32>(), pid(), option::of(text()), option::of(any::<u64>())).prop_map(
        |(rank, local_rank, pid, page, start_ticks)| StartedRank { rank, local_rank, pid, page, start_ticks },
    )
}

fn note() -> impl Strategy<Value = Note> {
    (text(), text(), text(), option::of(any::<u64>()), mono(), option::of(text())).prop_map(
        |(exception, message, traceback, step, at, file)| Note {
            exception,
            message,
            traceback,
            step,
            at,
            file,
        },
    )
}

fn fact() -> impl Strategy<Value = Fact> {
    let of_host_and_job = prop_oneof![
        (text(), pid()).prop_map(|(version, pid)| Fact::AgentStarted { version, pid }),
        Just(Fact::AgentStopped),
        any::<u64>().prop_map(|count| Fact::OutOfMemoryKills { count }),
        job_spec().prop_map(Fact::JobStarted),
        text().prop_map(|reason| Fact::PagesUnavailable { reason }),
        (text(), any::<i32>()).prop_map(|(by, exit)| Fact::StopRequested { by, exit }),
        pid().prop_map(|pid| Fact::LauncherLost { pid }),
        text().prop_map(|version| Fact::AgentFound { version }),
        text().prop_map(|reason| Fact::AgentLost { reason }),
        (any::<i32>(), text()).prop_map(|(exit, reason)| Fact::JobEnded { exit, reason }),
    ];
    let of_attempts = prop_oneof![
        (attempt(), any::<u16>(), vec(started_rank(), 0..4), vec(host_of_ranks(), 0..3)).prop_map(
            |(attempt, master_port, ranks, hosts)| {
                Fact::AttemptStarted { attempt, master_port, ranks, hosts }
            }
        ),
        (attempt(), text(), prop::collection::vec(text(), 0..3))
            .prop_map(|(attempt, error, missing)| Fact::StartFailed { attempt, error, missing }),
        (attempt(), any::<u64>(), any::<bool>()).prop_map(|(attempt, step, counted)| {
            Fact::RanksStepping { attempt, step, counted, restoring: Span(step) }
        }),
        (attempt(), any::<u64>(), option::of(number())).prop_map(|(attempt, step, loss)| {
            Fact::Progress { attempt, step, loss, saving: Span(step), saves: step }
        }),
        (attempt(), any::<u32>(), vec(rank(), 0..3)).prop_map(|(attempt, orphans_killed, waiting)| {
            Fact::AttemptEnded { attempt, orphans_killed, waiting }
        }),
    ];
    let of_ranks = prop_oneof![
        (attempt(), rank(), text()).prop_map(|(attempt, rank, client)| Fact::RankConnected {
            attempt,
            rank,
            client
        }),
        (attempt(), rank(), text()).prop_map(|(attempt, rank, reason)| Fact::RankRefused {
            attempt,
            rank,
            reason
        }),
        (attempt(), rank(), pid(), note(), option::of(any::<u64>()))
            .prop_map(|(attempt, rank, pid, note, data)| Fact::RankRaised { attempt, rank, pid, note, data }),
        (
            (attempt(), rank(), pid()),
            exit_status(),
            (option::of(any::<u64>()), option::of(any::<u64>())),
            any::<bool>(),
            (vec(text(), 0..4), vec(text(), 0..4))
        )
            .prop_map(
                |((attempt, rank, pid), status, (step, data), after_stop, (stderr_tail, stdout_tail))| {
                    Fact::RankExited {
                        attempt,
                        rank,
                        pid,
                        status,
                        step,
                        data,
                        after_stop,
                        stderr_tail,
                        stdout_tail,
                        stderr_times: Vec::new(),
                        stdout_times: Vec::new(),
                    }
                }
            ),
    ];
    prop_oneof![of_host_and_job, of_attempts, of_ranks]
}

fn health_state() -> impl Strategy<Value = HealthState> {
    prop_oneof![
        Just(HealthState::Healthy),
        Just(HealthState::Unknown),
        Just(HealthState::Degraded),
        Just(HealthState::Unhealthy)
    ]
}

fn health_change() -> impl Strategy<Value = HealthChange> {
    let action = prop_oneof![
        Just(RecommendedAction::None),
        Just(RecommendedAction::RebootNode),
        Just(RecommendedAction::ContactSupport)
    ];
    let evidence = (text(), text(), option::of(text()), option::of(text())).prop_map(
        |(source, reading, limit, before)| Evidence { source, reading, limit, before, ..Evidence::default() },
    );
    let sure = prop_oneof![Just(1.0), Just(0.75)];
    let times = (option::of(mono()), mono(), option::of(mono()));
    let component = (text(), health_state(), text(), action, vec(evidence, 0..3), times, sure).prop_map(
        |(name, state, reason, action, evidence, (read_at, since, fault_at), confidence)| Component {
            name,
            state,
            reason,
            action,
            evidence,
            read_at,
            since,
            confidence,
            fault_at,
            ..Component::default()
        },
    );
    (option::of(health_state()), component).prop_map(|(from, component)| HealthChange { from, component })
}

fn finding() -> impl Strategy<Value = Finding> {
    let steps = (
        any::<u64>(),
        any::<u64>(),
        proptest::option::of(any::<u64>()),
        proptest::collection::vec(any::<u64>(), 0..3),
    );
    (any::<u64>(), any::<bool>(), ".*", steps, proptest::option::of(0.0..100.0_f64)).prop_map(
        |(finding, over, headline, (since_step, step, last_agreed_step, doubtful_steps), cost_percent)| {
            Finding {
                finding,
                attempt: Attempt(1),
                what: FindingKind::SlowRank,
                over,
                headline,
                domain: FaultDomain::Hardware,
                confidence: 0.5,
                ranks: vec![Rank(3)],
                device: None,
                host: None,
                stage: None,
                since_step,
                step,
                cost_percent,
                evidence: Vec::new(),
                last_agreed_step,
                doubtful_steps,
            }
        },
    )
}

fn host_of_ranks() -> impl Strategy<Value = HostOfRanks> {
    (text(), any::<u32>(), rank(), any::<u32>())
        .prop_map(|(host, node_rank, first_rank, ranks)| HostOfRanks { host, node_rank, first_rank, ranks })
}

fn verdict() -> impl Strategy<Value = Verdict> {
    let cause = prop_oneof![
        (text(), text()).prop_map(|(exception, fingerprint)| Cause::Exception { exception, fingerprint }),
        any::<i32>().prop_map(|code| Cause::ExitCode { code }),
        any::<i32>().prop_map(|signal| Cause::Signal { signal }),
        Just(Cause::OutOfMemory),
        Just(Cause::StartFailed),
    ];
    let domain =
        prop_oneof![Just(FaultDomain::User), Just(FaultDomain::Hardware), Just(FaultDomain::Unknown)];
    let what = (incident(), attempt(), text(), cause, domain, number());
    let where_ = (
        option::of(rank()),
        option::of(text()),
        vec(rank(), 0..4),
        (option::of(any::<u64>()), option::of(any::<u64>())),
        any::<bool>(),
    );
    let class = (option::of(text()), any::<bool>(), (vec(text(), 0..3), vec(text(), 0..3)));
    (what, where_, mono(), mono(), vec(text(), 0..3), class).prop_map(
        |(
            (incident, attempt, headline, cause, domain, confidence),
            (culprit, host, victims, (step, data), heartbeats),
            fault_at,
            detected_at,
            evidence,
            (class, deterministic, doubts),
        )| Verdict {
            incident,
            attempt,
            headline,
            cause,
            domain,
            class,
            deterministic,
            doubts: Doubts { against: doubts.0, would_change: doubts.1 },
            confidence,
            culprit_confidence: None,
            cannot_run: false,
            culprit,
            host,
            victims,
            step,
            data,
            heartbeats,
            fault_at,
            detected_at,
            evidence,
        },
    )
}

fn decision() -> impl Strategy<Value = Decision> {
    let rung = prop::sample::select(Rung::ALL.to_vec());
    let taken = (rung, attempt(), any::<i32>())
        .prop_map(|(rung, attempt, exit)| Action::from_rung(rung, attempt, exit));
    let action = prop_oneof![taken, Just(Action::Wait)];
    let by = prop_oneof![Just(DecidedBy::Launcher), Just(DecidedBy::Agent)];
    let rule = prop::sample::select(vec![Rule::Unknown, Rule::Recurred, Rule::Budget, Rule::UserPolicy]);
    let decided = (incident(), action, any::<u64>(), rule, text(), by, any::<bool>());
    decided.prop_map(|(incident, action, after, rule, why, by, agent_evidence)| Decision {
        incident,
        action,
        after: Span(after),
        rule,
        why,
        by,
        agent_evidence,
    })
}

fn outcome() -> impl Strategy<Value = Outcome> {
    (incident(), attempt(), any::<[u64; 3]>(), span(), option::of(span()), span()).prop_map(
        |(incident, attempt, steps, to_ranks_started, to_ranks_connected, to_first_step)| Outcome {
            incident,
            attempt,
            step: steps[0],
            reached_before: steps[1],
            steps_lost: steps[2],
            counted: steps[2] % 2 == 1,
            to_ranks_started,
            to_ranks_connected,
            to_first_step,
        },
    )
}

fn body() -> impl Strategy<Value = Body> {
    prop_oneof![
        4 => fact().prop_map(Body::Fact),
        1 => health_change().prop_map(Body::Health),
        1 => verdict().prop_map(Body::Verdict),
        1 => finding().prop_map(Body::Finding),
        1 => decision().prop_map(Body::Decision),
        1 => outcome().prop_map(Body::Outcome),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    let at = (mono(), any::<i64>()).prop_map(|(mono, wall)| Stamp { mono, wall: Wall(wall) });
    (any::<u64>(), at, text(), option::of(text()), option::of(any::<u64>()), body()).prop_map(
        |(seq, at, boot, job, origin_seq, body)| Entry {
            seq,
            at,
            boot: BootId(boot),
            job: job.map(JobId),
            origin_seq,
            body,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_entry_is_read_back_from_its_line(entry in entry()) {
        let line = encode(&entry).unwrap();
        prop_assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        prop_assert_eq!(line.last(), Some(&b'\n'));
        prop_assert_eq!(decode(&line), JournalLine::Entry(entry));
    }

    #[test]
    fn no_bytes_make_reading_panic(line in vec(any::<u8>(), 0..200)) {
        decode(&line);
    }

    #[test]
    fn a_line_with_a_byte_changed_is_read_or_skipped(entry in entry(), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut line = encode(&entry).unwrap();
        let place = place.index(line.len());
        line[place] = byte;
        decode(&line);
    }
}
