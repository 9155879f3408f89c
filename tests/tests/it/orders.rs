//! Orders for a job: who may send them, their effect, and their record in the journal.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use mainstay_model::entry::Fact;
use mainstay_tests::{End, Job, Stage, as_unprivileged, has_client, journal, mainstay, processes, skipped};

/// Ranks that work until SIGTERM.
const WORKS: &str = r#"trap 'exit 0' TERM
mark "up.$ATTEMPT.$RANK"
work"#;

fn order(job: &Job, arguments: &[&str]) -> Output {
    let mut command = Command::new(mainstay());
    command.args(arguments).arg("--socket").arg(job.socket());
    command.output().expect("mainstay can be started")
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ordered(end: &End, event: &str) -> usize {
    let is = |fact: &&Fact| matches!(fact, Fact::Observed(seen) if seen.event == event);
    journal::facts(&end.journal).filter(is).count()
}

#[test]
fn a_restart_that_is_ordered_is_no_failure_and_a_stop_ends_the_job() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).ranks(2).options("--max-restarts 0").start();
    job.mark("up.0.0");
    job.mark("up.0.1");
    let restarted = order(&job, &["job", "restart", "--reason", "new settings"]);
    assert!(restarted.status.success(), "{}", printed(&restarted));
    job.mark("up.1.0");
    job.mark("up.1.1");
    let stopped = order(&job, &["job", "stop", "--reason", "enough"]);
    assert!(stopped.status.success(), "{}", printed(&stopped));
    let end = job.end();
    end.assert_status(143);
    assert_eq!(journal::verdicts(&end.journal).len(), 0, "{end}");
    assert_eq!((ordered(&end, "restart_ordered"), ordered(&end, "stop_ordered")), (1, 1), "{end}");
    end.assert_printed("(enough): stopping the ranks");
}

#[test]
fn another_user_orders_nothing_even_where_the_socket_is_open() {
    let no_one = match as_unprivileged() {
        Ok(no_one) => no_one,
        Err(why) => return skipped(why),
    };
    let stage = Stage::new();
    let job = stage.sh(WORKS).options("--allow-inject").start();
    job.mark("up.0.0");
    stage.open_to_all();
    let program = stage.work().join("mainstay");
    // By a child: a program cannot be executed while any process that we fork meanwhile has it open for writing.
    let copied = Command::new("cp").arg(mainstay()).arg(&program).status().expect("cp can be started");
    assert!(copied.success(), "a copy that everybody may execute");
    // An operator may have changed the mode by hand: the socket can be opened, but orders of this user are still
    // refused.
    let socket = job.socket();
    for path in socket.ancestors().take_while(|path| path.starts_with(stage.tmpfs())) {
        std::fs::set_permissions(path, Permissions::from_mode(0o777)).expect("our own");
    }
    let orders: [&[&str]; 4] = [
        &["job", "restart", "--reason", "mine"],
        &["job", "stop", "--reason", "mine"],
        &["job", "exclude-rank", "0", "--reason", "mine"],
        &["inject", "kill", "--rank", "0", "--reason", "mine"],
    ];
    for arguments in orders {
        let mut command = Command::new(no_one[0]);
        command.args(&no_one[1..]).arg(&program).args(arguments).arg("--socket").arg(socket);
        let refused = command.output().expect("setpriv can be started");
        assert!(!refused.status.success(), "{arguments:?}");
        testing::snapshot!(
            "orders",
            format!("another user: {}", arguments[..2].join(" ")),
            stage.masked(&printed(&refused))
        );
    }
    let stopped = order(&job, &["job", "stop", "--reason", "ours"]);
    assert!(stopped.status.success(), "{}", printed(&stopped));
    let end = job.end();
    end.assert_status(143);
    for event in ["restart_ordered", "fault_injected"] {
        assert_eq!(ordered(&end, event), 0, "{end}");
    }
    assert_eq!(ordered(&end, "stop_ordered"), 1, "{end}");
}

#[test]
fn faults_are_injected_only_into_jobs_that_opted_in() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).start();
    job.mark("up.0.0");
    let refused = order(&job, &["inject", "kill", "--rank", "0", "--reason", "drill"]);
    assert_eq!(refused.status.code(), Some(3));
    assert!(printed(&refused).contains("--allow-inject"), "{}", printed(&refused));
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(ordered(&end, "fault_injected"), 0, "{end}");
}

#[test]
fn an_injected_kill_is_judged_as_any_other_and_the_journal_has_who_did_it() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).ranks(2).options("--allow-inject").start();
    job.mark("up.0.1");
    let no_rank = order(&job, &["inject", "kill", "--rank", "7", "--reason", "drill"]);
    assert!(!no_rank.status.success(), "{}", printed(&no_rank));
    testing::snapshot!("orders", "no such rank", stage.masked(&printed(&no_rank)));
    let killed = order(&job, &["inject", "kill", "--rank", "1", "--reason", "drill"]);
    assert!(killed.status.success(), "{}", printed(&killed));
    job.mark("up.1.0");
    job.mark("up.1.1");
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    end.assert_status(143);
    let kind = |fact: &Fact| match fact {
        Fact::Observed(seen) if seen.event == "fault_injected" => Some("injected"),
        Fact::RankExited { after_stop: false, .. } => Some("exited"),
        _ => None,
    };
    let reported: Vec<&str> = journal::facts(&end.journal).filter_map(kind).collect();
    assert_eq!(reported[..2], ["injected", "exited"], "{end}");
}

#[test]
fn an_order_without_a_reason_is_refused() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).start();
    job.mark("up.0.0");
    let refused = order(&job, &["job", "stop", "--reason", " "]);
    assert_eq!(refused.status.code(), Some(3));
    testing::snapshot!("orders", "no reason", stage.masked(&printed(&refused)));
    order(&job, &["job", "stop", "--reason", "enough"]);
    job.end().assert_status(143);
}

#[test]
fn a_dry_run_prints_what_would_be_done_and_ends() {
    let stage = Stage::new();
    let end = stage.sh("kill -9 $$").options("--dry-run").start().end();
    end.assert_status(137);
    testing::snapshot!("orders", "a dry run", end.line(&["dry run"]));
    assert_eq!(end.summary().attempts, 1, "{end}");
}

#[test]
fn an_excluded_ranks_gpu_is_not_seen_again_where_another_takes_its_place() {
    let stage = Stage::new();
    let script = r#"trap 'exit 0' TERM
mark "up.$ATTEMPT.$RANK" "$CUDA_VISIBLE_DEVICES"
work"#;
    let job = stage.sh(script).ranks(2).variable("CUDA_VISIBLE_DEVICES", "3,5,7").start();
    assert_eq!(job.mark("up.0.1"), "3,5,7");
    job.mark("up.0.0");
    let excluded = order(&job, &["job", "exclude-rank", "1", "--reason", "slow"]);
    assert!(excluded.status.success(), "{}", printed(&excluded));
    assert_eq!([job.mark("up.1.0"), job.mark("up.1.1")], ["3,7", "3,7"]);
    let refused = order(&job, &["job", "exclude-rank", "0", "--reason", "slow too"]);
    assert_eq!(refused.status.code(), Some(3));
    testing::snapshot!("orders", "all ranks are needed", stage.masked(&printed(&refused)));
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    end.assert_status(143);
    assert_eq!((ordered(&end, "rank_excluded"), end.summary().attempts), (1, 2), "{end}");
    assert_eq!(journal::verdicts(&end.journal).len(), 0, "{end}");
}

#[test]
fn what_the_client_would_have_to_do_is_refused_where_there_is_none() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).options("--allow-inject").start();
    job.mark("up.0.0");
    for (arguments, words) in [
        (&["inject", "exception", "--rank", "0", "--reason", "drill"][..], "import mainstay"),
        (&["inject", "kill", "--at-step", "5", "--rank", "0", "--reason", "drill"][..], "reports no steps"),
    ] {
        let refused = order(&job, arguments);
        assert_eq!(refused.status.code(), Some(3));
        assert!(printed(&refused).contains(words), "{}", printed(&refused));
    }
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    assert_eq!(ordered(&end, "fault_injected"), 0, "{end}");
}

/// Ranks that step until SIGTERM, with a client.
const STEPS: &str = r#"
import mainstay
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
mark(f"up.{ATTEMPT}.{RANK}", "MAINSTAY_DRILL" in os.environ)
for step in range(1_000_000):
    time.sleep(0.002)
    mainstay.step(step)
    if step == 20:
        mark(f"steps.{ATTEMPT}.{RANK}")
"#;

#[test]
fn an_injected_exception_comes_at_its_step_and_a_full_disk_ends_what_writes() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = format!("{STEPS}    if ATTEMPT == 1:\n        print(step, flush=True)\n");
    let job = stage.python(&script).options("--allow-inject").start();
    assert_eq!(job.mark("up.0.0"), "True");
    job.mark("steps.0.0");
    let injected =
        order(&job, &["inject", "exception", "--at-step", "200", "--rank", "0", "--reason", "drill"]);
    assert!(injected.status.success(), "{}", printed(&injected));
    job.mark("steps.1.0");
    let injected = order(&job, &["inject", "disk-full", "--rank", "0", "--reason", "drill"]);
    assert!(injected.status.success(), "{}", printed(&injected));
    job.mark("steps.2.0");
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    let verdicts = journal::verdicts(&end.journal);
    assert_eq!(verdicts.len(), 2, "{end}");
    assert!(verdicts[0].headline.contains("InjectedFault"), "{end}");
    assert!(verdicts[0].step >= Some(200), "{end}");
    assert!(verdicts[1].headline.contains("OSError"), "{end}");
}

#[test]
fn an_injected_cut_of_the_network_breaks_the_connections_of_that_rank_and_of_no_other() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay, socket, threading
listener = socket.create_server(("127.0.0.1", 0))
line = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
local, _ = socket.socketpair()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
threading.Thread(target=lambda: mark(f"cut.{RANK}", repr(line.recv(1))), daemon=True).start()
threading.Thread(target=lambda: mark(f"local.{RANK}", repr(local.recv(1))), daemon=True).start()
mark(f"up.{RANK}")
while True:
    time.sleep(0.01)
"#;
    let job = stage.python(script).ranks(2).options("--allow-inject").start();
    job.mark("up.0");
    job.mark("up.1");
    let injected = order(&job, &["inject", "network", "--rank", "1", "--reason", "drill"]);
    assert!(injected.status.success(), "{}", printed(&injected));
    assert_eq!(job.mark("cut.1"), "b''");
    let kept = ["cut.0", "local.0", "local.1"].map(|name| stage.marks().join(name).exists());
    assert_eq!(kept, [false; 3], "other ranks' connections, and those that are no network");
    order(&job, &["job", "stop", "--reason", "enough"]);
    job.end();
}

#[test]
fn a_rank_that_is_made_slow_falls_behind_its_peer() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
for step in range(1, 10_000_000):
    sum(range(20_000))
    mainstay.step(step)
    if step % 20 == 0:
        mark(f"at.{RANK}", step)
    if step == 20:
        mark(f"up.{RANK}")
"#;
    let job = stage.python(script).ranks(2).options("--allow-inject").start();
    job.mark("up.0");
    job.mark("up.1");
    let injected = order(&job, &["inject", "slow", "--by", "95", "--rank", "1", "--reason", "drill"]);
    assert!(injected.status.success(), "{}", printed(&injected));
    let at = |rank: u32| -> u64 { job.mark(&format!("at.{rank}")).parse().expect("a step") };
    let (first, second) = (at(0), at(1));
    // Both continue by the same clock. On a busy machine the peer has to wait too, and it takes more steps until
    // the difference is clear.
    processes::wait_until("a thousand steps of the peer beside less than half as many", || {
        let (peer, slow) = (at(0) - first, at(1) - second);
        peer >= 1000 && slow * 2 < peer
    });
    order(&job, &["job", "stop", "--reason", "enough"]);
    job.end();
}

#[test]
fn a_job_that_did_not_opt_in_has_nothing_of_drills() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = format!("{STEPS}        mark('loaded', 'mainstay._drill' in sys.modules)\n");
    let job = stage.python(&script).start();
    assert_eq!((job.mark("up.0.0").as_str(), job.mark("loaded").as_str()), ("False", "False"));
    assert!(!job.socket().with_file_name("drill.sock").exists());
    order(&job, &["job", "stop", "--reason", "enough"]);
    job.end();
}
