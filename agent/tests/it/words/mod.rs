//! The English lines that these tests look for, in one file per surface. Tests assert states, codes and entries of the
//! journal; a line is here only if it is all that tells what happened. No other test of the agent has words of
//! Mainstay's output, so a reworded line is changed in one place.

pub mod commands;
pub mod orders;
pub mod reasons;
pub mod terminal;
