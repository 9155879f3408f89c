//! Rounds of ranks that keep their processes: the state of each rank, and the messages to and from it.
//!
//! A round is an attempt, and its number is the round's epoch. Each message carries the epoch that it is about. A
//! message of another epoch comes from a late rank and is ignored.
//!
//! ```text
//!          hello                    leave                     ready
//!  Coming ───────► Inside ────────────────────────► Leaving ────────► Ready ── go ──► Coming (of the next round)
//!                    │  ▲ ready (it left by itself) ────────────────────▲
//!                    ▼  └─ leave ─┐
//!                  Done ──────────┴── finished, once all are done
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use mainstay_model::entry::Note;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Mono;

/// A longer line of a rank ends its connection.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// A message from a rank; a line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum RankMessage {
    /// Its function starts.
    Hello {
        /// The round that it takes part in.
        epoch: u32,
    },
    /// Its function raised.
    Raised {
        /// The round.
        epoch: u32,
        /// When, on the host's monotonic clock in nanoseconds.
        at: u64,
        /// The type of the exception, with its module.
        exception: String,
        /// Its message.
        message: String,
        /// Its traceback.
        traceback: String,
    },
    /// It has left the round, cleaned up, and waits for the next one.
    Ready {
        /// The round that it left.
        epoch: u32,
    },
    /// Its function has returned. It waits for the others to finish.
    Done {
        /// The round.
        epoch: u32,
    },
}

impl RankMessage {
    /// Reads a line.
    ///
    /// # Errors
    /// The line is not one of these messages.
    pub fn read(line: &[u8]) -> Result<RankMessage, serde_json::Error> {
        serde_json::from_slice(line)
    }

    /// The round that it is about.
    pub fn epoch(&self) -> Attempt {
        match self {
            RankMessage::Hello { epoch }
            | RankMessage::Raised { epoch, .. }
            | RankMessage::Ready { epoch }
            | RankMessage::Done { epoch } => Attempt(*epoch),
        }
    }
}

/// A message to a rank; a line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Call {
    /// Leave the round, clean up, and reply when ready.
    Leave {
        /// The round to leave.
        epoch: u32,
    },
    /// Start the next round.
    Go {
        /// The round that starts.
        epoch: u32,
        /// Variables of the environment to set.
        environment: BTreeMap<String, String>,
    },
    /// All are done: return from the function.
    Finished {
        /// The round.
        epoch: u32,
    },
    /// Inject a fault, for a drill. Sent on a separate socket, in jobs that opted in.
    Inject {
        /// The fault.
        fault: String,
        /// The amount, for faults that have one.
        percent: u32,
    },
}

impl Call {
    /// The line to send.
    pub fn line(&self) -> String {
        // Strings, numbers and a map with string keys: serialization to JSON cannot fail.
        let text = serde_json::to_string(self).unwrap_or_default();
        text + "\n"
    }
}

/// The state of a rank in the round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RoundState {
    /// It has not connected: it is starting, or its program has no restartable function.
    #[default]
    Coming,
    /// In its function.
    Inside,
    /// It was asked to leave.
    Leaving,
    /// Out of the round, waiting for the next.
    Ready,
    /// It cannot go on in its process, which is being killed.
    Ending,
    /// Its function has returned.
    Done,
    /// Its process is gone.
    Gone,
}

/// The result of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Received {
    /// Nothing to do.
    Noted,
    /// It is about a round that is over, or does not fit the state of the rank.
    PassedOver,
    /// The rank joined while the others leave: ask it to leave too.
    Late,
    /// The rank raised.
    Raised(Note),
    /// All ranks are done: notify these.
    AllDone(Vec<Rank>),
}

/// One round.
#[derive(Clone, Debug, Default)]
pub struct Round {
    epoch: Attempt,
    standing: BTreeMap<Rank, RoundState>,
    gathering: bool,
}

impl Round {
    /// Starts a round of these ranks.
    pub fn begin(epoch: Attempt, ranks: impl IntoIterator<Item = Rank>) -> Round {
        let standing = ranks.into_iter().map(|rank| (rank, RoundState::Coming)).collect();
        Round { epoch, standing, gathering: false }
    }

    /// Its number.
    pub fn epoch(&self) -> Attempt {
        self.epoch
    }

    /// The state of a rank.
    pub fn standing(&self, rank: Rank) -> Option<RoundState> {
        self.standing.get(&rank).copied()
    }

    /// Whether any rank can leave without its process being ended.
    pub fn can_gather(&self) -> bool {
        let inside = |standing: &RoundState| {
            matches!(standing, RoundState::Inside | RoundState::Done | RoundState::Ready)
        };
        self.standing.values().any(inside)
    }

    /// Starts to gather the ranks. Returns those to ask to leave.
    pub fn gather(&mut self) -> Vec<Rank> {
        self.gathering = true;
        let mut reported = Vec::new();
        for (rank, standing) in &mut self.standing {
            if matches!(standing, RoundState::Inside | RoundState::Done) {
                *standing = RoundState::Leaving;
                reported.push(*rank);
            }
        }
        reported
    }

    /// Its ranks do not continue in their processes: stops gathering.
    pub fn dissolve(&mut self) {
        self.standing.clear();
        self.gathering = false;
    }

    /// Whether its ranks are being gathered.
    pub fn is_gathering(&self) -> bool {
        self.gathering
    }

    /// Whether every rank has left the round: it waits, or its process has ended.
    pub fn is_gathered(&self) -> bool {
        self.gathering && self.missing().is_empty()
    }

    /// Ranks that still have to leave.
    pub fn missing(&self) -> Vec<Rank> {
        self.with(|standing| !matches!(standing, RoundState::Ready | RoundState::Gone))
    }

    /// Ranks that wait for the next round.
    pub fn waiting(&self) -> Vec<Rank> {
        self.with(|standing| standing == RoundState::Ready)
    }

    /// A rank's process has ended. Returns the ranks to notify, if all others were only waiting for it.
    pub fn gone(&mut self, rank: Rank) -> Vec<Rank> {
        if let Some(standing) = self.standing.get_mut(&rank) {
            *standing = RoundState::Gone;
        }
        self.all_done()
    }

    /// Handles a message from a rank.
    pub fn receive(&mut self, rank: Rank, word: RankMessage) -> Received {
        let (epoch, gathering) = (self.epoch, self.gathering);
        let Some(standing) = self.standing.get_mut(&rank) else { return Received::PassedOver };
        if word.epoch() != epoch
            || matches!(standing, RoundState::Gone | RoundState::Ready | RoundState::Ending)
        {
            // One that is killed may still have said that it is ready.
            return Received::PassedOver;
        }
        match word {
            // A rank that joins while the others leave must leave at once.
            RankMessage::Hello { .. } if gathering => {
                *standing = RoundState::Leaving;
                return Received::Late;
            }
            RankMessage::Hello { .. } => *standing = RoundState::Inside,
            RankMessage::Ready { .. } => *standing = RoundState::Ready,
            RankMessage::Done { .. } if gathering => {}
            RankMessage::Done { .. } => {
                *standing = RoundState::Done;
                let done = self.all_done();
                return if done.is_empty() { Received::Noted } else { Received::AllDone(done) };
            }
            RankMessage::Raised { at, exception, message, traceback, .. } => {
                let note = Note { exception, message, traceback, at: Mono(at), ..Note::default() };
                *standing = if is_fit(&note) { RoundState::Leaving } else { RoundState::Ending };
                return Received::Raised(note);
            }
        }
        Received::Noted
    }

    /// The ranks to notify that all are done. Empty unless every rank is done or its process has ended. A rank that
    /// has not connected yet may still fail, and then needs the others again.
    fn all_done(&self) -> Vec<Rank> {
        let over = |standing: &RoundState| matches!(standing, RoundState::Done | RoundState::Gone);
        if self.gathering || !self.standing.values().all(over) {
            return Vec::new();
        }
        self.with(|standing| standing == RoundState::Done)
    }

    fn with(&self, keep: impl Fn(RoundState) -> bool) -> Vec<Rank> {
        self.standing.iter().filter(|(_, standing)| keep(**standing)).map(|(rank, _)| *rank).collect()
    }
}

/// After these errors a process cannot be used any more, whatever is done in it: a CUDA context does not recover.
const SPOILT: [&str; 5] =
    ["CUDA error", "CUDNN_STATUS_", "CUBLAS_STATUS_", "device-side assert", "ncclUnhandledCudaError"];

/// Whether a rank that raised this exception can continue in its process.
fn is_fit(note: &Note) -> bool {
    !SPOILT.iter().any(|words| note.message.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EPOCH: u32 = 4;

    fn round(ranks: u32) -> Round {
        let mut round = Round::begin(Attempt(EPOCH), (0..ranks).map(Rank));
        for rank in 0..ranks {
            assert_eq!(round.receive(Rank(rank), RankMessage::Hello { epoch: EPOCH }), Received::Noted);
        }
        round
    }

    fn raised(epoch: u32, message: &str) -> RankMessage {
        let (exception, message) = ("RuntimeError".to_owned(), message.to_owned());
        RankMessage::Raised { epoch, at: 7, exception, message, traceback: String::new() }
    }

    #[test]
    fn all_ranks_inside_are_asked_to_leave_and_are_waited_for() {
        let mut round = round(3);
        assert!(
            matches!(round.receive(Rank(1), raised(EPOCH, "lost")), Received::Raised(note) if note.at == Mono(7))
        );
        assert_eq!(round.gather(), [Rank(0), Rank(2)], "the one that raised is on its way out");
        for rank in [1, 0] {
            round.receive(Rank(rank), RankMessage::Ready { epoch: EPOCH });
            assert!(!round.is_gathered());
        }
        round.gone(Rank(2));
        assert!(round.is_gathered());
        assert_eq!(round.waiting(), [Rank(0), Rank(1)]);
    }

    #[test]
    fn a_rank_that_cannot_go_on_is_waited_for_until_its_process_is_gone() {
        let mut round = round(2);
        round.receive(Rank(1), raised(EPOCH, "CUDA error: an illegal memory access was encountered"));
        assert_eq!(round.gather(), [Rank(0)]);
        round.receive(Rank(0), RankMessage::Ready { epoch: EPOCH });
        // Sent before the signal reached it.
        assert_eq!(round.receive(Rank(1), RankMessage::Ready { epoch: EPOCH }), Received::PassedOver);
        assert_eq!(round.missing(), [Rank(1)]);
        round.gone(Rank(1));
        assert!(round.is_gathered());
        assert_eq!(round.waiting(), [Rank(0)]);
    }

    #[test]
    fn messages_of_another_round_are_ignored() {
        let mut round = round(2);
        for epoch in [EPOCH - 1, EPOCH + 1] {
            for word in [
                RankMessage::Hello { epoch },
                raised(epoch, ""),
                RankMessage::Ready { epoch },
                RankMessage::Done { epoch },
            ] {
                assert_eq!(round.receive(Rank(0), word), Received::PassedOver);
            }
        }
        assert_eq!(round.standing(Rank(0)), Some(RoundState::Inside));
        assert_eq!(round.receive(Rank(9), RankMessage::Ready { epoch: EPOCH }), Received::PassedOver);
    }

    #[test]
    fn a_rank_that_joins_while_the_others_leave_is_asked_to_leave() {
        let mut round = Round::begin(Attempt(EPOCH), [Rank(0), Rank(1)]);
        assert!(!round.can_gather());
        round.receive(Rank(0), RankMessage::Hello { epoch: EPOCH });
        assert!(round.can_gather());
        round.gather();
        assert_eq!(round.receive(Rank(1), RankMessage::Hello { epoch: EPOCH }), Received::Late);
        assert_eq!(round.missing(), [Rank(0), Rank(1)]);
        round.receive(Rank(1), RankMessage::Ready { epoch: EPOCH });
        assert_eq!(round.waiting(), [Rank(1)]);
    }

    #[test]
    fn a_done_rank_waits_for_those_that_have_not_joined_yet() {
        let mut round = Round::begin(Attempt(EPOCH), [Rank(0), Rank(1)]);
        round.receive(Rank(1), RankMessage::Hello { epoch: EPOCH });
        assert_eq!(round.receive(Rank(1), RankMessage::Done { epoch: EPOCH }), Received::Noted);
        assert_eq!(
            round.gone(Rank(0)),
            [Rank(1)],
            "one without such a function is done when its process ends"
        );
    }

    #[test]
    fn no_rank_returns_before_all_are_done_and_a_done_rank_is_called_back() {
        let mut round = round(3);
        assert_eq!(round.receive(Rank(0), RankMessage::Done { epoch: EPOCH }), Received::Noted);
        let mut other = round.clone();
        assert_eq!(other.gather(), [Rank(0), Rank(1), Rank(2)]);
        assert_eq!(round.receive(Rank(1), RankMessage::Done { epoch: EPOCH }), Received::Noted);
        assert_eq!(round.gone(Rank(2)), [Rank(0), Rank(1)], "it exited: nobody else is to come");
    }

    #[test]
    fn the_last_done_rank_notifies_all() {
        let mut round = round(2);
        round.receive(Rank(1), RankMessage::Done { epoch: EPOCH });
        let received = round.receive(Rank(0), RankMessage::Done { epoch: EPOCH });
        assert_eq!(received, Received::AllDone(vec![Rank(0), Rank(1)]));
    }

    #[test]
    fn a_process_with_a_broken_cuda_context_does_not_continue_and_any_other_does() {
        let note = |message: &str| Note { message: message.to_owned(), ..Note::default() };
        assert!(!is_fit(&note("CUDA error: an illegal memory access was encountered")));
        assert!(!is_fit(&note("CUDA error: device-side assert triggered")));
        assert!(is_fit(&note("loss is NaN")));
        assert!(is_fit(&note("CUDA out of memory. Tried to allocate 20.00 MiB")));
    }

    #[test]
    fn lines_are_read_and_written_as_documented() {
        let line = br#"{"say":"raised","epoch":3,"at":5,"exception":"E","message":"m","traceback":"t"}"#;
        assert_eq!(RankMessage::read(line).expect("a word").epoch(), Attempt(3));
        RankMessage::read(br#"{"say":"nonsense","epoch":3}"#).expect_err("no word");
        RankMessage::read(br#"{"say":"hello","epoch":-1}"#).expect_err("no epoch");
        assert_eq!(Call::Leave { epoch: 3 }.line(), "{\"do\":\"leave\",\"epoch\":3}\n");
    }

    fn any_word() -> impl Strategy<Value = RankMessage> {
        let epoch = prop_oneof![4 => Just(EPOCH), 1 => any::<u32>()];
        (0..4, epoch).prop_map(|(which, epoch)| match which {
            0 => RankMessage::Hello { epoch },
            1 => raised(epoch, "m"),
            2 => RankMessage::Ready { epoch },
            _ => RankMessage::Done { epoch },
        })
    }

    proptest! {
        /// For any messages in any order: a rank that waits or has ended stays so, and ranks are notified that all
        /// are done only if none still works.
        #[test]
        fn a_rank_leaves_a_round_once(words in proptest::collection::vec((0u32..3, any_word(), 0..12), 0..60)) {
            let mut round = Round::begin(Attempt(EPOCH), (0..3).map(Rank));
            for (rank, word, event) in words {
                let out = round.with(|standing| matches!(standing, RoundState::Ready | RoundState::Gone));
                match event {
                    0 => drop(round.gone(Rank(rank))),
                    1 => drop(round.gather()),
                    _ => {
                        if let Received::AllDone(reported) = round.receive(Rank(rank), word) {
                            prop_assert!(!reported.is_empty());
                            prop_assert!(round.with(|s| matches!(s, RoundState::Inside | RoundState::Leaving)).is_empty());
                        }
                    }
                }
                for rank in out {
                    prop_assert!(matches!(round.standing(rank), Some(RoundState::Ready | RoundState::Gone)));
                }
            }
        }

        #[test]
        fn no_line_of_a_rank_panics(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RankMessage::read(&line);
        }
    }
}
