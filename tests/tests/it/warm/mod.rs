//! Ranks that are forked from a template behave as if they had been started plainly; if that cannot be guaranteed,
//! they are started plainly.

mod learned;

use mainstay_model::entry::{Body, Entry, ExitStatus, Fact};
use mainstay_model::id::Rank;
use mainstay_model::observation::Observation;
use mainstay_tests::{Job, Stage, has_client, has_torch, journal, processes, python_with_frameworks};
use nix::sys::signal::Signal;

/// Waits for an event of the launcher's template.
fn reported(job: &Job, event: &str) -> String {
    job.wait_for(&format!("the template's {event}"), |entry| is_reported(entry, event))
}

/// The detail of an entry about the template, if it is this event.
fn is_reported(entry: &Entry, event: &str) -> Option<String> {
    match &entry.body {
        Body::Fact(Fact::Observed(Observation { component, event: reported, detail, .. }))
            if component == "template" && reported == event =>
        {
            Some(detail.clone())
        }
        _ => None,
    }
}

/// Runs a script twice: its first attempt is killed once there is a template, the second is forked from it. Returns
/// `seen` of both attempts' first ranks.
fn plain_and_forked(stage: &Stage, script: &str, options: &str) -> (String, String) {
    let script = format!("{script}\nif ATTEMPT == 0:\n    wait_for('never')\n");
    let job = stage.python(&script).ranks(2).options(options).arguments(&["--lr", "1", "-x"]).start();
    let plain = job.mark("seen.0.0");
    job.mark("seen.0.1");
    reported(&job, "warm");
    job.kill_rank(0, 1);
    let forked = job.mark("seen.1.0");
    let end = job.end();
    end.assert_status(0);
    (plain, forked)
}

#[test]
fn a_forked_rank_sees_what_a_plainly_started_one_sees() {
    let stage = Stage::new();
    let script = r#"
import os, random, resource, signal, stat, sys, threading
def seen():
    main = sys.modules["__main__"]
    yield "argv", sys.argv[1:], os.path.basename(sys.argv[0]), sys.orig_argv[1:] if hasattr(sys, "orig_argv") else 0
    yield "main", __name__, __file__, main is sys.modules[seen.__module__], main.__spec__, type(main.__loader__).__name__
    yield "path", sys.path[0], os.getcwd()
    yield "parent", os.getppid() == LAUNCHER, os.getpgid(0) == os.getpid(), os.getsid(0)
    yield "signals", [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]
    yield "mask", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    yield "threads", threading.current_thread() is threading.main_thread(), threading.active_count()
    yield "files", sorted(os.readlink(f"/proc/self/fd/{n}").replace(f"attempt_{ATTEMPT}", "") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}"))
    yield "limits", resource.getrlimit(resource.RLIMIT_NOFILE), sorted(os.sched_getaffinity(0)), os.nice(0)
    known = ("MASTER_PORT", "MAINSTAY_ATTEMPT", "MAINSTAY_PREVIOUS_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "MAINSTAY_PAGE", "MAINSTAY_STACKS",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    yield "environment", sorted((k, v) for k, v in os.environ.items() if k not in known)
    yield "cgroup", open("/proc/self/cgroup").read()
    yield "buffering", sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding
LAUNCHER = int(os.environ["LAUNCHER"]) if "LAUNCHER" in os.environ else os.getppid()
mark(f"seen.{ATTEMPT}.{RANK}", "\n".join(map(repr, seen())))
"#;
    let (plain, forked) = plain_and_forked(&stage, script, "--warm-imports json,decimal");
    assert_eq!(plain, forked);
    assert!(plain.contains("'parent', True, True"), "{plain}");
}

/// As configuration libraries do, which take the arguments as the default of a parameter.
#[test]
fn a_library_that_keeps_the_arguments_at_its_import_has_the_programs_own() {
    let stage = Stage::new();
    let library = "import sys\nKEPT = list(sys.argv)\nSAME = sys.argv\n";
    std::fs::write(stage.work().join("keeps_arguments.py"), library).expect("a module");
    let script = r#"
import sys
forked = "keeps_arguments" in sys.modules
import keeps_arguments as kept
mark(f"seen.{ATTEMPT}.{RANK}", repr((kept.KEPT, kept.SAME is sys.argv)))
assert forked == (ATTEMPT > 0), "the second attempt has it from the template"
"#;
    let (plain, forked) = plain_and_forked(&stage, script, "--warm-imports keeps_arguments");
    assert_eq!(plain, forked);
    assert!(plain.contains("'--lr', '1', '-x'"), "{plain}");
}

#[test]
fn a_library_that_looks_at_its_rank_at_its_import_is_left_to_the_ranks() {
    let stage = Stage::new();
    let library = "import os\nRANK = int(os.environ.get('RANK', -1))\n";
    std::fs::write(stage.work().join("keeps_rank.py"), library).expect("a module");
    let script = r#"
import sys
held = sorted({"json", "keeps_rank"}.intersection(sys.modules))
import keeps_rank
mark(f"seen.{ATTEMPT}.{RANK}", f"{keeps_rank.RANK == RANK} {held}")
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(2).options("--warm-imports json,keeps_rank").start();
    job.mark("seen.0.0");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    for rank in 0..2 {
        assert_eq!(job.mark(&format!("seen.1.{rank}")), "True ['json']", "forked, without this module");
    }
    job.end().assert_status(0);
}

/// Lightning and TorchMetrics keep the rank that they find when they are imported.
#[test]
fn libraries_that_keep_the_rank_have_each_ranks_own() {
    let Some(python) = python_with_frameworks() else { return };
    let stage = Stage::new();
    let script = r#"
import os, sys
forked = "torchmetrics" in sys.modules and "lightning.fabric" in sys.modules
import lightning.fabric.utilities.rank_zero as fabric
import torchmetrics.utilities.prints as metrics
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
place = os.environ["MARKS"] + f"/seen.{attempt}.{rank}"
with open(place + ".new", "w") as file:
    file.write(f"{fabric.rank_zero_only.rank} {metrics.rank_zero_only.rank} {forked}")
os.rename(place + ".new", place)
if attempt == "0":
    import time
    time.sleep(36000)
"#;
    let path = stage.work().join("keeps.py");
    std::fs::write(&path, script).expect("a script");
    let program = [python.display().to_string(), path.display().to_string()];
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let options = "--warm-imports lightning.fabric,torchmetrics";
    let job = stage.command(&program).ranks(2).options(options).start();
    for rank in 0..2 {
        assert_eq!(job.mark(&format!("seen.0.{rank}")), format!("{rank} {rank} False"));
    }
    reported(&job, "warm");
    job.kill_rank(0, 0);
    for rank in 0..2 {
        assert_eq!(job.mark(&format!("seen.1.{rank}")), format!("{rank} {rank} True"));
    }
    job.end().assert_status(0);
}

#[test]
fn forked_ranks_draw_numbers_of_their_own() {
    let stage = Stage::new();
    let script = "import random, uuid\nmark(f'seen.{ATTEMPT}.{RANK}', f'{random.random()} {uuid.uuid4()}')\n";
    let script = format!("{script}\nif ATTEMPT == 0:\n    wait_for('never')\n");
    let job = stage.python(&script).ranks(2).options("--warm-imports random").start();
    reported(&job, "warm");
    job.kill_rank(0, 0);
    let (one, other) = (job.mark("seen.1.0"), job.mark("seen.1.1"));
    job.end().assert_status(0);
    assert_ne!(one, other);
}

/// A fork does not seed the global generators of NumPy and PyTorch again.
#[test]
fn forked_ranks_draw_numbers_of_their_own_from_libraries_too() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import sys
held = "torch" in sys.modules
import numpy, torch
mark(f"seen.{ATTEMPT}.{RANK}", f"{numpy.random.random()} {torch.rand(1).item()} {held}")
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(2).options("--warm-imports numpy.random,torch").start();
    let drawn = |attempt: u32, rank: u32| -> Vec<String> {
        let seen = job.mark(&format!("seen.{attempt}.{rank}"));
        seen.split_whitespace().map(str::to_owned).collect()
    };
    let plain = [drawn(0, 0), drawn(0, 1)];
    reported(&job, "warm");
    job.kill_rank(0, 0);
    let (one, other) = (drawn(1, 0), drawn(1, 1));
    job.end().assert_status(0);
    assert_eq!((one[2].as_str(), other[2].as_str()), ("True", "True"), "both were forked");
    for library in 0..2 {
        assert_ne!(plain[0][library], plain[1][library], "as ranks that are started plainly do");
        assert_ne!(one[library], other[library]);
    }
}

/// For a script and for a module: identical to the last letter.
#[test]
fn a_forked_rank_prints_the_traceback_of_a_plainly_started_one() {
    let stage = Stage::new();
    let text = r#"
import os, time
def inner(value):
    try:
        return {}[value]
    except KeyError as error:
        raise ValueError(f"no {value}") from error
def wait():
    while not os.path.exists(os.environ["MARKS"] + "/warm"):
        time.sleep(0.01)
wait()
inner("thing")
"#;
    let work = stage.work();
    std::fs::write(work.join("raising.py"), text).expect("a file");
    for program in [&["raising.py"][..], &["-m", "raising"]] {
        let job = stage.command(program).ranks(1).options("--warm-imports json --max-restarts 1").start();
        reported(&job, "warm");
        stage.mark("warm");
        let end = job.end();
        std::fs::remove_file(stage.marks().join("warm")).expect("a mark");
        end.assert_status(1);
        let (plain, forked) = (end.output(0, 0, "stderr"), end.output(1, 0, "stderr"));
        assert!(plain.contains("ValueError: no thing") && plain.contains("direct cause"), "{plain}");
        assert_eq!(plain, forked, "{program:?}");
    }
}

#[test]
fn the_next_ranks_are_there_before_the_failed_ones_are_judged() {
    let stage = Stage::new();
    let script = "mark(f'seen.{ATTEMPT}.{RANK}', str(__import__('os').getpid()))\nif ATTEMPT == 0:\n    wait_for('never')\n";
    let job = stage.python(script).ranks(2).options("--warm-imports json").start();
    reported(&job, "warm");
    let waiting = || -> Vec<i32> {
        let children = processes::children(job.launcher()).into_iter();
        children.filter(|pid| is_of_the_template(*pid)).collect()
    };
    // The template, and one for each rank that is already the launcher's own child.
    processes::wait_until("standbys", || waiting().len() == 3);
    let prepared = waiting();
    job.kill_rank(0, 0);
    for rank in 0..2 {
        let pid: i32 = job.mark(&format!("seen.1.{rank}")).parse().expect("a pid");
        assert!(prepared.contains(&pid), "rank {rank} is {pid}, and {prepared:?} waited");
    }
    job.end().assert_status(0);
}

fn is_of_the_template(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("template.py")
}

#[test]
fn classes_of_the_program_are_pickled_and_processes_started_as_ever() {
    let stage = Stage::new();
    let script = r#"
import multiprocessing, pickle
class Batch:
    def __init__(self, n): self.n = n
def double(batch): return batch.n * 2
if __name__ == "__main__":
    same = pickle.loads(pickle.dumps(Batch(3))).n
    results = []
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results.append(pool.map(double, [Batch(21)]))
    mark(f"seen.{ATTEMPT}.{RANK}", f"{same} {results}")
"#;
    let job_script = format!("{script}    if ATTEMPT == 0:\n        wait_for('never')\n");
    let job = stage.python(&job_script).ranks(1).options("--warm-imports multiprocessing.pool").start();
    job.mark("seen.0.0");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1.0"), "3 [[42], [42], [42]]");
    job.end().assert_status(0);
}

#[test]
fn every_end_of_a_program_has_the_status_it_would_have() {
    let ends: [(&str, ExitStatus, &str); 6] = [
        ("sys.exit(7)", ExitStatus::Code(7), ""),
        ("sys.exit('out of luck')", ExitStatus::Code(1), "out of luck"),
        ("raise KeyError('lost')", ExitStatus::Code(1), "KeyError: 'lost'"),
        ("raise KeyboardInterrupt", ExitStatus::Signal(2), "KeyboardInterrupt"),
        ("os._exit(9)", ExitStatus::Code(9), ""),
        ("compile('x = = 1', 'given.py', 'exec')", ExitStatus::Code(1), "SyntaxError"),
    ];
    let stage = Stage::new();
    for (statement, status, words) in ends {
        let script = format!(
            "import os, sys\nif ATTEMPT == 0:\n    mark('waits')\n    wait_for('never')\ndef work():\n    {statement}\nwork()\n"
        );
        let job = stage.python(&script).ranks(1).options("--warm-imports json --max-restarts 1").start();
        reported(&job, "warm");
        job.kill_rank(0, 0);
        let end = job.end();
        let exits: Vec<ExitStatus> = journal::facts(&end.journal)
            .filter_map(|fact| match fact {
                Fact::RankExited { attempt, status, .. } if attempt.0 == 1 => Some(*status),
                _ => None,
            })
            .collect();
        assert_eq!(exits, [status], "{statement}\n{end}");
        let printed = end.output(1, 0, "stderr");
        assert!(printed.contains(words), "{statement}: {printed}");
        // The traceback starts where the program does.
        assert!(!printed.contains("template"), "{statement}: {printed}");
    }
}

#[test]
fn an_exception_of_a_forked_rank_leaves_its_note() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(ATTEMPT)
if ATTEMPT == 0:
    wait_for("never")
raise ValueError("of the program")
"#;
    let job = stage.python(script).ranks(1).options("--warm-imports json --max-restarts 1").start();
    reported(&job, "warm");
    job.kill_rank(0, 0);
    let end = job.end();
    let notes: Vec<_> = journal::facts(&end.journal)
        .filter_map(|fact| match fact {
            Fact::RankRaised { rank: Rank(0), note, .. } => Some(note.clone()),
            _ => None,
        })
        .collect();
    let [note] = &notes[..] else { panic!("one note\n{end}") };
    assert_eq!((note.exception.as_str(), note.message.as_str()), ("ValueError", "of the program"));
    assert!(!note.traceback.contains("template"), "{}", note.traceback);
}

#[test]
fn modules_are_run_as_modules() {
    let stage = Stage::new();
    let package = stage.work().join("trainer");
    std::fs::create_dir(&package).expect("a package");
    std::fs::write(package.join("__init__.py"), "").expect("a file");
    let text = r#"
import os, sys, time
from . import __name__ as package
attempt = os.environ["MAINSTAY_ATTEMPT"]
marks = os.environ["MARKS"]
main = sys.modules["__main__"]
seen = [__name__, __package__, package, __spec__.name, sys.argv, sys.path[0], main.__dict__ is globals()]
with open(f"{marks}/seen.{attempt}.new", "w") as file:
    file.write(repr(seen))
os.rename(f"{marks}/seen.{attempt}.new", f"{marks}/seen.{attempt}")
if attempt == "0":
    time.sleep(1000)
"#;
    std::fs::write(package.join("main.py"), text).expect("a file");
    let job = stage.command(&["-m", "trainer.main", "--x"]).ranks(1).options("--warm-imports json").start();
    let plain = job.mark("seen.0");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), plain);
    job.end().assert_status(0);
}

#[test]
fn a_module_that_starts_a_thread_is_left_to_the_ranks() {
    let stage = Stage::new();
    std::fs::write(
        stage.work().join("threaded.py"),
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    )
    .expect("a file");
    let script = r#"
import sys, threading
held = "threaded" in sys.modules, "decimal" in sys.modules
import threaded
mark(f"seen.{ATTEMPT}", f"{held} {threading.active_count()}")
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage
        .python(script)
        .ranks(1)
        .variable("PYTHONPATH", stage.work())
        .options("--warm-imports threaded,decimal")
        .start();
    let left_out = reported(&job, "module_left_out");
    assert!(left_out.contains("threaded") && left_out.contains("1 thread"), "{left_out}");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "(False, True) 2");
    job.end().assert_status(0);
}

#[test]
fn a_console_entry_point_is_forked_as_the_program_that_it_is() {
    let stage = Stage::new();
    let text = format!(
        r#"#!{}
import os, sys, time
attempt, marks = os.environ["MAINSTAY_ATTEMPT"], os.environ["MARKS"]
seen = [__name__, __file__, sys.argv, sys.path[0], type(__spec__).__name__, "decimal" in sys.modules]
with open(f"{{marks}}/seen.{{attempt}}.new", "w") as file:
    file.write(repr(seen[:-1]) + " " + str(seen[-1]))
os.rename(f"{{marks}}/seen.{{attempt}}.new", f"{{marks}}/seen.{{attempt}}")
if attempt == "0":
    time.sleep(1000)
"#,
        python_path().display()
    );
    let program = stage.script("train-it", &text);
    let job =
        stage.command(&[&program, "--x"]).options("--no-python --warm-imports decimal").ranks(1).start();
    let plain = job.mark("seen.0");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    let (plain, forked) = (plain.replace("False", "True"), job.mark("seen.1"));
    assert_eq!(plain, forked);
    assert!(forked.ends_with(" True"), "it was forked: {forked}");
    job.end().assert_status(0);
}

/// A shebang does not search for a name.
fn python_path() -> std::path::PathBuf {
    let python = mainstay_tests::python();
    if python.is_absolute() {
        return python;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|place| place.join(&python)).find(|file| file.exists());
    // A missing program is reported when it is started.
    found.unwrap_or(python)
}

#[test]
fn a_program_that_cannot_be_forked_is_started_plainly_with_a_reason() {
    let stage = Stage::new();
    let python = mainstay_tests::python().display().to_string();
    let wait =
        "import os, time\nwhile not os.path.exists(os.environ['MARKS'] + '/enough'): time.sleep(0.01)\n";
    let job = stage.command(&[&python, "-c", wait]).options("--no-python").start();
    let why = reported(&job, "plain");
    assert!(why.contains("-c"), "{why}");
    stage.mark("enough");
    job.end().assert_status(0);
}

#[test]
fn with_no_warm_there_is_no_template() {
    let stage = Stage::new();
    let script = "mark(f'seen.{ATTEMPT}', str('decimal' in __import__('sys').modules))\nif ATTEMPT == 0:\n    wait_for('never')\n";
    let job = stage.python(script).ranks(1).options("--no-warm --warm-imports decimal").start();
    job.mark("seen.0");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "False");
    let end = job.end();
    assert!(!end.run_dir.join("template").exists(), "{end}");
}

#[test]
fn a_template_that_is_killed_costs_no_more_than_a_plain_start() {
    let stage = Stage::new();
    let script =
        "mark(f'seen.{ATTEMPT}', str(__import__('os').getpid()))\nif ATTEMPT == 0:\n    wait_for('never')\n";
    let job = stage.python(script).ranks(2).options("--warm-imports json").start();
    reported(&job, "warm");
    let is_template = |pid: &i32| is_of_the_template(*pid);
    // Its standbys are younger than it.
    let template = processes::of_job(job.id()).into_iter().filter(is_template).min().expect("a template");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(template), Signal::SIGKILL).expect("it lives");
    job.kill_rank(0, 0);
    job.mark("seen.1");
    let end = job.end();
    end.assert_status(0);
}

#[test]
fn the_template_goes_with_its_launcher() {
    let stage = Stage::new();
    let job =
        stage.python("mark('waits')\nwait_for('never')\n").ranks(2).options("--warm-imports json").start();
    job.mark("waits");
    reported(&job, "warm");
    // Fails with what is left, if anything is: standbys carry the job's mark like all its processes.
    job.kill_launcher();
}
