use super::*;

fn killed(at: u64) -> RankEnd {
    RankEnd {
        exit: Some((ExitStatus::Signal(9), Mono(at))),
        detected_at: Some(Mono(at)),
        step: Some(7),
        ..RankEnd::default()
    }
}

fn raised(message: &str, at: u64) -> RankEnd {
    let note = Note {
        exception: "builtins.RuntimeError".into(),
        message: message.into(),
        at: Mono(at),
        ..Note::default()
    };
    RankEnd { note: Some(note), detected_at: Some(Mono(at + 1)), ..RankEnd::default() }
}

fn verdict(ends: [RankEnd; 2], out_of_memory_kills: u64) -> Verdict {
    let ends = ends.into_iter().enumerate().map(|(n, end)| (Rank(n as u32), end)).collect();
    judge(Incident(1), Attempt(0), &ends, out_of_memory_kills)
}

#[test]
fn a_rank_that_ends_with_its_host_is_not_reported_as_killed() {
    let lost = LostHost {
        host: "b".to_owned(),
        named: "host b (node rank 1, ranks 2 to 3)".to_owned(),
        how: "no connection".to_owned(),
    };
    let end = RankEnd {
        exit: Some((ExitStatus::Signal(9), Mono(5))),
        step: Some(6),
        lost: Some(lost),
        ..RankEnd::default()
    };
    let verdict = verdict([end, RankEnd::default()], 0);
    testing::snapshot!(
        "reasons",
        "root_rank: a rank that ends with its host is not reported as killed",
        verdict.headline
    );
    assert_eq!(verdict.cause, Cause::HostLost { host: "b".to_owned() });
    assert_eq!((verdict.domain, verdict.class.as_deref()), (FaultDomain::Unknown, Some(HOST_LOST)));
}

#[test]
fn a_rank_that_lost_its_peer_is_a_victim_even_when_it_spoke_first() {
    let verdict = verdict([raised("[../gloo/pair.cc:534] Connection closed by peer", 5), killed(9)], 0);
    assert_eq!(verdict.culprit, Some(Rank(1)));
    assert_eq!(verdict.victims, [Rank(0)]);
    testing::snapshot!(
        "reasons",
        "root_rank: a rank that lost its peer is a victim even when it spoke first",
        verdict.headline
    );
}

#[test]
fn a_shell_whose_command_the_oom_killer_ended_ran_out_of_memory() {
    let shell = || RankEnd { exit: Some((ExitStatus::Code(137), Mono(9))), ..RankEnd::default() };
    assert_eq!(verdict([killed(20), shell()], 1).cause, Cause::OutOfMemory);
    assert_eq!(verdict([killed(20), shell()], 0).cause, Cause::ExitCode { code: 137 });
}

#[test]
fn a_rank_that_raised_the_same_exception_is_no_victim_and_the_evidence_names_it() {
    let same = verdict([raised("bad", 5), raised("bad", 6)], 0);
    assert_eq!((same.culprit, same.victims.len()), (Some(Rank(0)), 0));
    testing::snapshot!("reasons", "root_rank: two ranks raise the same", same.evidence.join("\n"));
    // Another exception may follow from the first one, and a lost peer always does.
    let lost = "Connection closed by peer";
    for (first, second) in [("bad", "worse"), (lost, lost)] {
        let other = verdict([raised(first, 5), raised(second, 6)], 0);
        assert_eq!((other.culprit, &other.victims[..]), (Some(Rank(0)), &[Rank(1)][..]));
        testing::snapshot!(
            "reasons",
            format!("root_rank: {first}, then {second}"),
            other.evidence.join("\n")
        );
    }
}

fn ended_while_stopped(code: i32) -> RankEnd {
    RankEnd { exit: Some((ExitStatus::Code(code), Mono(9))), after_stop: true, ..RankEnd::default() }
}

#[test]
fn a_peer_that_chose_to_exit_is_the_root_though_the_rank_that_lost_it_was_seen_first() {
    let lost = || raised("[../gloo/pair.cc:534] Connection closed by peer", 5);
    let verdict_of = |other| verdict([lost(), other], 0);
    let chose = verdict_of(ended_while_stopped(3));
    assert_eq!((chose.culprit, &chose.victims[..]), (Some(Rank(1)), &[Rank(0)][..]));
    testing::snapshot!(
        "reasons",
        "root_rank: a peer that chose to exit is the root though the rank that lost it was seen first",
        chose.headline
    );
    assert!(chose.evidence.iter().any(|line| line.contains("exit code 3")), "{:?}", chose.evidence);
    // An exit on SIGTERM is not the program's choice, and an own failure takes precedence.
    for code in [0, 1, 143] {
        assert_eq!(verdict_of(ended_while_stopped(code)).culprit, Some(Rank(0)), "{code}");
    }
    assert_eq!(verdict([raised("bad", 5), ended_while_stopped(3)], 0).culprit, Some(Rank(0)));
}

#[test]
fn of_two_own_failures_the_first_is_the_root() {
    let verdict = verdict([raised("bad", 12), raised("worse", 11)], 0);
    assert_eq!(verdict.culprit, Some(Rank(1)));
}

#[test]
fn a_long_message_is_cut_in_the_headline_and_whole_in_the_evidence() {
    let message = format!(
        "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has {}",
        "a total capacity ".repeat(20)
    );
    let cut = verdict([raised(&message, 5), RankEnd::default()], 0);
    testing::snapshot!("reasons", "root_rank: a long message is cut", cut.headline);
    assert!(cut.evidence.iter().any(|line| line.contains(&message)), "{:?}", cut.evidence);
    let words = verdict([raised(&"ünd so weiter ".repeat(30), 5), RankEnd::default()], 0).headline;
    assert!(words.ends_with(" …") && words.chars().count() < 240, "{words}");
}

#[test]
fn a_lone_victim_is_named_with_little_confidence() {
    let mut other = RankEnd { exit: Some((ExitStatus::Signal(15), Mono(20))), ..RankEnd::default() };
    other.after_stop = true;
    let verdict = verdict([raised("Connection reset by peer", 5), other], 0);
    assert_eq!(verdict.culprit, Some(Rank(0)));
    assert!(verdict.confidence < 0.5);
}

#[test]
fn the_last_step_of_a_rank_is_reported_only_if_known() {
    let headline = |end: RankEnd| verdict([end, RankEnd::default()], 0).headline;
    let silent = RankEnd { step: None, ..killed(3) };
    testing::snapshot!(
        "reasons",
        "root_rank: the last step of a rank is reported only if known",
        headline(silent.clone())
    );
    let beating = RankEnd { heartbeats: true, ..silent };
    testing::snapshot!(
        "reasons",
        "root_rank: the last step of a rank is reported only if known 2",
        headline(beating)
    );
}

fn hang(ranks: u32) -> Hang {
    Hang {
        kind: HangKind::AllStill,
        culprits: Vec::new(),
        hosts: Vec::new(),
        victims: (0..ranks).map(Rank).collect(),
        since: Mono(1),
        confirmed: Mono(2),
        phase: "step".into(),
        limit: mainstay_model::time::Span(1),
        step: Some(3),
        confidence: 0.3,
        evidence: Vec::new(),
    }
}

#[test]
fn the_only_rank_of_a_job_is_the_culprit_of_its_hang() {
    let outcome = |ranks| hung(Incident(1), Attempt(0), &hang(ranks), Vec::new());
    assert_eq!((outcome(1).culprit, outcome(1).victims), (Some(Rank(0)), Vec::new()));
    assert_eq!((outcome(2).culprit, outcome(2).victims.len()), (None, 2));
}

#[test]
fn a_connection_that_is_not_acknowledged_is_a_fault_of_the_network_and_in_the_headline() {
    let cut = mainstay_model::hang::no_acknowledgement(Rank(1), "10.77.0.2", "10.77.0.3", 7);
    let still = |kind| Hang { kind, ..hang(2) };
    let outcome = |kind, found: &[&String]| {
        hung(Incident(1), Attempt(0), &still(kind), found.iter().map(|line| (*line).clone()).collect())
    };
    assert_eq!(outcome(HangKind::AllStill, &[]).domain, FaultDomain::Unknown);
    let verdict = outcome(HangKind::AllStill, &[&"a stack".to_owned(), &cut]);
    assert_eq!((verdict.domain, verdict.class.as_deref()), (FaultDomain::Infrastructure, Some("fabric")));
    assert!(verdict.headline.ends_with(&cut) && verdict.evidence[0] == cut, "{verdict:?}");
    let own = outcome(HangKind::UserCode, &[&cut]);
    assert_eq!((own.domain, own.headline.ends_with(&cut)), (FaultDomain::User, false));
}

#[test]
fn an_exception_that_only_the_error_file_has_names_that_file() {
    let mut end = raised("bad", 5);
    end.note.as_mut().expect("a note").file = Some("/runs/7/rank_0/error.json".into());
    let outcome = verdict([end, RankEnd::default()], 0).evidence;
    testing::snapshot!("reasons", "root_rank: an error file", outcome.join("\n"));
    let noted = verdict([raised("bad", 5), RankEnd::default()], 0).evidence;
    testing::snapshot!("reasons", "root_rank: an exit note", noted.join("\n"));
}

#[test]
fn a_warning_and_the_line_that_it_quotes_are_no_last_message() {
    let quoted = |lines: &[&str]| {
        let stderr_tail = lines.iter().map(|line| (*line).to_owned()).collect();
        verdict([RankEnd { stderr_tail, ..killed(3) }, RankEnd::default()], 0).evidence
    };
    let warned = ["/a/train.py:3: FutureWarning: old", "  warnings.warn(text)", ""];
    assert_eq!(quoted(&warned), quoted(&[]));
    let after = quoted(&["saving", warned[0], "  model.old()"]);
    assert!(after.iter().any(|line| line.ends_with(": saving")), "{after:?}");
}

#[test]
fn the_stacks_of_a_hang_are_evidence_once() {
    let hang = Hang {
        kind: HangKind::UserCode,
        culprits: vec![Rank(1)],
        hosts: Vec::new(),
        victims: vec![Rank(0)],
        since: Mono(1),
        confirmed: Mono(2),
        phase: "step".into(),
        limit: mainstay_model::time::Span(1),
        step: Some(3),
        confidence: 0.9,
        evidence: vec!["no beat".into(), "rank 1: forward".into()],
    };
    let stacks = ["rank 1: forward", "rank 0: all_reduce"];
    let evidence = hung(Incident(1), Attempt(0), &hang, stacks.map(str::to_owned).to_vec()).evidence;
    assert_eq!(evidence, ["no beat", "rank 1: forward", "rank 0: all_reduce"]);
}

#[test]
fn a_signal_that_the_launcher_sent_is_no_evidence() {
    let mut raised = raised("bad", 5);
    raised.exit = Some((ExitStatus::Signal(15), Mono(9)));
    let own = verdict([raised.clone(), RankEnd::default()], 0);
    assert!(own.evidence.iter().any(|line| line.contains("ended with SIGTERM")), "{:?}", own.evidence);
    raised.after_stop = true;
    let outcome = verdict([raised, RankEnd::default()], 0);
    assert!(!outcome.evidence.iter().any(|line| line.contains("SIGTERM")), "{:?}", outcome.evidence);
}

#[test]
fn a_crash_says_where_it_happened_and_quotes_the_message_with_its_time() {
    let lines = ["step 3", "terminate called after throwing an instance of 'X'", ""];
    let crashed = |signal| RankEnd {
        exit: Some((ExitStatus::Signal(signal), Mono(2_000_000_000))),
        stderr_tail: lines.iter().map(|line| (*line).to_owned()).collect(),
        stderr_times: vec![LineTime { at: Mono(500_000_000), steps_after: Some(2) }; 3],
        ..RankEnd::default()
    };
    let headline = |signal| verdict([crashed(signal), RankEnd::default()], 0).headline;
    testing::snapshot!(
        "reasons",
        "root_rank: a crash says where it happened and quotes the message with its time",
        headline(11)
    );
    testing::snapshot!(
        "reasons",
        "root_rank: a crash says where it happened and quotes the message with its time 2",
        headline(6)
    );
    testing::snapshot!(
        "reasons",
        "root_rank: a crash says where it happened and quotes the message with its time 3",
        headline(15)
    );
    let quoted = verdict([crashed(6), RankEnd::default()], 0).evidence;
    testing::snapshot!("reasons", "root_rank: the last message before a crash", quoted.join("\n"));
}

#[test]
fn sigkill_is_out_of_memory_only_when_the_kernel_counted_one() {
    assert_eq!(verdict([killed(3), RankEnd::default()], 0).cause, Cause::Signal { signal: 9 });
    assert_eq!(verdict([killed(3), RankEnd::default()], 1).cause, Cause::OutOfMemory);
}
