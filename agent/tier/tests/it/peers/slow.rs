//! A rate limit that is lower than anybody would set: a chunk takes longer than a peer waits for the next bytes.

use std::time::Duration;

use super::support::{CHUNK, hosts, identity, seal};

#[test]
fn a_chunk_that_takes_longer_than_the_other_side_waits_arrives_all_the_same() {
    let hosts = hosts(2, |_, settings| {
        (settings.rate, settings.streams) = (CHUNK / 2, 1);
        settings.patience.stall = Duration::from_secs(1);
    });
    let content = &super::support::bytes(1, 0)[..CHUNK as usize + 100];
    seal(hosts[0].directory.path(), &identity(0, 1, 0, 1), content);
    hosts[0].service().watch(hosts[0].place());
    hosts[0].wait_for_copies(1, 2);
    assert_eq!(std::fs::read(&hosts[1].replicas()[0]).unwrap(), content);
}
