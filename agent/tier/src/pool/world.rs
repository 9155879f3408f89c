//! Whether another number of ranks can load what a job saves. Only its ranks know: they record it in the pool when they save and
//! when they load.

use std::fs;
use std::path::Path;

/// File of a pool with one word: `same` from the first save on, `any` after a rank has loaded in a way that accepts steps of any
/// number of ranks.
const WORLD_NAME: &str = "world";

/// Whether only the same number of ranks can load what the ranks of this pool have saved. False if nothing was saved.
pub fn is_kept(pool: &Path) -> bool {
    fs::read(pool.join(WORLD_NAME)).is_ok_and(|content| content == b"same")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_job_that_saved_for_its_number_of_ranks_keeps_that_number() {
        let pool = testing::tempdir().expect("a directory");
        assert!(!is_kept(pool.path()), "nothing was saved");
        for (content, kept) in [("", false), ("same", true), ("any", false)] {
            fs::write(pool.path().join(WORLD_NAME), content).expect("written");
            assert_eq!(is_kept(pool.path()), kept, "{content:?}");
        }
    }
}
