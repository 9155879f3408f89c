//! What launchers of one job send each other: JSON, but for [`Up::Seen`], which is most of it. Fields and variants are added,
//! never renamed; a launcher of another [`PROTOCOL`] is refused by name.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::base::id::{Attempt, Rank};
use crate::base::time::{Mono, Stamp};
use crate::checkpoint::inventory::{Copy, StepKey};
use crate::hang::RankSeen;
use crate::model::entry::{Body, Fact, StepDone};
use crate::recovery::job::{Input, StopWhy, Summary};

use super::lost::Sight;

mod holding;
mod quick;
mod seen;

/// The number of this protocol.
pub const PROTOCOL: u32 = 4;

/// A longer message ends its connection.
pub const LONGEST_MESSAGE: usize = 16 << 20;

/// Who a launcher is and what it offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`PROTOCOL`] of the launcher.
    pub protocol: u32,
    /// Its version.
    pub version: String,
    /// The run id.
    pub run_id: String,
    /// This launcher and no other: what a connection is continued by.
    pub launcher: String,
    /// Its host's name.
    pub host: String,
    /// The address by which ranks of other hosts reach this one; empty for the one that the connection comes from.
    #[serde(default)]
    pub address: String,
    /// The node rank that the user gave.
    #[serde(default)]
    pub node_rank: Option<u32>,
    /// Ranks on this host.
    pub ranks: u32,
    /// Hosts that the user asked for.
    pub hosts: (u32, u32),
    /// What the ranks run, as one number; none where the program cannot be read.
    #[serde(default)]
    pub program: Option<String>,
    /// `HOST:PORT` at which it keeps copies of other hosts' checkpoints; empty if it keeps none.
    #[serde(default)]
    pub replicas: String,
    /// What fails together with it, if that is known.
    #[serde(default)]
    pub domain: String,
    /// Whether it understands [`Command::Seat`].
    #[serde(default)]
    pub moves: bool,
    /// `HOST:PORT` at which other launchers can look whether it lives; empty for one that neither is looked at nor looks at
    /// others.
    #[serde(default)]
    pub listens: String,
    /// Whether it gets ready while it waits as a spare, and keeps copies for hosts with ranks then; and whether it understands
    /// [`Down::Meet`].
    #[serde(default)]
    pub prepares: bool,
    /// The newest command that it has received, and the newest entry: the leader continues there.
    #[serde(default)]
    pub have: (u64, u64),
    /// The launcher whose commands and entries these are; empty before it had a leader.
    #[serde(default)]
    pub have_of: String,
}

/// Where a host is in the job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// `GROUP_RANK`.
    pub group_rank: u32,
    /// `GROUP_WORLD_SIZE`.
    pub group_world_size: u32,
    /// `RANK` of the host's first rank.
    pub first_rank: u32,
    /// `WORLD_SIZE`.
    pub world_size: u32,
}

/// What a launcher needs to get ready while it waits as a spare.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spare {
    /// A seat like the one that it may get: of a host with as many ranks, where there is one.
    pub seat: Seat,
    /// The job's name on the leader's host; ranks of all hosts get it.
    pub job: String,
    /// The job's launch, as ranks of all hosts get it.
    pub launch: String,
}

/// What a follower sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "up", rename_all = "snake_case")]
pub enum Up {
    /// The first message.
    Join(Join),
    /// What it saw or did.
    Report {
        /// Its number.
        number: u64,
        /// When, on the leader's clock.
        at: Mono,
        /// What.
        report: Report,
    },
    /// All commands up to this one were received.
    Received {
        /// Its number.
        number: u64,
    },
    /// What its ranks are at, for the judge of hangs. Not numbered: a newer one replaces one that was lost.
    Seen {
        /// In which attempt.
        attempt: Attempt,
        /// Ranks of which there is something to report, by the leader's clock.
        ranks: Vec<RankSeen>,
    },
    /// Asks for the time of the leader's clock, and shows that the follower lives.
    Beat {
        /// When, on the follower's clock.
        sent: Mono,
    },
}

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(String);

impl Up {
    /// Reads a message. Those that are many are read without a detour.
    ///
    /// # Errors
    /// It is no message of a follower.
    pub fn read(bytes: &[u8]) -> Result<Up, Unreadable> {
        if let Some((&seen::MARK, seen)) = bytes.split_first() {
            return seen::read(seen).map_err(|error| Unreadable(error.to_string()));
        }
        let read = quick::read(bytes).map_or_else(|| serde_json::from_slice(bytes), Ok);
        read.map_err(|error| Unreadable(error.to_string()))
    }
}

/// Why a message cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Unwritable {
    /// Not in JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Not in postcard's format.
    #[error(transparent)]
    Postcard(#[from] postcard::Error),
}

/// A message that can be sent.
pub trait Outgoing {
    /// Appends its bytes.
    ///
    /// # Errors
    /// It cannot be written in its format.
    fn write(&self, into: &mut Vec<u8>) -> Result<(), Unwritable>;
}

impl Outgoing for Up {
    fn write(&self, into: &mut Vec<u8>) -> Result<(), Unwritable> {
        match self {
            Up::Seen { attempt, ranks } => Ok(seen::write(*attempt, ranks, into)?),
            other => Ok(serde_json::to_writer(into, other)?),
        }
    }
}

impl Outgoing for Down {
    fn write(&self, into: &mut Vec<u8>) -> Result<(), Unwritable> {
        Ok(serde_json::to_writer(into, self)?)
    }
}

/// What the leader sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "down", rename_all = "snake_case")]
pub enum Down {
    /// The host takes part.
    Welcome {
        /// Where.
        seat: Seat,
        /// The job's name on the leader's host; ranks of all hosts get it.
        job: String,
        /// The job's launch, as ranks of all hosts get it.
        launch: String,
        /// The newest report that the leader has received from this launcher.
        have: u64,
        /// The leader's epoch. Commands of a lower one are refused from now on.
        #[serde(default)]
        epoch: u64,
    },
    /// The host cannot take part.
    Refused {
        /// Why, and what to do.
        why: String,
    },
    /// The job does not start yet.
    Waiting {
        /// For whom, in words.
        #[serde(rename = "told")]
        reported: String,
        /// The job runs, and this launcher may replace one of its hosts.
        #[serde(default)]
        spare: Option<Box<Spare>>,
    },
    /// Where launchers of the job keep copies of checkpoints for each other from now on. Only for launchers that understand it:
    /// see [`Join::prepares`].
    Meet {
        /// Those of hosts with ranks.
        hosts: Vec<String>,
        /// Those of spares.
        spares: Vec<String>,
    },
    /// An order.
    Command {
        /// Its number.
        number: u64,
        /// The leader's epoch.
        #[serde(default)]
        epoch: u64,
        /// What.
        command: Command,
    },
    /// An entry of the job's journal.
    Entry {
        /// Its number in the leader's journal.
        seq: u64,
        /// When, on the leader's clock.
        at: Stamp,
        /// What. Many followers get the same.
        #[serde(with = "shared")]
        body: Arc<Body>,
    },
    /// All reports up to this one were received.
    Received {
        /// Its number.
        number: u64,
    },
    /// Answers [`Up::Beat`].
    Beat {
        /// When the question was sent, on the follower's clock.
        sent: Mono,
        /// When it was received, on the leader's clock.
        at: Mono,
    },
}

/// What hosts see and do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// Something was observed.
    Fact {
        /// What.
        fact: Fact,
    },
    /// Ranks of the host completed steps.
    Steps {
        /// In which attempt.
        attempt: Attempt,
        /// The steps of each, oldest first.
        ranks: Vec<(Rank, Vec<StepDone>)>,
    },
    /// A rank declared its role.
    Role {
        /// In which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// The role.
        role: String,
        /// Its pipeline stage.
        stage: Option<u32>,
    },
    /// The port for the ranks' store is reserved.
    Opened {
        /// For which attempt.
        attempt: Attempt,
        /// The port, or why there is none.
        port: Result<u16, String>,
    },
    /// Shards of checkpoints that lie on the host.
    Holding {
        /// Before which attempt.
        attempt: Attempt,
        /// Of its own ranks, and kept for others.
        #[serde(with = "holding")]
        copies: Vec<Copy>,
    },
    /// The host has its new seat.
    Seated {
        /// Before which attempt.
        attempt: Attempt,
        /// Which.
        seat: Seat,
    },
    /// The shards of a step are where the host's ranks will look for them, or why not.
    Brought {
        /// For which attempt.
        attempt: Attempt,
        /// Of which step.
        step: StepKey,
        /// Why a shard is not there; none if all are.
        error: Option<String>,
    },
    /// What was found where another launcher was looked for.
    Looked {
        /// Which.
        launcher: String,
        /// What.
        sight: Sight,
    },
}

impl Report {
    /// What of a launcher's inputs concerns other hosts; none for what is only about its own.
    pub fn of(input: Input) -> Option<Report> {
        match input {
            Input::Fact(fact) => Some(Report::Fact { fact }),
            Input::Steps { attempt, rank, done } => {
                Some(Report::Steps { attempt, ranks: vec![(rank, done)] })
            }
            Input::Role { attempt, rank, role, stage } => Some(Report::Role { attempt, rank, role, stage }),
            _ => None,
        }
    }

    /// The job's input, where the report is one as it is. Steps are one for each rank.
    pub fn input(self) -> Option<Input> {
        match self {
            Report::Fact { fact } => Some(Input::Fact(fact)),
            Report::Role { attempt, rank, role, stage } => Some(Input::Role { attempt, rank, role, stage }),
            Report::Steps { .. }
            | Report::Opened { .. }
            | Report::Seated { .. }
            | Report::Holding { .. }
            | Report::Brought { .. }
            | Report::Looked { .. } => None,
        }
    }
}

/// What the leader has a host do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Take other ranks; answered by [`Report::Seated`]. None of the host's ranks runs then.
    Seat {
        /// Before which attempt.
        attempt: Attempt,
        /// Where.
        seat: Seat,
    },
    /// Reserve a port for the ranks' store; answered by [`Report::Opened`].
    Open {
        /// For which attempt.
        attempt: Attempt,
    },
    /// Tell which shards of checkpoints lie here; answered by [`Report::Holding`].
    Gather {
        /// Before which attempt.
        attempt: Attempt,
        /// Where the launchers of all hosts keep copies for each other.
        peers: Vec<String>,
    },
    /// Bring the shards of this host's ranks here, from wherever they are; answered by [`Report::Brought`].
    Bring {
        /// For which attempt.
        attempt: Attempt,
        /// Of which step.
        step: StepKey,
    },
    /// Start the ranks; answered by `AttemptStarted` or `StartFailed`.
    Start {
        /// Which attempt.
        attempt: Attempt,
        /// Whether ranks that wait in their processes go on in them.
        in_process: bool,
        /// `MASTER_ADDR`.
        master_addr: String,
        /// `MASTER_PORT`.
        master_port: u16,
        /// The step from which all ranks go on; none if they find out themselves.
        #[serde(default)]
        resume: Option<StepKey>,
        /// How many ranks ran before, if it was another number in this run.
        #[serde(default)]
        before: Option<u32>,
    },
    /// End a rank that waits in its process; answered by `AttemptEnded`.
    EndRank {
        /// Of which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
    },
    /// Stop what is left of the attempt; answered by `AttemptEnded`.
    Stop {
        /// Which attempt.
        attempt: Attempt,
        /// Why.
        why: StopWhy,
        /// After which step ranks are asked to save, where they are: the same on all hosts.
        #[serde(default)]
        save_after: Option<u64>,
    },
    /// Write down what all ranks are at; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence {
        /// Of which attempt.
        attempt: Attempt,
    },
    /// A save is due on all ranks.
    SaveDue {
        /// In which attempt.
        attempt: Attempt,
        /// After which step.
        step: u64,
    },
    /// Look whether another launcher lives; answered by [`Report::Looked`]. Only for launchers that can: see
    /// [`Join::listens`].
    Look {
        /// Which.
        launcher: String,
        /// `HOST:PORT` where it listens.
        address: String,
    },
    /// The job is over.
    Finish {
        /// The status with which each launcher exits.
        exit: i32,
        /// How the job went.
        summary: Option<Box<Summary>>,
    },
}

/// What many messages have in common, as if each had its own.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(what: &Arc<T>, to: S) -> Result<S::Ok, S::Error> {
        what.as_ref().serialize(to)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(from).map(Arc::new)
    }
}
