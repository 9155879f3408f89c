//! Finds the core that holds up the others. All cores of a slice run the same programs in the same order. In a hang,
//! the waiting cores are at the same position, and the core that they wait for is not.

use std::collections::BTreeMap;

use super::sample::CoreState;

/// A core whose position differs from the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlier {
    /// The host, as the caller names it.
    pub host: String,
    /// The core's number in the slice.
    pub core: i32,
    /// Its chip, if reported.
    pub chip: Option<i32>,
    /// How it differs.
    pub differs: Differs,
}

/// How a core differs from the others, the strongest sign first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Differs {
    /// It runs another program than most: the hosts disagree about what to run.
    Program {
        /// Its program.
        own: String,
        /// The program of most cores.
        most: String,
    },
    /// It has launched fewer programs than most.
    Behind {
        /// Its launch number.
        own: i64,
        /// The launch number of most cores.
        most: i64,
        /// Its current operation; empty if not reported.
        hlo: String,
    },
    /// It has launched more programs than most: most cores wait for something else.
    Ahead {
        /// Its launch number.
        own: i64,
        /// The launch number of most cores.
        most: i64,
    },
    /// It is in the same program as the others and waits for input while they run.
    WaitsForInput,
    /// It is in the same program as the others at another operation.
    Place {
        /// Its current operation.
        own: String,
        /// The operation of most cores.
        most: String,
    },
}

impl std::fmt::Display for Outlier {
    /// "core 5 (chip 2) is at launch 41, most are at 42".
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

/// The cores whose position differs from that of most, by the strongest sign; empty if all are at the same position, if
/// there is no majority, or if no core has work.
///
/// It compares positions and does not check that they are stable: in a running job, a core may briefly be ahead. The
/// caller ensures that nothing moved. `cores` are those of one job on any number of hosts.
pub fn outliers(cores: &[(&str, &CoreState)]) -> Vec<Outlier> {
    // SparseCores have their own programs, and a core that never had a program is not part of the job.
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

/// A lower launch number also explains a different program: the next program starts with another launch.
fn by_launch(cores: &[(&str, &CoreState)]) -> Option<Vec<Outlier>> {
    let launch = |core: &CoreState| core.launch.unwrap_or(0);
    // Two cores have no majority, but an order.
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

/// The value that more than half of the cores have.
fn most_common<T: Ord>(cores: &[(&str, &CoreState)], value: impl Fn(&CoreState) -> T) -> Option<T> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    for (_, core) in cores {
        *counts.entry(value(core)).or_default() += 1;
    }
    counts.into_iter().find(|(_, count)| *count * 2 > cores.len()).map(|(value, _)| value)
}

/// The cores that differ; `None` if no core does.
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
