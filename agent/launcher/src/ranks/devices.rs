//! Which GPUs the ranks see. By convention a rank uses the GPU at its own index among the visible ones: programs for
//! `torchrun` do so, and before a rank runs there is no other source.

use std::path::Path;

/// The variable that lists CUDA's visible devices.
pub const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// The visible GPUs: those in the variable, else all of the host, by number.
pub fn visible(variable: Option<&str>, dev: &Path) -> Vec<String> {
    match variable {
        Some(list) => {
            let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
            names.map(str::to_owned).collect()
        }
        None => {
            let is_gpu =
                |name: &str| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
            let entries = std::fs::read_dir(dev).into_iter().flatten().flatten();
            let gpus = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
            (0..gpus).map(|number| number.to_string()).collect()
        }
    }
}

/// The GPUs that remain without that of one rank, if `ranks` ranks can still have one each.
///
/// # Errors
/// There would be too few; as a message.
pub fn without(visible: &[String], local_rank: u32, ranks: u32) -> Result<Vec<String>, String> {
    let (place, ranks) = (local_rank as usize, ranks as usize);
    if visible.is_empty() {
        return Err(format!(
            "no GPU is visible to the job ({VARIABLE}, /dev/nvidia*): there is none to exclude"
        ));
    }
    if place >= visible.len() || visible.len() <= ranks {
        return Err(format!(
            "the job has {ranks} rank(s) and sees {} GPU(s): none is left to take the place of one, and it cannot go on with \
             fewer ranks; stop it (`mainstay job stop`) and start it elsewhere or with fewer",
            visible.len()
        ));
    }
    let left = visible.iter().enumerate().filter(|(at, _)| *at != place);
    Ok(left.map(|(_, name)| name.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_devices_are_those_of_the_user_or_all() {
        let dev = testing::tempdir().expect("a directory");
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            std::fs::write(dev.path().join(name), "").expect("a file");
        }
        assert_eq!(visible(None, dev.path()), ["0", "1"]);
        assert_eq!(visible(Some("3, 5,GPU-1"), dev.path()), ["3", "5", "GPU-1"]);
        assert!(visible(Some(""), dev.path()).is_empty());
    }

    #[test]
    fn a_gpu_is_left_out_only_where_another_can_take_its_place() {
        let visible = ["3", "5", "7"].map(str::to_owned);
        assert_eq!(without(&visible, 1, 2), Ok(vec!["3".to_owned(), "7".to_owned()]));
        let all_in_use = without(&visible, 1, 3).expect_err("all are in use");
        testing::snapshot!("launcher", "no GPU is free to replace one", all_in_use);
        testing::snapshot!("launcher", "no GPU to exclude", without(&[], 0, 1).expect_err("none"));
    }
}
