//! The devices as metrics of OpenTelemetry's conventions for hardware (`hw.*`). A value that was not read has no point.

use mainstay_health::hardware::gpu::GpuView;
use mainstay_model::component_id::ComponentId;
use mainstay_model::health::HealthState;
use mainstay_model::time::Stamp;
use mainstay_proto::otlp::common::v1::KeyValue;
use mainstay_proto::otlp::metrics::v1::metric::Data;
use mainstay_proto::otlp::metrics::v1::number_data_point::Value;
use mainstay_proto::otlp::metrics::v1::{AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum};

use super::{text, unix_nanos};
use crate::convert::device::device;
use crate::node::NodeView;

/// All metrics of a host. `started`: when this program started, from which sums count.
pub fn metrics(view: &NodeView, started: Stamp, now: Stamp) -> Vec<Metric> {
    let mut points =
        Points { started: unix_nanos(started.wall), now: unix_nanos(now.wall), ..Points::default() };
    for (name, component) in &view.components {
        let Some(kind) = kind(ComponentId::parse(name)) else { continue };
        points.status(name, kind, component.state);
    }
    for gpu in view.gpus.iter() {
        points.gpu(gpu, now);
    }
    points.metrics()
}

/// The kind of hardware that a component is; none if it is a part of the operating system.
fn kind(id: ComponentId<'_>) -> Option<&'static str> {
    match id {
        ComponentId::Gpu(_) | ComponentId::Tpu(_) => Some("gpu"),
        ComponentId::Port(_) | ComponentId::Interface(_) | ComponentId::NvSwitch(_) => Some("network"),
        ComponentId::Gpus(_) | ComponentId::NvLink(_) | ComponentId::Host(_) | ComponentId::Other(_) => None,
    }
}

/// The points of each metric.
#[derive(Default)]
struct Points {
    started: u64,
    now: u64,
    status: Vec<NumberDataPoint>,
    errors: Vec<NumberDataPoint>,
    temperature: Vec<NumberDataPoint>,
    power: Vec<NumberDataPoint>,
    utilization: Vec<NumberDataPoint>,
    memory_limit: Vec<NumberDataPoint>,
    memory_usage: Vec<NumberDataPoint>,
    memory_utilization: Vec<NumberDataPoint>,
}

impl Points {
    fn point(&self, attributes: Vec<KeyValue>, value: Value) -> NumberDataPoint {
        NumberDataPoint {
            attributes,
            start_time_unix_nano: self.started,
            time_unix_nano: self.now,
            value: Some(value),
            ..NumberDataPoint::default()
        }
    }

    /// One point for each state, which is 1 for the present one. What could not be read is `unknown`, never `ok`.
    fn status(&mut self, name: &str, kind: &str, state: HealthState) {
        const STATES: [(&str, HealthState); 4] = [
            ("ok", HealthState::Healthy),
            ("degraded", HealthState::Degraded),
            ("failed", HealthState::Unhealthy),
            ("unknown", HealthState::Unknown),
        ];
        for (word, of) in STATES {
            let attributes = vec![text("hw.id", name), text("hw.type", kind), text("hw.state", word)];
            let point = self.point(attributes, Value::AsInt((of == state).into()));
            self.status.push(point);
        }
    }

    fn gpu(&mut self, gpu: &GpuView, now: Stamp) {
        let device = device(gpu, now);
        let of = |more: &[(&str, &str)]| {
            let mut attributes = vec![text("hw.id", device.component.clone()), text("hw.type", "gpu")];
            let known = [("hw.model", Some(&device.model)), ("hw.serial_number", device.serial.as_ref())];
            let known = known.into_iter().filter_map(|(key, value)| Some((key, value?.as_str())));
            let known = known.filter(|(_, value)| !value.is_empty());
            attributes.extend(known.chain(more.iter().copied()).map(|(key, value)| text(key, value)));
            attributes
        };
        let whole = |value: u64| Value::AsInt(i64::try_from(value).unwrap_or(i64::MAX));
        for (kind, count) in [("corrected", device.ecc_corrected), ("uncorrected", device.ecc_uncorrected)] {
            let point = count.map(|count| self.point(of(&[("error.type", kind)]), whole(count)));
            self.errors.extend(point);
        }
        let gpu_core = [("hw.sensor_location", "gpu")];
        let memory = [("hw.sensor_location", "memory")];
        for (place, degrees) in [(gpu_core, device.temperature), (memory, device.memory_temperature)] {
            let point = degrees.map(|degrees| self.point(of(&place), Value::AsDouble(degrees.into())));
            self.temperature.extend(point);
        }
        let power = device.power.map(|watts| self.point(of(&[]), Value::AsDouble(watts)));
        self.power.extend(power);
        let busy = device.utilization.map(|percent| f64::from(percent) / 100.0);
        let busy = busy.map(|share| self.point(of(&[("hw.gpu.task", "general")]), Value::AsDouble(share)));
        self.utilization.extend(busy);
        let limit = device.memory_total.map(|bytes| self.point(of(&[]), whole(bytes)));
        self.memory_limit.extend(limit);
        let usage = device.memory_used.map(|bytes| self.point(of(&[]), whole(bytes)));
        self.memory_usage.extend(usage);
        if let (Some(used), Some(total)) =
            (device.memory_used, device.memory_total.filter(|total| *total > 0))
        {
            let share = self.point(of(&[]), Value::AsDouble(used as f64 / total as f64));
            self.memory_utilization.push(share);
        }
    }

    fn metrics(self) -> Vec<Metric> {
        let sum = |points, is_monotonic| {
            let aggregation_temporality = AggregationTemporality::Cumulative.into();
            Data::Sum(Sum { data_points: points, aggregation_temporality, is_monotonic })
        };
        let gauge = |points| Data::Gauge(Gauge { data_points: points });
        let all = [
            ("hw.status", "1", !self.status.is_empty(), sum(self.status, false)),
            ("hw.errors", "{error}", !self.errors.is_empty(), sum(self.errors, true)),
            ("hw.temperature", "Cel", !self.temperature.is_empty(), gauge(self.temperature)),
            ("hw.power", "W", !self.power.is_empty(), gauge(self.power)),
            ("hw.gpu.utilization", "1", !self.utilization.is_empty(), gauge(self.utilization)),
            ("hw.gpu.memory.limit", "By", !self.memory_limit.is_empty(), sum(self.memory_limit, false)),
            ("hw.gpu.memory.usage", "By", !self.memory_usage.is_empty(), sum(self.memory_usage, false)),
            (
                "hw.gpu.memory.utilization",
                "1",
                !self.memory_utilization.is_empty(),
                gauge(self.memory_utilization),
            ),
        ];
        let metric = |(name, unit, _, data): (&str, &str, bool, Data)| Metric {
            name: name.to_owned(),
            unit: unit.to_owned(),
            data: Some(data),
            ..Metric::default()
        };
        all.into_iter().filter(|(_, _, known, _)| *known).map(metric).collect()
    }
}
