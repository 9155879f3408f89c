//! NCCL's RAS service as a process of a job has it: its commands, its two report formats, and other programs on its
//! port.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a panic is how a test reports; not every test uses all of it"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Who answers a connection.
#[derive(Clone, Debug)]
pub enum Answerer {
    /// NCCL before 2.28.7: a text.
    Text(String),
    /// NCCL 2.28.7 and later: JSON.
    Json(String),
    /// A stopped process: the kernel accepts the connection.
    Stopped,
    /// It sends this and closes the connection.
    Other(&'static str),
    /// It closes the connection in the middle of its report.
    BreaksOff(String),
}

/// The port of a host. Each connection gets the next of its processes, the last one all further connections.
pub struct Ras {
    pub address: String,
    answerers: Arc<Mutex<Vec<Answerer>>>,
    printed: Arc<Mutex<Vec<String>>>,
}

impl Ras {
    pub fn start(answerers: &[Answerer]) -> Ras {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answerers = Arc::new(Mutex::new(answerers.to_vec()));
        let printed = Arc::new(Mutex::new(Vec::new()));
        let (of_all, received) = (answerers.clone(), printed.clone());
        std::thread::spawn(move || {
            // Connections to stopped processes stay open.
            let mut held = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let mut all = of_all.lock().unwrap();
                let answerer = if all.len() > 1 { all.remove(0) } else { all[0].clone() };
                drop(all);
                if matches!(answerer, Answerer::Stopped) {
                    held.push(stream);
                    continue;
                }
                let received = received.clone();
                std::thread::spawn(move || drop(talk(stream, answerer, &received)));
            }
        });
        Ras { address, answerers, printed }
    }

    /// Replaces the answerer.
    pub fn change(&self, answerer: Answerer) {
        *self.answerers.lock().unwrap() = vec![answerer];
    }

    /// What it has received so far.
    pub fn printed(&self) -> Vec<String> {
        self.printed.lock().unwrap().clone()
    }
}

fn talk(mut stream: TcpStream, answerer: Answerer, printed: &Mutex<Vec<String>>) -> std::io::Result<()> {
    if let Answerer::Other(text) = answerer {
        return stream.write_all(text.as_bytes());
    }
    let mut json = false;
    for line in BufReader::new(stream.try_clone()?).lines() {
        let line = line?;
        printed.lock().unwrap().push(line.clone());
        let line = line.to_lowercase();
        if line.starts_with("client protocol ") {
            stream.write_all(b"SERVER PROTOCOL 2\n")?;
        } else if line.strip_prefix("timeout ").is_some_and(|seconds| seconds.parse::<u32>().is_ok()) {
            stream.write_all(b"OK\n")?;
        } else if line == "set format json" && matches!(answerer, Answerer::Json(_)) {
            json = true;
            stream.write_all(b"OK\n")?;
        } else if line == "status" || line == "verbose status" {
            match &answerer {
                Answerer::Json(report) if json => stream.write_all(report.as_bytes())?,
                Answerer::Text(report) => stream.write_all(report.as_bytes())?,
                Answerer::BreaksOff(report) => stream.write_all(&report.as_bytes()[..report.len() / 2])?,
                _ => {}
            }
            return Ok(());
        } else {
            stream.write_all(format!("ERROR: Unknown command {line}\n").as_bytes())?;
        }
    }
    Ok(())
}
