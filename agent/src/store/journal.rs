//! The journal of entries.
