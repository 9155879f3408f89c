//! `mainstay replay`: judges a bundle or a run again with this version, and shows what differs.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use mainstay_model::entry::Entry;
use mainstay_view::replay::{Replayed, UserPolicy, replay_with};
use serde_json::{Value, json};

use super::output::Form;
use super::{bundle, exit, explain, output};
use crate::policy::Script;

const EXAMPLES: &str = "\
Examples:
  mainstay replay incident.jsonl       a bundle of `mainstay bundle`
  mainstay replay exp-7 --json         a run of this host
  zcat exp-7.gz | mainstay replay -    a compressed bundle
  mainstay replay exp-7 --policy mine.py

Exit status: 0 same verdicts and decisions, 1 at least one differs, 3 there was no failure or the input cannot be read.";

/// Diagnose a recorded run again and show what differs from the recorded verdicts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A bundle (- is standard input), a run directory, or the name of a run in the usual place; the newest run if not given
    what: Option<PathBuf>,
    /// The run, as an option
    #[arg(long, value_name = "RUN", conflicts_with = "what")]
    job: Option<PathBuf>,
    /// The policy that decided then (--policy of the run), or another one; without it the built-in one decides
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    #[command(flatten)]
    form: Form,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let entries = match args.what.as_ref().or(args.job.as_ref()) {
        Some(file) if file.is_file() || file.as_os_str() == "-" => read_bundle(file)?,
        other => explain::read(&explain::find_run(other.map(PathBuf::as_path))?)?,
    };
    let policy = args.policy.as_deref().map(user_policy).transpose()?;
    let replayed = replay_with(&entries, policy.as_ref().map(|policy| policy as &dyn UserPolicy));
    if let Some(form) = args.form.structured() {
        let failures: Vec<Value> = replayed.iter().map(as_json).collect();
        output::print(&form.document(json!({ "failures": failures })))?;
    } else {
        output::print(&render(&replayed))?;
    }
    Ok(ExitCode::from(match &replayed[..] {
        [] => exit::UNKNOWN,
        all if all.iter().any(|one| !one.differences().is_empty()) => exit::DEGRADED,
        _ => exit::OK,
    }))
}

fn user_policy(file: &Path) -> anyhow::Result<Script> {
    Script::load(file)?.map_err(|message| anyhow!(message))
}

/// The longest line of a bundle. Entries have the last lines of a rank's output, not all of it.
const MAX_LINE_BYTES: u64 = 64 << 20;

pub(super) fn read_bundle(path: &Path) -> anyhow::Result<Vec<Entry>> {
    let reading = || format!("reading {}", path.display());
    let input: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(output::open_input(path).with_context(reading)?),
    };
    let mut lines = BufReader::new(input);
    let mut next = |line: &mut Vec<u8>| {
        line.clear();
        let read = lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line).with_context(reading)?;
        if read as u64 == MAX_LINE_BYTES {
            bail!("{}: not a bundle: a line of more than {MAX_LINE_BYTES} bytes", path.display());
        }
        Ok(read > 0)
    };
    let mut line = Vec::new();
    next(&mut line)?;
    if line.starts_with(&[0x1f, 0x8b]) {
        bail!("{0}: compressed; zcat {0} | mainstay replay -", path.display());
    }
    let head: Option<Value> = serde_json::from_slice(&line).ok();
    match head.as_ref().and_then(|head| head["mainstay_bundle"].as_u64()) {
        Some(bundle::FORMAT_VERSION) => {}
        Some(later) => {
            bail!(
                "{}: a bundle of form {later}; this version reads form {}",
                path.display(),
                bundle::FORMAT_VERSION
            )
        }
        None => bail!("{}: not a bundle, by its first line; `mainstay bundle` makes one", path.display()),
    }
    let mut entries = Vec::new();
    while next(&mut line)? {
        // Entries of kinds that only a later version knows are skipped, as in a journal.
        entries.extend(serde_json::from_str::<Entry>(&String::from_utf8_lossy(&line)).ok());
    }
    Ok(entries)
}

fn as_json(replayed: &Replayed) -> Value {
    json!({
        "job": replayed.job,
        "incident": replayed.incident,
        "differences": replayed.differences(),
        "policy_trouble": replayed.trouble,
        "then": { "verdict": replayed.then.verdict, "decision": replayed.then.decision },
        "now": { "verdict": replayed.now.verdict, "decision": replayed.now.decision },
    })
}

fn render(replayed: &[Replayed]) -> String {
    let mut text = String::new();
    for one in replayed {
        text.push_str(&format!("failure {} of {}: {}\n", one.incident.0, one.job, one.now.verdict.headline));
        if let Some(problem) = &one.trouble {
            text.push_str(&format!("  policy: {}\n", output::clean(problem)));
        }
        let differences = one.differences();
        if differences.is_empty() {
            text.push_str("  same verdict and decision\n");
        }
        for difference in differences {
            text.push_str(&format!("  {difference}\n"));
        }
    }
    if replayed.is_empty() {
        text.push_str("no failure is recorded there\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_that_nobody_writes_into_is_not_waited_for() {
        let directory = testing::tempdir().expect("a directory");
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        read_bundle(&fifo).expect_err("it is refused");
    }

    #[test]
    fn a_very_long_line_is_no_bundle_and_is_not_read_to_its_end() {
        // Reading on would never end.
        read_bundle(Path::new("/dev/zero")).expect_err("it has no line");
    }
}
