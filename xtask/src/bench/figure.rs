//! Figures with stable names, so that runs can be compared: as a table for people and as JSON for tools.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// One measured figure, or one comparison of it with a peer.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Figure {
    /// Its stable name, such as `restart.kill_to_step`.
    pub id: String,
    /// The median, unless the name says p99.
    pub value: f64,
    /// The unit of all its values.
    pub unit: String,
    /// How many samples it is made of.
    pub n: usize,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
    /// With whom it is compared, with the version; null where there is nobody.
    pub peer: Option<String>,
    /// The peer's value of the same kind, from the same run.
    pub peer_value: Option<f64>,
    /// Ours divided by the peer's.
    pub ratio: Option<f64>,
}

impl Figure {
    /// The median of samples; none without samples.
    pub fn median(id: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        Self::at(id, unit, samples, 0.5)
    }

    /// The value that 99 of 100 samples do not exceed.
    pub fn p99(id: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        Self::at(id, unit, samples, 0.99)
    }

    /// The value that 95 of 100 samples do not exceed.
    pub fn p95(id: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        Self::at(id, unit, samples, 0.95)
    }

    /// The value that this share of samples does not exceed; none without samples.
    pub fn quantile_of(samples: &[f64], share: f64) -> Option<f64> {
        let sorted = sorted(samples);
        (!sorted.is_empty()).then(|| quantile(&sorted, share))
    }

    fn at(id: &str, unit: &str, samples: &[f64], share: f64) -> Option<Self> {
        let sorted = sorted(samples);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Self {
            id: id.into(),
            value: quantile(&sorted, share),
            unit: unit.into(),
            n: samples.len(),
            min,
            max,
            peer: None,
            peer_value: None,
            ratio: None,
        })
    }

    /// The same figure beside a peer's samples.
    pub fn beside(&self, peer: &str, samples: &[f64]) -> Self {
        self.beside_at(peer, samples, 0.5)
    }

    /// The same figure beside that value of a peer's samples which this share does not exceed.
    pub fn beside_at(&self, peer: &str, samples: &[f64], share: f64) -> Self {
        let value = Self::quantile_of(samples, share);
        let ratio = value.filter(|value| *value > 0.0).map(|value| self.value / value);
        Self { peer: Some(peer.into()), peer_value: value, ratio, ..self.clone() }
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Of sorted samples: the mean of the two in the middle for the median of an even number, else the nearest rank.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let n = sorted.len();
    if share == 0.5 && n.is_multiple_of(2) {
        return (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0;
    }
    let rank = (share * n as f64).ceil() as usize;
    sorted[rank.clamp(1, n) - 1]
}

/// The machine the figures were taken on.
#[derive(Clone, Debug, Serialize)]
struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
    /// Load average of the last minute when the run began and when it ended: others may be at work here.
    load: [f64; 2],
}

/// All figures of a run.
pub struct Report {
    load_before: f64,
    figures: Vec<Figure>,
}

impl Report {
    /// Begins a run.
    pub fn begin() -> Self {
        Self { load_before: load(), figures: Vec::new() }
    }

    /// Takes in what was measured.
    pub fn add(&mut self, figures: impl IntoIterator<Item = Figure>) {
        self.figures.extend(figures);
    }

    /// A part that gave its figures, or could not run and says why.
    pub fn part(&mut self, name: &str, measured: Result<Vec<Figure>>) {
        match measured {
            Ok(figures) => self.add(figures),
            Err(error) => eprintln!("{name}: left out: {error:#}"),
        }
    }

    /// The table for people.
    pub fn print(&self) {
        println!();
        println!(
            "{:<28} {:>12} {:<14} {:>5} {:>12} {:>12}  peer",
            "figure", "value", "unit", "n", "min", "max"
        );
        for f in &self.figures {
            let peer = match (&f.peer, f.peer_value, f.ratio) {
                (Some(peer), Some(value), Some(ratio)) => {
                    format!("{peer}: {}, ratio {}", short(value), short(ratio))
                }
                (Some(peer), ..) => format!("{peer}: no value"),
                _ => String::new(),
            };
            let (value, min, max) = (short(f.value), short(f.min), short(f.max));
            println!("{:<28} {value:>12} {:<14} {:>5} {min:>12} {max:>12}  {peer}", f.id, f.unit, f.n);
        }
    }

    /// The file for tools.
    pub fn write(&self, path: &Path) -> Result<()> {
        let whole = serde_json::json!({ "machine": self.machine(), "figures": self.figures });
        let text = serde_json::to_string_pretty(&whole).context("writing the figures as JSON")?;
        fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }

    fn machine(&self) -> Machine {
        let cpuinfo = read("/proc/cpuinfo");
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_string())
        };
        let memory = after(&read("/proc/meminfo"), "MemTotal");
        let kib: Option<f64> = memory.and_then(|text| text.split_whitespace().next()?.parse().ok());
        Machine {
            cpu: after(&cpuinfo, "model name").unwrap_or_else(|| "unknown".into()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: (kib.unwrap_or(0.0) / 1024.0 / 1024.0 * 10.0).round() / 10.0,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            load: [self.load_before, load()],
        }
    }
}

fn load() -> f64 {
    read("/proc/loadavg").split_whitespace().next().and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Four digits that matter, whatever the size.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_made_of_its_samples() {
        let figure = Figure::median("a.b", "ms", &[3.0, 1.0, 2.0, 10.0]).expect("samples");
        assert_eq!((figure.value, figure.n, figure.min, figure.max), (2.5, 4, 1.0, 10.0));
        let many: Vec<f64> = (1..=1000).map(f64::from).collect();
        assert_eq!(Figure::p99("a.p99", "ms", &many).expect("samples").value, 990.0);
        assert_eq!(Figure::median("a.b", "ms", &[]), None);
    }

    #[test]
    fn a_ratio_is_ours_by_theirs() {
        let figure = Figure::median("a.b", "ms", &[2.0]).expect("samples");
        let beside = figure.beside("torchrun", &[8.0]);
        assert_eq!((beside.peer_value, beside.ratio), (Some(8.0), Some(0.25)));
        assert_eq!(figure.beside("torchrun", &[]).ratio, None);
    }
}
