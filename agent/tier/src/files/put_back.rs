//! Changes in a directory before its trainer resumes: the files of the step are unpacked, trackers name it, and what is not whole is
//! set aside. A process with write access makes them: this process, or, for an agent that may not act as the user, a process of the user.
//!
//! ```text
//! agent                                  the user's process (launcher)
//! fetches the step into the spool
//!                       ───wanted───►    creates an empty file in the directory
//!                       ◄──descriptor──  lends it
//! writes the archive into it
//!                       ───PutBack───►   verifies and unpacks it, writes trackers, sets aside
//! verifies the files,     ◄───token───   has done so
//! and offers them
//! ```

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mainstay_checkpoint::archive::{self, Entry};
use mainstay_checkpoint::files::{Rule, in_place, matching_rule, texts};
use mainstay_checkpoint::inventory::StepKey;
use rustix::fs::FileType;

use crate::beneath::Beneath;
use crate::files::FilesError;
use crate::files::all::WatchRequest;
use crate::files::host::{UserDirectory, report_line};
use crate::files::pack::{ARCHIVE_NAME, Content};
use crate::files::tree::{FileVersion, Member};
use crate::files::unpack::{UnpackMode, unpack};
use crate::files::watch::{Inner, Settings, State, read_text};
use crate::lent_files::RestoredShard;
use crate::peer::user::{Access, User};
use crate::peer::{Progress, Restored};
use crate::seal::ReadAt;
use crate::seal::{SealedShard, open_plainly};

/// Maximum number of names tried when something is set aside. An existing name stays.
const MAX_NAMES_ASIDE: usize = 100;

/// The changes to make.
pub(super) struct Changes {
    step: Option<StepKey>,
    /// The archive with the files of the step, and its seal.
    pub(super) archive: Option<(PathBuf, SealedShard)>,
    pub(super) texts: Vec<(String, String)>,
    pub(super) unfit: Vec<PartialCheckpoint>,
}

impl Changes {
    pub(super) fn new(restored: &Restored) -> Changes {
        Changes { step: restored.decision.step.clone(), archive: None, texts: Vec::new(), unfit: Vec::new() }
    }
}

impl Inner {
    /// Makes the changes, or leaves them to a process of the user.
    pub(super) fn change(
        &self,
        state: &mut State,
        folder: &UserDirectory,
        changes: Changes,
        restored: Restored,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Started, FilesError> {
        if folder.access.act_to_write().is_err() {
            return self.leave(state, folder, changes, restored, report);
        }
        let Settings { request: WatchRequest { rules, .. }, .. } = &self.settings;
        if let (Some((archive, sealed)), Some(key)) = (&changes.archive, &changes.step) {
            let members = unpack_step(folder, rules, archive, sealed, key.step)?;
            self.note(state, folder, key, sealed, members)?;
        }
        write_texts(folder, &changes.texts)?;
        self.empty_spool(&changes);
        for (step, message) in set_aside(folder, &changes.unfit)? {
            report_line(report, step, message);
        }
        self.offer(state);
        Ok(Started::Done(restored))
    }

    fn leave(
        &self,
        state: &mut State,
        folder: &UserDirectory,
        changes: Changes,
        restored: Restored,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Started, FilesError> {
        let step = changes.step.as_ref().map(|key| key.step);
        let mut put_back = PutBack { step, unfit: changes.unfit.clone(), ..PutBack::default() };
        {
            let _as_user = folder.act()?;
            let differs = |(name, expected): &&(String, String)| {
                read_text(&folder.at, name).is_none_or(|(text, _)| text != *expected)
            };
            put_back.texts = changes.texts.iter().filter(differs).cloned().collect();
        }
        let mut unpacked = None;
        if let (Some((archive, sealed)), Some(key)) = (&changes.archive, &changes.step) {
            let file = open_plainly(archive).map_err(FilesError::reading(archive))?;
            unpacked = Some((key.clone(), sealed.clone(), entries(&file, sealed)?));
            put_back.archive =
                Some(self.lend(key, folder.access.user(), (&file, archive), sealed, report)?);
        }
        self.empty_spool(&changes);
        if put_back.archive.is_none() && put_back.texts.is_empty() && put_back.unfit.is_empty() {
            self.offer(state);
            return Ok(Started::Done(restored));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        put_back.token = format!("{since:x}");
        state.left = Some(PendingPutBack {
            token: put_back.token.clone(),
            since: Instant::now(),
            restored,
            step: unpacked,
        });
        Ok(Started::Left(put_back))
    }

    /// Writes an archive of the spool into a file that the user's process lends.
    fn lend(
        &self,
        key: &StepKey,
        user: User,
        (mut from, path): (&File, &Path),
        sealed: &SealedShard,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<RestoredShard, FilesError> {
        let none = || FilesError::reading(path)(io::Error::other("no file was lent for it"));
        let lot = self.service.lent_files(key, user, 1, report)?;
        let (file, mut to) = lot.and_then(|lot| lot.take()).ok_or_else(none)?;
        io::copy(&mut from, &mut to).map_err(FilesError::reading(path))?;
        let (home, name, manifest) = (PathBuf::new(), ARCHIVE_NAME.to_owned(), sealed.manifest.clone());
        Ok(RestoredShard { file, home, name, manifest })
    }

    /// Handles the report that the user's process has finished.
    pub(super) fn end_restore(&self, token: &str) -> Result<Restored, FilesError> {
        let Settings { request: WatchRequest { directory, rules, .. }, .. } = &self.settings;
        let mut state = self.state();
        let left = state.left.take_if(|left| left.token == token);
        let left = left.ok_or_else(|| FilesError::Manifest("no restore waits for this".to_owned()))?;
        let folder = self.acting.in_directory(directory);
        if let Some((key, sealed, entries)) = left.step {
            let gone = || FilesError::reading(directory)(io::ErrorKind::NotFound.into());
            let folder = folder.ok_or_else(gone)?;
            let members = members(&folder, rules, &entries)?;
            let content = Content::new(directory, folder.access.clone(), members.clone())?;
            if !matches!(sealed.first_bad_from_start(&content), Ok(None)) {
                let message = format!(
                    "what was put back into {} is not what was sealed of step {}",
                    directory.display(),
                    key.step
                );
                return Err(FilesError::Lost(message));
            }
            self.note(&mut state, &folder, &key, &sealed, members)?;
        }
        self.offer(&state);
        Ok(left.restored)
    }

    /// Records that a step is in the directory as it was sealed.
    fn note(
        &self,
        state: &mut State,
        folder: &UserDirectory,
        key: &StepKey,
        sealed: &SealedShard,
        members: Vec<Member>,
    ) -> Result<(), FilesError> {
        state.first_seen.insert(key.step, key.attempt);
        let (base, user) = (&self.settings.request.directory, folder.access.user());
        state.catalog.insert(sealed.manifest.clone(), base, user, members, self.is_shared)?;
        self.service.shared.trust_own(&sealed.shard.root);
        Ok(())
    }

    fn empty_spool(&self, changes: &Changes) {
        if let Some(key) = &changes.step {
            let step = format!("step-{:012}", key.step);
            let _ = std::fs::remove_dir_all(self.settings.storage.spool.join(step));
        }
    }
}

/// Makes the changes of an agent that may not write into `directory`, with the rights of this process, and reports them in lines.
/// `archive`: the file that was lent. The agent is not trusted: what it names must be what a trainer with these rules writes.
pub fn put_back(
    directory: &Path,
    rules: &[Rule],
    archive: Option<&Path>,
    asked: &PutBack,
) -> Result<Vec<String>, FilesError> {
    let wrong =
        |what: &str| FilesError::Manifest(format!("the agent asks for {what}, which is of no trainer here"));
    let at = Beneath::open(directory).map_err(FilesError::reading(directory))?;
    let folder = UserDirectory { access: Access::own(), at };
    let trackers = texts(rules);
    if let Some((name, _)) = asked.texts.iter().find(|(name, _)| !trackers.contains(name.as_str())) {
        return Err(wrong(&format!("{name:?}")));
    }
    for PartialCheckpoint { name, step, .. } in &asked.unfit {
        let is_directory = folder.at.stat(Path::new(name)).is_ok_and(|found| is_directory(found.st_mode));
        let step_of_name = matching_rule(rules, name, is_directory).map(|(_, step_of_name)| step_of_name);
        if name.contains('/') || step_of_name != Some(*step) || asked.step.is_some_and(|from| *step <= from) {
            return Err(wrong(&format!("{name:?}")));
        }
    }
    if let (Some(landed), Some(step)) = (&asked.archive, asked.step) {
        let archive = archive.ok_or_else(|| wrong("a file that was not lent"))?;
        let sealed = SealedShard::of(landed.manifest.clone());
        let sealed = sealed.map_err(|error| FilesError::Manifest(error.to_string()))?;
        let file = open_plainly(archive).map_err(FilesError::reading(archive))?;
        let bad = sealed.first_bad(&file).map_err(FilesError::reading(archive))?;
        if sealed.shard.key.step != step || bad.is_some() {
            return Err(FilesError::Manifest("what the agent wrote is not what was sealed".to_owned()));
        }
        unpack_step(&folder, rules, archive, &sealed, step)?;
    }
    write_texts(&folder, &asked.texts)?;
    Ok(set_aside(&folder, &asked.unfit)?.into_iter().map(|(_, message)| message).collect())
}

fn is_directory(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::Directory
}

fn entries(file: &File, sealed: &SealedShard) -> Result<Vec<Entry>, FilesError> {
    let mut read = |at: u64, buffer: &mut [u8]| {
        ReadAt::read_exact_at(file, buffer, at).map_err(|error| error.to_string())
    };
    let entries = archive::read(sealed.shard.bytes, &mut read)?;
    Ok(entries.into_iter().map(|(entry, _)| entry).collect())
}

/// Unpacks the files of a step into their places.
fn unpack_step(
    folder: &UserDirectory,
    rules: &[Rule],
    archive: &Path,
    sealed: &SealedShard,
    step: u64,
) -> Result<Vec<Member>, FilesError> {
    let trackers = texts(rules);
    let is_of_rules = |name: &str, is_directory: bool| {
        matching_rule(rules, name, is_directory).is_some()
            || in_place(rules, name, is_directory).is_some()
            || (!is_directory && trackers.contains(name))
    };
    let mut members = unpack(archive, sealed, folder, UnpackMode::Replace, &is_of_rules)?;
    let _as_user = folder.act()?;
    for member in &mut members {
        if trackers.contains(member.path.as_str()) {
            member.content = read_text(&folder.at, &member.path).map(|(text, _)| text);
        } else if in_place(rules, &member.path, false).is_some() {
            // For this rule, the step is the second in which the file was written.
            set_time(folder, member, step).map_err(FilesError::reading(folder.at.path()))?;
        }
    }
    Ok(members)
}

/// The files of a step as they are in the directory.
fn members(folder: &UserDirectory, rules: &[Rule], entries: &[Entry]) -> Result<Vec<Member>, FilesError> {
    let trackers = texts(rules);
    let _as_user = folder.act()?;
    let member = |entry: &Entry| -> io::Result<Member> {
        let found = folder.at.stat(Path::new(&entry.path))?;
        let is_tracker = trackers.contains(entry.path.as_str());
        let text = is_tracker.then(|| read_text(&folder.at, &entry.path)).flatten().map(|(text, _)| text);
        Ok(Member {
            path: entry.path.clone(),
            mode: entry.mode,
            mark: FileVersion::from_stat(&found),
            content: text,
        })
    };
    entries.iter().map(member).collect::<io::Result<_>>().map_err(FilesError::reading(folder.at.path()))
}

fn write_texts(folder: &UserDirectory, texts: &[(String, String)]) -> Result<(), FilesError> {
    let _as_user = folder.act()?;
    for (name, text) in texts {
        let put = folder.at.write_whole(Path::new(name), text.as_bytes());
        put.map_err(FilesError::reading(folder.at.path()))?;
    }
    Ok(())
}

/// Renames what is not whole; never deletes it. Returns what was done, in words.
fn set_aside(folder: &UserDirectory, unfit: &[PartialCheckpoint]) -> Result<Vec<(u64, String)>, FilesError> {
    let _as_user = folder.act()?;
    let directory = folder.at.path();
    let mut done = Vec::new();
    for PartialCheckpoint { name, step, why } in unfit {
        let aside = rename_aside(folder, name).map_err(FilesError::reading(directory))?;
        let message = format!(
            "{} is not a whole checkpoint ({why}): it is now called {aside}",
            directory.join(name).display()
        );
        done.push((*step, message));
    }
    Ok(done)
}

/// Renames it to a free name that no trainer recognizes.
fn rename_aside(folder: &UserDirectory, name: &str) -> io::Result<String> {
    for number in 0..MAX_NAMES_ASIDE {
        let more = if number == 0 { String::new() } else { format!("-{number}") };
        let aside = format!(".{name}.not-whole{more}");
        match folder.at.rename_new(Path::new(name), &PathBuf::from(&aside)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            renamed => return renamed.map(|()| aside),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{MAX_NAMES_ASIDE} names as .{name}.not-whole are there"),
    ))
}

fn set_time(folder: &UserDirectory, member: &mut Member, second: u64) -> io::Result<()> {
    let file = folder.at.read(Path::new(&member.path))?;
    file.set_modified(UNIX_EPOCH + Duration::from_secs(second))?;
    member.mark = FileVersion::of(&file.metadata()?);
    Ok(())
}

// Work that an agent that may not act as a user leaves to a process of that user.

/// A process that has not finished by then is not expected to finish.
const PUT_BACK_TIMEOUT: Duration = Duration::from_secs(3600);

/// The result of starting a restore.
#[derive(Debug)]
pub enum Started {
    /// It is done.
    Done(Restored),
    /// This process may not write as the user: a process of the user does this, then calls [`end_restore`](crate::files::FileWatch::end_restore).
    Left(PutBack),
}

/// What a process of the user has to do in a trainer's directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Token with which completion is reported.
    pub token: String,
    /// The step from which the trainer resumes; none if it starts from the beginning.
    pub step: Option<u64>,
    /// The archive with the files of the step, in a file that the process lent; none if the files are already in place.
    pub archive: Option<RestoredShard>,
    /// Names and contents of tracker files.
    pub texts: Vec<(String, String)>,
    /// Names to set aside.
    pub unfit: Vec<PartialCheckpoint>,
}

/// A name that a trainer would treat as a checkpoint, but that is not whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialCheckpoint {
    /// Its name in the directory.
    pub name: String,
    /// The step in the name.
    pub step: u64,
    /// Why it is not whole.
    pub why: String,
}

/// Work that was left to a process of the user.
#[derive(Debug)]
pub(super) struct PendingPutBack {
    pub(super) token: String,
    pub(super) since: Instant,
    pub(super) restored: Restored,
    /// The step that the process unpacks.
    pub(super) step: Option<(StepKey, SealedShard, Vec<Entry>)>,
}

impl PendingPutBack {
    /// Whether the files of this step are being put back. They are not sealed as new ones meanwhile.
    pub(super) fn is_of(&self, step: u64) -> bool {
        self.since.elapsed() < PUT_BACK_TIMEOUT
            && self.step.as_ref().is_some_and(|(key, ..)| key.step == step)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use mainstay_checkpoint::files::Kind;
    use mainstay_checkpoint_format::{CHUNK_BYTES, Chunks, Identity, Manifest, SealedFile};

    use super::*;
    use crate::files::members as members_of;
    use crate::seal::sums;

    /// A directory with step 10, and next to it its archive.
    fn saved() -> (testing::TempDir, PathBuf, PutBack) {
        let at = testing::tempdir().unwrap();
        let out = at.path().join("out");
        fs::create_dir_all(out.join("checkpoint-10")).unwrap();
        fs::write(out.join("checkpoint-10/weights"), "the state").unwrap();
        fs::write(out.join("checkpoint-10/trainer_state.json"), "{}").unwrap();
        let members = members_of(&Beneath::open(&out).unwrap(), "checkpoint-10").unwrap();
        let content = Content::new(&out, Access::own(), members).unwrap();
        let mut bytes = vec![0; usize::try_from(content.size()).unwrap()];
        content.read_exact_at(&mut bytes, 0).unwrap();
        let archive = at.path().join("lent");
        fs::write(&archive, &bytes).unwrap();
        let (whole, parts) = sums(&File::open(&archive).unwrap(), content.size(), CHUNK_BYTES).unwrap();
        let manifest = Manifest {
            identity: Identity { job: "files".to_owned(), attempt: 0, step: 10, rank: 0, world_size: 1 },
            run: "run".to_owned(),
            created_unix_s: 0,
            serialisation: "files".to_owned(),
            software: BTreeMap::new(),
            file: SealedFile { name: ARCHIVE_NAME.to_owned(), size: content.size(), xxh3_128: whole },
            chunks: Some(Chunks { bytes: CHUNK_BYTES, sums: parts }),
            shared_content: None,
        };
        let manifest = manifest.encode();
        let landed = RestoredShard { file: 0, home: PathBuf::new(), name: ARCHIVE_NAME.to_owned(), manifest };
        let asked = PutBack { step: Some(10), archive: Some(landed), ..PutBack::default() };
        (at, archive, asked)
    }

    fn rules() -> Vec<Rule> {
        Kind::Auto.rules()
    }

    #[test]
    fn what_was_sealed_is_unpacked_and_what_is_newer_and_not_whole_is_set_aside() {
        let (at, archive, asked) = saved();
        let out = at.path().join("out");
        fs::write(out.join("checkpoint-10/weights"), "torn").unwrap();
        fs::create_dir(out.join("checkpoint-20")).unwrap();
        let unfit = PartialCheckpoint { name: "checkpoint-20".to_owned(), step: 20, why: "torn".to_owned() };
        let texts = vec![("latest".to_owned(), "global_step10".to_owned())];
        let asked = PutBack { unfit: vec![unfit], texts, ..asked };
        let lines = put_back(&out, &rules(), Some(&archive), &asked).unwrap();
        assert_eq!(fs::read_to_string(out.join("checkpoint-10/weights")).unwrap(), "the state");
        assert_eq!(fs::read_to_string(out.join("latest")).unwrap(), "global_step10");
        assert!(out.join(".checkpoint-20.not-whole").is_dir() && !out.join("checkpoint-20").exists());
        assert!(lines.len() == 1 && lines[0].contains("torn"), "{lines:?}");
    }

    #[test]
    fn an_agent_is_not_trusted() {
        let (at, archive, asked) = saved();
        let out = at.path().join("out");
        fs::write(at.path().join("secret-30.pt"), "theirs").unwrap();
        fs::write(out.join("train.py"), "theirs").unwrap();
        fs::create_dir(out.join("checkpoint-5")).unwrap();
        let unfit = |name: &str, step| {
            let unfit = PartialCheckpoint { name: name.to_owned(), step, why: String::new() };
            PutBack { archive: None, unfit: vec![unfit], ..asked.clone() }
        };
        let text = |name: &str| PutBack {
            archive: None,
            texts: vec![(name.to_owned(), "new".to_owned())],
            ..asked.clone()
        };
        let refused = [
            unfit("../secret-30.pt", 30),
            unfit("train.py", 30),
            // The step from which its trainer resumes, and an older one.
            unfit("checkpoint-10", 10),
            unfit("checkpoint-5", 5),
            unfit("checkpoint-5", 50),
            text("train.py"),
            text("../secret-30.pt"),
            PutBack { step: Some(11), ..asked.clone() },
        ];
        for asked in refused {
            assert!(put_back(&out, &rules(), Some(&archive), &asked).is_err(), "{asked:?}");
        }
        assert!(put_back(&out, &rules(), None, &asked).is_err(), "nothing was lent");
        let mut bytes = fs::read(&archive).unwrap();
        let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        bytes[last] ^= 1;
        fs::write(&archive, bytes).unwrap();
        assert!(put_back(&out, &rules(), Some(&archive), &asked).is_err(), "other bytes");
        let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["checkpoint-10", "checkpoint-5", "train.py"], "nothing has changed");
        assert_eq!(fs::read_to_string(out.join("train.py")).unwrap(), "theirs");
    }
}
