//! Floor 5. Configuration: file, environment, flags.
