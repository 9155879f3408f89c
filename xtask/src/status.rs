//! The ranks in the output of `mainstay status --json`. Searches for the names at any depth, because the
//! surrounding document will grow.

use std::path::Path;

use serde_json::Value;

/// A rank as the health API shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rank {
    /// Its number in the job.
    pub rank: u64,
    /// The last step that it completed; none before its first.
    pub step: Option<u64>,
    /// The loss of that step.
    pub loss: Option<f64>,
    /// Its innermost open section.
    pub section: Option<String>,
    /// Its phase.
    pub phase: String,
}

/// The ranks of the jobs that run below a folder, by their number; none if the answer is not understood. Other jobs
/// may run on this host too.
pub fn ranks(answer: &str, below: &Path) -> Vec<Rank> {
    let mut found = Vec::new();
    if let Ok(answer) = serde_json::from_str::<Value>(answer) {
        collect(&answer, below, &mut found);
    }
    found.sort_by_key(|rank| rank.rank);
    found
}

fn collect(value: &Value, below: &Path, found: &mut Vec<Rank>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| collect(value, below, found)),
        Value::Object(fields) => {
            let elsewhere = value["run_dir"].as_str().is_some_and(|dir| !Path::new(dir).starts_with(below));
            if elsewhere {
                return;
            }
            // A rank has a number and a local rank; a verdict that names a rank has only the number.
            let is_rank = fields.contains_key("local_rank") || fields.contains_key("localRank");
            match number(value, "rank").filter(|_| is_rank) {
                Some(rank) => found.push(read(rank, value)),
                None => fields.values().for_each(|value| collect(value, below, found)),
            }
        }
        _ => {}
    }
}

fn read(rank: u64, fields: &Value) -> Rank {
    let beat = if fields["beat"].is_object() { &fields["beat"] } else { fields };
    let section = beat["section"].as_str().or_else(|| beat["sections"].as_array()?.last()?.as_str());
    Rank {
        rank,
        step: number(beat, "step"),
        loss: beat["loss"].as_f64(),
        section: section.filter(|name| !name.is_empty()).map(str::to_string),
        phase: fields["phase"].as_str().or(fields["state"].as_str()).unwrap_or("-").to_lowercase(),
    }
}

/// A number; 64-bit ones are text in protobuf's JSON.
fn number(fields: &Value, name: &str) -> Option<u64> {
    fields[name].as_u64().or_else(|| fields[name].as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_at_any_depth() {
        let answer = r#"{"node":{"jobs":[{"run_dir":"/runs/a","last_verdict":{"rank":9},"ranks":[
            {"rank":1,"local_rank":1,"phase":"STEPPING","step":"41","loss":2.5,"sections":["checkpoint"]},
            {"rank":0,"local_rank":0,"phase":"started"}]}]}}"#;
        let ranks = ranks(answer, Path::new("/runs"));
        assert_eq!(ranks.len(), 2);
        assert_eq!((ranks[0].rank, ranks[0].step, ranks[0].phase.as_str()), (0, None, "started"));
        assert_eq!((ranks[1].step, ranks[1].loss), (Some(41), Some(2.5)));
        assert_eq!(ranks[1].section.as_deref(), Some("checkpoint"));
    }

    #[test]
    fn jobs_of_others_are_skipped() {
        let answer = r#"{"jobs":[{"run_dir":"/elsewhere/b","ranks":[{"rank":0,"local_rank":0}]}]}"#;
        assert!(ranks(answer, Path::new("/runs")).is_empty());
    }

    #[test]
    fn an_answer_that_is_no_json_shows_no_ranks() {
        assert!(ranks("no agent answers", Path::new("/")).is_empty());
    }
}
