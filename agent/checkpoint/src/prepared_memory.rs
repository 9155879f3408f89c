//! Selects the shards for which a host prepares memory in advance: allocating new pages takes longer than the transfer.

use super::inventory::{Copy, StepState, steps};

/// The sizes of the shards that may be sent to `host` soon, the largest first.
///
/// A host on which no rank has saved anything is a spare: it prepares for the largest whole step. A host whose ranks
/// have memory `reserved` (bytes for each rank), and that stores nothing for others yet, receives about as much from
/// its peers as it will send to them. All other hosts reuse the memory of older replicas.
pub fn expected(copies: &[Copy], host: &str, reserved: &[u64], replicas: usize) -> Vec<u64> {
    let here = |copy: &&Copy| copy.holder == host;
    let mut sizes = if !reserved.is_empty() {
        let holds_nothing = !copies.iter().filter(here).any(|copy| !copy.own);
        if holds_nothing { reserved.repeat(replicas) } else { Vec::new() }
    } else if copies.iter().filter(here).any(|copy| copy.own) {
        Vec::new()
    } else {
        let whole = steps(copies, None).into_iter().filter(StepState::is_whole);
        whole
            .max_by_key(|state| (state.bytes(), state.key.step))
            .map(|state| state.sizes())
            .unwrap_or_default()
    };
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes
}
