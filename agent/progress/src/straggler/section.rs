//! What the name of a section means for the time in it: whether the rank works there or waits for others.
//!
//! The names are the trainer's own, so they are classified by the words in them. `docs/reference/stragglers.md` lists
//! these words. Other names count as work.

/// What a rank does in a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SectionKind {
    /// It waits for other ranks: a collective, a barrier, a receive. A slow rank waits least.
    Wait,
    /// It fetches its input: its own time, and due to the loader rather than the device.
    Data,
    /// It computes before any communication (`forward`): its own time even if no section is named as waiting.
    Compute,
    /// It works, perhaps with hidden communication (`backward`, `step`, unknown names).
    Work,
    /// Something rare that is not part of a usual step: a checkpoint, an evaluation. Left out.
    Pause,
}

const DATA: &[&str] = &[
    "data",
    "dataload",
    "dataloader",
    "dataloading",
    "loader",
    "batch",
    "input",
    "fetch",
    "h2d",
    "preprocess",
];
const PAUSE: &[&str] = &[
    "checkpoint",
    "checkpointing",
    "ckpt",
    "save",
    "restore",
    "eval",
    "evaluate",
    "evaluation",
    "validate",
    "validation",
    "compile",
    "warmup",
    "gc",
];
const WAIT: &[&str] = &[
    "wait",
    "collective",
    "collectives",
    "allreduce",
    "reduce",
    "reducescatter",
    "allgather",
    "gather",
    "scatter",
    "alltoall",
    "broadcast",
    "bcast",
    "barrier",
    "send",
    "recv",
    "receive",
    "sendrecv",
    "p2p",
    "sync",
    "synchronize",
    "nccl",
    "gloo",
    "rccl",
    "comm",
    "comms",
    "communication",
    "clip",
    "rendezvous",
];
const COMPUTE: &[&str] = &["forward", "fwd"];

impl SectionKind {
    /// The kind by the words of `name`; case and separators do not matter.
    pub fn from_name(name: &str) -> SectionKind {
        let lower = name.to_ascii_lowercase();
        let has = |words: &[&str]| {
            lower.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| words.contains(&word))
        };
        // "data_wait" is time of the loader, not of other ranks; "forward-recv" is a receive, not a forward pass.
        if has(DATA) {
            SectionKind::Data
        } else if has(PAUSE) {
            SectionKind::Pause
        } else if has(WAIT) {
            SectionKind::Wait
        } else if has(COMPUTE) {
            SectionKind::Compute
        } else {
            SectionKind::Work
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_frameworks_and_traces_are_understood() {
        for (name, kind) in [
            ("collective", SectionKind::Wait),
            ("grads-reduce-scatter", SectionKind::Wait),
            ("forward-recv", SectionKind::Wait),
            ("AllReduce", SectionKind::Wait),
            ("all_gather", SectionKind::Wait),
            ("optimizer-clip-main-grad", SectionKind::Wait),
            ("data_wait", SectionKind::Data),
            ("DataLoader", SectionKind::Data),
            ("forward-compute", SectionKind::Compute),
            ("forward", SectionKind::Compute),
            ("backward-compute", SectionKind::Work),
            ("optimizer", SectionKind::Work),
            ("my section", SectionKind::Work),
            ("checkpoint", SectionKind::Pause),
            ("eval", SectionKind::Pause),
            ("", SectionKind::Work),
        ] {
            assert_eq!(SectionKind::from_name(name), kind, "{name}");
        }
    }
}
