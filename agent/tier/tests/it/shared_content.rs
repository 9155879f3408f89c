//! Ranks that declare that they save equal bytes have one root over them, regardless of their other content.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::common;

use common::container_of_group;
use mainstay_checkpoint_format::{Identity, Manifest, SharedContent};
use mainstay_tier::seal::seal;

fn sealed(rank: u32, group: &str, state: &[u8]) -> Option<SharedContent> {
    let bytes = container_of_group(rank, group, state);
    let identity = Identity { job: "job".to_owned(), attempt: 0, step: 1, rank, world_size: 12 };
    let manifest = seal(&bytes, bytes.len() as u64, &identity, "run", 1).expect("sealed");
    assert_eq!(Manifest::decode(&manifest.encode()).as_ref(), Ok(&manifest), "it is read as it was written");
    manifest.shared_content
}

#[test]
fn the_same_tensors_have_one_root_on_every_rank_and_a_changed_bit_changes_it() {
    let state: Vec<u8> = (0..9_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let first = sealed(0, "dp", &state);
    assert!(first.is_some());
    assert_eq!(first, sealed(11, "dp", &state), "rank and the rest of its state are its own");
    let mut flipped = state.clone();
    flipped[5 << 20] ^= 1;
    assert_ne!(first, sealed(0, "dp", &flipped));
    assert_eq!(sealed(0, "", &state), None, "who names nobody is compared with nobody");
}
