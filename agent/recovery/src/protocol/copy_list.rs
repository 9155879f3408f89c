//! The compact form of a host's list of shard copies: each step is named once, and a copy is an array. A job of
//! 100,000 ranks lists hundreds of thousands of them in each restart.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smol_str::SmolStr;

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};

#[derive(Serialize, Deserialize)]
struct Listed {
    steps: Vec<StepKey>,
    copies: Vec<Entry>,
}

/// The index of the step, the rank, the root, bytes, when it was sealed; the medium, whether it is the holder's own
/// and was verified, and the holder.
type Entry = (usize, u32, String, u64, i64, Medium, bool, bool, SmolStr);

pub(super) fn serialize<S: Serializer>(copies: &[Copy], to: S) -> Result<S::Ok, S::Error> {
    let mut steps: Vec<StepKey> = Vec::new();
    let copies = copies.iter().map(|Copy { holder, medium, own, verified, shard }| {
        let Shard { key: of, rank, root, bytes, created, piece } = shard;
        // As everywhere on the wire, the name of a piece replaces the run.
        let run = piece.as_ref().map_or_else(|| of.run.clone(), |piece| piece.name(&of.run).into());
        let step_key = StepKey { run, ..of.clone() };
        let step = steps.iter().rposition(|known| *known == step_key).unwrap_or_else(|| {
            steps.push(step_key);
            steps.len() - 1
        });
        (step, *rank, root.clone(), *bytes, *created, *medium, *own, *verified, holder.clone())
    });
    let copies = copies.collect();
    Listed { steps, copies }.serialize(to)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Copy>, D::Error> {
    let Listed { steps, copies } = Listed::deserialize(from)?;
    let copy = |(step, rank, root, bytes, created, medium, own, verified, holder): Entry| {
        let step_key = steps.get(step).ok_or_else(|| {
            D::Error::custom(format!("copy of step {step} of the list, which has {}", steps.len()))
        })?;
        let shard = Shard { key: step_key.clone(), rank, root, bytes, created, piece: None }.understood();
        Ok(Copy { holder, medium, own, verified, shard })
    };
    copies.into_iter().map(copy).collect()
}

#[cfg(test)]
mod tests {
    use crate::protocol::Event;
    use mainstay_checkpoint::copies::{Parity, Piece};
    use mainstay_model::id::Attempt;

    use super::*;

    fn copy(step: u64, rank: u32, piece: Option<Piece>) -> Copy {
        let step_key = StepKey { step, job: "job".into(), run: "llm@5".into(), attempt: 2, world: 8 };
        let shard = Shard { key: step_key, rank, root: format!("{rank:064x}"), bytes: 7, created: -1, piece };
        Copy { holder: "a:1".into(), medium: Medium::Memory, own: true, verified: false, shard }
    }

    #[test]
    fn a_list_survives_a_round_trip_and_names_each_step_once() {
        let piece = Piece { root: "r".to_owned(), bytes: 9, parity: Parity { data: 2, parity: 1 }, index: 1 };
        let copies = vec![copy(1, 0, None), copy(2, 0, None), copy(1, 1, Some(piece)), copy(2, 1, None)];
        let report = Event::Holding { attempt: Attempt(3), copies };
        let bytes = postcard::to_allocvec(&report).unwrap();
        let named = bytes.windows(10).filter(|bytes| bytes == b"\x03job\x05llm@5").count();
        assert_eq!(named, 2, "{bytes:?}");
        assert_eq!(postcard::from_bytes::<Event>(&bytes).unwrap(), report);
    }

    #[test]
    fn a_copy_of_a_step_that_is_not_listed_is_refused() {
        let listed = Listed {
            steps: Vec::new(),
            copies: vec![(1, 0, String::new(), 0, 0, Medium::Disk, true, true, "".into())],
        };
        let bytes = postcard::to_allocvec(&listed).unwrap();
        let mut from = postcard::Deserializer::from_bytes(&bytes);
        assert!(deserialize(&mut from).is_err());
    }
}
