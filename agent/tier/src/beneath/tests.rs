//! Nothing outside a directory is reached, whatever another process changes in it.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags};
use testing::TempDir;

use super::Beneath;

/// A directory `home` with `sub/file`, and next to it a directory `secret` with a file of the same name.
fn place() -> (TempDir, Beneath) {
    let at = TempDir::new().unwrap();
    for (directory, text) in [("home/sub", "own"), ("secret", "secret")] {
        fs::create_dir_all(at.path().join(directory)).unwrap();
        fs::write(at.path().join(directory).join("file"), text).unwrap();
    }
    let home = Beneath::open(&at.path().join("home")).unwrap();
    (at, home)
}

#[test]
fn no_link_is_followed_by_any_call() {
    let (at, home) = place();
    let secret = at.path().join("secret");
    symlink(&secret, at.path().join("home/way")).unwrap();
    symlink(secret.join("file"), at.path().join("home/sub/one")).unwrap();
    for below in ["way/file", "sub/one"].map(Path::new) {
        assert!(home.read(below).is_err(), "{below:?}");
        assert!(home.write_over(below).is_err(), "{below:?}");
        assert!(home.create(below, 0o600).is_err(), "{below:?}");
    }
    let (way, new) = (Path::new("way/new"), Path::new("sub/new"));
    assert!(home.create(way, 0o600).is_err());
    assert!(home.make_directories(way).is_err());
    assert!(home.make_directories(Path::new("way")).is_err());
    assert!(home.list(Path::new("way")).is_err());
    assert!(home.rename(Path::new("sub/file"), Path::new("way/file")).is_err());
    assert!(home.exchange(Path::new("sub/file"), Path::new("way/file")).is_err());
    assert!(home.rename(Path::new("way/file"), new).is_err());
    assert!(home.remove_file(Path::new("way/file")).is_err());
    assert!(home.remove_tree(Path::new("way/file")).is_err());
    assert!(home.write_whole(Path::new("way/file"), b"x").is_err());
    assert!(home.stat(Path::new("way/file")).is_err());
    // A link itself can be removed or replaced; its target does not change.
    home.write_whole(Path::new("sub/one"), b"mine").unwrap();
    home.remove_tree(Path::new("way")).unwrap();
    assert_eq!(fs::read_to_string(secret.join("file")).unwrap(), "secret");
    assert_eq!(fs::read_dir(&secret).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(at.path().join("home/sub/one")).unwrap(), "mine");
}

#[test]
fn no_path_leaves_the_directory() {
    let (_at, home) = place();
    let giant = "n".repeat(300);
    let deep = "d/".repeat(3000);
    for below in
        ["../secret/file", "sub/../../secret/file", "/etc/passwd", "./sub/file", "..", giant.as_str(), &deep]
    {
        assert!(home.read(Path::new(below)).is_err(), "{below}");
        assert!(home.create(Path::new(below), 0o600).is_err(), "{below}");
        assert!(home.remove_tree(Path::new(below)).is_err() || !home.is_there(Path::new(below)), "{below}");
    }
    assert!(home.remove_tree(Path::new("")).is_err());
}

#[test]
fn pipes_and_devices_are_refused_without_blocking() {
    let (at, home) = place();
    let pipe = at.path().join("home/pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(home.read(Path::new("pipe")).is_err());
    assert!(home.write_over(Path::new("pipe")).is_err());
    let zero = Beneath::open(Path::new("/dev")).unwrap();
    assert!(zero.read(Path::new("zero")).is_err());
}

#[test]
fn the_directory_stays_the_one_that_was_opened() {
    let (at, home) = place();
    fs::rename(at.path().join("home"), at.path().join("elsewhere")).unwrap();
    symlink(at.path().join("secret"), at.path().join("home")).unwrap();
    home.write_whole(Path::new("sub/new"), b"words").unwrap();
    assert_eq!(fs::read_to_string(at.path().join("elsewhere/sub/new")).unwrap(), "words");
    assert!(Beneath::open_no_link(&at.path().join("home")).is_err());
}

#[test]
fn a_name_that_is_exchanged_constantly_never_leads_out() {
    let (at, home) = place();
    let (sub, way) = (at.path().join("home/sub"), at.path().join("home/way"));
    symlink(at.path().join("secret"), &way).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, &sub, CWD, &way, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let (mut read, mut refused) = (0, 0);
        while read < 500 || refused < 50 {
            match home.read(Path::new("sub/file")) {
                Ok(mut file) => {
                    let mut text = String::new();
                    file.read_to_string(&mut text).unwrap();
                    assert_eq!(text, "own");
                    read += 1;
                }
                Err(_) => refused += 1,
            }
            let _ = home.create(Path::new("sub/new"), 0o600);
            let _ = home.make_directories(Path::new("sub/a/b"));
            let _ = home.remove_tree(Path::new("sub/new"));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read_dir(at.path().join("secret")).unwrap().count(), 1);
}

#[test]
fn a_deep_tree_is_removed_and_a_deeper_one_refused() {
    let (at, home) = place();
    fs::create_dir_all(at.path().join("home").join("d/".repeat(60))).unwrap();
    home.remove_tree(Path::new("d")).unwrap();
    assert!(!home.is_there(Path::new("d")));
    fs::create_dir_all(at.path().join("home").join("d/".repeat(70))).unwrap();
    assert!(home.remove_tree(Path::new("d")).is_err());
}

#[test]
fn without_descriptors_every_call_is_an_error_and_changes_nothing() {
    let (at, home) = place();
    testing::without_descriptors(|| {
        let (file, new) = (Path::new("sub/file"), Path::new("sub/new"));
        assert!(home.read(file).is_err());
        assert!(home.create(new, 0o600).is_err());
        assert!(home.write_whole(file, b"x").is_err());
        assert!(home.list(Path::new("sub")).is_err());
        assert!(home.remove_tree(Path::new("sub")).is_err());
        assert!(home.rename(file, new).is_err());
        assert!(Beneath::open(at.path()).is_err());
    });
    assert_eq!(fs::read_to_string(at.path().join("home/sub/file")).unwrap(), "own");
    assert_eq!(fs::read_dir(at.path().join("home/sub")).unwrap().count(), 1);
}

#[test]
fn a_hard_link_to_another_users_file_is_replaced_and_not_written_through() {
    let (at, home) = place();
    let theirs = at.path().join("secret/file");
    fs::hard_link(&theirs, at.path().join("home/sub/linked")).unwrap();
    home.write_whole(Path::new("sub/linked"), b"own").unwrap();
    assert!(home.create(Path::new("sub/file"), 0o600).is_err(), "what is there is not opened");
    home.remove_file(Path::new("sub/linked")).unwrap();
    assert_eq!(fs::read_to_string(theirs).unwrap(), "secret");
}
