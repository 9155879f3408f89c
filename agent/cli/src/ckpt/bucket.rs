//! Durable storage without an agent: for a host that never had one.

use std::path::Path;
use std::process::ExitCode;

use mainstay_checkpoint::owner;
use mainstay_durable::direct::DirectBucket;
use serde_json::json;

use super::files::{print_steps, weighed};
use super::show::size;
use super::{one_of, print_result};
use crate::output::{Form, clean};
use crate::{exit, output};

/// Whether a URL was given in place of a directory.
pub(super) fn is_url(place: &Path) -> bool {
    place.to_str().is_some_and(|place| place.contains("://"))
}

/// The name under which a run is stored: agents store a user's run with its owner, `UID!NAME`; a run without an
/// owner was stored by a user or by an older agent. The caller's run is preferred. A name alone means the only run
/// that has it.
fn stored_name(storage: &DirectBucket, run: &str) -> anyhow::Result<String> {
    if owner::owner(run).is_some() {
        return Ok(run.to_owned());
    }
    let uid = nix::unistd::geteuid().as_raw();
    let owned = owner::owned(uid, run);
    for name in [&owned, run] {
        let (states, problems) = storage.list(Some(name))?;
        if !states.is_empty() || !problems.is_empty() {
            return Ok(name.to_owned());
        }
    }
    let all = storage.runs()?;
    let is_own = |of: &&String| owner::owner(of).is_none_or(|owner| owner == uid);
    let own = all.iter().filter(is_own).map(|run| owner::name(run));
    let one = one_of(run, own)?;
    let stored = all.into_iter().filter(|run| owner::name(run) == one);
    // The caller's run before one without an owner.
    Ok(stored.max_by_key(|run| owner::owner(run) == Some(uid)).unwrap_or_else(|| run.to_owned()))
}

pub(super) fn list(url: &Path, run: Option<&str>, form: Form) -> anyhow::Result<ExitCode> {
    let url = url.display().to_string();
    let storage = DirectBucket::open(&url)?;
    let run = run.map(|run| stored_name(&storage, run)).transpose()?;
    let (states, problems) = storage.list(run.as_deref())?;
    print_steps(&url, &states, &problems, form)
}

pub(super) fn verify(url: &Path, run: Option<&str>, form: Form) -> anyhow::Result<ExitCode> {
    let (mut good, mut bytes, mut bad) = (0, 0, Vec::new());
    let storage = DirectBucket::open(&url.display().to_string())?;
    let run = run.map(|run| stored_name(&storage, run)).transpose()?;
    storage.verify(run.as_deref(), |checked| match checked {
        Ok(size) => (good, bytes) = (good + 1, bytes + size),
        Err(problem) => bad.push(problem),
    })?;
    weighed(good, bytes, &bad, form)
}

pub(super) fn pull(
    url: &str,
    run: &str,
    directory: &Path,
    ranks: &[u32],
    form: Form,
) -> anyhow::Result<ExitCode> {
    let say = |line: String| output::note(&clean(&line));
    let storage = DirectBucket::open(url)?;
    let run = stored_name(&storage, run)?;
    let Some(pulled) = storage.pull(&run, ranks, directory, &say)? else {
        print_result(form, json!({"step": null}), "no complete step of this run exists")?;
        return Ok(ExitCode::from(exit::UNKNOWN));
    };
    let value = json!({"step": pulled.step, "shards_fetched": pulled.shards, "bytes_fetched": pulled.bytes});
    let text = format!("step {}: {} shard(s), {}", pulled.step, pulled.shards, size(pulled.bytes));
    print_result(form, value, &text)
}

pub(super) fn push(url: &str, run: &str, directory: &Path, form: Form) -> anyhow::Result<ExitCode> {
    let Some((step, sent)) = DirectBucket::open(url)?.push(run, directory)? else {
        print_result(form, json!({"step": null}), "the directory has no whole step of this run")?;
        return Ok(ExitCode::from(exit::UNKNOWN));
    };
    let value = json!({"step": step, "bytes_sent": sent.bytes, "bytes_there": sent.there});
    let text = format!("step {step}: {} sent, {} already stored", size(sent.bytes), size(sent.there));
    print_result(form, value, &text)
}
