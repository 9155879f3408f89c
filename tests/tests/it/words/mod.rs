//! The lines of the launcher's terminal that scenarios wait for, where no entry of a journal tells the same: the job
//! has no journal yet, or the journal's file system does not answer. Other texts are in snapshots.

pub mod terminal;
