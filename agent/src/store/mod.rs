//! Floor 2. Data on disk.

pub mod forcing;
pub mod journal;
pub mod kept;
pub mod learned;
