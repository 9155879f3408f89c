//! Floor 2. What is kept on disk.

pub mod forcing;
pub mod journal;
pub mod kept;
pub mod learned;
