//! `mainstay stragglers`: who makes a job slow, from a recorded trace, without an agent.

use std::fs::File;
use std::io::{BufRead, BufReader, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_core::finding::{Finding, Hint};
use mainstay_core::straggler::{Columns, Limits, Report, Trace};
use serde_json::{Value, json};

use super::{exit, output};

/// A line that is longer is no line of a trace.
const LONGEST_LINE: usize = 1 << 20;

/// Find out who makes a job slow, from a recorded trace
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay stragglers --trace steps.csv             CSV with a header line: rank,step,section,start_ns,end_ns
  mainstay stragglers --trace steps.jsonl --json    JSON lines with the same names
  zcat steps.csv.gz | mainstay stragglers --trace -

The columns are described in docs/reference/stragglers.md.

Exit status: 0 judged (whether or not something was found), 3 the trace cannot be read,
64 the command line was not understood.")]
pub(super) struct Args {
    /// The trace: CSV with a header line, or JSON lines; - is standard input
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Tell a rank from this excess over its peers on, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0)]
    rank_excess: f32,
    /// Tell stages and unevenly spread work from this excess on, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    imbalance: f32,
    /// Something known of a host or device that may explain it: "host-7: clocks at 60 %"; quoted where it fits
    #[arg(long, value_name = "HOST: FACT")]
    hint: Vec<String>,
    /// JSON for scripts
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut trace = read(&args.trace)?;
    let limits = Limits {
        rank: args.rank_excess.max(0.1) / 100.0,
        imbalance: args.imbalance.max(0.1) / 100.0,
        ..Limits::default()
    };
    let hints: Vec<Hint> = args.hint.iter().map(|text| hint(text)).collect();
    let report = trace.judge(limits, &hints);
    output::print(&if args.json { as_json(&report) } else { as_text(&report) })?;
    Ok(ExitCode::from(exit::OK))
}

fn hint(text: &str) -> Hint {
    match text.split_once(": ") {
        Some((host, fact)) => Hint { host: Some(host.to_owned()), device: None, fact: fact.to_owned() },
        None => Hint { host: None, device: None, fact: text.to_owned() },
    }
}

fn read(path: &Path) -> anyhow::Result<Trace> {
    let mut input: Box<dyn BufRead> = if path.as_os_str() == "-" {
        Box::new(BufReader::new(stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| format!("opening {}", path.display()))?))
    };
    let mut reader = Reader::default();
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        if read_line(&mut input, &mut line).with_context(|| format!("reading {}", path.display()))? == 0 {
            break;
        }
        let at = || format!("{}: line {number}", path.display());
        if line.len() > LONGEST_LINE {
            bail!("{}: longer than {LONGEST_LINE} bytes", at());
        }
        let text = std::str::from_utf8(&line).with_context(at)?;
        reader.line(text.trim_end_matches(['\n', '\r'])).with_context(at)?;
    }
    if reader.trace.is_empty() {
        bail!("{}: no line of a trace in it", path.display());
    }
    Ok(reader.trace)
}

/// One line, of which no more is kept than shows that it is too long.
fn read_line(input: &mut dyn BufRead, line: &mut Vec<u8>) -> std::io::Result<usize> {
    use std::io::Read;
    input.take(LONGEST_LINE as u64 + 1).read_until(b'\n', line)
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    /// The columns of the header, or the names of the last object.
    columns: Option<(Vec<String>, Columns)>,
}

impl Reader {
    fn line(&mut self, line: &str) -> anyhow::Result<()> {
        if line.trim().is_empty() {
            return Ok(());
        }
        if line.trim_start().starts_with('{') {
            return self.object(line);
        }
        let fields: Vec<&str> = line.split(',').map(|field| field.trim().trim_matches('"')).collect();
        match &self.columns {
            None => {
                let names = fields.iter().map(|name| (*name).to_owned()).collect();
                self.columns = Some((names, Columns::of(fields)?));
            }
            Some((_, columns)) => self.trace.push(columns.span(&fields)?),
        }
        Ok(())
    }

    fn object(&mut self, line: &str) -> anyhow::Result<()> {
        let object: serde_json::Map<String, Value> = serde_json::from_str(line)?;
        // What is null is not there.
        let given = || object.iter().filter(|(_, value)| !value.is_null());
        let names: Vec<String> = given().map(|(name, _)| name.clone()).collect();
        let fields: Vec<String> = given()
            .map(|(_, value)| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
            .collect();
        let columns = match self.columns.take() {
            Some((of, columns)) if of == names => columns,
            _ => Columns::of(names.iter().map(String::as_str))?,
        };
        self.trace.push(columns.span(&fields.iter().map(String::as_str).collect::<Vec<_>>())?);
        self.columns = Some((names, columns));
        Ok(())
    }
}

fn as_json(report: &Report) -> String {
    let findings: Vec<Value> = report
        .findings
        .iter()
        .filter(|finding| !finding.over)
        .map(|finding| {
            let over = report.findings.iter().find(|later| later.over && later.finding == finding.finding);
            let mut object = json!(finding);
            object["until_step"] = json!(over.map(|over| over.step));
            object
        })
        .collect();
    format!(
        "{:#}\n",
        json!({
            "ranks": report.ranks,
            "steps": report.steps,
            "self_time": report.self_time,
            "cause": cause(report),
            "findings": findings,
        })
    )
}

/// What costs the job most, in one word; `none` if nothing was found.
fn cause(report: &Report) -> &'static str {
    let cost = |finding: &&Finding| finding.cost_percent.unwrap_or(0.0);
    let begun = report.findings.iter().filter(|finding| !finding.over);
    begun.max_by(|a, b| cost(a).total_cmp(&cost(b))).map_or("none", |finding| finding.what.word())
}

fn as_text(report: &Report) -> String {
    let mut text =
        format!("{} ranks, {} steps; self time is {}\n", report.ranks, report.steps, report.self_time);
    if report.findings.is_empty() {
        text.push_str("nobody is slow\n");
    }
    for finding in &report.findings {
        text.push_str(&format!("\nstep {}: {}\n", finding.step, finding.headline));
        if !finding.over {
            text.push_str(&format!("  {}, {:.0} % sure\n", finding.domain, finding.confidence * 100.0));
            finding.evidence.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(lines: impl Iterator<Item = String>) -> Report {
        let mut reader = Reader::default();
        lines.for_each(|line| reader.line(&line).unwrap());
        reader.trace.judge(Limits::default(), &[])
    }

    /// Eight ranks that meet in each step; rank 5 takes 30 % longer for its own work.
    fn lines(slow: &'static str, row: impl Fn(u64, u64, &str, u64, u64) -> String) -> Vec<String> {
        let mut lines = Vec::new();
        for step in 1..=40 {
            for rank in 0..8 {
                let wobble = (rank * 7 + step * 13) % 10 * 100_000;
                let slow_now = match slow {
                    "one" => rank == 5,
                    "rotating" => rank == step * 3 % 8,
                    _ => false,
                };
                let work = 100_000_000 + wobble + if slow_now { 30_000_000 } else { 0 };
                let start = step * 200_000_000;
                lines.push(row(rank, step, "forward", start, start + work));
                lines.push(row(rank, step, "allreduce", start + work, start + 140_000_000));
            }
        }
        lines
    }

    #[test]
    fn csv_and_json_lines_come_to_the_same() {
        let csv =
            lines("one", |rank, step, section, start, end| format!("{rank},{step},{section},{start},{end}"));
        let header = "rank,step,section,start_ns,end_ns".to_owned();
        let csv = judged(std::iter::once(header).chain(csv));
        let objects = lines("one", |rank, step, section, start, end| {
            json!({"rank": rank, "step": step, "section": section, "start_ns": start, "end_ns": end, "host": null})
                .to_string()
        });
        assert_eq!(csv, judged(objects.into_iter()));
        assert_eq!(cause(&csv), "slow_rank");
        assert_eq!(csv.findings[0].ranks[0].0, 5);
        assert!(as_text(&csv).contains("rank 5 is 3"), "{}", as_text(&csv));
        let json: Value = serde_json::from_str(&as_json(&csv)).unwrap();
        assert_eq!(json["findings"][0]["what"], "slow_rank");
        assert_eq!(json["findings"][0]["until_step"], Value::Null);
    }

    #[test]
    fn turns_are_data_imbalance_and_none_is_silence() {
        let with_header = |lines: Vec<String>| {
            judged(std::iter::once("rank,step,section,start_ns,end_ns".to_owned()).chain(lines))
        };
        let row = |rank, step, section: &str, start, end| format!("{rank},{step},{section},{start},{end}");
        assert_eq!(cause(&with_header(lines("rotating", row))), "data_imbalance");
        let healthy = with_header(lines("", row));
        assert_eq!(cause(&healthy), "none");
        assert!(as_text(&healthy).contains("nobody is slow"));
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let mut reader = Reader::default();
        assert!(reader.line("rank,stepp,duration").unwrap_err().to_string().contains("which step"));
        reader.line("rank,step,duration").unwrap();
        assert!(reader.line("0,one,3").unwrap_err().to_string().contains("step"));
        assert!(reader.line("{\"rank\": 1").is_err());
    }
}
