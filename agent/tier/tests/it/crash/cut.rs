//! The disk after a power cut: every operation is recorded, and what no sync has covered may have reached the disk or not.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use mainstay_tier::disk::{Sink, Volume};
use mainstay_tier::seal::ReadAt;

/// An operation, with the numbers of files and directories: a rename moves an entry, and no bytes.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A name appears in a directory.
    Enter(u64, String, Node),
    /// Bytes of a file, from an offset.
    Write(u64, usize, Vec<u8>),
    Sync(u64),
    /// From a directory and name to another, atomically.
    Rename((u64, String), (u64, String), Node),
    SyncDirectory(u64),
    Leave(u64, String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Node {
    Directory(u64),
    File(u64),
}

/// A file system in memory.
#[derive(Clone, Debug, Default)]
pub struct Tree {
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
            Operation::Write(number, offset, bytes) => {
                let file = Arc::make_mut(self.files.entry(*number).or_default());
                file.resize(file.len().max(offset + bytes.len()), 0);
                file[*offset..offset + bytes.len()].copy_from_slice(bytes);
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

/// Records operations.
#[derive(Default)]
pub struct Recorder {
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
    /// Starts with this content of the disk.
    pub fn on(mut tree: Tree) -> Recorder {
        tree.directories.entry(ROOT).or_default();
        let next = tree.files.keys().chain(tree.directories.keys()).max().copied().unwrap_or(ROOT);
        Recorder { state: Mutex::new(State { tree, operations: Vec::new(), next }) }
    }

    /// Number of operations so far.
    pub fn done(&self) -> usize {
        self.state.lock().unwrap().operations.len()
    }

    /// Writes into an existing file.
    pub fn write_at(&self, path: &Path, offset: usize, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap();
        let Some(Node::File(number)) = state.tree.find(path) else { panic!("no file {}", path.display()) };
        state.act(Operation::Write(number, offset, bytes.to_vec()));
    }

    /// Syncs a file to disk.
    pub fn sync(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let Some(Node::File(number)) = state.tree.find(path) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        state.act(Operation::Sync(number));
        Ok(())
    }

    /// The current content of the disk, and the operations.
    pub fn taken(self) -> (Tree, Vec<Operation>) {
        let state = self.state.into_inner().unwrap();
        (state.tree, state.operations)
    }
}

struct RecordedFile<'a>(&'a Recorder, u64);

impl Sink for RecordedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.state.lock().unwrap();
        let end = state.tree.files[&self.1].len();
        state.act(Operation::Write(self.1, end, bytes.to_vec()));
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

/// Pseudo-random numbers that are the same on every run.
pub struct Dice(pub u64);

impl Dice {
    /// A number below `below`.
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below.max(1)
    }
}

/// The disk after a cut behind `done` operations. For each operation that no sync has covered, it is random whether it reached the disk;
/// for bytes, which part of them. Bytes at a place that was never written may be anything.
pub fn after_a_cut(before: &Tree, operations: &[Operation], done: usize, dice: &mut Dice) -> Tree {
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
            Operation::Write(number, ..) => by_file.entry(*number).or_default().push(index),
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
            Operation::Write(number, offset, bytes) if !certain[index] => {
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
                tree.apply(&Operation::Write(*number, *offset, torn));
            }
            operation if reached => tree.apply(operation),
            _ => {}
        }
    }
    tree
}
