//! Floor 2. Eyes: what is read from the outside world becomes facts.

pub mod host;
