//! DCGM: its health checks through a probe in a child process, and dcgm-exporter's page.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use mainstay_health::hardware::dcgm::{DcgmReport, ExporterReport};

use super::device::has_nvidia_device;
use super::request_child::{RequestChild, Unanswered};

/// How the probe is started.
#[derive(Clone, Debug)]
pub struct DcgmPlan {
    /// The program that contains the probe: our own.
    pub program: PathBuf,
    /// The library; none for the usual one.
    pub library: Option<PathBuf>,
    /// The host engine; none to run one within the probe.
    pub address: Option<String>,
    /// The operator configured that it runs here: it is asked even if no GPU is visible.
    pub expected: bool,
    /// Whether to set policies if no one has set any.
    pub policies: bool,
    /// Where sysfs is.
    pub sys: PathBuf,
    /// How long an answer may take.
    pub deadline: Duration,
}

/// The host engine, as far as it answers.
#[derive(Debug)]
pub struct DcgmSource {
    plan: DcgmPlan,
    asked: RequestChild,
    /// Samples to skip: a host engine rarely appears within a minute.
    rest: u32,
}

/// How many samples are skipped after one that found nothing, unless the operator expects it.
const SKIPPED_SAMPLES: u32 = 20;

impl DcgmSource {
    /// A source that has not asked yet.
    pub fn new(plan: DcgmPlan) -> DcgmSource {
        DcgmSource { plan, asked: RequestChild::default(), rest: 0 }
    }

    /// Takes one sample. Returns within the deadline.
    pub fn sample(&mut self) -> DcgmReport {
        let nothing = || DcgmReport::Absent("there is no sign of it".to_owned());
        let sought = self.plan.expected || self.plan.library.is_some();
        if !sought && !self.asked.is_running() && !has_nvidia_device(&self.plan.sys) {
            return nothing();
        }
        if self.rest > 0 {
            self.rest -= 1;
            return nothing();
        }
        let report = match self.asked.ask(self.command(), self.plan.deadline) {
            Ok(answer) => serde_json::from_slice(&answer)
                .unwrap_or_else(|error| DcgmReport::Failed(format!("its answer is not understood: {error}"))),
            Err(Unanswered::Late) => DcgmReport::Silent,
            Err(Unanswered::Broken(why)) => DcgmReport::Failed(why),
        };
        if matches!(report, DcgmReport::Absent(_)) && !self.plan.expected {
            // Meanwhile no probe runs.
            self.asked = RequestChild::default();
            self.rest = SKIPPED_SAMPLES;
        }
        report
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.plan.program);
        command.args(["probe", "dcgm"]);
        if let Some(library) = &self.plan.library {
            command.arg("--lib").arg(library);
        }
        if let Some(address) = &self.plan.address {
            command.arg("--address").arg(address);
        }
        if self.plan.policies {
            command.arg("--policies");
        }
        command
    }
}

/// The largest page; that of 16 GPUs with all metrics has about 300 KiB.
const LARGEST_PAGE: u64 = 16 << 20;

/// Reads an exporter's page at `http://host:port/path` with HTTP 1.0, which is enough for it.
pub fn scrape(url: &str, deadline: Duration) -> ExporterReport {
    match fetch(url, deadline) {
        Ok(page) => ExporterReport::Page(page),
        Err(why) => ExporterReport::Failed(why),
    }
}

fn fetch(url: &str, deadline: Duration) -> Result<String, String> {
    let until = Instant::now() + deadline;
    let rest = url.strip_prefix("http://").ok_or_else(|| format!("{url:?} does not begin with http://"))?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, "metrics"));
    let text = |error: std::io::Error| format!("{authority}: {error}");
    let address = authority.to_socket_addrs().map_err(text)?.next();
    let address = address.ok_or_else(|| format!("{authority} has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, deadline).map_err(text)?;
    stream.set_write_timeout(Some(deadline)).map_err(text)?;
    let request = format!("GET /{path} HTTP/1.0\r\nHost: {authority}\r\nAccept: text/plain\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(text)?;
    let (mut answer, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        // The deadline covers the whole page: a server that sends it byte by byte fails too.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(text)?;
        match stream.read(&mut buffer).map_err(text)? {
            0 => break,
            length => answer.extend_from_slice(&buffer[..length]),
        }
        if answer.len() as u64 > LARGEST_PAGE || Instant::now() >= until {
            return Err(format!("{authority}: its page does not end"));
        }
    }
    let answer = String::from_utf8(answer).map_err(|_| format!("{authority}: its page is not text"))?;
    let (head, body) =
        answer.split_once("\r\n\r\n").ok_or_else(|| format!("{authority}: this is not HTTP"))?;
    match head.split_ascii_whitespace().nth(1) {
        Some("200") => Ok(body.to_owned()),
        status => Err(format!("{authority}: HTTP status {}", status.unwrap_or("missing"))),
    }
}
