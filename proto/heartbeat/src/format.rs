//! The bytes of a fresh page.

use crate::layout::*;

/// What the creator knows about the rank before its process exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpec<'a> {
    /// The job's id, at most [`JOB_BYTES`] long; a longer one is cut at a character's boundary.
    pub job: &'a str,
    /// The rank within the job.
    pub rank: u32,
    /// The rank within this host.
    pub local_rank: u32,
    /// The number of ranks in the job.
    pub world_size: u32,
    /// Which start of the job this is: 0 for the first.
    pub attempt: u32,
    /// `/proc/sys/kernel/random/boot_id` as 16 bytes: times in the page mean nothing after a reboot.
    pub boot_id: [u8; 16],
    /// The process that creates the page.
    pub creator_pid: u32,
    /// When it is created, `CLOCK_MONOTONIC` in ns.
    pub created_mono_ns: u64,
}

/// The bytes of a fresh, unclaimed page.
///
/// Write all of them to a new file (so that tmpfs has allocated every byte, and a full one is the creator's error and
/// never a SIGBUS in training), then rename it to its final name: a page is complete before anyone can find it.
#[must_use]
pub fn format(spec: &PageSpec<'_>) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    let mut put_word = |offset: usize, value: u64| put(offset, &value.to_le_bytes());

    put_word(MAGIC_AT, MAGIC);
    put_word(MAJOR_AT, MAJOR.into());
    put_word(MINOR_AT, MINOR.into());
    put_word(PAGE_BYTES_AT, PAGE_BYTES as u64);
    put_word(RANK, spec.rank.into());
    put_word(LOCAL_RANK, spec.local_rank.into());
    put_word(WORLD_SIZE, spec.world_size.into());
    put_word(ATTEMPT, spec.attempt.into());
    put_word(CREATOR_PID, spec.creator_pid.into());
    put_word(CREATED_NS, spec.created_mono_ns);
    let job = &spec.job.as_bytes()[..spec.job.floor_char_boundary(JOB_BYTES)];
    put_word(JOB_LENGTH, job.len() as u64);
    put_word(NAMES, OTHER_NAME.len() as u64);
    put(BOOT_ID, &spec.boot_id);
    put(JOB, job);
    put(NAMES + WORD, OTHER_NAME.as_bytes());
    bytes
}
