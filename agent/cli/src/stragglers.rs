//! `mainstay stragglers`: which ranks make a job slow, from a recorded trace, without an agent.

mod read;

use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_model::finding::{Finding, Hint};
use mainstay_progress::straggler::{Limits, Report};
use serde_json::{Value, json};

use super::output::Form;
use super::{exit, output};

/// Find the ranks that slow a job down, from a recorded trace
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay stragglers steps.csv             CSV with a header line: rank,step,section,start_ns,end_ns
  mainstay stragglers steps.jsonl --json    JSON lines with the same names, an array of them, or a Chrome trace
  zcat steps.csv.gz | mainstay stragglers -

The columns are described in docs/reference/stragglers.md.

Exit status: 0 judged (whether or not something was found), 3 the trace cannot be read,
64 the command line was not understood.")]
pub(super) struct Args {
    /// The trace: CSV with a header line, or JSON; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "trace")]
    file: Option<PathBuf>,
    /// Same as FILE
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    trace: Option<PathBuf>,
    /// Minimum excess of a rank over its peers to report, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0)]
    rank_excess: f32,
    /// Minimum excess of a stage, or of unevenly distributed work, to report, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    imbalance: f32,
    /// Known condition of a host or device, quoted as a possible cause: "host-7: clocks at 60 %"
    #[arg(long, value_name = "HOST: FACT")]
    hint: Vec<String>,
    #[command(flatten)]
    form: Form,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // The command line has one of the two.
    let path = args.file.as_deref().or(args.trace.as_deref()).unwrap_or(std::path::Path::new("-"));
    let mut trace = read::read(path)?;
    let limits = Limits {
        rank: args.rank_excess.max(0.1) / 100.0,
        imbalance: args.imbalance.max(0.1) / 100.0,
        ..Limits::default()
    };
    let hints: Vec<Hint> = args.hint.iter().map(|text| hint(text)).collect();
    let report = trace.judge(limits, &hints);
    output::print(&match args.form.structured() {
        Some(form) => form.document(as_json(&report)),
        None => as_text(&report),
    })?;
    Ok(ExitCode::from(exit::OK))
}

fn hint(text: &str) -> Hint {
    let (host, fact) =
        text.split_once(": ").map_or((None, text), |(host, fact)| (Some(host.to_owned()), fact));
    Hint { host, device: None, about: fact.to_owned(), fact: fact.to_owned() }
}

fn as_json(report: &Report) -> Value {
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
    json!({
        "ranks": report.ranks,
        "steps": report.steps,
        "self_time": report.self_time,
        "notes": report.notes,
        "cause": cause(report),
        "findings": findings,
    })
}

/// What costs the job most, in one word; `none` if nothing was found.
fn cause(report: &Report) -> &'static str {
    let cost = |finding: &&Finding| finding.cost_percent.unwrap_or(0.0);
    let started = report.findings.iter().filter(|finding| !finding.over);
    started.max_by(|a, b| cost(a).total_cmp(&cost(b))).map_or("none", |finding| finding.what.as_str())
}

fn as_text(report: &Report) -> String {
    let mut text =
        format!("{} ranks, {} steps; self time is {}\n", report.ranks, report.steps, report.self_time);
    report.notes.iter().for_each(|note| text.push_str(&format!("note: {note}\n")));
    if report.findings.is_empty() {
        text.push_str("no rank is slow\n");
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
        let text = lines.collect::<Vec<_>>().join("\n");
        read::all_of(text.as_bytes()).unwrap().judge(Limits::default(), &[])
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
        assert_eq!(csv, judged(objects.iter().cloned()));
        let array = format!("[\n{}\n]", objects.join(",\n"));
        assert_eq!(csv, judged(std::iter::once(array)));
        let events = lines("one", |rank, step, section, start, end| {
            json!({"name": section, "ph": "X", "pid": rank, "tid": 1, "ts": start / 1000, "dur": (end - start) / 1000,
                   "args": {"step": step}})
            .to_string()
        });
        let chrome = format!(
            "{{\"traceEvents\": [{{\"ph\": \"M\", \"name\": \"process_name\"}}, {}]}}",
            events.join(", ")
        );
        assert_eq!(cause(&judged(std::iter::once(chrome))), "slow_rank");
        assert_eq!(cause(&csv), "slow_rank");
        assert_eq!(csv.findings[0].ranks[0].0, 5);
        assert!(as_text(&csv).contains("rank 5 is 3"), "{}", as_text(&csv));
        let json = as_json(&csv);
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
        testing::snapshot!("stragglers", "a trace without a slow rank", as_text(&healthy));
    }
}
