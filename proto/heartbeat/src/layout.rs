//! Byte offsets, sizes and limits of the page.
//!
//! Every field is a little-endian `u64` at a multiple of eight, or text in whole words; so every access is one aligned
//! atomic load or store and no field is ever half written. The document's table is compared with [`FIELDS`] by a test.

/// The first eight bytes of every page of every version, as a little-endian word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MAINSTAY");
/// The layout's major version: a client or reader of another major must not touch anything but the identity zone.
pub const MAJOR: u16 = 1;
/// The layout's minor version: later minors only give meaning to words that were reserved (and zero) before.
pub const MINOR: u16 = 7;
/// The size of a page file, fixed within a major version.
pub const PAGE_BYTES: usize = 128 * 1024;
pub(crate) const PAGE_WORDS: usize = PAGE_BYTES / WORD;
pub(crate) const WORD: usize = 8;

/// The size of the identity zone, which is frozen: it means the same in every major version.
pub const IDENTITY_BYTES: usize = 256;

// Identity zone, 0..256. Frozen.
pub(crate) const MAGIC_AT: usize = 0;
pub(crate) const MAJOR_AT: usize = 8;
pub(crate) const MINOR_AT: usize = 16;
pub(crate) const PAGE_BYTES_AT: usize = 24;
pub(crate) const CLAIM_STATE: usize = 32;
pub(crate) const CLAIMS: usize = 40;
/// One word, so that it is published by one store; see [`crate::Refusal`].
pub const REFUSAL: usize = 48;
/// The word that is written with `pwrite`, so that inotify on the page's directory wakes the launcher.
pub const DOORBELL: usize = 56;
/// The process id of the client that refused the page.
pub const REFUSAL_PID: usize = 64;
/// The version text of the client that refused the page.
pub const REFUSAL_VERSION: usize = 72;

/// The room for a client's version text.
pub const VERSION_BYTES: usize = 48;
/// The room for a rank's role.
pub const ROLE_BYTES: usize = 48;
/// The room for the name of a client's language.
pub const LANGUAGE_BYTES: usize = 16;

/// Claim states, as stored in the identity zone.
pub(crate) mod claim_state {
    // 0 is unclaimed.
    pub(crate) const CLAIMED: u64 = 1;
    pub(crate) const CLOSED: u64 = 2;
    pub(crate) const CLAIMING: u64 = 3;
}

// Creator's zone, 256..512. Never written after publication.
pub(crate) const RANK: usize = 256;
pub(crate) const LOCAL_RANK: usize = 264;
pub(crate) const WORLD_SIZE: usize = 272;
pub(crate) const ATTEMPT: usize = 280;
pub(crate) const BOOT_ID: usize = 288;
pub(crate) const CREATOR_PID: usize = 304;
pub(crate) const CREATED_NS: usize = 312;
pub(crate) const JOB_LENGTH: usize = 320;
pub(crate) const JOB: usize = 328;
/// The longest job id, in bytes; a longer one is cut by [`crate::format()`].
pub const JOB_BYTES: usize = 64;

// Claimant's zone, 512..768.
pub(crate) const PID: usize = 512;
pub(crate) const START_TICKS: usize = 520;
pub(crate) const PID_NAMESPACE: usize = 528;
pub(crate) const CLAIMED_NS: usize = 536;
pub(crate) const CLOSED_NS: usize = 544;
pub(crate) const IMAGE: usize = 552;
pub(crate) const VERSION: usize = 576;
pub(crate) const LANGUAGE: usize = 624;
/// Since minor 3.
pub(crate) const ROLE: usize = 640;
/// Since minor 3: 0 while no role is set; else bit 63, and below it the stage plus one.
pub(crate) const STAGE: usize = 688;
/// Since minor 4: 0, or the offset in the page of the 32-bit word that the kernel marks when the claimant dies.
pub(crate) const LIFELINE_WORD: usize = 696;
/// Since minor 4: the claimant's C library keeps a lock here. No other code touches it, and readers read only its
/// word.
pub const LIFELINE: usize = 704;
/// The room for that lock.
pub const LIFELINE_BYTES: usize = 64;

// Counters of this claim, 768..1024.
pub(crate) const SKIPPED: usize = 768;
pub(crate) const UNMATCHED_LEAVES: usize = 776;
pub(crate) const NAMES_REFUSED: usize = 784;
pub(crate) const COLLECTIVES_REFUSED: usize = 792;
/// Since minor 2.
pub(crate) const SAVE_LISTENS: usize = 800;
/// Since minor 6: 0 while no data position is set; else the position plus one.
pub(crate) const DATA: usize = 808;
/// Since minor 7: 0 while the number of steps is unknown.
pub(crate) const TOTAL_STEPS: usize = 816;

// The writer's own zone, 1024..2048. Readers must not read it.
pub(crate) const LOCK: usize = 1024;
pub(crate) const PUBLISHED: usize = 1088;
pub(crate) const STEP_START_NS: usize = 1096;
pub(crate) const SPENT_COUNT: usize = 1104;
pub(crate) const SPENT_FLAGS: usize = 1112;
pub(crate) const SPENT: usize = 1152;
/// The beat being prepared: the same fields as a slot, its sequence word unused.
pub(crate) const DRAFT: usize = 1280;

/// Thousands of years of beats: no valid number in the page is larger.
pub(crate) const BEYOND_COUNTING: u64 = 1 << 62;

// Beat slots, 2048..2560.
pub(crate) const SLOTS: usize = 2048;
pub(crate) const SLOT_COUNT: usize = 2;
pub(crate) const SLOT_BYTES: usize = 256;
/// Fields within a slot.
pub(crate) mod slot {
    pub(crate) const SEQUENCE: usize = 0;
    pub(crate) const CLAIM: usize = 8;
    pub(crate) const COUNT: usize = 16;
    pub(crate) const BEAT_NS: usize = 24;
    pub(crate) const FLAGS: usize = 32;
    pub(crate) const STEP: usize = 40;
    pub(crate) const STEP_NS: usize = 48;
    pub(crate) const LOSS: usize = 56;
    pub(crate) const GRAD_NORM: usize = 64;
    pub(crate) const DIGEST: usize = 72;
    pub(crate) const DEPTH: usize = 80;
    /// Since minor 1.
    pub(crate) const QUIET_UNTIL_NS: usize = 88;
    /// `SECTION_DEPTH` pairs of (section id, start in ns).
    pub(crate) const STACK: usize = 128;
}
/// How many open sections a beat can show; deeper ones are only counted.
pub const SECTION_DEPTH: usize = 8;

/// Which values a beat or a step record holds.
pub(crate) mod given {
    pub(crate) const LOSS: u64 = 1;
    pub(crate) const GRAD_NORM: u64 = 1 << 1;
    pub(crate) const DIGEST: u64 = 1 << 2;
    /// In a beat: a step was completed in this claim.
    pub(crate) const STEP: u64 = 1 << 3;
    /// In a record: more sections took time than it can list, or some were nested too deep to be timed.
    pub(crate) const OVERFLOW: u64 = 1 << 4;
    /// In a record: the first of its claim, so its start is the claim and not the end of a step.
    pub(crate) const FIRST: u64 = 1 << 5;
    /// In a record: the step was counted by a hook, from 0 in each process. Since minor 3.
    pub(crate) const COUNTED: u64 = 1 << 6;
}

// Ring of step records.
pub(crate) const RING_HEAD: usize = 2560;
pub(crate) const RING: usize = 8192;
/// How many step records the ring keeps.
pub const RING_RECORDS: usize = 512;
pub(crate) const RECORD_BYTES: usize = 128;
/// Fields within a record.
pub(crate) mod record {
    pub(crate) const SEQUENCE: usize = 0;
    pub(crate) const STEP: usize = 8;
    pub(crate) const START_NS: usize = 16;
    pub(crate) const END_NS: usize = 24;
    /// Bits 0-7: flags; 8-15: number of sections; 32-63: the claim.
    pub(crate) const FLAGS: usize = 32;
    pub(crate) const LOSS: usize = 40;
    pub(crate) const GRAD_NORM: usize = 48;
    pub(crate) const DIGEST: usize = 56;
    /// `RECORD_SECTIONS` words: section id in bits 56-63, nanoseconds below.
    pub(crate) const SECTIONS: usize = 64;
}
/// How many sections a step record can list.
pub const RECORD_SECTIONS: usize = 8;
/// The bits of a section word that are nanoseconds (834 days of them).
pub(crate) const SPENT_NS_MASK: u64 = (1 << 56) - 1;

// Collectives.
pub(crate) const COLLECTIVE_COUNT: usize = 2624;
pub(crate) const COLLECTIVES: usize = 3072;
/// How many communicators a page can count for.
pub const COLLECTIVE_ENTRIES: usize = 16;
pub(crate) const COLLECTIVE_BYTES: usize = 32;
/// Fields within a communicator's entry.
pub(crate) mod collective {
    pub(crate) const ID: usize = 0;
    pub(crate) const ENTERED: usize = 8;
    pub(crate) const COMPLETED: usize = 16;
    /// Since minor 1.
    pub(crate) const SIGNATURE: usize = 24;
}

// The launcher's request, since minor 2. The only words of a claimed page that the launcher writes.
pub(crate) const SAVE_REQUEST: usize = 2688;
pub(crate) const SAVE_AT_STEP: usize = 2696;
pub(crate) const SAVE_BY_NS: usize = 2704;
/// Since minor 5.
pub(crate) const SAVE_DUE: usize = 2712;

// Section names.
pub(crate) const NAMES: usize = 4096;
/// How many section names a page knows, `other` (id 0) included.
pub const NAME_ENTRIES: usize = 64;
pub(crate) const NAME_ENTRY_BYTES: usize = 64;
/// The longest section name, in bytes; a longer one is cut at a character's boundary.
pub const NAME_BYTES: usize = NAME_ENTRY_BYTES - WORD;
/// The name of section 0, under which sections are counted once the table is full.
pub const OTHER_NAME: &str = "other";

// Exit note.
pub(crate) const NOTE_STATE: usize = 73728;
pub(crate) const NOTE_KIND: usize = 73736;
pub(crate) const NOTE_NS: usize = 73744;
pub(crate) const NOTE_STEP: usize = 73752;
pub(crate) const NOTE_FLAGS: usize = 73760;
pub(crate) const NOTE_CLAIM: usize = 73768;
pub(crate) const NOTE_EXCEPTION_LENGTH: usize = 73776;
pub(crate) const NOTE_MESSAGE_LENGTH: usize = 73784;
pub(crate) const NOTE_TRACEBACK_LENGTH: usize = 73792;
pub(crate) const NOTE_EXCEPTION: usize = 73856;
pub(crate) const NOTE_MESSAGE: usize = 73984;
pub(crate) const NOTE_TRACEBACK: usize = 78080;
/// The room for an exception's type.
pub const EXCEPTION_BYTES: usize = 128;
/// The room for an exception's message.
pub const MESSAGE_BYTES: usize = 4096;
/// The room for a traceback, of which the end is kept.
pub const TRACEBACK_BYTES: usize = 32 * 1024;

/// States of the exit note.
pub(crate) mod note_state {
    pub(crate) const NONE: u64 = 0;
    pub(crate) const WRITING: u64 = 1;
    pub(crate) const PUBLISHED: u64 = 2;
}
/// Flags of the exit note.
pub(crate) mod note_flag {
    pub(crate) const EXCEPTION_CUT: u64 = 1;
    pub(crate) const MESSAGE_CUT: u64 = 1 << 1;
    pub(crate) const TRACEBACK_CUT: u64 = 1 << 2;
    pub(crate) const STEP_GIVEN: u64 = 1 << 3;
}

/// Every field as (name, offset, bytes), in order. The document's table must match it.
pub const FIELDS: &[(&str, usize, usize)] = &[
    ("magic", MAGIC_AT, WORD),
    ("major", MAJOR_AT, WORD),
    ("minor", MINOR_AT, WORD),
    ("page_bytes", PAGE_BYTES_AT, WORD),
    ("claim_state", CLAIM_STATE, WORD),
    ("claims", CLAIMS, WORD),
    ("refusal", REFUSAL, WORD),
    ("doorbell", DOORBELL, WORD),
    ("refusal_pid", REFUSAL_PID, WORD),
    ("refusal_version", REFUSAL_VERSION, VERSION_BYTES),
    ("rank", RANK, WORD),
    ("local_rank", LOCAL_RANK, WORD),
    ("world_size", WORLD_SIZE, WORD),
    ("attempt", ATTEMPT, WORD),
    ("boot_id", BOOT_ID, 16),
    ("creator_pid", CREATOR_PID, WORD),
    ("created_ns", CREATED_NS, WORD),
    ("job_length", JOB_LENGTH, WORD),
    ("job", JOB, JOB_BYTES),
    ("pid", PID, WORD),
    ("start_ticks", START_TICKS, WORD),
    ("pid_namespace", PID_NAMESPACE, WORD),
    ("claimed_ns", CLAIMED_NS, WORD),
    ("closed_ns", CLOSED_NS, WORD),
    ("image", IMAGE, WORD),
    ("version", VERSION, VERSION_BYTES),
    ("language", LANGUAGE, LANGUAGE_BYTES),
    ("role", ROLE, ROLE_BYTES),
    ("stage", STAGE, WORD),
    ("lifeline_word", LIFELINE_WORD, WORD),
    ("lifeline", LIFELINE, LIFELINE_BYTES),
    ("skipped", SKIPPED, WORD),
    ("unmatched_leaves", UNMATCHED_LEAVES, WORD),
    ("names_refused", NAMES_REFUSED, WORD),
    ("collectives_refused", COLLECTIVES_REFUSED, WORD),
    ("save_listens", SAVE_LISTENS, WORD),
    ("data", DATA, WORD),
    ("total_steps", TOTAL_STEPS, WORD),
    ("lock", LOCK, WORD),
    ("published", PUBLISHED, WORD),
    ("step_start_ns", STEP_START_NS, WORD),
    ("spent_count", SPENT_COUNT, WORD),
    ("spent_flags", SPENT_FLAGS, WORD),
    ("spent", SPENT, RECORD_SECTIONS * WORD),
    ("draft", DRAFT, SLOT_BYTES),
    ("slots", SLOTS, SLOT_COUNT * SLOT_BYTES),
    ("ring_head", RING_HEAD, WORD),
    ("collective_count", COLLECTIVE_COUNT, WORD),
    ("save_request", SAVE_REQUEST, WORD),
    ("save_at_step", SAVE_AT_STEP, WORD),
    ("save_by_ns", SAVE_BY_NS, WORD),
    ("save_due", SAVE_DUE, WORD),
    ("collectives", COLLECTIVES, COLLECTIVE_ENTRIES * COLLECTIVE_BYTES),
    ("names", NAMES, NAME_ENTRIES * NAME_ENTRY_BYTES),
    ("ring", RING, RING_RECORDS * RECORD_BYTES),
    ("note_state", NOTE_STATE, WORD),
    ("note_kind", NOTE_KIND, WORD),
    ("note_ns", NOTE_NS, WORD),
    ("note_step", NOTE_STEP, WORD),
    ("note_flags", NOTE_FLAGS, WORD),
    ("note_claim", NOTE_CLAIM, WORD),
    ("note_exception_length", NOTE_EXCEPTION_LENGTH, WORD),
    ("note_message_length", NOTE_MESSAGE_LENGTH, WORD),
    ("note_traceback_length", NOTE_TRACEBACK_LENGTH, WORD),
    ("note_exception", NOTE_EXCEPTION, EXCEPTION_BYTES),
    ("note_message", NOTE_MESSAGE, MESSAGE_BYTES),
    ("note_traceback", NOTE_TRACEBACK, TRACEBACK_BYTES),
];

/// The fields of one beat slot (and of the draft), as (name, offset within it, bytes).
pub const SLOT_FIELDS: &[(&str, usize, usize)] = &[
    ("slot.sequence", slot::SEQUENCE, WORD),
    ("slot.claim", slot::CLAIM, WORD),
    ("slot.count", slot::COUNT, WORD),
    ("slot.beat_ns", slot::BEAT_NS, WORD),
    ("slot.flags", slot::FLAGS, WORD),
    ("slot.step", slot::STEP, WORD),
    ("slot.step_ns", slot::STEP_NS, WORD),
    ("slot.loss", slot::LOSS, WORD),
    ("slot.grad_norm", slot::GRAD_NORM, WORD),
    ("slot.digest", slot::DIGEST, WORD),
    ("slot.depth", slot::DEPTH, WORD),
    ("slot.quiet_until_ns", slot::QUIET_UNTIL_NS, WORD),
    ("slot.stack", slot::STACK, SECTION_DEPTH * 2 * WORD),
];

/// The fields of one step record, as (name, offset within it, bytes).
pub const RECORD_FIELDS: &[(&str, usize, usize)] = &[
    ("record.sequence", record::SEQUENCE, WORD),
    ("record.step", record::STEP, WORD),
    ("record.start_ns", record::START_NS, WORD),
    ("record.end_ns", record::END_NS, WORD),
    ("record.flags", record::FLAGS, WORD),
    ("record.loss", record::LOSS, WORD),
    ("record.grad_norm", record::GRAD_NORM, WORD),
    ("record.digest", record::DIGEST, WORD),
    ("record.sections", record::SECTIONS, RECORD_SECTIONS * WORD),
];
/// The fields of one communicator's entry, as (name, offset within it, bytes).
pub const COLLECTIVE_FIELDS: &[(&str, usize, usize)] = &[
    ("collective.id", collective::ID, WORD),
    ("collective.entered", collective::ENTERED, WORD),
    ("collective.completed", collective::COMPLETED, WORD),
    ("collective.signature", collective::SIGNATURE, WORD),
];
