//! The messages between launchers of a job: they carry the job's events and commands. They are in postcard's format, and
//! a change of any needs another [`PROTOCOL`]. A launcher with another one is refused with a message that names it, so the
//! two messages for that, [`Up::Join`] and [`Down::Refused`], are JSON whose fields are added and never renamed.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use mainstay_hang::RankSeen;
use mainstay_model::entry::Body;
use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_recovery::protocol::{Command, Event, Seat};

use crate::preflight::LinkMeasured;

/// The number of this protocol.
pub const PROTOCOL: u32 = 5;

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
    /// The number of recent failures, of jobs of all users, that implicated its host, as the host's agent counts them;
    /// 0 without an agent.
    #[serde(default)]
    pub implicated: u32,
    /// The newest command and the newest entry that it has received: the leader continues from there.
    #[serde(default)]
    pub have: (u64, u64),
    /// The launcher that sent these commands and entries; empty before it had a leader.
    #[serde(default)]
    pub have_of: String,
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
pub enum Up {
    /// The first message.
    Join(Join),
    /// Something happened on its host.
    Event {
        /// Its number.
        number: u64,
        /// When, on the leader's clock.
        at: Mono,
        /// What happened.
        event: Event,
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
    /// The first message of a connection that reads the launcher's API: gRPC follows. Launchers without this message
    /// close the connection.
    Api,
    /// The first message of a connection that measures the link to this launcher.
    Measure,
    /// The links that [`Down::Measure`] asked for.
    Measured {
        /// Each link.
        links: Vec<LinkMeasured>,
    },
}

/// The messages that launchers of all versions understand.
#[derive(Serialize, Deserialize)]
#[serde(tag = "up", rename_all = "snake_case")]
enum FirstUp<'a> {
    Join(Cow<'a, Join>),
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "down", rename_all = "snake_case")]
enum LastDown<'a> {
    Refused {
        why: Cow<'a, str>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        may_return: bool,
    },
}

/// Why bytes are not a message, or why a message cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// In JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// In postcard's format.
    #[error(transparent)]
    Postcard(#[from] postcard::Error),
}

/// A message between two launchers.
pub trait Message: Sized {
    /// Reads a message.
    ///
    /// # Errors
    /// The bytes are none.
    fn read(bytes: &[u8]) -> Result<Self, MessageError>;

    /// Appends its bytes.
    ///
    /// # Errors
    /// Its event or command is only for the leader's own host.
    fn write(&self, into: &mut Vec<u8>) -> Result<(), MessageError>;
}

impl Message for Up {
    fn read(bytes: &[u8]) -> Result<Up, MessageError> {
        if !is_json(bytes) {
            return Ok(postcard::from_bytes(bytes)?);
        }
        let FirstUp::Join(join) = serde_json::from_slice(bytes)?;
        Ok(Up::Join(join.into_owned()))
    }

    fn write(&self, into: &mut Vec<u8>) -> Result<(), MessageError> {
        match self {
            Up::Join(join) => serde_json::to_writer(into, &FirstUp::Join(Cow::Borrowed(join)))?,
            other => into.extend(postcard::to_allocvec(other)?),
        }
        Ok(())
    }
}

impl Message for Down {
    fn read(bytes: &[u8]) -> Result<Down, MessageError> {
        if !is_json(bytes) {
            return Ok(postcard::from_bytes(bytes)?);
        }
        let LastDown::Refused { why, may_return } = serde_json::from_slice(bytes)?;
        Ok(Down::Refused { why: why.into_owned(), may_return })
    }

    fn write(&self, into: &mut Vec<u8>) -> Result<(), MessageError> {
        match self {
            Down::Refused { why, may_return } => {
                serde_json::to_writer(into, &LastDown::Refused { why: why.into(), may_return: *may_return })?
            }
            other => into.extend(postcard::to_allocvec(other)?),
        }
        Ok(())
    }
}

/// Messages in postcard's format start with the number of their kind.
fn is_json(bytes: &[u8]) -> bool {
    bytes.first() == Some(&b'{')
}

/// A message of the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
        epoch: u64,
        /// The newest entry of the leader's journal: for a host that joins, entries up to it are the past.
        newest: u64,
    },
    /// The host cannot take part.
    Refused {
        /// The reason, and what to do.
        why: String,
        /// Whether a new launcher on this host may take part.
        may_return: bool,
    },
    /// The job does not start yet.
    Waiting {
        /// The hosts it waits for, as text.
        status: String,
        /// Set if the job runs and this launcher may replace one of its hosts.
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
    /// Measure the links to other launchers, before ranks start.
    Measure {
        /// The launchers with their addresses, one after the other; none where this one only answers.
        peers: Vec<Option<(String, String)>>,
        /// Time between two.
        every: Span,
    },
}

/// Serializes shared content like owned content.
mod shared {
    use std::sync::Arc;

    use mainstay_model::entry::Body;
    use mainstay_recovery::protocol::as_json;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(body: &Arc<Body>, to: S) -> Result<S::Ok, S::Error> {
        as_json::serialize(body.as_ref(), to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<Body>, D::Error> {
        as_json::deserialize(from).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use mainstay_checkpoint::inventory::StepKey;
    use mainstay_hang::{Count, Probe, RankSample};
    use mainstay_model::entry::{Fact, StepDone};
    use mainstay_model::id::Rank;
    use mainstay_recovery::protocol::{ProbeResult, StopWhy};

    fn written(message: &impl Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        message.write(&mut bytes).expect("it is written");
        bytes
    }

    fn step() -> StepKey {
        StepKey { step: 7, job: "job".into(), run: "run@1".into(), attempt: 0, world: 2 }
    }

    #[test]
    fn each_message_of_a_follower_is_read_again() {
        let (attempt, rank, at) = (Attempt(3), Rank(7), Mono(11));
        let seat = Seat { group_rank: 1, ..Seat::default() };
        let done = StepDone { loss: Some(f64::INFINITY), digest: Some(3), ..StepDone::default() };
        let events = [
            Event::Fact(Fact::AttemptEnded { attempt, orphans_killed: 1, waiting: vec![rank] }),
            Event::Steps { attempt, ranks: vec![(rank, vec![done, StepDone::default()])] },
            Event::Role { attempt, rank, role: "actor".to_owned(), stage: None },
            Event::Opened { attempt, port: Err("none".to_owned()) },
            Event::Holding { attempt, copies: Vec::new() },
            Event::Seated { attempt, seat },
            Event::Brought { attempt, step: step(), error: None },
            Event::Looked { launcher: "l".to_owned(), sight: ProbeResult::Silent },
        ];
        let events = events.map(|event| Up::Event { number: u64::MAX, at, event });
        let sight = RankSample { registered: true, beats: 5, step: Some(2), ..RankSample::default() };
        let seen = RankSeen {
            rank,
            sample: sight,
            section: Some("forward".to_owned()),
            counts: vec![Count { comm: 1, entered: 2, completed: 3, signature: 4 }],
            probe: Some(Probe::default()),
            ..RankSeen::default()
        };
        let others = [
            Up::Join(Join { host: "a".to_owned(), ..Join::default() }),
            Up::Received { number: 5 },
            Up::Beat { sent: at },
            Up::Api,
            Up::Measure,
            Up::Measured {
                links: vec![LinkMeasured { launcher: "l".to_owned(), quality: Err("no".to_owned()) }],
            },
            Up::Seen { attempt, ranks: vec![seen] },
        ];
        for up in events.into_iter().chain(others) {
            assert_eq!(Up::read(&written(&up)).expect("it is read"), up);
        }
        let local = Up::Event { number: 1, at, event: Event::Wake };
        assert!(local.write(&mut Vec::new()).is_err(), "it concerns only the leader's host");
    }

    #[test]
    fn each_message_of_the_leader_is_read_again() {
        let attempt = Attempt(3);
        let (why, save_after) = (StopWhy::Ordered, Some(9));
        let (master_addr, launcher, address) = ("a".to_owned(), "l".to_owned(), "a:1".to_owned());
        let (master_port, resume, before) = (7, Some(step()), None);
        let commands = [
            Command::Start { attempt, in_process: true, master_addr, master_port, resume, before },
            Command::EndRank { attempt, rank: Rank(1) },
            Command::Stop { attempt, why, save_after },
            Command::AskToSave { attempt, save_after },
            Command::TakeEvidence { attempt },
            Command::finish(3),
            Command::Seat { attempt, seat: Seat::default() },
            Command::Open { attempt },
            Command::Gather { attempt, peers: vec![address.clone()] },
            Command::Bring { attempt, step: step() },
            Command::SaveDue { attempt, step: 4 },
            Command::Look { launcher, address },
        ];
        let commands = commands.map(|command| Down::Command { number: 1, epoch: 2, command });
        let body = Arc::new(Body::Fact(Fact::RanksStepping {
            attempt,
            step: 7,
            counted: false,
            restoring: Span::default(),
        }));
        let (job, launch) = ("job".to_owned(), "launch".to_owned());
        let others = [
            Down::Welcome { seat: Seat::default(), job, launch, have: 1, epoch: 2, newest: 3 },
            Down::Refused { why: "of another protocol".to_owned(), may_return: false },
            Down::Refused { why: "lost".to_owned(), may_return: true },
            Down::Waiting { status: "for b".to_owned(), spare: Some(Box::default()) },
            Down::Meet { hosts: Vec::new(), spares: vec!["a:2".to_owned()] },
            Down::Entry { seq: 1, at: Stamp::default(), body },
            Down::Received { number: 1 },
            Down::Beat { sent: Mono(1), at: Mono(2) },
            Down::Measure { peers: vec![None, Some(("l".to_owned(), "a:1".to_owned()))], every: Span(1) },
        ];
        for down in commands.into_iter().chain(others) {
            assert_eq!(Down::read(&written(&down)).expect("it is read"), down);
        }
        let wake = Down::Command { number: 1, epoch: 2, command: Command::Wake { at: Mono(1) } };
        assert!(wake.write(&mut Vec::new()).is_err(), "it is only for the leader's host");
    }

    /// What launchers of all versions read.
    #[test]
    fn a_join_and_a_refusal_are_json() {
        let join = String::from_utf8(written(&Up::Join(Join::default()))).expect("text");
        assert!(join.starts_with(r#"{"up":"join","protocol":0,"#), "{join}");
        let refused = written(&Down::Refused { why: "no".to_owned(), may_return: false });
        assert_eq!(refused, br#"{"down":"refused","why":"no"}"#);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = (Up::read(&bytes), Down::read(&bytes));
        }
    }

    #[test]
    fn a_truncated_message_is_refused() {
        let mut bytes = written(&Up::Seen { attempt: Attempt(3), ranks: vec![RankSeen::default()] });
        bytes.pop();
        assert!(matches!(Up::read(&bytes), Err(MessageError::Postcard(_))));
    }
}
