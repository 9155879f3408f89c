//! Floor 3. What is published to readers: the view of the node and the journal.
