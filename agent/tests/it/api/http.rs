//! Probes over HTTP, well-formed and not.

use mainstay_model::health::HealthState;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::server::Server;

/// Sends bytes and returns what was received until the server closed.
pub async fn raw(mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin, bytes: &[u8]) -> String {
    // The server may close while it receives invalid data.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

pub fn request(method: &str, path: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").into_bytes()
}

pub async fn get(server: &Server, path: &str) -> (u16, String) {
    get_from(TcpStream::connect(server.http).await.unwrap(), path).await
}

pub async fn get_from(stream: TcpStream, path: &str) -> (u16, String) {
    let answer = raw(stream, &request("GET", path)).await;
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// The headers and the body of an answer to a caller with this `Accept`.
pub async fn get_as(server: &Server, path: &str, accept: &str) -> (String, String) {
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    let answer = raw(TcpStream::connect(server.http).await.unwrap(), head.as_bytes()).await;
    let (headers, body) = answer.split_once("\r\n\r\n").unwrap();
    (headers.to_ascii_lowercase(), body.to_owned())
}

#[tokio::test]
async fn healthz_is_about_the_process_and_readyz_about_the_node() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    assert_eq!(get(&server, "/healthz").await, (200, "ok\n".to_owned()));
    let (status, text) = get(&server, "/readyz").await;
    assert_eq!((status, text.lines().next()), (200, Some("UNKNOWN")), "{text}");
    testing::snapshot!("readyz", "nothing was read", text);
    server.health("host.cpu", HealthState::Healthy);
    assert_eq!(get(&server, "/readyz").await, (200, "HEALTHY\n".to_owned()));
    server.health("host.memory", HealthState::Degraded);
    assert_eq!(get(&server, "/readyz").await.0, 200);
    server.health("host.disk", HealthState::Unhealthy);
    let (status, text) = get(&server, "/readyz").await;
    assert_eq!(status, 503);
    assert!(text.starts_with("UNHEALTHY\nhost.disk "), "{text}");
    testing::snapshot!("readyz", "a disk and memory", text);
    assert_eq!(get(&server, "/healthz").await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn the_unix_socket_answers_http_too() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let stream = UnixStream::connect(&server.socket).await.unwrap();
    let answer = raw(stream, &request("GET", "/healthz")).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn the_http_port_offers_http_alone() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let (status, text) = get(&server, "/mainstay.v1.HealthService/GetNode").await;
    assert_eq!(status, 404);
    testing::snapshot!("http", "nothing is at this path", text);
    server.stop().await;
}

#[tokio::test]
async fn half_requests_keep_no_probe_out() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let mut held = Vec::new();
    for _ in 0..140 {
        let mut stream = TcpStream::connect(server.http).await.unwrap();
        stream.write_all(b"GET /healthz HTT").await.unwrap();
        held.push(stream);
    }
    assert_eq!(get(&server, "/healthz").await.0, 200);
    drop(held);
    server.stop().await;
}

#[tokio::test]
async fn garbage_is_refused_and_does_no_harm() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let long_path = request("GET", &format!("/{}", "x".repeat(200_000)));
    let many_headers = format!("GET /healthz HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(5000)).into_bytes();
    let garbage: [&[u8]; 8] = [
        b"",
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        &long_path,
        &many_headers,
    ];
    for bytes in garbage {
        for over_http in [true, false] {
            let address = if over_http { server.http } else { server.grpc };
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(bytes).await;
            // The client's side is closed, so that the server does not wait for more data.
            let _ = stream.shutdown().await;
            let answer = raw(stream, b"").await;
            assert!(!answer.contains(" 200 "), "{bytes:?} was answered with {answer}");
        }
    }
    let post = raw(TcpStream::connect(server.http).await.unwrap(), &request("POST", "/healthz")).await;
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    assert_eq!(get(&server, "/healthz").await.0, 200);
    server.stop().await;
}
