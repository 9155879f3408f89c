//! `mainstay top` on a real terminal: a pseudoterminal of script(1), with a terminal emulator that reads it.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use mainstay_model::entry::Fact;
use mainstay_tests::{Agent, DEADLINE, Stage, has_client, mainstay, skipped};

use crate::words::terminal as words;

/// A program on a terminal of its own.
struct Terminal {
    script: Child,
    keys: ChildStdin,
    printed: Receiver<Vec<u8>>,
    emulator: vt100::Parser,
    /// The device, for another size.
    device: String,
}

impl Terminal {
    fn start(stage: &Stage, agent: &Agent) -> Terminal {
        let device = stage.work().join("device");
        let (program, socket) = (mainstay(), agent.socket());
        let line = format!(
            "tty > {}; stty rows 24 cols 80; exec {} top --socket {}",
            device.display(),
            program.display(),
            socket.display()
        );
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .env("MAINSTAY_RUNTIME_DIR", stage.tmpfs())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (keys, mut output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let (sender, printed) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        let emulator = vt100::Parser::new(24, 80, 0);
        let mut terminal = Terminal { script, keys, printed, emulator, device: String::new() };
        terminal.wait_for("the first screen", |screen| !screen.trim().is_empty());
        terminal.device = std::fs::read_to_string(device).unwrap().trim().to_owned();
        terminal
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits until the screen is as wanted, and returns it.
    fn wait_for(&mut self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let screen = self.emulator.screen().contents();
            if is(&screen) {
                return screen;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.printed.recv_timeout(left) {
                Ok(bytes) => self.emulator.process(&bytes),
                Err(_) => panic!("waiting for {what} on this screen:\n{screen}"),
            }
        }
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        self.emulator.screen_mut().set_size(rows, columns);
        let (rows, columns) = (rows.to_string(), columns.to_string());
        let set = Command::new("stty").args(["-F", &self.device, "rows", &rows, "cols", &columns]).status();
        assert!(set.unwrap().success());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn keys_on_a_terminal_explain_take_stacks_and_restart_a_job() {
    if !has_client() {
        return;
    }
    if Command::new("script").arg("--version").output().is_err() {
        return skipped("script(1) of util-linux is not installed");
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

    let mut terminal = Terminal::start(&stage, &agent);
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
    assert_eq!(terminal.script.wait().unwrap().code(), Some(0));

    let mut stop = Command::new(mainstay());
    let stopped = stop.args(["job", "stop", "--reason", "enough", "--socket"]).arg(job.socket()).output();
    assert!(stopped.unwrap().status.success());
    job.end().assert_status(143);
    agent.stop();
}
