//! The messages between launchers of a job. They are JSON, except for [`Up::Seen`], which makes up most of the
//! traffic. Fields and variants are added, never renamed. A launcher with another [`PROTOCOL`] is refused with a
//! message that names it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use mainstay_checkpoint::inventory::{Copy, StepKey};
use mainstay_hang::RankSeen;
use mainstay_model::entry::{Body, Fact, StepDone};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Stamp};
use mainstay_recovery::job::{Input, StopWhy, Summary};

use super::lost::ProbeResult;

mod copy_list;
mod fast_parse;
mod sights;

/// The number of this protocol.
pub const PROTOCOL: u32 = 4;

/// A longer message ends its connection.
pub const LONGEST_MESSAGE: usize = 16 << 20;

/// The identity of a launcher and what it offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`PROTOCOL`] of the launcher.
    pub protocol: u32,
    /// Its version.
    pub version: String,
    /// The run id.
    pub run_id: String,
    /// The unique id of this launcher, by which a connection is resumed.
    pub launcher: String,
    /// Its host's name.
    pub host: String,
    /// The address at which ranks of other hosts reach this one; empty for the address that the connection comes
    /// from.
    #[serde(default)]
    pub address: String,
    /// The node rank that the user gave.
    #[serde(default)]
    pub node_rank: Option<u32>,
    /// Ranks on this host.
    pub ranks: u32,
    /// The number of hosts that the user asked for.
    pub hosts: (u32, u32),
    /// A hash of what the ranks run. `None` if the program cannot be read.
    #[serde(default)]
    pub program: Option<String>,
    /// A hash of the command without the directories in it; empty if the launcher does not send it.
    #[serde(default)]
    pub command: String,
    /// A hash of the content of the script that the command names; empty if it names none that can be read.
    #[serde(default)]
    pub script: String,
    /// `HOST:PORT` at which it stores copies of other hosts' checkpoints; empty if it stores none.
    #[serde(default)]
    pub replicas: String,
    /// Its failure domain, if known.
    #[serde(default)]
    pub domain: String,
    /// Whether it understands [`Command::Seat`].
    #[serde(default)]
    pub moves: bool,
    /// `HOST:PORT` at which other launchers can check whether it is alive; empty if it neither is checked nor checks
    /// others.
    #[serde(default)]
    pub listens: String,
    /// Whether it prepares while it waits as a spare and then stores copies for hosts with ranks, and whether it
    /// understands [`Down::Meet`].
    #[serde(default)]
    pub prepares: bool,
    /// The newest command and the newest entry that it has received: the leader continues from there.
    #[serde(default)]
    pub have: (u64, u64),
    /// The launcher that sent these commands and entries; empty before it had a leader.
    #[serde(default)]
    pub have_of: String,
}

/// The position of a host in the job.
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

/// What a launcher needs to prepare while it waits as a spare.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spare {
    /// A seat like the one that it may get: of a host with the same number of ranks, if there is one.
    pub seat: Seat,
    /// The job's name on the leader's host; ranks of all hosts get it.
    pub job: String,
    /// The job's launch, as ranks of all hosts get it.
    pub launch: String,
}

/// A message of a follower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "up", rename_all = "snake_case")]
pub enum Up {
    /// The first message.
    Join(Join),
    /// Something that it saw or did.
    Report {
        /// Its number.
        number: u64,
        /// When, on the leader's clock.
        at: Mono,
        /// The report.
        report: Report,
    },
    /// All commands up to this one were received.
    Received {
        /// Its number.
        number: u64,
    },
    /// Sights of its ranks, for the judge of hangs. Not numbered: a newer message replaces a lost one.
    Seen {
        /// The attempt.
        attempt: Attempt,
        /// The ranks with something to report, in times of the leader's clock.
        ranks: Vec<RankSeen>,
    },
    /// Asks for the time of the leader's clock, and shows that the follower is alive.
    Beat {
        /// When it was sent, on the follower's clock.
        sent: Mono,
    },
}

/// Why bytes are not a message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(String);

impl Up {
    /// Reads a message. Frequent kinds are parsed directly.
    ///
    /// # Errors
    /// The bytes are not a message of a follower.
    pub fn read(bytes: &[u8]) -> Result<Up, Unreadable> {
        if let Some((&sights::MARK, seen)) = bytes.split_first() {
            return sights::read(seen).map_err(|error| Unreadable(error.to_string()));
        }
        let read = fast_parse::read(bytes).map_or_else(|| serde_json::from_slice(bytes), Ok);
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
            Up::Seen { attempt, ranks } => Ok(sights::write(*attempt, ranks, into)?),
            other => Ok(serde_json::to_writer(into, other)?),
        }
    }
}

impl Outgoing for Down {
    fn write(&self, into: &mut Vec<u8>) -> Result<(), Unwritable> {
        Ok(serde_json::to_writer(into, self)?)
    }
}

/// A message of the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "down", rename_all = "snake_case")]
pub enum Down {
    /// The host takes part.
    Welcome {
        /// Its seat.
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
        /// The newest entry of the leader's journal: for a host that joins, entries up to it are the past.
        #[serde(default)]
        newest: u64,
    },
    /// The host cannot take part.
    Refused {
        /// The reason, and what to do.
        why: String,
    },
    /// The job does not start yet.
    Waiting {
        /// The hosts it waits for, as text.
        #[serde(rename = "told")]
        reported: String,
        /// Set if the job runs and this launcher may replace one of its hosts.
        #[serde(default)]
        spare: Option<Box<Spare>>,
    },
    /// The addresses where launchers of the job store copies of checkpoints for each other from now on. Only for
    /// launchers that understand it: see [`Join::prepares`].
    Meet {
        /// Addresses on hosts with ranks.
        hosts: Vec<String>,
        /// Addresses on spares.
        spares: Vec<String>,
    },
    /// An order.
    Command {
        /// Its number.
        number: u64,
        /// The leader's epoch.
        #[serde(default)]
        epoch: u64,
        /// The command.
        command: Command,
    },
    /// An entry of the job's journal.
    Entry {
        /// Its number in the leader's journal.
        seq: u64,
        /// When, on the leader's clock.
        at: Stamp,
        /// Its content. Many followers share it.
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
        /// When the request was sent, on the follower's clock.
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
        /// The fact.
        fact: Fact,
    },
    /// Ranks of the host completed steps.
    Steps {
        /// The attempt.
        attempt: Attempt,
        /// The steps of each rank, oldest first.
        ranks: Vec<(Rank, Vec<StepDone>)>,
    },
    /// A rank declared its role.
    Role {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
        /// The role.
        role: String,
        /// Its pipeline stage.
        stage: Option<u32>,
    },
    /// The port for the ranks' store is reserved.
    Opened {
        /// The attempt.
        attempt: Attempt,
        /// The port, or why there is none.
        port: Result<u16, String>,
    },
    /// The shards of checkpoints on the host.
    Holding {
        /// The attempt that follows.
        attempt: Attempt,
        /// Those of its own ranks, and those stored for others.
        #[serde(with = "copy_list")]
        copies: Vec<Copy>,
    },
    /// The host has its new seat.
    Seated {
        /// The attempt that follows.
        attempt: Attempt,
        /// The seat.
        seat: Seat,
    },
    /// The shards of a step are where the host's ranks will look for them, or the reason why not.
    Brought {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: StepKey,
        /// Why a shard is missing. `None` if all are there.
        error: Option<String>,
    },
    /// The result of a check of another launcher.
    Looked {
        /// The launcher that was checked.
        launcher: String,
        /// The result.
        sight: ProbeResult,
    },
}

impl Report {
    /// The report for an input that concerns other hosts. `None` for inputs that concern only this one.
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

    /// The input for the job, if the report maps to exactly one. Steps map to one per rank.
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

/// A command of the leader for a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Take other ranks; answered by [`Report::Seated`]. None of the host's ranks runs at that time.
    Seat {
        /// The attempt that follows.
        attempt: Attempt,
        /// The new seat.
        seat: Seat,
    },
    /// Reserve a port for the ranks' store; answered by [`Report::Opened`].
    Open {
        /// The attempt.
        attempt: Attempt,
    },
    /// Report which shards of checkpoints are on this host; answered by [`Report::Holding`].
    Gather {
        /// The attempt that follows.
        attempt: Attempt,
        /// The addresses where the launchers of all hosts store copies for each other.
        peers: Vec<String>,
    },
    /// Fetch the shards of this host's ranks, from wherever they are; answered by [`Report::Brought`].
    Bring {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: StepKey,
    },
    /// Start the ranks; answered by `AttemptStarted` or `StartFailed`.
    Start {
        /// The attempt.
        attempt: Attempt,
        /// Whether ranks that wait in their processes continue in them.
        in_process: bool,
        /// `MASTER_ADDR`.
        master_addr: String,
        /// `MASTER_PORT`.
        master_port: u16,
        /// The step from which all ranks resume. `None` if they determine it themselves.
        #[serde(default)]
        resume: Option<StepKey>,
        /// How many ranks ran before, if the number differed in this run.
        #[serde(default)]
        before: Option<u32>,
    },
    /// End a rank that waits in its process; answered by `AttemptEnded`.
    EndRank {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
    },
    /// Stop what is left of the attempt; answered by `AttemptEnded`.
    Stop {
        /// The attempt.
        attempt: Attempt,
        /// The reason.
        why: StopWhy,
        /// The step after which ranks are asked to save in place: the same on all hosts.
        #[serde(default)]
        save_after: Option<u64>,
    },
    /// Ask all ranks to save and to end; unlike [`Command::Stop`] it stops none.
    AskToSave {
        /// The attempt.
        attempt: Attempt,
        /// The step after which all ranks save: the same on all hosts.
        #[serde(default)]
        save_after: Option<u64>,
    },
    /// Record what all ranks are doing; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence {
        /// The attempt.
        attempt: Attempt,
    },
    /// A save is due on all ranks.
    SaveDue {
        /// The attempt.
        attempt: Attempt,
        /// The step after which to save.
        step: u64,
    },
    /// Check whether another launcher is alive; answered by [`Report::Looked`]. Only for launchers that can: see
    /// [`Join::listens`].
    Look {
        /// The launcher to check.
        launcher: String,
        /// `HOST:PORT` where it listens.
        address: String,
    },
    /// The job is over.
    Finish {
        /// The exit status of each launcher.
        exit: i32,
        /// The summary of the job.
        summary: Option<Box<Summary>>,
    },
}

/// Serializes shared content like owned content.
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
