//! What a leader keeps in the coordination store so that another launcher can continue in its place. It is written
//! before the ranks of an attempt start, so that no restart is forgotten, and again when they have started.

mod packed;

use serde::{Deserialize, Serialize};

use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Stamp};
use mainstay_recovery::job::HandoverState;

use super::round::Seated;
use packed::Packed;

/// The job as its leader last stored it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "StoredForm", try_from = "StoredForm")]
pub struct Record {
    /// When it was written, on the leader's clocks.
    pub at: Stamp,
    /// The seats of all members.
    pub seats: Vec<Seated>,
    /// The launcher that wrote it.
    pub leader: String,
    /// The job's name, as ranks of all hosts get it.
    pub job: String,
    /// The job's launch, as ranks of all hosts get it.
    pub launch: String,
    /// The newest attempt that may have started anywhere.
    pub attempt: Attempt,
    /// Whether all of its ranks have started.
    pub running: bool,
    /// The kept state of the job. `None` before its first start.
    pub carried: Option<HandoverState>,
    /// The exit status of all launchers, once decided.
    pub ended: Option<i32>,
}

/// A record in its stored form. Fields are added, never renamed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredForm {
    at: Stamp,
    /// Empty if they are packed.
    seats: Vec<Seated>,
    /// The seats of a large job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packed: Option<Packed>,
    leader: String,
    job: String,
    launch: String,
    attempt: Attempt,
    #[serde(default)]
    running: bool,
    #[serde(default)]
    carried: Option<HandoverState>,
    #[serde(default)]
    ended: Option<i32>,
}

impl From<Record> for StoredForm {
    fn from(record: Record) -> StoredForm {
        let Record { at, seats, leader, job, launch, attempt, running, carried, ended } = record;
        let packed = Packed::from_seats(&seats);
        let seats = if packed.is_some() { Vec::new() } else { seats };
        StoredForm { at, seats, packed, leader, job, launch, attempt, running, carried, ended }
    }
}

impl TryFrom<StoredForm> for Record {
    type Error = String;

    fn try_from(written: StoredForm) -> Result<Record, String> {
        let StoredForm { at, seats, packed, leader, job, launch, attempt, running, carried, ended } = written;
        let seats = packed.map_or(Ok(seats), |packed| packed.seats())?;
        Ok(Record { at, seats, leader, job, launch, attempt, running, carried, ended })
    }
}

impl Record {
    /// The oldest store protocol with which a launcher understands the record: 2 if seats are packed.
    pub fn needs(&self) -> u32 {
        if Packed::from_seats(&self.seats).is_some() { 2 } else { 1 }
    }

    /// The kept state of the job, with its times on this host's clock. Wall clocks give the difference between the
    /// clocks of two hosts: a host that takes over may never have had a connection to the one that wrote it.
    pub fn carried_here(&self, now: Stamp) -> Option<HandoverState> {
        let passed = i128::from(now.wall.0) - i128::from(self.at.wall.0);
        let offset = i128::from(now.mono.0) - passed.max(0) - i128::from(self.at.mono.0);
        let here = |at: Mono| {
            if at == Mono(0) || at == Mono::NEVER {
                return at;
            }
            let moved = (i128::from(at.0) + offset).clamp(1, i128::from(u64::MAX - 1));
            Mono(u64::try_from(moved).unwrap_or(1))
        };
        self.carried.clone().map(|carried| carried.on_clock(&here))
    }
}
