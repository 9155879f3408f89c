//! The first bytes of a connection between agents, from a peer without the secret: no bytes are accepted, whether the
//! peer connects or the agent connects to it.
#![no_main]

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::{Timeouts, Wire};

/// The maximum waits. Both ends are on this host, and the stranger closes at once.
const TIMEOUTS: Timeouts = Timeouts { connect: Duration::from_secs(5), stall: Duration::from_secs(5) };

fn credentials() -> Credentials {
    Credentials::from(Token::new(b"the secret of the agents of a test").expect("it is long enough"))
}

/// Sends all bytes and closes the sending side. Discards the answer.
fn speak(mut stream: TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = std::io::copy(&mut stream, &mut std::io::sink());
}

fuzz_target!(|bytes: &[u8]| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    thread::scope(|scope| {
        scope.spawn(|| speak(TcpStream::connect(address).expect("it listens"), bytes));
        let (stream, _) = listener.accept().expect("somebody connects");
        assert!(Wire::accept(stream, &credentials(), TIMEOUTS).is_err(), "a stranger got in");
    });
    thread::scope(|scope| {
        scope.spawn(|| speak(listener.accept().expect("somebody connects").0, bytes));
        assert!(Wire::connect(&address.to_string(), &credentials(), TIMEOUTS).is_err(), "a stranger was believed");
    });
});
