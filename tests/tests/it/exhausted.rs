//! A resource of the host runs out, and comes back: inodes or write permission for logs, processes, descriptors of the
//! launcher. The job goes on, or waits; none of it is the program's fault.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_model::entry::{Body, Fact};
use mainstay_model::verdict::{Action, Cause, FaultDomain};
use mainstay_recovery::job::EXHAUSTED;
use mainstay_tests::{Job, Stage, has_client, is_root, journal, skipped};

use crate::words::terminal;

/// Two ranks that work forever in the first attempt and end at once in the next.
const WORKS: &str = r#"
mark "pid.$RANK.$ATTEMPT" $$
echo here
if [ $ATTEMPT = 0 ]; then work; fi
"#;

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).status().is_ok_and(|status| status.success())
}

/// A small file system over a directory; it is unmounted when this is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn over(at: &Path) -> Option<SmallDisk> {
        fs::create_dir_all(at).expect("a directory");
        let options = "size=20m,nr_inodes=200,mode=0755";
        let mounted =
            is_root() && run("mount", &["-t", "tmpfs", "-o", options, "tmpfs", &at.display().to_string()]);
        mounted.then(|| SmallDisk(at.to_owned()))
    }

    /// Leaves no inode.
    fn fill(&self) {
        let files = (0..).map(|number| File::create(self.0.join(format!("filler-{number}"))));
        assert!(files.take(1000).any(|made| made.is_err()), "it has inodes left");
    }

    /// Paths that are opened from now on are read-only, as after an error of the disk.
    fn stop_writes(&self) {
        let at = self.0.display().to_string();
        assert!(
            run("mount", &["--bind", &at, &at]) && run("mount", &["-o", "remount,bind,ro", &at]),
            "remount"
        );
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let at = self.0.display().to_string();
        while run("umount", &["--lazy", "--quiet", &at]) {}
    }
}

#[test]
fn ranks_are_restarted_without_a_place_for_their_logs() {
    for spoil in [SmallDisk::fill as fn(&SmallDisk), SmallDisk::stop_writes] {
        let stage = Stage::new();
        let Some(disk) = SmallDisk::over(&stage.logs()) else {
            return skipped("no file system can be mounted here (root)");
        };
        let job = stage.sh(WORKS).ranks(2).start();
        job.mark("pid.0.0");
        job.mark("pid.1.0");
        spoil(&disk);
        job.kill_rank(0, 1);
        job.wait_until_printed(terminal::CANNOT_BE_WRITTEN);
        job.mark("pid.0.1");
        job.mark("pid.1.1");
        job.end().assert_status(0);
    }
}

/// A control group that limits processes; it is removed when this is dropped.
struct Group(PathBuf);

impl Group {
    fn make(stage: &Stage) -> Option<Group> {
        let root = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].into_iter().map(Path::new);
        // Of this stage alone: other tests run at the same time.
        let name = format!("mainstay-test-{}", stage.home().parent()?.file_name()?.to_string_lossy());
        root.map(|root| root.join(&name)).filter(|_| is_root()).find_map(|path| {
            fs::create_dir(&path).ok()?;
            let group = Group(path);
            group.0.join("pids.max").exists().then_some(group)
        })
    }

    /// Starts a job of this plan in it.
    fn start(&self, plan: mainstay_tests::Plan<'_>) -> Job {
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", self.0.display());
        plan.under(&["sh", "-c", &enter, "sh"]).start()
    }

    fn processes(&self) -> u64 {
        let current = fs::read_to_string(self.0.join("pids.current")).expect("a count");
        current.trim().parse().expect("a number")
    }

    fn limit(&self, most: &str) {
        fs::write(self.0.join("pids.max"), most).expect("a limit");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_job_waits_until_its_control_group_has_room_for_its_processes() {
    let stage = Stage::new();
    let Some(group) = Group::make(&stage) else { return skipped("no control group can be made here (root)") };
    let script = r#"
[ $ATTEMPT = 0 ] || exit 0
sleep 1000 & sleep 1000 & sleep 1000 &
mark "up.$RANK"
wait
"#;
    let job = group.start(stage.sh(script).ranks(2));
    job.mark("up.0");
    job.mark("up.1");
    group.limit(&(group.processes() - 4).to_string());
    job.kill_rank(0, 1);
    job.wait_for("a wait", |entry| match &entry.body {
        Body::Decision(decision) if decision.action == Action::Wait => Some(()),
        _ => None,
    });
    group.limit("max");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
}

#[test]
fn a_thread_that_the_control_group_refuses_is_not_the_programs_fault() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let Some(group) = Group::make(&stage) else { return skipped("no control group can be made here (root)") };
    let script = r#"
import threading
import mainstay
mark(f"up.{ATTEMPT}")
wait_for(f"limit.{ATTEMPT}")
stop = threading.Event()
threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(40)]
for thread in threads:
    thread.start()
stop.set()
"#;
    let options = "--max-restarts 5 --no-warm";
    let job = group.start(stage.python(script).options(options));
    for attempt in 0..2 {
        job.mark(&format!("up.{attempt}"));
        group.limit(&(group.processes() + 10).to_string());
        stage.mark(&format!("limit.{attempt}"));
        job.wait_for("the verdict", |entry| match &entry.body {
            Body::Verdict(verdict) if verdict.attempt.0 == attempt && verdict.class.is_some() => Some(()),
            _ => None,
        });
        group.limit("max");
    }
    stage.mark("limit.2");
    let end = job.end();
    end.assert_status(0);
    for verdict in journal::verdicts(&end.journal) {
        assert_eq!(verdict.class.as_deref(), Some("host_resource"), "{end}");
        assert_eq!(verdict.domain, FaultDomain::Infrastructure, "{end}");
    }
    assert_eq!(journal::restarts(&end.journal), 2, "{end}");
}

#[test]
fn a_launcher_without_descriptors_tries_again() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).options("--max-restarts 20 --no-warm").start();
    job.mark("pid.0.0");
    // What is open stays open, and nothing else can be opened.
    let limit = |soft: &str| {
        let launcher = job.launcher().to_string();
        assert!(run("prlimit", &["--pid", &launcher, &format!("--nofile={soft}:")]), "prlimit");
    };
    limit("3");
    job.kill_rank(0, 0);
    job.wait_for("the exhaustion", |entry| match &entry.body {
        Body::Fact(Fact::Observed(seen)) if seen.event == EXHAUSTED => Some(()),
        _ => None,
    });
    limit("1024");
    let end = job.end();
    end.assert_status(0);
    let failed: Vec<_> =
        journal::verdicts(&end.journal).into_iter().filter(|of| of.cause == Cause::StartFailed).collect();
    assert!(!failed.is_empty(), "{end}");
    assert!(failed.iter().all(|verdict| verdict.domain == FaultDomain::Infrastructure), "{end}");
}
