//! What a collector of OpenTelemetry receives: the devices as metrics, and a trace for each failure of a job.

pub mod incidents;
pub mod metrics;

use mainstay_proto::otlp::common::v1::any_value::Value;
use mainstay_proto::otlp::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use mainstay_proto::otlp::resource::v1::Resource;

/// The source of all that is sent: this program on this host.
pub fn resource(host: &str, version: &str) -> Resource {
    let attributes =
        vec![text("service.name", "mainstay"), text("service.version", version), text("host.name", host)];
    Resource { attributes, ..Resource::default() }
}

/// The part of the program that measured.
pub fn scope(version: &str) -> InstrumentationScope {
    InstrumentationScope {
        name: "mainstay".to_owned(),
        version: version.to_owned(),
        ..InstrumentationScope::default()
    }
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

/// A number. Attributes have signed ones; no count here is larger.
fn number(key: &str, value: impl Into<u64>) -> KeyValue {
    attribute(key, Value::IntValue(i64::try_from(value.into()).unwrap_or(i64::MAX)))
}

/// Nanoseconds of the wall clock. Times before 1970 do not occur.
fn unix_nanos(wall: mainstay_model::time::Wall) -> u64 {
    u64::try_from(wall.0).unwrap_or(0)
}
