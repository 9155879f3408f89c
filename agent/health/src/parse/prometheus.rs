//! Parses Prometheus' text format as written by exporters: `name{label="value",…} number [milliseconds]`. Strict: a page with an
//! invalid line is refused as a whole, since a partial page would look like missing GPUs.

use std::collections::BTreeMap;

/// Maximum number of samples per page; the largest exporters have some ten thousand.
const MAX_SAMPLES: usize = 100_000;

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value. May be infinite or NaN.
    pub value: f64,
}

/// Why a page is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// A line does not match the format.
    #[error("line {line} is not a sample: {what}")]
    Line {
        /// The line number, from 1.
        line: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// The page has too many samples.
    #[error("it has more than {MAX_SAMPLES} samples")]
    TooLong,
}

/// Parses a page.
///
/// # Errors
/// If a line does not match the format, or if there are too many samples.
pub fn parse(page: &str) -> Result<Vec<Sample>, PageError> {
    let mut samples = Vec::new();
    for (index, line) in page.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if samples.len() >= MAX_SAMPLES {
            return Err(PageError::TooLong);
        }
        samples.push(sample(line).map_err(|what| PageError::Line { line: index + 1, what })?);
    }
    Ok(samples)
}

fn sample(line: &str) -> Result<Sample, &'static str> {
    let end = line.find(|c: char| !is_name(c)).ok_or("it has no value")?;
    let (name, rest) = line.split_at(end);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err("it has no name");
    }
    let (labels, rest) = match rest.trim_start().strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let mut words = rest.split_ascii_whitespace();
    let value = words.next().ok_or("it has no value")?;
    let value = value.parse().map_err(|_| "its value is not a number")?;
    if words.next().is_some_and(|time| time.parse::<i64>().is_err()) {
        return Err("its time is not a number");
    }
    if words.next().is_some() {
        return Err("there is more after it");
    }
    Ok(Sample { name: name.to_owned(), labels, value })
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Parses the labels up to the brace. Returns them and the rest.
fn labels(mut rest: &str) -> Result<(BTreeMap<String, String>, &str), &'static str> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        let (name, after) = rest.split_once('=').ok_or("its labels have no end")?;
        let name = name.trim_end();
        if name.is_empty() || !name.chars().all(is_name) {
            return Err("a label has no name");
        }
        let (value, after) = quoted(after.trim_start())?;
        labels.insert(name.to_owned(), value);
        let after = after.trim_start();
        rest = match after.strip_prefix(',') {
            Some(next) => next,
            None if after.starts_with('}') => after,
            None => return Err("its labels are not separated by commas"),
        };
    }
}

/// Parses a quoted string with the escapes `\\`, `\"` and `\n`. Returns it and the rest.
fn quoted(text: &str) -> Result<(String, &str), &'static str> {
    let text = text.strip_prefix('"').ok_or("a label's value is not in quotes")?;
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match letters.next() {
                Some((_, 'n')) => '\n',
                Some((_, escaped @ ('\\' | '"'))) => escaped,
                _ => return Err("a label's value has an escape that is none"),
            }),
            letter => value.push(letter),
        }
    }
    Err("a label's value has no end")
}
