//! The English lines that scenarios look for, in one file per surface. Scenarios assert entries of the journal, `--json`
//! and exit statuses; a line is here only if it is all that tells what happened. No other file of the scenarios has words
//! of Mainstay's output, so a reworded line is changed in one place.

pub mod commands;
pub mod terminal;
