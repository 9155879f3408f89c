//! Sights of ranks in postcard's format. They are most of what the leader of a large job receives; as JSON they would
//! use most of its CPU time. A new field needs another [`super::PROTOCOL`].

use super::Up;
use mainstay_hang::RankSeen;
use mainstay_model::id::Attempt;

/// The first byte of such a message. JSON messages start with a brace.
pub(super) const MARK: u8 = 1;

/// Writes the mark and the message.
pub(super) fn write(attempt: Attempt, ranks: &[RankSeen], into: &mut Vec<u8>) -> Result<(), postcard::Error> {
    into.push(MARK);
    into.extend(postcard::to_allocvec(&(attempt, ranks))?);
    Ok(())
}

/// Reads the part after the mark.
pub(super) fn read(bytes: &[u8]) -> Result<Up, postcard::Error> {
    let (attempt, ranks) = postcard::from_bytes(bytes)?;
    Ok(Up::Seen { attempt, ranks })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Outgoing;
    use super::*;
    use mainstay_hang::{Count, Probe, ProcessState, RankSample};
    use mainstay_model::id::Rank;
    use mainstay_model::time::Mono;

    fn any_seen() -> impl Strategy<Value = RankSeen> {
        let sight = (any::<[bool; 2]>(), any::<[u64; 5]>(), any::<Option<u64>>());
        let rest =
            (any::<Option<String>>(), any::<Option<String>>(), any::<Vec<[u64; 4]>>(), any::<Option<u64>>());
        (any::<u32>(), sight, rest).prop_map(
            |(rank, (flags, numbers, step), (section, long, counts, probe))| {
                let [claim, beats, beat_at, since, quiet_until] = numbers;
                let count = |[comm, entered, completed, signature]: [u64; 4]| Count {
                    comm,
                    entered,
                    completed,
                    signature,
                };
                RankSeen {
                    rank: Rank(rank),
                    sight: RankSample {
                        registered: flags[0],
                        closed: flags[1],
                        claim,
                        beats,
                        beat_at: Mono(beat_at),
                        step,
                        since: Mono(since),
                        quiet_until: Mono(quiet_until),
                        ..RankSample::default()
                    },
                    section,
                    long,
                    counts: counts.into_iter().map(count).collect(),
                    probe: probe.map(|at| Probe {
                        at: Mono(at),
                        state: ProcessState::Normal,
                        ..Probe::default()
                    }),
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_message_is_read_again(attempt: u32, ranks in proptest::collection::vec(any_seen(), 0..4)) {
            let up = Up::Seen { attempt: Attempt(attempt), ranks };
            let mut bytes = Vec::new();
            up.write(&mut bytes).unwrap();
            prop_assert_eq!(bytes[0], MARK);
            prop_assert_eq!(Up::read(&bytes).unwrap(), up);
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes: Vec<u8>) {
            bytes.insert(0, MARK);
            let _ = Up::read(&bytes);
        }
    }

    #[test]
    fn a_truncated_message_is_refused() {
        let mut bytes = Vec::new();
        Up::Seen { attempt: Attempt(3), ranks: vec![RankSeen::default()] }.write(&mut bytes).unwrap();
        bytes.pop();
        let error = Up::read(&bytes).unwrap_err().to_string();
        assert!(error.contains("end"), "{error}");
    }
}
