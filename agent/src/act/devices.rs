//! Which GPUs the ranks see. A rank uses the one at its own place among those, by convention: it is what `torchrun`'s users
//! write, and nothing else tells a launcher before a rank runs.

use std::path::Path;

/// The variable by which CUDA is told.
pub const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// What is visible: what the variable says, else all there are, by their numbers.
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

/// What is left without the one of a rank, if so many ranks can still have one each.
///
/// # Errors
/// There would be too few; in words for a person.
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
    fn what_is_visible_is_what_the_user_said_or_all_there_is() {
        let dev = tempfile::tempdir().expect("a directory");
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
        assert!(without(&visible, 1, 3).expect_err("all are in use").contains("fewer ranks"));
        assert!(without(&[], 0, 1).expect_err("none").contains("none to exclude"));
    }
}
