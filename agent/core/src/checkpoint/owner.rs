//! Who owns a run. Among agents a run of a user is named `UID!NAME`: two users' runs of one name are two runs wherever a run is a key
//! (inventories, decisions, retention, caches, the manifest and therefore the root of each shard). Only an agent writes the owner, from
//! the uid that the kernel names. A name without an owner is the agents' own: `cache:…`, watches of the configuration, and what was
//! stored before runs had owners.

/// Between the owner and the name. No run id of a user has it: the first one ends the owner.
const MARK: char = '!';

/// The run `name` of the user `uid`. `name` may have what tells launches apart behind an `@`.
///
/// A name that claims another owner keeps that text as a part of the name, so that nobody can speak for another user.
#[must_use]
pub fn owned(uid: u32, name: &str) -> String {
    match owner(name) {
        Some(known) if known == uid => name.to_owned(),
        _ => format!("{uid}{MARK}{name}"),
    }
}

/// The owner's uid; none for a run of the agents' own.
#[must_use]
pub fn owner(run: &str) -> Option<u32> {
    let (uid, _) = run.split_once(MARK)?;
    // One spelling only: `007!x` is no owner.
    let number: u32 = uid.parse().ok()?;
    (number.to_string() == uid).then_some(number)
}

/// The name as its user gave it, without the owner.
#[must_use]
pub fn name(run: &str) -> &str {
    match (owner(run), run.split_once(MARK)) {
        (Some(_), Some((_, name))) => name,
        _ => run,
    }
}

#[cfg(test)]
mod tests {
    use super::{name, owned, owner};

    #[test]
    fn runs_of_two_users_with_one_name_are_two_runs() {
        assert_ne!(owned(1000, "train@1"), owned(1001, "train@1"));
        assert_eq!(owner(&owned(1000, "train@1")), Some(1000));
        assert_eq!(name(&owned(1000, "train@1")), "train@1");
        assert_eq!(owned(1000, &owned(1000, "train")), "1000!train");
    }

    #[test]
    fn nobody_speaks_for_another_user_or_for_the_agents() {
        for claimed in ["1000!train", "0!train", "cache:triton/host", "files", "+5!x", "007!x", "!x", ""] {
            let run = owned(1001, claimed);
            assert_eq!(owner(&run), Some(1001), "{claimed}");
            assert_eq!(name(&run), claimed);
        }
        assert_eq!((owner("cache:triton/host"), owner("train@1"), owner("007!x")), (None, None, None));
        assert_eq!(name("train@1"), "train@1");
    }
}
