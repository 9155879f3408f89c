//! The imports of a template: modules that ranks held, modules that the text of the program names, and modules that
//! it leaves to the ranks.

use mainstay_model::entry::Entry;
use mainstay_tests::{Stage, has_client, processes};

use super::{is_reported, reported};

#[test]
fn what_ranks_hold_is_learned_from_them() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import sys
held = "fractions" in sys.modules
import fractions
import mainstay
for step in range(20):
    mainstay.step(step)
mark(f"seen.{ATTEMPT}", str(held))
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(1).start();
    assert_eq!(job.mark("seen.0"), "False");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "True");
    job.end().assert_status(0);
}

#[test]
fn learned_modules_replace_those_that_were_only_named() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import sys
held = "fractions" in sys.modules
import fractions
import mainstay
wait_for("learn")
for step in range(20):
    mainstay.step(step)
mark(f"seen.{ATTEMPT}", str(held))
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(1).options("--warm-imports json").start();
    reported(&job, "warm");
    stage.mark("learn");
    job.mark("seen.0");
    let warm =
        |journal: &[Entry]| journal.iter().filter(|entry| is_reported(entry, "warm").is_some()).count();
    processes::wait_until("the second template to be warm", || warm(&job.journal()) == 2);
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "True");
    job.end().assert_status(0);
}

/// An environment laid over another one by a .pth file, or a folder of `pip install --target`, holds libraries; the
/// program's own modules may look at their rank and be edited between attempts.
#[test]
fn libraries_are_known_by_their_records_in_any_place() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let (installed, own) = (stage.work().join("installed"), stage.work().join("own"));
    std::fs::create_dir_all(installed.join("library-1.0.dist-info")).expect("a folder");
    std::fs::create_dir_all(&own).expect("a folder");
    std::fs::write(installed.join("library.py"), "").expect("a file");
    std::fs::write(own.join("helpers.py"), "").expect("a file");
    let script = r#"
import sys
held = "library" in sys.modules, "helpers" in sys.modules
import library, helpers
import mainstay
for step in range(20):
    mainstay.step(step)
mark(f"seen.{ATTEMPT}", str(held))
if ATTEMPT == 0:
    wait_for("never")
"#;
    let path = std::env::join_paths([&installed, &own]).expect("a path");
    let job = stage.python(script).ranks(1).variable("PYTHONPATH", &path).start();
    assert_eq!(job.mark("seen.0"), "(False, False)");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "(True, False)");
    job.end().assert_status(0);
}

/// No client, no named modules: the text of the program is enough, from the start on.
#[test]
fn imports_of_the_text_are_warm_before_any_rank_has_reported_its_modules() {
    let stage = Stage::new();
    let script = r#"
import sys
held = [name in sys.modules for name in ("fractions", "wave", "chunk_of_nothing", "colorsys")]
import fractions
try:
    import chunk_of_nothing
except ImportError:
    import colorsys
if len(sys.argv) > 1000:
    import wave
import os
mark(f"seen.{ATTEMPT}.{RANK}", f"{held} {os.sched_getscheduler(0)}")
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(2).start();
    assert_eq!(job.mark("seen.0.0"), "[False, False, False, False] 0");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    // Only unconditional imports; and a rank runs as any process, though its template was replaced.
    assert_eq!(job.mark("seen.1.0"), "[True, False, False, False] 0");
    job.end().assert_status(0);
}

/// Its own modules are left to the program, and a package that cannot survive a fork is left out.
#[test]
fn imports_with_side_effects_are_left_to_the_ranks() {
    let stage = Stage::new();
    let installed = stage.work().join("installed");
    std::fs::create_dir_all(installed.join("spinner-1.0.dist-info")).expect("a folder");
    let spinner =
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n";
    std::fs::write(installed.join("spinner.py"), spinner).expect("a file");
    let script = r#"
import sys
held = "spinner" in sys.modules, "fractions" in sys.modules
import spinner, fractions
mark(f"seen.{ATTEMPT}", str(held))
if ATTEMPT == 0:
    wait_for("never")
"#;
    let job = stage.python(script).ranks(1).variable("PYTHONPATH", &installed).start();
    let left_out = reported(&job, "module_left_out");
    assert!(left_out.contains("spinner"), "{left_out}");
    reported(&job, "warm");
    job.kill_rank(0, 0);
    assert_eq!(job.mark("seen.1"), "(False, True)");
    job.end().assert_status(0);
}
