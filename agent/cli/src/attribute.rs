//! `mainstay attribute`: whose fault a failure was, from any directory of logs, without an agent; and how well it
//! judges a file of labelled cases.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::explain::{self, Report};
use mainstay_diagnosis::attribution::lines;
use mainstay_diagnosis::attribution::scan::{self as scanning, Findings, Kind, Scan};
use mainstay_diagnosis::attribution::score::{self, Answer, Case};
use mainstay_diagnosis::attribution::{Evidence, attribute, exit as exits};
use mainstay_sys::sparse::DataReader;

use files::LogFile;

use super::exit;
use super::output::{self, Form, Paint};

mod dumps;
mod files;
mod markdown;
mod packed;
mod run_dir;
mod show;

/// Bytes that are read at a time. Memory use stays small however long the logs are.
const READ_BYTES: usize = 1 << 20;

/// Find the fault domain of a failure from logs alone
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay attribute logs/                     all files of a directory
  mainstay attribute rank0.log rank1.log --kernel-log dmesg.txt
  dmesg | mainstay attribute slurm-4711.out --kernel-log -
  mainstay attribute logs/ --markdown          for a ticket
  mainstay attribute ~/.local/state/mainstay/runs/exp    a run: its ranks' output where it failed
  mainstay attribute --eval cases.jsonl --json        score labelled cases

Exit status: 0 judged (\"unknown\" too), 3 a file cannot be read or there is no text, 64 the command line was not understood.")]
pub(super) struct Args {
    /// Files and directories with what ranks and launchers printed, and flight records of PyTorch; - is standard input
    #[arg(value_name = "DIR|FILE", required_unless_present_any = ["logs", "eval", "kernel_log"])]
    files: Vec<PathBuf>,
    /// The same as an option
    #[arg(long, value_name = "DIR|FILE", num_args = 1..)]
    logs: Vec<PathBuf>,
    /// Lines of the kernel: the output of dmesg or journalctl -k; - is standard input
    #[arg(long, value_name = "FILE")]
    kernel_log: Option<PathBuf>,
    /// How the job ended, as far as is known: "137", "SIGBUS on rank 4", "exit code 1"
    #[arg(long, value_name = "TEXT")]
    exit_info: Option<String>,
    /// Score this file of labelled cases, one JSON object a line
    #[arg(long, value_name = "FILE", conflicts_with_all = ["files", "logs", "kernel_log", "exit_info", "markdown"])]
    eval: Option<PathBuf>,
    #[command(flatten)]
    form: Form,
    /// Markdown for a ticket
    #[arg(long, conflicts_with_all = ["json", "output"])]
    markdown: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let catalog =
        Catalog::built_in().map_err(|error| anyhow::anyhow!("the catalog of signatures: {error}"))?;
    let text = match &args.eval {
        Some(file) => evaluate(catalog, file, args.form)?,
        None => judge(catalog, args)?,
    };
    output::print(&text)?;
    Ok(ExitCode::from(exit::OK))
}

fn judge(catalog: &Catalog, args: &Args) -> anyhow::Result<String> {
    let given: Vec<PathBuf> = args.files.iter().chain(&args.logs).cloned().collect();
    let (found, exits) = files::below(&given)?;
    let (records, logs) = dumps::apart(found)?;
    let mut evidence = Evidence { findings: scan_all(catalog, &logs)?, exits, ..Evidence::default() };
    let has_records = !records.is_empty();
    let named = evidence.findings.iter().filter_map(|findings| findings.rank);
    let dumps = dumps::compared(records, named);
    evidence.add_dumps(dumps);
    scanning::relate(&mut evidence.findings);
    if let Some(file) = &args.kernel_log {
        evidence.findings.push(scan(catalog, file, None, Kind::Kernel)?);
    }
    if let Some(text) = &args.exit_info {
        evidence.findings.push(Scan::of_text(catalog, "exit", None, Kind::Exit, text.as_bytes()));
        evidence.exits = exits::from_text(text);
    }
    // "These logs report no failure" would be a statement about logs that were not read.
    anyhow::ensure!(
        has_records
            || !evidence.exits.is_empty()
            || evidence.findings.iter().any(|finding| finding.bytes > 0),
        "no text in {}: nothing was judged; name files with the output of ranks",
        given
            .iter()
            .chain(&args.kernel_log)
            .map(|path| path.display().to_string())
            .collect::<Vec<_>>()
            .join(", ")
    );
    let report: Report = explain::report(&evidence, &attribute(catalog, &evidence));
    if let Some(form) = args.form.structured() {
        return Ok(form.document(serde_json::to_value(&report)?));
    }
    if args.markdown {
        return Ok(markdown::report(&report));
    }
    Ok(show::report(&report, Paint::for_stdout()))
}

/// Scans files in parallel, one thread per core; results are in the order of the files.
fn scan_all(catalog: &Catalog, files: &[LogFile]) -> anyhow::Result<Vec<Findings>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(files.len().max(1));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((at, file)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            files.get(at).map(|file| (at, file))
        } {
            done.push((at, scan(catalog, &file.path, file.rank, Kind::Log)));
        }
        done
    };
    let mut scanned: Vec<(usize, anyhow::Result<Findings>)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let others = others.into_iter().flat_map(|thread| thread.join().unwrap_or_default());
        own.into_iter().chain(others).collect()
    });
    anyhow::ensure!(scanned.len() == files.len(), "a thread that read logs was lost");
    scanned.sort_by_key(|(at, _)| *at);
    let mut read = Vec::new();
    for ((_, findings), file) in scanned.into_iter().zip(files) {
        match findings {
            Ok(findings) => read.push(findings),
            // An unnamed file among many must not suppress the results of the others.
            Err(error) if file.found => output::note(&format!("left out: {error:#}")),
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

fn scan(catalog: &Catalog, file: &Path, rank: Option<u32>, kind: Kind) -> anyhow::Result<Findings> {
    let name = file.display().to_string();
    let reading = || format!("reading {name}");
    let source: Box<dyn Read> = if file.as_os_str() == "-" {
        Box::new(std::io::stdin().lock())
    } else {
        let file = output::open_input(file).with_context(reading)?;
        match DataReader::of(file).with_context(reading)? {
            Ok(data) => Box::new(data),
            Err(file) => Box::new(file),
        }
    };
    let (mut source, packed) = packed::text_of(source).with_context(reading)?;
    let mut scan = Scan::new(catalog, &name, rank.or_else(|| lines::rank_of_path(&name)), kind);
    let (mut piece, mut starts) = (vec![0; READ_BYTES], true);
    loop {
        match source.read(&mut piece) {
            Ok(0) => return Ok(scan.finish()),
            Ok(count)
                if starts
                    && let Some(why) = files::unreadable(piece.get(..count).unwrap_or_default(), &name) =>
            {
                output::note(&why);
                return Ok(scan.finish());
            }
            Ok(count) => {
                starts = false;
                scan.feed(piece.get(..count).unwrap_or_default());
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // A file that is torn or too large is read up to there.
            Err(error) if packed && !starts => {
                output::note(&format!("{name} is read in part, it cannot be unpacked to its end: {error}"));
                return Ok(scan.finish());
            }
            Err(error) => return Err(error).with_context(reading),
        }
    }
}

/// Scores labelled cases. Every line counts: an unreadable one is a case with an unknown cause.
fn evaluate(catalog: &Catalog, file: &Path, form: Form) -> anyhow::Result<String> {
    let reading = || format!("reading {}", file.display());
    let mut source = BufReader::new(File::open(file).with_context(reading)?);
    let (mut cases, mut answers): (Vec<Case>, Vec<Answer>) = Default::default();
    let (mut line, mut number) = (Vec::new(), 0);
    while source.read_until(b'\n', &mut line).with_context(reading)? > 0 {
        number += 1;
        let text = String::from_utf8_lossy(&line);
        if !text.trim().is_empty() {
            let mut case = Case::read(number, text.trim());
            answers.push(score::answer(catalog, &case));
            // The rest is for the score; a file of cases may be larger than memory.
            case.forget_texts();
            cases.push(case);
        }
        line.clear();
    }
    let summary = score::summary(&cases, &answers);
    if let Some(form) = form.structured() {
        return Ok(form.document(serde_json::json!({ "cases": answers, "summary": summary })));
    }
    Ok(show::score(&cases, &answers, &summary))
}
