//! NCCL's RAS service, which every process that uses NCCL 2.24 or later has: what it tells of the whole job.
//!
//! All processes of a user on a host listen on the same port, and the kernel chooses which of them answers. A process
//! that is stopped still gets connections and never answers them: so a question that is not answered is asked again,
//! over a new connection. Each question walks through all processes of the job: it is asked seldom.

use std::time::Duration;

use mainstay_core::hang::nccl_ras::{Asked, RasReport, Wire, parse_text};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How often it is tried to reach a process that answers.
const TRIES: u32 = 3;

/// Longer than the report of any job: JSON has some 600 bytes for a rank of a communicator.
const LONGEST: u64 = 256 << 20;

/// A line that answers a command is short.
const LONGEST_LINE: u64 = 4096;

/// How long NCCL itself may collect, for a question with this deadline: it takes up to twice as long as it is told.
fn own_limit(deadline: Duration) -> u64 {
    (deadline.as_secs() / 3).max(1)
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RasError {
    /// Nothing listens there.
    #[error("nothing listens at {0}")]
    Refused(String),
    /// No answer in time, of none that was asked.
    #[error("no answer within {0:?}; a process that is stopped, or NCCL waits for one")]
    Silent(Duration),
    /// The connection broke.
    #[error("{0}")]
    Connection(#[from] std::io::Error),
    /// What answers is not NCCL, or its report is not understood.
    #[error("{0}")]
    Improper(String),
}

/// Asks for a report at `address`, as `host:port`; returns within the deadline.
///
/// # Errors
/// There is none: why.
pub async fn ask(address: &str, deadline: Duration) -> Result<RasReport, RasError> {
    let each = deadline / TRIES;
    let mut last = RasError::Silent(deadline);
    for _ in 0..TRIES {
        match timeout(each, talk(address, each)).await {
            Ok(Ok(report)) => return Ok(report),
            // Who is there and no NCCL will not become one.
            Ok(Err(error @ (RasError::Refused(_) | RasError::Improper(_)))) => return Err(error),
            Ok(Err(error)) => last = error,
            Err(_) => last = RasError::Silent(deadline),
        }
    }
    Err(last)
}

/// The same for a thread that has no runtime.
pub fn ask_blocking(address: &str, deadline: Duration) -> Asked {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Asked::Failed(format!("it cannot be asked: {error}")),
    };
    let answer = runtime.block_on(ask(address, deadline));
    // A resolver that hangs is not waited for.
    runtime.shutdown_background();
    match answer {
        Ok(report) => Asked::Reported(report),
        Err(RasError::Refused(_)) => Asked::Refused,
        Err(error) => Asked::Failed(error.to_string()),
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
    // Before 2.28.7 it knows no formats and says so.
    let json = command(&mut connection, "SET FORMAT json").await? == "OK";
    connection.write_all(b"VERBOSE STATUS\n").await?;
    let mut text = Vec::new();
    connection.take(LONGEST).read_to_end(&mut text).await?;
    read(&text, json)
}

/// Says one line and returns the line that answers it.
async fn command(connection: &mut BufReader<TcpStream>, line: &str) -> Result<String, RasError> {
    connection.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = Vec::new();
    let length = connection.take(LONGEST_LINE).read_until(b'\n', &mut answer).await?;
    if length == 0 {
        return Err(RasError::Connection(std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}

/// Reads a report in either form.
///
/// # Errors
/// It is none, or not a whole one.
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
