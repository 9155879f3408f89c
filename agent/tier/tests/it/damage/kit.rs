//! Checkpoints of real libraries, ways to damage them, and a trainer that takes the newest one that it finds.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use mainstay_checkpoint::files::Kind;
use mainstay_tier::files::{FileWatch, Files, FilesError, FilesSettings, WatchRequest};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::{Progress, Service, Settings};
use testing::TempDir;

use crate::peers::support;

/// The steps of the older and the newer checkpoint.
const STEPS: [u64; 2] = [10, 20];

/// What one library wrote: all files of both checkpoints, by name.
#[derive(Clone, Debug)]
pub(super) struct Library {
    pub(super) name: String,
    kind: Kind,
    older: Content,
    newer: Content,
    /// The top-level names of both, as the library's users see them.
    names: [String; 2],
}

type Content = BTreeMap<String, Vec<u8>>;

/// The damage to a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Damage {
    /// Its second half is missing.
    Half,
    /// Its last byte is missing.
    Last,
    /// All its bytes are zeros.
    Zeroed,
    /// One bit is flipped, at this share of the file's length.
    Bit(f64),
    Missing,
    /// It has a temporary name.
    Renamed,
}

impl Damage {
    pub(super) const ALL: [Damage; 8] = [
        Damage::Half,
        Damage::Last,
        Damage::Zeroed,
        Damage::Bit(0.0),
        Damage::Bit(0.5),
        Damage::Bit(1.0),
        Damage::Missing,
        Damage::Renamed,
    ];
}

/// The moment of the damage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Moment {
    /// Before all files are written.
    WhileItIsSaved,
    /// All files are written, and nothing is sealed.
    BeforeTheSeal,
    /// After the seal.
    WhileTheJobRuns,
    /// After the seal, while no agent watches.
    Unattended,
    /// After the seal, without a change of length or time: damage by the disk.
    Unseen,
    /// After the seal, to the older checkpoint as well.
    InBoth,
    /// After the seal, when a peer has a copy.
    WithAPeer,
}

impl Moment {
    /// Whether this damage is possible at this moment.
    pub(super) fn is_for(self, damage: Damage) -> bool {
        self != Moment::Unseen || matches!(damage, Damage::Zeroed | Damage::Bit(_))
    }
}

/// What a trainer that takes the newest checkpoint finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RestoreOutcome {
    Older,
    Newer,
    Nothing,
    /// The problem.
    Damaged(String),
}

/// Each library's checkpoints, created once by the libraries themselves; none if there is no Python with them.
pub(super) fn checkpoints() -> Option<Vec<Library>> {
    static MADE: OnceLock<Option<Vec<Library>>> = OnceLock::new();
    MADE.get_or_init(make).clone()
}

fn make() -> Option<Vec<Library>> {
    let Some(python) = std::env::var_os("MAINSTAY_TEST_FRAMEWORKS") else {
        testing::skip(
            "MAINSTAY_TEST_FRAMEWORKS names no Python with the libraries; `cargo xtask test` provides it",
        );
        return None;
    };
    let place = TempDir::new().unwrap();
    // A directory with checkpoints that were created by hand may be given.
    let kept = std::env::var_os("MAINSTAY_TEST_CHECKPOINTS").map(PathBuf::from);
    if kept.is_none() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python/small_checkpoints.py");
        let made = Command::new(python).arg(script).arg(place.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    let place = kept.as_deref().unwrap_or(place.path());
    let library = |(name, kind, names): (&str, Kind, [&str; 2])| {
        let home = place.join(name);
        let names = names.map(str::to_owned);
        let [older, newer] = [0, 1].map(|index: usize| read_all(&home, &names[index]));
        assert!(!older.is_empty() && !newer.is_empty(), "{name}");
        Library { name: name.to_owned(), kind, older, newer, names }
    };
    let all = [
        ("huggingface", Kind::Auto, ["checkpoint-10", "checkpoint-20"]),
        ("lightning", Kind::Auto, ["epoch=0-step=10.ckpt", "epoch=0-step=20.ckpt"]),
        ("dcp", Kind::Dcp, ["step-10", "step-20"]),
        ("torch", Kind::Torch, ["ckpt_10.pt", "ckpt_20.pt"]),
        ("orbax", Kind::Orbax, ["10", "20"]),
    ];
    Some(all.into_iter().map(library).collect())
}

/// All files of `name` below `home`.
fn read_all(home: &Path, name: &str) -> Content {
    let mut found = BTreeMap::new();
    let mut open = vec![name.to_owned()];
    while let Some(name) = open.pop() {
        let path = home.join(&name);
        if path.is_dir() {
            let entries =
                fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            open.extend(entries.map(|below| format!("{name}/{below}")));
        } else if let Ok(bytes) = fs::read(&path) {
            found.insert(name, bytes);
        }
    }
    found
}

impl Library {
    pub(super) fn older(&self) -> usize {
        0
    }

    pub(super) fn newer(&self) -> usize {
        1
    }

    fn of(&self, which: usize) -> &Content {
        if which == 0 { &self.older } else { &self.newer }
    }

    pub(super) fn files(&self, which: usize) -> Vec<String> {
        self.of(which).keys().cloned().collect()
    }

    /// The same files under one name, each overwriting the previous one.
    pub(super) fn written_over(&self, name: &str) -> Library {
        let under = |files: &Content| files.values().map(|bytes| (name.to_owned(), bytes.clone())).collect();
        let names = [name.to_owned(), name.to_owned()];
        Library { older: under(&self.older), newer: under(&self.newer), names, ..self.clone() }
    }

    /// The files in the order in which they are written: the completion mark comes last.
    fn in_order(&self, which: usize) -> Vec<&String> {
        let is_mark = |name: &str| {
            ["trainer_state.json", ".metadata", "_CHECKPOINT_METADATA", "commit_success.txt"]
                .iter()
                .any(|mark| name.ends_with(&format!("/{mark}")))
        };
        let mut names: Vec<&String> = self.of(which).keys().collect();
        names.sort_by_key(|name| (is_mark(name), name.matches('/').count() == 1));
        names
    }

    /// Whether the file's format alone shows the damage, so that it need not have been sealed before.
    pub(super) fn is_told_by_its_format(&self, file: &str, damage: Damage) -> bool {
        let is = |endings: &[&str]| endings.iter().any(|ending| file.ends_with(ending));
        let is_archive = is(&[".pt", ".pth", ".ckpt", ".bin", ".distcp"]);
        match damage {
            // The last byte of JSON is a newline.
            Damage::Last if is(&[".json"]) => false,
            Damage::Half | Damage::Last | Damage::Zeroed => {
                is_archive || is(&[".safetensors", ".json", ".metadata"])
            }
            // The middle of an archive has the tensors, which have checksums.
            Damage::Bit(share) => is_archive && share == 0.5,
            Damage::Missing | Damage::Renamed => {
                is(&["trainer_state.json", ".metadata"]) || self.of(1).len() == 1
            }
        }
    }
}

/// An agent's watch of a directory.
struct Watching {
    service: Arc<Service>,
    files: Files,
    watch: Arc<FileWatch>,
    /// References to the service before the watch.
    holders: usize,
}

impl Watching {
    /// Ends the watch and its thread: nothing is written after this.
    fn end(self) {
        let Watching { service, files, watch, holders } = self;
        drop((files, watch));
        while Arc::strong_count(&service) > holders {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for TestDirectory<'_> {
    fn drop(&mut self) {
        self.watching.get_mut().ok().and_then(Option::take).into_iter().for_each(Watching::end);
    }
}

/// A watched directory and its watch.
pub(super) struct TestDirectory<'a> {
    library: &'a Library,
    root: TempDir,
    watching: Mutex<Option<Watching>>,
}

impl<'a> TestDirectory<'a> {
    pub(super) fn new(library: &'a Library) -> TestDirectory<'a> {
        let place = TestDirectory { library, root: TempDir::new().unwrap(), watching: Mutex::default() };
        fs::create_dir(place.directory()).unwrap();
        place.start();
        place
    }

    pub(super) fn directory(&self) -> PathBuf {
        self.root.path().join("out")
    }

    /// Restarts the watch.
    fn start(&self) {
        let mut watching = self.watching.lock().unwrap();
        watching.take().into_iter().for_each(Watching::end);
        let settings = Settings::alone(self.root.path().join("store"), "this-host".to_owned());
        let service = Arc::new(Service::start(settings, Token::random().unwrap()).unwrap());
        *watching = Some(self.watch(service));
    }

    fn watch(&self, service: Arc<Service>) -> Watching {
        let plan = FilesSettings {
            home: self.root.path().join("notes"),
            spool: self.root.path().join("spool"),
            hosts: Vec::new(),
            // It is checked when the job goes back, and not in between.
            interval: Duration::from_secs(3600),
        };
        let holders = Arc::strong_count(&service);
        let files = Files::new(Arc::clone(&service), plan);
        let wanted = WatchRequest {
            directory: self.directory(),
            run: "run".to_owned(),
            user: None,
            rules: self.library.kind.rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: Some(false),
        };
        let watch = files.watch(wanted).unwrap();
        Watching { service, files, watch, holders }
    }

    /// Saves as the library does: the completion mark comes last.
    pub(super) fn save(&self, which: usize) {
        for name in self.library.in_order(which) {
            self.write(which, name);
        }
    }

    fn write(&self, which: usize, name: &str) {
        let path = self.directory().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &self.library.of(which)[name]).unwrap();
        // The modification times of both differ by seconds, as in any training that takes longer than a test.
        let at = SystemTime::now() - Duration::from_secs(100 - STEPS[which]);
        OpenOptions::new().write(true).open(&path).unwrap().set_modified(at).unwrap();
    }

    /// Does what a launcher does before it starts the ranks. Returns the messages.
    pub(super) fn go_back(&self, again: bool) -> Result<Vec<String>, FilesError> {
        let printed = Mutex::new(Vec::new());
        self.go_back_telling(again, &|line| printed.lock().unwrap().push(line))?;
        Ok(printed.into_inner().unwrap())
    }

    pub(super) fn go_back_telling(
        &self,
        again: bool,
        report: &(dyn Fn(String) + Sync),
    ) -> Result<(), FilesError> {
        let watch = Arc::clone(&self.watching.lock().unwrap().as_ref().unwrap().watch);
        let report = |at: Progress| {
            if !at.message.is_empty() {
                report(at.message);
            }
        };
        watch.restore(again, &report).map(drop)
    }

    pub(super) fn damage(&self, name: &str, damage: Damage) {
        let path = self.directory().join(name);
        let length = fs::metadata(&path).unwrap().len();
        let file = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        match damage {
            Damage::Half => file().set_len(length / 2).unwrap(),
            Damage::Last => file().set_len(length - 1).unwrap(),
            Damage::Zeroed => file().write_all_at(&vec![0; usize::try_from(length).unwrap()], 0).unwrap(),
            Damage::Bit(share) => {
                let at = ((length - 1) as f64 * share) as u64;
                let mut byte = [0];
                file().read_exact_at(&mut byte, at).unwrap();
                file().write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            }
            Damage::Missing => fs::remove_file(&path).unwrap(),
            Damage::Renamed => fs::rename(&path, path.with_extension("tmp")).unwrap(),
        }
    }

    pub(super) fn damage_at(&self, name: &str, damage: Damage, moment: Moment) {
        let path = self.directory().join(name);
        let before = fs::metadata(&path).and_then(|found| found.modified()).unwrap();
        self.damage(name, damage);
        match moment {
            Moment::Unseen => {
                OpenOptions::new().write(true).open(&path).unwrap().set_modified(before).unwrap()
            }
            Moment::Unattended => self.start(),
            _ => {}
        }
    }

    /// What a trainer that takes the newest name finds.
    pub(super) fn found(&self) -> RestoreOutcome {
        let [older, newer] = &self.library.names;
        let is_there = |name: &String| self.directory().join(name).exists();
        if !is_there(newer) && !is_there(older) {
            return RestoreOutcome::Nothing;
        }
        let name = if is_there(newer) { newer } else { older };
        let found = read_all(&self.directory(), name);
        let differs = |which: usize| {
            let mut files = self.library.of(which).iter();
            files.find(|(name, bytes)| found.get(*name) != Some(bytes)).map(|(name, _)| name.clone())
        };
        match (differs(1), differs(0)) {
            (None, _) => RestoreOutcome::Newer,
            (_, None) => RestoreOutcome::Older,
            (Some(file), _) => RestoreOutcome::Damaged(file),
        }
    }
}

/// One damage of one file at one moment.
pub(super) struct Case<'a> {
    pub(super) library: &'a Library,
    pub(super) file: String,
    pub(super) damage: Damage,
    pub(super) moment: Moment,
}

impl fmt::Display for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?} {:?}", self.library.name, self.file, self.damage, self.moment)
    }
}

impl Case<'_> {
    /// The problem with what the trainer finds; none if there is none.
    pub(super) fn wrong(&self) -> Option<String> {
        let place = TestDirectory::new(self.library);
        let library = self.library;
        place.save(library.older());
        if let Err(refused) = place.go_back(false) {
            return Some(format!("refused before anything was damaged: {refused}"));
        }
        let mut wanted = vec![RestoreOutcome::Older];
        match self.moment {
            Moment::WhileItIsSaved => {
                let order = library.in_order(library.newer());
                let until = order.iter().position(|name| **name == self.file).unwrap();
                order[..=until].iter().for_each(|name| place.write(library.newer(), name));
                place.damage(&self.file, self.damage);
                // Orbax writes into a directory with another name until all files are there.
                if library.kind == Kind::Orbax {
                    let name = place.directory().join(&library.names[1]);
                    fs::rename(&name, place.directory().join("20.orbax-checkpoint-tmp-1")).unwrap();
                }
            }
            Moment::BeforeTheSeal => {
                place.save(library.newer());
                place.damage(&self.file, self.damage);
            }
            Moment::WithAPeer => return self.wrong_with_a_peer(),
            moment => {
                place.save(library.newer());
                if let Err(refused) = place.go_back(true) {
                    return Some(format!("refused before anything was damaged: {refused}"));
                }
                if place.found() != RestoreOutcome::Newer {
                    return Some(format!("not the newest before anything was damaged: {:?}", place.found()));
                }
                place.damage_at(&self.file, self.damage, moment);
                if moment == Moment::InBoth {
                    let other = self.file.replacen(&library.names[1], &library.names[0], 1);
                    let other = if library.of(0).contains_key(&other) {
                        other
                    } else {
                        library.files(0).into_iter().next_back().unwrap()
                    };
                    place.damage(&other, self.damage);
                }
            }
        }
        let back = place.go_back(self.moment != Moment::Unattended);
        // A file that is missing has no bytes that could be wrong: there is no checkpoint of that name.
        let is_gone = library.of(1).len() == 1 && matches!(self.damage, Damage::Missing | Damage::Renamed);
        if self.moment == Moment::InBoth {
            return match back {
                Err(_) => None,
                Ok(_) if is_gone && place.found() == RestoreOutcome::Nothing => None,
                Ok(printed) => Some(format!("not refused: {:?}, {printed:?}", place.found())),
            };
        }
        let printed = match back {
            Ok(printed) => printed,
            Err(refused) => return Some(format!("refused: {refused}")),
        };
        if is_gone && self.moment == Moment::BeforeTheSeal {
            wanted.push(RestoreOutcome::Nothing);
        }
        let found = place.found();
        (!wanted.contains(&found)).then(|| format!("{found:?}, {printed:?}"))
    }

    /// Two hosts: what is damaged on one is intact on the other.
    fn wrong_with_a_peer(&self) -> Option<String> {
        let library = self.library;
        let mut hosts = support::hosts(2, |_, settings| settings.interval = Duration::from_millis(20));
        let service = Arc::new(hosts[0].service.take().unwrap());
        let place = TestDirectory { library, root: TempDir::new().unwrap(), watching: Mutex::default() };
        fs::create_dir(place.directory()).unwrap();
        *place.watching.lock().unwrap() = Some(place.watch(Arc::clone(&service)));
        place.save(library.newer());
        place.go_back(false).unwrap();
        support::until("a copy", || {
            service.nudge();
            !hosts[1].replicas().is_empty()
        });
        service.refresh();
        place.damage(&self.file, self.damage);
        let back = place.go_back(true);
        let found = place.found();
        (back.is_err() || found != RestoreOutcome::Newer).then(|| format!("{found:?}, {back:?}"))
    }
}
