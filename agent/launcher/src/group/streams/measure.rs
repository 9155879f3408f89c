//! Measures the link to another launcher: over a connection as followers have it, whose first message is [`Up::Measure`].
//! After that each request is two lengths of four bytes. The other side reads as many bytes as the first says, and
//! answers with as many as the second says.

use std::time::Duration;

use mainstay_group::preflight::{LinkMeasured, LinkQuality};
use mainstay_group::wire::Up;
use mainstay_model::time::Span;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::group::plan::span;
use crate::group::streams::connect::prove;
use crate::group::streams::{StreamError, Token, send};

/// How long a link may take. One that is slower is reported as not measured.
pub(crate) const MEASURED_WITHIN: Duration = Duration::from_secs(2);

/// The round trips of which the shortest counts.
const ROUND_TRIPS: usize = 8;

/// What is sent, one after the other, until one takes long enough to measure.
const SIZES: [u32; 3] = [256 << 10, 1 << 20, 4 << 20];
const LONG_ENOUGH: Duration = Duration::from_millis(20);

/// The most bytes of a request.
const MOST: u32 = 4 << 20;

/// Bytes that are written at a time.
const CHUNK: usize = 64 << 10;

/// Measures the links to these launchers, each from its turn on. Returns once all are measured.
pub(crate) async fn measure_all(
    peers: Vec<Option<(String, String)>>,
    every: Duration,
    token: Token,
) -> Vec<LinkMeasured> {
    let begun = Instant::now();
    let mut measuring = JoinSet::new();
    for (turn, (launcher, address)) in (0..).zip(peers).filter_map(|(turn, peer)| Some((turn, peer?))) {
        let token = token.clone();
        measuring.spawn(async move {
            tokio::time::sleep_until(begun + every * turn).await;
            let measured = timeout(MEASURED_WITHIN, measure(&address, &token)).await;
            let late = || Err(format!("not measured within {} s", MEASURED_WITHIN.as_secs()));
            let quality =
                measured.map_or_else(|_| late(), |quality| quality.map_err(|error| error.to_string()));
            LinkMeasured { launcher, quality }
        });
    }
    measuring.join_all().await
}

async fn measure(address: &str, token: &Token) -> Result<LinkQuality, StreamError> {
    let mut stream = prove(address, token).await?;
    send(&mut stream, &Up::Measure).await?;
    let mut round_trip = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        round_trip = round_trip.min(exchange(&mut stream, 0, 1).await?);
    }
    let (mut sent, mut received) = (0, 0);
    for (rate, sends) in [(&mut sent, true), (&mut received, false)] {
        for size in SIZES {
            let took =
                exchange(&mut stream, if sends { size } else { 1 }, if sends { 1 } else { size }).await?;
            // At least a microsecond: the clock may be coarse.
            let on_link = took.saturating_sub(round_trip).max(Duration::from_micros(1));
            *rate = (f64::from(size) / on_link.as_secs_f64()) as u64;
            if took >= LONG_ENOUGH {
                break;
            }
        }
    }
    Ok(LinkQuality { round_trip: span(round_trip), sent, received })
}

/// Sends and receives so many bytes; returns how long that took.
async fn exchange(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    sends: u32,
    receives: u32,
) -> Result<Duration, StreamError> {
    let begun = Instant::now();
    stream.write_u32(sends).await?;
    stream.write_u32(receives).await?;
    write(stream, sends).await?;
    read(stream, receives).await?;
    Ok(begun.elapsed())
}

/// The other side: answers until the connection ends.
pub(super) async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<(), StreamError> {
    loop {
        let Ok(arrives) = stream.read_u32().await else { return Ok(()) };
        let wanted = stream.read_u32().await?;
        if arrives.max(wanted) > MOST {
            return Err(StreamError::Message(format!("{} bytes are asked for", arrives.max(wanted))));
        }
        read(&mut stream, arrives).await?;
        write(&mut stream, wanted).await?;
    }
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: u32) -> Result<(), StreamError> {
    let (chunk, mut left) = (vec![0; CHUNK], bytes as usize);
    while left > 0 {
        let part = left.min(CHUNK);
        to.write_all(&chunk[..part]).await?;
        left -= part;
    }
    Ok(to.flush().await?)
}

async fn read(from: &mut (impl AsyncRead + Unpin), bytes: u32) -> Result<(), StreamError> {
    let mut part = from.take(bytes.into());
    let arrived = tokio::io::copy(&mut part, &mut tokio::io::sink()).await?;
    if arrived < u64::from(bytes) { Err(StreamError::Closed) } else { Ok(()) }
}

/// How long measuring takes with so many turns.
pub(crate) fn takes(turns: usize, every: Duration) -> Span {
    span(every * u32::try_from(turns).unwrap_or(u32::MAX) + MEASURED_WITHIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::streams::listen::Bound;

    #[tokio::test]
    async fn a_launcher_is_measured_and_one_that_is_gone_is_not() {
        let token = || Token::new("run", Some("secret"));
        let bound = Bound::new().await.expect("a port");
        let address = format!("127.0.0.1:{}", bound.port().expect("a port"));
        let _listener = bound.listen(token(), None);
        let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let gone = closed.local_addr().expect("an address").to_string();
        drop(closed);
        let peers = vec![Some(("there".to_owned(), address)), None, Some(("gone".to_owned(), gone))];
        let mut links = measure_all(peers, Duration::from_millis(1), token()).await;
        links.sort_by(|a, b| a.launcher.cmp(&b.launcher));
        let [gone, there] = &links[..] else { panic!("{links:?}") };
        assert!(gone.quality.is_err(), "{gone:?}");
        assert!(there.quality.as_ref().is_ok_and(|quality| quality.rate() > 0), "{there:?}");
    }
}
