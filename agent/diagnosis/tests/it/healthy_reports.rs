//! Reports of healthy machines and settings (`tests/healthy/reports`) report no failure: alone they have no cause, and before or after a
//! failure they change neither its domain nor its advice.

#![allow(clippy::disallowed_methods, reason = "the test reads files; the core does not")]
#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::path::PathBuf;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::class::Class;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::{Attribution, Evidence, attribute};

/// The minimum number of reports, so that an empty folder does not pass.
const REPORTS: usize = 24;

/// Failures of all domains.
const FAILURES: [(&str, &str); 14] = [
    (
        "a name",
        "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\n",
    ),
    (
        "a key",
        "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 9, in load\n    x = table[k]\nKeyError: 'k'\n",
    ),
    (
        "memory of the device",
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.10 GiB\n",
    ),
    ("an argument", "train.py: error: unrecognized arguments: --lrr 3\n"),
    ("a record", "PIL.UnidentifiedImageError: cannot identify image file '/data/7.jpg'\n"),
    (
        "a device off the bus",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n",
    ),
    ("device memory errors", "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"),
    ("a host", "srun: error: Node failure on node17\n"),
    ("a stale handle", "OSError: [Errno 116] Stale file handle: '/nfs/a'\n"),
    ("a full disk", "OSError: [Errno 28] No space left on device: '/scratch/ckpt'\n"),
    (
        "memory of the host",
        "Memory cgroup out of memory: Killed process 10 (python) total-vm:185938432kB, anon-rss:99kB\n",
    ),
    (
        "preemption",
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n",
    ),
    ("a library", "ImportError: /opt/venv/lib/x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa\n"),
    (
        "a watchdog",
        "[rank0]:[E0622 03:40:10.118 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=71042, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800020 milliseconds before timing out.\n",
    ),
];

fn reports() -> Vec<(String, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/healthy/reports");
    let entries = std::fs::read_dir(&folder).expect("tests/healthy/reports is part of the repository");
    let paths = entries.map(|entry| entry.expect("an entry of the folder").path());
    let read = |path: PathBuf| {
        let name = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        (name, std::fs::read_to_string(&path).expect("a readable file"))
    };
    paths.map(read).collect()
}

fn judged(log: &str) -> Attribution {
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
    attribute(catalog, &Evidence { findings, ..Evidence::default() })
}

/// The evidence, each with its line.
fn evidence(judged: &Attribution) -> Vec<String> {
    let votes = judged.evidence.iter().chain(&judged.against).chain(&judged.consequences);
    votes
        .map(|vote| format!("{}: {}", vote.id, vote.spots.first().map_or("", |(_, spot)| spot.text.as_str())))
        .collect()
}

#[test]
fn a_report_of_a_healthy_machine_has_no_evidence_of_a_failure() {
    let reports = reports();
    assert!(reports.len() >= REPORTS, "{} reports", reports.len());
    let mut wrong = Vec::new();
    for (name, report) in &reports {
        let judged = judged(report);
        let of_lines = judged.evidence.iter().chain(&judged.against).chain(&judged.consequences);
        if judged.class != Class::Unknown || of_lines.into_iter().next().is_some() {
            wrong.push(format!("{name}: {}: {:#?}", judged.class.name(), evidence(&judged)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_report_of_a_healthy_machine_changes_no_verdict() {
    let mut wrong = Vec::new();
    for (what, failure) in FAILURES {
        let alone = judged(failure);
        for (name, report) in reports() {
            for (place, log) in
                [("before", report.clone() + failure), ("after", failure.to_owned() + &report)]
            {
                let both = judged(&log);
                if both.domain != alone.domain {
                    wrong.push(format!(
                        "{name} {place} {what}: {} {:.2}, not {} {:.2}: {:?}",
                        both.domain.name(),
                        both.confidence,
                        alone.domain.name(),
                        alone.confidence,
                        evidence(&both)
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} verdicts changed:\n{}", wrong.len(), wrong.join("\n"));
}
