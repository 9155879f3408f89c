//! For which shards a host has memory made ready before they come: new pages take longer than the wire.

use super::inventory::{Copy, StepState, steps};

/// The sizes of the shards that may be sent to `host` soon, the largest first.
///
/// A host on which no rank has saved anything stands by to take another one's place: it gets a step of the run that has most to bring.
/// One on which ranks have memory `reserved` for so many bytes each, and that holds nothing for others yet, gets about as much of its
/// peers as it will send them. Every other one has memory of older replicas to use again.
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
