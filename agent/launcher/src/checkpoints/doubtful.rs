//! Marks doubtful checkpoints in their directory: those after the last step at which replicas agreed. The side that loads
//! them (`mainstay.checkpoint`) decides what to do; nothing is removed.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::id::JobId;
use serde_json::{Value, json};

/// The file's name in the directory of checkpoints.
pub const FILE: &str = "doubtful.json";

/// At most this many findings are kept: the newest.
const MAX_FINDINGS: usize = 64;

/// Marks what this launch of the job saved after the finding's last agreed step, if the finding makes checkpoints doubtful.
///
/// # Errors
/// The file cannot be written.
pub fn mark(directory: &Path, job: &JobId, launch: &str, finding: &Finding) -> io::Result<()> {
    if finding.over || !matches!(finding.what, FindingKind::SilentCorruption | FindingKind::ReplicasDiffer) {
        return Ok(());
    }
    fs::create_dir_all(directory)?;
    let path = directory.join(FILE);
    let mut findings: Vec<Value> = match fs::read(&path) {
        // A file that cannot be parsed is replaced.
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    findings.push(json!({
        "job": job.0,
        "run": launch,
        "attempt": finding.attempt.0,
        "after": finding.last_agreed_step,
        "sure": finding.what == FindingKind::SilentCorruption,
        "why": finding.headline,
    }));
    findings.drain(..findings.len().saturating_sub(MAX_FINDINGS));
    let beside = directory.join(mainstay_tier::aside::name(FILE));
    fs::write(&beside, serde_json::to_vec_pretty(&findings)?)?;
    fs::rename(&beside, &path)
}

#[cfg(test)]
mod tests {
    use mainstay_model::id::Attempt;
    use mainstay_model::verdict::FaultDomain;

    use super::*;

    fn finding(what: FindingKind, over: bool) -> Finding {
        Finding {
            finding: 1,
            attempt: Attempt(2),
            what,
            over,
            headline: "rank 2 differs".into(),
            domain: FaultDomain::Hardware,
            confidence: 0.9,
            ranks: Vec::new(),
            device: None,
            host: None,
            stage: None,
            since_step: 130,
            step: 130,
            cost_percent: None,
            evidence: Vec::new(),
            last_agreed_step: Some(120),
            doubtful_steps: Vec::new(),
        }
    }

    #[test]
    fn corruption_is_marked_next_to_the_checkpoints_and_slowness_is_not() {
        let dir = testing::tempdir().unwrap();
        let (home, job) = (dir.path().join("steps"), JobId("demo".into()));
        mark(&home, &job, "demo@7", &finding(FindingKind::SlowRank, false)).unwrap();
        mark(&home, &job, "demo@7", &finding(FindingKind::SilentCorruption, true)).unwrap();
        assert!(!home.exists());
        mark(&home, &job, "demo@7", &finding(FindingKind::SilentCorruption, false)).unwrap();
        mark(&home, &job, "demo@7", &finding(FindingKind::ReplicasDiffer, false)).unwrap();
        let findings: Value = serde_json::from_slice(&fs::read(home.join(FILE)).unwrap()).unwrap();
        assert_eq!(
            (&findings[0]["run"], &findings[0]["after"], &findings[0]["sure"], &findings[1]["sure"]),
            (&json!("demo@7"), &json!(120), &json!(true), &json!(false))
        );
        assert_eq!(fs::read_dir(&home).unwrap().count(), 1, "nothing is left beside it");
    }
}
