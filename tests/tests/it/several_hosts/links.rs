//! Links of hosts that can be made slow and lossy at any time, as `tc netem` does it. Few kernels of virtual
//! machines have netem; TAP devices and a program that forwards their frames do the same on each.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use mainstay_tests::python;

/// How a link is in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Quality {
    /// Delay in milliseconds.
    pub delay: f64,
    /// Standard deviation of the delay in milliseconds.
    pub jitter: f64,
    /// Percentage of lost frames.
    pub loss: f64,
    /// Bandwidth in kbit/s.
    pub rate: f64,
}

impl Quality {
    /// A link of a data centre, between two racks.
    pub const GOOD: Quality = Quality { delay: 0.5, jitter: 0.05, loss: 0.0, rate: 1e6 };

    /// A link on which nothing arrives.
    pub const DEAD: Quality = Quality { loss: 100.0, ..Quality::GOOD };

    /// The same, slower by this factor.
    pub fn slower(self, times: f64) -> Quality {
        let Quality { delay, jitter, rate, .. } = self;
        Quality { delay: delay * times, jitter: jitter * times, rate: rate / times, ..self }
    }
}

/// The program that forwards frames.
pub struct Links {
    program: Child,
    control: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Links {
    /// Makes these devices in the namespace of the caller; they may be moved to others.
    pub fn new(devices: &[String]) -> Links {
        let mut command = Command::new(python());
        command.arg("-c").arg(include_str!("links.py")).args(devices);
        let mut program =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("there is Python");
        let input = program.stdin.take().expect("a pipe");
        let output = BufReader::new(program.stdout.take().expect("a pipe"));
        let links = Links { program, control: Mutex::new((input, output)) };
        links.answer("ready");
        links
    }

    /// Sets the quality of what a host sends and of what others send to it.
    pub fn set(&self, host: usize, out: Quality, back: Quality) {
        for (direction, quality) in [out, back].into_iter().enumerate() {
            let Quality { delay, jitter, loss, rate } = quality;
            let mut control = self.control.lock().expect("no test failed here");
            // In one piece: the program reads whole lines.
            let line = format!("{host} {direction} {delay} {jitter} {loss} {rate}\n");
            control.0.write_all(line.as_bytes()).expect("the program reads it");
            drop(control);
            self.answer("set");
        }
    }

    fn answer(&self, expected: &str) {
        let mut line = String::new();
        let mut control = self.control.lock().expect("no test failed here");
        control.1.read_line(&mut line).expect("the program answers");
        assert_eq!(line.trim_end(), expected, "what links.py says (its error is above)");
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
