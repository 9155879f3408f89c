//! Floor 3. The shell of the agent: the one task that owns what the agent knows.
