//! Figures with stable names, so that runs can be compared: as a table for people and as JSON for tools.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fs_err as fs;
use procfs::{Current, LoadAverage, Meminfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::stop;

/// One measured figure, alone or compared with a peer.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Figure {
    /// Its stable name, such as `restart.kill_to_step`.
    pub id: String,
    /// The median, unless the name contains p99.
    pub value: f64,
    /// The unit of all its values.
    pub unit: String,
    pub n: usize,
    pub min: f64,
    pub max: f64,
    /// The peer that it is compared with, and its version; null if there is none.
    pub peer: Option<String>,
    /// The peer's value of the same kind, from the same run.
    pub peer_value: Option<f64>,
    pub ratio: Option<f64>,
}

impl Figure {
    /// The value that this share of samples does not exceed, the median for a half; none without samples. A
    /// sample that is not a number was not measured.
    pub fn at(share: f64, id: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.iter().copied().filter(|sample| !sample.is_nan()).collect();
        sorted.sort_by(f64::total_cmp);
        let (n, min, max) = (sorted.len(), *sorted.first()?, *sorted.last()?);
        Some(Self { min, max, ..Self::one(id, unit, quantile(&sorted, share), n) })
    }

    /// The median of samples; none without samples.
    pub fn median(id: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        Self::at(0.5, id, unit, samples)
    }

    /// A value of `n` samples that has no spread.
    pub fn one(id: &str, unit: &str, value: f64, n: usize) -> Self {
        let (id, unit) = (id.to_owned(), unit.to_owned());
        Self { id, value, unit, n, min: value, max: value, peer: None, peer_value: None, ratio: None }
    }

    /// The same figure, compared with a peer's value.
    pub fn beside(self, peer: &str, value: Option<f64>) -> Self {
        let ratio = value.filter(|value| *value > 0.0).map(|value| self.value / value);
        Self { peer: Some(peer.into()), peer_value: value, ratio, ..self }
    }

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

/// Of sorted samples: the mean of the two in the middle for the median of an even number, else the nearest rank.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let n = sorted.len();
    if share == 0.5 && n.is_multiple_of(2) {
        return (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0;
    }
    let rank = (share * n as f64).ceil() as usize;
    sorted[rank.clamp(1, n) - 1]
}

/// A figure of many measurements: its name, its unit, and what it shows of one of them.
pub struct Of<T> {
    id: String,
    unit: &'static str,
    share: f64,
    of: Box<dyn Fn(&T) -> f64>,
}

impl<T: 'static> Of<T> {
    /// The median. What is not a number was not measured.
    pub fn median(id: impl Into<String>, unit: &'static str, of: impl Fn(&T) -> f64 + 'static) -> Of<T> {
        Of { id: id.into(), unit, share: 0.5, of: Box::new(of) }
    }

    /// The value that this share of the measurements does not exceed.
    pub fn at(share: f64, id: impl Into<String>, unit: &'static str, of: fn(&T) -> f64) -> Of<T> {
        Of { share, ..Of::median(id, unit, of) }
    }

    fn figure(&self, measured: &[T]) -> Option<Figure> {
        Figure::at(self.share, &self.id, self.unit, &measured.iter().map(&self.of).collect::<Vec<f64>>())
    }
}

impl<const N: usize> Of<[f64; N]> {
    /// The medians of measurements that are a row of numbers: a name and a unit for each.
    pub fn each(figures: [(&str, &'static str); N]) -> Vec<Of<[f64; N]>> {
        let of = |(place, (id, unit))| Of::median(id, unit, move |row: &[f64; N]| row[place]);
        figures.into_iter().enumerate().map(of).collect()
    }
}

impl Of<f64> {
    /// Milliseconds: the value that 99 of 100 do not exceed, `ID_p99`, and the median.
    pub fn latency(id: &str) -> Vec<Of<f64>> {
        vec![Of::at(0.99, format!("{id}_p99"), "ms", |ms| *ms), Of::median(id, "ms", |ms| *ms)]
    }
}

impl Of<Value> {
    /// The median of a field of JSON objects.
    pub fn field(field: &'static str, id: &str, unit: &'static str) -> Of<Value> {
        Of::median(id, unit, move |run: &Value| run[field].as_f64().unwrap_or(f64::NAN))
    }
}

/// Measurements of ours, compared with those of each peer.
pub struct Comparison<T> {
    pub figures: Vec<Of<T>>,
    pub ours: Vec<T>,
    pub peers: Vec<(String, Vec<T>)>,
}

impl<T: 'static> Comparison<T> {
    pub fn of(figures: Vec<Of<T>>) -> Comparison<T> {
        Comparison { figures, ours: Vec::new(), peers: Vec::new() }
    }

    pub fn ids(&self) -> Vec<&str> {
        self.figures.iter().map(|of| of.id.as_str()).collect()
    }

    /// Adds measurements of ours, or of a peer.
    pub fn take(&mut self, peer: Option<&str>, measured: Vec<T>) {
        match (peer, self.peers.iter_mut().find(|(name, _)| Some(name.as_str()) == peer)) {
            (None, _) => self.ours.extend(measured),
            (_, Some((_, known))) => known.extend(measured),
            (Some(peer), None) => self.peers.push((peer.to_owned(), measured)),
        }
    }

    /// Our figures alone if there is no peer, else compared with each that has a value.
    pub fn figures(&self) -> Vec<Figure> {
        let mut all = Vec::new();
        for of in &self.figures {
            let Some(figure) = of.figure(&self.ours) else { continue };
            let theirs =
                self.peers.iter().filter_map(|(peer, theirs)| Some((peer, of.figure(theirs)?.value)));
            let beside: Vec<Figure> =
                theirs.map(|(peer, value)| figure.clone().beside(peer, Some(value))).collect();
            all.extend(if beside.is_empty() { vec![figure] } else { beside });
        }
        all
    }
}

/// With `--quick`, no measurement of a bench starts after this time, so that the bench ends within three
/// minutes.
const QUICK: Duration = Duration::from_secs(100);

/// All figures of a run. Each is printed and written as soon as it is measured: a run that is stopped loses
/// none.
pub struct Report {
    load_before: f32,
    figures: Vec<Figure>,
    only: Vec<String>,
    file: PathBuf,
    quick: bool,
    /// When the bench that is measured now started, and how often figures have been added in it.
    since: Instant,
    added: usize,
}

impl Report {
    /// Starts a run that measures only the figures whose names start with one of `only` (all, if it is empty),
    /// and writes them to `file`.
    pub fn begin(only: Vec<String>, file: PathBuf, quick: bool) -> Self {
        let (figures, since) = (Vec::new(), Instant::now());
        Self { load_before: load(), figures, only, file, quick, since, added: 0 }
    }

    /// The next bench starts: everything that it needs is built.
    pub fn next_bench(&mut self) {
        (self.since, self.added) = (Instant::now(), 0);
    }

    /// Whether the bench that is measured now lacks any figure, although all are wanted.
    pub fn has_nothing(&self) -> bool {
        self.added == 0 && self.only.is_empty()
    }

    /// Whether one of these figures is wanted and there is time to measure it.
    pub fn wants(&self, ids: &[&str]) -> bool {
        let wanted = ids.iter().any(|id| self.is_chosen(id));
        if wanted && !self.has_time() {
            eprintln!("{}: left out: the time of --quick is used up", ids.join(", "));
        }
        wanted && self.has_time()
    }

    /// The same for figures with one of these prefixes whose names are unknown before they are measured.
    pub fn wants_some_of(&self, families: &[&str]) -> bool {
        let below = |family: &&str| self.only.iter().any(|only| only.starts_with(family));
        self.wants(families) || (families.iter().any(below) && self.has_time())
    }

    fn has_time(&self) -> bool {
        !(stop::is_stopping() || self.quick && self.since.elapsed() > QUICK)
    }

    fn is_chosen(&self, id: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| id.starts_with(only.as_str()))
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
        self.added += chosen.len();
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

    pub fn print(&self) {
        println!(
            "\n{:<28} {:>12} {:<14} {:>5} {:>12} {:>12}  peer",
            "figure", "value", "unit", "n", "min", "max"
        );
        for figure in &self.figures {
            println!("{}", figure.line());
        }
        println!("\n{}", self.file.display());
    }

    /// The file for tools, replaced as a whole. The load of the machine, of which other users may be active, is
    /// that at the start and now.
    fn write(&self) -> Result<()> {
        let cpu = procfs::CpuInfo::current().ok();
        let cpu = cpu.and_then(|cpu| cpu.model_name(0).map(str::to_owned));
        let memory = Meminfo::current().map_or(0.0, |memory| memory.mem_total as f64 / f64::from(1 << 30));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let machine = serde_json::json!({
            "cpu": cpu.unwrap_or_else(|| "unknown".into()),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "memory_gib": (memory * 10.0).round() / 10.0,
            "kernel": kernel.trim(),
            "load": [self.load_before, load()],
        });
        let whole = serde_json::json!({ "machine": machine, "figures": self.figures });
        let new = self.file.with_extension("new");
        fs::write(&new, serde_json::to_string_pretty(&whole).context("the figures as JSON")? + "\n")?;
        Ok(fs::rename(&new, &self.file)?)
    }
}

fn load() -> f32 {
    LoadAverage::current().map_or(0.0, |load| load.one)
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
        assert_eq!(Figure::at(0.99, "a.p99", "ms", &many).expect("samples").value, 990.0);
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
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("figures.json");
        let mut report = Report::begin(vec!["a.b".into(), "x".into()], file, false);
        assert!(report.wants(&["c.d", "a.b_p99"]) && !report.wants(&["c.d"]));
        let figure = |id: &str| Figure::median(id, "ms", &[2.0]).expect("samples");
        report.add([figure("a.b"), figure("c.d")]);
        assert_eq!(written(&report), [("a.b".to_owned(), None)]);
        // The peers are measured later, and replace the figure without one.
        let beside = [("torchrun", 4.0), ("NVRx", 8.0)];
        report.add(beside.map(|(peer, value)| figure("a.b").beside(peer, Some(value))));
        let peer = |name: &str| ("a.b".to_owned(), Some(name.to_owned()));
        assert_eq!(written(&report), [peer("torchrun"), peer("NVRx")]);
        assert_eq!(report.not_found(), ["x"]);
        assert!(report.wants_some_of(&["a"]) && !report.wants_some_of(&["b"]));
    }

    #[test]
    fn a_bench_without_a_figure_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut report = Report::begin(Vec::new(), folder.path().join("figures.json"), false);
        report.add(Figure::median("a", "ms", &[2.0]));
        assert!(!report.has_nothing());
        report.next_bench();
        assert!(report.has_nothing());
    }

    #[test]
    fn a_ratio_is_ours_by_theirs() {
        let mut comparison = Comparison::of(vec![
            Of::median("a", "ms", |of: &f64| *of),
            Of::median("b", "ms", |of| 1.0 / *of),
        ]);
        comparison.take(None, vec![1.0, 3.0]);
        assert_eq!(comparison.figures()[0].peer, None);
        comparison.take(Some("torchrun"), vec![8.0]);
        let figures = comparison.figures();
        assert_eq!((figures[0].peer_value, figures[0].ratio), (Some(8.0), Some(0.25)));
        // What is not a number was not measured.
        comparison.take(Some("NVRx"), vec![f64::NAN]);
        assert_eq!(comparison.figures().len(), 2);
    }
}
