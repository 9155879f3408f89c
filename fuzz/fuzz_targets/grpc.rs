//! Any bytes sent to the port of the built-in coordination store, which uses the same HTTP and gRPC libraries as the
//! agent's API: bytes that are not HTTP, HTTP/2 frames, and gRPC messages to each call. The server still answers the
//! next client. The limits of the run bound its memory.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use mainstay_coord::server::{Server, ServerOptions};
use tokio::runtime::Runtime;

/// The start of an HTTP/2 connection: the client preface, and an empty settings frame.
const BEGIN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

const CALLS: [&str; 7] = [
    "/etcdserverpb.KV/Range",
    "/etcdserverpb.KV/Put",
    "/etcdserverpb.KV/DeleteRange",
    "/etcdserverpb.KV/Txn",
    "/etcdserverpb.Lease/LeaseGrant",
    "/etcdserverpb.Watch/Watch",
    "/v3/kv/range",
];

/// The maximum wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// SIGPIPE.
const PIPE: i32 = 13;

/// `SIG_IGN`. Rust's runtime ignores SIGPIPE, but libFuzzer provides `main` here, and the server writes to closed
/// connections.
const IGNORED: usize = 1;

unsafe extern "C" {
    /// signal(2).
    safe fn signal(number: i32, handler: usize) -> usize;
}

static STORE: LazyLock<(Runtime, Server, SocketAddr)> = LazyLock::new(|| {
    signal(PIPE, IGNORED);
    let runtime = Runtime::new().expect("threads");
    let options = ServerOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)));
    let server = runtime.block_on(Server::start(options)).expect("a port");
    let address = server.address();
    (runtime, server, address)
});

fuzz_target!(|bytes: &[u8]| {
    let address = STORE.2;
    speak(address, &[bytes]);
    speak(address, &[BEGIN, bytes]);
    let (call, message) = bytes.split_first().map_or((0, bytes), |(first, rest)| (usize::from(*first), rest));
    // An HTTP/2 frame has at most 16 KiB unless both sides agreed on more.
    let message = &message[..message.len().min(16_000)];
    let length = u32::try_from(message.len()).expect("it was cut").to_be_bytes();
    let framed = [&[0], &length[..], message].concat();
    speak(address, &[BEGIN, &frame(1, 4, &headers(CALLS[call % CALLS.len()])), &frame(0, 1, &framed)]);
    assert!(answers(address), "the next caller is not answered");
});

/// Sends all parts and closes the sending side. Ignores the answer.
fn speak(address: SocketAddr, parts: &[&[u8]]) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time above zero");
    let _ = stream.write_all(&parts.concat());
    let _ = stream.shutdown(Shutdown::Write);
    // Waits until the server answers or closes. A server that waits for the rest of a frame may close later.
    let mut answer = [0; 512];
    let _ = stream.read(&mut answer);
}

/// Whether the server answers an HTTP/2 client with its settings.
fn answers(address: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(address) else { return false };
    let mut answer = [0; 9];
    stream.set_read_timeout(Some(PATIENCE)).is_ok()
        && stream.write_all(BEGIN).is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && answer[3] == 4
}

/// A frame on the first stream that a client may open.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("it was cut").to_be_bytes();
    [&length[1..], &[kind, flags], &1_u32.to_be_bytes()[..], payload].concat()
}

/// The header block of a call, each field as a literal without indexing (RFC 7541, 6.2.2).
fn headers(path: &str) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "store"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let word = |text: &str| [&[u8::try_from(text.len()).expect("they are short")], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], word(name), word(value)].concat()).collect()
}
