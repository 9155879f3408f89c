//! Ranks on two hosts that declared that they save equal bytes: what they saved is compared by root, over the wire.

use std::fs;

use mainstay_checkpoint_format::{MANIFEST_NAME, Manifest, SharedContent};

use super::support::{Host, bytes, hosts, identity, manifest, shard, until};

/// Seals what a rank saved with the group of ranks that should save the same; `content` is what is compared.
fn save(host: &Host, (attempt, step, rank): (u64, u64, u32), group: &str, content: &str) {
    let state = bytes(step, rank);
    let shared = SharedContent { group: group.to_owned(), root: content.repeat(64) };
    let reported =
        Manifest { shared_content: Some(shared), ..manifest(&identity(attempt, step, rank, 2), &state) };
    let home = shard(host.directory.path(), step, rank);
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), state).unwrap();
    fs::write(home.join(".manifest.tmp"), reported.encode()).unwrap();
    fs::rename(home.join(".manifest.tmp"), home.join(MANIFEST_NAME)).unwrap();
    host.service().watch(host.place());
}

/// Step, group, and the host of each rank.
type Found = (u64, String, Vec<(u32, String)>);

fn found(host: &Host) -> Vec<Found> {
    let all = host.service().divergences();
    let members = |divergence: &mainstay_checkpoint::divergence::ReplicaDivergence| {
        divergence.members.iter().map(|member| (member.rank, member.holder.clone())).collect()
    };
    all.iter()
        .map(|divergence| (divergence.key.step, divergence.group.clone(), members(divergence)))
        .collect()
}

#[test]
fn both_hosts_detect_shards_that_should_be_equal_and_are_not_and_name_both() {
    let hosts = hosts(2, |_, _| {});
    save(&hosts[0], (0, 4, 0), "dp", "a");
    save(&hosts[1], (0, 4, 1), "dp", "b");
    let members = vec![(0, hosts[0].name.clone()), (1, hosts[1].name.clone())];
    let expected = vec![(4, "dp".to_owned(), members)];
    for host in &hosts {
        until("the finding", || !found(host).is_empty());
        assert_eq!(found(host), expected);
        assert_eq!(host.service().counts().divergences, 1, "one step, however often it is compared");
    }
}

#[test]
fn a_divergence_is_detected_when_a_shard_is_offered_to_a_host_that_asks_no_peer() {
    // The second asks its peers so rarely that it knows of the first only what the first offers.
    let hosts = hosts(2, |index, settings| {
        if index == 1 {
            (settings.interval, settings.copies) = (std::time::Duration::from_secs(3600), 0);
        }
    });
    save(&hosts[1], (0, 4, 1), "dp", "b");
    until("its own shard", || hosts[1].service().copies().iter().any(|copy| copy.own));
    save(&hosts[0], (0, 4, 0), "dp", "a");
    until("the finding", || {
        hosts[0].service().nudge();
        !found(&hosts[1]).is_empty()
    });
    assert_eq!(found(&hosts[1])[0].2, [(0, hosts[0].name.clone()), (1, hosts[1].name.clone())]);
}

#[test]
fn equal_shards_and_shards_that_were_not_declared_equal_are_not_reported() {
    let hosts = hosts(2, |_, _| {});
    // The same content; different groups; different attempts.
    save(&hosts[0], (0, 4, 0), "dp", "a");
    save(&hosts[1], (0, 4, 1), "dp", "a");
    save(&hosts[0], (0, 5, 0), "stage0", "a");
    save(&hosts[1], (0, 5, 1), "stage1", "b");
    save(&hosts[0], (1, 6, 0), "dp", "a");
    save(&hosts[1], (2, 6, 1), "dp", "b");
    // Only the last step differs.
    save(&hosts[0], (0, 9, 0), "dp", "a");
    save(&hosts[1], (0, 9, 1), "dp", "b");
    for host in &hosts {
        until("the last step", || !found(host).is_empty());
        until("all copies", || host.service().copies().iter().filter(|copy| copy.own).count() >= 4);
        host.service().refresh();
        assert_eq!(found(host).iter().map(|divergence| divergence.0).collect::<Vec<u64>>(), [9]);
    }
}
