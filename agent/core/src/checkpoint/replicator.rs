//! GKE's multi-tier checkpointing, the replicator's part: files by which a trainer (MaxText, Orbax, NeMo) and whoever replicates its
//! checkpoints talk in one directory.
//!
//! The trainer leaves `replicator.yaml`; it is taken away when it was understood. Then `replicator.prerestore` says which step is
//! coming, and a `.restore` for each worker that it is there. New directories whose names are numbers are new checkpoints.

use std::collections::BTreeMap;

/// What the trainer leaves.
pub const ASKED_NAME: &str = "replicator.yaml";

/// What is told before a step is there.
pub const PRERESTORE_NAME: &str = "replicator.prerestore";

/// What went wrong and is no end.
pub const ERRORS_NAME: &str = "replicator.errors";

/// What went wrong and is one.
pub const FAILED_NAME: &str = "replicator.failed";

/// A file of the trainer's that stays over its restarts.
pub const JAX_NAME: &str = "jax-init-info.txt";

/// Longer than anything that is asked.
const LONGEST: usize = 64 << 10;

/// What a trainer asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The job's name.
    pub job: String,
    /// `orbax` or `pytorch.distributed`.
    pub framework: String,
    /// This node.
    pub node: u32,
    /// How many there are.
    pub nodes: u32,
    /// Workers of this node.
    pub workers: u32,
    /// So many groups of nodes hold the same; none: each node is alone with what it holds.
    pub parallelism: Option<u32>,
    /// What it asks for beside that and does not get: each with who decides it here instead.
    pub refused: Vec<&'static str>,
}

/// Keys that are understood and not followed: where replicas go and what is uploaded is decided for all jobs of a host alike.
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

/// Reads what a trainer asks for: plain `key: value` lines of YAML, with lists in brackets or line by line.
///
/// # Errors
/// A key is missing or invalid. Keys that are not known are passed over.
pub fn parse(text: &str) -> Result<Asked, String> {
    if text.len() > LONGEST {
        return Err(format!("it is longer than {LONGEST} bytes"));
    }
    let mut values: BTreeMap<&str, String> = BTreeMap::new();
    for line in text.lines() {
        let line = line.split(" #").next().unwrap_or_default().trim_end();
        // A list line by line, and what is deeper than the first level.
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
    let refused = REFUSED.iter().filter(|(key, _)| values.contains_key(key)).map(|(_, word)| *word).collect();
    Ok(Asked { job, framework, node, nodes, workers, parallelism, refused })
}

fn unquoted(value: &str) -> &str {
    let quoted = |quote: char| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    quoted('"').or_else(|| quoted('\'')).unwrap_or(value)
}

/// What stands in [`PRERESTORE_NAME`].
pub fn prerestore(step: Option<u64>) -> String {
    step.map_or_else(|| "{}\n".to_owned(), |step| format!("restore-step: {step}\n"))
}

/// The name by which a worker finds what it is to load; of step 0 where there is nothing.
pub fn restore_name(asked: &Asked, step: Option<u64>, worker: u32) -> String {
    format!("{}-s{}-n{}-w{worker}.restore", asked.job, step.unwrap_or(0), asked.node)
}

/// Where a checkpoint lies when it was sealed, by its root.
pub fn data_name(root: &str) -> String {
    format!("D{root}.data")
}

/// The step of a directory that the trainer has just saved; none if it is none.
pub fn step_of(name: &str) -> Option<u64> {
    let digits = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| name.parse().ok()).flatten()
}

/// Whether a name stays when a trainer begins anew; all others are of a life that is over.
pub fn stays(name: &str) -> bool {
    let stays = [JAX_NAME, ASKED_NAME, "lost+found"].contains(&name);
    stays || name.ends_with(".data") || name.ends_with(".meta")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WRITTEN: &str = "assume-data-parallelism: 2\nbackup-interval-minutes: 30\nframework: orbax\njob-name: 'llama-7b'\n\
                           node-rank: 3\nnodes: 4\npeer-ranks:\n- 1\n- 2\npeers-per-node: 1\nworkers-per-node: 2\n";

    #[test]
    fn what_a_trainer_asks_for_is_read() {
        let asked = parse(WRITTEN).unwrap();
        let framework = "orbax".to_owned();
        let wanted = Asked {
            job: "llama-7b".to_owned(),
            framework,
            node: 3,
            nodes: 4,
            workers: 2,
            parallelism: Some(2),
            refused: asked.refused.clone(),
        };
        assert_eq!(asked, wanted);
        // What is not followed is said, and who decides it; nothing is said of what is followed or was not asked.
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
    fn what_makes_no_sense_is_refused_with_its_reason() {
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
    fn only_numbers_are_steps_and_only_data_outlives_a_restart() {
        assert_eq!(
            (step_of("120"), step_of("120.tmp"), step_of(""), step_of("-1")),
            (Some(120), None, None, None)
        );
        let data = data_name(&"ab".repeat(32));
        assert!(stays(&data) && stays(JAX_NAME) && stays(ASKED_NAME));
        assert!(!stays("120") && !stays("j-s5-n0-w0.restore") && !stays(PRERESTORE_NAME));
    }

    proptest! {
        #[test]
        fn no_words_make_it_panic(text in "\\PC{0,200}", key in "(job-name|nodes|node-rank)", value in "\\PC{0,20}") {
            let _ = parse(&text);
            let _ = parse(&format!("{WRITTEN}{key}: {value}\n"));
        }
    }
}
