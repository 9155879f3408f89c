//! The header of every frame between agents: fixed size, little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic `MSTP` |
//! | 4 | version |
//! | 5 | kind |
//! | 6 | 1 if a code of 16 bytes follows the bytes of the chunk, else 0 |
//! | 7 | zero |
//! | 8..12 | number of the request that an answer belongs to |
//! | 12..16 | length of what follows |
//! | 16..24 | attempt: the epoch of the shard |
//! | 24..32 | step |
//! | 32..40 | key of the shard: the first half of its root |
//! | 40..48 | offset in the shard |
//! | 48..56 | xxh3 of the following chunk |
//! | 40..56 | in `Put`: the lock of the shard (`withdrawal`), or zero |
//! | 56..60 | number of the chunk |
//! | 60..64 | zero |
//! | 64..80 | keyed BLAKE3 over direction, sequence number, the 64 bytes before, and what follows except a chunk |
//!
//! The code behind a chunk is keyed BLAKE3 over direction, sequence number, the 64 bytes of its header and its bytes. If bytes leave the
//! host without TLS, every chunk has one: xxh3 detects damage but can be forged.
//!
//! A frame never contains a path: requests name a shard by its root.

/// Size of a header on the wire, bytes.
pub const HEADER_BYTES: usize = 80;

/// The part of a header that its code covers, bytes.
pub const SIGNED_BYTES: usize = 64;

/// The protocol version.
pub const VERSION: u8 = 2;

/// The longest message other than a chunk, bytes: the longest manifest, or an inventory of about ten thousand shards.
pub const MAX_MESSAGE: u32 = 33 << 20;

/// The longest chunk, bytes.
pub const MAX_CHUNK: u32 = 64 << 20;

/// The first bytes of every header.
pub const MAGIC: [u8; 4] = *b"MSTP";

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Offers a shard; its manifest follows.
    Put = 1,
    /// The shard is wanted; the numbers of the missing chunks follow.
    Missing = 2,
    /// A chunk of the shard follows.
    Chunk = 3,
    /// A chunk was verified and stored: one more may be sent.
    Taken = 4,
    /// All chunks were sent.
    Commit = 5,
    /// The shard is stored completely, or already was; its root follows.
    Stored = 6,
    /// Requests a shard by its root.
    Get = 7,
    /// Its manifest follows, then its chunks.
    Manifest = 8,
    /// Everything that was requested was sent.
    End = 9,
    /// Requests an inventory.
    List = 10,
    /// An inventory follows.
    Inventory = 11,
    /// Asks to which step a job goes back.
    Decide = 12,
    /// A decision follows.
    Decided = 13,
    /// Announces a decision.
    Announce = 14,
    /// The answer to an announced decision follows.
    Announced = 15,
    /// Withdraws replicas.
    Drop = 16,
    /// The result of a withdrawal follows.
    Dropped = 17,
    /// The request failed; the reason follows.
    Error = 18,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 18] = [
        Kind::Put,
        Kind::Missing,
        Kind::Chunk,
        Kind::Taken,
        Kind::Commit,
        Kind::Stored,
        Kind::Get,
        Kind::Manifest,
        Kind::End,
        Kind::List,
        Kind::Inventory,
        Kind::Decide,
        Kind::Decided,
        Kind::Announce,
        Kind::Announced,
        Kind::Drop,
        Kind::Dropped,
        Kind::Error,
    ];
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of frame.
    pub kind: Kind,
    /// Number of the request that an answer belongs to.
    pub request: u32,
    /// Number of bytes that follow.
    pub length: u32,
    /// The attempt that saved the shard.
    pub attempt: u64,
    /// The shard's step.
    pub step: u64,
    /// The first half of the shard's root.
    pub key: u64,
    /// Offset of the chunk in the shard.
    pub offset: u64,
    /// xxh3 of the chunk.
    pub digest: u64,
    /// The chunk's number.
    pub chunk: u32,
    /// Whether a code follows the bytes of the chunk.
    pub code: bool,
}

impl Header {
    /// A header of `kind` with nothing else in it.
    pub fn of(kind: Kind) -> Header {
        Header {
            kind,
            request: 0,
            length: 0,
            attempt: 0,
            step: 0,
            key: 0,
            offset: 0,
            digest: 0,
            chunk: 0,
            code: false,
        }
    }
}

/// Why a header is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum FrameError {
    #[error("the data is not a frame of this protocol: it starts with {0:02x?}")]
    Magic([u8; 4]),
    #[error("it speaks version {0} of the peers' protocol, and this is version {VERSION}")]
    Version(u8),
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("a frame with bytes set that have no meaning")]
    Reserved,
    #[error("a frame that announces {0} bytes, more than the limit")]
    Length(u32),
}

/// Encodes the part of a header that the code covers.
pub fn encode(header: &Header) -> [u8; SIGNED_BYTES] {
    let mut bytes = [0; SIGNED_BYTES];
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = header.kind as u8;
    bytes[6] = u8::from(header.code);
    bytes[8..12].copy_from_slice(&header.request.to_le_bytes());
    bytes[12..16].copy_from_slice(&header.length.to_le_bytes());
    for (at, value) in
        [header.attempt, header.step, header.key, header.offset, header.digest].iter().enumerate()
    {
        bytes[16 + 8 * at..24 + 8 * at].copy_from_slice(&value.to_le_bytes());
    }
    bytes[56..60].copy_from_slice(&header.chunk.to_le_bytes());
    bytes
}

/// Decodes what [`encode`] wrote.
pub fn decode(bytes: &[u8; SIGNED_BYTES]) -> Result<Header, FrameError> {
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if magic != MAGIC {
        return Err(FrameError::Magic(magic));
    }
    if bytes[4] != VERSION {
        return Err(FrameError::Version(bytes[4]));
    }
    let kind =
        Kind::ALL.into_iter().find(|kind| *kind as u8 == bytes[5]).ok_or(FrameError::Kind(bytes[5]))?;
    let is_code = bytes[6] == 1 && kind == Kind::Chunk;
    if (bytes[6] != 0 && !is_code) || bytes[7] != 0 || bytes[60..64] != [0; 4] {
        return Err(FrameError::Reserved);
    }
    let length = word(bytes, 12);
    let limit = if kind == Kind::Chunk { MAX_CHUNK } else { MAX_MESSAGE };
    if length > limit {
        return Err(FrameError::Length(length));
    }
    Ok(Header {
        kind,
        request: word(bytes, 8),
        length,
        attempt: double(bytes, 16),
        step: double(bytes, 24),
        key: double(bytes, 32),
        offset: double(bytes, 40),
        digest: double(bytes, 48),
        chunk: word(bytes, 56),
        code: is_code,
    })
}

fn word(bytes: &[u8; SIGNED_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn double(bytes: &[u8; SIGNED_BYTES], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}
