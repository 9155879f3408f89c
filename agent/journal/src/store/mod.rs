//! Data on disk.

pub mod journal;
pub mod learned;
pub mod sync_thread;
pub mod value_file;
