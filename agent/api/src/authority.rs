//! Accepts callers whose gRPC library names a Unix socket in `:authority`, percent-encoded. gRPC's C core, the base
//! of the Python, Ruby, PHP and C++ clients, sends `run%2Fnvhcd.sock`, and h2 resets such a stream as malformed.
//! NVRx's launcher then treats the node as healthy without any report of the error. Every health query from Python
//! would be refused in the same way, so each Unix socket has this, not only NVRx's.
//!
//! Nothing here reads the authority. So each `%` in it is replaced by a `-` on the way in: no length changes, so
//! frames and the HPACK table stay valid. Huffman-coded values are passed through unchanged; the C core sends none.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// How every HTTP/2 connection of a client starts. Anything else is HTTP/1 and is passed through.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The index of `:authority` in HPACK's static table (RFC 7541, appendix A).
const AUTHORITY: u64 = 1;

/// The same as text, as the C core writes it.
const AUTHORITY_NAME: &[u8] = b":authority";

/// A connection in which each authority is changed to one that h2 accepts.
#[derive(Debug)]
pub(super) struct PlainAuthority<IO> {
    inner: IO,
    filter: Filter,
}

impl<IO> PlainAuthority<IO> {
    pub(super) fn new(inner: IO) -> PlainAuthority<IO> {
        PlainAuthority { inner, filter: Filter::default() }
    }
}

impl<IO: Connected> Connected for PlainAuthority<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for PlainAuthority<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        self.filter.pass(&mut buffer.filled_mut()[before..]);
        read
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for PlainAuthority<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// The position in the client's bytes. They arrive in pieces of any size.
#[derive(Debug)]
enum FramePosition {
    /// This many bytes of the preface were read.
    Preface(usize),
    /// This many bytes of a frame's head were read.
    Head(usize),
    /// In a frame's body.
    Body,
    /// This is no HTTP/2.
    Other,
}

#[derive(Debug)]
struct Filter {
    place: FramePosition,
    head: [u8; 9],
    /// Bytes of the body that are still to come.
    left: usize,
    /// In a frame with headers: bytes before its header block (length of the padding, priority).
    before: usize,
    /// Bytes of padding after it.
    padding: usize,
    block: Block,
}

impl Default for Filter {
    fn default() -> Filter {
        let block = Block::default();
        Filter { place: FramePosition::Preface(0), head: [0; 9], left: 0, before: 0, padding: 0, block }
    }
}

impl Filter {
    fn pass(&mut self, mut bytes: &mut [u8]) {
        while let Some(first) = bytes.first_mut() {
            let mut taken = 1;
            match self.place {
                FramePosition::Preface(seen) => {
                    self.place = match PREFACE.get(seen) {
                        Some(expected) if *expected != *first => FramePosition::Other,
                        _ if seen + 1 == PREFACE.len() => FramePosition::Head(0),
                        _ => FramePosition::Preface(seen + 1),
                    };
                }
                FramePosition::Head(seen) => {
                    self.head[seen] = *first;
                    self.place = FramePosition::Head(seen + 1);
                    if seen + 1 == self.head.len() {
                        self.begin_body();
                    }
                }
                FramePosition::Body if self.has_headers() => {
                    self.in_headers(first);
                    self.left -= 1;
                }
                FramePosition::Body => {
                    taken = self.left.min(bytes.len());
                    self.left -= taken;
                }
                FramePosition::Other => return,
            }
            if matches!(self.place, FramePosition::Body) && self.left == 0 {
                self.place = FramePosition::Head(0);
            }
            bytes = &mut bytes[taken..];
        }
    }

    fn has_headers(&self) -> bool {
        matches!(self.head[3], HEADERS | CONTINUATION)
    }

    fn begin_body(&mut self) {
        let [a, b, c, kind, flags, ..] = self.head;
        self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        (self.before, self.padding) = (0, 0);
        if kind == HEADERS {
            self.block = Block::default();
            self.before = usize::from(flags & PADDED != 0) + if flags & PRIORITY == 0 { 0 } else { 5 };
        }
        self.place = FramePosition::Body;
    }

    fn in_headers(&mut self, byte: &mut u8) {
        let [.., kind, flags, _, _, _, _] = self.head;
        if self.before > 0 {
            let padded = kind == HEADERS && flags & PADDED != 0;
            let at_length = self.before == if flags & PRIORITY == 0 { 1 } else { 6 };
            if padded && at_length {
                self.padding = usize::from(*byte);
            }
            self.before -= 1;
        } else if self.left > self.padding {
            self.block.pass(byte);
        }
    }
}

/// The position in a header block (RFC 7541, section 6).
#[derive(Debug, Default)]
enum Block {
    /// At the start of a field.
    #[default]
    Field,
    /// In a number of several bytes: its value so far, and the shift of the next seven bits.
    Number(HpackExpect, u64, u32),
    /// At the length of a string.
    Length(Text),
    /// In a string with this many bytes to come.
    String(Text, u64),
}

/// What a number means.
#[derive(Clone, Copy, Debug)]
enum HpackExpect {
    /// A field or the table's size: nothing follows.
    Nothing,
    /// The name of a field whose value follows.
    Name,
    /// The length of a string.
    Length(Text),
}

/// Which string.
#[derive(Clone, Copy, Debug)]
enum Text {
    /// A name whose first letters, this many, match `:authority`; its value follows. None: another name.
    Name(Option<usize>),
    /// The value of a field that is passed through.
    Value,
    /// The value of the authority.
    Authority,
}

impl Block {
    fn pass(&mut self, byte: &mut u8) {
        *self = match std::mem::take(self) {
            Block::Field => match *byte {
                byte if byte & 0x80 != 0 => Block::number(HpackExpect::Nothing, byte, 7),
                byte if byte & 0x40 != 0 => Block::number(HpackExpect::Name, byte, 6),
                byte if byte & 0x20 != 0 => Block::number(HpackExpect::Nothing, byte, 5),
                byte => Block::number(HpackExpect::Name, byte, 4),
            },
            Block::Number(wanted, value, shift) => {
                let more = u64::from(*byte & 0x7f).checked_shl(shift).unwrap_or(u64::MAX);
                let value = value.saturating_add(more);
                if *byte & 0x80 == 0 {
                    Block::known(wanted, value)
                } else {
                    Block::Number(wanted, value, shift.saturating_add(7))
                }
            }
            Block::Length(text) => {
                // In Huffman code its bytes are not characters.
                let text = match text {
                    Text::Authority if *byte & 0x80 != 0 => Text::Value,
                    Text::Name(_) if *byte & 0x80 != 0 => Text::Name(None),
                    text => text,
                };
                Block::number(HpackExpect::Length(text), *byte, 7)
            }
            Block::String(text, left) => {
                let text = match text {
                    Text::Name(letters) => Text::Name(
                        letters
                            .filter(|letters| AUTHORITY_NAME.get(*letters) == Some(byte))
                            .map(|letters| letters + 1),
                    ),
                    text => text,
                };
                if matches!(text, Text::Authority) && *byte == b'%' {
                    *byte = b'-';
                }
                Block::in_string(text, left.saturating_sub(1))
            }
        };
    }

    /// A number that starts in the low bits of a byte.
    fn number(wanted: HpackExpect, byte: u8, bits: u32) -> Block {
        let full = (1_u8 << bits).wrapping_sub(1);
        let value = byte & full;
        if value == full {
            Block::Number(wanted, value.into(), 0)
        } else {
            Block::known(wanted, value.into())
        }
    }

    fn known(wanted: HpackExpect, value: u64) -> Block {
        match wanted {
            HpackExpect::Nothing => Block::Field,
            HpackExpect::Name if value == 0 => Block::Length(Text::Name(Some(0))),
            HpackExpect::Name if value == AUTHORITY => Block::Length(Text::Authority),
            HpackExpect::Name => Block::Length(Text::Value),
            HpackExpect::Length(text) => Block::in_string(text, value),
        }
    }

    fn in_string(text: Text, left: u64) -> Block {
        match text {
            text if left > 0 => Block::String(text, left),
            Text::Name(letters) if letters == Some(AUTHORITY_NAME.len()) => Block::Length(Text::Authority),
            Text::Name(_) => Block::Length(Text::Value),
            Text::Value | Text::Authority => Block::Field,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, (body.len() >> 8) as u8, body.len() as u8, kind, flags, 0, 0, 0, 1];
        bytes.extend(body);
        bytes
    }

    /// `:method: POST`, the authority by index, a literal field with a `%` in its value, `:scheme: http`, the
    /// authority by name, and a field whose name only starts in the same way.
    fn block(authority: &str) -> Vec<u8> {
        let mut block = vec![0x83, 0x41, authority.len() as u8];
        block.extend(authority.as_bytes());
        block.extend(b"\x40\x03x-a\x03a%b\x86\x40\x0a:authority");
        block.push(authority.len() as u8);
        block.extend(authority.as_bytes());
        block.extend(b"\x40\x09:authorit\x03a%b");
        block
    }

    fn passed(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut filter, mut bytes) = (Filter::default(), bytes.to_vec());
        for piece in bytes.chunks_mut(piece) {
            filter.pass(piece);
        }
        bytes
    }

    fn conversation(authority: &str) -> Vec<u8> {
        let block = block(authority);
        let mut bytes = PREFACE.to_vec();
        bytes.extend(frame(4, 0, &[0, 3, 0, 0, 0, 100]));
        bytes.extend(frame(HEADERS, 0x4, &block));
        bytes.extend(frame(0, 1, b"\x41\x03a%b in data is left alone"));
        // With padding (3 bytes), priority, and in two frames.
        let (first, rest) = block.split_at(5);
        let mut padded = vec![3, 0, 0, 0, 0, 16];
        padded.extend(first);
        padded.extend(b"%%%");
        bytes.extend(frame(HEADERS, PADDED | PRIORITY, &padded));
        bytes.extend(frame(CONTINUATION, 0x4, rest));
        bytes
    }

    #[test]
    fn an_authority_that_is_a_path_becomes_one_that_is_understood_and_nothing_else_changes() {
        for piece in [1, 2, 7, 1000] {
            assert_eq!(passed(&conversation("run%2Fnvhcd.sock"), piece), conversation("run-2Fnvhcd.sock"));
            assert_eq!(passed(&conversation("localhost"), piece), conversation("localhost"));
        }
    }

    #[test]
    fn http_1_and_huffmans_code_are_left_alone() {
        let plain = b"GET /%2F HTTP/1.1\r\n\r\n";
        assert_eq!(passed(plain, 4), plain);
        let mut coded = PREFACE.to_vec();
        coded.extend(frame(HEADERS, 0x4, b"\x41\x83a%b"));
        assert_eq!(passed(&coded, 3), coded);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_touch_more_than_percent_signs(
            bytes in proptest::collection::vec(any::<u8>(), 0..400), piece in 1_usize..50,
        ) {
            let mut all = PREFACE.to_vec();
            all.extend(bytes);
            for (before, after) in all.iter().zip(passed(&all, piece)) {
                prop_assert!(*before == after || (*before == b'%' && after == b'-'));
            }
        }
    }
}
