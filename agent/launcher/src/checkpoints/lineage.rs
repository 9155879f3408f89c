//! Which run the checkpoints of a job belong to. It is decided before the job starts, for each directory into which the job
//! writes: by the directory, identified by device and inode and not by name, or by the user with `--resume-from`.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, bail};
use mainstay_checkpoint::lineage::{DirectoryId, identified, is_asked, plain};
use mainstay_sys::clock;
use mainstay_tier::beneath::Beneath;
use serde::{Deserialize, Serialize};

use crate::agent_link::checkpoint::KnownStep;
use crate::settings::Settings;

/// In the parent of the run directories: the run that each directory belongs to.
const NOTES: &str = ".directories";

/// In a run directory: the runs of its checkpoints.
const OF_RUN: &str = "checkpoint-runs.json";

/// Bytes of a note at most.
const MAX_NOTE_BYTES: u64 = 16 << 10;

/// Letters of an id.
const ID_CHARS: usize = 12;

/// A directory into which a job writes checkpoints.
#[derive(Clone, Debug)]
pub struct Output {
    /// Where.
    pub directory: PathBuf,
    /// The trainer's format; empty for `mainstay.checkpoint`.
    pub kind: String,
    /// The run that its steps belong to, `NAME~ID`.
    pub run: String,
    /// The directory's identity; none if it cannot be read.
    pub id: Option<DirectoryId>,
    /// Whether the user named the run by `--resume-from`.
    pub on_purpose: bool,
    /// The run's name without the id.
    name: String,
    /// Whether an earlier launch noted the run.
    is_noted: bool,
}

impl Output {
    /// The run's name without the id.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory's identity as it is sent to the agent; empty if it cannot be read.
    pub(crate) fn id_text(&self) -> String {
        self.id.as_ref().map(DirectoryId::to_string).unwrap_or_default()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    directory: String,
    run: String,
    path: PathBuf,
}

/// The outputs of a job: that of `mainstay.checkpoint` first, then those of its trainer. Missing ones are created.
pub fn outputs(settings: &Settings, log_dir: &Path, checkpoint_dir: &Path) -> Vec<Output> {
    let named = settings.checkpoint_dir.is_some();
    // A directory in the run directory differs in each launch. Such jobs are the same if they are started in the same place.
    let place = match named {
        true => path_id(checkpoint_dir),
        false => {
            let here = std::env::current_dir().unwrap_or_default();
            hash_id(&[b"default", bytes(&here), bytes(&std::path::absolute(log_dir).unwrap_or_default())])
        }
    };
    let own = output(log_dir, checkpoint_dir, "", settings.ranks.run_id.clone(), &place);
    let watched = settings.checkpoints.watch.iter().map(|(kind, directory)| {
        let folder = directory.file_name().unwrap_or_default().to_string_lossy();
        output(log_dir, directory, kind, format!("{}:{folder}", settings.ranks.run_id), &path_id(directory))
    });
    std::iter::once(own).chain(watched).collect()
}

fn output(log_dir: &Path, directory: &Path, kind: &str, name: String, place: &str) -> Output {
    // A user who cannot create it here cannot save there either; saving reports that.
    let _ = std::fs::create_dir_all(directory);
    let id = directory_id(directory);
    let run = id.as_ref().and_then(|id| noted(log_dir, id)).filter(|run| is_kind(run, kind));
    let is_noted = run.is_some();
    let run = run.unwrap_or_else(|| identified(&name, place));
    let (directory, kind) = (directory.to_owned(), kind.to_owned());
    Output { directory, kind, run, id, on_purpose: false, name, is_noted }
}

/// Names of runs of trainers' files end with a colon and the folder's name.
fn is_kind(run: &str, kind: &str) -> bool {
    plain(run).contains(':') != kind.is_empty()
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

fn path_id(directory: &Path) -> String {
    hash_id(&[b"directory", bytes(&std::path::absolute(directory).unwrap_or_default())])
}

/// The same on all hosts that have the same path, so that hosts without a common launcher choose the same run.
fn hash_id(parts: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().to_hex()[..ID_CHARS].to_owned()
}

/// The identity of the directory.
fn directory_id(directory: &Path) -> Option<DirectoryId> {
    let found = std::fs::metadata(directory).ok().filter(std::fs::Metadata::is_dir)?;
    let born = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Some(DirectoryId {
        boot: clock::boot_id().0,
        device: found.dev(),
        inode: found.ino(),
        born: born.and_then(|born| u64::try_from(born.as_nanos()).ok()).unwrap_or(0),
    })
}

fn note_name(id: &DirectoryId) -> PathBuf {
    PathBuf::from(format!("{:x}-{:x}.json", id.inode, id.born))
}

/// The run that this user noted for a directory.
fn noted(log_dir: &Path, id: &DirectoryId) -> Option<String> {
    let file = Beneath::open(&log_dir.join(NOTES)).ok()?.read(&note_name(id)).ok()?;
    let is_own = file.metadata().ok()?.uid() == nix::unistd::geteuid().as_raw();
    let mut text = String::new();
    Read::take(&file, MAX_NOTE_BYTES).read_to_string(&mut text).ok()?;
    let note: Note = serde_json::from_str(&text).ok()?;
    let is_same = note.directory.parse().is_ok_and(|noted: DirectoryId| noted.is_same(id));
    (is_own && is_same).then_some(note.run)
}

/// Notes which run each output belongs to, for later launches and in the run directory.
pub fn note(log_dir: &Path, run_dir: &Path, outputs: &[Output]) {
    let notes: Vec<Note> = outputs
        .iter()
        .map(|output| Note {
            directory: output.id.as_ref().map(DirectoryId::to_string).unwrap_or_default(),
            run: output.run.clone(),
            path: std::path::absolute(&output.directory).unwrap_or_default(),
        })
        .collect();
    let write = || -> std::io::Result<()> {
        Beneath::open(run_dir)?.write_whole(Path::new(OF_RUN), &serde_json::to_vec_pretty(&notes)?)?;
        let all = log_dir.join(NOTES);
        std::fs::create_dir_all(&all)?;
        let all = Beneath::open(&all)?;
        for (output, note) in outputs.iter().zip(&notes) {
            if let Some(id) = &output.id {
                all.write_whole(&note_name(id), &serde_json::to_vec(note)?)?;
            }
        }
        Ok(())
    };
    if let Err(error) = write() {
        tracing::warn!(
            "which run each checkpoint directory belongs to cannot be noted in {}: {error}; a directory that is renamed is a new run",
            log_dir.display()
        );
    }
}

/// A run that the user names.
#[derive(Debug, PartialEq, Eq)]
enum NamedRun {
    Exactly(String),
    ByName(String),
}

/// The part of `--resume-from` for an output; none if it is for another one.
fn named(value: &str, output: &Output, log_dir: &Path) -> anyhow::Result<Option<NamedRun>> {
    let folder = output.name.split_once(':').map(|(_, folder)| folder);
    if value.contains('/') {
        let directory = Path::new(value);
        let id = directory_id(directory)
            .with_context(|| format!("--resume-from {value}: it is not a directory"))?;
        let run = noted(log_dir, &id).with_context(|| {
            format!(
                "--resume-from {value}: no run of {} is known to write there; name the run",
                log_dir.display()
            )
        })?;
        return Ok(is_kind(&run, &output.kind).then_some(NamedRun::Exactly(run)));
    }
    let (name, id) = value.split_once('~').map_or((value, None), |(name, id)| (name, Some(id)));
    let (name, of_folder) = name.split_once(':').map_or((name, None), |(name, folder)| (name, Some(folder)));
    if name.is_empty() || id == Some("") {
        bail!("--resume-from {value}: name a run, as NAME or NAME~ID, or the directory that it wrote into");
    }
    let whole = match (folder, of_folder) {
        (None, None) => name.to_owned(),
        (Some(folder), given) if given.is_none_or(|given| given == folder) => format!("{name}:{folder}"),
        _ => return Ok(None),
    };
    Ok(Some(match id {
        Some(id) => NamedRun::Exactly(identified(&whole, id)),
        None => NamedRun::ByName(whole),
    }))
}

/// Gives an output the run that the user asks for. `known`: the whole steps that the agent knows, or why it knows none.
///
/// # Errors
/// The run cannot be resumed here. The error names the remedy.
pub fn choose(
    output: &mut Output,
    resume_from: &[String],
    log_dir: &Path,
    known: Result<&[KnownStep], &str>,
) -> anyhow::Result<Option<String>> {
    let mut wanted = Vec::new();
    for value in resume_from {
        wanted.extend(named(value, output, log_dir)?.map(|named| (value, named)));
    }
    let Some((value, wanted)) = wanted.pop() else { return Ok(None) };
    let place = output.directory.display().to_string();
    let run = match (wanted, known) {
        (NamedRun::Exactly(run), _) if run == output.run => run,
        (NamedRun::ByName(name), Err(_)) if plain(&output.run) == name && !is_empty(output) => {
            return Ok(None);
        }
        (_, Err(why)) => bail!("--resume-from {value}: {why}, and {place} has no checkpoint of that run"),
        (NamedRun::Exactly(run), Ok(_)) => run,
        (NamedRun::ByName(name), Ok(known)) => {
            let mut runs: Vec<&str> =
                known.iter().filter(|step| is_asked(&step.run, &name)).map(|step| &*step.run).collect();
            runs.sort_unstable();
            runs.dedup();
            match runs[..] {
                [] => {
                    return Ok(Some(format!(
                        "--resume-from {value}: no whole step of such a run is known; {place} starts a new one"
                    )));
                }
                _ if runs.contains(&&*output.run) => output.run.clone(),
                [only] => only.to_owned(),
                _ => bail!(
                    "--resume-from {value}: {} runs have this name; name one with its id: {}",
                    runs.len(),
                    runs.join(", ")
                ),
            }
        }
    };
    // Only the user can know what is in a directory without a note.
    if run != output.run && output.is_noted && !is_empty(output) {
        bail!(
            "--resume-from {value}: {place} has checkpoints of run {} already; name an empty directory for run {run}",
            output.run
        );
    }
    output.run = run;
    output.on_purpose = true;
    Ok(None)
}

/// Whether an output has nothing that a job could resume from.
fn is_empty(output: &Output) -> bool {
    let Ok(entries) = std::fs::read_dir(&output.directory) else { return true };
    let mut names = entries.flatten().map(|entry| entry.file_name());
    match output.kind.is_empty() {
        true => !names.any(|name| name.to_string_lossy().starts_with("step-")),
        false => names.next().is_none(),
    }
}

/// The message about runs that have an output's name and another id: they are not resumed from.
#[must_use]
pub fn others(output: &Output, known: &[KnownStep]) -> Option<String> {
    let newest = known.iter().filter(|step| step.run != output.run && plain(&step.run) == output.name);
    let newest = newest.max_by_key(|step| step.step)?;
    Some(format!(
        "{}: not resumed from run {} (newest whole step {}): it has the same name and wrote into another directory. \
         To resume from it, start with --resume-from {} and an empty directory",
        output.directory.display(),
        newest.run,
        newest.step,
        newest.run
    ))
}

/// A unique run id for users who give none: the time, for people, and random digits.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_run_id() -> std::io::Result<String> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let time = jiff::Timestamp::from_nanosecond(i128::from(clock::now().wall.0)).unwrap_or_default();
    Ok(format!("{}-{:08x}", time.strftime("%Y%m%d-%H%M%S"), u32::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(log_dir: &Path, directory: &Path, kind: &str, name: &str) -> Output {
        output(log_dir, directory, kind, name.to_owned(), &path_id(directory))
    }

    fn known(runs: &[&str]) -> Vec<KnownStep> {
        runs.iter().map(|run| KnownStep { run: (*run).to_owned(), step: 40 }).collect()
    }

    #[test]
    fn a_directory_keeps_its_run_when_it_is_renamed_and_one_with_its_old_name_gets_another() {
        let root = testing::tempdir().expect("a directory");
        let (logs, out, moved) =
            (root.path().join("logs"), root.path().join("out"), root.path().join("moved"));
        let first = at(&logs, &out, "", "train");
        std::fs::create_dir_all(logs.join("train")).expect("a directory");
        note(&logs, &logs.join("train"), std::slice::from_ref(&first));
        std::fs::rename(&out, &moved).expect("a rename");
        assert_eq!(at(&logs, &moved, "", "another").run, first.run);
        let new = at(&logs, &out, "", "train");
        assert!(!new.id.as_ref().expect("an id").is_same(first.id.as_ref().expect("an id")));
        // A copied note that claims another directory is rejected.
        let name = note_name(new.id.as_ref().expect("an id"));
        let old = note_name(first.id.as_ref().expect("an id"));
        std::fs::copy(logs.join(NOTES).join(old), logs.join(NOTES).join(name)).expect("a copy");
        assert_eq!(noted(&logs, new.id.as_ref().expect("an id")), None);
        assert!(
            std::fs::read_to_string(logs.join("train").join(OF_RUN)).expect("a file").contains(&first.run)
        );
    }

    #[test]
    fn the_same_names_in_two_directories_are_two_runs() {
        let root = testing::tempdir().expect("a directory");
        let (a, b) = (root.path().join("a/out"), root.path().join("b/out"));
        for kind in ["", "auto"] {
            let name = if kind.is_empty() { "train" } else { "train:out" };
            let (a, b) = (at(root.path(), &a, kind, name), at(root.path(), &b, kind, name));
            assert_ne!(a.run, b.run);
            let message = others(&b, &known(&[&a.run])).expect("words");
            assert!(message.contains(&format!("--resume-from {}", a.run)), "{message}");
            assert_eq!(others(&a, &known(&[&a.run, "else~1"])), None);
        }
    }

    #[test]
    fn a_run_is_resumed_on_purpose_by_its_name_if_it_is_one_and_by_its_id() {
        let root = testing::tempdir().expect("a directory");
        let (logs, out) = (root.path().join("logs"), root.path().join("out"));
        let chosen = |resume_from: &str, runs: Result<&[KnownStep], &str>| {
            let mut output = at(&logs, &out, "auto", "train:out");
            let messages = choose(&mut output, &[resume_from.to_owned()], &logs, runs)?;
            anyhow::Ok((output.run.clone(), output.on_purpose, messages.is_some()))
        };
        let own = at(&logs, &out, "auto", "train:out").run;
        let (one, two) = (known(&["train:out~1"]), known(&["train:out~1", "train:out~2", "train~3"]));
        let with_own = known(&["train:out~1", &own]);
        let resumed = |run: &str| (run.to_owned(), true, false);
        assert_eq!(chosen("train", Ok(&one)).expect("a run"), resumed("train:out~1"));
        assert_eq!(chosen("train~2", Ok(&two)).expect("a run"), resumed("train:out~2"));
        assert_eq!(chosen("train:out~2", Ok(&two)).expect("a run"), resumed("train:out~2"));
        assert_eq!(chosen("train", Ok(&with_own)).expect("a run"), resumed(&own));
        // Named on purpose while there is nothing yet: a new run, or the one that all hosts name.
        assert_eq!(chosen("train", Ok(&[])).expect("a run"), (own.clone(), false, true));
        assert_eq!(chosen("train~9", Ok(&[])).expect("a run"), resumed("train:out~9"));
        assert_eq!(chosen("train:else", Ok(&one)).expect("another's"), (own, false, false));
        let refused = |resume_from: &str, runs| chosen(resume_from, runs).expect_err(resume_from).to_string();
        assert!(refused("train", Ok(&two)).contains("train:out~1, train:out~2"));
        let reason = "no agent answers";
        assert!(refused("train", Err(reason)).contains(reason));
        assert!(refused("~", Ok(&one)).contains("NAME~ID"));
        testing::snapshot!(
            "launcher",
            "resume from a missing directory",
            refused("/nowhere/at/all", Ok(&one))
        );
        std::fs::write(out.join("model"), "of its own").expect("a file");
        assert_eq!(chosen("train~2", Ok(&two)).expect("a run"), resumed("train:out~2"));
        std::fs::create_dir_all(logs.join("train")).expect("a directory");
        note(&logs, &logs.join("train"), &[at(&logs, &out, "auto", "train:out")]);
        assert!(refused("train~2", Ok(&two)).ends_with(" for run train:out~2"));
    }
}
