//! Restores a shard of which only pieces exist: the needed number of pieces is fetched from their holders in parallel, and the restored
//! shard is compared with its seal before it is moved into place.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use mainstay_checkpoint::inventory::Copy;
use mainstay_checkpoint::parity::{Parity, by_way};
use mainstay_checkpoint::plan::Transfer;

use super::client::Target;
use super::error::PeerError;
use super::receive::ShardWriter;
use super::service::Shared;
use super::store::Store;
use crate::parity::{CodeError, LocalPiece, join, whole_of};
use crate::seal::SealedShard;
use crate::seal::pass_on;

/// Restores the shard of a transfer. Returns the bytes received from peers. `report` receives messages about unusable pieces.
pub(super) fn restore_from_pieces<'a>(
    shared: &Shared,
    landing: &dyn Fn() -> ShardWriter<'a>,
    transfer: &Transfer,
    report: &(dyn Fn(String) + Sync),
) -> Result<u64, PeerError> {
    let mut last = None;
    for way in by_way(&transfer.pieces) {
        // In the order of the plan: data first, the nearest copy of each piece.
        let left: Vec<&Copy> =
            transfer.pieces.iter().filter(|copy| best_cut(copy) == Some(way.parity)).rev().collect();
        let mut gathering =
            Gathering { shared, rank: transfer.rank, parity: way.parity, left, bytes: 0, report };
        match gathering.make(landing) {
            Ok(()) => return Ok(gathering.bytes),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| PeerError::Local("no piece is left".to_owned())))
}

fn best_cut(copy: &Copy) -> Option<Parity> {
    copy.shard.piece.as_ref().map(|piece| piece.parity)
}

/// Maximum number of combinations that are tried if some pieces are wrong: each costs as much as the whole shard.
const MAX_TRIES: u32 = 100;

/// Whether the error means that the pieces do not form the shard.
fn is_of_the_pieces(error: &PeerError) -> bool {
    matches!(error, PeerError::Corrupt { .. } | PeerError::Unreadable { .. })
}

/// All choices of `count` numbers below `of`, in order.
fn choices(all: usize, count: usize) -> impl Iterator<Item = Vec<usize>> {
    let mut next = (count <= all).then(|| (0..count).collect::<Vec<usize>>());
    std::iter::from_fn(move || {
        let now = next.take()?;
        // Increase the last number that can grow; the numbers after it follow consecutively.
        let raised = (0..count).rev().find(|at| now[*at] < all - count + at);
        next = raised.map(|at| {
            let from = now[at] + 1;
            now[..at].iter().copied().chain(from..from + count - at).collect()
        });
        Some(now)
    })
}

/// Pieces of one shard that are being fetched.
struct Gathering<'a> {
    shared: &'a Shared,
    rank: u32,
    parity: Parity,
    /// Copies that were not tried yet, the best last.
    left: Vec<&'a Copy>,
    bytes: u64,
    report: &'a (dyn Fn(String) + Sync),
}

impl<'a> Gathering<'a> {
    fn make<'b>(&mut self, landing: &dyn Fn() -> ShardWriter<'b>) -> Result<(), PeerError> {
        let given = self.gather()?;
        let all: Vec<&LocalPiece> = given.iter().collect();
        let mut failed = match self.land(landing(), &all) {
            Err(error) if is_of_the_pieces(&error) => error,
            other => return other,
        };
        // Each matches its own manifest, but together they are not the shard: one of them is of another shard.
        (self.report)(format!(
            "the pieces of the shard of rank {} do not make it: {failed}; others take their places in turn",
            self.rank
        ));
        let (mut have, mut tried) = (given, 0);
        while let Some(other) = self.next() {
            for rest in choices(have.len(), self.parity.data as usize - 1) {
                let chosen: Vec<&LocalPiece> = rest.iter().map(|at| &have[*at]).chain([&other]).collect();
                let numbers: BTreeSet<u32> = chosen.iter().map(|piece| piece.index()).collect();
                if numbers.len() < chosen.len() {
                    continue;
                }
                match self.land(landing(), &chosen) {
                    Ok(()) => {
                        let left_out = (0..have.len()).filter(|at| !rest.contains(at));
                        self.blame(&left_out.map(|at| &have[at]).collect::<Vec<_>>());
                        return Ok(());
                    }
                    Err(error) if is_of_the_pieces(&error) => failed = error,
                    // For example a full disk: no other choice of pieces helps, and no piece is to blame.
                    other => return other,
                }
                tried += 1;
                if tried == MAX_TRIES {
                    return Err(self.give_up(&have, failed));
                }
            }
            have.push(other);
        }
        Err(self.give_up(&have, failed))
    }

    /// Too many pieces are wrong, and it is unknown which: distrusts all of them for a while, so that an older step is chosen.
    fn give_up(&self, have: &[LocalPiece], failed: PeerError) -> PeerError {
        for piece in have {
            self.shared.distrust(&piece.holder, &piece.shard.root);
        }
        failed
    }

    /// Reports which pieces were left out when the others formed the shard. A single one is known to be wrong; of several,
    /// at least one is.
    fn blame(&self, left_out: &[&LocalPiece]) {
        if let [bad] = left_out {
            self.shared.distrust(&bad.holder, &bad.shard.root);
        }
        let holders: Vec<&str> = left_out.iter().map(|piece| piece.holder.as_str()).collect();
        (self.report)(format!(
            "the shard of rank {} is made without the piece(s) at {}: not all of them are of it",
            self.rank,
            holders.join(", ")
        ));
    }

    /// Fetches the needed number of different pieces, those of a round in parallel.
    fn gather(&mut self) -> Result<Vec<LocalPiece>, PeerError> {
        let mut given: Vec<LocalPiece> = Vec::new();
        while given.len() < self.parity.data as usize {
            let round = self.round(&given);
            if round.is_empty() {
                let few = CodeError::TooFew { left: given.len(), needed: self.parity.data };
                return Err(PeerError::Local(few.to_string()));
            }
            let shared = self.shared;
            let came: Vec<_> = std::thread::scope(|scope| {
                let fetching: Vec<_> =
                    round.iter().map(|copy| scope.spawn(move || fetch(shared, copy))).collect();
                fetching.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
            });
            for (copy, came) in round.into_iter().zip(came) {
                let disorder = || Err(PeerError::Local("a fetching thread crashed".to_owned()));
                given.extend(self.taken(copy, came.unwrap_or_else(|_| disorder())));
            }
        }
        Ok(given)
    }

    /// The next copies of pieces that are still missing, as many as are needed.
    fn round(&mut self, given: &[LocalPiece]) -> Vec<&'a Copy> {
        let mut have: BTreeSet<u32> = given.iter().map(LocalPiece::index).collect();
        let mut round = Vec::new();
        let mut passed = Vec::new();
        while have.len() < self.parity.data as usize {
            let Some(copy) = self.left.pop() else { break };
            let index = copy.shard.piece.as_ref().map_or(0, |piece| piece.index);
            if have.insert(index) { round.push(copy) } else { passed.push(copy) }
        }
        // Other copies of these pieces may still be needed.
        self.left.extend(passed.into_iter().rev());
        round
    }

    /// Fetches one more piece that matches its manifest.
    fn next(&mut self) -> Option<LocalPiece> {
        while let Some(copy) = self.left.pop() {
            let came = fetch(self.shared, copy);
            if let Some(given) = self.taken(copy, came) {
                return Some(given);
            }
        }
        None
    }

    /// Counts the received bytes, or reports why there are none.
    fn taken(&mut self, copy: &Copy, came: Result<(LocalPiece, u64), PeerError>) -> Option<LocalPiece> {
        match came {
            Ok((given, bytes)) => {
                self.bytes += bytes;
                Some(given)
            }
            Err(error) => {
                let holder = &copy.holder;
                if !matches!(error, PeerError::Local(_)) || holder == self.shared.name() {
                    self.shared.distrust(holder, &copy.shard.root);
                }
                (self.report)(format!(
                    "a piece of the shard of rank {} at {holder} cannot be used: {error}; another piece is used if there is one",
                    self.rank
                ));
                None
            }
        }
    }

    /// Restores the shard from these pieces in its place.
    fn land(&self, mut landing: ShardWriter<'_>, given: &[&LocalPiece]) -> Result<(), PeerError> {
        let first = given.first().ok_or_else(|| PeerError::Local("no piece came".to_owned()))?;
        let whole = given.iter().find_map(|piece| whole_of(piece).ok());
        let whole = whole.map_or_else(|| whole_of(first), Ok)?;
        landing.begin(&whole)?;
        join(&whole, self.parity, given, &landing, &|bytes| self.shared.store.scratch(bytes))?;
        landing.finish()
    }
}

/// Fetches one piece into a separate file and verifies it with its manifest. Also returns the bytes received from a peer.
fn fetch(shared: &Shared, copy: &Copy) -> Result<(LocalPiece, u64), PeerError> {
    let mut destination = Destination { store: &shared.store, file: None };
    let is_here = copy.holder == shared.name();
    let bytes = if is_here {
        take(shared, copy, &mut destination)?;
        0
    } else {
        shared.client().get(&copy.holder, &copy.shard.root, &mut destination, shared.settings.streams)?
    };
    let file = destination.file.ok_or_else(|| PeerError::Local("nothing came".to_owned()))?;
    Ok((LocalPiece { shard: copy.shard.clone(), holder: copy.holder.to_string(), file }, bytes))
}

/// Takes a piece that is stored on this host.
fn take(shared: &Shared, copy: &Copy, destination: &mut Destination<'_>) -> Result<(), PeerError> {
    let gone = || PeerError::Local("a piece cannot be opened".to_owned());
    let opened = shared.open(&copy.shard.root).ok_or_else(gone)?;
    let reading = |error| PeerError::Local(format!("reading a piece: {error}"));
    if let Some(chunk) = opened.first_bad().map_err(reading)? {
        return Err(PeerError::Corrupt { peer: "this host".to_owned(), chunk });
    }
    destination.begin(&opened.sealed)?;
    let bytes = 0..opened.sealed.shard.bytes;
    pass_on(&*opened.bytes, bytes, reading, |offset, piece| destination.write(offset, piece))
}

/// The file that receives a piece.
struct Destination<'a> {
    store: &'a Store,
    file: Option<File>,
}

impl Target for Destination<'_> {
    fn begin(&mut self, sealed: &SealedShard) -> Result<(), PeerError> {
        let destination = self.store.scratch(sealed.shard.bytes);
        self.file =
            Some(destination.map_err(|error| PeerError::Local(format!("making room for a piece: {error}")))?);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError> {
        let Some(file) = &self.file else { return Ok(()) };
        file.write_all_at(bytes, offset)
            .map_err(|error| PeerError::Local(format!("receiving a piece: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_returned_exactly_once() {
        let all: Vec<Vec<usize>> = choices(4, 2).collect();
        assert_eq!(all, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        assert_eq!(choices(3, 3).collect::<Vec<_>>(), [[0, 1, 2]]);
        assert_eq!(choices(2, 3).count(), 0);
        assert_eq!(choices(19, 3).collect::<BTreeSet<_>>().len(), 969);
    }
}
