//! The wall clock of a host jumps between its saves: a year ahead, and back to 1970.

use std::fs;

use mainstay_checkpoint_format::MANIFEST_NAME;

use super::support::{Host, bytes, hosts, identity, manifest, shard, until};

/// The host's rank seals a step at this time of its clock.
fn save_at(host: &Host, attempt: u64, step: u64, unix_s: u64) {
    let content = bytes(step, 0);
    let mut sealed = manifest(&identity(attempt, step, 0, 1), &content);
    sealed.created_unix_s = unix_s;
    let home = shard(host.directory.path(), step, 0);
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), &content).unwrap();
    fs::write(home.join(MANIFEST_NAME), sealed.encode()).unwrap();
    host.service().watch(host.place());
}

#[test]
fn the_newest_step_is_restored_and_kept_regardless_of_the_clock() {
    let mut hosts = hosts(2, |_, settings| settings.keep = 1);
    let now = 1_700_000_000;
    for (attempt, step, unix_s) in [(0, 10, now + 365 * 86_400), (0, 20, 0), (1, 30, now)] {
        save_at(&hosts[0], attempt, step, unix_s);
        hosts[0].wait_for_copies(step, 2);
        let last = format!("/step-{step:012}.{attempt}/");
        until("older steps to go, and no other", || {
            hosts[1].service().collect();
            let kept = hosts[1].replicas();
            kept.len() == 1 && kept[0].to_str().unwrap().contains(&last)
        });
        hosts[0].lose();
        hosts[0].start();
        assert_eq!(hosts[0].restore().unwrap().0, Some(step));
        hosts[0].has(step, &[0]);
    }
}
