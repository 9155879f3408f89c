//! Recorded or guessed data that is sent to an agent gives no access, and a client that only holds a connection does not hold it long.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::wire::{Timeouts, Wire};

use super::support::{Proxy, address, hosts, hosts_named, pass};

#[test]
fn a_replayed_exchange_is_refused_and_has_no_effect() {
    let (front, back) = (address(), address());
    let received = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&received);
    let proxy = Proxy::start(&front, &back, move |_, piece| {
        record.lock().unwrap().extend_from_slice(piece);
        true
    });
    let hosts = hosts_named(&[address(), front], |index, settings| {
        if index == 1 {
            settings.listen = back.parse().unwrap();
        } else {
            // Only what the test requests is sent.
            settings.interval = Duration::from_secs(3600);
        }
    });
    hosts[0].service().refresh();
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    drop(proxy);
    let taken = || (hosts[1].service().counts().bytes_taken, hosts[1].replicas());
    let before = taken();
    // Greeting and proof of the first recorded connection.
    let all = received.lock().unwrap().clone();
    let mut stream = TcpStream::connect(hosts[1].settings.listen).unwrap();
    stream.write_all(&all[..72]).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!((answer.len(), answer[40]), (41, 0), "its own greeting, and that the proof is not right");
    assert_eq!(taken(), before);
}

#[test]
fn a_client_that_sends_its_greeting_slowly_is_disconnected() {
    let listener = TcpListener::bind(address()).unwrap();
    let at = listener.local_addr().unwrap();
    let dripping = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(at).unwrap();
        // Each byte arrives in time; all together would take seconds.
        while stream.write_all(b"M").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let (stream, _) = listener.accept().unwrap();
    let patience = Timeouts { connect: Duration::from_millis(500), stall: Duration::from_secs(5) };
    let error = Wire::accept(stream, &pass(), patience).unwrap_err();
    assert!(matches!(error, PeerError::Lost { .. }) && error.to_string().contains("too long"), "{error}");
    dripping.join().unwrap();
}

#[test]
fn a_client_without_credentials_changes_nothing() {
    let hosts = hosts(2, |_, _| {});
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    let before = hosts[1].replicas();
    for guess in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 200], &[0x16; 200], b"MSTP\x01\0\0\0"] {
        let mut stream = TcpStream::connect(hosts[1].settings.listen).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let _ = stream.write_all(guess).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 41, "nothing but a greeting: {answer:?}");
    }
    assert_eq!(hosts[1].replicas(), before);
}
