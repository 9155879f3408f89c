//! NCCL's RAS service, which every process with NCCL 2.24 or later has: its report about the whole job.
//!
//! All processes of a user on a host listen on the same port, and the kernel chooses which of them answers. A stopped
//! process still gets connections and never answers, so an unanswered request is repeated over a new connection. Each
//! request goes through all processes of the job, so requests are rare.

use std::time::Duration;

use mainstay_hang::nccl_ras::{RasReply, RasReport, Wire, parse_text};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How many connections are tried to reach a process that answers.
const MAX_TRIES: u32 = 3;

/// Longer than the report of any job: JSON has about 600 bytes for each rank of a communicator.
const MAX_REPORT_BYTES: u64 = 256 << 20;

/// The answer to a command is a short line.
const MAX_LINE_BYTES: u64 = 4096;

/// How long NCCL itself may collect for a request with this deadline: it takes up to twice the time that is set.
fn own_limit(deadline: Duration) -> u64 {
    (deadline.as_secs() / 3).max(1)
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RasError {
    /// Nothing listens there.
    #[error("nothing listens at {0}")]
    Refused(String),
    /// No answer in time on any connection.
    #[error("no answer within {0:?}; a process that is stopped, or NCCL waits for one")]
    Silent(Duration),
    /// The connection broke.
    #[error("{0}")]
    Connection(#[from] std::io::Error),
    /// The service is not NCCL, or its report cannot be parsed.
    #[error("{0}")]
    Improper(String),
}

/// Requests a report from `address`, as `host:port`; returns within the deadline.
///
/// # Errors
/// There is no report; with the reason.
pub async fn ask(address: &str, deadline: Duration) -> Result<RasReport, RasError> {
    let each = deadline / MAX_TRIES;
    let mut last = RasError::Silent(deadline);
    for _ in 0..MAX_TRIES {
        match timeout(each, talk(address, each)).await {
            Ok(Ok(report)) => return Ok(report),
            // Nothing listens, or the service is not NCCL: another connection does not change that.
            Ok(Err(error @ (RasError::Refused(_) | RasError::Improper(_)))) => return Err(error),
            Ok(Err(error)) => last = error,
            Err(_) => last = RasError::Silent(deadline),
        }
    }
    Err(last)
}

/// The same for a thread that has no runtime.
pub fn ask_blocking(address: &str, deadline: Duration) -> RasReply {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return RasReply::Failed(format!("it cannot be asked: {error}")),
    };
    let answer = runtime.block_on(ask(address, deadline));
    // Do not wait for a resolver that hangs.
    runtime.shutdown_background();
    match answer {
        Ok(report) => RasReply::Reported(report),
        Err(RasError::Refused(_)) => RasReply::Refused,
        Err(error) => RasReply::Failed(error.to_string()),
    }
}

async fn talk(address: &str, deadline: Duration) -> Result<RasReport, RasError> {
    let stream = TcpStream::connect(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::ConnectionRefused => RasError::Refused(address.to_owned()),
        _ => RasError::Connection(error),
    })?;
    let mut connection = BufReader::new(stream);
    let protocol = command(&mut connection, "CLIENT PROTOCOL 2").await?;
    if !protocol.starts_with("SERVER PROTOCOL ") {
        return Err(RasError::Improper(format!("what answers is not NCCL: {:?}", shortened(&protocol))));
    }
    command(&mut connection, &format!("TIMEOUT {}", own_limit(deadline))).await?;
    // Before 2.28.7 it has no formats and reports that.
    let json = command(&mut connection, "SET FORMAT json").await? == "OK";
    connection.write_all(b"VERBOSE STATUS\n").await?;
    let mut text = Vec::new();
    connection.take(MAX_REPORT_BYTES).read_to_end(&mut text).await?;
    read(&text, json)
}

/// Sends one line and returns the line that answers it.
async fn command(connection: &mut BufReader<TcpStream>, line: &str) -> Result<String, RasError> {
    connection.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = Vec::new();
    let length = connection.take(MAX_LINE_BYTES).read_until(b'\n', &mut answer).await?;
    if length == 0 {
        return Err(RasError::Connection(std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}

/// Parses a report in either form.
///
/// # Errors
/// It is no report, or not a complete one.
pub fn read(text: &[u8], json: bool) -> Result<RasReport, RasError> {
    let improper = |error: String| RasError::Improper(format!("the report is not understood: {error}"));
    if json {
        let wire: Wire = serde_json::from_slice(text).map_err(|error| improper(error.to_string()))?;
        return Ok(wire.into());
    }
    parse_text(&String::from_utf8_lossy(text)).map_err(|error| improper(error.to_string()))
}

fn shortened(text: &str) -> String {
    text.chars().take(60).collect()
}
