//! Readers of single files of procfs and sysfs.

use std::io::{self, ErrorKind};
use std::path::Path;

use mainstay_health::host::os::{CpuTimes, Memory, Pressure, Reading};
use nix::errno::Errno;
use procfs::{FromRead, LoadAverage, Meminfo, ProcError};

/// Reads a small file as text.
pub(super) fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("reading {}: {error}", path.display()))
}

/// CPUs that are online, from a list like `0-7,9`.
pub(super) fn cpus(sys: &Path) -> Reading<u32> {
    let path = sys.join("devices/system/cpu/online");
    match read(&path) {
        Ok(text) => match count_list(text.trim()) {
            Some(count) => Reading::Value(count),
            None => Reading::Failed(format!("{} says {text:?}, which is not a list of CPUs", path.display())),
        },
        Err(why) => Reading::Failed(why),
    }
}

fn count_list(list: &str) -> Option<u32> {
    list.split(',').try_fold(0_u32, |count, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

pub(super) fn load(proc: &Path) -> Reading<f64> {
    match LoadAverage::from_file(proc.join("loadavg")) {
        Ok(load) if load.one.is_finite() => Reading::Value(f64::from(load.one)),
        Ok(load) => Reading::Failed(format!("{}/loadavg says {}", proc.display(), load.one)),
        Err(error) => Reading::Failed(describe_error(error)),
    }
}

/// The first line of `/proc/stat`: time of all CPUs in ticks, by use.
pub(super) fn cpu_times(proc: &Path) -> Reading<CpuTimes> {
    let path = proc.join("stat");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => return Reading::NotAvailable(format!("reading {}: {error}", path.display())),
    };
    let numbers: Option<Vec<u64>> = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .and_then(|rest| rest.split_whitespace().map(|number| number.parse().ok()).collect());
    match numbers.as_deref() {
        // Time of guests is already contained in user and nice time.
        Some(numbers) if numbers.len() >= 8 => {
            let total = numbers[..8].iter().fold(0_u64, |sum, ticks| sum.saturating_add(*ticks));
            Reading::Value(CpuTimes { total, stolen: numbers[7] })
        }
        _ => Reading::NotAvailable(format!("{} has no stolen time", path.display())),
    }
}

pub(super) fn memory(proc: &Path) -> Reading<Memory> {
    let meminfo = match Meminfo::from_file(proc.join("meminfo")) {
        Ok(meminfo) => meminfo,
        Err(error) => return Reading::Failed(describe_error(error)),
    };
    match meminfo.mem_available {
        Some(available) => Reading::Value(Memory {
            total: meminfo.mem_total,
            available,
            swap_total: meminfo.swap_total,
            swap_used: meminfo.swap_total.saturating_sub(meminfo.swap_free),
        }),
        None => Reading::Failed(format!("{}/meminfo has no MemAvailable", proc.display())),
    }
}

/// Kernels without pressure stall information have no such file, or refuse to read it (`psi=0`).
pub(super) fn pressure(path: &Path) -> Reading<Pressure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if not_offered(&error) => {
            return Reading::NotAvailable(format!(
                "{} cannot be read ({error}): the kernel has no pressure stall information, or boots with psi=0",
                path.display()
            ));
        }
        Err(error) => return Reading::Failed(format!("reading {}: {error}", path.display())),
    };
    match (avg10(&text, "some "), avg10(&text, "full ")) {
        // The line `full` of /proc/pressure/cpu exists since Linux 5.13; for the whole host it is meaningless.
        (Some(some_avg10), full) => Reading::Value(Pressure { some_avg10, full_avg10: full.unwrap_or(0.0) }),
        (None, _) => Reading::Failed(format!("{} says {text:?}, which is not pressure", path.display())),
    }
}

fn not_offered(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32)
}

fn avg10(text: &str, which: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(which))?;
    let record = procfs::parse_pressure_record(line).ok()?;
    record.avg10.is_finite().then(|| f64::from(record.avg10))
}

pub(super) fn oom_kills(proc: &Path) -> Reading<u64> {
    let path = proc.join("vmstat");
    let text = match read(&path) {
        Ok(text) => text,
        Err(why) => return Reading::Failed(why),
    };
    match text.lines().find_map(|line| line.strip_prefix("oom_kill ")) {
        Some(count) => match count.trim().parse() {
            Ok(count) => Reading::Value(count),
            Err(_) => {
                Reading::Failed(format!("{} says oom_kill {count:?}, which is not a number", path.display()))
            }
        },
        None => {
            Reading::NotAvailable(format!("{} has no oom_kill (it came with Linux 4.13)", path.display()))
        }
    }
}

/// The error in the format of the other readings: operation and path first.
fn describe_error(error: ProcError) -> String {
    match error {
        ProcError::Io(error, Some(path)) => format!("reading {}: {error}", path.display()),
        ProcError::NotFound(Some(path)) => format!("reading {}: no such file", path.display()),
        ProcError::PermissionDenied(Some(path)) => format!("reading {}: permission denied", path.display()),
        ProcError::Incomplete(Some(path)) => format!("reading {}: it ends too early", path.display()),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::count_list;

    #[test]
    fn lists_of_cpus_are_counted() {
        assert_eq!(count_list("0"), Some(1));
        assert_eq!(count_list("0-7,9,12-13"), Some(11));
        for wrong in ["", "a", "3-1", "0-4294967295", "1,,2"] {
            assert_eq!(count_list(wrong), None, "{wrong}");
        }
    }
}
