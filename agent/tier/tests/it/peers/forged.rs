//! A man in the middle between two hosts without TLS who changes bytes of a chunk is detected before they count, even if the checksum fits.

use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::frame::{Header, Kind};
use mainstay_tier::peer::wire::{Frame, Timeouts, Wire};

use super::support::{Proxy, address, pass};

const BYTES: usize = 600_000;

/// The result of receiving a chunk through a proxy with `spoil`: the received bytes, or the error. The digest in the header is
/// not checked here, as if a changed chunk had the same one.
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
        let mut wire = Wire::accept(stream, &pass(), Timeouts::default()).unwrap();
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
    let mut wire = Wire::connect(front, &pass(), Timeouts::default()).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; BYTES]).unwrap();
    let header = Header { length: BYTES as u32, ..Header::of(Kind::Chunk) };
    // The receiver closes the connection when it detects the change, perhaps before all was sent.
    let _ = wire.send_chunk(header, &file.into(), |_, left| left);
    reported.recv().unwrap()
}

/// Size of greeting and proof of the client, bytes.
const GREETING: usize = 72;

#[test]
fn a_chunk_changed_in_transit_is_rejected_as_forged_and_an_unchanged_one_is_not() {
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
fn the_flag_for_a_code_cannot_be_removed_from_a_header() {
    let error = sent(&address(), &address(), |first, piece| {
        // Byte 6 of the first header.
        if let Some(at) = (GREETING + 6).checked_sub(first).filter(|at| *at < piece.len()) {
            assert_eq!(piece[at], 1, "the header says that a code follows");
            piece[at] = 0;
        }
        true
    })
    .unwrap_err();
    assert!(matches!(error, PeerError::Forged { .. }), "{error}");
}
