//! Two users of one host, each trying to redirect an agent of root to the other's files. These tests need root; without it they report
//! that and are skipped.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mainstay_checkpoint::files::Kind;
use mainstay_checkpoint::owner::owned;
use mainstay_checkpoint_format::MANIFEST_NAME;
use mainstay_tier::files::{Files, FilesSettings, WatchRequest};
use mainstay_tier::peer::{User, WatchedDirectory};
use nix::libc;
use rustix::fs::{CWD, RenameFlags};
use testing::TempDir;

use super::support::{RUN, bytes, end_watches, hosts, identity, seal, until};

const A: User = User { uid: 61_001, gid: 61_001 };
const B: User = User { uid: 61_002, gid: 61_002 };
const ROOT: User = User { uid: 0, gid: 0 };

/// A directory for each user that no other user may enter, in a directory that all users may enter.
struct Homes {
    all: TempDir,
    of_a: PathBuf,
    of_b: PathBuf,
    of_root: PathBuf,
}

fn homes() -> Option<Homes> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can act as two users");
        return None;
    }
    let all = TempDir::new().unwrap();
    fs::set_permissions(all.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let home = |name: &str, user: User| {
        let path = all.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        give(&path, user);
        path
    };
    let (of_a, of_b, of_root) = (home("a", A), home("b", B), home("root", ROOT));
    Some(Homes { all, of_a, of_b, of_root })
}

/// Changes the owner of a path and everything below it.
fn give(path: &Path, user: User) {
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        fs::read_dir(path).unwrap().for_each(|entry| give(&entry.unwrap().path(), user));
    }
}

/// All paths below, with owner and content.
fn content(path: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        found.push((
            path.clone(),
            metadata.uid(),
            if metadata.is_file() { fs::read(&path).unwrap() } else { Vec::new() },
        ));
        if metadata.is_dir() {
            found.extend(content(&path));
        }
    }
    found.sort();
    found
}

/// Exchanges two names constantly while `work` runs.
fn exchanging(one: &Path, other: &Path, work: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // The names may be removed and created again meanwhile.
                let _ = rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
            }
        });
        work();
        is_over.store(true, Ordering::Relaxed);
    });
}

fn place(user: User, directory: &Path) -> WatchedDirectory {
    WatchedDirectory { run: owned(user.uid, RUN), directory: directory.to_owned(), user, pool: None }
}

#[test]
fn a_restore_writes_nothing_through_an_exchanged_name() {
    let Some(homes) = homes() else { return };
    let hosts = hosts(2, |_, _| {});
    let out = homes.of_a.join("out");
    fs::create_dir(&out).unwrap();
    seal(&out, &identity(0, 10, 0, 1), &bytes(10, 0));
    give(&out, A);
    let service = hosts[0].service();
    hosts[0].wait_for_peers(1);
    service.watch(place(A, &out));
    until("a replica", || {
        service.nudge();
        service.refresh();
        service.copies().iter().any(|copy| !copy.own)
    });
    fs::write(homes.of_b.join("theirs"), "b").unwrap();
    fs::write(homes.of_root.join("theirs"), "root").unwrap();
    let before = (content(&homes.of_b), content(&homes.of_root));
    let (back, way) = (homes.of_a.join("back"), homes.of_a.join("way"));
    for target in [&homes.of_b, &homes.of_root] {
        // The directory itself, and one below it.
        for (one, other) in [(back.clone(), way.clone()), (back.join("step-000000000010"), way.clone())] {
            let _ = fs::remove_dir_all(&back);
            let _ = fs::remove_file(&way).or_else(|_| fs::remove_dir_all(&way));
            fs::create_dir_all(&one).unwrap();
            give(&back, A);
            symlink(target, &other).unwrap();
            exchanging(&one, &other, || {
                for _ in 0..15 {
                    let _ = hosts[1].service().restore(&place(A, &back), None, &|_| {});
                }
            });
            for (path, uid, _) in content(&homes.of_a) {
                assert!(uid == A.uid || path == way || path == one, "{} is of user {uid}", path.display());
            }
        }
    }
    assert!(
        (content(&homes.of_b), content(&homes.of_root)) == before,
        "a restore wrote into another's directory"
    );
    let _ = fs::remove_dir_all(&back);
    let restored = hosts[1].service().restore(&place(A, &back), None, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.map(|key| key.step), Some(10));
    assert!(content(&back).iter().all(|(_, uid, _)| *uid == A.uid));
}

#[test]
fn links_and_other_users_files_are_not_shards_of_a_user() {
    let Some(homes) = homes() else { return };
    let hosts = hosts(2, |_, _| {});
    let (of_a, of_b) = (homes.of_a.join("out"), homes.of_b.join("out"));
    for (directory, user, step) in [(&of_a, A, 10), (&of_b, B, 999)] {
        fs::create_dir(directory).unwrap();
        seal(directory, &identity(0, step, 0, 1), &bytes(step, 0));
        give(directory, user);
    }
    let theirs = of_b.join("step-000000000999");
    let new = |step: &str| {
        let path = of_a.join(step).join("rank-00000");
        fs::create_dir_all(&path).unwrap();
        path
    };
    symlink(theirs.join("rank-00000").join(MANIFEST_NAME), new("step-000000000011").join(MANIFEST_NAME))
        .unwrap();
    fs::hard_link(
        theirs.join("rank-00000").join(MANIFEST_NAME),
        new("step-000000000012").join(MANIFEST_NAME),
    )
    .unwrap();
    let pipe = new("step-000000000013").join(MANIFEST_NAME);
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", new("step-000000000014").join(MANIFEST_NAME)).unwrap();
    symlink(&theirs, of_a.join("step-000000000999")).unwrap();
    fs::create_dir(of_a.join("step-000000000015")).unwrap();
    symlink(theirs.join("rank-00000"), of_a.join("step-000000000015/rank-00000")).unwrap();
    fs::create_dir_all(of_a.join(format!("step-{}", "1".repeat(250))).join("rank-00000")).unwrap();
    // A valid manifest, and another user's bytes under the name in it.
    let copied = new("step-000000000016");
    fs::copy(theirs.join("rank-00000").join(MANIFEST_NAME), copied.join(MANIFEST_NAME)).unwrap();
    for entry in fs::read_dir(theirs.join("rank-00000")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != MANIFEST_NAME {
            symlink(entry.path(), copied.join(entry.file_name())).unwrap();
        }
    }
    for path in [&copied, &copied.join(MANIFEST_NAME), &pipe] {
        chown(path, Some(A.uid), Some(A.gid)).unwrap();
    }
    let service = hosts[0].service();
    hosts[0].wait_for_peers(1);
    service.watch(place(A, &of_a));
    until("a replica of what is whole", || {
        service.nudge();
        service.refresh();
        service.copies().iter().any(|copy| !copy.own && copy.shard.key.step == 10)
    });
    // The copied manifest names its step; its bytes are another user's, and reach no peer.
    let reached: Vec<u64> =
        service.copies().iter().filter(|copy| !copy.own).map(|copy| copy.shard.key.step).collect();
    assert_eq!(reached, [10]);
    let own: Vec<u64> =
        service.copies().iter().filter(|copy| copy.own).map(|copy| copy.shard.key.step).collect();
    assert!(own.iter().all(|step| [10, 999].contains(step)), "{own:?}");
    let fresh = homes.of_a.join("fresh");
    let restored = hosts[1].service().restore(&place(A, &fresh), None, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.map(|key| key.step), Some(10));
}

/// A safetensors file without a tensor: only a sound file is sealed.
fn tensors(words: &str) -> Vec<u8> {
    let header = format!("{{\"__metadata__\":{{\"words\":\"{words}\"}}}}");
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

#[test]
fn a_watch_seals_and_restores_nothing_of_another_user_through_an_exchanged_name() {
    let Some(homes) = homes() else { return };
    let mut hosts = hosts(1, |_, _| {});
    let service = Arc::new(hosts[0].service.take().unwrap());
    let notes = TempDir::new().unwrap();
    let plan = FilesSettings {
        home: notes.path().to_owned(),
        spool: hosts[0].store.path().join("files"),
        hosts: hosts[0].settings.peers.clone(),
        interval: hosts[0].settings.interval,
    };
    let files = Files::new(Arc::clone(&service), plan);
    let write = |directory: &Path, step: u64, words: &str, user: User| {
        let home = directory.join(format!("checkpoint-{step}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("model.safetensors"), tensors(words)).unwrap();
        fs::write(home.join("trainer_state.json"), b"{}").unwrap();
        give(directory, user);
    };
    let (out, way) = (homes.of_a.join("out"), homes.of_a.join("way"));
    write(&out, 10, "of a", A);
    // User a may read it by its mode, if the agent did not act as a: the home directory keeps a out.
    write(&homes.of_b, 20, "of b", B);
    write(&homes.of_root, 30, "of root", ROOT);
    let wanted = WatchRequest {
        directory: out.clone(),
        run: owned(A.uid, RUN),
        user: Some(A),
        rules: Kind::HuggingFace.rules(),
        expect: 0,
        quiet: 0,
        hosts: Vec::new(),
        shared: None,
    };
    let watch = files.watch(wanted).unwrap();
    let steps = || -> Vec<u64> { service.copies().iter().map(|copy| copy.shard.key.step).collect() };
    until("a's step", || {
        files.nudge(&out);
        steps().contains(&10)
    });
    let before = (content(&homes.of_b), content(&homes.of_root));
    for target in [&homes.of_b, &homes.of_root] {
        symlink(target, &way).unwrap();
        exchanging(&out, &way, || {
            for _ in 0..200 {
                files.nudge(&out);
                let _ = watch.restore(false, &|_| {});
                let seen = steps();
                assert!(!seen.contains(&20) && !seen.contains(&30), "{seen:?}");
            }
        });
        if out.is_symlink() {
            rustix::fs::renameat_with(CWD, &out, CWD, &way, RenameFlags::EXCHANGE).unwrap();
        }
        fs::remove_file(&way).unwrap();
    }
    assert!(
        (content(&homes.of_b), content(&homes.of_root)) == before,
        "nothing of another was renamed or written"
    );
    assert!(content(&homes.of_a).iter().all(|(_, uid, _)| *uid == A.uid));
    drop(watch);
    end_watches(&mut Some(files), Some(&service));
}

/// A mount that never answers. It is removed when this is dropped, which releases all processes that wait for it.
struct DeadMount {
    at: PathBuf,
    _device: fs::File,
}

impl DeadMount {
    fn new(at: &Path) -> Option<DeadMount> {
        use std::os::fd::AsRawFd;
        let device = fs::File::options().read(true).write(true).open("/dev/fuse").ok()?;
        fs::create_dir_all(at).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let path = std::ffi::CString::new(at.as_os_str().as_encoded_bytes()).unwrap();
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        let (source, kind, options) = (c"dead".as_ptr(), c"fuse".as_ptr(), options.as_ptr());
        // SAFETY: all four are zero-terminated strings that live for the call.
        let mounted = unsafe { libc::mount(source, path.as_ptr(), kind, flags, options.cast()) };
        (mounted == 0).then(|| DeadMount { at: at.to_owned(), _device: device })
    }
}

impl Drop for DeadMount {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.at.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a zero-terminated string that lives for the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn a_watch_on_a_mount_that_never_answers_does_not_block_other_users_steps() {
    let Some(homes) = homes() else { return };
    let Some(dead) = DeadMount::new(&homes.of_root.join("dead")) else {
        return eprintln!("skipped: no FUSE mount can be made here");
    };
    let hosts = hosts(1, |_, _| {});
    let out = homes.of_a.join("out");
    fs::create_dir(&out).unwrap();
    seal(&out, &identity(0, 10, 0, 1), &bytes(10, 0));
    give(&out, A);
    let service = hosts[0].service();
    service.watch(place(ROOT, &dead.at));
    service.watch(place(A, &out));
    let steps = || -> Vec<u64> { service.copies().iter().map(|copy| copy.shard.key.step).collect() };
    until("a's step", || steps().contains(&10));
    seal(&out, &identity(0, 11, 0, 1), &bytes(11, 0));
    give(&out, A);
    until("a's next step", || {
        service.refresh();
        steps().contains(&11)
    });
    let restored = hosts[0].service().restore(&place(A, &out), None, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.map(|key| key.step), Some(11));
}

#[test]
fn files_that_a_user_reaches_only_by_a_supplementary_group_are_reached_for_that_user() {
    let Some(homes) = homes() else { return };
    let hosts = hosts(1, |_, _| {});
    let user = User { uid: 61_003, gid: 61_003 };
    let (team, out) = (homes.all.path().join("team"), homes.all.path().join("team/out"));
    fs::create_dir_all(&out).unwrap();
    seal(&out, &identity(0, 10, 0, 1), &bytes(10, 0));
    give(&out, user);
    chown(&team, Some(0), Some(61_100)).unwrap();
    fs::set_permissions(&team, fs::Permissions::from_mode(0o770)).unwrap();
    let service = hosts[0].service();
    service.watch(place(user, &out));
    service.refresh();
    assert!(service.copies().is_empty(), "the group is not the user's");
    service.users().learn_groups(user, &[61_100]);
    service.refresh();
    until("what the group may enter", || service.copies().len() == 1);
}
