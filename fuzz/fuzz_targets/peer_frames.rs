//! Frames from another agent: a header survives a round trip or is refused, the chunks of a manifest cover its file,
//! and no inventory makes a step whole that lacks a rank.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_checkpoint::inventory::{Copy, steps};
use mainstay_tier::peer::frame::{MAX_CHUNK, MAX_MESSAGE, SIGNED_BYTES, decode, encode};
use mainstay_tier::peer::{Inventory, SealedShard};

fuzz_target!(|bytes: &[u8]| {
    if let Some(signed) = bytes.first_chunk::<SIGNED_BYTES>()
        && let Ok(header) = decode(signed)
    {
        assert_eq!(&encode(&header), signed);
        assert!(header.length <= MAX_MESSAGE.max(MAX_CHUNK));
    }
    if let Ok(sealed) = SealedShard::of(bytes.to_vec()) {
        let covered: u64 =
            (0..sealed.chunks()).map(|index| sealed.chunk(index).map_or(0, |(_, length, _)| u64::from(length))).sum();
        assert_eq!(covered, sealed.shard.bytes);
        assert!(!sealed.file.contains('/') && sealed.shard.rank < sealed.shard.key.world);
    }
    if let Ok(inventory) = serde_json::from_slice::<Inventory>(bytes) {
        let copies = inventory.copies.into_iter().map(|held| Copy {
            holder: "peer".into(),
            medium: held.medium,
            own: held.own,
            verified: held.verified,
            shard: held.shard,
        });
        for step in steps(&copies.collect::<Vec<_>>(), None) {
            assert!(!step.is_whole() || step.missing(1).is_empty());
            assert!(step.is_whole() || step.least_copies() == 0);
        }
    }
});
