//! The Slurm jobs with processes on this host, from the environment of these processes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A part of a job with a separate allocation, by the numbers in the name of ft_launcher's segment health file: job and
/// task of an array, or the job's number twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// `SLURM_ARRAY_JOB_ID`, else `SLURM_JOB_ID`.
    pub job: String,
    /// `SLURM_ARRAY_TASK_ID`, else the job.
    pub task: String,
}

/// The segments with processes below `proc` whose environment we may read: all for root, a user's own for the user. It
/// walks over all processes, so call it rarely.
pub fn segments(proc: &Path) -> BTreeSet<Segment> {
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let is_process = |name: &std::ffi::OsStr| {
        name.to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    };
    processes
        .filter(|entry| is_process(&entry.file_name()))
        .filter_map(|entry| segment_of(&fs::read(entry.path().join("environ")).ok()?))
        .collect()
}

fn segment_of(environment: &[u8]) -> Option<Segment> {
    let value = |name: &str| {
        environment.split(|byte| *byte == 0).find_map(|variable| {
            let value = variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            // A part of a file's name must be a number: any user can set a variable.
            let number = value.len() <= 20 && value.iter().all(u8::is_ascii_digit) && !value.is_empty();
            number.then(|| String::from_utf8_lossy(value).into_owned())
        })
    };
    let job = value("SLURM_ARRAY_JOB_ID").or_else(|| value("SLURM_JOB_ID"))?;
    let task = value("SLURM_ARRAY_TASK_ID").unwrap_or_else(|| job.clone());
    Some(Segment { job, task })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_named_as_the_launcher_looks_for_them() {
        let proc = testing::tempdir().unwrap();
        for (pid, environment) in [
            ("10", "PATH=/bin\0SLURM_JOB_ID=77\0"),
            ("11", "SLURM_JOB_ID=77\0"),
            ("12", "SLURM_JOB_ID=81\0SLURM_ARRAY_JOB_ID=80\0SLURM_ARRAY_TASK_ID=3\0"),
            ("13", "HOME=/root\0"),
            ("14", "SLURM_JOB_ID=../../etc\0"),
            ("self", "SLURM_JOB_ID=99\0"),
        ] {
            fs::create_dir(proc.path().join(pid)).unwrap();
            fs::write(proc.path().join(pid).join("environ"), environment).unwrap();
        }
        let found: Vec<(String, String)> =
            segments(proc.path()).into_iter().map(|segment| (segment.job, segment.task)).collect();
        assert_eq!(found, [("77".to_owned(), "77".to_owned()), ("80".to_owned(), "3".to_owned())]);
    }
}
