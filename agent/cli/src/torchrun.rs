//! torchrun's syntax for numbers of ranks and streams.

use std::path::Path;

/// Minimum and maximum number of hosts: `N` or `MIN:MAX`.
///
/// # Errors
/// No numbers, zero, or a range that ends before it starts.
pub fn nodes(text: &str) -> Result<(u32, u32), String> {
    let parse = |text: &str| {
        text.parse::<u32>().map_err(|_| format!("{text:?} is not a number of hosts: write 1 or MIN:MAX"))
    };
    let (least, most) = match text.split_once(':') {
        Some((least, most)) => (parse(least)?, parse(most)?),
        None => (parse(text)?, parse(text)?),
    };
    if least == 0 || most < least {
        return Err(format!("{text}: write a number of hosts from 1 up, or MIN:MAX"));
    }
    Ok((least, most))
}

/// Number of ranks on this host: a number, `gpu`, `cpu` or `auto`. `devices` is `/dev`, `visible` the value of
/// `CUDA_VISIBLE_DEVICES`.
///
/// # Errors
/// Not a number, zero, or GPUs requested on a host without any.
pub fn ranks_per_node(text: &str, devices: &Path, visible: Option<&str>) -> Result<u32, String> {
    let processors = || {
        std::thread::available_parallelism()
            .map_or(1, |processors| u32::try_from(processors.get()).unwrap_or(u32::MAX))
    };
    match text {
        "gpu" => match gpus(devices, visible) {
            0 => Err(format!(
                "gpu asked for, but there is no GPU: no device {}/nvidiaN is visible",
                devices.display()
            )),
            gpus => Ok(gpus),
        },
        "cpu" => Ok(processors()),
        "auto" => Ok(match gpus(devices, visible) {
            0 => processors(),
            gpus => gpus,
        }),
        number => match number.parse() {
            Ok(0) | Err(_) => {
                Err(format!("{number:?}: write a number of ranks from 1 up, or auto, gpu or cpu"))
            }
            Ok(ranks) => Ok(ranks),
        },
    }
}

fn gpus(devices: &Path, visible: Option<&str>) -> u32 {
    if let Some(list) = visible {
        let ids = list.split(',').map(str::trim).take_while(|id| !id.is_empty() && *id != "-1");
        return u32::try_from(ids.count()).unwrap_or(u32::MAX);
    }
    let Ok(entries) = std::fs::read_dir(devices) else { return 0 };
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let count = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// torchrun's `Std`: 0 none, 1 standard output, 2 standard error, 3 both; for all local ranks, or by local rank
/// as `0:3,1:1`. Returns (stdout, stderr) by local rank.
///
/// # Errors
/// Anything else.
pub fn streams(text: &str, ranks: u32) -> Result<Vec<(bool, bool)>, String> {
    let one = |text: &str| match text.trim() {
        "0" => Ok((false, false)),
        "1" => Ok((true, false)),
        "2" => Ok((false, true)),
        "3" => Ok((true, true)),
        other => Err(format!("{other:?}: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")),
    };
    if !text.contains(':') {
        return Ok(vec![one(text)?; ranks as usize]);
    }
    let mut streams = vec![(false, false); ranks as usize];
    for pair in text.split(',') {
        let wrong = || format!("{pair:?}: write LOCAL_RANK:STREAMS such as 0:3");
        let (rank, value) = pair.split_once(':').ok_or_else(wrong)?;
        let rank: usize = rank.trim().parse().map_err(|_| wrong())?;
        let slot = streams.get_mut(rank);
        *slot.ok_or_else(|| {
            format!("{pair:?}: there are only local ranks 0 to {}", ranks.saturating_sub(1))
        })? = one(value)?;
    }
    Ok(streams)
}

/// Local ranks as `0,2`.
///
/// # Errors
/// Not a list of numbers.
pub fn local_ranks(text: &str) -> Result<Vec<u32>, String> {
    text.split(',')
        .map(|rank| rank.trim().parse().map_err(|_| format!("{rank:?}: write local ranks such as 0,2")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_in_every_spelling() {
        assert_eq!(nodes("1"), Ok((1, 1)));
        assert_eq!(nodes("1:4"), Ok((1, 4)));
        assert_eq!(nodes("2"), Ok((2, 2)));
        assert!(nodes("0").is_err() && nodes("3:2").is_err() && nodes("x:1").is_err());
        assert!(nodes("2:20").is_ok() && nodes("2:20:30").is_err());
    }

    #[test]
    fn gpus_are_counted_by_their_device_files_unless_the_user_has_chosen() {
        let devices = testing::tempdir().expect("a directory");
        assert!(ranks_per_node("gpu", devices.path(), None).is_err_and(|error| error.contains("no GPU")));
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"] {
            std::fs::write(devices.path().join(name), "").expect("a file");
        }
        assert_eq!(ranks_per_node("gpu", devices.path(), None), Ok(2));
        assert_eq!(ranks_per_node("auto", devices.path(), Some("3")), Ok(1));
        assert!(ranks_per_node("gpu", devices.path(), Some("")).is_err());
        assert!(ranks_per_node("0", devices.path(), None).is_err());
    }

    #[test]
    fn streams_for_all_and_by_rank() {
        assert_eq!(streams("3", 2), Ok(vec![(true, true); 2]));
        assert_eq!(streams("1:2", 2), Ok(vec![(false, false), (false, true)]));
        assert!(streams("7", 2).is_err());
        assert!(streams("5:1", 2).is_err_and(|error| error.contains("0 to 1")));
    }
}
