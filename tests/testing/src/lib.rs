//! Helpers that the tests of all crates share.
//!
//! - [`skip`], [`skip_part`]: report that a test cannot run on this machine. `cargo xtask test` counts it as
//!   skipped, not as passed, and its summary lists the reasons.
//! - [`memory`]: where tests put files that belong on a tmpfs. The suite sets its own folder, to find what is left.
//! - [`free_port`]: a port that no other test gets and no outgoing connection uses.
//! - [`silent`], [`served`], [`lossy_disk`]: file systems that do not answer, one whose server can stop answering, and
//!   one that loses written data, for root.
//! - [`without_descriptors`]: work in a thread that cannot open anything.
//! - [`snapshot!`]: the text of a surface, in a file that `cargo xtask test --accept` writes.
//! - [`TempDir`]: a directory that is removed also while a thread still writes in it.
//! - [`executable`]: an executable file that can be executed at once.
//!
//! It has no conditions (each test decides what it needs), and no code of Mainstay.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod descriptors;
pub mod lossy_disk;
mod ports;
pub mod served;
pub mod silent;
mod skip;
pub mod snapshot;
mod temporary;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use descriptors::without_descriptors;
pub use ports::free_port;
pub use skip::{SKIPPED, SKIPPED_IN_PART, skip, skip_part};
pub use temporary::{TempDir, tempdir};

/// Names the folder of [`memory`].
pub const MEMORY: &str = "MAINSTAY_TEST_SHM";

/// A folder on a tmpfs: `MAINSTAY_TEST_SHM`, else `/dev/shm`. Paths of sockets in it stay short.
pub fn memory() -> PathBuf {
    std::env::var_os(MEMORY).map_or_else(|| "/dev/shm".into(), PathBuf::from)
}

/// Makes an executable file with this content.
///
/// Another process writes it. The kernel refuses to execute a file that is open for writing (ETXTBSY), and a child
/// that another thread forks in that moment would hold a descriptor of ours open until it executes its program. The
/// file appears whole under its name, because an existing one may be in execution.
pub fn executable(path: &Path, content: impl AsRef<[u8]>) {
    let mut writer = Command::new("sh")
        .args(["-c", r#"cat > "$0.$$" && chmod 755 "$0.$$" && mv "$0.$$" "$0""#])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("sh can be started");
    let mut content_of = writer.stdin.take().expect("a pipe was asked for");
    content_of.write_all(content.as_ref()).expect("the writer reads all of it");
    drop(content_of);
    assert!(writer.wait().expect("our own child").success(), "{} cannot be written", path.display());
}
