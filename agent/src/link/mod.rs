//! Floor 2. The wire between launcher and agent.
