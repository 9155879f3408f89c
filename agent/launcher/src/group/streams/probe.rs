//! Checks whether a launcher is alive: whether it answers as a launcher, not only whether its host accepts
//! connections, which a kernel also does for a stopped process.

use std::io::ErrorKind;
use std::time::Duration;

use mainstay_recovery::protocol::ProbeResult;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::group::streams::{MAGIC, Token, encrypted};

/// Number of connection attempts, at these intervals: the first packet of one may be lost.
const MAX_TRIES: u32 = 6;
const TRY_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit of the check. Callers wait a little longer.
const PROBE_TIMEOUT: Duration = Duration::from_millis(900);

/// A port is closed after this many refused attempts; a single one may come from a firewall that is being reloaded.
const MIN_REFUSALS: usize = 2;

/// The result of one attempt.
enum TryResult {
    Launcher,
    Connection,
    Refusal,
    Nothing,
}

/// Checks the launcher that listens at this address.
pub async fn probe(address: String, token: Token) -> ProbeResult {
    let (response, mut results) = tokio::sync::mpsc::unbounded_channel();
    let mut tries = JoinSet::new();
    for number in 0..MAX_TRIES {
        let (address, token, response) = (address.clone(), token.clone(), response.clone());
        tries.spawn(async move {
            sleep(TRY_INTERVAL * number).await;
            // The receiver is dropped only once the result is known.
            let _ = response.send(knock(&address, &token, &response).await);
        });
    }
    drop(response);
    let (mut connected, mut refusals) = (false, 0);
    let watch = async {
        while let Some(found) = results.recv().await {
            match found {
                TryResult::Launcher => return Some(ProbeResult::Answers),
                TryResult::Connection => connected = true,
                TryResult::Refusal => refusals += 1,
                TryResult::Nothing => {}
            }
            if refusals >= MIN_REFUSALS {
                return Some(ProbeResult::Refuses);
            }
        }
        None
    };
    let seen = timeout(PROBE_TIMEOUT, watch).await.ok().flatten();
    seen.unwrap_or(if connected { ProbeResult::Accepts } else { ProbeResult::Silent })
}

/// One connection, until a launcher has started its proof on it.
async fn knock(
    address: &str,
    token: &Token,
    response: &tokio::sync::mpsc::UnboundedSender<TryResult>,
) -> TryResult {
    let stream = match TcpStream::connect(address).await {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return TryResult::Refusal,
        Err(_) => return TryResult::Nothing,
    };
    let _ = response.send(TryResult::Connection);
    let Ok(mut stream) = encrypted::as_follower(stream, token).await else { return TryResult::Nothing };
    let mut magic = [0; 8];
    match stream.read_exact(&mut magic).await {
        Ok(_) if &magic == MAGIC => TryResult::Launcher,
        _ => TryResult::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::streams::listen::Bound;

    fn token() -> Token {
        Token::new("run", Some("secret"))
    }

    #[tokio::test]
    async fn a_launcher_answers_and_one_that_is_gone_does_not() {
        let bound = Bound::new().await.expect("a port");
        let address = format!("127.0.0.1:{}", bound.port().expect("a port"));
        let listener = bound.listen(token(), None);
        assert_eq!(probe(address.clone(), token()).await, ProbeResult::Answers);
        drop(listener);
        // The task with the port ends at its next turn, not at once.
        while TcpStream::connect(&address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        assert_eq!(probe(address, token()).await, ProbeResult::Refuses);
    }

    #[tokio::test]
    async fn a_port_without_a_launcher_differs_from_a_closed_port() {
        let still = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = still.local_addr().expect("an address").to_string();
        assert_eq!(probe(address, token()).await, ProbeResult::Accepts);
    }
}
