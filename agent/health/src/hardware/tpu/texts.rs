//! Texts about TPUs, and the assignment of readings to chips.

use super::driver::DriverReport;
use super::outlier::{Outlier, outliers};
use super::sample::{Chip, ChipHolder, CoreState, Holders, Runtime, RuntimeReply, RuntimeService, Stall};
use mainstay_model::entry::Fact;
use mainstay_model::health::{Evidence, Gauge};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Bytes;

impl RuntimeReply {
    /// Its answer, if it answered.
    pub fn runtime(&self) -> Option<&Runtime> {
        match self {
            RuntimeReply::Reported(runtime) => Some(runtime),
            RuntimeReply::Refused | RuntimeReply::Silent | RuntimeReply::Improper(_) => None,
        }
    }

    fn describe(&self) -> String {
        match self {
            RuntimeReply::Reported(Runtime { supported: Some(metrics), .. }) => {
                format!("it answers; {metrics} metrics")
            }
            RuntimeReply::Reported(_) => "it answers".to_owned(),
            RuntimeReply::Refused => "nothing listens there".to_owned(),
            RuntimeReply::Silent => "no answer within the deadline".to_owned(),
            RuntimeReply::Improper(what) => format!("no proper answer: {what}"),
        }
    }
}

/// libtpu's values for one chip.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Share {
    duty_cycle: Option<f64>,
    hbm_used: Option<u64>,
    hbm_total: Option<u64>,
    bandwidth: Option<f64>,
    idle_seconds: Option<f64>,
}

/// Assigns the services' values to the chips in order: one value per chip, or the same number of values per chip (its
/// cores). Otherwise the assignment is unknown.
pub(super) fn by_chip(runtimes: &[&Runtime], chips: usize) -> Vec<Share> {
    let deal = |values: Vec<f64>, together: fn(&[f64]) -> f64| -> Vec<Option<f64>> {
        let each = values.len().checked_div(chips).unwrap_or(0);
        if each == 0 || each * chips != values.len() {
            return vec![None; chips];
        }
        values.chunks(each).map(|of_one| Some(together(of_one))).collect()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let sum = |values: &[f64]| values.iter().sum::<f64>();
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let floats = |values: fn(&Runtime) -> Vec<f64>| {
        runtimes.iter().flat_map(|runtime| values(runtime)).collect::<Vec<f64>>()
    };
    let duty = deal(floats(|runtime| runtime.duty_cycle.values().copied().collect()), mean);
    let used = deal(floats(|runtime| runtime.hbm_used.values().map(|bytes| *bytes as f64).collect()), sum);
    let total = deal(floats(|runtime| runtime.hbm_total.values().map(|bytes| *bytes as f64).collect()), sum);
    let bandwidth = deal(floats(|runtime| runtime.hbm_bandwidth.values().copied().collect()), mean);
    let idle = deal(floats(|runtime| runtime.idle_seconds.values().copied().collect()), least);
    let at = |values: &[Option<f64>], chip: usize| values.get(chip).copied().flatten();
    (0..chips)
        .map(|chip| Share {
            duty_cycle: at(&duty, chip),
            hbm_used: at(&used, chip).map(|bytes| bytes as u64),
            hbm_total: at(&total, chip).map(|bytes| bytes as u64),
            bandwidth: at(&bandwidth, chip),
            idle_seconds: at(&idle, chip),
        })
        .collect()
}

/// The index among this host's chips of a core's chip. libtpu numbers chips over the whole slice.
pub(super) fn place_of(core: &CoreState, all: &[&CoreState], chips: usize) -> Option<usize> {
    let mut known: Vec<i32> = all.iter().filter_map(|core| core.chip).collect();
    known.sort_unstable();
    known.dedup();
    let place = known.iter().position(|chip| Some(*chip) == core.chip)?;
    (known.len() <= chips).then_some(place)
}

/// Names of the Prometheus metrics for a chip.
pub mod metric {
    /// Share of time in which the TensorCore was busy, in percent.
    pub const DUTY_CYCLE: &str = "mainstay_tpu_duty_cycle_percent";
    /// Memory in use, in bytes.
    pub const HBM_USED: &str = "mainstay_tpu_hbm_used_bytes";
    /// Total memory, in bytes.
    pub const HBM_TOTAL: &str = "mainstay_tpu_hbm_total_bytes";
    /// Share of the memory bandwidth in use, in percent.
    pub const HBM_BANDWIDTH: &str = "mainstay_tpu_hbm_bandwidth_percent";
}

/// The readings as gauges; values that are not reported are absent.
pub(super) fn gauges(share: &Share) -> Vec<Gauge> {
    let readings = [
        (metric::DUTY_CYCLE, share.duty_cycle),
        (metric::HBM_USED, share.hbm_used.map(|bytes| bytes as f64)),
        (metric::HBM_TOTAL, share.hbm_total.map(|bytes| bytes as f64)),
        (metric::HBM_BANDWIDTH, share.bandwidth),
    ];
    readings.into_iter().filter_map(|(metric, value)| Some(Gauge { metric, value: value? })).collect()
}

pub(super) fn readings(share: &Share) -> Vec<String> {
    let mut words = Vec::new();
    words.extend(share.duty_cycle.map(|percent| format!("duty cycle {percent:.0} %")));
    match (share.hbm_used, share.hbm_total) {
        (Some(used), Some(total)) => {
            words.push(format!("HBM {} of {}", Bytes(used).rounded(), Bytes(total).rounded()));
        }
        (Some(used), None) => words.push(format!("HBM {}", Bytes(used).rounded())),
        (None, _) => {}
    }
    words.extend(share.bandwidth.map(|percent| format!("HBM bandwidth {percent:.0} %")));
    words.extend(share.idle_seconds.filter(|seconds| *seconds > 0.0).map(|s| format!("idle for {s:.0} s")));
    words
}

pub(super) fn chip(chip: &Chip, readings: &[String]) -> String {
    let mut words = vec![format!("{} at {}", chip.kind, chip.bus_id()), held_by(&chip.holders)];
    words.extend_from_slice(readings);
    words.join("; ")
}

fn held_by(holders: &Holders) -> String {
    match holders {
        Holders::Partly(known, why) if known.is_empty() => {
            format!("whether a process holds it is unknown: {why}")
        }
        holders => match holders.known() {
            [] => "no process holds it".to_owned(),
            known => format!("held by {}", names(known)),
        },
    }
}

/// "python (4711) and 3 more": a trainer's workers inherit its chips.
fn names(holders: &[ChipHolder]) -> String {
    let Some(first) = holders.first() else { return String::new() };
    let first_holder = format!("{} ({})", first.name, first.pid.0);
    if holders.len() == 1 { first_holder } else { format!("{first_holder} and {} more", holders.len() - 1) }
}

pub(super) fn chip_evidence(chip: &Chip, readings: &[String]) -> Vec<Evidence> {
    let evidence = |source: &str, reading: String| Evidence {
        source: source.to_owned(),
        reading,
        ..Evidence::default()
    };
    let mut found = Vec::new();
    if !chip.nodes.is_empty() {
        found.push(evidence(&chip.nodes.join(", "), held_by(&chip.holders)));
    }
    found.extend(readings.iter().map(|reading| evidence("libtpu", reading.clone())));
    found
}

pub(super) fn service_evidence(service: &RuntimeService) -> Evidence {
    Evidence { source: service.endpoint.clone(), reading: service.answer.describe(), ..Evidence::default() }
}

pub(super) fn answering(services: &[RuntimeService]) -> String {
    let runtimes: Vec<&Runtime> = services.iter().filter_map(|service| service.answer.runtime()).collect();
    let places: Vec<&str> = services.iter().map(|service| service.endpoint.as_str()).collect();
    let cores =
        match runtimes.iter().filter_map(|runtime| runtime.cores.as_ref().map(Vec::len)).sum::<usize>() {
            0 => "it does not report its cores".to_owned(),
            1 => "1 core".to_owned(),
            count => format!("{count} cores"),
        };
    format!("libtpu answers at {}; {cores}", places.join(", "))
}

pub(super) fn idle(services: &[RuntimeService]) -> String {
    let other = services
        .iter()
        .find(|service| matches!(service.answer, RuntimeReply::Improper(_) | RuntimeReply::Silent));
    match other {
        Some(service) => format!(
            "idle: no process holds a chip; at {}, where libtpu would listen: {}",
            service.endpoint,
            service.answer.describe()
        ),
        None => "idle: no process holds a chip".to_owned(),
    }
}

pub(super) fn unanswered(
    now: Mono,
    since: Mono,
    services: &[&RuntimeService],
    chips: &[Chip],
    read: &Result<Vec<Chip>, String>,
) -> String {
    let mut holders: Vec<ChipHolder> = chips.iter().flat_map(|chip| chip.holders.known()).cloned().collect();
    holders.sort_by_key(|holder| holder.pid);
    holders.dedup();
    let who = match (holders.is_empty(), read) {
        (false, _) => format!("chips are held by {}", names(&holders)),
        (true, Err(why)) => format!("which chips there are is unknown ({why})"),
        (true, Ok(chips)) if chips.is_empty() => "it is configured to be asked".to_owned(),
        (true, Ok(_)) => "whether a process holds the chips is unknown".to_owned(),
    };
    let what: Vec<String> = services
        .iter()
        .map(|service| format!("{}: {}", service.endpoint, service.answer.describe()))
        .collect();
    let what = if what.is_empty() { "nothing was asked".to_owned() } else { what.join("; ") };
    match now.since(since) {
        Span(0) => format!("{who}, and libtpu does not answer; {what}"),
        lasting => format!("{who}, and libtpu has not answered for {lasting}; {what}"),
    }
}

pub(super) fn runtime_event(event: &str, weight: Weight, detail: String) -> Fact {
    let component = "tpu.runtime".to_owned();
    Fact::Observed(Observation {
        component,
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}

pub(super) fn outlier_event(outlier: &Outlier, still: Span) -> Fact {
    let component = "tpu.runtime".to_owned();
    let detail = format!("{outlier}; no core has moved for {still}");
    let mut values = std::collections::BTreeMap::from([("core".to_owned(), outlier.core.to_string())]);
    values.extend(outlier.chip.map(|chip| ("chip".to_owned(), chip.to_string())));
    Fact::Observed(Observation {
        component,
        event: "core_outlier".to_owned(),
        weight: Weight::Error,
        detail,
        values,
    })
}

/// The driver logged a problem.
pub(super) fn driver_event(report: &DriverReport) -> Fact {
    Fact::Observed(Observation {
        component: "tpu.runtime".to_owned(),
        event: "driver_log".to_owned(),
        weight: Weight::Error,
        detail: format!("libtpu's driver: {}", report.message),
        values: [("trouble".to_owned(), report.problem.name().to_owned())].into(),
    })
}

/// libtpu detected a stall and wrote its cores' positions to a file.
pub(super) fn stall_event(stall: &Stall) -> Fact {
    let found = match &stall.cores {
        Err(why) => format!("it cannot be read: {why}"),
        Ok(cores) => {
            let named: Vec<(&str, &CoreState)> = cores.iter().map(|core| ("", core)).collect();
            match outliers(&named).as_slice() {
                [] => format!("none of its {} cores is an outlier", cores.len()),
                [one] => one.to_string(),
                [first, others @ ..] => format!("{first}, and {} others", others.len()),
            }
        }
    };
    Fact::Observed(Observation {
        component: "tpu.runtime".to_owned(),
        event: STALL.to_owned(),
        weight: Weight::Error,
        detail: format!("libtpu wrote the stall summary {}: {found}", stall.file),
        values: [("file".to_owned(), stall.file.clone())].into(),
    })
}

/// The event that remembers a stall summary across restarts; its value `file` is the file name.
pub const STALL: &str = "stall_summary";
