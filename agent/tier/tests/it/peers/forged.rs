//! Who sits between two hosts without TLS and changes bytes of a chunk is found out before anything of them counts, whatever their checksum.

use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::frame::{Header, Kind};
use mainstay_tier::peer::wire::{Frame, Patience, Wire};

use super::support::{Proxy, address, pass};

const BYTES: usize = 600_000;

/// What a receiver makes of a chunk on whose way `spoil` sits; bytes that it took, and what it said at the end. The digest in the header is
/// not looked at here: it is as if a changed chunk had the same.
fn sent(
    front: &str,
    back: &str,
    spoil: impl Fn(usize, &mut [u8]) -> bool + Send + Sync + 'static,
) -> Result<Vec<u8>, PeerError> {
    let listener = TcpListener::bind(back).unwrap();
    let _proxy = Proxy::start(front, back, spoil);
    let (report, reported) = mpsc::channel();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut wire = Wire::accept(stream, &pass(), Patience::default()).unwrap();
        let mut taken = Vec::new();
        let end = match wire.receive() {
            Ok(Some(Frame::Chunk(header))) => wire.read_chunk(header.length, &mut Vec::new(), |piece| {
                taken.extend_from_slice(piece);
                Ok(())
            }),
            Ok(_) => panic!("no chunk came"),
            Err(error) => Err(error),
        };
        report.send(end.map(|()| taken)).unwrap();
    });
    let mut wire = Wire::connect(front, &pass(), Patience::default()).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; BYTES]).unwrap();
    let header = Header { length: BYTES as u32, ..Header::of(Kind::Chunk) };
    // Who finds out closes the connection, perhaps before all was sent.
    let _ = wire.send_chunk(header, &file.into(), |_, left| left);
    reported.recv().unwrap()
}

/// Greeting and proof of the side that connects.
const GREETING: usize = 72;

#[test]
fn a_chunk_that_somebody_changed_on_its_way_is_forged_and_one_that_nobody_changed_is_not() {
    assert_eq!(sent(&address(), &address(), |_, _| true).unwrap(), vec![7; BYTES]);
    let changed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&changed);
    let error = sent(&address(), &address(), move |first, piece| {
        let at = (GREETING + 100_000).checked_sub(first).filter(|at| *at < piece.len());
        if let Some(at) = at {
            piece[at] ^= 1;
            count.fetch_add(1, Ordering::SeqCst);
        }
        true
    })
    .unwrap_err();
    assert_eq!(changed.load(Ordering::SeqCst), 1);
    assert!(matches!(error, PeerError::Forged { .. }), "{error}");
}

#[test]
fn the_word_that_a_code_follows_cannot_be_taken_out_of_a_header() {
    let error = sent(&address(), &address(), |first, piece| {
        // The sixth byte of the first header.
        if let Some(at) = (GREETING + 6).checked_sub(first).filter(|at| *at < piece.len()) {
            assert_eq!(piece[at], 1, "the header says that a code follows");
            piece[at] = 0;
        }
        true
    })
    .unwrap_err();
    assert!(matches!(error, PeerError::Forged { .. }), "{error}");
}
