//! Metrics of dcgm-exporter, for hosts that have nothing else: evidence, never a verdict on a GPU.
//!
//! Its XID gauge shows the last XID forever and does not show that it recurred. After a restart of the host engine it
//! keeps reporting old values. So a change of a fault metric is an event, and the component only shows whether the
//! exporter can be read.

use std::collections::BTreeMap;

use crate::parse::prometheus::{self, Sample};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::report::SensorReport;
use mainstay_model::time::Mono;

/// The component.
const COMPONENT: &str = "dcgm.exporter";

/// Metrics of faults, and their meaning.
const FAULTS: [(&str, &str); 4] = [
    ("DCGM_FI_DEV_XID_ERRORS", "last XID"),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "row remapping failed"),
    ("DCGM_FI_DEV_ROW_REMAP_PENDING", "row remapping pending"),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "rows remapped after uncorrectable errors"),
];

/// The result of reading the exporter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExporterReport {
    /// Its metrics page.
    Page(String),
    /// Why it cannot be read.
    Failed(String),
}

/// Judges an exporter's metrics.
#[derive(Clone, Debug, Default)]
pub struct ExporterJudge {
    /// By GPU and metric; `None` before the first page.
    last: Option<BTreeMap<(String, &'static str), f64>>,
    shown: Option<(HealthState, Mono)>,
    read_at: Option<Mono>,
}

impl ExporterJudge {
    /// Judges the result read at `at`.
    pub fn step(&mut self, at: Mono, report: &ExporterReport) -> SensorReport {
        let page = match report {
            ExporterReport::Failed(why) => return self.unknown(at, format!("it cannot be read: {why}")),
            ExporterReport::Page(page) => page,
        };
        let samples = match prometheus::parse(page) {
            Ok(samples) => samples,
            Err(error) => return self.unknown(at, format!("its page is not understood: {error}")),
        };
        let ours: Vec<&Sample> = samples.iter().filter(|sample| sample.name.starts_with("DCGM_")).collect();
        if ours.is_empty() {
            return self.unknown(at, "its page has no DCGM metrics".to_owned());
        }
        let now = faults(&ours);
        let facts = self.last.as_ref().map(|last| changes(last, &now)).unwrap_or_default();
        let gpus: std::collections::BTreeSet<&str> = ours.iter().map(|sample| gpu_of(sample)).collect();
        let evidence =
            now.iter().filter(|(_, value)| **value != 0.0).map(|((gpu, metric), value)| Evidence {
                source: format!("dcgm-exporter {metric}"),
                reading: format!("GPU {gpu}: {} {value}", metric_description(metric)),
                ..Evidence::default()
            });
        let evidence = evidence.collect();
        self.read_at = Some(at);
        let reason = format!("{} GPUs reported; faults count by the kernel log and NVML", gpus.len());
        self.last = Some(now);
        let component = Component { reason, evidence, ..self.component(HealthState::Healthy, at) };
        SensorReport { components: vec![component], facts }
    }

    fn unknown(&mut self, at: Mono, reason: String) -> SensorReport {
        let component = Component { reason, ..self.component(HealthState::Unknown, at) };
        SensorReport { components: vec![component], facts: Vec::new() }
    }

    fn component(&mut self, state: HealthState, at: Mono) -> Component {
        let since = self.shown.filter(|(shown, _)| *shown == state).map_or(at, |(_, since)| since);
        self.shown = Some((state, since));
        Component { name: COMPONENT.to_owned(), state, read_at: self.read_at, since, ..Component::default() }
    }
}

fn faults(samples: &[&Sample]) -> BTreeMap<(String, &'static str), f64> {
    let fault = |sample: &&Sample| {
        let (metric, _) = FAULTS.iter().find(|(metric, _)| *metric == sample.name)?;
        Some(((gpu_of(sample).to_owned(), *metric), sample.value))
    };
    samples.iter().filter_map(fault).collect()
}

fn gpu_of(sample: &Sample) -> &str {
    sample.labels.get("UUID").or_else(|| sample.labels.get("gpu")).map_or("?", String::as_str)
}

fn metric_description(metric: &str) -> &'static str {
    FAULTS.iter().find(|(name, _)| *name == metric).map_or("", |(_, words)| words)
}

/// Fault metrics that changed since the last page and are not 0.
fn changes(
    last: &BTreeMap<(String, &'static str), f64>,
    now: &BTreeMap<(String, &'static str), f64>,
) -> Vec<Fact> {
    let changed = now.iter().filter(|(key, value)| **value != 0.0 && last.get(*key) != Some(*value));
    changed
        .map(|((gpu, metric), value)| {
            let mut values = BTreeMap::from([("value".to_owned(), value.to_string())]);
            if let Some(before) = last.get(&(gpu.clone(), *metric)) {
                values.insert("before".to_owned(), before.to_string());
            }
            Fact::Observed(Observation {
                component: COMPONENT.to_owned(),
                event: "exporter_changed".to_owned(),
                weight: Weight::Info,
                detail: format!("GPU {gpu}: {} {value}", metric_description(metric)),
                values,
            })
        })
        .collect()
}
