//! The streams between the launchers of a job, over real sockets: what an eavesdropper sees, and who is refused.

use std::sync::{Arc, Mutex};

use mainstay_group::wire::Join;
use mainstay_launcher::group::streams::connect;
use mainstay_launcher::group::streams::connect::FromLeader;
use mainstay_launcher::group::streams::listen::{Bound, FromHost, Listener};
use mainstay_launcher::group::streams::{Ends, Token};
use mainstay_tier::peer::tls::Tls;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

fn token(secret: &str, encrypts: bool) -> Token {
    let ends = encrypts.then(|| {
        let (client, server) = Tls::from_secret(secret.as_bytes()).expect("TLS").configurations();
        Ends { client, server }
    });
    Token::new("a-run", Some(secret)).over(ends)
}

async fn leader(token: Token) -> (Listener, u16) {
    let bound = Bound::new().await.expect("a port");
    let port = bound.port().expect("its number");
    (bound.listen(token, None), port)
}

/// A follower's first event.
async fn follow(port: u16, token: Token) -> FromLeader {
    let join =
        Join { run_id: "a-run".to_owned(), host: "host-of-the-follower".to_owned(), ..Join::default() };
    let (_join, join) = watch::channel(join);
    let (sender, mut events) = mpsc::channel(8);
    tokio::spawn(connect::keep(vec![format!("127.0.0.1:{port}")], token, join, sender));
    events.recv().await.expect("news")
}

/// Forwards everything to `port`, and records it.
async fn listen_in(port: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let own = listener.local_addr().expect("its number").port();
    let received = Arc::new(Mutex::new(Vec::new()));
    let keeps = Arc::clone(&received);
    tokio::spawn(async move {
        let (near, _) = listener.accept().await.expect("a connection");
        let far = TcpStream::connect(("127.0.0.1", port)).await.expect("the leader");
        let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
            (near.into_split(), far.into_split());
        let pass = |keeps: Arc<Mutex<Vec<u8>>>| {
            move |bytes: &[u8]| keeps.lock().expect("no panic before").extend_from_slice(bytes)
        };
        let (there, back) = (pass(Arc::clone(&keeps)), pass(keeps));
        let there = async move {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = from_near.read(&mut buffer).await {
                there(&buffer[..count]);
                to_far.write_all(&buffer[..count]).await.expect("passed on");
            }
        };
        let back = async move {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = from_far.read(&mut buffer).await {
                back(&buffer[..count]);
                to_near.write_all(&buffer[..count]).await.expect("passed on");
            }
        };
        tokio::join!(there, back);
    });
    (own, received)
}

#[tokio::test]
async fn an_eavesdropper_reads_nothing_unless_the_user_disables_encryption() {
    for encrypts in [true, false] {
        let (mut listener, port) = leader(token("secret", encrypts)).await;
        let (between, received) = listen_in(port).await;
        let news = follow(between, token("secret", encrypts)).await;
        assert!(matches!(news, FromLeader::Connected { .. }), "{news:?}");
        let joined = listener.events.recv().await.expect("a join");
        let FromHost::Joined { join, .. } = joined else { panic!("{joined:?}") };
        assert_eq!(join.host, "host-of-the-follower");
        let received = received.lock().expect("no panic before");
        let is_plain = received.windows(20).any(|bytes| bytes == b"host-of-the-follower");
        assert_eq!(is_plain, !encrypts);
    }
}

#[tokio::test]
async fn another_secret_and_a_side_that_does_not_encrypt_are_refused_with_a_reason() {
    for (ours, theirs, case) in [
        (token("secret", true), token("guess", true), "another token, encrypted"),
        (token("secret", false), token("guess", false), "another token, plain"),
        (token("secret", true), token("secret", false), "only the leader encrypts"),
        (token("secret", false), token("secret", true), "only the follower encrypts"),
    ] {
        let (_listener, port) = leader(ours).await;
        let news = follow(port, theirs).await;
        let FromLeader::Lost { why, .. } = &news else { panic!("{news:?}") };
        testing::snapshot!("hosts_streams", case, why.replace(&port.to_string(), "PORT"));
    }
}

#[tokio::test]
async fn a_plain_client_receives_nothing_from_a_leader_that_encrypts() {
    let (_listener, port) = leader(token("secret", true)).await;
    let mut plain = TcpStream::connect(("127.0.0.1", port)).await.expect("a connection");
    plain.write_all(&[0; 96]).await.expect("sent");
    let mut answer = Vec::new();
    // The end may arrive as a reset, because the leader stops reading.
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.windows(8).any(|bytes| bytes == b"MSTHOST1"), "{answer:?}");
}
