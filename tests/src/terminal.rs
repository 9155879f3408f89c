//! A program on a terminal of its own: a pseudoterminal of script(1), with a terminal emulator that reads it.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use crate::plan;
use crate::stage::Stage;
use crate::waiting::DEADLINE;

/// Lines of a whole transcript, at most.
const MAX_LINES: u16 = 10_000;

/// A program on a terminal of 24 lines and 80 columns.
pub struct Terminal {
    script: Child,
    keys: ChildStdin,
    printed: Receiver<Vec<u8>>,
    emulator: vt100::Parser,
    raw: Vec<u8>,
    /// The file with the name of the device, for another size.
    device: std::path::PathBuf,
}

impl Terminal {
    /// Starts a program with these arguments; none if script(1) is not installed, which is reported as skipped.
    pub fn start(stage: &Stage, line: &[String]) -> Option<Terminal> {
        if Command::new("script").arg("--version").output().is_err() {
            crate::skipped("script(1) of util-linux is not installed");
            return None;
        }
        let device = stage.work().join("device");
        let quoted: Vec<String> = line.iter().map(|word| quoted(word)).collect();
        let line = format!("tty > {}; stty rows 24 cols 80; exec {}", device.display(), quoted.join(" "));
        let mut script = Command::new("script");
        let mut script = plan::bare(&mut script, stage)
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .env("MAINSTAY_RUNTIME_DIR", stage.tmpfs())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script(1)");
        let (keys, output) = (script.stdin.take(), script.stdout.take());
        let (keys, mut output) = (keys.expect("its input"), output.expect("its output"));
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
        Some(Terminal { script, keys, printed, emulator, raw: Vec::new(), device })
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
        self.keys.flush().expect("a terminal");
    }

    /// Waits until the screen is as wanted, and returns it.
    pub fn wait_for(&mut self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let screen = self.emulator.screen().contents();
            if is(&screen) {
                return screen;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.printed.recv_timeout(left) {
                Ok(bytes) => self.show(&bytes),
                Err(_) => panic!("waiting for {what} on this screen:\n{screen}"),
            }
        }
    }

    /// Changes the size of the terminal.
    pub fn resize(&mut self, rows: u16, columns: u16) {
        self.emulator.screen_mut().set_size(rows, columns);
        let device = std::fs::read_to_string(&self.device).expect("the name of the device");
        let (rows, columns) = (rows.to_string(), columns.to_string());
        let set = Command::new("stty").args(["-F", device.trim(), "rows", &rows, "cols", &columns]).status();
        assert!(set.is_ok_and(|set| set.success()), "stty");
    }

    /// Waits for the end of the program, and returns its status.
    pub fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.printed.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.show(&bytes),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("it does not end; its screen:\n{}", self.emulator.screen().contents())
                }
            }
        }
        self.script.wait().expect("script(1)").code()
    }

    /// What the program wrote, byte by byte.
    pub fn raw(&self) -> String {
        String::from_utf8_lossy(&self.raw).into_owned()
    }

    /// The lines that are on the screen and above it.
    pub fn lines(&self) -> Vec<String> {
        let mut whole = vt100::Parser::new(MAX_LINES, 80, 0);
        whole.process(&self.raw);
        whole.screen().contents().lines().map(str::to_owned).collect()
    }

    /// Whether the cursor is hidden.
    pub fn hides_cursor(&self) -> bool {
        self.emulator.screen().hide_cursor()
    }

    fn show(&mut self, bytes: &[u8]) {
        self.raw.extend(bytes);
        self.emulator.process(bytes);
    }
}

impl std::fmt::Debug for Terminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Terminal").field("screen", &self.emulator.screen().contents()).finish_non_exhaustive()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
