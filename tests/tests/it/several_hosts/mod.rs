//! Jobs of several hosts: one launcher for each, in separate network namespaces if PyTorch trains over them, else
//! on the loopback address.

mod agents;
mod bad_links;
mod chaos;
mod checkpoints;
mod cluster;
mod etcd;
mod frameworks;
mod leaders;
mod links;
mod lost;
mod network;
mod on_call;
mod policies;
mod preflight;
mod resize;
mod schedulers;
mod slow;
mod slurm;
mod spares;

use std::cell::RefCell;

use cluster::Cluster;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::{Incident, Rank};
use mainstay_model::verdict::{Action, Cause, FaultDomain};
use mainstay_tests::processes::wait_until;
use mainstay_tests::{End, has_client, has_torch, is_root, journal, skipped};
use mainstay_view::incident_report;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::ddp::DDP;
use crate::words::terminal;

/// Twenty steps with a checkpoint at every fifth; a rank waits in step 7 of the attempts that are named in WAITS.
const TRAINER: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
for step in range(0 if saved is None else saved + 1, 20):
    if step == 7 and str(ATTEMPT) in os.environ.get("WAITS", "").split(","):
        mark(f"waits.{ATTEMPT}.{RANK}")
        wait_for(f"go.{ATTEMPT}")
    mainstay.step(step, loss=1.0)
    if step % 5 == 0:
        mainstay.checkpoint.save(step, step)
mark(f"done.{RANK}", os.environ["GROUP_RANK"] + os.environ["WORLD_SIZE"])
"#;

/// The verdicts in each launcher's journal, without host-specific parts.
fn verdicts(end: &End) -> Vec<(Option<Rank>, Cause, String)> {
    let verdicts = journal::verdicts(&end.journal).into_iter();
    verdicts.map(|verdict| (verdict.culprit, verdict.cause.clone(), verdict.headline.clone())).collect()
}

#[test]
fn two_hosts_run_one_world_and_a_killed_rank_on_either_restarts_all() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start(TRAINER, "--nproc-per-node 2", &[("WAITS", "0,1")]);
    for attempt in 0..2u32 {
        for rank in 0..4 {
            jobs[rank / 2].mark(&format!("waits.{attempt}.{rank}"));
        }
        // A rank of the follower, then one of the leader.
        let (host, rank) = if attempt == 0 { (1, 3) } else { (0, 0) };
        jobs[host].kill_rank(attempt, rank);
    }
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 3, "{end}");
        let killed = |rank, host| {
            (Some(Rank(rank)), Some(cluster.host_name(host)), Cause::Signal { signal: 9 }, Some(6))
        };
        let verdicts = journal::verdicts(&end.journal).into_iter();
        let verdicts: Vec<_> =
            verdicts.map(|of| (of.culprit, of.host.clone(), of.cause.clone(), of.step)).collect();
        assert_eq!(verdicts, [killed(3, 1), killed(0, 0)], "{end}");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]), "both journals have the same failures");

    assert_eq!((cluster.read(0, "done.0"), cluster.read(1, "done.3")), ("04".to_owned(), "14".to_owned()));
    let [first, second] = journal::outcomes(&ends[0].journal)[..] else {
        panic!("two outcomes\n{}", ends[0])
    };
    assert_eq!((first.step, second.step), (6, 6), "from the checkpoint of step 5\n{}", ends[0]);
}

#[test]
fn each_host_shows_what_the_ranks_of_all_hosts_do() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start(TRAINER, "--nproc-per-node 2", &[("WAITS", "0")]);
    for rank in 0..4 {
        jobs[rank / 2].mark(&format!("waits.0.{rank}"));
    }
    // They wait in step 7.
    let steps = |host: usize| {
        let (_, shown) = jobs[host].status(cluster.stage(host));
        let job = shown["servers"][0]["jobs"][0].clone();
        let ranks = job["ranks"].as_array().cloned().unwrap_or_default();
        (job, ranks.iter().map(|rank| rank["step"].as_u64()).collect::<Vec<Option<u64>>>())
    };
    for host in 0..2 {
        wait_until("the step of each rank", || steps(host).1 == [Some(6); 4]);
    }
    let (of_leader, of_follower) = (steps(0).0, steps(1).0);
    assert_eq!(
        (&of_leader["leading_host"], of_follower["leading_host"].as_str()),
        (&Value::Null, Some(&*cluster.host_name(0)))
    );
    let events = jobs[1].asked(cluster.stage(1), &["events", "--json"]);
    let of_own_host = |line: &str| {
        serde_json::from_str::<Value>(line).is_ok_and(|event| event["host"] == *cluster.host_name(1))
    };
    assert!(events.lines().count() > 0 && events.lines().all(of_own_host), "{events}");

    for (host, job) in jobs.iter().enumerate() {
        let stacks = job.asked(cluster.stage(host), &["stacks", "--json"]);
        let stacks: Value = serde_json::from_str(&stacks).expect("JSON");
        let ranks = stacks["ranks"].as_array().into_iter().flatten();
        let mut ranks: Vec<Option<u64>> = ranks.map(|rank| rank["rank"].as_u64()).collect();
        ranks.sort();
        assert_eq!(ranks, [Some(0), Some(1), Some(2), Some(3)], "{stacks}");
    }

    // A leader that does not answer: the follower shows its own ranks, and says so. The leader is not away for so long that
    // it counts as lost.
    let shown = RefCell::new((Value::Null, Vec::new()));
    jobs[0].signal(Signal::SIGSTOP);
    wait_until("the follower alone", || {
        *shown.borrow_mut() = steps(1);
        shown.borrow().0["incomplete"].is_string()
    });
    jobs[0].signal(Signal::SIGCONT);
    let own = shown.into_inner();
    assert_eq!(own.1, [None, None, Some(6), Some(6)], "{}", own.0);
    wait_until("the step of each rank again", || steps(1).1 == [Some(6); 4]);
    cluster.stage(0).mark("go.0");
    cluster.stage(1).mark("go.0");
    for end in cluster.ends(jobs) {
        end.assert_status(0);
    }
}

#[test]
fn an_exception_on_one_host_ends_the_job_on_all_with_one_explanation() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let script = r#"
import mainstay
for step in range(1000):
    mainstay.step(step)
    if RANK == 2 and step == 3:
        raise ValueError("bad sample 17")
    time.sleep(0.01)
    if step > 3:
        wait_for("never")
"#;
    let jobs = cluster.start(script, "--nproc-per-node 2", &[]);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(1);
        end.assert_printed("bad sample 17");
    }
    assert_eq!(verdicts(&ends[0]), verdicts(&ends[1]));
    assert_eq!(verdicts(&ends[0]).last().expect("a verdict").0, Some(Rank(2)), "{}", ends[0]);
    assert_eq!(ends[0].summary().attempts, ends[1].summary().attempts);
}

#[test]
fn a_lost_launcher_is_named_and_its_host_may_come_back() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let options = "--nproc-per-node 2";
    let mut jobs = cluster.start(TRAINER, options, &[("WAITS", "0")]);
    for rank in 0..4 {
        jobs[rank / 2].mark(&format!("waits.0.{rank}"));
    }
    let follower = jobs.remove(1);
    follower.lose_launcher();
    jobs[0].wait_for_fact(
        "the loss",
        |fact| matches!(fact, Fact::HostLost { node_rank: 1, ranks, .. } if ranks[..] == [Rank(2), Rank(3)]),
    );
    jobs[0].wait_for_event("host_awaited");
    jobs.push(cluster.start_host(1, TRAINER, options, &[("WAITS", "0")]));
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    assert_eq!(ends[0].summary().attempts, 2, "{}", ends[0]);
    assert_eq!(ends[0].verdict().cause, Cause::HostLost { host: cluster.host_name(1) }, "{}", ends[0]);
    // Its journal has what happened before it joined; the terminal does not show that as if it happened now.
    let second = journal::read(&ends[1].run_dir.with_extension("2").join("journal"));
    let lost = journal::facts(&second).find_map(|fact| match fact {
        Fact::HostLost { named, .. } => Some(format!("{named} is lost")),
        _ => None,
    });
    let lost = lost.expect("the loss");
    assert!(!ends[1].stderr.contains(&lost), "{}", ends[1]);
    assert!(ends[0].stderr.contains(&lost), "{}", ends[0]);
    let outcomes = journal::outcomes(&second);
    ends[1].assert_printed(&outcomes.last().expect("an outcome").describe());
    assert!(!ends[0].stderr.contains("SIGKILL"), "no rank is said to have been killed: {}", ends[0]);
    assert_eq!(cluster.read(1, "done.2"), "14");
}

#[test]
fn a_follower_that_loses_its_leader_hands_the_job_back_and_explains_that() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2);
    let mut jobs = cluster.start(TRAINER, "", &[("WAITS", "0,1")]);
    jobs[0].mark("waits.0.0");
    jobs[1].mark("waits.0.1");
    jobs[1].kill_rank(0, 1);
    jobs[0].mark("waits.1.0");
    jobs[1].mark("waits.1.1");
    // The outcome of the restart is what an explanation must not end with.
    jobs[1].wait_for("the outcome", |entry| matches!(entry.body, Body::Outcome(_)).then_some(()));
    let leader = jobs.remove(0);
    leader.lose_launcher();
    let end = cluster.ends(jobs).remove(0);
    end.assert_status(75).assert_printed(terminal::RANKS_STOPPED);
    let verdict = *journal::verdicts(&end.journal).last().expect("a verdict");
    assert_eq!(verdict.cause, Cause::HostLost { host: cluster.host_name(0) }, "{end}");
    assert_eq!((verdict.incident, verdict.domain), (Incident(2), FaultDomain::Infrastructure), "{end}");
    let decision = *journal::decisions(&end.journal).last().expect("a decision");
    assert_eq!((decision.incident, decision.action), (Incident(2), Action::HandBack { exit: 75 }), "{end}");
    assert!(
        journal::facts(&end.journal).any(|fact| matches!(fact, Fact::JobEnded { exit: 75, .. })),
        "{end}"
    );
    let explained = incident_report::from_entries(end.journal.iter(), None).expect("a failure");
    assert_eq!((explained.verdict.incident, explained.job_ended), (Incident(2), Some(75)), "{end}");
    let summary = end.summary();
    assert_eq!((summary.exit, summary.attempts, summary.incidents.len()), (75, 2, 2), "{end}");
    assert_eq!((summary.accounting.steps, summary.accounting.wall.0 > 0), (7, true), "{end}");
}

#[test]
fn a_lost_host_that_is_not_replaced_in_time_is_named_and_the_job_is_handed_back() {
    let cluster = Cluster::new(2);
    let options = "--rdzv-conf join_timeout=6";
    let mut jobs = cluster.start("mark(f'runs.{RANK}'); wait_for('never')", options, &[]);
    jobs[0].mark("runs.0");
    jobs[1].mark("runs.1");
    jobs.remove(1).lose_launcher();
    let end = cluster.ends(jobs).remove(0);
    end.assert_status(75);
    let verdict = *journal::verdicts(&end.journal).last().expect("a verdict");
    assert_eq!(verdict.cause, Cause::HostLost { host: cluster.host_name(1) }, "{end}");
    assert_eq!((verdict.culprit, verdict.domain), (None, FaultDomain::Infrastructure), "{end}");
    let decision = *journal::decisions(&end.journal).last().expect("a decision");
    assert_eq!(decision.action, Action::HandBack { exit: 75 }, "{end}");
}

#[test]
fn a_signal_to_one_launcher_ends_the_job_on_all() {
    let cluster = Cluster::new(2);
    let jobs = cluster.start("mark(f'runs.{RANK}'); wait_for('never')", "", &[]);
    jobs[0].mark("runs.0");
    jobs[1].mark("runs.1");
    jobs[1].signal(Signal::SIGTERM);
    let named = if is_root() { "SIGTERM on host h1" } else { "SIGTERM on host " };
    let is_named = |fact: &Fact| matches!(fact, Fact::StopRequested { by, exit: 143 } if by.contains(named));
    for end in cluster.ends(jobs) {
        end.assert_status(128 + 15);
        assert!(journal::facts(&end.journal).any(is_named), "{end}");
    }
}

/// Ranks in step with each other, as those of a trainer, that save when they are asked to, or when it is due.
const SAVES: &str = r#"
import mainstay
shared = os.environ["MAINSTAY_CHECKPOINT_DIR"]
os.makedirs(shared, exist_ok=True)
for step in range(1, 1_000_000):
    open(f"{shared}/{step}.{RANK}", "w").close()
    while not os.path.exists(f"{shared}/{step}.{1 - RANK}"):
        time.sleep(0.001)
    time.sleep(0.02)
    mainstay.step(step)
    if step <= 5:
        with mainstay.section("checkpoint"):
            pass
    if mainstay.checkpoint.due():
        mark(f"due.{RANK}", step)
    if mainstay.save_requested():
        mark(f"saved.{RANK}", step)
        break
"#;

#[test]
fn ranks_of_all_hosts_are_asked_to_save_after_the_same_step() {
    if !has_client() {
        return;
    }
    for signal in [Signal::SIGTERM, Signal::SIGUSR1] {
        let cluster = Cluster::new(2);
        let jobs = cluster.start(SAVES, "", &[]);
        let due = [jobs[0].mark("due.0"), jobs[1].mark("due.1")];
        assert_eq!(due[0], due[1], "a save is due after the same step");
        jobs[1].signal(signal);
        for end in cluster.ends(jobs) {
            end.assert_status(128 + signal as i32);
        }
        assert_eq!(cluster.read(0, "saved.0"), cluster.read(1, "saved.1"));
    }
}

#[test]
fn a_restart_is_ordered_at_any_host() {
    let cluster = Cluster::new(2);
    let jobs = cluster.start("mark(f'runs.{ATTEMPT}.{RANK}'); wait_for(f'go.{ATTEMPT}')", "", &[]);
    jobs[0].mark("runs.0.0");
    jobs[1].mark("runs.0.1");
    jobs[1].asked(cluster.stage(1), &["job", "restart", "--reason", "a drill"]);
    jobs[0].mark("runs.1.0");
    jobs[1].mark("runs.1.1");
    cluster.stage(0).mark("go.1");
    cluster.stage(1).mark("go.1");
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
        let [ordered] = journal::observed(&end.journal, "restart_ordered").collect::<Vec<_>>()[..] else {
            panic!("one order\n{end}")
        };
        let named = format!(" on host {} ", cluster.host_name(1));
        assert!(ordered.detail.contains(&named) && ordered.detail.ends_with("a drill"), "{end}");
    }
}

#[test]
fn a_rank_of_another_host_is_shown_with_its_host_and_looked_up_there() {
    if !is_root() {
        return skipped("only root can give hosts names of their own");
    }
    let cluster = Cluster::new(2);
    let jobs = cluster.start("mark(f'runs.{RANK}'); wait_for('go')", "", &[]);
    jobs[0].mark("runs.0");
    jobs[1].mark("runs.1");
    jobs[1].wait_for_fact("the start", |fact| matches!(fact, Fact::AttemptStarted { .. }));
    let asked = |arguments: &[&str]| jobs[1].asked(cluster.stage(1), arguments);
    let stacks: serde_json::Value = serde_json::from_str(&asked(&["stacks", "--json"])).expect("JSON");
    let ranks: Vec<&serde_json::Value> = stacks["ranks"].as_array().into_iter().flatten().collect();
    assert_eq!(ranks.iter().map(|of| &of["rank"]).collect::<Vec<_>>(), [0, 1], "{stacks}");
    let known: serde_json::Value = serde_json::from_str(&asked(&["ranks", "--json"])).expect("JSON");
    let ranks = &known["jobs"][0]["ranks"];
    assert_eq!((&ranks[0]["host"], &ranks[1]["host"]), (&"h0".into(), &"h1".into()), "{known}");
    for command in ["ranks", "status"] {
        let shown = asked(&[command]);
        assert!(shown.contains("HOST") && shown.contains(" h0 "), "{shown}");
    }
    cluster.stage(0).mark("go");
    cluster.stage(1).mark("go");
    for end in cluster.ends(jobs) {
        end.assert_status(0);
    }
}

#[test]
fn hosts_that_do_not_come_and_hosts_that_do_not_fit_are_named() {
    let cluster = Cluster::new(2);
    let leader = cluster.start_host(0, "pass", "--rdzv-conf join_timeout=6", &[]);
    leader.wait_until_printed("missing: node rank 1");
    let other = cluster.start_host_as(1, "pass", "--nnodes 3 --node-rank 1", &[]);
    assert!(other.has_ended());
    let other = other.end();
    other.assert_status(70);
    testing::snapshot!(
        "several_hosts",
        "another number of hosts",
        other.line(&["--nnodes 3"]).rsplit_once(": ").expect("the leader, and why").1
    );
    let end = leader.end();
    end.assert_status(70);
    testing::snapshot!(
        "several_hosts",
        "a host that does not come",
        cluster.masked(end.line(&["node rank 1 within 6.00 s"]))
    );
}

#[test]
fn a_host_with_another_script_or_another_number_of_ranks_is_refused_by_name() {
    let cluster = Cluster::new(2);
    let leader = cluster.start_host(0, "mark(f'ran.{RANK}')", "--nproc-per-node 1", &[]);
    leader.wait_until_printed(terminal::LEADS);
    for (script, ranks, difference) in [
        ("mark(f'ran.{RANK}', 'other')", 1, terminal::OTHER_SCRIPT),
        ("mark(f'ran.{RANK}')", 2, terminal::OTHER_RANKS),
    ] {
        let other = cluster.start_host(1, script, &format!("--nproc-per-node {ranks}"), &[]);
        assert!(other.has_ended());
        let end = other.end();
        end.assert_status(70).assert_printed(&format!("{difference}{}", cluster.host_name(0)));
        end.assert_printed("its own --rdzv-id");
        leader.wait_until_printed(difference);
    }
    let same = cluster.start_host(1, "mark(f'ran.{RANK}')", "--nproc-per-node 1", &[]);
    let ends = cluster.ends(vec![leader, same]);
    for end in &ends {
        end.assert_status(0);
    }
    ends[0].assert_printed(terminal::CANNOT_TAKE_PART);
}

#[test]
fn hosts_that_differ_take_part_where_the_user_admits_them() {
    let cluster = Cluster::new(2);
    let options = "--rdzv-conf mixed=on --nproc-per-node";
    let leader = cluster.start_host(0, "mark(f'ran.{RANK}')", &format!("{options} 1"), &[]);
    let other = cluster.start_host(1, "mark(f'ran.{RANK}', 'other')", &format!("{options} 2"), &[]);
    for end in cluster.ends(vec![leader, other]) {
        end.assert_status(0);
        end.assert_printed(&format!("{}{}", terminal::OTHER_SCRIPT, cluster.host_name(0)));
        end.assert_printed(&format!("(--nproc-per-node), host {} has 1", cluster.host_name(0)));
    }
    assert_eq!(cluster.read(1, "ran.2"), "other", "a difference that is meant stops nothing");
}

/// Asserts that all ranks of a training have the parameters of an undisturbed one. `hosts` has the host of each rank.
fn assert_undisturbed(cluster: &Cluster, hosts: &[usize]) {
    let read = |mark: &str| -> Vec<String> {
        let ranks = hosts.iter().enumerate();
        ranks.map(|(rank, host)| cluster.read(*host, &format!("{mark}.{rank}"))).collect()
    };
    let (finals, undisturbed) = (read("final"), read("undisturbed"));
    assert_eq!(finals, undisturbed, "bit for bit");
    assert!(finals.iter().all(|of| *of == finals[0]), "all ranks have the same parameters: {finals:?}");
}

#[test]
fn ddp_over_two_hosts_that_loses_a_rank_ends_with_the_parameters_of_an_undisturbed_run() {
    if !has_torch() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let cluster = Cluster::in_namespaces(2);
    let jobs = cluster.start(DDP, "--nproc-per-node 1", &[("WAITS", "0")]);
    for (rank, job) in jobs.iter().enumerate() {
        job.mark(&format!("waits.0.{rank}"));
    }
    jobs[1].kill_rank(0, 1);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    let started = ends[0].journal.iter().any(
        |entry| matches!(&entry.body, Body::Fact(Fact::AttemptStarted { ranks, .. }) if ranks.len() == 2),
    );
    assert!(started, "{}", ends[0]);
    assert_undisturbed(&cluster, &[0, 1]);
}
