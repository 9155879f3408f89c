//! Whose page it is: what the creator wrote, who claimed it, who refused it.

use crate::layout::*;
use crate::page::{ATTEMPTS, Page};
use crate::words::Words;

/// What the creator wrote before it published the page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// The layout's major version (always the reader's own).
    pub major: u16,
    /// The layout's minor version as the creator knew it.
    pub minor: u64,
    /// The job's id.
    pub job: String,
    /// The rank within the job.
    pub rank: u32,
    /// The rank within the host.
    pub local_rank: u32,
    /// The number of ranks in the job.
    pub world_size: u32,
    /// Which start of the job this is: 0 for the first.
    pub attempt: u32,
    /// The boot that the page's times belong to.
    pub boot_id: [u8; 16],
    /// The process that created the page.
    pub creator_pid: u32,
    /// When it was created, `CLOCK_MONOTONIC` in ns.
    pub created_mono_ns: u64,
}

/// The process that writes (or wrote) the page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claimant {
    /// Its process id, as it sees itself: in a container that is not the host's number; see `pid_namespace`.
    pub pid: u32,
    /// Its start, field 22 of `/proc/self/stat`, in clock ticks since boot; 0 when it could not be read.
    pub start_ticks: u64,
    /// The inode of its `/proc/self/ns/pid`; 0 when it could not be read.
    pub pid_namespace: u64,
    /// The client library's version.
    pub version: String,
    /// The client library's language.
    pub language: String,
    /// How many processes have claimed the page so far, this one included.
    pub claims: u64,
    /// When it claimed the page, `CLOCK_MONOTONIC` in ns.
    pub claimed_mono_ns: u64,
}

/// Who writes the page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claim {
    /// No process has claimed it, or the process died while it was claiming.
    Unclaimed,
    /// A client has claimed it and not closed it. The process table shows whether that client is alive.
    Claimed(Claimant),
    /// A client closed the page in order.
    Closed {
        /// The client.
        by: Claimant,
        /// When it closed the page, `CLOCK_MONOTONIC` in ns.
        mono_ns: u64,
    },
    /// No process has claimed it, and a client has refused it: training continues without heartbeats.
    Refused(Refusal),
}

/// A client's refusal to use the page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The major version that client speaks.
    pub major: u16,
    /// The minor version that client speaks.
    pub minor: u16,
    /// Why it declined.
    pub reason: RefusalReason,
    /// Its process id, as it sees itself.
    pub pid: u32,
    /// Its version text.
    pub version: String,
}

/// Why a client declined a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The page's major version is not the client's.
    Major,
    /// The file is shorter than its header says, or shorter than its layout requires.
    Size,
    /// The file's bytes are not allocated, so a store could end in SIGBUS.
    Sparse,
    /// A reason that this reader does not know.
    Unknown(u16),
}

const REFUSED: u64 = 1 << 63;

impl RefusalReason {
    /// The word to store at [`REFUSAL`]: bits 0-15 major, 16-31 minor, 32-47 reason, 63 set.
    #[must_use]
    pub fn word(self, major: u16, minor: u16) -> u64 {
        let reason: u16 = match self {
            Self::Major => 1,
            Self::Size => 2,
            Self::Sparse => 3,
            Self::Unknown(code) => code,
        };
        REFUSED | u64::from(major) | u64::from(minor) << 16 | u64::from(reason) << 32
    }

    fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Major,
            2 => Self::Size,
            3 => Self::Sparse,
            other => Self::Unknown(other),
        }
    }
}

impl Page<'_> {
    /// What the creator wrote.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let words = self.words;
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&words.load_bytes(BOOT_ID, 16));
        Identity {
            major: MAJOR,
            minor: words.load(MINOR_AT),
            job: words.load_text(JOB, words.load(JOB_LENGTH), JOB_BYTES),
            rank: low_half(words.load(RANK)),
            local_rank: low_half(words.load(LOCAL_RANK)),
            world_size: low_half(words.load(WORLD_SIZE)),
            attempt: low_half(words.load(ATTEMPT)),
            boot_id,
            creator_pid: low_half(words.load(CREATOR_PID)),
            created_mono_ns: words.load(CREATED_NS),
        }
    }

    /// Who writes the page.
    #[must_use]
    pub fn claim(&self) -> Claim {
        for _ in 0..ATTEMPTS {
            let (state, claims) = (self.words.load_acquire(CLAIM_STATE), self.words.load(CLAIMS));
            let claim = match state {
                claim_state::CLAIMED => Claim::Claimed(claimant(self.words, claims)),
                claim_state::CLOSED => {
                    Claim::Closed { by: claimant(self.words, claims), mono_ns: self.words.load(CLOSED_NS) }
                }
                _ => return self.refusal().map_or(Claim::Unclaimed, Claim::Refused),
            };
            std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
            if self.words.load(CLAIM_STATE) == state && self.words.load(CLAIMS) == claims {
                return claim;
            }
        }
        Claim::Unclaimed
    }

    /// The last client that declined the page, even if another has claimed it.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        let word = self.words.load_acquire(REFUSAL);
        (word & REFUSED != 0).then(|| Refusal {
            major: word as u16,
            minor: (word >> 16) as u16,
            reason: RefusalReason::from_code((word >> 32) as u16),
            pid: low_half(self.words.load(REFUSAL_PID)),
            version: self.words.load_padded(REFUSAL_VERSION, VERSION_BYTES),
        })
    }
}

fn claimant(words: Words<'_>, claims: u64) -> Claimant {
    Claimant {
        pid: low_half(words.load(PID)),
        start_ticks: words.load(START_TICKS),
        pid_namespace: words.load(PID_NAMESPACE),
        version: words.load_padded(VERSION, VERSION_BYTES),
        language: words.load_padded(LANGUAGE, LANGUAGE_BYTES),
        claims,
        claimed_mono_ns: words.load(CLAIMED_NS),
    }
}

/// Fields of 32 bits are stored in whole words; the upper half is zero in any valid page.
fn low_half(word: u64) -> u32 {
    word as u32
}
