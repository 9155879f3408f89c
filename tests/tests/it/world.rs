//! A job that restarts with another number of ranks: its trainers are notified.

use mainstay_tests::{Stage, has_client};

const SCRIPT: &str = r#"
import mainstay
mainstay.on_world_change(lambda old, new: mark(f"changed.{RANK}", f"{old} to {new}"))
mainstay.step(ATTEMPT)
mark(f"here.{RANK}")
if ATTEMPT == 0 and RANK == 0:
    for rank in range(int(os.environ["WORLD_SIZE"])):
        wait_for(f"here.{rank}")  # a rank that is stopped while it still starts has not been notified
    raise RuntimeError("injected")
"#;

#[test]
fn the_next_run_with_more_ranks_is_notified_and_its_own_restart_is_not() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let reported = |ranks: u32| -> Vec<String> {
        for rank in 0..ranks {
            // Those of the previous run; there are none before the first.
            let _ = std::fs::remove_file(stage.marks().join(format!("here.{rank}")));
        }
        let end = stage.python(SCRIPT).ranks(ranks).options("--fault-timeout 100s").start().end();
        end.assert_status(0);
        let marks = (0..ranks).map(|rank| stage.marks().join(format!("changed.{rank}")));
        marks
            .filter_map(|mark| {
                let text = std::fs::read_to_string(&mark).ok()?;
                std::fs::remove_file(mark).ok()?;
                Some(text)
            })
            .collect()
    };
    assert!(reported(2).is_empty(), "the first run comes after none");
    assert_eq!(reported(3), ["2 to 3"; 3]);
    assert!(reported(3).is_empty());
    assert_eq!(reported(1), ["3 to 1"]);
}
