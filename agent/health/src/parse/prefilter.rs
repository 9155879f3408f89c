//! A prefilter that drops lines without a possible fact before they are parsed. A log storm consists mostly of irrelevant lines, which
//! cost only this check.

use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, AhoCorasickKind};

/// Every line that a parser accepts contains one of these words. Debug builds also parse the lines that are dropped, so a missing word
/// fails the parser's own test.
const WORDS: &[&str] = &[
    // NVIDIA's drivers.
    "nvrm: ",
    "nvidia-nvswitch",
    // AMD's driver.
    "amdgpu ",
    // The kernel and its processes.
    "linux version ",
    "oom-kill:",
    "out of memory",
    "task in ",
    "info: task ",
    "info: rcu",
    "lockup on cpu",
    "bug: ",
    "kernel bug at ",
    "oops",
    "internal error: ",
    "unable to handle kernel ",
    "general protection fault",
    "invalid opcode: ",
    "divide error: ",
    "double fault: ",
    "stack segment: ",
    "traps: panic: ",
    "corruption",
    "kernel panic",
    "]: segfault at ",
    "] trap ",
    " unstable ",
    // Disks and file systems.
    "nvme",
    "i/o error",
    "critical medium error",
    "critical target error",
    "controller lockup",
    "non-operational",
    "protection error",
    "allocation error",
    "timeout error",
    "disk failure on ",
    "not corrected!!",
    "set read-only",
    "offline",
    "rejecting i/o",
    "megaraid_sas ",
    "fault_state(",
    "jbd2: ",
    "device-mapper: ",
    "lneterror: ",
    "i/o failure",
    "ext4-fs ",
    "aborting journal",
    "remounting filesystem read-only",
    "xfs (",
    "btrfs ",
    "btrfs: ",
    "server ",
    "cifs",
    "lustre",
    "ceph: ",
    // PCIe, memory, heat.
    "pciehp: slot(",
    "dpc: ",
    "aer: ",
    "pcie bus error: ",
    "inaccessible",
    "; giving up",
    "clock throttled",
    "clock is throttled",
    "temperature reached",
    "edac ",
    "memory failure: ",
    "serror interrupt",
    "mce: ",
    "nmi: ",
    "ras: ",
    "[hardware error]: ",
    // Network cards.
    "netdev watchdog: ",
    "health compromised",
    "unrecoverable",
    "leak of a command resource",
    "fatal ",
    "firmware internal error",
    "bad device",
    "not responding",
    "device is gone",
    "recovery ",
    "init_one failed",
    "load_one failed",
    "probe_one failed",
    "pci_err_detected",
    "port module event[error]",
    "high temperature",
    "insufficient power",
    "power budget exceeded",
    "severity(",
    "firmware health status",
    "reset failed",
    "abandoning msg",
    "rebuild failed",
    "unable to recover",
    "unit hang",
    "transmit timed out",
    "internal error detected",
    "link lost",
    "adapter removed",
    "device reset completed",
    "critical error detected",
    "watchdog timeout",
    "reset attempt failed",
    "wait for completion (polling) timeout",
    "commands timed out",
    "tx timeout detected",
    "tx_timeout",
    "transmit queue",
    "transmit timeout",
    "initializing state, aborting",
    "heartbeat stopped",
];

/// Whether the line can contain a fact, in any wrapping.
pub(super) fn may_match_a_pattern(line: &str) -> bool {
    static ANY: LazyLock<Option<AhoCorasick>> = LazyLock::new(|| {
        let builder = &mut AhoCorasick::builder();
        builder.ascii_case_insensitive(true).kind(Some(AhoCorasickKind::DFA)).build(WORDS).ok()
    });
    // Building the automaton cannot fail at this size. Without it, every line is parsed.
    ANY.as_ref().is_none_or(|any| any.is_match(line))
}

/// Whether words of the line may be interrupted, by a terminal's colors or JSON escapes.
pub(super) fn is_wrapped(line: &str) -> bool {
    line.trim_start_matches(['\u{1e}', ' ']).starts_with(['{', 'd', '"'])
        || line.bytes().any(|byte| byte < 0x20 && byte != b'\t' && byte != b'\r')
}
