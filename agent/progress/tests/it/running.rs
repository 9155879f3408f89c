//! Findings in a running job: from the steps that ranks report to findings in the journal.

use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::{Body, JobSpec, Spent, StepDone};
use mainstay_model::finding::{Finding, FindingKind, Hint};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Mono;
use mainstay_model::verdict::FaultDomain;
use mainstay_progress::memory::JobMemory;
use mainstay_progress::monitor::{Pace, Watch};

const MS: u64 = 1_000_000;

/// A job whose ranks synchronize in each step of 200 ms, with 100 ms of own work each.
struct Run {
    watch: Watch,
    ranks: u32,
    step: u64,
    found: Vec<Finding>,
}

impl Run {
    fn new(ranks: u32, command: &str) -> Run {
        let command = command.split(' ').map(str::to_owned).collect();
        let spec = JobSpec { command, world_size: ranks, local_world_size: ranks, ..JobSpec::default() };
        let mut watch = Watch::new(&spec);
        watch.begin_attempt(Attempt(0), (0..ranks).map(Rank).collect());
        Run { watch, ranks, step: 0, found: Vec::new() }
    }

    /// A healthy step, changed by `change`.
    fn step(&mut self, change: impl Fn(u32, &mut StepDone)) {
        self.step += 1;
        for rank in 0..self.ranks {
            let wobble = (u64::from(rank) * 7 + self.step * 13 + u64::from(rank) * self.step) % 11 * MS / 10;
            let mut done = StepDone {
                step: self.step,
                start: Mono(self.step * 200 * MS),
                end: Mono((self.step + 1) * 200 * MS),
                first: self.step == 1,
                spent: Spent { wait_ns: 100 * MS - wobble, ..Spent::default() },
                loss: Some(3.0 + wobble as f64 / 1e8),
                grad_norm: Some(1.0 + wobble as f64 / 1e8),
                digest: Some(self.step * 1000),
                ..StepDone::default()
            };
            change(rank, &mut done);
            self.found.extend(self.watch.steps(Rank(rank), &[done]));
        }
    }

    fn kinds(&self) -> Vec<(FindingKind, bool)> {
        self.found.iter().map(|finding| (finding.what, finding.over)).collect()
    }
}

/// The rank works `ms` longer and waits for less time.
fn slower(done: &mut StepDone, ms: u64) {
    done.spent.wait_ns -= ms * MS;
}

/// Hints about the GPU of rank 5, and about that of rank 4.
fn on_gpu_5(about: &str) -> SlowdownHints {
    let device = Some("gpu.5".to_owned());
    SlowdownHints {
        devices: [(Rank(4), "gpu.4".to_owned()), (Rank(5), "gpu.5".to_owned())].into(),
        hints: vec![
            Hint { device, about: about.into(), fact: format!("{about} of gpu.5"), ..Hint::default() },
            Hint {
                device: Some("gpu.4".into()),
                about: about.into(),
                fact: "of another".into(),
                ..Hint::default()
            },
        ],
        ..SlowdownHints::default()
    }
}

#[test]
fn later_hints_about_the_device_are_added_to_the_finding_once() {
    let mut run = Run::new(8, "train.py");
    (0..20).for_each(|_| {
        run.step(|rank, done| {
            if rank == 5 {
                slower(done, 30)
            }
        })
    });
    assert_eq!((run.kinds(), run.found[0].device.as_deref()), (vec![(FindingKind::SlowRank, false)], None));
    let judged = run.watch.set_rank_context(on_gpu_5("clocks"));
    let [again] = &judged[..] else { panic!("{judged:?}") };
    assert_eq!((again.finding, again.device.as_deref()), (1, Some("gpu.5")));
    assert!(again.evidence.last().unwrap().ends_with("clocks of gpu.5"), "{again:?}");
    assert!(again.confidence > run.found[0].confidence);
    assert_eq!(run.watch.set_rank_context(on_gpu_5("clocks")), [], "known hints are not repeated");
    let more = run.watch.set_rank_context(on_gpu_5("pcie width"));
    assert_eq!(more[0].evidence.len(), again.evidence.len() + 1, "{more:?}");
}

#[test]
fn unspecified_stages_are_learned_and_a_slow_rank_in_one_is_found() {
    let mut run = Run::new(8, "train.py --config stages.yaml");
    (0..40).for_each(|_| {
        run.step(|rank, done| {
            if rank >= 4 {
                slower(done, 40)
            }
        })
    });
    assert_eq!(run.kinds(), [(FindingKind::StageImbalance, false)]);
    (0..12).for_each(|_| {
        run.step(|rank, done| {
            if rank >= 4 {
                slower(done, if rank == 6 { 52 } else { 40 })
            }
        })
    });
    assert!(
        run.found.iter().any(|found| found.what == FindingKind::SlowRank && found.ranks == [Rank(6)]),
        "{:?}",
        run.found
    );
}

#[test]
fn the_pace_of_each_rank_is_available() {
    let mut run = Run::new(4, "train.py");
    (0..20).for_each(|_| {
        run.step(|rank, done| {
            if rank == 2 {
                slower(done, 50)
            }
        })
    });
    let pace = run.watch.pace(Rank(2));
    assert!((1.45..1.55).contains(&pace.against_peers.unwrap()), "{pace:?}");
    assert!((0.24..0.26).contains(&pace.wait_share.unwrap()), "{pace:?}");
    assert_eq!(pace.self_time.unwrap().as_seconds().mul_add(100.0, 0.5) as u64, 15, "{pace:?}");
    let other = run.watch.pace(Rank(0));
    assert!((0.97..1.03).contains(&other.against_peers.unwrap()), "{other:?}");
    assert_eq!(Run::new(4, "train.py").watch.pace(Rank(0)), Pace::default());
}

#[test]
fn a_slow_rank_is_found_with_its_start_and_end() {
    let mut run = Run::new(8, "train.py");
    run.watch.set_rank_context(on_gpu_5("clocks"));
    (0..40).for_each(|_| run.step(|_, _| ()));
    assert_eq!(run.kinds(), []);
    (0..10).for_each(|_| {
        run.step(|rank, done| {
            if rank == 5 {
                slower(done, 30)
            }
        })
    });
    assert_eq!(run.kinds(), [(FindingKind::SlowRank, false)]);
    let found = &run.found[0];
    assert_eq!((found.finding, found.ranks.as_slice()), (1, [Rank(5)].as_slice()));
    assert!((40..=42).contains(&found.since_step), "{}", found.since_step);
    let cost = found.cost_percent.unwrap();
    assert!((11.0..16.0).contains(&cost), "30 ms of 200 are 15 %, not {cost} %");
    assert!(found.evidence.iter().any(|line| line.ends_with("clocks of gpu.5")), "{:?}", found.evidence);
    assert_eq!(found.device.as_deref(), Some("gpu.5"));
    (0..30).for_each(|_| run.step(|_, _| ()));
    assert_eq!(run.kinds(), [(FindingKind::SlowRank, false), (FindingKind::SlowRank, true)]);
    assert_eq!(run.found[1].finding, 1);
}

/// Four ranks: 40 healthy steps, `slow_steps` steps in which rank 1 is slow, and 30 healthy steps.
fn few(slow_steps: u32, rank_context: Option<SlowdownHints>) -> Run {
    let mut run = Run::new(4, "train.py");
    if let Some(rank_context) = rank_context {
        run.watch.set_rank_context(rank_context);
    }
    (0..40).for_each(|_| run.step(|_, _| ()));
    (0..slow_steps).for_each(|_| {
        run.step(|rank, done| {
            if rank == 1 {
                slower(done, 30)
            }
        })
    });
    (0..30).for_each(|_| run.step(|_, _| ()));
    run
}

#[test]
fn a_short_slowdown_of_a_rank_without_a_gpu_is_not_reported() {
    assert_eq!(few(20, None).kinds(), []);
    let devices = (0..4).map(|rank| (Rank(rank), format!("gpu.{rank}"))).collect();
    let on_gpus = few(20, Some(SlowdownHints { devices, ..SlowdownHints::default() }));
    assert_eq!(on_gpus.kinds()[0], (FindingKind::SlowRank, false), "a GPU is not shared");
    assert_eq!(on_gpus.found[0].domain, FaultDomain::Hardware);
}

#[test]
fn a_slow_rank_without_a_device_is_named_with_domain_unknown() {
    let run = few(90, None);
    assert_eq!(run.kinds()[..2], [(FindingKind::SlowRank, false), (FindingKind::SlowRank, true)]);
    assert_eq!(
        (run.found[0].ranks.as_slice(), run.found[0].domain),
        ([Rank(1)].as_slice(), FaultDomain::Unknown)
    );
}

#[test]
fn the_noise_of_an_earlier_run_causes_no_finding_for_two_ranks() {
    // The earlier run had little noise. This one has much, from its first step.
    let mut run = Run::new(2, "train.py");
    run.watch.recall(&JobMemory { noise: Some(0.002), ..JobMemory::default() });
    run.watch.begin_attempt(Attempt(1), vec![Rank(0), Rank(1)]);
    (0..40u64).for_each(|step| {
        run.step(|rank, done| {
            slower(done, [0, 35, 20, 60, 5, 50][(step as usize * 5 + rank as usize * 2) % 6])
        })
    });
    assert_eq!(run.kinds(), []);
}

#[test]
fn ranks_that_are_slow_in_turn_are_a_data_imbalance() {
    let mut run = Run::new(8, "train.py");
    for _ in 0..40 {
        let turn = (run.step * 5 % 8) as u32;
        run.step(|rank, done| {
            if rank == turn {
                slower(done, 40)
            }
        });
    }
    assert_eq!(run.kinds(), [(FindingKind::DataImbalance, false)]);
}

#[test]
fn uneven_work_in_a_small_part_of_a_step_is_not_reported() {
    let mut run = Run::new(8, "train.py");
    for _ in 0..40 {
        let turn = (run.step * 5 % 8) as u32;
        run.step(|rank, done| {
            // A rank works for 5 of 200 ms, and for 9 in its turn: almost twice its peers, but 2 % of a step.
            done.spent.wait_ns += 95 * MS;
            if rank == turn {
                slower(done, 4)
            }
        });
    }
    assert_eq!(run.kinds(), []);
}

#[test]
fn the_stage_is_read_from_the_command_line() {
    let mut run = Run::new(8, "pretrain.py --pipeline-model-parallel-size 4");
    (0..40).for_each(|_| {
        run.step(|rank, done| {
            if rank >= 6 {
                slower(done, 50)
            }
        })
    });
    assert_eq!(run.kinds(), [(FindingKind::StageImbalance, false)]);
    assert_eq!(run.found[0].stage, Some(3));
}

#[test]
fn a_step_is_judged_without_a_rank_that_does_not_report_it() {
    let mut run = Run::new(8, "train.py");
    for _ in 0..60 {
        run.step(|rank, done| {
            if rank == 3 {
                // Its step numbers are far from those of the others: no step matches.
                done.step += 1_000_000;
            } else if rank == 2 {
                slower(done, 30);
            }
        });
    }
    assert!(run.found.iter().any(|finding| finding.ranks == [Rank(2)]), "{:?}", run.kinds());
}

#[test]
fn without_sections_no_rank_is_named() {
    let mut run = Run::new(8, "train.py");
    (0..40).for_each(|_| run.step(|_, done| done.spent = Spent::default()));
    assert_eq!(run.kinds(), []);
}

#[test]
fn the_forward_pass_is_compared_if_no_waiting_time_is_reported() {
    let mut run = Run::new(8, "train.py");
    let alone = |rank, done: &mut StepDone| {
        let own = if rank == 6 { 130 } else { 100 };
        done.spent = Spent { alone_ns: own * MS - done.spent.wait_ns / 100, ..Spent::default() };
    };
    (0..20).for_each(|_| run.step(alone));
    assert_eq!(run.found[0].ranks, [Rank(6)]);
}

#[test]
fn one_differing_replica_is_named_and_later_checkpoints_are_doubtful() {
    let mut run = Run::new(4, "train.py");
    let checkpointed = |done: &mut StepDone| {
        if done.step.is_multiple_of(10) {
            done.checkpoint_ns = MS
        }
    };
    (0..25).for_each(|_| run.step(|_, done| checkpointed(done)));
    (0..10).for_each(|_| {
        run.step(|rank, done| {
            checkpointed(done);
            // Digests are compared every fifth step.
            done.digest = done
                .digest
                .filter(|_| done.step.is_multiple_of(5))
                .map(|digest| digest + u64::from(rank == 2));
        })
    });
    assert_eq!(run.kinds(), [(FindingKind::SilentCorruption, false)]);
    let found = &run.found[0];
    assert_eq!((found.ranks.as_slice(), found.since_step), ([Rank(2)].as_slice(), 30));
    assert_eq!((found.last_agreed_step, found.doubtful_steps.as_slice()), (Some(25), [30].as_slice()));
    assert_eq!(found.domain, FaultDomain::Hardware);
    run.step(|_, _| ());
    assert_eq!(run.kinds().last(), Some(&(FindingKind::SilentCorruption, true)));
}

#[test]
fn two_differing_replicas_name_no_culprit() {
    let mut run = Run::new(2, "train.py");
    (0..5).for_each(|_| run.step(|_, _| ()));
    run.step(|rank, done| done.digest = Some(u64::from(rank)));
    assert_eq!(run.kinds(), [(FindingKind::ReplicasDiffer, false)]);
    assert_eq!((run.found[0].ranks.len(), run.found[0].domain), (2, FaultDomain::Unknown));
}

#[test]
fn a_non_finite_loss_on_all_ranks_is_a_user_fault_and_on_one_rank_a_hardware_fault() {
    let mut all = Run::new(4, "train.py");
    all.step(|_, _| ());
    all.step(|_, done| done.loss = Some(f64::NAN));
    assert_eq!(
        (all.kinds(), all.found[0].domain),
        (vec![(FindingKind::NotANumber, false)], FaultDomain::User)
    );
    let mut one = Run::new(4, "train.py");
    one.step(|_, _| ());
    one.step(|rank, done| {
        if rank == 1 {
            done.loss = Some(f64::INFINITY)
        }
    });
    assert_eq!(
        (one.found[0].ranks.as_slice(), one.found[0].domain),
        ([Rank(1)].as_slice(), FaultDomain::Hardware)
    );
    (0..20).for_each(|_| one.step(|_, _| ()));
    assert_eq!(one.kinds(), [(FindingKind::NotANumber, false), (FindingKind::NotANumber, true)]);
}

/// As where one rank prints its steps for all.
#[test]
fn the_loss_of_a_rank_that_alone_reports_steps_is_judged() {
    let mut run = Run::new(4, "train.py");
    for step in (10..200).step_by(10) {
        let loss = Some(if step < 50 { 2.5 } else { f64::NAN });
        let (start, end) = (Mono(step * MS), Mono((step + 10) * MS));
        let done = StepDone { step, start, end, loss, ..StepDone::default() };
        run.found.extend(run.watch.steps(Rank(0), &[done]));
    }
    assert_eq!(run.kinds(), [(FindingKind::NotANumber, false)]);
    assert_eq!(run.found[0].since_step, 50);
}

#[test]
fn occasional_gradient_overflows_are_normal() {
    let mut run = Run::new(4, "train.py");
    for step in 0..200 {
        run.step(|_, done| {
            if step % 17 < 2 {
                done.grad_norm = Some(f64::INFINITY)
            }
        });
    }
    assert_eq!(run.kinds(), []);
    (0..3).for_each(|_| run.step(|_, done| done.grad_norm = Some(f64::INFINITY)));
    assert_eq!(run.kinds(), [(FindingKind::NotANumber, false)]);
}

#[test]
fn a_loss_spike_is_reported_once_and_a_falling_loss_never() {
    let mut run = Run::new(4, "train.py");
    for step in 0..300 {
        run.step(|_, done| done.loss = Some(10.0 / f64::from(step + 10) + done.loss.unwrap_or(0.0)));
    }
    assert_eq!(run.kinds(), []);
    (0..5).for_each(|_| run.step(|_, done| done.loss = Some(9.0)));
    assert_eq!(run.kinds(), [(FindingKind::LossSpike, false)]);
}

#[test]
fn a_gradient_norm_spike_on_one_rank_is_found() {
    let mut run = Run::new(8, "train.py");
    (0..40).for_each(|_| run.step(|_, _| ()));
    (0..4).for_each(|_| {
        run.step(|rank, done| {
            if rank == 7 {
                done.grad_norm = Some(4.0)
            }
        })
    });
    assert_eq!(run.kinds(), [(FindingKind::GradNormSpike, false)]);
    assert_eq!(run.found[0].ranks, [Rank(7)]);
}

#[test]
fn a_finding_is_written_and_read_back() {
    let mut run = Run::new(4, "train.py");
    run.step(|_, _| ());
    run.step(|rank, done| done.digest = Some(u64::from(rank == 3)));
    let body = Body::Finding(run.found[0].clone());
    let text = serde_json::to_string(&body).unwrap();
    assert!(text.contains(r#""kind":"finding""#) && text.contains(r#""what":"silent_corruption""#), "{text}");
    assert_eq!(serde_json::from_str::<Body>(&text).unwrap(), body);
}

/// Three ranks have more work because of their role, in no order that could be learned.
#[test]
fn ranks_with_a_role_are_compared_with_ranks_of_the_same_role() {
    let heavy = |rank: u32| matches!(rank, 1 | 4 | 6);
    let run = |with_context: bool, slow: Option<u32>| {
        let mut run = Run::new(8, "train.py");
        for rank in (0..8).filter(|_| with_context) {
            let role = if heavy(rank) { "expert" } else { "dense" };
            run.watch.set_role(Rank(rank), role.to_owned(), None);
        }
        for _ in 0..60 {
            run.step(|rank, done| {
                slower(done, if heavy(rank) { 40 } else { 0 });
                slower(done, if Some(rank) == slow { 15 } else { 0 });
            });
        }
        run
    };
    assert!(!run(false, None).found.is_empty(), "without roles they look slow");
    assert_eq!(run(true, None).found, []);
    let found = run(true, Some(4)).found;
    assert_eq!(found.iter().map(|finding| finding.ranks.clone()).collect::<Vec<_>>(), [vec![Rank(4)]]);
}

/// The next run knows the stages and the noise that a run learned from its first step.
#[test]
fn learned_stages_and_noise_are_known_in_the_next_run() {
    let later = |rank: u32| rank >= 4;
    let mut first = Run::new(8, "train.py");
    for _ in 0..70 {
        first.step(|rank, done| slower(done, if later(rank) { 30 } else { 0 }));
    }
    let mut learned = mainstay_progress::memory::JobMemory::default();
    first.watch.remember(&mut learned);
    assert_eq!(learned.stages, [0, 0, 0, 0, 1, 1, 1, 1]);
    assert!(learned.noise.is_some_and(|noise| noise < 0.05), "{:?}", learned.noise);

    let mut next = Run::new(8, "train.py");
    next.watch.recall(&learned);
    next.watch.begin_attempt(Attempt(0), (0..8).map(Rank).collect());
    // Without the recalled stages, a rank that is slow from the first step prevents learning them.
    for _ in 0..14 {
        next.step(|rank, done| {
            slower(done, if later(rank) { 30 } else { 0 } + if rank == 6 { 20 } else { 0 })
        });
    }
    let slow = next.found.iter().filter(|finding| finding.what == FindingKind::SlowRank);
    assert_eq!(
        slow.map(|finding| finding.ranks.clone()).collect::<Vec<_>>(),
        [vec![Rank(6)]],
        "{:?}",
        next.found
    );
}

/// The chunks that the ranks save of a step: one of their own, and one that is equal on all ranks.
fn saved(ranks: u32, step: u64) -> Vec<(Rank, Vec<u64>)> {
    (0..ranks).map(|rank| (Rank(rank), vec![u64::from(rank) + 1, step * 1000])).collect()
}

fn checkpoint(run: &mut Run, change: impl Fn(&mut [(Rank, Vec<u64>)])) {
    run.step(|_, done| (done.digest, done.checkpoint_ns) = (None, MS));
    let mut shards = saved(run.ranks, run.step);
    change(&mut shards);
    run.found.extend(run.watch.saved(run.step, &shards));
}

#[test]
fn a_checkpoint_that_differs_from_its_replicas_names_the_rank_and_is_doubtful() {
    let mut run = Run::new(4, "train.py");
    (0..5).for_each(|_| checkpoint(&mut run, |_| ()));
    assert_eq!(run.watch.vouched(), Some(5), "a step with equal replicas is safe to resume from");
    checkpoint(&mut run, |shards| shards[2].1[1] ^= 1);
    checkpoint(&mut run, |shards| shards[2].1[1] ^= 1);
    let [found] = &run.found[..] else { panic!("one finding: {:?}", run.found) };
    assert_eq!((found.what, found.ranks.as_slice()), (FindingKind::SilentCorruption, [Rank(2)].as_slice()));
    assert_eq!((found.last_agreed_step, found.doubtful_steps.as_slice()), (Some(5), [6].as_slice()));
    testing::snapshot!(
        "reasons",
        "running: a checkpoint that differs from its replicas names the rank and is doubtful",
        found.headline
    );
    checkpoint(&mut run, |_| ());
    assert!(run.found.last().unwrap().over, "{:?}", run.found);
    assert_eq!(run.watch.vouched(), Some(5), "no later step");
    // A new attempt starts without vouched steps.
    run.watch.begin_attempt(Attempt(1), (0..4).map(Rank).collect());
    assert_eq!(run.watch.vouched(), None);
}

#[test]
fn two_differing_checkpoints_name_no_culprit_and_shards_are_not_compared() {
    let mut run = Run::new(2, "train.py");
    (0..5).for_each(|_| checkpoint(&mut run, |_| ()));
    checkpoint(&mut run, |shards| shards[1].1[1] ^= 1);
    assert_eq!(run.kinds(), [(FindingKind::ReplicasDiffer, false)]);
    assert!(run.found[0].confidence < 0.6 && run.found[0].ranks == [Rank(0), Rank(1)]);
    let mut sharded = Run::new(4, "train.py");
    for _ in 0..9 {
        checkpoint(&mut sharded, |shards| {
            shards.iter_mut().for_each(|(rank, own)| own[1] += u64::from(rank.0))
        });
    }
    assert!(sharded.found.is_empty() && sharded.watch.vouched().is_none());
}
