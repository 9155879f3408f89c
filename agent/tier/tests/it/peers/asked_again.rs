//! Peers that do not answer are asked once more before a step is abandoned, and only then.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::support::{Proxy, address, hosts_named, until};

#[test]
fn a_holder_whose_first_answers_are_lost_is_asked_again_before_a_step_is_abandoned() {
    let (front, back, owner) = (address(), address(), address());
    let to_lose = Arc::new(AtomicUsize::new(0));
    let left = Arc::clone(&to_lose);
    let one_less = |left: usize| left.checked_sub(1);
    let proxy = Proxy::start(&front, &back, move |_, _| {
        left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_err()
    });
    let mut hosts = hosts_named(&[owner, front], |index, settings| {
        if index == 1 {
            settings.listen = back.parse().unwrap();
        }
    });
    hosts[0].save(0, 2, &[0], 1);
    hosts[0].wait_for_copies(2, 2);
    hosts[0].lose();
    // After its first round, it asks only for a restore.
    hosts[0].settings.interval = Duration::from_secs(3600);
    hosts[0].start();
    hosts[0].wait_for_peers(1);
    // The requests of the host that asks and of the leader.
    to_lose.store(2, Ordering::SeqCst);
    assert_eq!(hosts[0].restore().unwrap().0, Some(2));
    assert_eq!(to_lose.load(Ordering::SeqCst), 0);
    hosts[0].has(2, &[0]);
    drop(proxy);
}

#[test]
fn a_lost_host_whose_shards_have_copies_elsewhere_is_not_asked_again() {
    let mut names: Vec<String> = (0..3).map(|_| address()).collect();
    // The first by name leads.
    names.sort();
    let mut hosts = hosts_named(&names, |_, settings| settings.copies = 2);
    hosts[0].save(0, 2, &[0], 1);
    hosts[0].wait_for_copies(2, 3);
    for host in &mut hosts[..2] {
        // After its first round, it asks only for a restore.
        host.settings.interval = Duration::from_secs(3600);
        host.service = None;
        host.start();
        host.wait_for_peers(2);
    }
    hosts[2].service = None;
    let mut listener = None;
    until("the address of the lost host", || {
        listener = TcpListener::bind(&names[2]).ok();
        listener.is_some()
    });
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, listener) = (Arc::clone(&asked), listener.unwrap());
    std::thread::spawn(move || {
        listener.incoming().for_each(|_| _ = count.fetch_add(1, Ordering::SeqCst));
    });
    hosts[0].service().watch(hosts[0].place());
    assert_eq!(hosts[0].restore().unwrap().0, Some(2));
    assert_eq!(asked.load(Ordering::SeqCst), 2, "by the host that restores, and by the leader");
}
