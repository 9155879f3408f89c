//! The messages as JSON for scripts: names as in the API, times as RFC 3339 in UTC, durations in seconds, enums by
//! their names without the prefix. Unset fields are absent. Documented in `docs/reference/cli.md`.

use prost_types::{Duration, Timestamp};
use serde::Serializer;

/// The version of the JSON documents of commands, of `/v1` and of files, as their `schema_version`. It changes when a field
/// is renamed or removed, or means something else; fields are added without a change.
pub const SCHEMA_VERSION: u32 = 1;

/// A document with its `schema_version`.
pub fn versioned(mut document: serde_json::Value) -> serde_json::Value {
    if let Some(fields) = document.as_object_mut() {
        fields.insert("schema_version".to_owned(), SCHEMA_VERSION.into());
    }
    document
}

/// An enum of the API.
pub trait ApiEnum: TryFrom<i32> + Default {
    /// Its name without the prefix: `HEALTH_STATE_DEGRADED` is `DEGRADED`.
    fn name(self) -> &'static str;
}

include!(concat!(env!("OUT_DIR"), "/enums.rs"));

/// None for a time outside the calendar.
pub fn point(time: &Timestamp) -> Option<jiff::Timestamp> {
    jiff::Timestamp::new(time.seconds, time.nanos).ok()
}

/// A duration in seconds.
pub fn seconds(duration: &Duration) -> f64 {
    duration.seconds as f64 + f64::from(duration.nanos) / 1e9
}

pub(crate) fn name<E: ApiEnum, S: Serializer>(value: &i32, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(E::try_from(*value).unwrap_or_default().name())
}

pub(crate) fn time<S: Serializer>(time: &Option<Timestamp>, to: S) -> Result<S::Ok, S::Error> {
    let point = time.as_ref().and_then(point);
    to.serialize_str(&point.map(|point| format!("{point:.9}")).unwrap_or_default())
}

pub(crate) fn span<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(duration.as_ref().map_or(0.0, seconds))
}
