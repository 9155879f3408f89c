//! The columns of a recorded trace: which name means what, and in which unit a time is.
//!
//! `docs/reference/stragglers.md` is the contract. Names that public traces use are understood too, so that they
//! need no conversion.

use super::trace::TraceSpan;

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A column that is needed is not there.
    #[error("no column says {what}: one of {names} is needed")]
    Missing {
        /// What it would say.
        what: &'static str,
        /// The names it may have.
        names: String,
    },
    /// A field does not hold what its column promises.
    #[error("{column}: {value:?} is not {wanted}")]
    Field {
        /// The column.
        column: String,
        /// What stands there.
        value: String,
        /// What should.
        wanted: &'static str,
    },
}

const RANK: &[&str] = &["rank", "global_rank", "worker"];
const STEP: &[&str] = &["step", "iteration", "iter", "time"];
const SECTION: &[&str] = &["section", "optype", "op", "name", "phase"];
const STAGE: &[&str] = &["stage", "pp_rank", "pipeline_stage"];
const ROLE: &[&str] = &["role"];
const HOST: &[&str] = &["host", "hostname", "node"];
const DEVICE: &[&str] = &["device"];
const COMMUNICATOR: &[&str] = &["communicator", "comm", "process_group"];
const SEQUENCE: &[&str] = &["sequence", "seq", "seq_id"];
const START: &[&str] = &["start", "start_ts", "begin", "enter"];
const END: &[&str] = &["end", "end_ts", "exit"];
const DURATION: &[&str] = &["duration", "dur", "batch_time_norm", "batch_time"];

/// A column with a time, and how many seconds one unit of it is.
type TimeColumn = (usize, f64);

/// Where a trace has what.
#[derive(Clone, Debug, PartialEq)]
pub struct Columns {
    names: Vec<String>,
    rank: usize,
    step: usize,
    section: Option<usize>,
    start: Option<TimeColumn>,
    end: Option<TimeColumn>,
    duration: Option<TimeColumn>,
    stage: Option<usize>,
    role: Option<usize>,
    host: Option<usize>,
    device: Option<usize>,
    communicator: Option<usize>,
    sequence: Option<usize>,
}

impl Columns {
    /// Understands the names of the columns; case does not matter, and unknown ones are passed over.
    ///
    /// # Errors
    /// Nothing says the rank, the step, or how long something took.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Columns, TraceError> {
        let names: Vec<String> = names.into_iter().map(|name| name.trim().to_ascii_lowercase()).collect();
        let find =
            |wanted: &[&str]| wanted.iter().find_map(|wanted| names.iter().position(|name| name == wanted));
        let time = |wanted: &[&str]| {
            wanted.iter().find_map(|wanted| {
                names.iter().enumerate().find_map(|(at, name)| Some((at, unit(name, wanted)?)))
            })
        };
        let missing = |what, wanted: &[&str]| TraceError::Missing { what, names: wanted.join(", ") };
        let columns = Columns {
            rank: find(RANK).ok_or_else(|| missing("which rank it is", RANK))?,
            step: find(STEP).ok_or_else(|| missing("which step it is", STEP))?,
            section: find(SECTION),
            start: time(START),
            end: time(END),
            duration: time(DURATION),
            stage: find(STAGE),
            role: find(ROLE),
            host: find(HOST),
            device: find(DEVICE),
            communicator: find(COMMUNICATOR),
            sequence: find(SEQUENCE),
            names,
        };
        if columns.duration.is_none() && (columns.start.is_none() || columns.end.is_none()) {
            return Err(TraceError::Missing {
                what: "how long it took",
                names: "duration_ns, or start_ns and end_ns (or _us, _ms, _s)".to_owned(),
            });
        }
        Ok(columns)
    }

    /// Makes a span of a row's fields.
    ///
    /// # Errors
    /// A field does not hold what its column promises.
    pub fn span(&self, fields: &[&str]) -> Result<TraceSpan, TraceError> {
        let text = |at: Option<usize>| {
            at.and_then(|at| fields.get(at)).map(|field| field.trim()).filter(|field| !field.is_empty())
        };
        let bad = |at: usize, wanted| TraceError::Field {
            column: self.names.get(at).cloned().unwrap_or_default(),
            value: fields.get(at).copied().unwrap_or_default().to_owned(),
            wanted,
        };
        let whole = |at: usize| {
            let number = fields.get(at).and_then(|field| whole(field.trim()));
            number.ok_or_else(|| bad(at, "a whole number"))
        };
        let optional_whole = |at: Option<usize>| match at.filter(|at| text(Some(*at)).is_some()) {
            Some(at) => whole(at).map(Some),
            None => Ok(None),
        };
        let seconds = |column: Option<TimeColumn>| match column.filter(|(at, _)| text(Some(*at)).is_some()) {
            Some((at, unit)) => {
                let number: Option<f64> = text(Some(at)).and_then(|field| field.parse().ok());
                number.map(|number| Some(number * unit)).ok_or_else(|| bad(at, "a number"))
            }
            None => Ok(None),
        };
        let start = seconds(self.start)?;
        let duration = match (seconds(self.duration)?, start, seconds(self.end)?) {
            (Some(duration), ..) => duration,
            (None, Some(start), Some(end)) => end - start,
            _ => return Err(bad(self.duration.or(self.end).map_or(0, |(at, _)| at), "a time")),
        };
        let owned = |at| text(at).map(str::to_owned);
        Ok(TraceSpan {
            rank: u32::try_from(whole(self.rank)?).map_err(|_| bad(self.rank, "a rank"))?,
            step: whole(self.step)?,
            section: owned(self.section).unwrap_or_default(),
            start,
            duration,
            stage: optional_whole(self.stage)?.and_then(|stage| u32::try_from(stage).ok()),
            role: owned(self.role),
            host: owned(self.host),
            device: owned(self.device),
            communicator: owned(self.communicator),
            sequence: optional_whole(self.sequence)?,
        })
    }
}

/// A whole number, also where a table tool has written it as 7.0.
fn whole(field: &str) -> Option<u64> {
    field.parse().ok().or_else(|| {
        let number: f64 = field.parse().ok()?;
        (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64)
    })
}

/// Seconds per unit of the column `name`, if it is the column `wanted`: `start_us` counts in millionths. Without a unit, in
/// seconds; only ratios matter for who is slow.
fn unit(name: &str, wanted: &str) -> Option<f64> {
    match name.strip_prefix(wanted)? {
        "" | "_s" => Some(1.0),
        "_ms" => Some(1e-3),
        "_us" => Some(1e-6),
        "_ns" => Some(1e-9),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_columns_are_read() {
        let columns = Columns::of("rank,step,section,start_ns,end_ns,stage,host".split(',')).unwrap();
        let span = columns.span(&["3", "7", "forward", "1000000000", "3500000000", "1", "a"]).unwrap();
        assert_eq!((span.rank, span.step, span.section.as_str()), (3, 7, "forward"));
        assert_eq!((span.start, span.duration), (Some(1.0), 2.5));
        assert_eq!((span.stage, span.host.as_deref()), (Some(1), Some("a")));
    }

    #[test]
    fn other_traces_names_and_units_are_understood() {
        let columns = Columns::of(["", "Worker", "gpu", "time", "batch_time_norm"]).unwrap();
        let span = columns.span(&["0", "6", "25", "1811.0", "745"]).unwrap();
        assert_eq!((span.rank, span.step, span.start, span.duration), (6, 1811, None, 745.0));
        let columns = Columns::of(["rank", "step", "start_us", "duration_ms"]).unwrap();
        let span = columns.span(&["0", "1", "5", "2"]).unwrap();
        assert!((span.start.unwrap() - 5e-6).abs() < 1e-12 && (span.duration - 2e-3).abs() < 1e-12);
    }

    #[test]
    fn what_is_missing_or_no_number_is_said() {
        let no_rank = Columns::of(["step", "duration"]).unwrap_err().to_string();
        assert!(no_rank.contains("which rank"), "{no_rank}");
        let no_end = Columns::of(["rank", "step", "start_ns"]).unwrap_err().to_string();
        assert!(no_end.contains("end_ns"), "{no_end}");
        let columns = Columns::of(["rank", "step", "duration"]).unwrap();
        for fields in [["x", "1", "2"], ["1", "-1", "2"], ["1", "1", "long"], ["1", "1", ""]] {
            assert!(columns.span(&fields).is_err(), "{fields:?}");
        }
        assert!(columns.span(&["1"]).is_err());
    }
}
