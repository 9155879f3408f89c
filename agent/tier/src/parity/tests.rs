//! A shard is cut and pieces are lost: the rest restores the shard, or an error is returned.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use mainstay_checkpoint::parity::Parity;
use mainstay_checkpoint_format::{Chunks, Identity, Manifest, SealedFile, chunk_sum};
use proptest::prelude::*;
use twox_hash::XxHash3_128;

use super::{LocalPiece, cut, join, restore, whole_of};
use crate::peer::SealedShard;
use crate::peer::client::Target;
use crate::peer::error::PeerError;

const CHUNK: u64 = 4 << 10;

fn sealed(content: &[u8]) -> SealedShard {
    let manifest = Manifest {
        identity: Identity { job: "job".to_owned(), attempt: 1, step: 10, rank: 0, world_size: 1 },
        run: "run@1".to_owned(),
        created_unix_s: 1_700_000_000,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: content.len() as u64,
            xxh3_128: XxHash3_128::oneshot(content),
        },
        chunks: Some(Chunks { bytes: CHUNK, sums: content.chunks(CHUNK as usize).map(chunk_sum).collect() }),
        shared_content: None,
    };
    SealedShard::of(manifest.encode()).unwrap()
}

fn room(bytes: u64) -> std::io::Result<File> {
    let file = tempfile::tempfile()?;
    file.set_len(bytes)?;
    Ok(file)
}

fn pieces(content: &Vec<u8>, parity: Parity) -> Vec<LocalPiece> {
    let whole = sealed(content);
    let make = |index| {
        let file = room(0).unwrap();
        let piece = cut(&whole, content, parity, index, &file).unwrap();
        assert_eq!(piece.first_bad(&file).unwrap(), None, "it is what its own manifest says");
        LocalPiece { shard: piece.shard, holder: "peer".to_owned(), file }
    };
    (0..parity.pieces()).map(make).collect()
}

struct Memory(Mutex<Vec<u8>>);

impl Target for Memory {
    fn begin(&mut self, _sealed: &SealedShard) -> Result<(), PeerError> {
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError> {
        let mut memory = self.0.lock().unwrap();
        let offset = usize::try_from(offset).unwrap();
        memory[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn joined(content: &[u8], parity: Parity, given: &[&LocalPiece]) -> Result<Vec<u8>, PeerError> {
    let target = Memory(Mutex::new(vec![0; content.len()]));
    let whole = whole_of(given[0])?;
    join(&whole, parity, given, &target, &room)?;
    Ok(target.0.into_inner().unwrap())
}

fn content(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

fn parity() -> impl Strategy<Value = Parity> {
    (2..7_u32, 1..4_u32).prop_map(|(data, parity)| Parity { data, parity })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn enough_pieces_restore_the_shard_and_one_fewer_is_an_error(
        way in parity(), length in 1..40_000_usize, seed in any::<u64>(), order in any::<prop::sample::Index>(),
    ) {
        let content = content(length, seed);
        let all = pieces(&content, way);
        // Any choice of the needed number of pieces, in any order.
        let mut chosen: Vec<&LocalPiece> = all.iter().collect();
        chosen.rotate_left(order.index(all.len()));
        chosen.sort_by_key(|piece| piece.index().wrapping_mul(seed as u32 | 1) % 31);
        let enough = &chosen[..way.data as usize];
        prop_assert_eq!(&joined(&content, way, enough).unwrap(), &content);
        prop_assert!(joined(&content, way, &enough[1..]).is_err());
    }

    #[test]
    fn a_bit_that_flips_in_any_piece_is_found(
        way in parity(), length in 1..40_000_usize, seed in any::<u64>(), at in any::<prop::sample::Index>(),
        bit in 0..8_u8, which in any::<prop::sample::Index>(),
    ) {
        let content = content(length, seed);
        let all = pieces(&content, way);
        let bad = which.index(all.len());
        let at = at.index(usize::try_from(way.lane(length as u64)).unwrap()) as u64;
        let mut byte = [0];
        all[bad].file.read_exact_at(&mut byte, at).unwrap();
        all[bad].file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
        // For every choice: correct bytes or an error.
        for first in 0..all.len() {
            let mut chosen: Vec<&LocalPiece> = all.iter().cycle().skip(first).take(way.data as usize).collect();
            chosen.sort_by_key(|piece| piece.index());
            match joined(&content, way, &chosen) {
                Ok(made) => prop_assert_eq!(&made, &content),
                Err(error) => prop_assert!(matches!(error, PeerError::Corrupt { .. }), "{}", error),
            }
        }
    }
}

#[test]
fn every_choice_of_losses_is_survived() {
    let parity = Parity { data: 4, parity: 2 };
    let content = content(70_001, 3);
    let all = pieces(&content, parity);
    for lost in 0_u32..1 << 6 {
        let left: Vec<&LocalPiece> = all.iter().filter(|piece| lost >> piece.index() & 1 == 0).collect();
        if lost.count_ones() == 2 {
            assert_eq!(joined(&content, parity, &left).unwrap(), content, "without {lost:06b}");
        } else if lost.count_ones() == 3 {
            assert!(joined(&content, parity, &left).is_err(), "without {lost:06b}");
        }
    }
}

#[test]
fn bytes_that_differ_from_the_seal_go_into_no_piece() {
    let parity = Parity { data: 2, parity: 1 };
    let mut content = content(20_000, 5);
    let whole = sealed(&content);
    content[19_999] ^= 1;
    let make = |index| cut(&whole, &content, parity, index, &room(0).unwrap());
    assert!(make(0).is_ok(), "the first piece has none of it");
    for index in [1, 2] {
        assert!(matches!(make(index), Err(PeerError::Corrupt { ref peer, .. }) if peer == "this host"));
    }
}

#[test]
fn a_piece_is_the_same_on_every_host() {
    let parity = Parity { data: 3, parity: 1 };
    let content = content(12_345, 9);
    let roots =
        |pieces: Vec<LocalPiece>| pieces.into_iter().map(|piece| piece.shard.root).collect::<Vec<_>>();
    assert_eq!(roots(pieces(&content, parity)), roots(pieces(&content, parity)));
}

#[test]
fn a_piece_of_another_shard_is_not_accepted() {
    let parity = Parity { data: 2, parity: 1 };
    let (one, other) = (content(9_000, 1), content(9_000, 2));
    let (ones, others) = (pieces(&one, parity), pieces(&other, parity));
    assert!(joined(&one, parity, &[&ones[0], &others[1]]).is_err());
    // It is reported as a piece of the first shard, but includes the manifest of the second.
    let lying = LocalPiece {
        shard: ones[1].shard.clone(),
        holder: "liar".to_owned(),
        file: others[1].file.try_clone().unwrap(),
    };
    assert!(whole_of(&lying).is_err());
}

#[test]
fn inconsistent_blocks_are_an_error() {
    let parity = Parity { data: 2, parity: 1 };
    let (even, long) = ([1_u8; 64], [2_u8; 128]);
    for given in [
        vec![(0, &even[..]), (0, &even[..])],
        vec![(0, &even[..]), (9, &even[..])],
        vec![(0, &even[..]), (2, &long[..])],
    ] {
        assert!(restore(parity, &given).is_err(), "{given:?}");
    }
}
