//! Settings that a log names, beside the failure of what they set.

use super::{spots_of, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Catalog;
use crate::attribution::class::Class;
use crate::attribution::vote::Vote;

/// Log-odds of a setting whose own part of the connection fails.
const SETTING_LOG_ODDS: f64 = 3.6;
/// The most that the failure then says about the network.
const MAX_NETWORK_LOG_ODDS: f64 = 1.4;

/// Signatures of settings, and of the failures of what they set.
const SETTINGS: [(&str, &[&str]); 1] = [("nccl.set_gid", &["nccl.ib.setup", "nccl.ib.modify_timeout"])];

/// Blames a setting where what it sets fails, and no longer the network.
pub fn blame_settings(catalog: &Catalog, evidence: &Evidence, votes: &mut Vec<Vote>) {
    for (setting, failures) in SETTINGS {
        let Some((source, spot)) = spots_of(catalog, evidence, setting).next() else { continue };
        let fails = |vote: &&mut Vote| failures.contains(&vote.id.as_str());
        let mut failed = votes.iter_mut().filter(fails).peekable();
        if failed.peek().is_none() {
            continue;
        }
        failed.for_each(|vote| vote.weight = vote.weight.min(MAX_NETWORK_LOG_ODDS));
        let meaning = catalog.named(setting).map(|signature| signature.meaning.clone()).unwrap_or_default();
        let spots = vec![(source, spot.clone())];
        votes.push(vote(setting, meaning, (Class::UserConfig, SETTING_LOG_ODDS), spots, "settings"));
    }
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    #[test]
    fn a_setting_is_blamed_only_where_what_it_sets_fails() {
        let set =
            |index: u32| format!("n3:70:70 [1] NCCL INFO NCCL_IB_GID_INDEX set by environment to {index}.\n");
        let failed = "n3:70:93 [1] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out\n";
        assert_eq!(judged(&(set(1) + failed)).class, Class::UserConfig);
        assert_eq!(judged(&(set(3) + failed)).class, Class::Fabric);
        assert_eq!(judged(&set(1)).class, Class::Unknown);
    }
}
