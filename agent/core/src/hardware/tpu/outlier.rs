//! Which core holds up the others. All cores of a slice run the same programs in the same order; in a hang, those that
//! wait stand at the same place, and the one they wait for does not.

use std::collections::BTreeMap;

use super::sample::CoreState;

/// A core that is not where the others are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlier {
    /// The host, as the caller names it.
    pub host: String,
    /// The core's number in the slice.
    pub core: i32,
    /// Its chip, if it is told.
    pub chip: Option<i32>,
    /// In what it differs.
    pub differs: Differs,
}

/// In what a core differs from the others, the strongest sign first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Differs {
    /// It runs another program than most: the hosts do not agree on what to run.
    Program {
        /// Its program.
        own: String,
        /// That of most.
        most: String,
    },
    /// It has launched fewer programs than most.
    Behind {
        /// Its launch.
        own: i64,
        /// That of most.
        most: i64,
        /// The operation it is at; empty if it is not told.
        hlo: String,
    },
    /// It has launched more programs than most: most wait for something else.
    Ahead {
        /// Its launch.
        own: i64,
        /// That of most.
        most: i64,
    },
    /// It is in the same program as the others and waits for its input, while they run.
    WaitsForInput,
    /// It is in the same program as the others and at another operation of it.
    Place {
        /// The operation it is at.
        own: String,
        /// That of most.
        most: String,
    },
}

impl std::fmt::Display for Outlier {
    /// "core 5 (chip 2) has launched 41 programs, most have launched 42".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.host.is_empty() {
            write!(f, "{}: ", self.host)?;
        }
        write!(f, "core {}", self.core)?;
        if let Some(chip) = self.chip {
            write!(f, " (chip {chip})")?;
        }
        match &self.differs {
            Differs::Program { own, most } => write!(f, " runs program {own}, most run {most}"),
            Differs::Behind { own, most, hlo } => {
                write!(f, " is at launch {own}, most are at {most}")?;
                if hlo.is_empty() { Ok(()) } else { write!(f, "; it is at {hlo}") }
            }
            Differs::Ahead { own, most } => write!(f, " is at launch {own}, most are still at {most}"),
            Differs::WaitsForInput => write!(f, " waits for its input, the others run"),
            Differs::Place { own, most } => write!(f, " is at {own}, most are at {most}"),
        }
    }
}

/// The cores that are not where most are, by the strongest sign there is; none if all stand at the same place, if
/// there is no majority to compare with, or if none of them has work.
///
/// It says where the cores stand and not that they stand still: while a job runs, a core may be ahead of the others for
/// a moment. Whoever calls it makes sure that nothing moved. `cores` are those of one job on any number of hosts.
pub fn outliers(cores: &[(&str, &CoreState)]) -> Vec<Outlier> {
    // SparseCores have programs of their own, and a core that never had a program is not part of the job.
    let cores: Vec<(&str, &CoreState)> = cores
        .iter()
        .copied()
        .filter(|(_, core)| core.tensor_core && core.launch.is_some_and(|launch| launch > 0))
        .collect();
    let busy = cores.iter().any(|(_, core)| core.is_busy());
    if !busy || cores.len() < 2 {
        return Vec::new();
    }
    by_launch(&cores)
        .or_else(|| by_program(&cores))
        .or_else(|| by_waiting(&cores))
        .or_else(|| by_place(&cores))
        .unwrap_or_default()
}

/// A launch that is behind explains a program that differs: the next program begins with another launch.
fn by_launch(cores: &[(&str, &CoreState)]) -> Option<Vec<Outlier>> {
    let launch = |core: &CoreState| core.launch.unwrap_or(0);
    // Between two there is no majority, but there is an order.
    let most = match most_common(cores, |core| launch(core)) {
        Some(most) => most,
        None if cores.len() == 2 => cores.iter().map(|(_, core)| launch(core)).max()?,
        None => return None,
    };
    let behind = named(cores, |core| {
        (launch(core) < most).then(|| Differs::Behind { own: launch(core), most, hlo: core.hlo.clone() })
    });
    behind.or_else(|| {
        named(cores, |core| (launch(core) > most).then(|| Differs::Ahead { own: launch(core), most }))
    })
}

fn by_program(cores: &[(&str, &CoreState)]) -> Option<Vec<Outlier>> {
    let most = most_common(cores, |core| core.program.clone())?;
    named(cores, |core| {
        (core.program != most).then(|| Differs::Program { own: core.program.clone(), most: most.clone() })
    })
}

fn by_waiting(cores: &[(&str, &CoreState)]) -> Option<Vec<Outlier>> {
    let runs = most_common(cores, |core| !core.counters.is_empty())?;
    runs.then(|| named(cores, |core| core.counters.is_empty().then_some(Differs::WaitsForInput)))?
}

fn by_place(cores: &[(&str, &CoreState)]) -> Option<Vec<Outlier>> {
    let most = most_common(cores, |core| core.hlo.clone())?;
    named(cores, |core| {
        (core.hlo != most).then(|| Differs::Place { own: core.hlo.clone(), most: most.clone() })
    })
}

/// The value that more than half of them have.
fn most_common<T: Ord>(cores: &[(&str, &CoreState)], of: impl Fn(&CoreState) -> T) -> Option<T> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    for (_, core) in cores {
        *counts.entry(of(core)).or_default() += 1;
    }
    counts.into_iter().find(|(_, count)| *count * 2 > cores.len()).map(|(value, _)| value)
}

/// Those that differ; none if nobody does.
fn named(
    cores: &[(&str, &CoreState)],
    differs: impl Fn(&CoreState) -> Option<Differs>,
) -> Option<Vec<Outlier>> {
    let outliers: Vec<Outlier> = cores
        .iter()
        .filter_map(|(host, core)| {
            let differs = differs(core)?;
            Some(Outlier { host: (*host).to_owned(), core: core.core, chip: core.chip, differs })
        })
        .collect();
    (!outliers.is_empty()).then_some(outliers)
}
