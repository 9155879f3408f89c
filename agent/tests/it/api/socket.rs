//! The Unix socket: its mode, its owner, its callers, and its removal.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use mainstay_api::{ListenError, UnixSocket, tcp};
use mainstay_journal::store::journal::Limits;
use mainstay_proto::v1::GetNodeRequest;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use tonic::service::Routes;
use tonic::transport::server::UdsConnectInfo;

use super::server::{Server, unix};

#[test]
fn the_mode_is_as_asked() {
    let dir = testing::tempdir().unwrap();
    for mode in [0o600, 0o660] {
        let path = dir.path().join(format!("{mode:o}.sock"));
        let socket = UnixSocket::bind(&path, mode).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
    }
}

#[test]
fn the_socket_of_a_dead_process_is_replaced() {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let _socket = UnixSocket::bind(&path, 0o600).unwrap();
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_live_socket_is_left_alone() {
    let dir = testing::tempdir().unwrap();
    let ours = dir.path().join("ours.sock");
    let _first = UnixSocket::bind(&ours, 0o600).unwrap();
    let foreign = dir.path().join("foreign.sock");
    let _foreign = UnixListener::bind(&foreign).unwrap();
    for path in [&ours, &foreign] {
        let error = UnixSocket::bind(path, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        UnixStream::connect(path).unwrap();
    }
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    let error = UnixSocket::bind(&path, 0o600).unwrap_err();
    assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
}

#[test]
fn a_missing_directory_and_a_long_path_are_named() {
    let dir = testing::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = UnixSocket::bind(&missing.join("a.sock"), 0o600).unwrap_err().to_string();
    assert!(error.contains(&missing.display().to_string()), "{error}");
    let long = dir.path().join("x".repeat(120));
    let error = UnixSocket::bind(&long, 0o600).unwrap_err().to_string();
    let length = format!("{} bytes", long.as_os_str().len() + ".new".len());
    let error = error.replace(&long.display().to_string(), "SOCKET").replace(&length, "LENGTH");
    testing::snapshot!("socket", "a long path", error);
}

#[test]
fn a_file_that_took_the_sockets_place_is_not_removed() {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let socket = UnixSocket::bind(&path, 0o600).unwrap();
    let moved = dir.path().join("other");
    std::fs::write(&moved, "").unwrap();
    std::fs::rename(&moved, &path).unwrap();
    drop(socket);
    assert!(path.exists());
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let first = tcp("127.0.0.1:0").await.unwrap();
    let address = first.local_addr().unwrap().to_string();
    let error = tcp(&address).await.unwrap_err().to_string();
    assert!(error.contains(&address), "{error}");
}

#[tokio::test]
async fn a_stop_removes_the_socket_and_it_can_be_served_again() {
    let dir = testing::tempdir().unwrap();
    for _ in 0..2 {
        let server = Server::start(dir.path()).await;
        let path = server.socket.clone();
        HealthServiceClient::new(unix(&path).await).get_node(GetNodeRequest {}).await.unwrap();
        server.stop().await;
        assert!(!path.exists());
    }
}

/// An additional service that returns the caller, as a launcher's attachment would read it.
#[derive(Clone)]
struct WhoCalls;

impl tonic::server::NamedService for WhoCalls {
    const NAME: &'static str = "test.WhoCalls";
}

impl tower::Service<http::Request<tonic::body::Body>> for WhoCalls {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        let reported = peer.map(|peer| format!("{} {:?}", peer.uid(), peer.pid())).unwrap_or_default();
        let answer = http::Response::builder().header("who", reported).body(tonic::body::Body::empty());
        std::future::ready(Ok(answer.unwrap()))
    }
}

#[tokio::test]
async fn services_of_others_see_who_calls_and_only_the_unix_socket_has_them() {
    use tower::ServiceExt;
    let dir = testing::tempdir().unwrap();
    let local = Routes::new(WhoCalls);
    let server = Server::start_with(dir.path(), Limits::default(), local).await;
    let request = || {
        let uri = "http://localhost/test.WhoCalls/Ask";
        let call = http::Request::post(uri).header("content-type", "application/grpc");
        call.body(tonic::body::Body::empty()).unwrap()
    };
    let answer = server.unix().await.oneshot(request()).await.unwrap();
    let uid = nix::unistd::geteuid();
    let expected = format!("{uid} {:?}", Some(std::process::id() as i32));
    assert_eq!(answer.headers()["who"], expected);
    let answer = server.tcp().await.oneshot(request()).await.unwrap();
    assert_eq!(answer.headers()["grpc-status"], "12");
    server.stop().await;
}
