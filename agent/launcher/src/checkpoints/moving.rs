//! The memory for checkpoints while this host gets other ranks.

use std::ops::Range;

use mainstay_model::id::Attempt;
use mainstay_recovery::protocol::Seat;
use mainstay_tier::pool::{PoolError, PoolOwner};
use tokio::task::JoinHandle;

/// The memory for checkpoints on its way to other ranks.
#[derive(Debug)]
pub(crate) struct Moving {
    attempt: Attempt,
    seat: Seat,
    /// The new pool owner, and messages for people about the old one.
    task: JoinHandle<(Result<PoolOwner, PoolError>, Vec<String>)>,
}

/// The result of a move.
#[derive(Debug)]
pub(crate) struct Moved {
    pub(crate) attempt: Attempt,
    pub(crate) seat: Seat,
    pub(crate) pool_owner: Result<PoolOwner, String>,
    pub(crate) messages: Vec<String>,
}

impl Moving {
    /// Starts the move: what the former ranks have in memory goes to the disk.
    pub(crate) fn begin(attempt: Attempt, seat: Seat, pool_owner: PoolOwner, ranks: Range<u32>) -> Moving {
        let world = seat.world_size;
        Moving { attempt, seat, task: tokio::task::spawn_blocking(move || pool_owner.move_to(world, ranks)) }
    }

    /// Waits for its end.
    pub(crate) async fn done(&mut self) -> Moved {
        let (pool_owner, messages) = match (&mut self.task).await {
            Ok((pool_owner, messages)) => (pool_owner.map_err(|error| error.to_string()), messages),
            Err(error) => (Err(error.to_string()), Vec::new()),
        };
        Moved { attempt: self.attempt, seat: self.seat.clone(), pool_owner, messages }
    }
}

/// Waits for the end of a move; waits forever if nothing moves.
pub(crate) async fn next_moved(moving: Option<&mut Moving>) -> Moved {
    match moving {
        Some(moving) => moving.done().await,
        None => std::future::pending().await,
    }
}
