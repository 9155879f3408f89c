//! What the launcher and its ranks print.

pub(crate) mod growth;
pub(crate) mod prefix;
pub(crate) mod rank_output;
mod screen;
mod sink;
mod terminal;

use rank_output::RankOutput;
pub use terminal::{Duplicate, FollowedFile, LineStyle, Stream, Tail, Terminal, UndisplayedOutput, tail};

/// What the launcher and its ranks print.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) terminal: Terminal,
    /// What ranks write, and when.
    pub(crate) spoken: RankOutput,
}
