//! Agent and launcher can each be killed, stopped or restarted; the ranks and the job's history are not affected.

use std::cell::Cell;
use std::io::Write;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::verdict::{Action, FaultDomain};
use mainstay_tests::{
    Agent, End, Job, Stage, as_unprivileged, has_client, journal, mainstay, processes, skipped,
};
use nix::sys::signal::Signal;

#[test]
fn an_agent_keeps_the_whole_history_of_a_job_and_agrees_to_a_restart() {
    let stage = Stage::new();
    let agent = stage.agent();
    let job =
        stage.sh(r#"[ "$ATTEMPT" = 1 ] && exit 0; mark "ready.$RANK"; work"#).ranks(2).with(&agent).start();
    job.mark("ready.1");
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    job.kill_rank(0, 1);
    let id = job.id().to_owned();
    let end = job.end();
    end.assert_status(0);
    assert!(journal::decisions(&end.journal)[0].used_agent_evidence(), "{end}");
    agent.wait_for_fact(&id, "the end", |fact| matches!(fact, Fact::JobEnded { exit: 0, .. }));
    assert_eq!(
        of_job(&agent.journal(), &id),
        bodies(&end.journal, &id),
        "the agent holds the launcher's own story"
    );
    assert_eq!(agent.stop(), Some(0));
}

#[test]
fn a_job_says_whether_it_is_attached_and_why_not() {
    let stage = Stage::new();
    let script = "mark up; wait_for end";
    let agent = stage.agent();
    let job = stage.sh(script).with(&agent).start();
    job.wait_until_printed(&format!("agent: attached ({})", agent.socket().display()));
    stage.mark("end");
    job.end().assert_status(0);
    agent.stop();

    let missing = stage.work().join("missing.sock");
    let dead = stage.work().join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).expect("a socket"));
    let shows = |case: &str, end: &End| {
        end.assert_status(0);
        testing::snapshot!("agent", case, stage.masked(end.line(&["agent: none"])));
    };
    shows("no socket", &stage.sh(script).at_socket(&missing).start().end());
    shows("no agent listens", &stage.sh(script).at_socket(&dead).start().end());
    shows("none is wanted, by an option", &stage.sh(script).start().end());
    let plan = stage.sh(script).at_socket(&dead).variable("MAINSTAY_NO_AGENT", "1");
    shows("none is wanted, by a variable", &plan.start().end());
}

#[test]
fn the_log_of_an_agent_is_json_where_it_is_asked_for() {
    let stage = Stage::new();
    let program = mainstay().display().to_string();
    let line = ["sh", "-c", r#"exec "$0" "$@" --log-format json"#, &program];
    assert_eq!(Agent::start_under(&line.map(str::to_owned), &stage).stop(), Some(0));
    let log = std::fs::read_to_string(stage.home().join("agent.err")).expect("a log");
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let is_whole = |line: &serde_json::Value| {
        line["timestamp"].is_string() && line["level"].is_string() && line["fields"]["message"].is_string()
    };
    assert!(!lines.is_empty() && lines.iter().all(is_whole), "{log}");
}

#[test]
fn an_agent_that_is_killed_and_started_again_twice_disturbs_no_rank_and_loses_no_history() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let mut agent = stage.agent();
    let job = stage.python(BEATING).ranks(2).with(&agent).start();
    let id = job.id().to_owned();
    let ranks = job.attempt(0).pids;
    for round in 1..=2 {
        wait_for_agents(&job, round);
        // Two samples of the ranks with a step in between: the ranks beat, and this agent receives it.
        let before = wait_for_step_beyond(&agent, &stage, &id, 0);
        let now = wait_for_step_beyond(&agent, &stage, &id, before);
        agent.kill();
        job.wait_for("the loss", nth(round, |fact| matches!(fact, Fact::AgentLost { .. })));
        agent = stage.agent();
        wait_for_agents(&job, round + 1);
        wait_for_step_beyond(&agent, &stage, &id, now);
    }
    for (rank, pid) in &ranks {
        assert!(processes::is_alive(*pid), "rank {rank} is the same process still");
    }
    assert_eq!(job.journal().iter().filter(|entry| is_start(entry)).count(), 1);
    // A fault after that is decided with the newest agent.
    job.kill_rank(0, 0);
    job.attempt(1);
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    assert!(journal::decisions(&end.journal)[0].used_agent_evidence(), "{end}");

    agent.wait_for_fact(&id, "the end", |fact| matches!(fact, Fact::JobEnded { .. }));
    let held = agent.journal();
    let origins: Vec<u64> =
        held.iter().filter(|entry| is_of(entry, &id)).filter_map(|entry| entry.origin_seq).collect();
    let own: Vec<u64> = end.journal.iter().filter(|entry| is_of(entry, &id)).map(|entry| entry.seq).collect();
    assert_eq!(origins, own, "every entry of the launcher, once, in order\n{end}");
    assert_eq!(of_job(&held, &id), bodies(&end.journal, &id));
    let cursors: Vec<u64> = held.iter().map(|entry| entry.seq).collect();
    assert_eq!(
        cursors,
        (1..=cursors.len() as u64).collect::<Vec<u64>>(),
        "the agent's own numbers have no gap"
    );
    let reported = agent.events(&stage, &id);
    assert_eq!(reported.len(), own.len(), "`mainstay events` tells each of them: {reported:#?}");
}

#[test]
fn an_agent_that_hangs_during_a_fault_does_not_hold_up_the_launcher() {
    let stage = Stage::new();
    let agent = stage.agent();
    let job =
        stage.sh(r#"[ "$ATTEMPT" = 1 ] && exit 0; mark "ready.$RANK"; work"#).ranks(2).with(&agent).start();
    job.mark("ready.1");
    wait_for_agents(&job, 1);
    agent.signal(Signal::SIGSTOP);
    job.kill_rank(0, 1);
    let id = job.id().to_owned();
    let end = job.end();
    end.assert_status(0);
    assert!(!journal::decisions(&end.journal)[0].used_agent_evidence(), "{end}");
    // It continues and receives what happened meanwhile.
    agent.signal(Signal::SIGCONT);
    agent.wait_for(&format!("the end of {id}"), |entry| {
        let over = matches!(&entry.body, Body::Fact(Fact::JobEnded { .. } | Fact::LauncherLost { .. }));
        (is_of(entry, &id) && over).then_some(())
    });
}

#[test]
fn an_agent_records_that_a_launcher_was_killed() {
    let stage = Stage::new();
    let agent = stage.agent();
    let job = stage.sh(r#"mark "ready.$RANK"; work"#).ranks(2).with(&agent).start();
    job.mark("ready.0");
    wait_until_reported(&agent, &job);
    let launcher = job.launcher();
    let id = job.kill_launcher();
    agent.wait_for_fact(
        &id,
        "the loss",
        |fact| matches!(fact, Fact::LauncherLost { pid } if pid.0 == launcher),
    );
    let lost = agent.events(&stage, &id).pop().expect("an event");
    assert_eq!(lost["type"], "launcher_lost", "{lost}");
}

#[test]
fn an_agent_that_was_down_when_the_launcher_died_reports_it_when_it_is_back() {
    let stage = Stage::new();
    let agent = stage.agent();
    let job = stage.sh(r#"mark "ready.$RANK"; work"#).with(&agent).start();
    job.mark("ready.0");
    wait_until_reported(&agent, &job);
    agent.kill();
    let id = job.kill_launcher();
    let agent = stage.agent();
    agent.wait_for_fact(&id, "the loss", |fact| matches!(fact, Fact::LauncherLost { .. }));
}

#[test]
fn a_job_that_ended_in_order_is_not_lost() {
    let stage = Stage::new();
    let agent = stage.agent();
    let job = stage.sh("exit 0").ranks(2).with(&agent).start();
    let id = job.id().to_owned();
    job.end().assert_status(0);
    agent.wait_for_fact(&id, "the end", |fact| matches!(fact, Fact::JobEnded { exit: 0, .. }));
    agent.kill();
    let agent = stage.agent();
    assert!(!journal::facts(&agent.journal()).any(|fact| matches!(fact, Fact::LauncherLost { .. })));
}

/// An agent of the user 65534; none, with a reported skip, if no other user can be played.
fn agent_of_no_one(stage: &Stage) -> Option<Agent> {
    let no_one = as_unprivileged().map_err(skipped).ok()?;
    stage.open_to_all();
    let program = stage.program("mainstay", &mainstay());
    let line: Vec<String> = no_one.iter().map(|part| (*part).to_owned()).chain([program]).collect();
    Some(Agent::start_under(&line, stage))
}

#[test]
fn an_agent_of_another_user_is_not_trusted() {
    let stage = Stage::new();
    let Some(agent) = agent_of_no_one(&stage) else { return };
    let job = stage.sh(r#"until [ -e "$MARKS/seen" ]; do sleep 0.02; done"#).with(&agent).start();
    job.wait_until_printed("user 65534");
    stage.mark("seen");
    let end = job.end();
    end.assert_status(0);
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::AgentFound { .. })), "{end}");
    assert!(!journal::facts(&agent.journal()).any(|fact| matches!(fact, Fact::JobStarted(_))));
}

/// As in a pod, where the agent's container has another user than the job's.
#[test]
fn an_agent_of_another_user_is_trusted_if_the_user_is_named() {
    let stage = Stage::new();
    let Some(agent) = agent_of_no_one(&stage) else { return };
    let job = stage.sh("wait_for seen").with(&agent).variable("MAINSTAY_AGENT_UID", "65534").start();
    wait_for_agents(&job, 1);
    wait_until_reported(&agent, &job);
    stage.mark("seen");
    job.end().assert_status(0);
}

#[test]
fn a_job_of_any_user_attaches_and_is_its_own() {
    let no_one = match as_unprivileged() {
        Ok(no_one) => no_one,
        Err(why) => return skipped(why),
    };
    let stage = Stage::new();
    stage.open_to_all();
    let agent = stage.agent();
    let job = stage.sh("wait_for seen").with(&agent).under(&no_one).start();
    wait_for_agents(&job, 1);
    agent.wait_for_fact(job.id(), "the job", |fact| matches!(fact, Fact::JobStarted(of) if of.uid == 65534));
    stage.mark("seen");
    job.end().assert_status(0);
}

#[test]
fn a_job_of_a_user_whom_the_configuration_does_not_admit_runs_without_the_agent() {
    let no_one = match as_unprivileged() {
        Ok(no_one) => no_one,
        Err(why) => return skipped(why),
    };
    let stage = Stage::new();
    stage.open_to_all();
    let program = mainstay().display().to_string();
    let line = ["/usr/bin/env", "MAINSTAY_AGENT_ALLOW_UIDS=1", &program].map(str::to_owned);
    let agent = Agent::start_under(&line, &stage);
    let job = stage.sh("wait_for seen").with(&agent).under(&no_one).start();
    job.wait_until_printed("allow_uids");
    stage.mark("seen");
    job.end().assert_status(0);
    assert!(!journal::facts(&agent.journal()).any(|fact| matches!(fact, Fact::JobStarted(_))));
}

/// As in a container, which has its own host name, no kernel log and no journal.
#[test]
fn a_kernel_log_that_does_not_exist_is_no_doubt_and_the_node_has_the_name_that_it_is_given() {
    let stage = Stage::new();
    let program = mainstay().display().to_string();
    let variables = ["NODE_NAME=gpu-node-7", "MAINSTAY_AGENT_KERNEL_LOG_PATH=/none/kmsg", "PATH=/none"];
    let line = ["/usr/bin/env"].into_iter().chain(variables).map(str::to_owned);
    let agent = Agent::start_under(&line.chain([program]).collect::<Vec<_>>(), &stage);
    processes::wait_until("the state of the host is known", || agent.status(&stage).0 != Some(3));
    let (_, status) = agent.status(&stage);
    let server = &status["servers"][0];
    assert_eq!(server["server"]["hostname"], "gpu-node-7", "{status}");
    let components = server["node"]["components"].as_array().expect("components");
    assert!(components.iter().all(|of| of["name"] != "host.kernel_log"), "{status}");
}

/// Steps until a file marks the end.
const BEATING: &str = r#"
import mainstay
step = 0
while not os.path.exists(f"{MARKS}/end"):
    step += 1
    mainstay.step(step)
    time.sleep(0.005)
"#;

/// Asks the agent until it reports a step of the job beyond `step`; returns it.
fn wait_for_step_beyond(agent: &Agent, stage: &Stage, job: &str, step: u64) -> u64 {
    let newest = Cell::new(0);
    processes::wait_until("the agent tells of a newer step", || {
        let (_, status) = agent.status(stage);
        let jobs = status["servers"][0]["jobs"].as_array();
        let of_job = jobs.into_iter().flatten().find(|of| of["id"] == job);
        newest.set(of_job.and_then(|of| of["step"].as_u64()).unwrap_or(0));
        newest.get() > step
    });
    newest.get()
}

fn wait_for_agents(job: &Job, count: usize) {
    job.wait_for("an agent", nth(count, |fact| matches!(fact, Fact::AgentFound { .. })));
}

/// Waits until the agent's own journal has the job. The launcher reports that it found its agent before the agent
/// has read the launcher's entries.
fn wait_until_reported(agent: &Agent, job: &Job) {
    agent.wait_for_fact(job.id(), "the job", |fact| matches!(fact, Fact::JobStarted(_)));
}

/// Finds the entry with the fact when it comes for the `count`th time.
fn nth(count: usize, is: impl Fn(&Fact) -> bool) -> impl FnMut(&Entry) -> Option<()> {
    let mut seen = std::collections::BTreeSet::new();
    move |entry| {
        if matches!(&entry.body, Body::Fact(fact) if is(fact)) {
            seen.insert(entry.seq);
        }
        (seen.len() >= count).then_some(())
    }
}

fn is_start(entry: &Entry) -> bool {
    matches!(entry.body, Body::Fact(Fact::AttemptStarted { .. }))
}

fn is_of(entry: &Entry, job: &str) -> bool {
    entry.job.as_ref().is_some_and(|id| id.0 == job)
}

fn bodies(journal: &[Entry], job: &str) -> Vec<Body> {
    journal.iter().filter(|entry| is_of(entry, job)).map(|entry| entry.body.clone()).collect()
}

/// The entries of a job that the agent received; its own entries on the job have no origin.
fn of_job(journal: &[Entry], job: &str) -> Vec<Body> {
    let taken = journal.iter().filter(|entry| is_of(entry, job) && entry.origin_seq.is_some());
    taken.map(|entry| entry.body.clone()).collect()
}

#[test]
fn kernel_log_lines_about_a_gpu_decide_the_fault_domain() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let log = stage.work().join("kmsg");
    std::fs::write(&log, "").expect("a kernel log of our own");
    let variable = format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", log.display());
    let agent = Agent::start_under(&["env".into(), variable, mainstay().display().to_string()], &stage);
    let script = r#"
import mainstay
mainstay.step(ATTEMPT)
if ATTEMPT == 0:
    mark("ready")
    wait_for("lost")
    raise RuntimeError("CUDA error: unspecified launch failure")
"#;
    let job = stage.python(script).ranks(1).with(&agent).start();
    job.mark("ready");
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    a_gpu_falls_off_the_bus(&log);
    agent.wait_for("the XID", |entry| matches!(entry.body, Body::Fact(Fact::Xid(_))).then_some(()));
    stage.mark("lost");
    let end = job.end();
    // Nothing is restarted on a host that lost a GPU: the job asks the scheduler for another host.
    end.assert_status(75);
    let last = *journal::decisions(&end.journal).last().expect("a decision");
    assert_eq!(last.action, Action::HandBack { exit: 75 }, "{end}");
    assert!(last.used_agent_evidence() && last.why.contains("gpu.0000:3b:00"), "{end}");
    let verdicts = journal::verdicts(&end.journal);
    let last = verdicts.last().expect("a verdict");
    assert_eq!(last.domain, FaultDomain::Hardware, "{end}");
    assert!(last.evidence.iter().any(|line| line.contains("79")), "{end}");
    // The verdict from the rank's output alone comes first.
    assert_eq!((verdicts.len(), verdicts[0].domain), (2, FaultDomain::Unknown), "{end}");
}

#[test]
fn an_oom_kill_is_evidence_only_for_the_job_of_the_killed_process() {
    let stage = Stage::new();
    let log = stage.work().join("kmsg");
    let killed = |pid: i32| {
        let text = format!(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/foreign,task_memcg=/foreign,task=python,pid={pid},uid=0"
        );
        kernel_line(&text)
    };
    // Above the kernel's own limit for process numbers.
    std::fs::write(&log, killed(4_194_305)).expect("a kernel log of our own");
    let variable = format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", log.display());
    let agent = Agent::start_under(&["env".into(), variable, mainstay().display().to_string()], &stage);
    let job =
        stage.sh(r#"mark "ready.$RANK"; work"#).ranks(2).options("--max-restarts 0").with(&agent).start();
    job.mark("ready.1");
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    let rank = job.attempt(0).pids[&1];
    let mut kernel = std::fs::File::options().append(true).open(&log).expect("the log");
    kernel.write_all((killed(4_194_306) + &killed(rank)).as_bytes()).expect("the kernel writes");
    agent.wait_for("the kill of the rank", |entry| match &entry.body {
        Body::Fact(Fact::KernelReport(report)) => (report.pid?.0 == rank).then_some(()),
        _ => None,
    });
    job.kill_rank(0, 1);
    let end = job.end();
    let reported = end.journal.iter().filter_map(|entry| match &entry.body {
        Body::Fact(Fact::HostEvidenceReported { host_evidence, .. }) => Some(&host_evidence.kernel_lines),
        _ => None,
    });
    let lines: Vec<&String> = reported.flatten().collect();
    assert!(lines.iter().any(|line| line.contains(&format!("pid={rank},"))), "{end}");
    assert!(lines.iter().all(|line| !line.contains("pid=419430")), "{lines:?}\n{end}");
}

/// A current kernel log line.
fn a_gpu_falls_off_the_bus(log: &std::path::Path) {
    let xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.";
    std::fs::write(log, kernel_line(xid)).expect("the kernel writes");
}

/// A line as the kernel would write it now.
#[expect(clippy::expect_used, reason = "a panic is how a test reports")]
fn kernel_line(text: &str) -> String {
    let uptime = std::fs::read_to_string("/proc/uptime").expect("the time since boot");
    let seconds: f64 = uptime.split(' ').next().and_then(|first| first.parse().ok()).expect("a number");
    format!("4,1,{},-;{text}\n", (seconds * 1e6) as u64)
}

#[test]
fn a_kernel_log_line_seconds_after_the_restart_still_changes_the_fault_domain() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let log = stage.work().join("kmsg");
    std::fs::write(&log, "").expect("a kernel log of our own");
    let variable = format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", log.display());
    let agent = Agent::start_under(&["env".into(), variable, mainstay().display().to_string()], &stage);
    let script = r#"
import mainstay
mainstay.step(ATTEMPT)
if ATTEMPT == 0:
    mark("ready")
    wait_for("fail")
    raise RuntimeError("CUDA error: unspecified launch failure")
mark("again")
wait_for("heard")
"#;
    let job = stage.python(script).ranks(1).with(&agent).start();
    job.mark("ready");
    job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
    stage.mark("fail");
    job.mark("again");
    a_gpu_falls_off_the_bus(&log);
    agent.wait_for("the verdict anew", |entry| {
        matches!(&entry.body, Body::Verdict(of) if of.domain == FaultDomain::Hardware).then_some(())
    });
    stage.mark("heard");
    let end = job.end();
    end.assert_status(0);
    let reported: Vec<_> =
        journal::verdicts(&end.journal).iter().map(|verdict| (verdict.incident.0, verdict.domain)).collect();
    assert_eq!(reported, [(1, FaultDomain::Unknown), (1, FaultDomain::Hardware)], "{end}");
    assert_eq!(journal::decisions(&end.journal).len(), 1, "{end}");
}
