//! One reading of one thing. Absent is not zero.

use serde::{Deserialize, Serialize};

/// One reading of one thing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampled<T> {
    /// It was read.
    Value(T),
    /// This GPU, or this version of the driver, does not have it.
    #[default]
    NotOffered,
    /// It should be there and could not be read.
    Failed(String),
}

impl<T> Sampled<T> {
    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Sampled::Value(value) => Some(value),
            Sampled::NotOffered | Sampled::Failed(_) => None,
        }
    }
}
