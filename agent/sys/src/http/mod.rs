//! One HTTP/1.1 request over a new connection, plain or with TLS: metadata servers of clouds, webhooks.

mod secure;

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

pub use secure::{Secure, SecureError};

/// More than any server that is queried here sends.
const LONGEST_BODY: usize = 256 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// The connection could not be established, or it broke.
    #[error("{0}")]
    Connection(String),
    /// It answered with an error.
    #[error("status {0}")]
    Status(StatusCode),
    /// It is not the expected server.
    #[error("what answers is not the server that was asked: {0}")]
    Improper(String),
}

/// A request.
#[derive(Debug)]
pub struct Question<'a> {
    /// `host:port`.
    pub address: &'a str,
    /// The method.
    pub method: Method,
    /// The path, with its query.
    pub path: &'a str,
    /// A header in addition to the usual ones.
    pub header: (&'static str, &'a str),
    /// The body; empty for none.
    pub body: &'a [u8],
    /// Time limit for the whole exchange.
    pub deadline: Duration,
    /// How the server must authenticate, if the connection is not plain.
    pub secure: Option<&'a Secure>,
}

/// An answer.
#[derive(Debug)]
pub struct HttpResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: hyper::HeaderMap,
    /// The body.
    pub body: String,
}

/// Sends a request and reads the answer.
///
/// # Errors
/// [`HttpError`]; an error status is not an error here.
pub async fn ask(question: &Question<'_>) -> Result<HttpResponse, HttpError> {
    let read = async |answer: Response<Incoming>| {
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = Limited::new(answer.into_body(), LONGEST_BODY).collect().await;
        let body = body.map_err(|error| HttpError::Connection(error.to_string()))?.to_bytes();
        let body = String::from_utf8(body.to_vec()).map_err(|_| HttpError::Improper("no text".to_owned()))?;
        Ok(HttpResponse { status, headers, body })
    };
    in_time(question, read).await
}

/// Sends a request and reads only the status of the answer.
///
/// # Errors
/// [`HttpError`]; an error status is not an error here.
pub async fn report(question: &Question<'_>) -> Result<StatusCode, HttpError> {
    in_time(question, async |answer: Response<Incoming>| Ok(answer.status())).await
}

async fn in_time<T>(
    question: &Question<'_>,
    read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, HttpError>,
) -> Result<T, HttpError> {
    tokio::time::timeout(question.deadline, talk(question, read))
        .await
        .map_err(|_| HttpError::Late(question.deadline))?
}

async fn talk<T>(
    question: &Question<'_>,
    read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, HttpError>,
) -> Result<T, HttpError> {
    let stream = TcpStream::connect(question.address).await.map_err(|error| broken(&error))?;
    match question.secure {
        None => exchange(question, stream, read).await,
        Some(secure) => exchange(question, secure.over(stream, question.address).await?, read).await,
    }
}

async fn exchange<T>(
    question: &Question<'_>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, HttpError>,
) -> Result<T, HttpError> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
    let (name, value) = question.header;
    let request = Request::builder()
        .method(question.method.clone())
        .uri(question.path)
        .header("Host", question.address)
        .header("Connection", "close")
        .header(name, value)
        .body(Full::new(Bytes::copy_from_slice(question.body)))
        .map_err(|error| broken(&error))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        read(answer).await
    };
    // The connection is driven together with the exchange and ends with it.
    tokio::pin!(exchange);
    tokio::select! {
        answer = &mut exchange => answer,
        driven = connection => {
            driven.map_err(|error| broken(&error))?;
            exchange.await
        }
    }
}

/// An error with all its sources.
fn broken(error: &dyn std::error::Error) -> HttpError {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    HttpError::Connection(text)
}
