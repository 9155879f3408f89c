//! A checkpoint directory without an agent.

use std::path::Path;
use std::process::ExitCode;

use mainstay_checkpoint::inventory::{Copy, Medium, StepState, steps};
use mainstay_checkpoint::lineage;
use mainstay_tier::peer::{SealedShard, look_directory, verify_directory};
use serde_json::{Value, json};

use super::show::{age, size};
use super::weigh;
use crate::output::{Form, clean};
use crate::{exit, output};

/// Maximum number of shards with problems that are named.
const MAX_PROBLEMS: usize = 5;

/// The steps of a directory according to their manifests; the data is not read.
pub(super) fn list(directory: &Path, run: Option<&str>, form: Form) -> anyhow::Result<ExitCode> {
    must_exist(directory)?;
    let mut copies = Vec::new();
    let mut problems = Vec::new();
    look_directory(directory, |path, found| match found {
        Ok(sealed) => copies.push(copy(sealed)),
        Err(problem) => problems.push(format!("{}: {problem}", path.display())),
    });
    copies.retain(|copy| run.is_none_or(|run| lineage::is_asked(copy.shard.key.run_id(), run)));
    print_steps(&directory.display().to_string(), &steps(&copies, None), &problems, form)
}

fn must_exist(directory: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(directory.is_dir(), "{}: there is no such directory", directory.display());
    Ok(())
}

/// Prints the steps stored in one place.
pub(super) fn print_steps(
    place: &str,
    states: &[StepState],
    problems: &[String],
    form: Form,
) -> anyhow::Result<ExitCode> {
    if let Some(form) = form.structured() {
        let value = json!({"directory": place, "steps": states.iter().map(step_json).collect::<Vec<_>>(), "problems": problems});
        output::print(&form.document(value))?;
    } else {
        let lines: Vec<String> = states.iter().map(line).collect();
        output::print(&lines.concat())?;
        problems.iter().take(MAX_PROBLEMS).for_each(|problem| output::note(&clean(problem)));
        if let Some(more) = problems.len().checked_sub(MAX_PROBLEMS).filter(|more| *more > 0) {
            output::note(&format!("{more} more shard(s) with problems; --json lists them"));
        }
    }
    Ok(ExitCode::from(weigh(states.iter().map(StepState::is_whole))))
}

/// Reads all data of a directory and compares it.
pub(super) fn verify(directory: &Path, form: Form) -> anyhow::Result<ExitCode> {
    must_exist(directory)?;
    let (mut good, mut bytes, mut bad) = (0_usize, 0_u64, Vec::new());
    verify_directory(directory, |path, checked| match checked {
        Ok(sealed) => {
            good += 1;
            bytes += sealed.shard.bytes;
        }
        Err(problem) => bad.push(format!("{}: {problem}", path.display())),
    });
    weighed(good, bytes, &bad, form)
}

/// Prints the result of the comparison.
pub(super) fn weighed(good: usize, bytes: u64, bad: &[String], form: Form) -> anyhow::Result<ExitCode> {
    if let Some(form) = form.structured() {
        output::print(&form.document(json!({"good": good, "bytes": bytes, "problems": bad})))?;
    } else {
        bad.iter().try_for_each(|problem| output::print(&format!("BAD  {}\n", clean(problem))))?;
        output::print(&format!("{good} shard(s), {}, as they were sealed\n", size(bytes)))?;
    }
    Ok(ExitCode::from(match (good, bad.len()) {
        (0, 0) => exit::UNKNOWN,
        (_, 0) => exit::OK,
        _ => exit::UNHEALTHY,
    }))
}

fn copy(sealed: SealedShard) -> Copy {
    // There is one holder: this host.
    Copy { holder: "".into(), medium: Medium::Disk, own: true, verified: true, shard: sealed.shard }
}

fn line(state: &StepState) -> String {
    let whole = if state.is_whole() { "whole" } else { "not whole" };
    let key = &state.key;
    let (ranks, bytes, age) = (state.ranks.len(), size(state.bytes()), age(state.created));
    format!(
        "step {} of {}, attempt {}: {ranks} of {} rank(s), {bytes}, {age} old, {whole}\n",
        key.step,
        clean(&key.run),
        key.attempt,
        key.world
    )
}

fn step_json(state: &StepState) -> Value {
    let key = &state.key;
    json!({
        "step": key.step, "run": key.run, "job": key.job, "attempt": key.attempt, "world_size": key.world,
        "created_unix_s": state.created, "bytes": state.bytes(), "whole": state.is_whole(),
        "missing_ranks": state.missing(64),
    })
}
