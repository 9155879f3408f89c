//! The user's own policy in the launcher. It is read in advance, so that a restart only pays for the decision, and has a
//! time limit that the slowest host meets.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_policy::Policy;
use mainstay_recovery::policy::{Advice, Advisor, Case, Settings, Trouble};

/// The time limit for one decision. Its steps and memory are limited too, with the same result on every host.
const WITHIN: Duration = Duration::from_millis(50);

/// A longer file is not read.
const LONGEST: u64 = 1 << 20;

#[derive(Debug)]
struct Timed(Policy);

impl Advisor for Timed {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn advise(&self, settings: &Settings, case: Case<'_>) -> Result<Option<Advice>, String> {
        let began = Instant::now();
        let decided = self.0.decide(settings, case, &|| began.elapsed() > WITHIN);
        decided.map(|decided| decided.advice).map_err(|problem| problem.to_string())
    }
}

/// A file that is not a valid policy. Each failure reports the error again.
#[derive(Debug)]
struct Broken {
    name: String,
    words: String,
}

impl Advisor for Broken {
    fn name(&self) -> &str {
        &self.name
    }

    fn advise(&self, _: &Settings, _: Case<'_>) -> Result<Option<Advice>, String> {
        Err(self.words.clone())
    }
}

/// Reads a policy and returns its error, if any. The job starts all the same: the built-in policy decides.
pub fn read(file: &Path) -> (Arc<dyn Advisor>, Option<Trouble>) {
    match parse(file) {
        Ok(policy) => {
            for warning in policy.warnings() {
                tracing::warn!("{warning}");
            }
            (Arc::new(Timed(policy)), None)
        }
        Err(words) => {
            tracing::warn!(file = %file.display(), %words, "the policy cannot be used; the built-in one decides");
            let broken = Broken { name: name(file), words: words.clone() };
            (Arc::new(broken), Some(Trouble::Failed(words)))
        }
    }
}

/// Reads a policy.
///
/// # Errors
/// It cannot be read or is not a policy. The error names file, line and column.
pub fn parse(file: &Path) -> Result<Policy, String> {
    let unread = |error: std::io::Error| format!("{}: it cannot be read: {error}", file.display());
    let size = std::fs::metadata(file).map_err(unread)?.len();
    if size > LONGEST {
        return Err(format!("{}: it is {size} bytes long; that is not a policy", file.display()));
    }
    let text = std::fs::read_to_string(file).map_err(unread)?;
    Policy::parse(&name(file), &text).map_err(|problem| problem.to_string())
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}
