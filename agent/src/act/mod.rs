//! Floor 2. Hands: processes are started, watched and stopped, their output is kept.
