//! The document says what the code does.
