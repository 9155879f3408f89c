//! `mainstay run` handles torchrun's command line on one host as torchrun does: every option works, or is refused
//! with an explanation. Options for several hosts are tested with those.

use std::io::Read;
use std::process::Stdio;

use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_tests::{Stage, journal};
use nix::sys::signal::Signal;

use crate::words::terminal;

/// Each rank leaves a mark with its rank.
const MARKS: &str = r#"mark "ran.$RANK" "$LOCAL_RANK of $WORLD_SIZE""#;

#[test]
fn options_may_be_abbreviated_like_those_of_argparse() {
    let stage = Stage::new();
    let job = stage.sh(MARKS).options("--nproc_per 2 --redirect=3 --stand --monitor 0.5 --run_p").start();
    // --run-path has a shell script run by Python, which it is not.
    let end = job.end();
    assert_ne!(end.status, 0, "{end}");
    let job = stage.sh(MARKS).options("--nproc_per 2 --redirect=3 --stand --monitor 0.5").start();
    assert_eq!(job.mark("ran.1"), "1 of 2");
    job.end().assert_status(0);
}

#[test]
fn an_ambiguous_abbreviation_names_what_it_could_be() {
    let stage = Stage::new();
    let end = stage.sh(MARKS).options("--rdzv c10d").start().end();
    end.assert_status(64);
    testing::snapshot!("torchrun", "an ambiguous option", stage.masked(&end.stderr));
}

#[test]
fn switches_are_read_from_the_environment_as_torchrun_writes_them() {
    let stage = Stage::new();
    let plan = || {
        let plan = stage.sh(MARKS).variable("PET_NO_PYTHON", "1").variable("PET_STANDALONE", "1");
        plan.variable("PET_START_METHOD", "spawn").variable("PET_MONITOR_INTERVAL", "1")
    };
    plan()
        .variable("PET_MODULE", "1")
        .start()
        .end()
        .assert_status(64)
        .assert_printed("PET_MODULE and PET_NO_PYTHON");
    for off in ["0", "no", "False", "OFF", "n", "f"] {
        let job = plan().variable("PET_MODULE", off).start();
        job.end().assert_status(0);
    }
    let refused = plan().variable("PET_MODULE", "perhaps").start().end();
    refused.assert_status(64).assert_printed("PET_MODULE is 1, true");
}

#[test]
fn a_script_runs_by_its_path_whatever_else_is_set() {
    let stage = Stage::new();
    let script = "mark(f'path.{RANK}', __name__ + ' ' + ' '.join(sys.argv[1:]))\n";
    let plan = stage.python(script).arguments(&["--run-path", "x"]);
    let job = plan.ranks(2).options("--run-path --no-python --module").start();
    assert_eq!(job.mark("path.1"), "__main__ --run-path x");
    job.end().assert_status(0);
}

#[test]
fn only_the_usual_implementation_of_logs_is_supported_and_others_are_refused() {
    let stage = Stage::new();
    stage.sh(MARKS).options("--logs_specs=default").start().end().assert_status(0);
    let end = stage.sh(MARKS).options("--logs_specs=DOESNOT_EXIST").start().end();
    end.assert_status(64);
    testing::snapshot!("torchrun", "another implementation of logs", stage.masked(&end.stderr));
}

/// Values that torchrun refuses as well.
const REFUSED_VALUES: [&str; 8] = [
    "--nproc-per-node unknown",
    "--start-method thread",
    "--monitor-interval 0",
    "--numa-binding die",
    "--signals-to-handle SIGTERM,SIGKILL",
    "--local-ranks-filter a",
    "--redirects 4",
    "--shutdown-timeout soon",
];

#[test]
fn values_that_torchrun_refuses_are_refused() {
    let stage = Stage::new();
    for options in REFUSED_VALUES {
        let end = stage.sh(MARKS).options(options).start().end();
        end.assert_status(64);
        testing::snapshot!("torchrun", options, stage.masked(&end.stderr));
    }
    if !std::path::Path::new("/dev/dri").exists() {
        let end = stage.sh(MARKS).options("--nproc-per-node xpu").start().end();
        end.assert_status(64).assert_printed("no Intel GPU");
    }
}

#[test]
fn the_prefix_of_lines_is_a_template_with_torchruns_macros() {
    let stage = Stage::new();
    let plan = stage.sh(r#"echo "creating $RANK""#).ranks(2).options("--redirect=3 --tee=3 --role trainer");
    let template = "[${role_name}${local_rank}|rank${rank}]: ";
    let end = plan.variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", template).start().end();
    end.assert_status(0);
    for rank in 0..2 {
        let line = format!("[trainer{rank}|rank{rank}]: creating {rank}\n");
        assert!(end.stdout.contains(&line), "{}", end.stdout);
    }
}

#[test]
fn lines_with_a_text_are_duplicated_into_one_file_of_all_ranks() {
    let stage = Stage::new();
    let script =
        r#"echo "helloA, $RANK"; echo "helloB $RANK"; echo "worldA $RANK" >&2; echo "worldB $RANK" >&2"#;
    let options = "--redirects 3 --duplicate-stdout-filters helloA,,,other --duplicate_stderr_filters=A,B";
    let end = stage.sh(script).ranks(2).options(options).start().end();
    end.assert_status(0);
    let sorted = |name: &str| {
        let text = std::fs::read_to_string(end.run_dir.join("attempt_0").join(name)).expect("a file");
        let mut lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted("filtered_stdout.log"), ["[rank 0] helloA, 0", "[rank 1] helloA, 1"]);
    assert_eq!(sorted("filtered_stderr.log").len(), 4);
    assert!(!end.stdout.contains("hello"), "what is not shown can be duplicated: {}", end.stdout);
}

#[test]
fn a_virtual_local_rank_is_0_and_its_gpu_the_only_one() {
    let stage = Stage::new();
    let script = r#"mark "seen.$RANK" "$LOCAL_RANK of $LOCAL_WORLD_SIZE: $CUDA_VISIBLE_DEVICES $1""#;
    let plan = || stage.sh(script).ranks(2).arguments(&["${local_rank}"]).options("--virtual-local-rank");
    let job = plan().variable("CUDA_VISIBLE_DEVICES", "3,GPU-5,7").start();
    assert_eq!((job.mark("seen.0"), job.mark("seen.1")), ("0 of 2: 3 0".into(), "0 of 2: GPU-5 1".into()));
    job.end().assert_status(0);
    let refused = plan().variable("CUDA_VISIBLE_DEVICES", "3").start().end();
    refused.assert_status(64);
    testing::snapshot!("torchrun", "fewer GPUs than ranks", stage.masked(&refused.stderr));
}

/// The CPUs of a rank, as the kernel lists them.
const CPUS: &str =
    r#"mark "cpus.$MAINSTAY_JOB_ID.$RANK" "$(sed -n 's/^Cpus_allowed_list:\t//p' /proc/self/status)""#;

#[test]
fn ranks_are_bound_to_cpus_of_their_own() {
    let cpus = std::thread::available_parallelism().expect("a number of CPUs").get();
    if cpus < 2 || std::path::Path::new("/dev/nvidia0").exists() {
        return mainstay_tests::skipped("it takes two CPUs, and GPUs would decide");
    }
    let stage = Stage::new();
    let job = stage.sh(CPUS).ranks(1).options("--numa-binding node").start();
    let cpus_of = |job: &mainstay_tests::Job, rank: u32| job.mark(&format!("cpus.{}.{rank}", job.id()));
    let all = cpus_of(&job, 0);
    job.end().assert_status(0);
    let job = stage.sh(CPUS).ranks(2).options("--numa-binding exclusive").start();
    let (first, second) = (cpus_of(&job, 0), cpus_of(&job, 1));
    let end = job.end();
    if end.status == 0 {
        assert!(first != second && first != all, "{first} and {second} of {all}");
    } else {
        end.assert_printed("core(s) for 2 ranks");
    }
}

#[test]
fn a_forked_rank_is_bound_like_one_that_was_started_plainly() {
    let stage = Stage::new();
    let exclusive =
        |plan: mainstay_tests::Plan<'_>| plan.ranks(2).options("--numa-binding exclusive").start();
    if exclusive(stage.sh("exit 0")).end().status != 0 {
        return mainstay_tests::skipped("it takes two cores");
    }
    let script = r#"
mark(f"cpus.{ATTEMPT}.{RANK}", sorted(os.sched_getaffinity(0)))
if ATTEMPT == 0:
    time.sleep(36000)
"#;
    let job = exclusive(stage.python(script).options("--warm-imports json"));
    let before = (job.mark("cpus.0.0"), job.mark("cpus.0.1"));
    job.wait_for_fact("the template", |fact| match fact {
        Fact::Observed(seen) => seen.component == "template" && seen.event == "warm",
        _ => false,
    });
    job.kill_rank(0, 1);
    let after = (job.mark("cpus.1.0"), job.mark("cpus.1.1"));
    assert_eq!(before, after);
    assert_ne!(before.0, before.1);
    job.end().assert_status(0);
}

#[test]
fn further_signals_end_the_job_and_reach_the_ranks() {
    let stage = Stage::new();
    let script = r#"trap 'mark "got.$RANK" USR1; exit 0' USR1; mark "up.$RANK"; work"#;
    let job = stage.sh(script).ranks(2).options("--signals-to-handle SIGTERM,SIGUSR1").start();
    job.mark("up.0");
    job.mark("up.1");
    job.signal(Signal::SIGUSR1);
    assert_eq!((job.mark("got.0"), job.mark("got.1")), ("USR1".to_owned(), "USR1".to_owned()));
    job.end().assert_status(128 + Signal::SIGUSR1 as i32);
}

#[test]
fn the_time_to_shut_down_may_come_from_either_variable() {
    let stage = Stage::new();
    for variable in ["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] {
        let job =
            stage.sh(r#"trap '' TERM; mark "up.$MAINSTAY_JOB_ID"; work"#).variable(variable, "0.2").start();
        job.mark(&format!("up.{}", job.id()));
        job.signal(Signal::SIGTERM);
        let end = job.end();
        end.assert_status(143);
        assert_eq!(
            journal::exits(&end.journal, 0),
            [ExitStatus::Signal(9)],
            "the time is over at once\n{end}"
        );
    }
}

#[test]
fn a_reader_that_pauses_misses_no_line_of_a_job_that_ended_meanwhile() {
    let stage = Stage::new();
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let script = r#"i=0; while [ $i -lt 5000 ]; do echo "line $i of rank $RANK, longer than it need be"; i=$((i+1)); done; mark "wrote.$RANK""#;
    let job = stage.sh(script).ranks(2).stdout(Stdio::from(writer)).start();
    // Both have ended or are about to, and nothing was read: a pipe holds a small part of it.
    job.mark("wrote.0");
    job.mark("wrote.1");
    job.wait_for_fact("the end of the ranks", |fact| matches!(fact, Fact::AttemptEnded { .. }));
    let mut shown = String::new();
    reader.read_to_string(&mut shown).expect("text, to the end of the launcher");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(shown.lines().count(), 10_000);
}

#[test]
fn output_without_a_reader_is_named_and_the_closing_line_is_printed() {
    let stage = Stage::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let script = r#"i=0; while [ $i -lt 5000 ]; do echo "line $i of rank $RANK, longer than it need be"; i=$((i+1)); done"#;
    let end = stage.sh(script).ranks(2).stdout(Stdio::from(writer)).start().end();
    end.assert_status(0);
    let named = end.line(&[" bytes "]);
    testing::snapshot!(
        "torchrun",
        "output without a reader",
        stage.masked(named).replace(|letter: char| letter.is_ascii_digit(), "")
    );
    assert!(end.stderr.trim_end().ends_with(')') && end.stderr.contains(terminal::ENDED_WELL), "{end}");
    drop(reader);
}

#[test]
fn the_launchers_output_is_in_a_file_whether_the_terminal_is_read_or_not() {
    let stage = Stage::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let script =
        r#"i=0; while [ $i -lt 5000 ]; do echo "line $i, longer than it need be" >&2; i=$((i+1)); done"#;
    let end = stage.sh(script).stderr(Stdio::from(writer)).start().end();
    end.assert_status(0);
    let kept = std::fs::read_to_string(end.run_dir.join("launcher.log")).expect("a file");
    assert!(kept.contains(terminal::ENDED_WELL), "{kept}");
    let named = kept.lines().find(|line| line.contains(" bytes ")).unwrap_or_default();
    assert!(named.contains('('), "what was not shown is counted: {kept}");
    drop(reader);
}

#[test]
fn the_launchers_lines_have_their_time_where_no_person_looks_on() {
    let stage = Stage::new();
    let timed = |line: &str| {
        let time = line.strip_prefix("mainstay: ").and_then(|rest| rest.split(' ').next());
        time.is_some_and(|time| time.ends_with('Z') && time.matches(':').count() == 2)
    };
    let end = stage.sh("exit 0").start().end();
    assert!(end.stderr.lines().all(timed) && !end.stderr.is_empty(), "{}", end.stderr);
    let end = stage.sh("exit 0").options("--timestamps=false").start().end();
    assert!(!end.stderr.lines().any(timed), "{}", end.stderr);
    let end = stage.sh("exit 0").variable("MAINSTAY_TIMESTAMPS", "no").options("--timestamps").start().end();
    assert!(end.stderr.lines().all(timed), "{}", end.stderr);
}
