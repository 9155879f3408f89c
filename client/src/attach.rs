//! Attaching to a page: checks, claim, and the one attachment that a process keeps per page.
//!
//! A POSIX record lock on the file determines who may write: it belongs to the process (so every copy of this
//! library in it may write), a forked child does not inherit it, and the kernel drops it when the process dies. The
//! claim in the page backs it up.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use mainstay_heartbeat::layout::{
    DOORBELL, IDENTITY_BYTES, MAGIC, REFUSAL, REFUSAL_PID, REFUSAL_VERSION, VERSION_BYTES,
};
use mainstay_heartbeat::{Claim, LayoutError, MAJOR, MINOR, PAGE_BYTES, RefusalReason, Writer};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use crate::error::OpenError;
use crate::token::Token;
use crate::{clock, lifeline, mapping, process};

/// A page that this process writes. It is never unmapped: a handle to it stays valid.
pub(crate) struct Attached {
    pub(crate) writer: Writer<'static>,
    pub(crate) key: u64,
    pub(crate) token: Token,
    page: File,
    device: u64,
    inode: u64,
    next: *const Attached,
    /// The step, plus one, of the last due save that was answered.
    pub(crate) due_answered: AtomicU64,
}

// SAFETY: `next` is set before the value is shared and points to a value that is never freed; all else is Sync.
unsafe impl Sync for Attached {}

/// All attachments of this process, newest first. A list without a lock: a child forked while a thread of its parent
/// was opening a page must be able to open one too.
static ATTACHED: AtomicPtr<Attached> = AtomicPtr::new(ptr::null_mut());

impl Attached {
    pub(crate) fn open(path: &Path, language: &str) -> Result<&'static Self, OpenError> {
        let failed = |source| OpenError::Io { path: path.to_owned(), source };
        // Checked before the file is opened: closing any descriptor of a file drops the process's record lock on
        // it.
        let status = std::fs::metadata(path).map_err(failed)?;
        if let Some(present) = present(status.dev(), status.ino()) {
            return Ok(present);
        }
        // O_NONBLOCK: should the path be a FIFO, opening it must not wait.
        let page = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(failed)?;
        let status = page.metadata().map_err(failed)?;
        check_usable(&page, path)?;
        lock(&page, path)?;
        let (writer, start) = mapping::writer(&page)
            .map_err(|source| OpenError::Map { path: path.to_owned(), source })?
            .map_err(|source| OpenError::Layout { path: path.to_owned(), source })?;
        let who = process::claiming(language);
        // The record lock alone is not enough: its owner loses it when any of its code closes a descriptor of the file.
        if let Claim::Claimed(claimant) = writer.page().claim()
            && process::lives_elsewhere(&claimant, &who)
        {
            return Err(OpenError::Busy { path: path.to_owned(), pid: i32::try_from(claimant.pid).ok() });
        }
        if !writer.claim(clock::now_ns(), &who) {
            return Err(OpenError::Busy { path: path.to_owned(), pid: Some(who.pid as i32) });
        }
        if writer.wants_lifeline()
            // SAFETY: mapped whole, for writing and for good by `mapping::writer`; this process has the claim, and
            // the previous claimant is dead or has no lifeline.
            && let Some(word_at) = unsafe { lifeline::hold(start) }
        {
            writer.lay_lifeline(word_at);
        }
        let attached = Self {
            writer,
            key: who.key(),
            token: Token::new(),
            page,
            device: status.dev(),
            inode: status.ino(),
            next: ptr::null(),
            due_answered: AtomicU64::new(0),
        };
        attached.ring();
        Ok(keep(attached))
    }

    /// Wakes the watchers of the page's directory: stores to a mapping cause no inotify event, a write does.
    pub(crate) fn ring(&self) {
        ring(&self.page, self.writer.next_ring());
    }
}

/// This process's attachment to a page, if it has one that is in use.
fn present(device: u64, inode: u64) -> Option<&'static Attached> {
    let mut next = ATTACHED.load(Ordering::Acquire).cast_const();
    // SAFETY: the list holds null or values leaked by `keep`, published whole by its release store.
    while let Some(attached) = unsafe { next.as_ref() } {
        if attached.device == device && attached.inode == inode && attached.token.is_ours() {
            return Some(attached);
        }
        next = attached.next;
    }
    None
}

fn keep(attached: Attached) -> &'static Attached {
    let attached: &'static mut Attached = Box::leak(Box::new(attached));
    let mut head = ATTACHED.load(Ordering::Acquire);
    loop {
        attached.next = head.cast_const();
        match ATTACHED.compare_exchange(head, attached, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return attached,
            Err(newer) => head = newer,
        }
    }
}

/// Checks everything that can make a page unusable before any of it is mapped, and reports a refusal to the
/// launcher in the page itself.
fn check_usable(page: &File, path: &Path) -> Result<(), OpenError> {
    let failed = |source| OpenError::Io { path: path.to_owned(), source };
    let wrong = |source| OpenError::Layout { path: path.to_owned(), source };
    let status = page.metadata().map_err(failed)?;
    let length = usize::try_from(status.len()).unwrap_or(usize::MAX);
    let too_short = wrong(LayoutError::TooShort { length, needed: PAGE_BYTES });
    if !status.is_file() || length < IDENTITY_BYTES {
        return Err(too_short);
    }
    let mut identity = [0; IDENTITY_BYTES];
    page.read_exact_at(&mut identity, 0).map_err(failed)?;
    let word =
        |index: usize| identity.as_chunks::<8>().0.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let (magic, major, minor) = (word(0), word(1), word(2));
    if magic != MAGIC {
        // Not a page: nothing may be written into it, not even a refusal.
        return Err(wrong(LayoutError::Magic { found: magic }));
    }
    if major != u64::from(MAJOR) {
        refuse(page, RefusalReason::Major);
        return Err(wrong(LayoutError::Major { major, minor }));
    }
    if length < PAGE_BYTES {
        refuse(page, RefusalReason::Size);
        return Err(too_short);
    }
    // Only tmpfs: elsewhere a compressing file system may hold a whole page in fewer blocks.
    let allocated = status.blocks() * 512;
    let on_tmpfs = fstatfs(page).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC);
    if on_tmpfs && allocated < PAGE_BYTES as u64 {
        refuse(page, RefusalReason::Sparse);
        return Err(OpenError::Sparse { path: path.to_owned(), allocated });
    }
    Ok(())
}

/// Records in the identity zone, which is the same in every version, that this client does not use the page.
fn refuse(page: &File, reason: RefusalReason) {
    let mut version = [0; VERSION_BYTES];
    for (to, from) in version.iter_mut().zip(process::VERSION.bytes()) {
        *to = from;
    }
    let put = |offset: usize, bytes: &[u8]| {
        // A failed write of the refusal is ignored: training continues either way.
        let _ = page.write_all_at(bytes, offset as u64);
    };
    put(REFUSAL_PID, &u64::from(std::process::id()).to_le_bytes());
    put(REFUSAL_VERSION, &version);
    put(REFUSAL, &reason.word(MAJOR, MINOR).to_le_bytes());
    ring(page, 1);
}

fn ring(page: &File, value: u64) {
    // There may be no watcher, and a failed ring only means that the launcher notices the change at its next poll.
    let _ = page.write_at(&value.to_le_bytes(), DOORBELL as u64);
}

/// Takes the record lock that determines who writes the page.
fn lock(page: &File, path: &Path) -> Result<(), OpenError> {
    // SAFETY: plain data, for which all zeros is a valid value; on some targets it has private padding fields.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_len = IDENTITY_BYTES as libc::off_t;
    match fcntl(page, FcntlArg::F_SETLK(&range)) {
        Err(Errno::EAGAIN | Errno::EACCES) => {
            let asked = fcntl(page, FcntlArg::F_GETLK(&mut range));
            let named = asked.is_ok() && range.l_type != libc::F_UNLCK as libc::c_short && range.l_pid > 0;
            Err(OpenError::Busy { path: path.to_owned(), pid: named.then_some(range.l_pid) })
        }
        // On a file system without locks no process is kept out, as if there were no check.
        Ok(_) | Err(_) => Ok(()),
    }
}
