//! Spares: they are ready before a host is lost, and take its place from the newest step.

use mainstay_model::entry::{Body, Fact};
use mainstay_model::verdict::Cause;
use mainstay_tests::{End, Job, has_client};
use nix::sys::signal::Signal;

use super::cluster::Cluster;
use crate::words::terminal;

/// Steps in common that are saved, one after the other when a file allows it; ranks wait in step 8 of the attempts in WAITS.
const SAVES: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
begin = 0 if saved is None else saved["step"] + 1
mark(f"from.{ATTEMPT}.{RANK}", begin)
for step in range(begin, 12):
    if step == 8 and str(ATTEMPT) in os.environ.get("WAITS", "").split(","):
        mark(f"waits.{ATTEMPT}.{RANK}")
        wait_for(f"go.{ATTEMPT}")
    mainstay.step(step, loss=1.0)
    assert mainstay.checkpoint.save(step, {"step": step, "rank": RANK})
assert saved is None or saved["rank"] == RANK
mark(f"done.{RANK}", os.environ["GROUP_RANK"] + os.environ["WORLD_SIZE"])
"#;

/// Two hosts that train and one that waits, each saving only into its own memory and directory.
struct Waiting {
    cluster: Cluster,
    jobs: Vec<Job>,
}

impl Waiting {
    fn start(waits: &str) -> Waiting {
        let endpoint = format!("127.0.0.1:{}", testing::free_port());
        let meets = format!("--rdzv-backend c10d --rdzv-endpoint {endpoint}");
        let cluster = Cluster::meeting_at(3, &meets).sharing_nothing();
        let mut all = Waiting { cluster, jobs: Vec::new() };
        for host in 0..3 {
            let job = all.cluster.start_host_as(host, SAVES, "--nnodes 2", &[("WAITS", waits)]);
            all.jobs.push(job);
            match host {
                0 => all.jobs[0].wait_until_printed(terminal::LEADS),
                1 => all.jobs[1].wait_until_printed(terminal::ALL_THERE),
                _ => _ = all.jobs[2].wait_for_event("spare_ready"),
            }
        }
        all
    }

    /// Waits until the spare has its imports done and a copy of all that was saved.
    fn is_ready(&self) {
        wait_for_imports(&self.jobs[2]);
        self.jobs[2].wait_for_fact("the spare has step 7", |fact| match fact {
            Fact::Observed(seen) => {
                seen.event == "spare_ready" && seen.values.get("step").is_some_and(|step| step == "7")
            }
            _ => false,
        });
    }

    fn status(&self) -> String {
        self.jobs[2].asked(self.cluster.stage(2), &["status"])
    }
}

fn kill(job: Job) {
    job.signal(Signal::SIGKILL);
    assert!(job.has_ended());
}

fn wait_for_imports(spare: &Job) {
    spare.wait_for_fact("the imports", |fact| {
        matches!(fact, Fact::Observed(seen) if seen.event == "spare_ready" && seen.values.get("imports").is_some_and(|done| done == "true"))
    });
}

/// Shards that a launcher had to fetch from other hosts, as printed on its terminal.
fn brought(end: &End) -> Vec<String> {
    end.lines(&["checkpoint: ", "shards"]).into_iter().map(str::to_owned).collect()
}

fn losses(end: &End) -> usize {
    let is_loss = |body: &Body| matches!(body, Body::Fact(Fact::HostLost { .. }));
    end.journal.iter().filter(|entry| is_loss(&entry.body)).count()
}

#[test]
fn a_spare_has_imports_and_a_copy_before_a_host_is_lost_and_takes_over_from_the_newest_step() {
    if !has_client() {
        return;
    }
    let mut all = Waiting::start("0");
    all.jobs[0].mark("waits.0.0");
    all.jobs[1].mark("waits.0.1");
    all.is_ready();
    let status = all.status();
    assert!(status.contains(terminal::IS_SPARE) && status.contains("step 7"), "{status}");
    let (_, shown) = all.jobs[2].status(all.cluster.stage(2));
    let ranks = shown["servers"][0]["jobs"][0]["ranks"].as_array().map(Vec::len);
    assert_eq!(ranks, Some(2), "it has none of its own: {shown}");
    let lost = all.cluster.host_name(1);
    kill(all.jobs.remove(1));
    all.cluster.stage(0).mark("go.0");
    let spare = all.jobs.last().expect("it is there");
    assert_eq!(spare.mark("from.1.1"), "8", "no step is lost");
    let ends = all.cluster.ends(all.jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!((end.summary().attempts, losses(end)), (2, 1), "{end}");
    }
    for end in &ends {
        // The spare has its ranks now, but did not have them when they failed.
        assert_eq!(end.verdict().cause, Cause::HostLost { host: lost.clone() }, "{end}");
        assert_eq!(end.verdict().host, Some(lost.clone()), "{end}");
    }
    assert_eq!(all.cluster.read(2, "done.1"), "12", "rank 1 of two");
    ends[1].assert_printed("node rank 1 of 2");
    // None came from another host.
    testing::snapshot!("several_hosts", "a spare goes on from its copies", brought(&ends[1])[0]);
}

#[test]
fn a_spare_with_another_script_or_another_number_of_ranks_is_refused_on_both_terminals() {
    if !has_client() {
        return;
    }
    let mut all = Waiting::start("0");
    let spare = all.jobs.remove(2);
    spare.signal(Signal::SIGTERM);
    assert!(spare.has_ended());
    let mut refused = Vec::new();
    for (script, options, difference) in [
        (format!("{SAVES}# of another job\n"), "--nnodes 2", terminal::OTHER_SCRIPT),
        (SAVES.to_owned(), "--nnodes 2 --nproc-per-node 2", terminal::OTHER_RANKS),
    ] {
        let other = all.cluster.start_host_as(2, &script, options, &[]);
        // Here and not at its end: the next launcher on this host writes into the same file.
        other.wait_until_printed(difference);
        other.wait_until_printed("its own --rdzv-id");
        assert!(other.has_ended());
        let named = all.cluster.host_name(2);
        all.jobs[0].wait_until_printed(&format!("{named} {}{difference}", terminal::CANNOT_TAKE_PART));
        refused.push(other);
    }
    all.cluster.stage(0).mark("go.0");
    all.cluster.stage(1).mark("go.0");
    for end in all.cluster.ends(all.jobs) {
        end.assert_status(0);
    }
    for job in refused {
        job.end().assert_status(70);
    }
}

#[test]
fn a_spare_that_is_lost_while_it_waits_disturbs_nothing() {
    if !has_client() {
        return;
    }
    let mut all = Waiting::start("0");
    all.jobs[0].mark("waits.0.0");
    all.jobs[1].mark("waits.0.1");
    all.is_ready();
    kill(all.jobs.remove(2));
    all.cluster.stage(0).mark("go.0");
    all.cluster.stage(1).mark("go.0");
    let ends = all.cluster.ends(all.jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!((end.summary().attempts, losses(end)), (1, 0), "{end}");
    }
}

#[test]
fn a_spare_that_is_asked_to_stop_leaves_and_the_job_goes_on() {
    if !has_client() {
        return;
    }
    let mut all = Waiting::start("0");
    let spare = all.jobs.remove(2);
    wait_for_imports(&spare);
    spare.signal(Signal::SIGTERM);
    assert!(spare.has_ended());
    all.cluster.stage(0).mark("go.0");
    all.cluster.stage(1).mark("go.0");
    for end in all.cluster.ends(all.jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 1, "{end}");
    }
    let end = spare.end();
    end.assert_status(128 + 15);
    testing::snapshot!("several_hosts", "a spare is asked to stop", end.line(&["signal 15"]));
}

#[test]
fn a_spare_of_a_job_that_ends_without_it_ends_with_the_status_of_the_job() {
    if !has_client() {
        return;
    }
    let all = Waiting::start("");
    let ends = all.cluster.ends(all.jobs);
    for end in &ends {
        end.assert_status(0);
    }
    ends[2].assert_printed(terminal::JOB_HAS_ENDED);
}
