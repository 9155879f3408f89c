//! Checkpoints in durable storage: a directory, and S3 with the feature `cloud`.
//!
//! One executable for all of them: each module is a subject.

#[cfg(feature = "cloud")]
mod s3;
mod storage;
