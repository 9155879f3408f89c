//! The owner of a run. Among agents a user's run is named `UID!NAME`: runs of two users with the same name are two runs
//! wherever a run is a key (inventories, decisions, retention, caches, the manifest and therefore the root of each
//! shard). Only an agent writes the owner, from the uid that the kernel reports. Names without an owner belong to the
//! agents: `cache:…`, watches of the configuration, and what was stored before runs had owners.

/// Separates the owner and the name; the first one ends the owner. No run id of a user contains it.
const OWNER_SEPARATOR: char = '!';

/// The run `name` of the user `uid`. After an `@`, `name` may contain what distinguishes launches.
///
/// If the name claims another owner, that text stays a part of the name: no user can act for another one.
#[must_use]
pub fn owned(uid: u32, name: &str) -> String {
    match owner(name) {
        Some(known) if known == uid => name.to_owned(),
        _ => format!("{uid}{OWNER_SEPARATOR}{name}"),
    }
}

/// The owner's uid; `None` for a run of the agents.
#[must_use]
pub fn owner(run: &str) -> Option<u32> {
    let (uid, _) = run.split_once(OWNER_SEPARATOR)?;
    // Accept one spelling only: `007!x` has no owner.
    let number: u32 = uid.parse().ok()?;
    (number.to_string() == uid).then_some(number)
}

/// The name that the user gave, without the owner.
#[must_use]
pub fn name(run: &str) -> &str {
    match (owner(run), run.split_once(OWNER_SEPARATOR)) {
        (Some(_), Some((_, name))) => name,
        _ => run,
    }
}

#[cfg(test)]
mod tests {
    use super::{name, owned, owner};

    #[test]
    fn runs_of_two_users_with_the_same_name_are_different() {
        assert_ne!(owned(1000, "train@1"), owned(1001, "train@1"));
        assert_eq!(owner(&owned(1000, "train@1")), Some(1000));
        assert_eq!(name(&owned(1000, "train@1")), "train@1");
        assert_eq!(owned(1000, &owned(1000, "train")), "1000!train");
    }

    #[test]
    fn a_user_cannot_act_for_another_user_or_for_the_agents() {
        for claimed in ["1000!train", "0!train", "cache:triton/host", "files", "+5!x", "007!x", "!x", ""] {
            let run = owned(1001, claimed);
            assert_eq!(owner(&run), Some(1001), "{claimed}");
            assert_eq!(name(&run), claimed);
        }
        assert_eq!((owner("cache:triton/host"), owner("train@1"), owner("007!x")), (None, None, None));
        assert_eq!(name("train@1"), "train@1");
    }
}
