//! A small file system in memory, served by FUSE, whose server can stop answering and answer again.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, SessionACL,
    TimeOrNow, WriteFlags,
};
use nix::mount::{MntFlags, umount2};

/// A failing test may itself wait for the file system: after this time it answers again.
const AT_MOST: Duration = Duration::from_secs(150);

/// Nothing is cached, so that each access reaches the server.
const TTL: Duration = Duration::ZERO;

/// A mounted file system. When it is dropped, it answers and is unmounted.
#[derive(Debug)]
pub struct ServedMount {
    at: PathBuf,
    gate: Arc<Gate>,
    _session: BackgroundSession,
}

/// Requests that were received wait here, so that processes wait for the answers in an uninterruptible sleep.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum State {
    #[default]
    Open,
    /// The next write closes it.
    OpenUntilWrite,
    Closed,
}

impl ServedMount {
    /// Mounts an empty one over this directory; none if that is not possible here.
    #[must_use]
    pub fn over(at: &Path) -> Option<ServedMount> {
        let gate = Arc::new(Gate::default());
        let served = Served {
            gate: Arc::clone(&gate),
            nodes: Mutex::new(Nodes { next: 2, all: BTreeMap::from([(1, Node::directory(0o777))]) }),
        };
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("served".to_owned()), MountOption::DefaultPermissions];
        config.acl = SessionACL::All;
        let session = fuser::spawn_mount(served, at, &config).ok()?;
        Some(ServedMount { at: at.to_owned(), gate, _session: session })
    }

    /// From now on no request is answered.
    pub fn stop_answering(&self) {
        self.gate.set(State::Closed);
    }

    /// From the next write on no request is answered, so that its writer keeps the file open.
    pub fn stop_answering_at_a_write(&self) {
        self.gate.set(State::OpenUntilWrite);
    }

    /// Waits until no request is answered. Returns whether that happened.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.gate.wait_while(|state| *state != State::Closed)
    }

    /// All requests are answered, those that wait first.
    pub fn answer_again(&self) {
        self.gate.set(State::Open);
    }
}

impl Drop for ServedMount {
    fn drop(&mut self) {
        self.answer_again();
        // Also if a process of a failed test still has a file open there.
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    /// Returns whether the wait ended in time.
    fn wait_while(&self, condition: impl Fn(&mut State) -> bool) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), AT_MOST, condition);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn pass(&self) {
        self.wait_while(|state| *state == State::Closed);
    }

    fn pass_write(&self) {
        if *self.lock() == State::OpenUntilWrite {
            self.set(State::Closed);
        }
    }
}

struct Served {
    gate: Arc<Gate>,
    nodes: Mutex<Nodes>,
}

struct Nodes {
    next: u64,
    all: BTreeMap<u64, Node>,
}

struct Node {
    content: Content,
    mode: u16,
    modified: SystemTime,
}

enum Content {
    File(Vec<u8>),
    Directory(BTreeMap<OsString, u64>),
}

impl Node {
    fn new(content: Content, mode: u32) -> Node {
        Node { content, mode: u16::try_from(mode & 0o7777).unwrap_or(0), modified: SystemTime::now() }
    }

    fn directory(mode: u32) -> Node {
        Node::new(Content::Directory(BTreeMap::new()), mode)
    }

    fn bytes(&mut self) -> Result<&mut Vec<u8>, Errno> {
        match &mut self.content {
            Content::File(bytes) => Ok(bytes),
            Content::Directory(_) => Err(Errno::EISDIR),
        }
    }
}

impl Nodes {
    fn node(&mut self, number: INodeNo) -> Result<&mut Node, Errno> {
        self.all.get_mut(&number.0).ok_or(Errno::ENOENT)
    }

    fn names(&mut self, directory: INodeNo) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match &mut self.node(directory)?.content {
            Content::Directory(names) => Ok(names),
            Content::File(_) => Err(Errno::ENOTDIR),
        }
    }

    fn attr(&mut self, number: INodeNo) -> Result<FileAttr, Errno> {
        let node = self.node(number)?;
        let (kind, size) = match &node.content {
            Content::File(bytes) => (FileType::RegularFile, bytes.len() as u64),
            Content::Directory(_) => (FileType::Directory, 0),
        };
        let at = node.modified;
        Ok(FileAttr {
            ino: number,
            size,
            blocks: size.div_ceil(512),
            atime: at,
            mtime: at,
            ctime: at,
            crtime: at,
            kind,
            perm: node.mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn add(&mut self, parent: INodeNo, name: &OsStr, node: Node) -> Result<FileAttr, Errno> {
        let number = self.next;
        let names = self.names(parent)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), number);
        self.next += 1;
        self.all.insert(number, node);
        self.attr(INodeNo(number))
    }

    fn find(&mut self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let number = self.names(parent)?.get(name).copied().ok_or(Errno::ENOENT)?;
        self.attr(INodeNo(number))
    }
}

impl Served {
    /// The file system, when its server answers.
    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.gate.pass();
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.nodes().names(parent).and_then(|names| names.remove(name).ok_or(Errno::ENOENT)) {
            // The content stays for those who have it open.
            Ok(_) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.nodes().find(parent, name) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.nodes().attr(number) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut nodes = self.nodes();
        let changed = nodes.node(number).and_then(|node| {
            if let Some(mode) = mode.and_then(|mode| u16::try_from(mode & 0o7777).ok()) {
                node.mode = mode;
            }
            if let Some(size) = size {
                node.bytes()?.resize(usize::try_from(size).map_err(|_| Errno::EFBIG)?, 0);
                node.modified = SystemTime::now();
            }
            Ok(())
        });
        match changed.and_then(|()| nodes.attr(number)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        match self.nodes().add(parent, name, Node::directory(mode & !umask)) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.remove(parent, name, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.remove(parent, name, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        new: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut nodes = self.nodes();
        let number = nodes.names(parent).and_then(|names| names.remove(name).ok_or(Errno::ENOENT));
        match number.and_then(|number| Ok(nodes.names(to)?.insert(new.to_owned(), number))) {
            Ok(_) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.gate.pass();
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.nodes().add(parent, name, Node::new(Content::File(Vec::new()), mode & !umask)) {
            Ok(attr) => {
                reply.created(&TTL, &attr, Generation(0), FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut nodes = self.nodes();
        match nodes.node(number).and_then(Node::bytes) {
            Ok(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let end = start.saturating_add(size as usize).min(bytes.len());
                reply.data(&bytes[start..end]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.gate.pass_write();
        let mut nodes = self.nodes();
        let written = nodes.node(number).and_then(|node| {
            node.modified = SystemTime::now();
            let bytes = node.bytes()?;
            let start = usize::try_from(offset).map_err(|_| Errno::EFBIG)?;
            bytes.resize(bytes.len().max(start + data.len()), 0);
            bytes[start..start + data.len()].copy_from_slice(data);
            Ok(())
        });
        match written {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.gate.pass();
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.gate.pass();
        reply.ok();
    }

    fn readdir(&self, _: &Request, number: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let mut nodes = self.nodes();
        let names = match nodes.names(number) {
            Ok(names) => names.clone(),
            Err(error) => return reply.error(error),
        };
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, (name, number)) in names.into_iter().enumerate().skip(skipped) {
            let kind = nodes.attr(INodeNo(number)).map_or(FileType::RegularFile, |attr| attr.kind);
            if reply.add(INodeNo(number), at as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.gate.pass();
        reply.statfs(1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096);
    }
}
