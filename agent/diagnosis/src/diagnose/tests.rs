use super::*;
use crate::root_rank::judge;
use crate::unrunnable;
use mainstay_model::id::{Attempt, Incident};

fn verdict(ends: [RankEnd; 2], out_of_memory_kills: u64) -> Verdict {
    let ends = ends.into_iter().enumerate().map(|(n, end)| (Rank(n as u32), end)).collect();
    let failed =
        FailedAttempt { ends, lived: Span::seconds(600), out_of_memory_kills, ..FailedAttempt::default() };
    let mut verdict = judge(Incident(1), Attempt(0), &failed.ends, out_of_memory_kills);
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    complete(&mut verdict, catalog, &failed, &HostEvidence::default());
    verdict
}

#[test]
fn a_kernel_line_attributes_an_illegal_access_to_the_hardware() {
    let ends = [raised("builtins.RuntimeError", "CUDA error: unspecified launch failure", 5), stopped()];
    let ends: BTreeMap<Rank, RankEnd> =
        ends.into_iter().enumerate().map(|(n, end)| (Rank(n as u32), end)).collect();
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let blamed = |lines: &[&str]| {
        let failed =
            FailedAttempt { ends: ends.clone(), lived: Span::seconds(600), ..FailedAttempt::default() };
        let mut verdict = judge(Incident(1), Attempt(0), &ends, 0);
        let kernel_lines = lines.iter().map(|line| (*line).to_owned()).collect();
        let host = HostEvidence { kernel_lines, ..HostEvidence::default() };
        complete(&mut verdict, catalog, &failed, &host);
        verdict
    };
    let lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.";
    let verdict = blamed(&[lost]);
    assert_eq!(verdict.domain, FaultDomain::Hardware);
    assert!(verdict.evidence.iter().any(|line| line.contains(lost)), "{:?}", verdict.evidence);
    // A program's own fault in the kernel log does not point to the GPU.
    let own = "NVRM: Xid (PCI:0000:3b:00): 31, pid=812, name=python, MMU Fault: ENGINE GRAPHICS faulted";
    assert_ne!(blamed(&[own]).domain, FaultDomain::Hardware);
}

fn raised(exception: &str, message: &str, at: u64) -> RankEnd {
    let note = Note { exception: exception.into(), message: message.into(), at: Mono(at), ..Note::default() };
    RankEnd { note: Some(note), detected_at: Some(Mono(at)), ..RankEnd::default() }
}

fn killed(at: u64) -> RankEnd {
    RankEnd { exit: Some((ExitStatus::Signal(9), Mono(at))), ..RankEnd::default() }
}

fn stopped() -> RankEnd {
    RankEnd { exit: Some((ExitStatus::Signal(15), Mono(90))), after_stop: true, ..RankEnd::default() }
}

#[test]
fn an_uncorrectable_memory_error_points_to_the_hardware() {
    let message = "CUDA error: uncorrectable ECC error encountered";
    let verdict = verdict([raised("builtins.RuntimeError", message, 5), stopped()], 0);
    assert_eq!(verdict.domain, FaultDomain::Hardware);
    assert_eq!(verdict.class.as_deref(), Some("hardware_gpu"));
}

#[test]
fn a_verdict_lists_counter_evidence_and_what_would_change_it() {
    let message = "CUDA error: uncorrectable ECC error encountered";
    let mut other = raised("builtins.FileNotFoundError", "No such file: /data/shard-7", 6);
    other.detected_at = Some(Mono(6));
    let doubted = verdict([raised("builtins.RuntimeError", message, 5), other], 0);
    assert_eq!(doubted.domain, FaultDomain::Hardware);
    let against = doubted.doubts.against.join("\n");
    assert!(against.contains("/data/shard-7"), "{against}");
    assert!(!doubted.doubts.would_change.is_empty());
    let plain = verdict([raised("builtins.RuntimeError", message, 5), stopped()], 0);
    assert!(plain.doubts.against.is_empty(), "{:?}", plain.doubts);
}

#[test]
fn nccl_warnings_on_standard_output_count_in_addition_to_the_exception() {
    let message = "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)";
    let warned = |lines: &[&str]| {
        let mut end = raised("torch.distributed.DistBackendError", message, 5);
        end.stdout_tail = lines.iter().map(|line| (*line).to_owned()).collect();
        verdict([end, stopped()], 0)
    };
    let full = "node-7:812:900 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a8Zk2d to 33030532 bytes, error: No space left on device (28)";
    assert_ne!(warned(&["step 3 loss 2.1"]).class.as_deref(), Some("host_resource"));
    assert_eq!(warned(&["step 3 loss 2.1", full]).class.as_deref(), Some("host_resource"));
}

#[test]
fn a_quoted_line_says_how_long_before_the_failure_it_was_printed() {
    let full = "node-7:812:900 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a8Zk2d to 33030532 bytes, error: No space left on device (28)";
    let quoted = |at: u64, steps_after: Option<u64>| {
        let mut end = raised("torch.distributed.DistBackendError", "NCCL error", 5_000_000_000);
        end.stdout_tail = vec![full.to_owned()];
        end.stdout_times = vec![LineTime { at: Mono(at), steps_after }];
        verdict([end, stopped()], 0).evidence.join("\n")
    };
    let (before, at_once) = (quoted(3_500_000_000, Some(1)), quoted(5_000_000_000, Some(0)));
    testing::snapshot!(
        "reasons",
        "diagnose: a quoted line says how long before the failure it was printed",
        before
    );
    testing::snapshot!(
        "reasons",
        "diagnose: a quoted line says how long before the failure it was printed 2",
        at_once
    );
}

#[test]
fn an_exception_caught_earlier_is_not_the_cause() {
    let domain_where = |in_output: bool, before: &str| {
        let message = "HTTP Error 503: Service Unavailable";
        let mut end = raised("urllib.error.HTTPError", message, 5);
        if in_output {
            end.stdout_tail = vec![before.to_owned()];
        }
        end.stderr_tail = vec![
            if in_output { String::new() } else { before.to_owned() },
            "Traceback (most recent call last):".to_owned(),
            format!("urllib.error.HTTPError: {message}"),
        ];
        verdict([end, stopped()], 0).domain
    };
    let shapes = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x11 and 12x24)";
    let domain = |before: &str| {
        let (logged, printed) = (domain_where(true, before), domain_where(false, before));
        assert_eq!(logged, printed, "wherever it is printed");
        printed
    };
    assert_eq!(domain("retrying"), FaultDomain::Infrastructure);
    assert_eq!(domain(shapes), FaultDomain::Infrastructure, "it was caught");
    let lost = "RuntimeError: CUDA error: uncorrectable ECC error encountered";
    assert_eq!(domain(lost), FaultDomain::Hardware, "a device's own word counts");
}

#[test]
fn what_a_program_survived_for_long_is_not_the_cause_of_its_exit() {
    let domain = |code: i32, printed: u64| {
        let stderr_tail = [
            "Traceback (most recent call last):",
            "  File \"train.py\", line 9, in step",
            "KeyError: 'labels'",
        ];
        let line = LineTime { at: Mono(printed * 1_000_000_000), steps_after: None };
        let end = RankEnd {
            exit: Some((ExitStatus::Code(code), Mono(20_000_000_000))),
            stderr_tail: stderr_tail.map(str::to_owned).to_vec(),
            stderr_times: vec![line; 3],
            ..RankEnd::default()
        };
        verdict([end, stopped()], 0).domain
    };
    assert_eq!(domain(3, 12), FaultDomain::Unknown);
    assert_eq!(domain(3, 19), FaultDomain::User);
    // With exit code 1 the exception may have ended the program after a long cleanup.
    assert_eq!(domain(1, 12), FaultDomain::User);
}

#[test]
fn a_failure_of_the_client_is_mainstays_own_and_does_not_show_that_a_program_cannot_run() {
    let traceback = "Traceback (most recent call last):\n  File \"/w/train.py\", line 2, in <module>\n    mainstay.checkpoint.load()\n  \
                     File \"/v/site-packages/mainstay/_pinned.py\", line 49, in synchronize\n    import torch\n\
                     ModuleNotFoundError: No module named 'torch'\n";
    let raised_it = || {
        let mut end = raised("builtins.ModuleNotFoundError", "No module named 'torch'", 5);
        end.note = end.note.map(|note| Note { traceback: traceback.to_owned(), ..note });
        end
    };
    let mut verdict = verdict([raised_it(), raised_it()], 0);
    assert_eq!((verdict.domain, verdict.class.as_deref()), (FaultDomain::Platform, Some(CLIENT_FAILED)));
    let ends = [(Rank(0), raised_it()), (Rank(1), raised_it())].into();
    unrunnable::complete(&mut verdict, &ends);
    assert!(!verdict.cannot_run, "{verdict:?}");
}

#[test]
fn a_missing_module_points_to_the_user() {
    let verdict = verdict([raised("builtins.ModuleNotFoundError", "No module named 'x'", 5), stopped()], 0);
    assert_eq!(verdict.domain, FaultDomain::User);
}

#[test]
fn sigkill_alone_has_no_known_cause_and_with_an_oom_kill_points_to_memory() {
    assert_eq!(verdict([killed(5), stopped()], 0).domain, FaultDomain::Unknown);
    assert_eq!(verdict([killed(5), stopped()], 1).class.as_deref(), Some("host_resource"));
}

#[test]
fn a_killed_worker_is_out_of_memory_only_where_the_kernel_counted_a_kill() {
    let message = "DataLoader worker (pid 2351) is killed by signal: Killed. ";
    let worker = || [raised("builtins.RuntimeError", message, 5), stopped()];
    assert_eq!(verdict(worker(), 1).class.as_deref(), Some("host_resource"));
    let unexplained = verdict(worker(), 0);
    assert_eq!((unexplained.domain, &unexplained.class), (FaultDomain::Unknown, &None), "{unexplained:?}");
    testing::snapshot!(
        "reasons",
        "diagnose: a killed worker without an OOM kill",
        unexplained.evidence.join("\n")
    );
    // Exhausted shared memory ends a worker by SIGBUS, and the kernel counts no kill.
    let bus = "DataLoader worker (pid 2351) is killed by signal: Bus error. ";
    let bus = verdict([raised("builtins.RuntimeError", bus, 5), stopped()], 0);
    assert_eq!(bus.class.as_deref(), Some("host_resource"));
}

#[test]
fn the_count_and_the_log_line_of_one_oom_kill_count_once() {
    let ends: BTreeMap<Rank, RankEnd> = [(Rank(0), killed(5)), (Rank(1), stopped())].into();
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let line = "Out of memory: Killed process 812 (python) total-vm:22533256kB, anon-rss:7728636kB";
    let host = HostEvidence { kernel_lines: vec![line.to_owned()], ..HostEvidence::default() };
    let log_odds = |kills| {
        let failed = FailedAttempt {
            ends: ends.clone(),
            lived: Span::seconds(600),
            out_of_memory_kills: kills,
            ..FailedAttempt::default()
        };
        let mut verdict = judge(Incident(1), Attempt(0), &ends, kills);
        complete(&mut verdict, catalog, &failed, &host);
        assert_eq!(verdict.class.as_deref(), Some("host_resource"));
        (verdict.confidence / (1.0 - verdict.confidence)).ln()
    };
    let (logged, both) = (log_odds(0), log_odds(1));
    assert!((logged..logged + 1.0).contains(&both), "{logged} and {both}");
}

#[test]
fn a_lone_victim_has_no_known_cause() {
    let lost = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4";
    let verdict = verdict([raised("builtins.RuntimeError", lost, 5), stopped()], 0);
    assert_eq!(verdict.domain, FaultDomain::Unknown);
}
