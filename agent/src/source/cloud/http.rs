//! One question to a metadata server, in plain HTTP/1.1.

use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// More than any key of a metadata server has.
const LONGEST_BODY: usize = 256 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// The connection could not be made or broke.
    #[error("{0}")]
    Connection(String),
    /// It answered with an error.
    #[error("status {0}")]
    Status(StatusCode),
    /// It is not the server that was asked for.
    #[error("what answers is not the metadata server: {0}")]
    Improper(String),
}

/// What is asked.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) address: &'a str,
    pub(super) method: Method,
    pub(super) path: &'a str,
    pub(super) header: (&'static str, &'a str),
    pub(super) deadline: Duration,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: hyper::HeaderMap,
    pub(super) body: String,
}

/// Asks over a connection of its own.
pub(super) async fn ask(question: &Question<'_>) -> Result<Answer, HttpError> {
    tokio::time::timeout(question.deadline, talk(question))
        .await
        .map_err(|_| HttpError::Late(question.deadline))?
}

async fn talk(question: &Question<'_>) -> Result<Answer, HttpError> {
    let stream = TcpStream::connect(question.address).await.map_err(|error| broken(&error))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
    let (name, value) = question.header;
    let request = Request::builder()
        .method(question.method.clone())
        .uri(question.path)
        .header("Host", question.address)
        .header("Connection", "close")
        .header(name, value)
        .body(Empty::<Bytes>::new())
        .map_err(|error| broken(&error))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = Limited::new(answer.into_body(), LONGEST_BODY).collect().await;
        let body = body.map_err(|error| HttpError::Connection(error.to_string()))?.to_bytes();
        let body = String::from_utf8(body.to_vec()).map_err(|_| HttpError::Improper("no text".to_owned()))?;
        Ok(Answer { status, headers, body })
    };
    // The connection is driven beside the exchange and ends with it.
    tokio::pin!(exchange);
    tokio::select! {
        answer = &mut exchange => answer,
        driven = connection => {
            driven.map_err(|error| broken(&error))?;
            exchange.await
        }
    }
}

/// An error with all that it came of.
fn broken(error: &dyn std::error::Error) -> HttpError {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    HttpError::Connection(text)
}
