//! `mainstay top` on a real terminal.

use std::process::Command;

use mainstay_model::entry::Fact;
use mainstay_tests::{Stage, Terminal, has_client, mainstay};

use crate::words::terminal as words;

#[test]
fn keys_on_a_terminal_explain_take_stacks_and_restart_a_job() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let agent = stage.agent();
    let script = r#"
import itertools, mainstay
for step in itertools.count():
    mainstay.step(step)
    if step == 3:
        mark(f"up.{ATTEMPT}.{RANK}")
    if step == 10 and ATTEMPT == 0 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
"#;
    let job = stage.python(script).ranks(2).with(&agent).start();
    job.mark("up.1.0");
    job.mark("up.1.1");
    agent.wait_for_fact(
        job.id(),
        "the restart's first step",
        |fact| matches!(fact, Fact::RanksStepping { attempt, .. } if attempt.0 == 1),
    );

    let socket = agent.socket().display().to_string();
    let line = [mainstay().display().to_string(), "top".to_owned(), "--socket".to_owned(), socket];
    let Some(mut terminal) = Terminal::start(&stage, &line) else { return };
    terminal.wait_for("the job and its ranks", |screen| {
        screen.contains(job.id()) && screen.contains("RANK") && screen.contains("1/3")
    });
    terminal.press("\r");
    terminal.wait_for("the report", |screen| screen.contains(words::WHAT_WAS_DONE));
    terminal.press("\x1b");
    terminal.wait_for("the overview", |screen| screen.contains("RANK"));
    terminal.press("t");
    terminal.wait_for("stacks", |screen| screen.contains(words::STACKS_OF) && screen.contains("ranks.py"));
    terminal.press("q");
    terminal.resize(40, 120);
    let large = terminal.wait_for("all columns", |screen| screen.contains("MEDIAN STEP"));
    assert!(large.lines().all(|line| line.chars().count() <= 120), "{large}");
    // crossterm drops keys that come together with the signal of a new size, until another key comes.
    terminal.wait_for("the next refresh", |screen| screen != large);

    terminal.press("r");
    terminal.wait_for("the question for a reason", |screen| screen.contains(words::RESTART_REASON));
    terminal.press("looks slow\r");
    terminal.wait_for("the second question", |screen| screen.contains(words::RESTART_SURE));
    terminal.press("y");
    let ordered = job.wait_for_event("restart_ordered");
    assert!(ordered.values.values().any(|value| value == "looks slow"), "{ordered:?}");
    job.mark("up.2.0");
    terminal.press("q");
    assert_eq!(terminal.end(), Some(0));

    let mut stop = Command::new(mainstay());
    let stopped = stop.args(["job", "stop", "--reason", "enough", "--socket"]).arg(job.socket()).output();
    assert!(stopped.unwrap().status.success());
    job.end().assert_status(143);
    agent.stop();
}
