use super::*;
use mainstay_model::entry::JobSpec;
use mainstay_model::hang::HangKind;
use mainstay_model::id::{Attempt, BootId, Rank};
use mainstay_model::time::Stamp;
use mainstay_model::verdict::{Action, Cause, DecidedBy, Doubts, FaultDomain, Rule};

/// Entries of one boot, one second apart. The first is the start of the job.
fn entries(bodies: Vec<Body>) -> Vec<Entry> {
    let start = Body::Fact(Fact::JobStarted(JobSpec::default()));
    let all = std::iter::once(start).chain(bodies).enumerate();
    all.map(|(place, body)| {
        let seconds = place as u64;
        let wall = Wall(1_795_492_212_000_000_000 + seconds as i64 * 1_000_000_000);
        Entry {
            seq: seconds + 1,
            at: Stamp { mono: Mono(seconds * 1_000_000_000), wall },
            boot: BootId::default(),
            job: None,
            origin_seq: None,
            body,
        }
    })
    .collect()
}

#[test]
fn a_quoted_exception_is_not_reported_as_missing() {
    let mut report = reported(FaultDomain::Unknown, None);
    testing::snapshot!(
        "view",
        "incident_report: a quoted exception is not reported as missing",
        sentences::fault(&report.verdict)
    );
    let quoted = "last message on its standard error, 1.00 s before the failure: RuntimeError: bad sample";
    report.verdict.evidence.push(quoted.into());
    testing::snapshot!(
        "view",
        "incident_report: a quoted exception is not reported as missing 2",
        sentences::fault(&report.verdict)
    );
}

#[test]
fn a_wrong_setting_is_no_fault_of_the_program() {
    let verdict = reported(FaultDomain::User, Some("user_config")).verdict;
    let shown = [sentences::brief(&verdict), sentences::fault(&verdict)];
    testing::snapshot!("view", "incident_report: a wrong setting", shown.join("\n"));
}

fn reported(domain: FaultDomain, class: Option<&str>) -> IncidentReport {
    let verdict = Verdict {
        incident: Incident(2),
        attempt: Attempt(1),
        headline: "rank 3 raised ValueError: bad".into(),
        cause: Cause::ExitCode { code: 1 },
        domain,
        class: class.map(str::to_owned),
        deterministic: true,
        doubts: Doubts {
            against: vec!["an ECC error on rank 5".into()],
            would_change: vec!["Machine's fault (12 %): an XID".into()],
        },
        confidence: 0.8,
        culprit_confidence: Some(0.99),
        cannot_run: false,
        culprit: Some(Rank(3)),
        host: None,
        victims: vec![Rank(0)],
        step: Some(4),
        data: None,
        heartbeats: true,
        fault_at: Mono(0),
        detected_at: Mono(2_000_000),
        evidence: vec!["exit note of rank 3".into()],
    };
    let decision = Decision {
        incident: Incident(2),
        action: Action::Stop { exit: 1 },
        after: Span::default(),
        rule: Rule::Restart,
        why: "it recurred".into(),
        by: DecidedBy::Launcher,
        agent_evidence: false,
    };
    IncidentReport {
        verdict,
        decision: Some(decision),
        outcome: None,
        happened: Wall(1_795_492_212_000_000_000),
        into_the_job: Some(Span::seconds(754)),
        job_ended: None,
        findings: BTreeMap::new(),
        avoided: Vec::new(),
    }
}

#[test]
fn a_host_avoided_in_the_restart_is_part_of_the_failure_before_it_only() {
    let failed = |incident| {
        let verdict =
            Verdict { incident: Incident(incident), ..reported(FaultDomain::Hardware, None).verdict };
        Body::Verdict(verdict)
    };
    let avoided = |host: &str| {
        Body::Fact(Fact::Observed(HostsEvent::HostAvoided.observed(format!("host {host} is avoided"), &[])))
    };
    let entries = entries(vec![avoided("a"), failed(1), avoided("b"), failed(1), failed(2), avoided("c")]);
    let of = |incident| from_entries(entries.iter(), Some(Incident(incident))).expect("it is there").avoided;
    assert_eq!((of(1), of(2)), (vec!["host b is avoided".to_owned()], vec!["host c is avoided".to_owned()]));
    let report = from_entries(entries.iter(), None).expect("the last one");
    assert!(text(&report).contains("Host c is avoided."));
    assert_eq!(json(&report)["avoided"], serde_json::json!(["host c is avoided"]));
}

#[test]
fn advice_after_a_restart_depends_on_the_state_of_the_job() {
    let restart = Decision {
        incident: Incident(2),
        action: Action::RestartInJob { attempt: Attempt(2) },
        after: Span::default(),
        rule: Rule::Restart,
        why: "a reason".into(),
        by: DecidedBy::Launcher,
        agent_evidence: false,
    };
    let now = |job_ended| {
        let report = reported(FaultDomain::Unknown, None);
        text(&IncidentReport { decision: Some(restart.clone()), job_ended, ..report })
    };
    testing::snapshot!(
        "view",
        "incident_report: advice after a restart depends on the state of the job",
        now(None)
    );
    testing::snapshot!(
        "view",
        "incident_report: advice after a restart depends on the state of the job 2",
        now(Some(0))
    );
    testing::snapshot!(
        "view",
        "incident_report: advice after a restart depends on the state of the job 3",
        now(Some(3))
    );

    let verdict = Body::Verdict(reported(FaultDomain::Unknown, None).verdict);
    let ended = Body::Fact(Fact::JobEnded { exit: 3, reason: "budget".into() });
    let journal = entries(vec![verdict.clone(), ended]);
    assert_eq!(from_entries(journal.iter(), None).and_then(|report| report.job_ended), Some(3));
    assert_eq!(from_entries(entries(vec![verdict]).iter(), None).and_then(|report| report.job_ended), None);
}

fn text(report: &IncidentReport) -> String {
    render(report, Options::default())
}

/// A verdict on a signal with an unknown sender.
fn killed(signal: i32) -> Verdict {
    Verdict {
        cause: Cause::Signal { signal },
        culprit: Some(Rank(1)),
        headline: format!("rank 1 was ended by {}", mainstay_model::entry::ExitStatus::Signal(signal)),
        deterministic: false,
        confidence: 0.0,
        ..reported(FaultDomain::Unknown, None).verdict
    }
}

#[test]
fn a_report_has_its_sections_in_order() {
    let report = reported(FaultDomain::User, Some("user_code"));
    let text = render(&report, Options { logs: Some("/runs/x/attempt_1"), ..Options::default() });
    testing::snapshot!("view", "incident_report: a report has its sections in order", text);
}

#[test]
fn five_lines_of_evidence_are_shown_and_the_rest_with_all() {
    let mut report = reported(FaultDomain::User, Some("user_code"));
    report.verdict.evidence = (1..=7).map(|line| format!("line {line}")).collect();
    let short = text(&report);
    assert!(short.contains("line 5\n") && !short.contains("line 6"), "{short}");
    testing::snapshot!("view", "incident_report: five lines of evidence", short);
    let all = render(&report, Options { all: true, ..Options::default() });
    testing::snapshot!("view", "incident_report: all evidence", all);
}

#[test]
fn a_signal_from_outside_is_reported_without_a_cause() {
    let report = |signal| IncidentReport { verdict: killed(signal), ..reported(FaultDomain::Unknown, None) };
    testing::snapshot!(
        "view",
        "incident_report: a signal from outside is reported without a cause",
        text(&report(9))
    );
    testing::snapshot!(
        "view",
        "incident_report: a signal from outside is reported without a cause 2",
        text(&report(15))
    );
    // Signals that native code causes itself have no sender.
    for signal in [6, 7, 8, 11] {
        let text = text(&report(signal));
        assert!(text.contains("native code") && !text.contains("sent it"), "{text}");
    }
    testing::snapshot!(
        "view",
        "incident_report: a signal from outside is reported without a cause 3",
        brief(&killed(9))
    );
}

#[test]
fn a_full_disk_is_named_on_every_surface_and_no_program_is_blamed() {
    for class in ["storage", "host_resource"] {
        let report = reported(FaultDomain::User, Some(class));
        let shown = [brief(&report.verdict), text(&report)];
        for text in &shown {
            assert!(!text.contains("program's"), "{class}: {text}");
        }
    }
    let full = reported(FaultDomain::User, Some("storage"));
    testing::snapshot!(
        "view",
        "incident_report: a full disk is named on every surface and no program is blamed",
        brief(&full.verdict)
    );
    testing::snapshot!(
        "view",
        "incident_report: a full disk is named on every surface and no program is blamed 2",
        text(&full)
    );
}

#[test]
fn a_rank_that_a_signal_stopped_has_that_as_its_cause() {
    let hung = |hang| Verdict {
        cause: Cause::Hang { hang, place: String::new() },
        ..reported(FaultDomain::Unknown, None).verdict
    };
    assert_ne!(fault(&hung(HangKind::Stopped)), fault(&hung(HangKind::AllStill)));
    testing::snapshot!(
        "view",
        "incident_report: a rank that a signal stopped has that as its cause",
        fault(&hung(HangKind::Stopped))
    );
}

#[test]
fn a_lost_peer_points_to_another_rank_and_an_unknown_message_is_quoted() {
    let raised = |message: &str| {
        let report = reported(FaultDomain::Unknown, None);
        let cause = Cause::Exception { exception: "RuntimeError".into(), fingerprint: String::new() };
        let headline = format!("rank 3 raised RuntimeError: {message}");
        text(&IncidentReport { verdict: Verdict { cause, headline, ..report.verdict.clone() }, ..report })
    };
    let lost = raised("[pair.cc:544] Connection closed by peer [10.0.0.2]:4711");
    testing::snapshot!("view", "incident_report: a lost peer", lost);
    testing::snapshot!("view", "incident_report: an unknown message", raised("flux capacitor"));
}

#[test]
fn a_failure_that_was_detected_at_once_has_no_delay() {
    let mut report = reported(FaultDomain::Unknown, None);
    assert!(text(&report).contains(" 2 ms "), "{}", text(&report));
    report.verdict.detected_at = report.verdict.fault_at;
    assert!(!text(&report).contains(" ms "), "{}", text(&report));
}

#[test]
fn confidence_in_the_rank_and_in_the_fault_are_separate() {
    let known = text(&reported(FaultDomain::User, Some("data")));
    testing::snapshot!(
        "view",
        "incident_report: confidence in the rank and in the fault are separate",
        known
    );
    let unknown = text(&reported(FaultDomain::Unknown, None));
    assert!(unknown.contains("rank 3 (99 % sure).") && !unknown.contains("80 %"), "{unknown}");
    let mut earlier = reported(FaultDomain::Unknown, None);
    earlier.verdict.culprit_confidence = None;
    testing::snapshot!(
        "view",
        "incident_report: confidence in the rank and in the fault are separate 2",
        text(&earlier)
    );
}

#[test]
fn advice_depends_on_the_decision() {
    let mut report = reported(FaultDomain::User, Some("user_code"));
    report.verdict.deterministic = false;
    testing::snapshot!("view", "incident_report: advice after a stop", text(&report));
    if let Some(decision) = &mut report.decision {
        decision.action = Action::RestartInJob { attempt: Attempt(2) };
    }
    testing::snapshot!("view", "incident_report: advice depends on the decision", text(&report));
}

#[test]
fn only_a_ticket_has_a_title_and_lists() {
    let reported = reported(FaultDomain::User, Some("user_code"));
    let shown = |markdown| render(&reported, Options { logs: Some("/runs/x"), markdown, all: false });
    let (ticket, terminal) = (shown(true), shown(false));
    testing::snapshot!("view", "incident_report: only a ticket has a title and lists", ticket);
    assert!(!terminal.contains("## ") && !terminal.contains("\n- "), "{terminal}");
}

#[test]
fn foreign_text_cannot_format_a_ticket_or_control_a_terminal() {
    let mut reported = reported(FaultDomain::User, Some("user_code"));
    reported.verdict.headline = "rank 3 raised E: <b>\x1b[31m\n# [x](y)".into();
    reported.verdict.evidence = vec!["a\n| b |".into()];
    let ticket = render(&reported, Options { markdown: true, ..Options::default() });
    assert!(ticket.starts_with(r"## rank 3 raised E: \<b\> \[31m \# \[x\](y)"), "{ticket}");
    assert!(ticket.contains("\n- a \\| b \\|\n"), "{ticket}");
    let terminal = text(&reported);
    assert!(terminal.starts_with("rank 3 raised E: <b> [31m # [x](y)\n"), "{terminal}");
}

#[test]
fn a_job_that_ended_while_it_waited_for_its_host_has_nothing_to_wait_for() {
    let mut report = reported(FaultDomain::User, Some("user_code"));
    let waited =
        Decision { action: Action::Wait, why: "memory is held".into(), ..report.decision.clone().unwrap() };
    report.decision = Some(waited);
    testing::snapshot!(
        "view",
        "incident_report: a job that ended while it waited for its host has nothing to wait for",
        text(&report)
    );
    report.job_ended = Some(143);
    let ended = text(&report);
    testing::snapshot!(
        "view",
        "incident_report: a job that ended while it waited for its host has nothing to wait for 2",
        ended
    );
    report.decision = None;
    testing::snapshot!(
        "view",
        "incident_report: a job that ended while it waited for its host has nothing to wait for 3",
        text(&report)
    );
}

#[test]
fn the_last_decision_on_a_failure_is_reported() {
    let IncidentReport { verdict, decision, .. } = reported(FaultDomain::User, None);
    let decision = decision.expect("one");
    let waited = Decision { action: Action::Wait, why: "memory is held".into(), ..decision.clone() };
    let entries =
        entries(vec![Body::Verdict(verdict), Body::Decision(waited), Body::Decision(decision.clone())]);
    assert_eq!(from_entries(entries.iter(), None).expect("a report").decision, Some(decision));
}

#[test]
fn a_report_is_of_the_wanted_failure_or_the_last_with_its_time() {
    let IncidentReport { verdict, decision, .. } = reported(FaultDomain::User, None);
    let first = Verdict { incident: Incident(1), headline: "the first".into(), ..verdict.clone() };
    let last = Verdict { fault_at: Mono(1_500_000_000), ..verdict };
    let bodies = vec![Body::Verdict(first), Body::Verdict(last), Body::Decision(decision.expect("one"))];
    let entries = entries(bodies);
    let last = from_entries(entries.iter(), None).expect("a report");
    assert_eq!((last.verdict.incident, last.decision.is_some()), (Incident(2), true));
    // Half a second before the entry of its verdict, which is 2 s after the start.
    assert_eq!(last.happened, Wall(1_795_492_213_500_000_000));
    assert_eq!(last.into_the_job, Some(Span(1_500_000_000)));
    let first = from_entries(entries.iter(), Some(Incident(1))).expect("a report");
    assert_eq!((first.verdict.headline.as_str(), first.decision.is_some()), ("the first", false));
    assert_eq!(from_entries(entries.iter(), Some(Incident(9))), None);
}
