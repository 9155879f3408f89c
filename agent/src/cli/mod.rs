//! Floor 6. How people ask.
