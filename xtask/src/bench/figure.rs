//! Figures with stable names, so that runs can be compared: as a table for people and as JSON for tools.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::stop;

/// One measured figure, alone or compared with a peer.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Figure {
    /// Its stable name, such as `restart.kill_to_step`.
    pub id: String,
    /// The median, unless the name contains p99.
    pub value: f64,
    /// The unit of all its values.
    pub unit: String,
    /// The number of samples.
    pub n: usize,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
    /// The peer that it is compared with, and its version; null if there is none.
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

    /// The same figure, compared with a peer's samples.
    pub fn beside(&self, peer: &str, samples: &[f64]) -> Self {
        self.beside_at(peer, samples, 0.5)
    }

    /// The same figure, compared with this quantile of a peer's samples.
    pub fn beside_at(&self, peer: &str, samples: &[f64], share: f64) -> Self {
        let value = Self::quantile_of(samples, share);
        let ratio = value.filter(|value| *value > 0.0).map(|value| self.value / value);
        Self { peer: Some(peer.into()), peer_value: value, ratio, ..self.clone() }
    }
}

impl Figure {
    /// Its row of the table.
    fn line(&self) -> String {
        let peer = match (&self.peer, self.peer_value, self.ratio) {
            (Some(peer), Some(value), Some(ratio)) => {
                format!("{peer}: {}, ratio {}", short(value), short(ratio))
            }
            (Some(peer), ..) => format!("{peer}: no value"),
            _ => String::new(),
        };
        let (value, min, max) = (short(self.value), short(self.min), short(self.max));
        format!("{:<28} {value:>12} {:<14} {:>5} {min:>12} {max:>12}  {peer}", self.id, self.unit, self.n)
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
    /// Load average of the last minute at the start and the end of the run: other users may be active.
    load: [f64; 2],
}

/// With `--quick`, no measurement of a bench starts after this time, so that the bench ends within three minutes.
const QUICK: Duration = Duration::from_secs(100);

/// All figures of a run. Each is printed and written as soon as it is measured: a run that is stopped loses none.
pub struct Report {
    load_before: f64,
    figures: Vec<Figure>,
    only: Vec<String>,
    file: PathBuf,
    quick: bool,
    /// When the bench that is measured now started.
    since: Instant,
}

impl Report {
    /// Starts a run that measures only the figures whose names start with one of `only` (all, if it is empty), and
    /// writes them to `file`.
    pub fn begin(only: Vec<String>, file: PathBuf, quick: bool) -> Self {
        Self { load_before: load(), figures: Vec::new(), only, file, quick, since: Instant::now() }
    }

    /// The next bench starts.
    pub fn next_bench(&mut self) {
        self.since = Instant::now();
    }

    /// Whether one of these figures is wanted and there is time to measure it.
    pub fn wants(&self, ids: &[&str]) -> bool {
        let wanted = ids.iter().any(|id| self.is_chosen(id));
        let late = self.quick && self.since.elapsed() > QUICK;
        if wanted && late {
            eprintln!("{}: left out: the time of --quick is used up", ids.join(", "));
        }
        wanted && !late && !stop::is_stopping()
    }

    /// The same for figures with this prefix whose names are unknown before they are measured.
    pub fn wants_some_of(&self, family: &str) -> bool {
        let named =
            self.only.iter().any(|only| only.starts_with(family) || family.starts_with(only.as_str()));
        (self.only.is_empty() || named) && (!self.quick || self.since.elapsed() <= QUICK)
    }

    fn is_chosen(&self, id: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| id.starts_with(only.as_str()))
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.figures.is_empty()
    }

    /// The words of `--only` that no measured figure starts with.
    pub fn not_found(&self) -> Vec<&str> {
        let found = |only: &&String| !self.figures.iter().any(|figure| figure.id.starts_with(only.as_str()));
        self.only.iter().filter(found).map(String::as_str).collect()
    }

    /// Adds figures: prints a line for people and writes the file. A figure with a peer replaces the same one
    /// without.
    pub fn add(&mut self, figures: impl IntoIterator<Item = Figure>) {
        let is_new = |figure: &Figure| self.is_chosen(&figure.id) && !self.figures.contains(figure);
        let chosen: Vec<Figure> = figures.into_iter().filter(is_new).collect();
        if chosen.is_empty() {
            return;
        }
        for figure in chosen {
            println!("  {}", figure.line().trim_end());
            self.figures
                .retain(|known| known.id != figure.id || (known.peer.is_some() && known.peer != figure.peer));
            self.figures.push(figure);
        }
        if let Err(error) = self.write() {
            eprintln!("{error:#}");
        }
    }

    /// Adds the figures of a part, or reports why it could not run.
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
        for figure in &self.figures {
            println!("{}", figure.line());
        }
        println!("\n{}", self.file.display());
    }

    /// The file for tools, replaced as a whole.
    fn write(&self) -> Result<()> {
        let whole = serde_json::json!({ "machine": self.machine(), "figures": self.figures });
        let text = serde_json::to_string_pretty(&whole).context("writing the figures as JSON")?;
        let new = self.file.with_extension("new");
        fs::write(&new, text + "\n").with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, &self.file).with_context(|| format!("writing {}", self.file.display()))
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

/// Four significant digits, whatever the size.
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

    /// The names in the file of a report, with their peers.
    fn written(report: &Report) -> Vec<(String, Option<String>)> {
        let text = fs::read_to_string(&report.file).expect("the file");
        let whole: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let text = |of: &serde_json::Value| of.as_str().map(str::to_owned);
        let figures = whole["figures"].as_array().expect("figures");
        figures.iter().map(|of| (text(&of["id"]).expect("a name"), text(&of["peer"]))).collect()
    }

    #[test]
    fn a_figure_is_in_the_file_as_soon_as_it_is_measured_and_only_those_that_are_wanted() {
        let folder = std::env::temp_dir().join(format!("mainstay-figures-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let mut report = Report::begin(vec!["a.b".into(), "x".into()], folder.join("figures.json"), false);
        assert!(report.is_empty());
        assert!(report.wants(&["c.d", "a.b_p99"]) && !report.wants(&["c.d"]));
        let figure = |id: &str| Figure::median(id, "ms", &[2.0]).expect("samples");
        report.add([figure("a.b"), figure("c.d")]);
        assert_eq!(written(&report), [("a.b".to_owned(), None)]);
        assert!(!report.is_empty());
        // The peers are measured later, and replace the figure without one.
        report.add([figure("a.b").beside("torchrun", &[4.0]), figure("a.b").beside("NVRx", &[8.0])]);
        let peer = |name: &str| ("a.b".to_owned(), Some(name.to_owned()));
        assert_eq!(written(&report), [peer("torchrun"), peer("NVRx")]);
        assert_eq!(report.not_found(), ["x"]);
        fs::remove_dir_all(&folder).expect("the folder goes");
    }

    #[test]
    fn a_ratio_is_ours_by_theirs() {
        let figure = Figure::median("a.b", "ms", &[2.0]).expect("samples");
        let beside = figure.beside("torchrun", &[8.0]);
        assert_eq!((beside.peer_value, beside.ratio), (Some(8.0), Some(0.25)));
        assert_eq!(figure.beside("torchrun", &[]).ratio, None);
    }
}
