use super::*;

fn learned_from(phases: &mut Phases, phase: PhaseId, millis: impl IntoIterator<Item = u64>) {
    for (step, span) in millis.into_iter().enumerate() {
        phases.learn(phase, step as u64, Span::millis(span));
    }
    phases.refresh();
}

#[test]
fn a_phase_with_few_samples_keeps_the_default() {
    let mut phases = Phases::new(Limits::default());
    learned_from(&mut phases, PhaseId::STEP, [100; 49]);
    assert_eq!(phases.limit(PhaseId::STEP).from, LimitFrom::Default);
    learned_from(&mut phases, PhaseId::STEP, [100; 51]);
    assert_eq!(phases.limit(PhaseId::STEP), Limit { span: Span::seconds(1), from: LimitFrom::Learned });
}

#[test]
fn the_cap_holds_for_all_that_never_took_longer() {
    let limits = || Limits { cap: Span::seconds(60), ..Limits::default() };
    let mut phases = Phases::new(limits());
    let save = phases.section("save");
    assert_eq!(phases.limit(save).span, Span::seconds(60), "the cap, though half an hour is usual");
    learned_from(&mut phases, save, [20_000; 3]);
    assert_eq!(phases.limit(save).span, Span::seconds(60), "five times the longest were more");
    learned_from(&mut phases, save, [100_000; 3]);
    assert_eq!(phases.limit(save).span, Span::seconds(120), "it has been seen to last longer");
    let given = BTreeMap::from([("save".to_owned(), Span::seconds(600))]);
    let mut phases = Phases::new(Limits { given, ..limits() });
    let save = phases.section("save");
    assert_eq!(phases.limit(save), Limit { span: Span::seconds(600), from: LimitFrom::Given });
}

/// A busy machine delays one batch in several hundred. That must not disable the judge for hours.
#[test]
fn one_stall_among_few_samples_gives_no_limit_of_hours() {
    let mut phases = Phases::new(Limits::default());
    let data = phases.section("data");
    learned_from(&mut phases, data, (0..400).map(|step| if step == 37 { 400 } else { 3 }));
    let limit = phases.limit(data);
    assert!(limit.from == LimitFrom::Learned && limit.span <= Span::millis(3300), "{limit:?}");
    assert!(limit.span >= Span::seconds(1), "{limit:?}");
}

#[test]
fn durations_of_earlier_runs_count_with_more_room_until_this_run_has_samples() {
    let mut first = Phases::new(Limits::default());
    learned_from(&mut first, PhaseId::STEP, [20_000; 400]);
    let mut next = Phases::new(Limits::default());
    next.recall(&first.remembered());
    assert_eq!(next.limit(PhaseId::STEP), Limit { span: Span::seconds(100), from: LimitFrom::Recalled });
    // On a slower machine the job takes three times as long. It is learned without a false alarm.
    learned_from(&mut next, PhaseId::STEP, [60_000; 60]);
    let limit = next.limit(PhaseId::STEP);
    assert!(limit.from == LimitFrom::Learned && limit.span >= Span::seconds(80), "{limit:?}");
    // Old observations fade: after several runs at the new pace the old one is gone.
    let mut phases = next;
    for _ in 0..4 {
        let mut run = Phases::new(Limits::default());
        run.recall(&phases.remembered());
        learned_from(&mut run, PhaseId::STEP, [5_000; 20_000]);
        phases = run;
    }
    assert!(phases.limit(PhaseId::STEP).span <= Span::seconds(20), "{:?}", phases.limit(PhaseId::STEP));
}

#[test]
fn few_samples_of_earlier_runs_are_ignored() {
    let mut first = Phases::new(Limits::default());
    learned_from(&mut first, PhaseId::STEP, [100; 20]);
    let mut next = Phases::new(Limits::default());
    next.recall(&first.remembered());
    assert_eq!(next.limit(PhaseId::STEP).from, LimitFrom::Default);
    let parts = vec![(60_000, 7)];
    next.recall(&[PhaseMemory { name: "step".into(), steps: 90, longest: Span(7), parts }]);
}

#[test]
fn eight_ranks_are_not_eight_times_the_steps() {
    let mut phases = Phases::new(Limits::default());
    for step in 0..10 {
        for _ in 0..8 {
            phases.learn(PhaseId::STEP, step, Span::millis(100));
        }
    }
    phases.refresh();
    assert_eq!(phases.limit(PhaseId::STEP).from, LimitFrom::Default);
}

#[test]
fn an_even_pace_has_a_limit_below_one_and_a_half_times_its_quantile() {
    let mut phases = Phases::new(Limits::default());
    learned_from(&mut phases, PhaseId::STEP, (0..1000).map(|n| 10_000 + n % 200));
    let limit = phases.limit(PhaseId::STEP).span.as_seconds();
    assert!((14.2..=15.3).contains(&limit), "{limit}");
}

#[test]
fn a_heavy_tail_is_given_more_room() {
    let mut phases = Phases::new(Limits::default());
    // A tenth takes twice as long, a hundredth four times, a thousandth eight times.
    let tail = |n: u64| match n {
        n if n % 1000 == 0 => 8_000,
        n if n % 100 == 0 => 4_000,
        n if n % 10 == 0 => 2_000,
        _ => 1_000,
    };
    learned_from(&mut phases, PhaseId::STEP, (0..3000).map(tail));
    assert!(phases.limit(PhaseId::STEP).span >= Span::seconds(11));
}

#[test]
fn long_sections_are_never_judged_by_quantiles() {
    let mut phases = Phases::new(Limits::default());
    for (name, class) in [
        ("checkpoint", Class::Long),
        ("Validation", Class::Long),
        ("compile_model", Class::Long),
        ("dataloader", Class::Learned),
        ("forward", Class::Learned),
    ] {
        let phase = phases.section(name);
        assert_eq!(phases.class(phase), class, "{name}");
    }
    let checkpoint = phases.section("checkpoint");
    learned_from(&mut phases, checkpoint, [10; 1000]);
    assert_eq!(phases.limit(checkpoint).span, Span::seconds(300));
}

#[test]
fn a_given_limit_is_not_replaced_by_a_learned_one() {
    let given = [("step".to_owned(), Span::seconds(3))].into();
    let mut phases = Phases::new(Limits { given, ..Limits::default() });
    learned_from(&mut phases, PhaseId::STEP, [10_000; 1000]);
    assert_eq!(phases.limit(PhaseId::STEP), Limit { span: Span::seconds(3), from: LimitFrom::Given });
}
