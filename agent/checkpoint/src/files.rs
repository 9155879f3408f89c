//! Checkpoints that a trainer writes itself as files: detects which of them are complete, from what the writer leaves
//! last.
//!
//! A checkpoint is not complete because it looks finished: there must be a proof, and each framework leaves a different
//! one. Without a proof, a checkpoint is sealed only if the user configures after how many seconds without a change.

pub mod pattern;
pub mod proof;
pub mod title;
pub mod zip;

use std::collections::{BTreeMap, BTreeSet};

use pattern::Pattern;

/// Maximum seconds by which a file may be newer than its checkpoint's marker: other ranks finish a little later.
const MAX_AFTER_MARKER_S: i64 = 60;

/// Names of checkpoints without a step, because the next checkpoint overwrites them: those of nanoGPT, PyTorch's
/// examples, Lightning and others. Their step is the time at which they were written, in seconds since 1970.
pub const OVERWRITTEN_NAMES: [&str; 9] = [
    "ckpt.pt",
    "snapshot.pt",
    "last.ckpt",
    "checkpoint.pt",
    "checkpoint.pth",
    "checkpoint.pth.tar",
    "latest.pt",
    "latest.pth",
    "latest.ckpt",
];

/// Proof that a checkpoint is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// It contains one of these files, and no file in it is newer by more than 60 s.
    Marker(Vec<String>),
    /// A file next to it contains only its step or name, and is at least as new. A restore writes it again.
    Tracker(String),
    /// Nothing next to it has its name with this suffix.
    NoneBeside(String),
    /// Its container is whole.
    Container,
    /// Its name: the writer renamed it when it was complete.
    Name,
    /// No file in it has changed for this many seconds.
    Quiet(u64),
}

/// A rule that finds checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Names in the watched directory.
    pub pattern: Pattern,
    /// Whether the checkpoint is a directory, not a file.
    pub is_directory: bool,
    /// The proof that it is complete.
    pub proof: Proof,
}

/// The framework whose checkpoints are recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// All of the following except [`Kind::Nemo`].
    Auto,
    /// `iter_0000123/` and `latest_checkpointed_iteration.txt`.
    Megatron,
    /// `global_step123/` and `latest`.
    DeepSpeed,
    /// `checkpoint-123/` with `trainer_state.json`.
    HuggingFace,
    /// `*123.ckpt`, `*123.pt`, `*123.pth` and `*123.safetensors`: single files whose container is whole. If the
    /// directory has none of them, also the names in [`OVERWRITTEN_NAMES`].
    Torch,
    /// `*123/` with `.metadata`, of torch's distributed checkpoints.
    Dcp,
    /// `123/` or `name_123/` with `commit_success.txt` or `_CHECKPOINT_METADATA`.
    Orbax,
    /// `*step=123*` without `*step=123*-unfinished` next to it.
    Nemo,
}

impl Kind {
    /// All kinds, with their names in the configuration.
    pub const ALL: [(&'static str, Kind); 8] = [
        ("auto", Kind::Auto),
        ("megatron", Kind::Megatron),
        ("deepspeed", Kind::DeepSpeed),
        ("huggingface", Kind::HuggingFace),
        ("torch", Kind::Torch),
        ("dcp", Kind::Dcp),
        ("orbax", Kind::Orbax),
        ("nemo", Kind::Nemo),
    ];

    /// Parses the name of a kind.
    ///
    /// # Errors
    /// The name is unknown; the error lists all names.
    pub fn parse(name: &str) -> Result<Kind, String> {
        let found = Kind::ALL.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
        found.ok_or_else(|| {
            let all: Vec<&str> = Kind::ALL.iter().map(|(name, _)| *name).collect();
            format!("{name:?} is not a kind of checkpoints; known are {}", all.join(", "))
        })
    }

    /// The rules of this kind, the more specific first.
    pub fn rules(self) -> Vec<Rule> {
        let directory =
            |pattern: &str, proof| Rule { pattern: Pattern::plain(pattern), is_directory: true, proof };
        let file = |pattern: &str| Rule {
            pattern: Pattern::plain(pattern),
            is_directory: false,
            proof: Proof::Container,
        };
        let marker = |names: &[&str]| Proof::Marker(names.iter().map(|name| (*name).to_owned()).collect());
        match self {
            Kind::Auto => {
                [Kind::Megatron, Kind::DeepSpeed, Kind::HuggingFace, Kind::Torch, Kind::Orbax, Kind::Dcp]
                    .into_iter()
                    .flat_map(Kind::rules)
                    .collect()
            }
            Kind::Megatron => {
                let tracker = Proof::Tracker("latest_checkpointed_iteration.txt".to_owned());
                vec![directory("iter_{step}", tracker)]
            }
            Kind::DeepSpeed => vec![directory("global_step{step}", Proof::Tracker("latest".to_owned()))],
            Kind::HuggingFace => vec![directory("checkpoint-{step}", marker(&["trainer_state.json"]))],
            Kind::Torch => {
                let numbered = ["*{step}.ckpt", "*{step}.pt", "*{step}.pth", "*{step}.safetensors"];
                numbered.into_iter().chain(OVERWRITTEN_NAMES).map(file).collect()
            }
            Kind::Dcp => vec![directory("*{step}", marker(&[".metadata"]))],
            Kind::Orbax => {
                let marker = marker(&["commit_success.txt", "_CHECKPOINT_METADATA"]);
                vec![directory("{step}", marker.clone()), directory("*_{step}", marker)]
            }
            Kind::Nemo => vec![directory("*step={step}*", Proof::NoneBeside("-unfinished".to_owned()))],
        }
    }
}

/// When a file was last written: seconds since 1970, and nanoseconds. A file may be written again within the second.
pub type ModifiedTime = (i64, i64);

/// An entry of the watched directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// Whether it is a directory.
    pub is_directory: bool,
    /// When its newest file was last written.
    pub newest: ModifiedTime,
    /// The files directly in it, with the times at which they were written.
    pub files: BTreeMap<String, ModifiedTime>,
    /// Whether its container is whole, if that was checked.
    pub container: Option<bool>,
}

/// The state of the directory at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectorySnapshot {
    /// The entries that match a rule, and those that rules require.
    pub names: BTreeMap<String, DirectoryEntry>,
    /// The content of small files that rules require, with the times at which they were written.
    pub texts: BTreeMap<String, (String, ModifiedTime)>,
    /// The steps of names that do not contain a step.
    pub in_place: BTreeMap<String, u64>,
    /// The current time, seconds since 1970.
    pub now: i64,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    /// The step.
    pub step: u64,
    /// Its names in the directory.
    pub names: Vec<String>,
    /// Small files that must exist after a restore, with their content.
    pub trackers: BTreeMap<String, String>,
}

/// The step of a name, and the first rule that matches.
pub fn matching_rule<'a>(rules: &'a [Rule], name: &str, is_directory: bool) -> Option<(&'a Rule, u64)> {
    if is_passing(name) {
        return None;
    }
    let rule_and_step = |rule: &'a Rule| {
        let step = (rule.is_directory == is_directory).then(|| rule.pattern.step(name)).flatten()?;
        Some((rule, step))
    };
    rules.iter().find_map(rule_and_step)
}

/// The rule for a name without a step, which the next checkpoint overwrites.
pub fn in_place<'a>(rules: &'a [Rule], name: &str, is_directory: bool) -> Option<&'a Rule> {
    let is_it = |rule: &&Rule| !rule.pattern.has_step() && rule.pattern.written() == name;
    rules.iter().filter(|rule| rule.is_directory == is_directory).find(is_it)
}

/// Whether the name marks a temporary file or directory.
fn is_passing(name: &str) -> bool {
    let endings = [".tmp", ".part", ".incomplete", "-unfinished", ".lock"];
    let inside = [".orbax-checkpoint-tmp", "tmp-checkpoint", ".mainstay-"];
    name.starts_with('.')
        || endings.iter().any(|ending| name.ends_with(ending))
        || inside.iter().any(|part| name.contains(part))
}

/// Whether a file has the name of a checkpoint but matches no rule, and is therefore not sealed.
pub fn is_unknown_checkpoint(rules: &[Rule], name: &str) -> bool {
    let endings = [".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar"];
    !is_passing(name)
        && endings.iter().any(|ending| name.ends_with(ending))
        && matching_rule(rules, name, false).is_none()
        && in_place(rules, name, false).is_none()
}

/// The small files that rules require.
pub fn texts(rules: &[Rule]) -> BTreeSet<&str> {
    let mut all = BTreeSet::new();
    for rule in rules {
        if let Proof::Tracker(file) = &rule.proof {
            all.insert(file.as_str());
        }
    }
    all
}

/// The complete checkpoints, newest first. A step of several names is complete when all of them are, and, if `expect`
/// is above 0, when there are exactly that many.
///
/// If `quiet` is above 0, that many seconds without a change replace a missing proof.
pub fn complete(rules: &[Rule], look: &DirectorySnapshot, expect: usize, quiet: u64) -> Vec<Complete> {
    let mut steps: BTreeMap<u64, Vec<(&str, &Rule, bool)>> = BTreeMap::new();
    for (name, entry) in &look.names {
        let in_place = || in_place(rules, name, entry.is_directory).zip(look.in_place.get(name).copied());
        let Some((rule, step)) = matching_rule(rules, name, entry.is_directory).or_else(in_place) else {
            continue;
        };
        let proven = is_proven(rule, step, name, entry, look);
        let rested = quiet > 0 && is_quiet(entry, look.now, quiet);
        steps.entry(step).or_default().push((name, rule, proven || rested));
    }
    let whole = steps.into_iter().rev().filter(|(_, parts)| {
        parts.iter().all(|(.., proven)| *proven) && (expect == 0 || parts.len() == expect)
    });
    let as_complete = |(step, parts): (u64, Vec<(&str, &Rule, bool)>)| Complete {
        step,
        names: parts.iter().map(|(name, ..)| (*name).to_owned()).collect(),
        trackers: parts.iter().filter_map(|(name, rule, _)| tracker(rule, step, name)).collect(),
    };
    whole.map(as_complete).collect()
}

/// The file name and content of the tracker for a restore.
fn tracker(rule: &Rule, step: u64, name: &str) -> Option<(String, String)> {
    match &rule.proof {
        // Megatron's tracker contains the number, DeepSpeed's the name.
        Proof::Tracker(file) if file == "latest" => Some((file.clone(), name.to_owned())),
        Proof::Tracker(file) => Some((file.clone(), step.to_string())),
        _ => None,
    }
}

fn is_proven(rule: &Rule, step: u64, name: &str, entry: &DirectoryEntry, look: &DirectorySnapshot) -> bool {
    match &rule.proof {
        Proof::Marker(markers) => {
            let written = markers.iter().filter_map(|marker| entry.files.get(marker)).max();
            written.is_some_and(|at| entry.newest.0 <= at.0 + MAX_AFTER_MARKER_S)
        }
        Proof::Tracker(file) => look.texts.get(file).is_some_and(|(text, written)| {
            let text = text.trim();
            (text == name || text.parse() == Ok(step)) && *written >= entry.newest
        }),
        Proof::NoneBeside(suffix) => {
            let beside = format!("{name}{suffix}");
            !look.names.contains_key(&beside) && !look.texts.contains_key(&beside)
        }
        Proof::Container => entry.container == Some(true),
        Proof::Name => true,
        Proof::Quiet(seconds) => is_quiet(entry, look.now, *seconds),
    }
}

fn is_quiet(entry: &DirectoryEntry, now: i64, seconds: u64) -> bool {
    now.saturating_sub(entry.newest.0) >= i64::try_from(seconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(newest: i64, files: &[(&str, i64)]) -> DirectoryEntry {
        let files = files.iter().map(|(name, at)| ((*name).to_owned(), (*at, 0))).collect();
        DirectoryEntry { is_directory: true, newest: (newest, 0), files, container: None }
    }

    fn look(names: &[(&str, DirectoryEntry)], texts: &[(&str, &str, i64)]) -> DirectorySnapshot {
        DirectorySnapshot {
            names: names.iter().map(|(name, entry)| ((*name).to_owned(), entry.clone())).collect(),
            texts: texts
                .iter()
                .map(|(name, text, at)| ((*name).to_owned(), ((*text).to_owned(), (*at, 0))))
                .collect(),
            now: 1000,
            ..DirectorySnapshot::default()
        }
    }

    fn found(kind: Kind, look: &DirectorySnapshot) -> Vec<u64> {
        complete(&kind.rules(), look, 0, 0).iter().map(|key| key.step).collect()
    }

    #[test]
    fn megatron_and_deepspeed_are_complete_if_a_newer_tracker_names_them() {
        let iter = |newest| ("iter_0000120", directory(newest, &[]));
        let tracker = |text, at| ("latest_checkpointed_iteration.txt", text, at);
        for kind in [Kind::Megatron, Kind::Auto] {
            assert_eq!(found(kind, &look(&[iter(90)], &[tracker("120\n", 100)])), [120]);
            assert!(found(kind, &look(&[iter(90)], &[tracker("110", 100)])).is_empty(), "being written");
            assert!(
                found(kind, &look(&[iter(101)], &[tracker("120", 100)])).is_empty(),
                "being written again"
            );
            assert!(found(kind, &look(&[iter(90)], &[])).is_empty());
        }
        let steps = [("global_step7", directory(5, &[])), ("global_step8", directory(9, &[]))];
        let reported =
            complete(&Kind::DeepSpeed.rules(), &look(&steps, &[("latest", "global_step7", 6)]), 0, 0);
        assert_eq!(reported.len(), 1);
        assert_eq!(reported[0].trackers["latest"], "global_step7");
    }

    #[test]
    fn a_checkpoint_rewritten_within_the_same_second_is_not_complete() {
        let mut entry = directory(100, &[]);
        let complete = |entry: &DirectoryEntry| {
            let tracker = [("latest_checkpointed_iteration.txt", "120", 100)];
            let mut look = look(&[("iter_0000120", entry.clone())], &tracker);
            look.texts.values_mut().for_each(|(_, written)| written.1 = 500);
            found(Kind::Megatron, &look)
        };
        entry.newest.1 = 499;
        assert_eq!(complete(&entry), [120]);
        entry.newest.1 = 501;
        assert!(complete(&entry).is_empty());
    }

    #[test]
    fn a_marker_proves_a_checkpoint_unless_it_is_written_again() {
        let with = |marker: &'static str, newest| directory(newest, &[(marker, 100), ("x", newest)]);
        let cases = [
            (Kind::HuggingFace, "checkpoint-500", "trainer_state.json"),
            (Kind::Dcp, "step-500", ".metadata"),
            (Kind::Orbax, "500", "commit_success.txt"),
            (Kind::Orbax, "checkpoint_500", "_CHECKPOINT_METADATA"),
        ];
        for (kind, name, marker) in cases {
            for kind in [kind, Kind::Auto] {
                assert_eq!(found(kind, &look(&[(name, with(marker, 130))], &[])), [500], "{name}");
                assert!(found(kind, &look(&[(name, with("other", 130))], &[])).is_empty(), "{name}");
                assert!(found(kind, &look(&[(name, with(marker, 900))], &[])).is_empty(), "{name} newer");
            }
        }
        let tmp = ("500.orbax-checkpoint-tmp-17", with("_CHECKPOINT_METADATA", 100));
        assert!(found(Kind::Auto, &look(&[tmp], &[])).is_empty());
        assert!(
            found(Kind::Auto, &look(&[("tmp-checkpoint-500", with("trainer_state.json", 100))], &[]))
                .is_empty()
        );
    }

    #[test]
    fn a_checkpoint_name_without_a_rule_is_distinguished_from_a_sealed_one() {
        let rules = Kind::Torch.rules();
        for unknown in ["model.pt", "best.pth", "weights.safetensors", "model_best.pth.tar"] {
            assert!(is_unknown_checkpoint(&rules, unknown), "{unknown}");
        }
        for other in
            ["ckpt.pt", "epoch=3-step=10.ckpt", "model_9.pt", "config.json", ".model.pt", "model.pt.tmp"]
        {
            assert!(!is_unknown_checkpoint(&rules, other), "{other}");
        }
    }

    #[test]
    fn a_step_of_several_files_needs_all_of_them() {
        let file = |whole| DirectoryEntry { container: Some(whole), ..DirectoryEntry::default() };
        let names =
            [("model_9.pt", file(true)), ("optim_9.pt", file(false)), ("epoch=0-step=8.ckpt", file(true))];
        assert_eq!(found(Kind::Torch, &look(&names, &[])), [8]);
        let both = [("model_9.pt", file(true)), ("optim_9.pt", file(true))];
        assert_eq!(found(Kind::Torch, &look(&both, &[])), [9]);
        let complete_of = |expect| complete(&Kind::Torch.rules(), &look(&both, &[]), expect, 0).len();
        assert_eq!((complete_of(2), complete_of(3)), (1, 0), "the user expects this many files");
        assert!(found(Kind::Torch, &look(&[("last.ckpt", file(true))], &[])).is_empty(), "it has no step");
    }

    #[test]
    fn the_step_of_an_overwritten_file_is_the_second_of_its_write() {
        let file = |whole| DirectoryEntry { container: Some(whole), ..DirectoryEntry::default() };
        let found = |whole| {
            let mut look = look(&[("ckpt.pt", file(whole)), ("train.pt", file(true))], &[]);
            look.in_place.insert("ckpt.pt".to_owned(), 1_700_000_000);
            found(Kind::Auto, &look)
        };
        assert_eq!((found(true), found(false)), (vec![1_700_000_000], Vec::new()));
    }

    #[test]
    fn nemo_is_complete_without_an_unfinished_marker() {
        let step = ("llama-step=40-last", directory(5, &[]));
        assert_eq!(found(Kind::Nemo, &look(std::slice::from_ref(&step), &[])), [40]);
        assert!(
            found(
                Kind::Nemo,
                &look(&[step, ("llama-step=40-last-unfinished", DirectoryEntry::default())], &[])
            )
            .is_empty()
        );
    }

    #[test]
    fn quiet_time_counts_only_if_the_user_configures_it() {
        let step = look(&[("iter_0000005", directory(900, &[]))], &[]);
        let complete_after = |quiet| complete(&Kind::Megatron.rules(), &step, 0, quiet).len();
        assert_eq!((complete_after(0), complete_after(60), complete_after(101)), (0, 1, 0));
    }

    #[test]
    fn every_kind_is_parsed_by_its_name_and_other_names_are_rejected() {
        assert!(Kind::ALL.iter().all(|(name, kind)| Kind::parse(name) == Ok(*kind)));
        assert!(Kind::parse("megatrom").unwrap_err().contains("megatron"));
        assert_eq!(
            texts(&Kind::Auto.rules()),
            BTreeSet::from(["latest", "latest_checkpointed_iteration.txt"])
        );
    }
}
