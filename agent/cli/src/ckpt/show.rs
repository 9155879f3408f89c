//! The output format of lists and results.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use mainstay_proto::v1::{
    CheckpointAdvice, CheckpointPeer, CheckpointStep, CheckpointUnlike, ListCheckpointsResponse,
    RestoreProgress, RestoreResult,
};
use serde_json::{Value, json};

use crate::output::{aligned, clean};

/// The job name of steps that a trainer wrote in its own format.
const OF_TRAINERS: &str = "files";

/// Steps and peers, one line each.
pub(super) fn table(answer: &ListCheckpointsResponse) -> String {
    let mut rows =
        vec![["STEP", "RUN", "ATTEMPT", "RANKS", "SIZE", "AGE", "COPIES", "STATE"].map(str::to_owned)];
    rows.extend(answer.steps.iter().map(|step| {
        let age = step.created.as_ref().map_or_else(String::new, |at| age(at.seconds));
        [
            step.step.to_string(),
            clean(&step.run),
            attempt(&step.job, step.attempt),
            step.world_size.to_string(),
            size(step.bytes),
            age,
            step.least_copies.to_string(),
            state(step, answer.redundancy),
        ]
    }));
    let mut text = if answer.steps.is_empty() { "no steps\n".to_owned() } else { columns(&rows) };
    let (used, quota) = (size(answer.store_used), size(answer.store_quota));
    let parity = if answer.parity.is_empty() {
        String::new()
    } else {
        format!(", shards in pieces of {}", clean(&answer.parity))
    };
    let excluded = excluded(answer.excluded.as_ref());
    let _ = writeln!(text, "\n{}: {used} of {quota} kept for others{parity}{excluded}", clean(&answer.name));
    for peer in &answer.peers {
        let _ = writeln!(text, "{}", peer_line(peer));
    }
    text.push_str(&unlike(&answer.unlike));
    text.push_str(&advice(&answer.advice));
    text
}

/// One line for each group of ranks: the newest step at which they saved different bytes, and how many there were
/// before it.
fn unlike(found: &[CheckpointUnlike]) -> String {
    let mut groups: BTreeMap<(&str, &str), Vec<&CheckpointUnlike>> = BTreeMap::new();
    for one in found {
        groups.entry((&one.run, &one.group)).or_default().push(one);
    }
    let mut text = String::new();
    for of_group in groups.into_values() {
        let Some(newest) = of_group.iter().max_by_key(|one| (one.attempt, one.step)) else { continue };
        let earlier = match of_group.len() - 1 {
            0 => String::new(),
            earlier => format!(" (and {earlier} more of their steps; --json lists them)"),
        };
        let _ = writeln!(text, "{}{earlier}", clean(&newest.headline));
    }
    text
}

/// The attempt that saved a step. Steps that a trainer wrote belong to none: their value in its place distinguishes
/// copies of one step.
pub(super) fn attempt(job: &str, attempt: u64) -> String {
    if job == OF_TRAINERS { "-".to_owned() } else { attempt.to_string() }
}

/// One line for each job: how often it should save, and to which tier.
fn advice(advice: &[CheckpointAdvice]) -> String {
    let mut text = String::new();
    for of_job in advice.chunk_by(|a, b| a.job == b.job) {
        let tiers =
            of_job.iter().map(|advice| format!("{} every {:.0} s", clean(&advice.tier), advice.every_s));
        let was = of_job.first().map_or(0.0, |advice| advice.was_s);
        let tiers = tiers.collect::<Vec<_>>().join(", ");
        let _ = writeln!(
            text,
            "job {}: saving costs least to {tiers} (it saves every {was:.0} s)",
            clean(&of_job[0].job)
        );
    }
    text
}

fn peer_line(peer: &CheckpointPeer) -> String {
    let name = clean(&peer.name);
    let reported = match (&peer.error, peer.rate) {
        (Some(error), _) => format!(": {}", clean(error)),
        (None, Some(rate)) => format!(", last shard at {}/s", size(rate)),
        (None, None) => String::new(),
    };
    if !peer.alive {
        return format!("{name}: does not answer{reported}");
    }
    let excluded = excluded(peer.excluded.as_ref());
    format!(
        "{name}: {} of {} kept for others{excluded}{reported}",
        size(peer.store_used),
        size(peer.store_quota)
    )
}

/// Why a host is not eligible for replicas.
fn excluded(reason: Option<&String>) -> String {
    reason.map_or_else(String::new, |reason| format!(", excluded ({})", clean(reason)))
}

fn state(step: &CheckpointStep, redundancy: u32) -> String {
    match (step.whole, step.least_copies > redundancy) {
        (true, true) => "whole, replicated".to_owned(),
        (true, false) => "whole".to_owned(),
        (false, _) => format!("not whole: without rank {}", ranks(&step.missing_ranks)),
    }
}

fn ranks(ranks: &[u32]) -> String {
    let named: Vec<String> = ranks.iter().take(8).map(u32::to_string).collect();
    let more = if ranks.len() > 8 { ", …" } else { "" };
    format!("{}{more}", named.join(", "))
}

/// Where the shards of a step are stored.
pub(super) fn copies(step: &CheckpointStep) -> String {
    let of_attempt = match attempt(&step.job, step.attempt).as_str() {
        "-" => "written by the trainer".to_owned(),
        number => format!("attempt {number}"),
    };
    let mut text = format!("step {} of {}, {of_attempt}\n", step.step, clean(&step.run));
    let mut rows = vec![["RANK", "HOLDER", "WHERE", "SIZE", "ROOT"].map(str::to_owned)];
    rows.extend(step.copies.iter().map(|copy| {
        let own = if copy.own { ", own" } else { "" };
        let piece =
            if copy.piece.is_empty() { String::new() } else { format!(", piece {}", clean(&copy.piece)) };
        let place = format!("{}{own}{piece}", clean(&copy.medium));
        let root = copy.root.chars().take(16).collect();
        [copy.rank.to_string(), clean(&copy.holder), place, size(copy.bytes), root]
    }));
    text.push_str(&columns(&rows));
    if !step.whole {
        let _ = writeln!(text, "not whole: without rank {}", ranks(&step.missing_ranks));
    }
    text
}

fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    aligned(rows, |_| true, None).iter().map(|line| format!("{line}\n")).collect()
}

/// One line while shards arrive.
pub(super) fn progress(at: &RestoreProgress) -> String {
    if !at.told.is_empty() {
        return clean(&at.told);
    }
    let share = (at.bytes_done * 20).checked_div(at.bytes).unwrap_or(20);
    let share = usize::try_from(share.min(20)).unwrap_or(20);
    let bar = format!("{}{}", "#".repeat(share), ".".repeat(20 - share));
    let (done, all) = (size(at.bytes_done), size(at.bytes));
    format!("step {} [{bar}] {} of {} shards, {done} of {all} from peers", at.step, at.shards_done, at.shards)
}

/// The result of a restore.
pub(super) fn result(result: &RestoreResult, directory: &Path) -> String {
    let Some(step) = result.step else { return "no whole step is known here or at peers".to_owned() };
    let (here, fetched) = (result.shards_here, result.shards_fetched);
    let bytes = size(result.bytes_fetched);
    let into = directory.display();
    let rate = (result.bytes_fetched as f64 / result.seconds.max(1e-9)) as u64;
    format!(
        "step {step} is whole in {into}: {here} shard(s) were here, {fetched} came from peers ({bytes}, {}/s)",
        size(rate)
    )
}

pub(super) fn result_json(result: &RestoreResult, directory: &Path) -> Value {
    json!({
        "step": result.step,
        "directory": directory,
        "decision": result.fence,
        "decided_by": result.decided_by,
        "bytes_fetched": result.bytes_fetched,
        "shards_fetched": result.shards_fetched,
        "shards_here": result.shards_here,
        "seconds": result.seconds,
    })
}

pub(super) fn as_json(answer: &ListCheckpointsResponse) -> Value {
    json!({
        "name": answer.name,
        "redundancy": answer.redundancy, "parity": answer.parity, "excluded": answer.excluded,
        "store": {"used": answer.store_used, "quota": answer.store_quota},
        "steps": answer.steps.iter().map(step_json).collect::<Vec<_>>(),
        "peers": answer.peers.iter().map(|peer| json!({
            "name": peer.name, "alive": peer.alive, "error": peer.error, "domain": peer.domain,
            "version": peer.version, "store": {"used": peer.store_used, "quota": peer.store_quota}, "rate": peer.rate,
            "excluded": peer.excluded, "failures": peer.failures,
        })).collect::<Vec<_>>(),
        "unlike": answer.unlike,
        "advice": answer.advice,
        "counts": answer.counts.unwrap_or_default(),
    })
}

fn step_json(step: &CheckpointStep) -> Value {
    json!({
        "step": step.step, "run": step.run, "job": step.job, "attempt": step.attempt, "world_size": step.world_size,
        "created_unix_s": step.created.as_ref().map(|at| at.seconds), "bytes": step.bytes, "whole": step.whole,
        "missing_ranks": step.missing_ranks, "least_copies": step.least_copies,
        "copies": step.copies,
    })
}

/// A number of bytes with three digits and its unit.
pub(super) fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes >= 1 << shift) {
        Some((unit, shift)) => {
            let number = bytes as f64 / (1_u64 << shift) as f64;
            let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
            format!("{number:.digits$} {unit}")
        }
        None => format!("{bytes} B"),
    }
}

/// The age in one unit.
pub(super) fn age(unix_s: i64) -> String {
    let now = mainstay_sys::clock::now().wall.0 / 1_000_000_000;
    let seconds = now.saturating_sub(unix_s).max(0);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        let shown = [0, 1023, 1024, 1 << 20, (10 << 20) + (1 << 19), 100 << 30].map(size);
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "1.00 MiB", "10.5 MiB", "100 GiB"]);
    }

    #[test]
    fn a_step_that_is_not_whole_names_the_ranks_of_missing_shards() {
        let mut step = CheckpointStep {
            step: 7,
            world_size: 12,
            missing_ranks: (0..10).collect(),
            ..Default::default()
        };
        testing::snapshot!("ckpt", "a step without shards", state(&step, 1));
        (step.whole, step.least_copies) = (true, 1);
        assert_eq!(state(&step, 1), "whole");
        step.least_copies = 2;
        assert_eq!(state(&step, 1), "whole, replicated");
    }

    #[test]
    fn a_group_that_differs_at_many_steps_is_one_line() {
        let found = |step: u64, group: &str| CheckpointUnlike {
            run: "exp".to_owned(),
            step,
            group: group.to_owned(),
            headline: format!("step {step} of exp: rank 2 differs in {group}"),
            ..CheckpointUnlike::default()
        };
        let many: Vec<_> = (1..=30).map(|step| found(step, "dp0")).chain([found(7, "dp1")]).collect();
        let text = unlike(&many);
        testing::snapshot!("ckpt", "groups that differ", text);
    }

    #[test]
    fn steps_that_a_trainer_wrote_have_no_attempt() {
        assert_eq!((attempt("files", 1000).as_str(), attempt("exp", 3).as_str()), ("-", "3"));
    }

    #[test]
    fn a_piece_is_distinguished_from_a_whole_shard() {
        let copy = |piece: &str| mainstay_proto::v1::CheckpointCopy {
            holder: "b:1".to_owned(),
            medium: "memory".to_owned(),
            root: "ab".repeat(32),
            bytes: 1024,
            piece: piece.to_owned(),
            ..Default::default()
        };
        let step =
            CheckpointStep { whole: true, copies: vec![copy(""), copy("4 of 4+1")], ..Default::default() };
        let shown = copies(&step);
        let places: Vec<&str> = shown.lines().skip(2).map(|line| line.trim_end()).collect();
        assert!(
            places[0].contains("  memory                  ") && places[1].contains("memory, piece 4 of 4+1"),
            "{shown}"
        );
        let answer = ListCheckpointsResponse { parity: "4+1".to_owned(), ..Default::default() };
        testing::snapshot!("ckpt", "shards in pieces", table(&answer));
        assert!(!table(&ListCheckpointsResponse::default()).contains("pieces"));
    }

    #[test]
    fn an_excluded_host_has_a_reason_and_no_other_has_one() {
        let peer = |name: &str, excluded: Option<&str>| CheckpointPeer {
            name: name.to_owned(),
            alive: true,
            excluded: excluded.map(str::to_owned),
            ..Default::default()
        };
        let peers = vec![peer("b:1", Some("gpu.0000:3b:00: lost")), peer("c:1", None)];
        let mut answer = ListCheckpointsResponse { name: "a:1".to_owned(), peers, ..Default::default() };
        assert!(
            table(&answer).contains("b:1: 0 B of 0 B kept for others, excluded (gpu.0000:3b:00: lost)\n")
        );
        assert_eq!(table(&answer).matches("excluded").count(), 1);
        answer.excluded = Some("cloud.maintenance: soon".to_owned());
        assert!(
            table(&answer).contains("a:1: 0 B of 0 B kept for others, excluded (cloud.maintenance: soon)\n")
        );
    }

    #[test]
    fn save_advice_is_one_line_for_each_job() {
        let of_tier = |job: &str, tier: &str, every_s| CheckpointAdvice {
            job: job.to_owned(),
            tier: tier.to_owned(),
            every_s,
            was_s: 7200.0,
        };
        let reported = advice(&[
            of_tier("a", "memory", 170.4),
            of_tier("a", "durable", 340.0),
            of_tier("b", "memory", 60.0),
        ]);
        testing::snapshot!("ckpt", "advice for each job", reported);
        assert_eq!(advice(&[]), "");
    }

    #[test]
    fn a_bar_is_as_long_as_the_received_share() {
        let at = RestoreProgress {
            step: 3,
            bytes: 200,
            bytes_done: 50,
            shards: 4,
            shards_done: 1,
            told: String::new(),
            files_wanted: 0,
            files_token: String::new(),
        };
        testing::snapshot!("ckpt", "progress of a restore", progress(&at));
        let none = RestoreProgress { bytes: 0, bytes_done: 0, ..at };
        assert!(progress(&none).contains("[####################]"));
    }
}
