//! A rank that the kernel really kills for lack of memory: in a separate cgroup with a low limit.
//!
//! The kernel counts such kills for the whole machine: this test is alone in its program, so that no other SIGKILL
//! is counted as one.

use std::fs;
use std::path::PathBuf;

use mainstay_model::verdict::Cause;
use mainstay_tests::Stage;

/// A memory cgroup, if this machine lets tests make one; deleted at the end.
struct Cramped(PathBuf);

impl Cramped {
    fn new() -> Option<Cramped> {
        let name = format!("mainstay-test-oom-{}", std::process::id());
        let places = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        for (place, limit) in places {
            let group = Cramped(PathBuf::from(place).join(&name));
            if fs::create_dir(&group.0).is_ok() && fs::write(group.0.join(limit), "96M").is_ok() {
                // Swap would only make it take longer.
                for (swap, none) in [("memory.swappiness", "0"), ("memory.swap.max", "0")] {
                    let _ = fs::write(group.0.join(swap), none);
                }
                return Some(group);
            }
        }
        mainstay_tests::skipped("no memory cgroup can be made here");
        None
    }
}

impl Drop for Cramped {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_rank_that_the_kernel_killed_for_lack_of_memory_is_known_as_that_at_once() {
    let Some(group) = Cramped::new() else { return };
    let stage = Stage::new();
    let script = format!(
        "if [ \"$RANK\" = 1 ]; then echo $$ > {}/cgroup.procs; exec python3 -c 'held = b\"x\" * (400 << 20); input()'; fi; work",
        group.0.display()
    );
    let end = stage.sh(&script).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(137);
    let verdict = end.verdict();
    assert_eq!(verdict.cause, Cause::OutOfMemory, "{end}");
    assert!(verdict.evidence.iter().any(|line| line.contains("OOM killer")), "{end}");
}
