//! Which step a job goes back to: what was sealed is compared with its checksums, what is damaged comes from another tier or makes the
//! step before it the newest, and a trainer that takes the newest name finds nothing that is not whole.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use mainstay_checkpoint::MANIFEST_NAME;
use mainstay_core::checkpoint::files::{Proof, Rule, complete, in_place, rule_of, texts};
use rustix::fs::FileType;

use super::FilesError;
use super::catalog::Note;
use super::compare::is_alike;
use super::host::{self, Place};
use super::pack::ARCHIVE_NAME;
use super::tree::{Mark, Member};
use super::unpack::{Way, unpack};
use super::watch::{Inner, Settings, Sight, State, read_text};
use crate::peer::error::PeerError;
use crate::peer::sealed::Sealed;
use crate::peer::user::{As, User};
use crate::peer::{Progress, Restored};

/// How long a directory that has gone with all that was sealed in it may take to come back.
const AWAY: Duration = Duration::from_secs(5);

/// Time from one look for it to the next.
const LOOK_FOR_IT: Duration = Duration::from_millis(50);

/// Steps that may be sealed before the decision: those that were complete when their trainer ended.
const MOST_SEALED: usize = 4;

/// Names with which something is set aside: one that is there already stays.
const MOST_ASIDE: usize = 100;

impl Inner {
    pub(super) fn restore(
        &self,
        again: bool,
        tell: &(dyn Fn(Progress) + Sync),
    ) -> Result<Restored, FilesError> {
        let Settings { directory, run, part, spool, rules, .. } = &self.settings;
        fs::create_dir_all(spool).map_err(FilesError::reading(spool))?;
        self.wait_for_directory(again, tell)?;
        let place = self.place_for_restore()?;
        let mut state = self.state();
        host::keep_decision(&self.service, run, &state.catalog);
        self.seal_what_is_complete(&mut state);
        self.compare_copied(&mut state);
        for (step, lost) in state.catalog.lost().iter().filter(|(_, lost)| !lost.is_gone && !lost.is_again) {
            say(
                tell,
                *step,
                format!("step {step} is not offered from {}: {}", directory.display(), lost.why),
            );
        }
        let rank = if self.is_shared { 0 } else { part.0 };
        // Where all hosts see the same files, one of them brings them back.
        let is_bringing = !self.is_shared || host::is_first(&self.service, run);
        let ranks: &[u32] = if is_bringing { &[rank] } else { &[] };
        let restored = match self.service.restore(&host::spool_of(spool, run), Some(ranks), tell) {
            Ok(restored) => restored,
            Err(error) => {
                self.note_bad(&mut state);
                return Err(self.refusal(&state, Some(&error)).unwrap_or_else(|| error.into()));
            }
        };
        self.note_bad(&mut state);
        host::keep_decision(&self.service, run, &state.catalog);
        let Some(key) = &restored.decision.step else {
            if is_bringing {
                if let Some(refusal) = self.refusal(&state, None) {
                    return Err(refusal);
                }
                self.set_aside(None, &place, &mut state, tell)?;
            }
            return Ok(restored);
        };
        let home = host::in_spool(spool, key.step, rank);
        if let Ok(sealed) = Sealed::read(&home.join(MANIFEST_NAME)).and_then(|sealed| sealed.owned_as(run)) {
            let trackers = texts(rules);
            let is_of_rules = |name: &str, is_directory: bool| {
                rule_of(rules, name, is_directory).is_some()
                    || in_place(rules, name, is_directory).is_some()
                    || (!is_directory && trackers.contains(name))
            };
            let archive = home.join(ARCHIVE_NAME);
            let mut members = unpack(&archive, &sealed, &place, Way::Replace, &is_of_rules)?;
            let _as_user = place.act()?;
            for member in members.iter_mut() {
                if trackers.contains(member.path.as_str()) {
                    member.words = read_text(&place.at, &member.path).map(|(text, _)| text);
                } else if in_place(rules, &member.path, false).is_some() {
                    // Its step is the second in which it was written.
                    set_time(&place, member, key.step).map_err(FilesError::reading(directory))?;
                }
            }
            let manifest = String::from_utf8(sealed.manifest.clone());
            let manifest = manifest.map_err(|error| FilesError::Manifest(error.to_string()))?;
            drop(_as_user);
            state.first_seen.insert(key.step, key.attempt);
            let note = Note { manifest, base: directory.clone(), user: place.user, members };
            state.catalog.insert(note, self.is_shared)?;
            self.service.shared.trust_own(&sealed.shard.root);
        } else if let Some(pack) = state.catalog.packs().get(&key.step) {
            // It is here; its tracker may name a newer one that is not whole.
            let _as_user = place.act()?;
            for member in pack.content.members() {
                if let Some(words) = &member.words {
                    let put = place.at.write_whole(Path::new(&member.path), words.as_bytes());
                    put.map_err(FilesError::reading(directory))?;
                }
            }
        }
        let _ = fs::remove_dir_all(spool.join(format!("step-{:012}", key.step)));
        if is_bringing {
            self.set_aside(Some(key.step), &place, &mut state, tell)?;
        }
        self.offer(&state);
        Ok(restored)
    }

    /// A directory may be away for a moment with all that was sealed in it, and nothing is to be concluded from that.
    fn wait_for_directory(&self, again: bool, tell: &(dyn Fn(Progress) + Sync)) -> Result<(), FilesError> {
        let directory = &self.settings.directory;
        let newest = {
            let state = self.state();
            state.catalog.packs().keys().chain(state.catalog.lost().keys()).max().copied()
        };
        let Some(newest) = newest.filter(|_| self.is_away()) else { return Ok(()) };
        let what = format!(
            "{} is gone, or is another directory than the one in which steps up to {newest} were sealed",
            directory.display()
        );
        say(tell, newest, format!("{what}; it is waited for, {} s at most", AWAY.as_secs()));
        let began = Instant::now();
        while self.is_away() {
            if began.elapsed() < AWAY {
                std::thread::sleep(LOOK_FOR_IT);
                continue;
            }
            if again && !self.has_copies() {
                return Err(FilesError::Lost(format!(
                    "{what}, and no other copy of them is known. The job does not start from the beginning: bring the directory \
                     back and start the job again"
                )));
            }
            return Ok(());
        }
        Ok(())
    }

    /// Whether the directory is not the one in which steps were sealed: in that one a trainer, or its user, may delete all of them.
    fn is_away(&self) -> bool {
        let Some(place) = self.acting.in_directory(&self.settings.directory) else { return true };
        let state = self.state();
        let lost = state.catalog.lost().values().map(|lost| &lost.pack);
        let mut files = state.catalog.packs().values().chain(lost).flat_map(|pack| pack.content.members());
        if files.any(|of| of.words.is_none() && place.at.is_there(Path::new(&of.path))) {
            return false;
        }
        match state.home {
            Some(home) => host::identity(&place) != Some(home),
            None => place.at.list(Path::new("")).is_ok_and(|names| names.is_empty()),
        }
    }

    /// Whether a step of this run is known that does not lie in the directory.
    fn has_copies(&self) -> bool {
        // What lay in it is offered no more after this.
        let _ = self.look(&mut self.state(), self.settings.interval);
        self.service.refresh();
        let run = &self.settings.run;
        self.service.copies().iter().any(|copy| copy.shard.of.run_id() == run)
    }

    /// What is complete by now was written by a trainer that has ended: nobody need look at it twice.
    fn seal_what_is_complete(&self, state: &mut State) {
        for _ in 0..MOST_SEALED {
            match self.look(state, Duration::ZERO) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let directory = self.settings.directory.display();
                    tracing::warn!(%directory, %error, "a watched directory before a start");
                    return;
                }
            }
        }
    }

    /// Compares what is written over before the decision: a copy of it takes its place only if it is known to be damaged.
    fn compare_copied(&self, state: &mut State) {
        let of_copies = state.catalog.packs().iter().filter(|(_, pack)| self.is_in_place(&pack.content));
        let bad = of_copies
            .filter(|(_, pack)| !matches!(pack.sealed.first_bad_from_start(&pack.content), Ok(None)));
        let bad: Vec<u64> = bad.map(|(step, _)| *step).collect();
        for step in bad {
            state.catalog.lose(step, "its bytes are not those that were sealed".to_owned(), false, false);
        }
        self.offer(state);
    }

    /// What was found to be damaged when it was read.
    fn note_bad(&self, state: &mut State) {
        let listed = self.service.shared.own.list();
        let is_bad = |root: &str| listed.iter().any(|(shard, _, is_good)| shard.root == root && !is_good);
        let bad = state.catalog.packs().iter().filter(|(_, pack)| is_bad(&pack.sealed.shard.root));
        let bad: Vec<u64> = bad.map(|(step, _)| *step).collect();
        for step in bad {
            state.catalog.lose(step, "its bytes are not those that were sealed".to_owned(), false, false);
        }
    }

    /// Why the trainer must not be started, where steps were sealed and none is whole.
    fn refusal(&self, state: &State, error: Option<&PeerError>) -> Option<FilesError> {
        let lost = state.catalog.lost().iter().filter(|(_, lost)| !lost.is_gone);
        let lost = lost.map(|(step, lost)| format!("step {step}: {}", lost.why));
        let unsound = state.unsound.iter().map(|(step, (_, why))| format!("step {step}: {why}"));
        let all: Vec<String> = lost.chain(unsound).collect();
        let error = error.map(|error| format!(" ({error})")).unwrap_or_default();
        (!all.is_empty()).then(|| {
            FilesError::Lost(format!(
                "no whole checkpoint is left in {} or elsewhere{error}: {}. The trainer is not started: bring a whole one back, or \
                 move these away to start from the beginning",
                self.settings.directory.display(),
                all.join("; ")
            ))
        })
    }

    /// As whom files are brought back. A directory that is gone is made with that user's rights, never with this process's.
    fn place_for_restore(&self) -> Result<Place, FilesError> {
        let directory = &self.settings.directory;
        if let Some(place) = self.acting.in_directory(directory) {
            return Ok(place);
        }
        let own = User::own();
        let maker = self.acting.known().or_else(|| (own.uid != 0).then_some(own));
        if let Some(maker) = maker {
            let _as_user = As::to_write(maker).map_err(FilesError::reading(directory))?;
            fs::create_dir_all(directory).map_err(FilesError::reading(directory))?;
        }
        let refused = || {
            PeerError::Local(format!(
                "{} is no directory of the user whose it was when it was registered (it is a link, or another user's): nothing is \
                 written there",
                directory.display()
            ))
        };
        Ok(self.acting.in_directory(directory).ok_or_else(refused)?)
    }

    /// Trainers that take the newest name that they find must not find what is not whole. It is renamed and never deleted; what nobody
    /// knows to be a checkpoint stays where it is.
    fn set_aside(
        &self,
        step: Option<u64>,
        place: &Place,
        state: &mut State,
        tell: &(dyn Fn(Progress) + Sync),
    ) -> Result<(), FilesError> {
        let Settings { directory, rules, expect, quiet, .. } = &self.settings;
        let reading = FilesError::reading;
        let Sight { look, .. } = self.sight(place, state)?;
        let done: Vec<u64> = complete(rules, &look, *expect, *quiet).iter().map(|of| of.step).collect();
        let _as_user = place.act()?;
        for (name, kind) in place.at.list(Path::new("")).map_err(reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let Some((rule, of)) = rule_of(rules, &name, kind == FileType::Directory) else { continue };
            if step.is_some_and(|step| of <= step) || matches!(rule.proof, Proof::Tracker(_)) {
                continue;
            }
            let Some(why) = not_whole(state, rule, &name, of, done.contains(&of)) else { continue };
            let aside = aside(place, &name).map_err(reading(directory))?;
            let words = format!(
                "{} is no whole checkpoint ({why}): it is now called {aside}",
                directory.join(&name).display()
            );
            tracing::warn!("{words}");
            say(tell, of, words);
        }
        Ok(())
    }
}

/// Why what has this name is known to be no checkpoint that a job may go back to; none where nothing is known against it.
fn not_whole(state: &State, rule: &Rule, name: &str, step: u64, is_complete: bool) -> Option<String> {
    if let Some(lost) = state.catalog.lost().get(&step).filter(|lost| !lost.is_gone) {
        return Some(lost.why.clone());
    }
    if let Some((_, why)) = state.unsound.get(&step) {
        return Some(why.clone());
    }
    if state.catalog.packs().contains_key(&step) {
        return Some("not every host has its part of it".to_owned());
    }
    let first_names = |pack: &std::sync::Arc<super::Pack>| -> Vec<String> {
        let first = |of: &Member| of.path.split('/').next().unwrap_or_default().to_owned();
        pack.content.members().iter().map(first).collect()
    };
    let mut sealed = state.catalog.packs().values().flat_map(first_names);
    // A pattern such as `*{step}` also fits what is nobody's checkpoint.
    let is_particular = !rule.pattern.written().starts_with(['*', '{']);
    let is_checkpoint = is_particular || sealed.any(|known| is_alike(&known, name));
    (is_checkpoint && !is_complete).then(|| "its writer has not finished it".to_owned())
}

/// Renames it to a name that no trainer takes and that nothing has.
fn aside(place: &Place, name: &str) -> io::Result<String> {
    for number in 0..MOST_ASIDE {
        let more = if number == 0 { String::new() } else { format!("-{number}") };
        let aside = format!(".{name}.not-whole{more}");
        match place.at.rename_new(Path::new(name), &PathBuf::from(&aside)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            renamed => return renamed.map(|()| aside),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{MOST_ASIDE} names as .{name}.not-whole are there"),
    ))
}

fn set_time(place: &Place, member: &mut Member, second: u64) -> io::Result<()> {
    let file = place.at.read(Path::new(&member.path))?;
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second))?;
    member.mark = Mark::of(&file.metadata()?);
    Ok(())
}

fn say(tell: &(dyn Fn(Progress) + Sync), step: u64, told: String) {
    tell(Progress { step, shards: (0, 0), bytes: (0, 0), told, files_wanted: 0, files_token: String::new() });
}
