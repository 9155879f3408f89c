//! Checkpoints that a trainer writes by itself, as files: which of them are complete, by what their writer leaves behind last.
//!
//! Nothing is taken for complete because it looks finished: there must be a proof, which each framework leaves in its own way. What
//! has none is sealed only where the user says after how much quiet it may be.

pub mod pattern;
pub mod proof;
pub mod zip;

use std::collections::{BTreeMap, BTreeSet};

use pattern::Pattern;

/// Seconds by which a file may be younger than the marker of its checkpoint: other ranks finish a little later.
const AFTER_MARKER: i64 = 60;

/// Names of checkpoints that tell no step, because the next one is written over them: nanoGPT's, those of PyTorch's examples,
/// Lightning's and others'. Their step is the second in which they were written.
pub const IN_PLACE: [&str; 9] = [
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

/// What tells that a checkpoint is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// One of these files is in it, and nothing in it is much younger.
    Marker(Vec<String>),
    /// A file beside it names just this step or this name, and is younger than all of it. It is written anew on a restore.
    Tracker(String),
    /// Nothing beside it has its name with this behind.
    NoneBeside(String),
    /// Its container ends as it must.
    Container,
    /// Its name: it was renamed into its place.
    Name,
    /// Nothing in it has changed for so many seconds.
    Quiet(u64),
}

/// How a checkpoint is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Names in the directory that is watched.
    pub pattern: Pattern,
    /// Whether it is a directory, or a file.
    pub is_directory: bool,
    /// What tells that it is complete.
    pub proof: Proof,
}

/// Whose way of writing checkpoints is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// All of the following but [`Kind::Nemo`].
    Auto,
    /// `iter_0000123/` and `latest_checkpointed_iteration.txt`.
    Megatron,
    /// `global_step123/` and `latest`.
    DeepSpeed,
    /// `checkpoint-123/` with `trainer_state.json`.
    HuggingFace,
    /// `*123.ckpt`, `*123.pt`, `*123.pth` and `*123.safetensors`: single files whose container is whole. Where none of these is in the
    /// directory, also the names of [`IN_PLACE`].
    Torch,
    /// `*123/` with `.metadata`, of torch's distributed checkpoints.
    Dcp,
    /// `123/` or `name_123/` with `commit_success.txt` or `_CHECKPOINT_METADATA`.
    Orbax,
    /// `*step=123*` without `*step=123*-unfinished` beside it.
    Nemo,
}

impl Kind {
    /// All, with their names in configurations.
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

    /// Reads its name.
    ///
    /// # Errors
    /// It is none; the error names all.
    pub fn parse(name: &str) -> Result<Kind, String> {
        let found = Kind::ALL.iter().find(|(of, _)| *of == name).map(|(_, kind)| *kind);
        found.ok_or_else(|| {
            let all: Vec<&str> = Kind::ALL.iter().map(|(name, _)| *name).collect();
            format!("{name:?} is not a kind of checkpoints; known are {}", all.join(", "))
        })
    }

    /// Its rules, the more particular first.
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
                numbered.into_iter().chain(IN_PLACE).map(file).collect()
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
pub type Written = (i64, i64);

/// One name in the directory that is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Whether it is a directory.
    pub is_directory: bool,
    /// When the youngest file of it was last written.
    pub newest: Written,
    /// The files directly in it, with when they were written.
    pub files: BTreeMap<String, Written>,
    /// Whether its container is whole, where that was looked at.
    pub container: Option<bool>,
}

/// The directory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Each name that matches a rule, and those that rules ask for.
    pub names: BTreeMap<String, Seen>,
    /// What stands in small files that rules ask for, with when it was written.
    pub texts: BTreeMap<String, (String, Written)>,
    /// The steps of names that tell none.
    pub in_place: BTreeMap<String, u64>,
    /// Now, seconds since 1970.
    pub now: i64,
}

/// A checkpoint that is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    /// The step.
    pub step: u64,
    /// Its names in the directory.
    pub names: Vec<String>,
    /// Small files that are to be there after a restore, with what must stand in them.
    pub trackers: BTreeMap<String, String>,
}

/// The step of a name, and by which rule: the first that fits.
pub fn rule_of<'a>(rules: &'a [Rule], name: &str, is_directory: bool) -> Option<(&'a Rule, u64)> {
    if is_passing(name) {
        return None;
    }
    let of = |rule: &'a Rule| {
        let step = (rule.is_directory == is_directory).then(|| rule.pattern.step(name)).flatten()?;
        Some((rule, step))
    };
    rules.iter().find_map(of)
}

/// The rule for a name that tells no step, because the next checkpoint is written over it.
pub fn in_place<'a>(rules: &'a [Rule], name: &str, is_directory: bool) -> Option<&'a Rule> {
    let is_it = |rule: &&Rule| !rule.pattern.has_step() && rule.pattern.written() == name;
    rules.iter().filter(|rule| rule.is_directory == is_directory).find(is_it)
}

/// Names that say of themselves that they are not there to stay.
fn is_passing(name: &str) -> bool {
    let endings = [".tmp", ".part", ".incomplete", "-unfinished", ".lock"];
    let inside = [".orbax-checkpoint-tmp", "tmp-checkpoint", ".mainstay-"];
    name.starts_with('.')
        || endings.iter().any(|ending| name.ends_with(ending))
        || inside.iter().any(|part| name.contains(part))
}

/// Whether a file's name is one that trainers give to checkpoints, and no rule knows it: it is not sealed.
pub fn is_unknown_checkpoint(rules: &[Rule], name: &str) -> bool {
    let endings = [".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar"];
    !is_passing(name)
        && endings.iter().any(|ending| name.ends_with(ending))
        && rule_of(rules, name, false).is_none()
        && in_place(rules, name, false).is_none()
}

/// The small files that rules ask for.
pub fn texts(rules: &[Rule]) -> BTreeSet<&str> {
    let mut all = BTreeSet::new();
    for rule in rules {
        if let Proof::Tracker(file) = &rule.proof {
            all.insert(file.as_str());
        }
    }
    all
}

/// The checkpoints that are complete, newest first. A step of several names is complete when all of them are, and, where `expect`
/// is above 0, when there are so many.
///
/// Where a rule has no proof for what it finds, `quiet` seconds without a change stand in, if they are above 0.
pub fn complete(rules: &[Rule], look: &Look, expect: usize, quiet: u64) -> Vec<Complete> {
    let mut steps: BTreeMap<u64, Vec<(&str, &Rule, bool)>> = BTreeMap::new();
    for (name, seen) in &look.names {
        let in_place = || in_place(rules, name, seen.is_directory).zip(look.in_place.get(name).copied());
        let Some((rule, step)) = rule_of(rules, name, seen.is_directory).or_else(in_place) else { continue };
        let proven = is_proven(rule, step, name, seen, look);
        let rested = quiet > 0 && is_quiet(seen, look.now, quiet);
        steps.entry(step).or_default().push((name, rule, proven || rested));
    }
    let whole = steps.into_iter().rev().filter(|(_, parts)| {
        parts.iter().all(|(.., proven)| *proven) && (expect == 0 || parts.len() == expect)
    });
    let reported = |(step, parts): (u64, Vec<(&str, &Rule, bool)>)| Complete {
        step,
        names: parts.iter().map(|(name, ..)| (*name).to_owned()).collect(),
        trackers: parts.iter().filter_map(|(name, rule, _)| tracker(rule, step, name)).collect(),
    };
    whole.map(reported).collect()
}

/// What must stand in the tracker for a restore.
fn tracker(rule: &Rule, step: u64, name: &str) -> Option<(String, String)> {
    match &rule.proof {
        // Megatron's has the number, DeepSpeed's the name.
        Proof::Tracker(file) if file == "latest" => Some((file.clone(), name.to_owned())),
        Proof::Tracker(file) => Some((file.clone(), step.to_string())),
        _ => None,
    }
}

fn is_proven(rule: &Rule, step: u64, name: &str, seen: &Seen, look: &Look) -> bool {
    match &rule.proof {
        Proof::Marker(markers) => {
            let written = markers.iter().filter_map(|marker| seen.files.get(marker)).max();
            written.is_some_and(|at| seen.newest.0 <= at.0 + AFTER_MARKER)
        }
        Proof::Tracker(file) => look.texts.get(file).is_some_and(|(text, written)| {
            let text = text.trim();
            (text == name || text.parse() == Ok(step)) && *written >= seen.newest
        }),
        Proof::NoneBeside(suffix) => {
            let beside = format!("{name}{suffix}");
            !look.names.contains_key(&beside) && !look.texts.contains_key(&beside)
        }
        Proof::Container => seen.container == Some(true),
        Proof::Name => true,
        Proof::Quiet(seconds) => is_quiet(seen, look.now, *seconds),
    }
}

fn is_quiet(seen: &Seen, now: i64, seconds: u64) -> bool {
    now.saturating_sub(seen.newest.0) >= i64::try_from(seconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(newest: i64, files: &[(&str, i64)]) -> Seen {
        let files = files.iter().map(|(name, at)| ((*name).to_owned(), (*at, 0))).collect();
        Seen { is_directory: true, newest: (newest, 0), files, container: None }
    }

    fn look(names: &[(&str, Seen)], texts: &[(&str, &str, i64)]) -> Look {
        Look {
            names: names.iter().map(|(name, seen)| ((*name).to_owned(), seen.clone())).collect(),
            texts: texts
                .iter()
                .map(|(name, text, at)| ((*name).to_owned(), ((*text).to_owned(), (*at, 0))))
                .collect(),
            now: 1000,
            ..Look::default()
        }
    }

    fn found(kind: Kind, look: &Look) -> Vec<u64> {
        complete(&kind.rules(), look, 0, 0).iter().map(|of| of.step).collect()
    }

    #[test]
    fn megatron_and_deepspeed_are_complete_when_their_tracker_names_them_and_is_younger() {
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
    fn what_is_written_again_within_the_second_is_being_written() {
        let mut seen = directory(100, &[]);
        let complete = |seen: &Seen| {
            let tracker = [("latest_checkpointed_iteration.txt", "120", 100)];
            let mut look = look(&[("iter_0000120", seen.clone())], &tracker);
            look.texts.values_mut().for_each(|(_, written)| written.1 = 500);
            found(Kind::Megatron, &look)
        };
        seen.newest.1 = 499;
        assert_eq!(complete(&seen), [120]);
        seen.newest.1 = 501;
        assert!(complete(&seen).is_empty());
    }

    #[test]
    fn markers_in_the_directory_prove_it_unless_it_is_written_again() {
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
                assert!(found(kind, &look(&[(name, with(marker, 900))], &[])).is_empty(), "{name} again");
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
    fn a_checkpoint_whose_name_no_rule_knows_is_told_from_one_that_is_sealed() {
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
        let file = |whole| Seen { container: Some(whole), ..Seen::default() };
        let names =
            [("model_9.pt", file(true)), ("optim_9.pt", file(false)), ("epoch=0-step=8.ckpt", file(true))];
        assert_eq!(found(Kind::Torch, &look(&names, &[])), [8]);
        let both = [("model_9.pt", file(true)), ("optim_9.pt", file(true))];
        assert_eq!(found(Kind::Torch, &look(&both, &[])), [9]);
        let of = |expect| complete(&Kind::Torch.rules(), &look(&both, &[]), expect, 0).len();
        assert_eq!((of(2), of(3)), (1, 0), "as many as the user expects");
        assert!(found(Kind::Torch, &look(&[("last.ckpt", file(true))], &[])).is_empty(), "it tells no step");
    }

    #[test]
    fn a_file_that_is_written_over_is_the_step_of_its_second() {
        let file = |whole| Seen { container: Some(whole), ..Seen::default() };
        let found = |whole| {
            let mut look = look(&[("ckpt.pt", file(whole)), ("train.pt", file(true))], &[]);
            look.in_place.insert("ckpt.pt".to_owned(), 1_700_000_000);
            found(Kind::Auto, &look)
        };
        assert_eq!((found(true), found(false)), (vec![1_700_000_000], Vec::new()));
    }

    #[test]
    fn nemo_is_complete_when_it_is_no_longer_unfinished() {
        let step = ("llama-step=40-last", directory(5, &[]));
        assert_eq!(found(Kind::Nemo, &look(std::slice::from_ref(&step), &[])), [40]);
        assert!(
            found(Kind::Nemo, &look(&[step, ("llama-step=40-last-unfinished", Seen::default())], &[]))
                .is_empty()
        );
    }

    #[test]
    fn quiet_counts_only_where_the_user_wants_it() {
        let step = look(&[("iter_0000005", directory(900, &[]))], &[]);
        let of = |quiet| complete(&Kind::Megatron.rules(), &step, 0, quiet).len();
        assert_eq!((of(0), of(60), of(101)), (0, 1, 0));
    }

    #[test]
    fn every_kind_is_read_by_its_name_and_others_are_refused() {
        assert!(Kind::ALL.iter().all(|(name, kind)| Kind::parse(name) == Ok(*kind)));
        assert!(Kind::parse("megatrom").unwrap_err().contains("megatron"));
        assert_eq!(
            texts(&Kind::Auto.rules()),
            BTreeSet::from(["latest", "latest_checkpointed_iteration.txt"])
        );
    }
}
