//! The columns of a recorded trace, and the units of times. `docs/reference/stragglers.md` is the contract.

use super::trace::TraceSpan;

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A required column is missing.
    #[error("no column {0}; docs/reference/stragglers.md describes the columns")]
    Missing(&'static str),
    /// A field does not have the type of its column.
    #[error("{column}: {value:?} is not {wanted}")]
    Field {
        /// The column.
        column: String,
        /// The value.
        value: String,
        /// The expected type.
        wanted: &'static str,
    },
}

/// The index of a time column, and the seconds per unit.
type TimeColumn = (usize, f64);

/// The positions of the columns in a trace.
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
    attempt: Option<usize>,
    /// The section columns of a table with a column for each section.
    wide: Vec<(TimeColumn, String)>,
}

impl Columns {
    /// Finds the columns by name. Case does not matter, and unknown names are ignored.
    ///
    /// # Errors
    /// There is no column for the rank, the step, or a duration.
    pub fn from_header<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Columns, TraceError> {
        let names: Vec<String> = names.into_iter().map(plain).collect();
        let find = |wanted: &str| names.iter().position(|name| name == wanted);
        let time =
            |wanted: &str| names.iter().enumerate().find_map(|(at, name)| Some((at, unit(name, wanted)?)));
        let mut columns = Columns {
            rank: find("rank").ok_or(TraceError::Missing("rank"))?,
            step: find("step").ok_or(TraceError::Missing("step"))?,
            section: find("section"),
            start: time("start"),
            end: time("end"),
            duration: time("duration"),
            stage: find("stage"),
            role: find("role"),
            host: find("host"),
            device: find("device"),
            communicator: find("communicator"),
            sequence: find("sequence"),
            attempt: find("attempt"),
            wide: Vec::new(),
            names,
        };
        if columns.section.is_none() {
            columns.wide = columns.sections_beside_each_other();
        }
        let timed = columns.duration.is_some() || (columns.start.is_some() && columns.end.is_some());
        if !timed && columns.wide.is_empty() {
            return Err(TraceError::Missing("duration_ns, nor start_ns and end_ns"));
        }
        Ok(columns)
    }

    /// Columns such as `forward_ms` and `wait_s` of a table that has one row for each rank and step.
    fn sections_beside_each_other(&self) -> Vec<(TimeColumn, String)> {
        let taken = [self.start, self.end, self.duration].map(|column| column.map(|(at, _)| at));
        let is_free = |at: usize| at != self.rank && at != self.step && !taken.contains(&Some(at));
        let free = self.names.iter().enumerate().filter(|(at, _)| is_free(*at));
        free.filter_map(|(at, name)| {
            let (section, seconds) = with_unit(name)?;
            Some(((at, seconds), section.to_owned()))
        })
        .collect()
    }

    /// Creates the spans of a row: one, or one for each section of a table with a column for each. Empty fields and
    /// `nan` were not measured and give no span.
    ///
    /// # Errors
    /// A field does not have the type of its column.
    pub fn spans(&self, fields: &[&str]) -> Result<Vec<TraceSpan>, TraceError> {
        if self.wide.is_empty() {
            return Ok(self.measured(fields)?.into_iter().collect());
        }
        let of_row = self.measured(fields)?;
        let row = of_row.clone().map_or_else(|| self.place(fields), Ok)?;
        let mut spans: Vec<TraceSpan> = of_row.into_iter().collect();
        for ((at, unit), section) in &self.wide {
            if let Some(duration) = self.number(fields, *at)? {
                let duration = self.not_negative(fields, *at, duration * unit)?;
                spans.push(TraceSpan { section: section.clone(), start: None, duration, ..row.clone() });
            }
        }
        Ok(spans)
    }

    /// Creates a span of a row. `None` if its time was not measured.
    fn measured(&self, fields: &[&str]) -> Result<Option<TraceSpan>, TraceError> {
        let seconds = |column: Option<TimeColumn>| match column {
            Some((at, unit)) => Ok(self.number(fields, at)?.map(|number| number * unit)),
            None => Ok(None),
        };
        let start = seconds(self.start)?;
        let duration = match (seconds(self.duration)?, start, seconds(self.end)?) {
            (Some(duration), ..) => duration,
            (None, Some(start), Some(end)) => end - start,
            _ => {
                self.place(fields)?;
                return Ok(None);
            }
        };
        let at = self.duration.or(self.end).map_or(0, |(at, _)| at);
        let duration = self.not_negative(fields, at, duration)?;
        Ok(Some(TraceSpan { start, duration, ..self.place(fields)? }))
    }

    fn not_negative(&self, fields: &[&str], at: usize, seconds: f64) -> Result<f64, TraceError> {
        // Rounding in the trace may leave a value slightly below zero.
        if seconds < -1e-6 {
            return Err(self.bad(fields, at, "a time that does not end before it starts"));
        }
        Ok(seconds.max(0.0))
    }

    /// The rank, step and other labels of a row.
    fn place(&self, fields: &[&str]) -> Result<TraceSpan, TraceError> {
        let whole = |at: usize| {
            let number = fields.get(at).and_then(|field| whole(field.trim()));
            number.ok_or_else(|| self.bad(fields, at, "a whole number"))
        };
        let optional_whole = |at: Option<usize>| match at.filter(|at| text(fields, Some(*at)).is_some()) {
            Some(at) => whole(at).map(Some),
            None => Ok(None),
        };
        let owned = |at| text(fields, at).map(str::to_owned);
        Ok(TraceSpan {
            rank: u32::try_from(whole(self.rank)?).map_err(|_| self.bad(fields, self.rank, "a rank"))?,
            step: whole(self.step)?,
            attempt: optional_whole(self.attempt)?.unwrap_or(0),
            section: owned(self.section).unwrap_or_default(),
            start: None,
            duration: 0.0,
            stage: optional_whole(self.stage)?.and_then(|stage| u32::try_from(stage).ok()),
            role: owned(self.role),
            host: owned(self.host),
            device: owned(self.device),
            communicator: owned(self.communicator),
            sequence: optional_whole(self.sequence)?,
        })
    }

    /// The number in a field. `None` if it is empty or marked as not measured.
    fn number(&self, fields: &[&str], at: usize) -> Result<Option<f64>, TraceError> {
        let Some(field) = text(fields, Some(at)) else { return Ok(None) };
        if NOT_MEASURED.contains(&field.to_ascii_lowercase().as_str()) {
            return Ok(None);
        }
        let number: f64 = field.parse().map_err(|_| self.bad(fields, at, "a number"))?;
        if number.is_finite() { Ok(Some(number)) } else { Err(self.bad(fields, at, "a number")) }
    }

    fn bad(&self, fields: &[&str], at: usize, wanted: &'static str) -> TraceError {
        TraceError::Field {
            column: self.names.get(at).cloned().unwrap_or_default(),
            value: fields.get(at).copied().unwrap_or_default().to_owned(),
            wanted,
        }
    }
}

/// Markers for missing values that table tools write.
const NOT_MEASURED: &[&str] = &["nan", "na", "n/a", "null", "none", "-"];

fn text<'a>(fields: &[&'a str], at: Option<usize>) -> Option<&'a str> {
    at.and_then(|at| fields.get(at)).map(|field| field.trim()).filter(|field| !field.is_empty())
}

/// A column's name in lower case, with one `_` for each run of other characters: `Start (us)` is `start_us`.
fn plain(name: &str) -> String {
    let name = name.trim().trim_start_matches('\u{feff}').to_ascii_lowercase();
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("_")
}

/// An integer, also in the form 7.0 that some table tools write.
fn whole(field: &str) -> Option<u64> {
    field.parse().ok().or_else(|| {
        let number: f64 = field.parse().ok()?;
        (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64)
    })
}

/// Seconds per unit of the column `name`, if it is the column `wanted`: `start_us` counts in millionths. Without a
/// unit, in seconds; stragglers depend only on ratios.
fn unit(name: &str, wanted: &str) -> Option<f64> {
    match name.strip_prefix(wanted)? {
        "" => Some(1.0),
        rest => seconds_of(rest.strip_prefix('_')?),
    }
}

/// A name with a unit suffix: the name without it, and seconds per unit.
fn with_unit(name: &str) -> Option<(&str, f64)> {
    let (rest, unit) = name.rsplit_once('_')?;
    Some((rest, seconds_of(unit)?))
}

fn seconds_of(unit: &str) -> Option<f64> {
    Some(match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(columns: &Columns, fields: &[&str]) -> TraceSpan {
        let [span] = columns.spans(fields).unwrap().try_into().unwrap();
        span
    }

    #[test]
    fn the_documented_columns_are_read() {
        let columns =
            Columns::from_header("rank,step,section,start_ns,end_ns,stage,host".split(',')).unwrap();
        let span = one(&columns, &["3", "7", "forward", "1000000000", "3500000000", "1", "a"]);
        assert_eq!((span.rank, span.step, span.section.as_str()), (3, 7, "forward"));
        assert_eq!((span.start, span.duration), (Some(1.0), 2.5));
        assert_eq!((span.stage, span.host.as_deref()), (Some(1), Some("a")));
    }

    #[test]
    fn each_time_has_its_own_unit_and_other_columns_are_ignored() {
        let columns = Columns::from_header(["", "Rank", "gpu", "Step", "Start (us)", "duration_ms"]).unwrap();
        let span = one(&columns, &["0", "6", "25", "1811.0", "5", "2"]);
        assert_eq!((span.rank, span.step), (6, 1811));
        assert!((span.start.unwrap() - 5e-6).abs() < 1e-12 && (span.duration - 2e-3).abs() < 1e-12);
        let columns = Columns::from_header(["rank", "step", "duration"]).unwrap();
        assert_eq!(one(&columns, &["6", "1811", "745"]).duration, 745.0);
    }

    #[test]
    fn missing_columns_and_invalid_numbers_are_reported() {
        let missing = |names: &[&str]| Columns::from_header(names.iter().copied()).unwrap_err();
        assert_eq!(missing(&["step", "duration"]), TraceError::Missing("rank"));
        assert_eq!(missing(&["rank", "iteration", "duration"]), TraceError::Missing("step"));
        assert!(matches!(missing(&["rank", "step", "start_ns"]), TraceError::Missing(_)));
        let columns = Columns::from_header(["rank", "step", "duration"]).unwrap();
        for fields in
            [["x", "1", "2"], ["1", "-1", "2"], ["1", "1", "long"], ["1", "1", "-2"], ["1", "", "2"]]
        {
            assert!(columns.spans(&fields).is_err(), "{fields:?}");
        }
        assert!(columns.spans(&["1"]).is_err());
        for nothing in ["", "nan", "NULL"] {
            assert_eq!(columns.spans(&["1", "1", nothing]).unwrap(), [], "{nothing:?}");
        }
    }

    #[test]
    fn a_table_with_a_column_for_each_section_is_read() {
        let columns =
            Columns::from_header(["rank", "step", "forward_ms", "allreduce_wait_ms", "step_ms"]).unwrap();
        let spans = columns.spans(&["0", "1", "100", "", "150"]).unwrap();
        let durations: Vec<(&str, f64)> =
            spans.iter().map(|span| (span.section.as_str(), span.duration)).collect();
        assert_eq!(durations, [("forward", 0.1), ("step", 0.15)]);
    }
}
