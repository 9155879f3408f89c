//! Serializes numbers as their bits: JSON has no NaN and no infinity, and a loss may be either.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(super) fn serialize<S: Serializer>(number: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
    number.map(f64::to_bits).serialize(to)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<u64>::deserialize(from)?.map(f64::from_bits))
}
