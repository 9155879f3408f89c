//! Entries of the journal in a binary message are JSON: their kind is one of their fields, which postcard cannot read.

use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Serializes a value as the bytes of its JSON.
///
/// # Errors
/// It has no JSON, or the serializer fails.
pub fn serialize<T: Serialize, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_bytes(&serde_json::to_vec(value).map_err(S::Error::custom)?)
}

/// Deserializes a value from the bytes of its JSON.
///
/// # Errors
/// They are not the JSON of such a value.
pub fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    serde_json::from_slice(<&[u8]>::deserialize(from)?).map_err(D::Error::custom)
}
