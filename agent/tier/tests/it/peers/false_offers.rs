//! Peers that do not follow the protocol.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use mainstay_checkpoint::inventory::Medium;
use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::frame::{FrameError, Header, Kind};
use mainstay_tier::peer::wire::{Frame, Timeouts, Wire};
use mainstay_tier::peer::{Inventory, SealedShard, StoredCopy};

use super::support::{address, bytes, hosts_named, identity, manifest, pass, until};

const SHORT: Timeouts = Timeouts { connect: Duration::from_millis(500), stall: Duration::from_millis(500) };

/// Answers each connection to `at` with `answer`, on threads that end with the test.
fn impostor(at: &str, answer: impl Fn(std::net::TcpStream) + Send + Sync + 'static) {
    let listener = TcpListener::bind(at).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            answer(stream);
        }
    });
}

#[test]
fn another_version_is_reported_by_its_number() {
    let at = address();
    impostor(&at, |mut stream| {
        let mut greeting = [0; 40];
        stream.read_exact(&mut greeting).unwrap();
        greeting[4] = 9;
        stream.write_all(&greeting).unwrap();
    });
    let error = Wire::connect(&at, &pass(), Timeouts::default()).unwrap_err();
    assert!(matches!(error, PeerError::Frame { error: FrameError::Version(9), .. }), "{error}");
}

#[test]
fn a_server_that_is_not_an_agent_is_reported() {
    let at = address();
    impostor(&at, |mut stream| {
        let _ =
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    });
    let error = Wire::connect(&at, &pass(), Timeouts::default()).unwrap_err();
    assert!(matches!(error, PeerError::Frame { error: FrameError::Magic(_), .. }), "{error}");
}

#[test]
fn a_peer_that_accepts_the_token_without_knowing_it_is_an_impostor() {
    let at = address();
    impostor(&at, |mut stream| {
        let mut greeting = [0; 40];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&greeting).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        // The client's own proof, sent back: a recorded or mirrored proof is useless.
        let mut answer = vec![1];
        answer.extend(proof);
        stream.write_all(&answer).unwrap();
    });
    let error = Wire::connect(&at, &pass(), Timeouts::default()).unwrap_err();
    assert!(matches!(error, PeerError::Impostor { .. }), "{error}");
}

#[test]
fn a_silent_peer_is_abandoned() {
    let (silent, closed) = (address(), address());
    let _listener = TcpListener::bind(&silent).unwrap();
    let error = Wire::connect(&silent, &pass(), SHORT).unwrap_err();
    assert!(matches!(error, PeerError::Lost { .. }) && error.to_string().contains("too long"), "{error}");
    let error = Wire::connect(&closed, &pass(), SHORT).unwrap_err();
    assert!(matches!(error, PeerError::Unreachable { .. }), "{error}");
}

#[test]
fn a_peer_that_offers_a_step_it_does_not_have_costs_a_try_and_no_step() {
    // It reports a newer whole step, and sends other bytes when asked for it.
    let liar = address();
    let content = bytes(99, 0);
    let sealed = SealedShard::of(manifest(&identity(0, 99, 0, 1), &content).encode()).unwrap();
    impostor(&liar, move |stream| {
        let sealed = sealed.clone();
        std::thread::spawn(move || {
            let Ok(mut wire) = Wire::accept(stream, &pass(), Timeouts::default()) else { return };
            while let Ok(Some(Frame::Message(header, _))) = wire.receive() {
                let held = StoredCopy {
                    shard: sealed.shard.clone(),
                    medium: Medium::Memory,
                    own: false,
                    verified: true,
                    shared_content: None,
                };
                let reported = match header.kind {
                    Kind::List => wire.send_json(
                        Header::of(Kind::Inventory),
                        &Inventory { copies: vec![held], ..Inventory::default() },
                    ),
                    Kind::Get => wire.send(Header::of(Kind::Manifest), &sealed.manifest).and_then(|()| {
                        let file = tempfile::tempfile().unwrap();
                        file.set_len(sealed.shard.bytes).unwrap();
                        let (offset, length, digest) = sealed.chunk(0).unwrap();
                        wire.send_chunk(
                            Header { offset, length, digest, ..Header::of(Kind::Chunk) },
                            &file.into(),
                            |_, left| left,
                        )
                    }),
                    Kind::Announce => wire.send_json(Header::of(Kind::Announced), &"accepted"),
                    _ => return,
                };
                if reported.is_err() {
                    return;
                }
            }
        });
    });
    let mut names = vec![address(), address(), liar.clone()];
    // The first by name leads. A lying peer could be the leader as well; here it is not.
    names.sort();
    let honest: Vec<String> = names.iter().filter(|name| **name != liar).cloned().collect();
    let mut hosts = hosts_named(&honest, |_, settings| settings.peers = names.clone());
    hosts[0].save(0, 3, &[0], 1);
    hosts[0].wait_for_copies(3, 2);
    hosts[0].lose();
    hosts[0].start();
    until("all peers", || {
        hosts[0].service().refresh();
        // The other host may already have sent step 3 back.
        hosts[0].least_copies(99) >= 1 && hosts[0].least_copies(3) >= 1
    });
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(3));
    hosts[0].has(3, &[0]);
    assert!(reported.iter().any(|line| line.contains("step 99")), "{reported:?}");
}

#[test]
fn a_changed_or_repeated_frame_is_rejected() {
    let listener = TcpListener::bind(address()).unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let serving = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut wire = Wire::accept(stream, &pass(), Timeouts::default()).unwrap();
        assert!(matches!(wire.receive(), Ok(Some(Frame::Message(..)))));
        wire.receive().unwrap_err()
    });
    let front = address();
    let proxy = TcpListener::bind(&front).unwrap();
    let passing = std::thread::spawn(move || {
        let (mut client, _) = proxy.accept().unwrap();
        let mut server = std::net::TcpStream::connect(at).unwrap();
        let copy = |from: &mut std::net::TcpStream, to: &mut std::net::TcpStream, length: usize| {
            let mut piece = vec![0; length];
            from.read_exact(&mut piece).unwrap();
            to.write_all(&piece).unwrap();
            piece
        };
        copy(&mut client, &mut server, 40);
        copy(&mut server, &mut client, 40);
        copy(&mut client, &mut server, 32);
        copy(&mut server, &mut client, 33);
        let frame = copy(&mut client, &mut server, 80);
        // The same frame again.
        server.write_all(&frame).unwrap();
        server
    });
    let mut wire = Wire::connect(&front, &pass(), Timeouts::default()).unwrap();
    wire.send(Header::of(Kind::List), &[]).unwrap();
    let error = serving.join().unwrap();
    assert!(matches!(error, PeerError::Forged { .. }), "{error}");
    drop(passing.join().unwrap());
}
