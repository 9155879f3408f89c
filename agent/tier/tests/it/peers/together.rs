//! The hosts of one job: they authenticate with a secret, learn their peers while they run, and fetch the shards of
//! their ranks.

use std::fs;
use std::os::unix::fs::FileExt;

use mainstay_checkpoint::inventory::{StepKey, steps};
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::tls::Tls;
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::{FetchedShards, Progress};

use super::support::{Host, RUN, address, hosts_with, until};

fn of_secret(secret: &str) -> Credentials {
    let token = Token::new(secret.as_bytes()).unwrap();
    Credentials::Certificate(Tls::from_secret(secret.as_bytes()).unwrap(), Some(token))
}

/// Two hosts of a job, and one with another secret. None knows an address yet.
fn three(secrets: [&str; 3]) -> (Vec<Host>, Vec<String>) {
    let names: Vec<String> = (0..3).map(|_| address()).collect();
    let hosts = hosts_with(&names, |index| of_secret(secrets[index]), |_, settings| settings.peers.clear());
    (hosts, names)
}

const SECRET: &str = "a secret of sixteen or more";

fn bring(host: &Host, key: &StepKey, ranks: &[u32]) -> Result<FetchedShards, String> {
    let report = |_: Progress| {};
    host.service().fetch_shards(key, &host.place(), ranks, &report).map_err(|error| error.to_string())
}

/// The newest step that is whole over what these hosts hold.
fn newest(hosts: &[&Host]) -> Option<StepKey> {
    let copies: Vec<_> = hosts.iter().flat_map(|host| host.service().holding(RUN)).collect();
    steps(&copies, Some(RUN)).into_iter().find(|step| step.is_whole()).map(|step| step.key)
}

#[test]
fn hosts_of_a_job_keep_copies_for_each_other_and_a_new_one_gets_the_shards_of_its_ranks() {
    let (hosts, names) = three([SECRET; 3]);
    hosts[0].save(0, 7, &[0, 1], 4);
    hosts[1].save(0, 7, &[2, 3], 4);
    for host in &hosts[..2] {
        host.service().meet(&names[..2]);
    }
    hosts[0].wait_for_copies(7, 2);
    until("both to know it", || {
        hosts[..2].iter().all(|host| {
            host.service()
                .copied(&newest(&[host]).map_or_else(String::new, |key| key.run.to_string()))
                .first()
                .copied()
                == Some((0, 7))
        })
    });
    // The second host is lost; the third one takes its place.
    hosts[0].service().meet(&[names[0].clone(), names[2].clone()]);
    hosts[2].service().meet(&[names[0].clone(), names[2].clone()]);
    let key = newest(&[&hosts[0], &hosts[2]]).expect("whole on the first host alone");
    assert_eq!(key.step, 7);
    let brought = bring(&hosts[2], &key, &[2, 3]).unwrap();
    assert_eq!((brought.fetched, brought.roots.len()), (2, 2));
    hosts[2].has(7, &[2, 3]);
    assert!(!hosts[2].directory.path().join("step-000000000007/rank-00000").exists(), "only its own ranks'");
    let brought = bring(&hosts[0], &key, &[0, 1]).unwrap();
    assert_eq!((brought.fetched, brought.bytes), (0, 0), "they were there");
}

#[test]
fn a_spare_gets_a_copy_of_all_shards_in_addition_and_needs_no_network_when_it_takes_over() {
    let (mut hosts, names) = three([SECRET; 3]);
    for host in &hosts {
        host.service().keep_from(RUN, (0, 0));
        host.service().meet_with_spares(&names[..2], names[2..].to_vec());
    }
    hosts[0].save(0, 7, &[0, 1], 4);
    hosts[1].save(0, 7, &[2, 3], 4);
    // The owner, the other host, and the spare.
    hosts[0].wait_for_copies(7, 3);
    assert_eq!(hosts[2].replicas().len(), 4);
    assert_eq!((hosts[0].replicas().len(), hosts[1].replicas().len()), (2, 2), "as without a spare");
    hosts[0].lose();
    hosts[1].lose();
    hosts[2].service().meet(&names[1..]);
    let key = newest(&[&hosts[2]]).expect("whole on the spare alone");
    assert_eq!(bring(&hosts[2], &key, &[0, 1]).map(|brought| brought.roots.len()), Ok(2));
    hosts[2].has(7, &[0, 1]);
}

#[test]
fn copies_do_not_wait_for_a_lost_spare() {
    let (mut hosts, names) = three([SECRET; 3]);
    hosts[2].lose();
    for host in &hosts[..2] {
        host.service().keep_from(RUN, (0, 0));
        host.service().meet_with_spares(&names[..2], names[2..].to_vec());
    }
    hosts[0].save(0, 7, &[0], 2);
    hosts[1].save(0, 7, &[1], 2);
    hosts[0].wait_for_copies(7, 2);
    let (sent, failed) = (hosts[0].service().counts().shards_sent, hosts[0].service().counts().failures);
    assert_eq!((sent, failed), (1, 0), "its own to the other host");
}

#[test]
fn a_damaged_copy_is_not_fetched() {
    let (hosts, names) = three([SECRET; 3]);
    hosts[0].save(0, 7, &[0], 2);
    hosts[1].save(0, 7, &[1], 2);
    for host in &hosts[..2] {
        host.service().meet(&names[..2]);
    }
    hosts[0].wait_for_copies(7, 2);
    for path in hosts[0].replicas() {
        let byte = fs::read(&path).unwrap()[3] ^ 1;
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[byte], 3).unwrap();
    }
    hosts[0].service().meet(&[names[0].clone(), names[2].clone()]);
    hosts[2].service().meet(&[names[0].clone(), names[2].clone()]);
    let key = newest(&[&hosts[0], &hosts[2]]).expect("nobody has looked at its bytes yet");
    let error = bring(&hosts[2], &key, &[1]).expect_err("it is damaged");
    assert!(!error.is_empty());
    assert!(!hosts[2].directory.path().join("step-000000000007/rank-00001").exists());
    assert!(bring(&hosts[2], &key, &[1]).expect_err("the copy counts no more").contains("rank 1"));
}

#[test]
fn a_host_with_another_secret_is_not_a_peer_and_reports_why() {
    let (hosts, names) = three([SECRET, SECRET, "another secret of sixteen or more"]);
    hosts[0].save(0, 7, &[0], 1);
    for host in &hosts {
        host.service().meet(&names);
    }
    hosts[0].wait_for_copies(7, 2);
    until("the refusal", || {
        let peers = hosts[2].service().peers();
        peers.values().all(|peer| peer.error.as_ref().is_some_and(|error| error.contains("another secret")))
    });
    assert!(hosts[2].service().copies().is_empty());
}
