//! Detects a trainer whose checkpoints are never sealed, because it changes each of them before the next check.

use std::time::Duration;

/// Number of checks, without a sealed step between them, in which the complete step had changed again.
const CHECKS: u32 = 30;

/// The checks since a step was sealed or was found unchanged.
#[derive(Debug, Default)]
pub(super) struct Unsealed {
    changed: u32,
    name: String,
}

impl Unsealed {
    /// A check found this complete step changed since the check before.
    pub(super) fn changed(&mut self, name: &str) {
        self.changed = self.changed.saturating_add(1);
        name.clone_into(&mut self.name);
    }

    /// A step was sealed, or stays as it is.
    pub(super) fn settled(&mut self) {
        *self = Unsealed::default();
    }

    /// The problem and how to fix it; none after fewer checks.
    pub(super) fn problem(&self, interval: Duration) -> Option<String> {
        (self.changed >= CHECKS).then(|| {
            format!(
                "{} is not protected: {CHECKS} checks in a row, {} s apart, found that it had changed again; save less often, or \
                 write each step to a file of its own",
                self.name,
                interval.as_secs_f64()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_changes_before_each_check_is_reported_until_one_settles() {
        let interval = Duration::from_secs(1);
        let mut unsealed = Unsealed::default();
        for _ in 1..CHECKS {
            unsealed.changed("ckpt.pt");
            assert_eq!(unsealed.problem(interval), None);
        }
        unsealed.changed("ckpt.pt");
        let problem = unsealed.problem(interval).unwrap();
        assert!(problem.starts_with("ckpt.pt is not protected"), "{problem}");
        unsealed.settled();
        unsealed.changed("ckpt.pt");
        assert_eq!(unsealed.problem(interval), None);
    }
}
