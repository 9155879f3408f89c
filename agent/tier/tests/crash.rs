//! Power cuts: every operation on the disk is recorded, and the disk is then made as a cut at any point may leave it. What was not
//! synced may be there, be torn, or be missing, in any combination; what was synced is there. Whatever is left, no step is offered that
//! is not exactly what was saved, and none that was acknowledged is lost.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::manifest;
use mainstay_checkpoint::Manifest;
use mainstay_tier::disk::{self, Doubts, Keep, Pace, Sink, Volume};
use mainstay_tier::seal::ReadAt;

/// Points of a cut, each with another choice of what reached the disk: more than a hundred thousand over all scenes in a release
/// build (`cargo test --release -p mainstay-tier --test crash`), a share of them where checksums are not optimised.
const CUTS_PER_SCENE: usize = if cfg!(debug_assertions) { 1_000 } else { 21_000 };

/// What happened, by the numbers of files and directories: a rename moves an entry, and no bytes.
#[derive(Clone, Debug)]
enum Operation {
    /// A name appears in a directory.
    Enter(u64, String, Node),
    Write(u64, Vec<u8>),
    Sync(u64),
    /// From a directory and name to another, in one move.
    Rename((u64, String), (u64, String), Node),
    SyncDirectory(u64),
    Leave(u64, String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Node {
    Directory(u64),
    File(u64),
}

/// A file system in memory.
#[derive(Clone, Debug, Default)]
struct Tree {
    directories: BTreeMap<u64, BTreeMap<String, Node>>,
    files: BTreeMap<u64, Arc<Vec<u8>>>,
}

const ROOT: u64 = 0;

impl Tree {
    fn find(&self, path: &Path) -> Option<Node> {
        let mut here = Node::Directory(ROOT);
        for part in path.strip_prefix("/disk").ok()?.iter() {
            let Node::Directory(number) = here else { return None };
            here = *self.directories.get(&number)?.get(part.to_str()?)?;
        }
        Some(here)
    }

    fn directory(&self, path: &Path) -> io::Result<u64> {
        match self.find(path) {
            Some(Node::Directory(number)) => Ok(number),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn entry(&self, path: &Path) -> io::Result<(u64, String)> {
        let parent = self.directory(path.parent().unwrap())?;
        Ok((parent, path.file_name().unwrap().to_str().unwrap().to_owned()))
    }

    fn put(&mut self, directory: u64, name: &str, node: Node) {
        self.directories.entry(directory).or_default().insert(name.to_owned(), node);
        match node {
            Node::Directory(number) => drop(self.directories.entry(number).or_default()),
            Node::File(number) => drop(self.files.entry(number).or_default()),
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Enter(directory, name, node) => self.put(*directory, name, *node),
            Operation::Write(number, bytes) => {
                Arc::make_mut(self.files.entry(*number).or_default()).extend(bytes);
            }
            Operation::Rename((from, old), (to, new), node) => {
                self.directories.entry(*from).or_default().remove(old);
                self.put(*to, new, *node);
            }
            Operation::Leave(directory, name) => {
                self.directories.entry(*directory).or_default().remove(name);
            }
            Operation::Sync(_) | Operation::SyncDirectory(_) => {}
        }
    }
}

/// Records what is done.
#[derive(Default)]
struct Recorder {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tree: Tree,
    operations: Vec<Operation>,
    next: u64,
}

impl State {
    fn act(&mut self, operation: Operation) {
        self.tree.apply(&operation);
        self.operations.push(operation);
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Recorder {
    fn on(mut tree: Tree) -> Recorder {
        tree.directories.entry(ROOT).or_default();
        let next = tree.files.keys().chain(tree.directories.keys()).max().copied().unwrap_or(ROOT);
        Recorder { state: Mutex::new(State { tree, operations: Vec::new(), next }) }
    }

    fn taken(self) -> (Tree, Vec<Operation>) {
        let state = self.state.into_inner().unwrap();
        (state.tree, state.operations)
    }
}

struct RecordedFile<'a>(&'a Recorder, u64);

impl Sink for RecordedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.state.lock().unwrap().act(Operation::Write(self.1, bytes.to_vec()));
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.state.lock().unwrap().act(Operation::Sync(self.1));
        Ok(())
    }
}

struct Bytes(Arc<Vec<u8>>);

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        ReadAt::read_exact_at(&*self.0, buffer, offset)
    }
}

impl Volume for Recorder {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.tree.find(path).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (directory, name) = state.tree.entry(path)?;
        let number = state.number();
        state.act(Operation::Enter(directory, name, Node::Directory(number)));
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink + '_>> {
        let mut state = self.state.lock().unwrap();
        if state.tree.find(path).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (directory, name) = state.tree.entry(path)?;
        let number = state.number();
        state.act(Operation::Enter(directory, name, Node::File(number)));
        Ok(Box::new(RecordedFile(self, number)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let node = state.tree.find(from).ok_or(io::ErrorKind::NotFound)?;
        if let (Node::Directory(_), Some(_)) = (node, state.tree.find(to)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let (from, to) = (state.tree.entry(from)?, state.tree.entry(to)?);
        state.act(Operation::Rename(from, to, node));
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let directory = state.tree.directory(path)?;
        state.act(Operation::SyncDirectory(directory));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let Some(Node::File(_)) = state.tree.find(path) else { return Err(io::ErrorKind::NotFound.into()) };
        let (directory, name) = state.tree.entry(path)?;
        state.act(Operation::Leave(directory, name));
        Ok(())
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let number = state.tree.directory(path)?;
        if state.tree.directories.get(&number).is_some_and(|entries| !entries.is_empty()) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let (directory, name) = state.tree.entry(path)?;
        state.act(Operation::Leave(directory, name));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let state = self.state.lock().unwrap();
        let number = state.tree.directory(path)?;
        Ok(state.tree.directories[&number].keys().cloned().collect())
    }

    fn is_directory(&self, path: &Path) -> bool {
        matches!(self.state.lock().unwrap().tree.find(path), Some(Node::Directory(_)))
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn ReadAt + '_>, u64)> {
        let state = self.state.lock().unwrap();
        let Some(Node::File(number)) = state.tree.find(path) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let bytes = state.tree.files[&number].clone();
        let length = bytes.len() as u64;
        Ok((Box::new(Bytes(bytes)), length))
    }
}

/// Numbers that are the same on every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below.max(1)
    }
}

/// The disk after a cut behind `done` operations. Of each that no sync has covered it is thrown whether it reached the disk; of
/// bytes, which part of them; what was written over nothing may be anything.
fn after_a_cut(before: &Tree, operations: &[Operation], done: usize, dice: &mut Dice) -> Tree {
    let happened = &operations[..done];
    let mut certain = vec![false; done];
    let mut by_directory: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let mut by_file: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (index, operation) in happened.iter().enumerate() {
        match operation {
            Operation::Enter(directory, ..) | Operation::Leave(directory, _) => {
                by_directory.entry(*directory).or_default().push(index);
            }
            Operation::Rename((from, _), (to, _), _) => {
                by_directory.entry(*from).or_default().push(index);
                by_directory.entry(*to).or_default().push(index);
            }
            Operation::Write(number, _) => by_file.entry(*number).or_default().push(index),
            Operation::Sync(number) => {
                by_file
                    .remove(number)
                    .unwrap_or_default()
                    .into_iter()
                    .for_each(|index| certain[index] = true);
            }
            Operation::SyncDirectory(number) => {
                by_directory
                    .remove(number)
                    .unwrap_or_default()
                    .into_iter()
                    .for_each(|index| certain[index] = true);
            }
        }
    }
    let mut tree = before.clone();
    let bias = dice.roll(4);
    for (index, operation) in happened.iter().enumerate() {
        let reached = certain[index] || dice.roll(4) >= bias;
        match operation {
            Operation::Write(number, bytes) if !certain[index] => {
                let mut torn = bytes.clone();
                match dice.roll(4) {
                    0 => torn.clear(),
                    1 => torn.truncate(dice.roll(bytes.len() as u64) as usize),
                    2 => {
                        let from = dice.roll(bytes.len() as u64) as usize;
                        torn[from..].fill(0);
                    }
                    _ => {}
                }
                tree.apply(&Operation::Write(*number, torn));
            }
            operation if reached => tree.apply(operation),
            _ => {}
        }
    }
    tree
}

struct Scene {
    name: &'static str,
    world_size: u32,
    /// Attempt and step of each save, in order; the state is made of them.
    before: &'static [(u64, u64)],
    save: (u64, u64),
    keep: usize,
}

const SCENES: &[Scene] = &[
    Scene { name: "first save", world_size: 2, before: &[], save: (0, 10), keep: 2 },
    Scene { name: "next save", world_size: 2, before: &[(0, 10)], save: (0, 20), keep: 2 },
    Scene { name: "a save that prunes", world_size: 2, before: &[(0, 10), (0, 20)], save: (0, 30), keep: 1 },
    Scene {
        name: "the same step by a later attempt",
        world_size: 2,
        before: &[(0, 10), (0, 20)],
        save: (1, 20),
        keep: 2,
    },
    Scene { name: "the only step again", world_size: 1, before: &[(0, 10)], save: (1, 10), keep: 2 },
];

fn state_of(attempt: u64, step: u64, rank: u32) -> Vec<u8> {
    (0..700_u64).map(|index| (index ^ (attempt * 7 + step * 31 + u64::from(rank) * 101)) as u8).collect()
}

/// A shard of several small chunks, so that a write is several operations.
fn shard(attempt: u64, step: u64, rank: u32, world_size: u32) -> (Manifest, Vec<u8>) {
    let (mut manifest, bytes) =
        manifest("job", attempt, step, rank, world_size, &state_of(attempt, step, rank));
    let chunk = 2048;
    let (_, sums) = mainstay_tier::seal::sums(&bytes, bytes.len() as u64, chunk).unwrap();
    manifest.chunks = Some(mainstay_checkpoint::Chunks { bytes: chunk, sums });
    (manifest, bytes)
}

fn save(volume: &Recorder, home: &Path, scene: &Scene, (attempt, step): (u64, u64)) {
    for rank in 0..scene.world_size {
        let (manifest, bytes) = shard(attempt, step, rank, scene.world_size);
        disk::write(volume, home, &manifest, &bytes, &Pace::default(), &|| false).expect("written");
    }
    disk::prune(volume, home, Keep { steps: scene.keep, bytes: None }, &Doubts::default(), None);
}

fn contents(volume: &Recorder, shards: &[disk::Found]) -> Vec<Vec<u8>> {
    let read = |shard: &disk::Found| {
        let (file, length) = volume.open(&shard.path).unwrap();
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    shards.iter().map(read).collect()
}

#[test]
fn no_power_cut_leaves_a_torn_or_stale_step_or_loses_one() {
    let threads =
        SCENES.iter().enumerate().map(|(number, scene)| std::thread::spawn(move || cut_up(number, scene)));
    let threads: Vec<_> = threads.collect();
    let found: Vec<(usize, BTreeSet<Option<At>>)> =
        threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let cuts: usize = found.iter().map(|(cuts, _)| cuts).sum();
    assert!(cuts >= SCENES.len() * CUTS_PER_SCENE, "{cuts}");
    let kinds: Vec<_> = found.iter().map(|(_, kinds)| kinds).collect();
    assert!(kinds.iter().all(|kinds| kinds.len() > 1), "cuts that change nothing test nothing: {kinds:?}");
}

type At = (u64, u64);

/// All cuts of a scene: how many, and what was offered after them.
fn cut_up(number: usize, scene: &Scene) -> (usize, BTreeSet<Option<At>>) {
    let home = Path::new("/disk/steps");
    let mut kinds = BTreeSet::new();
    let mut cuts = 0;
    let mut saved: BTreeMap<At, Vec<Vec<u8>>> = BTreeMap::new();
    let volume = Recorder::on(Tree::default());
    scene.before.iter().for_each(|at| save(&volume, home, scene, *at));
    let (before, _) = volume.taken();
    let volume = Recorder::on(before.clone());
    save(&volume, home, scene, scene.save);
    let (_, operations) = volume.taken();
    // From where on the save had been acknowledged: the last shard's name was brought to the disk.
    let sealed =
        |operation: &Operation| matches!(operation, Operation::Rename(_, (_, to), _) if !to.contains(".tmp"));
    let last = operations.iter().rposition(sealed).expect("a shard was sealed");
    let acknowledged = last + 2;
    let mut dice = Dice(number as u64 + 1);
    for cut in 0..CUTS_PER_SCENE {
        let done = cut % (operations.len() + 1);
        let left = Recorder::on(after_a_cut(&before, &operations, done, &mut dice));
        let told = || format!("{}, cut {cut} behind {:?}", scene.name, operations[..done].last());
        let offered = disk::offered(&left, home);
        let at = offered.as_ref().map(|(step, shards)| {
            let attempt = shards[0].manifest.identity.attempt;
            let of = |rank| shard(attempt, *step, rank, scene.world_size).1;
            let expected =
                saved.entry((attempt, *step)).or_insert_with(|| (0..scene.world_size).map(of).collect());
            assert!(contents(&left, shards) == *expected, "torn, stale or mixed: {}", told());
            (attempt, *step)
        });
        let newest_before = scene.before.last();
        if done >= acknowledged {
            assert_eq!(at, Some(scene.save), "an acknowledged step is lost: {}", told());
        } else if scene.before.iter().any(|(_, step)| *step == scene.save.1) {
            // Half of it is of the later attempt: the step before it, if there was one, or the whole of either.
            assert!(
                at.is_none() || at == Some(scene.save) || scene.before.contains(&at.unwrap()),
                "{at:?}: {}",
                told()
            );
            if scene.before.len() > 1 || scene.world_size == 1 {
                assert!(at.is_some(), "everything is lost: {}", told());
            }
        } else {
            assert!(at.as_ref() == newest_before || at == Some(scene.save), "{at:?}: {}", told());
        }
        kinds.insert(at);
        cuts += 1;
        // What is left bears another save.
        if cut % 50 == 0 {
            disk::clear_aside(&left, home, &|_| false);
            save(&left, home, scene, (2, 99));
            assert_eq!(disk::offered(&left, home).map(|(step, _)| step), Some(99), "{}", told());
        }
    }
    (cuts, kinds)
}
