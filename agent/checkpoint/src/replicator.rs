//! The replicator's part of GKE's multi-tier checkpointing: the files through which a trainer (MaxText, Orbax, NeMo)
//! and the replicator of its checkpoints communicate in one directory.
//!
//! The trainer writes `replicator.yaml`; the replicator removes it after reading it. `replicator.prerestore` then
//! announces the step, and a `.restore` for each worker reports that it is present. New directories whose names are
//! numbers are new checkpoints.

use std::collections::BTreeMap;

/// The request that the trainer writes.
pub const REQUEST_NAME: &str = "replicator.yaml";

/// Announces a step before it is present.
pub const PRERESTORE_NAME: &str = "replicator.prerestore";

/// Errors that the replicator continues after.
pub const ERRORS_NAME: &str = "replicator.errors";

/// The error after which it stops.
pub const FAILED_NAME: &str = "replicator.failed";

/// A file of the trainer that is kept when it restarts.
pub const JAX_NAME: &str = "jax-init-info.txt";

/// Maximum size of a request, bytes.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The request of a trainer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicatorRequest {
    /// The job's name.
    pub job: String,
    /// `orbax` or `pytorch.distributed`.
    pub framework: String,
    /// Index of this node.
    pub node: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Number of workers on this node.
    pub workers: u32,
    /// Number of groups of nodes that hold the same content; `None`: the content of each node is unique.
    pub parallelism: Option<u32>,
    /// Requested keys that are not followed, each with the setting that decides instead.
    pub refused: Vec<&'static str>,
}

/// Keys that are not followed: placement of replicas and uploads are configured for all jobs of a host together.
const REFUSED: [(&str, &str); 4] = [
    ("peer-ranks", "peer-ranks: replicas go where the failure domains of checkpoint.peers put them"),
    ("peers-per-node", "peers-per-node: checkpoint.redundancy says how many replicas there are"),
    (
        "backup-interval-minutes",
        "backup-interval-minutes: checkpoint.durable_every says which steps are uploaded",
    ),
    (
        "backup-interval-steps",
        "backup-interval-steps: checkpoint.durable_every says which steps are uploaded",
    ),
];

/// Parses a request: plain `key: value` lines of YAML, with lists in brackets or one item per line.
///
/// # Errors
/// The request is too long, a line is malformed, or a key is missing or has an invalid value. Unknown keys are skipped.
pub fn parse(text: &str) -> Result<ReplicatorRequest, String> {
    if text.len() > MAX_REQUEST_BYTES {
        return Err(format!("it is longer than {MAX_REQUEST_BYTES} bytes"));
    }
    let mut values: BTreeMap<&str, String> = BTreeMap::new();
    for line in text.lines() {
        let line = line.split(" #").next().unwrap_or_default().trim_end();
        // Skip list items and everything below the first level.
        if line.trim().is_empty() || line.starts_with([' ', '-', '#', '\t']) || line == "---" {
            continue;
        }
        let (key, value) = line.split_once(':').ok_or_else(|| format!("{line:?} is no \"key: value\""))?;
        values.insert(key.trim(), unquoted(value.trim()).to_owned());
    }
    let text = |key: &str| values.get(key).filter(|value| !value.is_empty() && *value != "null");
    let needed = |key: &str| text(key).ok_or_else(|| format!("{key} is missing"));
    let number = |key: &str, value: &String| -> Result<u32, String> {
        value.parse().map_err(|_| format!("{key} is {value:?}, and must be a whole number"))
    };
    let optional = |key: &str| text(key).map(|value| number(key, value)).transpose();
    let job = needed("job-name")?.clone();
    if job.len() > 200 || job.starts_with('.') || job.contains(['/', '\0', '@']) {
        return Err(format!("job-name {job:?} cannot be part of a file's name"));
    }
    let (node, nodes) = (number("node-rank", needed("node-rank")?)?, number("nodes", needed("nodes")?)?);
    if node >= nodes {
        return Err(format!("node-rank {node} is none of {nodes} nodes"));
    }
    let workers = optional("workers-per-node")?.unwrap_or(1);
    if !(1..=1024).contains(&workers) {
        return Err(format!("workers-per-node is {workers}"));
    }
    let parallelism = optional("assume-data-parallelism")?;
    if parallelism.is_some_and(|groups| groups == 0 || !nodes.is_multiple_of(groups)) {
        return Err(format!(
            "{nodes} nodes cannot be {} groups that hold the same",
            parallelism.unwrap_or(0)
        ));
    }
    let framework = text("framework").cloned().unwrap_or_else(|| "orbax".to_owned());
    let refused =
        REFUSED.iter().filter(|(key, _)| values.contains_key(key)).map(|(_, key_text)| *key_text).collect();
    Ok(ReplicatorRequest { job, framework, node, nodes, workers, parallelism, refused })
}

fn unquoted(value: &str) -> &str {
    let quoted = |quote: char| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    quoted('"').or_else(|| quoted('\'')).unwrap_or(value)
}

/// The content of [`PRERESTORE_NAME`].
pub fn prerestore(step: Option<u64>) -> String {
    step.map_or_else(|| "{}\n".to_owned(), |step| format!("restore-step: {step}\n"))
}

/// The name under which a worker finds what to load; the step is 0 if there is nothing.
pub fn restore_name(asked: &ReplicatorRequest, step: Option<u64>, worker: u32) -> String {
    format!("{}-s{}-n{}-w{worker}.restore", asked.job, step.unwrap_or(0), asked.node)
}

/// The name of a sealed checkpoint with this root.
pub fn data_name(root: &str) -> String {
    format!("D{root}.data")
}

/// The step of a directory that the trainer saved; `None` if the name is not a step.
pub fn step_of(name: &str) -> Option<u64> {
    let digits = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| name.parse().ok()).flatten()
}

/// Whether a name is kept when a trainer starts again; all others belong to its previous start.
pub fn stays(name: &str) -> bool {
    let stays = [JAX_NAME, REQUEST_NAME, "lost+found"].contains(&name);
    stays || name.ends_with(".data") || name.ends_with(".meta")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WRITTEN: &str = "assume-data-parallelism: 2\nbackup-interval-minutes: 30\nframework: orbax\njob-name: 'llama-7b'\n\
                           node-rank: 3\nnodes: 4\npeer-ranks:\n- 1\n- 2\npeers-per-node: 1\nworkers-per-node: 2\n";

    #[test]
    fn the_request_of_a_trainer_is_parsed() {
        let asked = parse(WRITTEN).unwrap();
        let framework = "orbax".to_owned();
        let wanted = ReplicatorRequest {
            job: "llama-7b".to_owned(),
            framework,
            node: 3,
            nodes: 4,
            workers: 2,
            parallelism: Some(2),
            refused: asked.refused.clone(),
        };
        assert_eq!(asked, wanted);
        // Only keys that were requested and are not followed are reported.
        let reported: Vec<&str> = asked.refused.iter().filter_map(|word| word.split(':').next()).collect();
        assert_eq!(reported, ["peer-ranks", "peers-per-node", "backup-interval-minutes"]);
        assert!(parse("job-name: j\nnode-rank: 0\nnodes: 1\n").unwrap().refused.is_empty());
        let least =
            parse("job-name: j\nframework: pytorch.distributed\nnode-rank: 0\nnodes: 1\npeer-ranks: [1]\n")
                .unwrap();
        assert_eq!((least.workers, least.parallelism), (1, None));
        assert_eq!(restore_name(&asked, Some(5), 1), "llama-7b-s5-n3-w1.restore");
        assert_eq!(restore_name(&asked, None, 0), "llama-7b-s0-n3-w0.restore");
        assert_eq!(
            (prerestore(Some(5)), prerestore(None)),
            ("restore-step: 5\n".to_owned(), "{}\n".to_owned())
        );
    }

    #[test]
    fn an_invalid_request_is_rejected_with_the_reason() {
        for (from, to, reported) in [
            ("node-rank: 3", "node-rank: 4", "none of 4"),
            ("nodes: 4", "nodes: many", "whole number"),
            ("job-name: 'llama-7b'", "job-name: ../x", "file's name"),
            ("job-name: 'llama-7b'\n", "", "job-name is missing"),
            ("parallelism: 2", "parallelism: 3", "groups"),
        ] {
            assert!(parse(&WRITTEN.replace(from, to)).unwrap_err().contains(reported), "{to}");
        }
    }

    #[test]
    fn only_numbers_are_steps_and_only_data_survives_a_restart() {
        assert_eq!(
            (step_of("120"), step_of("120.tmp"), step_of(""), step_of("-1")),
            (Some(120), None, None, None)
        );
        let data = data_name(&"ab".repeat(32));
        assert!(stays(&data) && stays(JAX_NAME) && stays(REQUEST_NAME));
        assert!(!stays("120") && !stays("j-s5-n0-w0.restore") && !stays(PRERESTORE_NAME));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,200}", key in "(job-name|nodes|node-rank)", value in "\\PC{0,20}") {
            let _ = parse(&text);
            let _ = parse(&format!("{WRITTEN}{key}: {value}\n"));
        }
    }
}
