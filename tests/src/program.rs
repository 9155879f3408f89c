//! The program under test, the Python of the ranks, and what this machine lets a scenario do.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The `mainstay` program: `MAINSTAY_BIN`, else the one that cargo built next to this test.
pub fn mainstay() -> PathBuf {
    if let Some(given) = std::env::var_os("MAINSTAY_BIN") {
        return given.into();
    }
    let test = std::env::current_exe().expect("a test knows its own file");
    let debug = test.ancestors().nth(2).expect("tests lie in target/debug/deps");
    let program = debug.join("mainstay");
    assert!(
        program.exists(),
        "{} is missing: `cargo build` makes it, or set MAINSTAY_BIN",
        program.display()
    );
    program
}

/// The ranks' Python: `MAINSTAY_TEST_PYTHON`, else `python3`.
pub fn python() -> PathBuf {
    std::env::var_os("MAINSTAY_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from)
}

/// Whether the ranks' Python has the client. Where the tests were given a Python it must have it.
pub fn has_client() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    reported(*HAS.get_or_init(|| has("mainstay")), "mainstay")
}

/// The same for PyTorch.
pub fn has_torch() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    reported(*HAS.get_or_init(|| has("torch")), "torch") && has_client()
}

/// A Python with Lightning, Transformers, JAX and Orbax; none if there is none, and the test is skipped.
pub fn python_with_frameworks() -> Option<PathBuf> {
    let python = std::env::var_os("MAINSTAY_TEST_FRAMEWORKS").map(PathBuf::from);
    if python.is_none() {
        skipped("MAINSTAY_TEST_FRAMEWORKS names no Python with frameworks; `cargo xtask test` provides it");
    }
    python
}

/// Each test that needs a missing module is skipped, not only the first.
fn reported(found: bool, module: &str) -> bool {
    if !found {
        skipped(&format!("{} has no module {module}; `cargo xtask test` provides it", python().display()));
    }
    found
}

fn has(module: &str) -> bool {
    // Only searched for, not imported: importing torch takes a second.
    let look = format!("import importlib.util, sys; sys.exit(not importlib.util.find_spec({module:?}))");
    let found = Command::new(python())
        .args(["-c", &look])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let given = std::env::var_os("MAINSTAY_TEST_PYTHON").is_some();
    assert!(found || !given, "MAINSTAY_TEST_PYTHON={} has no module {module}", python().display());
    found
}

/// Reports that the calling scenario cannot run here, and why: it is counted as skipped.
pub fn skipped(reason: &str) {
    testing::skip(reason);
}

/// Whether the tests run as root, which some scenarios need to become another user or to mount.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The command prefix to run as another user; the reason if this is not possible.
pub fn as_unprivileged() -> Result<[&'static str; 6], &'static str> {
    if !is_root() {
        return Err("only root can become another user");
    }
    let has_setpriv = std::process::Command::new("setpriv")
        .arg("--version")
        .output()
        .is_ok_and(|reported| reported.status.success());
    if !has_setpriv {
        return Err("there is no setpriv to become another user with");
    }
    Ok(["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"])
}
