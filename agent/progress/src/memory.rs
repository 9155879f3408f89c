//! What was learned about a job, kept for its next run: how long its phases take, how long it rests, which ranks do
//! the same work, how much they differ, and which restarts helped. Without it each run is blind for its first fifty
//! steps.
//!
//! The data is optional. A file that is missing, old, damaged or of another job is ignored, and what a run learns
//! itself soon outweighs it.

use serde::{Deserialize, Serialize};

use mainstay_hang::PhaseMemory;
use mainstay_model::entry::JobSpec;
use mainstay_model::policy::Experience;
use mainstay_model::time::Span;

/// The version of the file format. Other versions are ignored.
const VERSION: u32 = 1;
/// The largest file that is read, in bytes. We write no larger ones.
pub const MAX_FILE_BYTES: usize = 512 * 1024;
/// The most phases that are kept.
const PHASES: usize = 128;
/// The most rungs and kinds of causes that are kept; fewer exist.
const RUNGS: usize = 64;
/// The most ranks for which peers are kept.
const RANKS: usize = 16_384;

/// What was learned about a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobMemory {
    /// The version of the file format.
    pub version: u32,
    /// The number of runs that contributed.
    pub runs: u32,
    /// How long phases took.
    #[serde(default)]
    pub phases: Vec<PhaseMemory>,
    /// The longest time in which the job did nothing and then continued by itself.
    #[serde(default)]
    pub rest: Span,
    /// The noise of peers' self times from step to step, as a fraction.
    #[serde(default)]
    pub noise: Option<f32>,
    /// The pipeline stage of each rank, if learned.
    #[serde(default)]
    pub stages: Vec<u32>,
    /// Which rungs helped against which kinds of causes, and how long they took.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Experience>,
    /// The number of ranks, if the data is kept for runs of any size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
}

impl JobMemory {
    /// Parses the file. `None` if nothing in it is usable.
    pub fn parse(text: &[u8]) -> Option<JobMemory> {
        if text.len() > MAX_FILE_BYTES {
            return None;
        }
        let mut learned: JobMemory = serde_json::from_slice(text).ok()?;
        if learned.version != VERSION {
            return None;
        }
        learned.noise = learned.noise.filter(|noise| noise.is_finite() && *noise > 0.0 && *noise < 1.0);
        learned.phases.truncate(PHASES);
        learned.phases.retain(PhaseMemory::is_sound);
        learned.rungs.truncate(RUNGS);
        learned.rungs.retain(Experience::is_sound);
        if learned.stages.len() > RANKS {
            learned.stages.clear();
        }
        Some(learned)
    }

    /// The contents of the file, with one more run. The phases that were seen most are kept.
    pub fn written(mut self) -> Vec<u8> {
        self.version = VERSION;
        self.runs = self.runs.saturating_add(1);
        self.phases.sort_by_key(|phase| std::cmp::Reverse(phase.steps));
        self.phases.truncate(PHASES);
        if self.stages.len() > RANKS {
            self.stages.clear();
        }
        // Serialization of numbers, texts and lists cannot fail.
        serde_json::to_vec(&self).unwrap_or_default()
    }
}

/// A key for what runs of the same job have in common: their checkpoint directory, if specified, with the program;
/// otherwise the whole command. And the number of ranks.
pub fn key(spec: &JobSpec, checkpoint_dir: Option<&str>) -> String {
    let mut hash = Fnv::default();
    hash.update(spec.world_size.to_string().as_bytes());
    name(spec, checkpoint_dir, &mut hash);
    hash.to_string()
}

/// The same for runs with any number of ranks.
pub fn key_of_any_size(spec: &JobSpec, checkpoint_dir: Option<&str>) -> String {
    let mut hash = Fnv::default();
    hash.update(b"any size");
    name(spec, checkpoint_dir, &mut hash);
    hash.to_string()
}

/// A key for one user's program, with any arguments and any number of ranks.
pub fn program_of(spec: &JobSpec) -> String {
    let mut hash = Fnv::default();
    hash.update(spec.uid.to_string().as_bytes());
    program(spec).for_each(|word| hash.update(word.as_bytes()));
    hash.to_string()
}

/// A hash of a text, for what need not be readable.
pub fn number_of(text: &str) -> String {
    let mut hash = Fnv::default();
    hash.update(text.as_bytes());
    hash.to_string()
}

/// The program: an interpreter and its script, or a program and its first argument.
fn program(spec: &JobSpec) -> impl Iterator<Item = &String> {
    spec.command.iter().filter(|word| !word.starts_with('-')).take(2)
}

fn name(spec: &JobSpec, checkpoint_dir: Option<&str>, hash: &mut Fnv) {
    match checkpoint_dir {
        Some(directory) => {
            hash.update(directory.as_bytes());
            program(spec).for_each(|word| hash.update(word.as_bytes()));
        }
        None => spec.command.iter().for_each(|word| hash.update(word.as_bytes())),
    }
}

/// 64-bit FNV-1a. The keys are stable, but not a protection against manipulation.
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Adds a word and its end.
    pub fn update(&mut self, word: &[u8]) {
        for byte in word.iter().copied().chain([0]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

impl std::fmt::Display for Fnv {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_hang::{Limits, PhaseId, Phases};
    use mainstay_recovery::policy::{CauseKind, Rung};

    fn spec(command: &str, ranks: u32) -> JobSpec {
        let command = command.split(' ').map(str::to_owned).collect();
        JobSpec { command, world_size: ranks, ..JobSpec::default() }
    }

    fn learned() -> JobMemory {
        let mut phases = Phases::new(Limits::default());
        for step in 0..100 {
            phases.learn(PhaseId::STEP, step, Span::millis(500 + step));
        }
        JobMemory {
            phases: phases.remembered(),
            noise: Some(0.01),
            stages: vec![0, 0, 1, 1],
            rungs: vec![Experience {
                cause: CauseKind::Exception,
                rung: Rung::InProcess,
                tried: 2.0,
                helped: 1.0,
                seconds: 0.5,
            }],
            ..JobMemory::default()
        }
    }

    #[test]
    fn a_written_file_is_read_back() {
        let read = JobMemory::parse(&learned().written()).expect("what was written");
        assert_eq!((read.runs, read.noise, read.stages.len()), (1, Some(0.01), 4));
        assert_eq!(read.phases, learned().phases);
        assert_eq!(read.rungs, learned().rungs);
        let again = JobMemory::parse(&read.written()).expect("what was written");
        assert_eq!(again.runs, 2);
    }

    #[test]
    fn an_unusable_file_is_ignored() {
        let good = learned().written();
        let text = String::from_utf8_lossy(&good).into_owned();
        for spoilt in [
            "",
            "[]",
            "{\"version\":1}x",
            &text[..text.len() / 2],
            &text.replace("\"version\":1", "\"version\":2"),
            &"{}".repeat(MAX_FILE_BYTES),
        ] {
            assert_eq!(JobMemory::parse(spoilt.as_bytes()), None, "{}", &spoilt[..spoilt.len().min(60)]);
        }
        let wild = text.replace("\"noise\":0.01", "\"noise\":-3.0").replace("\"steps\":100", "\"steps\":0");
        let wild = wild.replace("\"tried\":2.0", "\"tried\":0.5");
        let read = JobMemory::parse(wild.as_bytes()).expect("the rest of it");
        assert_eq!((read.noise, read.phases.len(), read.rungs.len()), (None, 0, 0));
    }

    #[test]
    fn runs_of_one_job_share_a_key_and_others_do_not() {
        let key_of = |command, ranks| key(&spec(command, ranks), None);
        assert_eq!(key_of("python train.py --lr 1", 8), key_of("python train.py --lr 1", 8));
        assert_ne!(key_of("python train.py --lr 1", 8), key_of("python train.py --lr 2", 8));
        assert_ne!(key_of("python train.py --lr 1", 8), key_of("python train.py --lr 1", 16));
        let in_place = |command| key(&spec(command, 8), Some("/nvme/run7"));
        assert_eq!(in_place("python train.py --lr 1"), in_place("python train.py --lr 2"));
        assert_ne!(in_place("python train.py"), in_place("python other.py"));
        let any = |command, ranks| key_of_any_size(&spec(command, ranks), None);
        assert_eq!(any("python train.py", 8), any("python train.py", 16));
        assert_ne!(any("python train.py", 8), any("python other.py", 8));
        assert_ne!(any("python train.py", 8), key_of("python train.py", 8));
    }
}
