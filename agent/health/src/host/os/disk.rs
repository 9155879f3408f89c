//! The judge of file systems: free space, inodes, read-only, no answer.

use super::findings::Findings;
use super::{Checks, Disk, DiskLimits, Space, lower_of, percent_of};
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Mono;
use mainstay_model::units::Bytes;

pub(super) fn judge(limits: &DiskLimits, at: Mono, disks: &[Disk], checks: &mut Checks<'_>) -> Findings {
    let mut findings = Findings::default();
    if disks.is_empty() {
        findings.unreadable("no file system could be looked at".to_owned());
    }
    for disk in disks {
        judge_read_only(disk, checks, &mut findings);
        match disk.silent_since {
            Some(since) => {
                // Once it answers, it needs several readings before it counts again, like any other.
                let unread: super::Reading<Space> = super::Reading::Failed(format!(
                    "it did not answer for {:.0} s",
                    at.since(since).as_seconds()
                ));
                checks.needed(&space_of(disk), &unread, &mut findings);
            }
            None => {
                if let Some(space) = checks.needed(&space_of(disk), &disk.space, &mut findings) {
                    judge_space(limits, &disk.mount, space, checks, &mut findings);
                }
            }
        }
    }
    findings
}

fn space_of(disk: &Disk) -> String {
    format!("the file system {}", disk.mount)
}

/// A file system that was writable, or should be, and is read-only now: the kernel stops writing when the disk or the
/// file system's metadata fail.
fn judge_read_only(disk: &Disk, checks: &mut Checks<'_>, findings: &mut Findings) {
    let what = format!("the mount options of {}", disk.mount);
    let Some(read_only) = checks.needed(&what, &disk.read_only, findings) else { return };
    if !read_only {
        checks.recall.writable.insert(disk.mount.clone());
        return;
    }
    findings.evidence("/proc/self/mountinfo", format!("{} is mounted read-only", disk.mount), None);
    let was_writable = checks.recall.writable.contains(&disk.mount);
    let why = match (was_writable, disk.meant_writable) {
        (true, _) => "was writable before",
        (false, Some(true)) => "is to be writable by /etc/fstab",
        (false, Some(false) | None) => return,
    };
    findings.problem(
        HealthState::Unhealthy,
        format!("{} is read-only and {why}: see the kernel log for errors of the disk", disk.mount),
        RecommendedAction::ContactSupport,
    );
}

fn judge_space(
    limits: &DiskLimits,
    mount: &str,
    space: &Space,
    checks: &mut Checks<'_>,
    findings: &mut Findings,
) {
    // Pseudo file systems have no size and cannot be full.
    if space.total > 0 {
        let degraded = lower_of(space.total, limits.degraded_free.0, limits.degraded_bytes);
        let unhealthy = lower_of(space.total, limits.unhealthy_free.0, limits.unhealthy_bytes);
        let (free, total) = (Bytes(space.free).rounded(), Bytes(space.total).rounded());
        let limit = Bytes(degraded as u64).rounded();
        findings.summary(format!("{mount}: {free} of {total} free"));
        findings.evidence(mount, format!("{free} of {total} free"), Some(limit.clone()));
        let state = checks.below(&format!("disk.space {mount}"), space.free as f64, degraded, unhealthy);
        findings.problem(
            state,
            format!("{mount} has only {free} of {total} free (limit {limit})"),
            RecommendedAction::None,
        );
    }
    // Zero on file systems that create inodes on demand (btrfs, NFS).
    if space.inodes > 0 {
        let free = percent_of(space.inodes_free, space.inodes);
        let limit = limits.degraded_inodes.0;
        findings.evidence(mount, format!("{free:.1} % of inodes free"), Some(format!("{limit} %")));
        let name = format!("disk.inodes {mount}");
        let state = checks.below(&name, free, limit, limits.unhealthy_inodes.0);
        findings.problem(
            state,
            format!("{mount} has only {free:.1} % of its inodes free (limit {limit} %)"),
            RecommendedAction::None,
        );
    }
}
