//! Keys, transactions, leases, watches, compaction.

use std::collections::BTreeSet;
use std::time::Duration;

use mainstay_coord::{CoordError, LeaseState, Relisted, Txn, WatchEvent};

use crate::contract;
use crate::stores::{Store, role};

contract!(
    keys_are_written_listed_and_removed,
    one_of_eight_racing_clients_wins_each_round,
    a_transaction_compares_version_creation_change_lease_and_value,
    a_refused_transaction_changes_nothing,
    keys_of_a_killed_holder_are_removed_with_its_lease,
    a_lease_survives_a_restart_of_the_store,
    a_revoked_lease_is_reported_lost_and_its_keys_are_removed,
    acknowledged_writes_survive_a_kill,
    a_watch_reports_puts_and_deletions_with_previous_values,
    a_watch_from_a_compacted_revision_lists_and_reports_it,
    an_early_revision_can_be_read_until_it_is_compacted,
    errors_name_the_cause,
    jobs_of_one_cluster_do_not_see_each_other,
);

async fn keys_are_written_listed_and_removed(store: Store) {
    let client = store.client();
    assert_eq!(client.get("/a/1").await.unwrap(), None);
    let first = client.put("/a/1", b"x", None).await.unwrap();
    let second = client.put("/a/1", b"y", None).await.unwrap();
    assert_eq!(second, first + 1);
    let found = client.get("/a/1").await.unwrap().unwrap();
    assert_eq!((found.value.as_slice(), found.version), (b"y".as_slice(), 2));
    assert_eq!((found.create_revision, found.mod_revision), (first, second));
    assert_eq!(found.lease, None);

    // More than one page, and adjacent keys that do not belong to it.
    for n in 0..600 {
        client.put(&format!("/many/{n:03}"), &[0; 100], None).await.unwrap();
    }
    client.put("/many", b"", None).await.unwrap();
    client.put("/many0", b"", None).await.unwrap();
    let listing = client.list("/many/").await.unwrap();
    let keys: Vec<&str> = listing.items.iter().map(|item| item.key.as_str()).collect();
    assert_eq!(keys.len(), 600);
    assert!(keys.is_sorted());
    assert_eq!(client.delete("/a/1").await.unwrap(), 1);
    assert_eq!(client.delete("/a/1").await.unwrap(), 0);
    assert_eq!(client.delete_prefix("/many/").await.unwrap(), 600);
    assert_eq!(client.list("/many/").await.unwrap().items, []);
    assert_eq!(client.list("/many").await.unwrap().items.len(), 2);
}

async fn one_of_eight_racing_clients_wins_each_round(store: Store) {
    const ROUNDS: usize = 20;
    let mut racers = Vec::new();
    for racer in 0..8 {
        let client = store.client();
        racers.push(tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..ROUNDS {
                let key = format!("/race/{round}");
                let txn = Txn::new().if_absent(&key).then_put(&key, &[racer], None).else_get(&key);
                let reply = client.txn(txn).await.unwrap();
                if reply.succeeded {
                    won.push(round);
                } else {
                    assert_ne!(reply.reads[0][0].value, [racer]);
                }
            }
            won
        }));
    }
    let mut won = Vec::new();
    for racer in racers {
        won.extend(racer.await.unwrap());
    }
    assert_eq!(won.len(), ROUNDS, "{won:?}");
    assert_eq!(won.into_iter().collect::<BTreeSet<_>>().len(), ROUNDS);
}

async fn a_transaction_compares_version_creation_change_lease_and_value(store: Store) {
    let client = store.client();
    let lease = client.lease(Duration::from_secs(30)).await.unwrap();
    let created = client.put("/k", b"1", None).await.unwrap();
    let changed = client.put("/k", b"2", Some(lease.id())).await.unwrap();
    let holds = async |txn: Txn| client.txn(txn).await.unwrap().succeeded;
    assert!(holds(Txn::new().if_version("/k", 2)).await);
    assert!(!holds(Txn::new().if_version("/k", 1)).await);
    assert!(holds(Txn::new().if_create_revision("/k", created)).await);
    assert!(!holds(Txn::new().if_create_revision("/k", changed)).await);
    assert!(holds(Txn::new().if_mod_revision("/k", changed)).await);
    assert!(!holds(Txn::new().if_mod_revision("/k", created)).await);
    assert!(holds(Txn::new().if_value("/k", b"2")).await);
    assert!(!holds(Txn::new().if_value("/k", b"1")).await);
    assert!(!holds(Txn::new().if_value("/none", b"")).await);
    assert!(holds(Txn::new().if_lease("/k", lease.id())).await);
    assert!(holds(Txn::new().if_absent("/none").if_mod_revision("/none", 0)).await);
    assert!(!holds(Txn::new().if_absent("/none").if_absent("/k")).await);

    // All writes of a transaction have one revision, and its reads see it.
    let txn = Txn::new().then_put("/x", b"", None).then_put("/y", b"", None).then_delete("/k").then_list("/");
    let reply = client.txn(txn).await.unwrap();
    let read: Vec<(&str, i64)> =
        reply.reads[0].iter().map(|item| (item.key.as_str(), item.mod_revision)).collect();
    assert_eq!(read, [("/x", reply.revision), ("/y", reply.revision)]);
    // A transaction that writes nothing creates no revision.
    assert_eq!(client.txn(Txn::new().then_get("/x")).await.unwrap().revision, reply.revision);
    assert_eq!(client.txn(Txn::new().then_delete("/none")).await.unwrap().revision, reply.revision);
}

async fn a_refused_transaction_changes_nothing(store: Store) {
    let client = store.client();
    let revision = client.put("/k", b"", None).await.unwrap();
    let gone = client.lease(Duration::from_secs(30)).await.unwrap();
    let id = gone.id();
    gone.revoke().await.unwrap();
    let refused = client.txn(Txn::new().then_put("/a", b"", None).then_put("/b", b"", Some(id))).await;
    assert!(matches!(refused, Err(CoordError::LeaseLost { .. })), "{refused:?}");
    let refused = client.txn(Txn::new().then_put("/a", b"1", None).then_put("/a", b"2", None)).await;
    assert!(refused.unwrap_err().to_string().contains("duplicate key"));
    let refused = client.txn(Txn::new().then_put("/a/b", b"1", None).then_delete_prefix("/a/")).await;
    assert!(refused.unwrap_err().to_string().contains("duplicate key"));
    let listing = client.list("/").await.unwrap();
    assert_eq!((listing.revision, listing.items.len()), (revision, 1));
}

async fn keys_of_a_killed_holder_are_removed_with_its_lease(store: Store) {
    let client = store.client();
    let mut watch = client.watch_after("/held", &client.list("/held").await.unwrap());
    let mut command = role("holder");
    command.env("COORD_PORT", store.port.to_string()).env("COORD_KEY", "/held");
    let mut holder = command.spawn().unwrap();
    let event = watch.next().await.unwrap();
    assert!(matches!(&event, WatchEvent::Put { now, .. } if now.lease.is_some()), "{event:?}");

    // Longer than its lease: the lease is kept alive.
    let quiet = tokio::time::timeout(Duration::from_secs(4), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    holder.kill().unwrap();
    holder.wait().unwrap();
    let event = watch.next().await.unwrap();
    let before = match event {
        WatchEvent::Deleted { before: Some(before), .. } => before,
        other => panic!("{other:?}"),
    };
    assert_eq!(before.value, b"held");
    assert_eq!(client.get("/held").await.unwrap(), None);
}

async fn a_lease_survives_a_restart_of_the_store(mut store: Store) {
    let client = store.client();
    let lease = client.lease(Duration::from_secs(6)).await.unwrap();
    client.put("/k", b"", Some(lease.id())).await.unwrap();
    let mut state = lease.state();
    store.kill();
    state.wait_for(|state| matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
    store.resume().await;
    let last = *state.wait_for(|state| !matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
    assert_eq!(last, LeaseState::Kept);
    assert!(client.get("/k").await.unwrap().is_some());
    assert!(client.lease_time_left(lease.id()).await.unwrap().is_some());
}

async fn a_revoked_lease_is_reported_lost_and_its_keys_are_removed(store: Store) {
    let client = store.client();
    let lease = client.lease(Duration::from_secs(3)).await.unwrap();
    client.put("/a", b"", Some(lease.id())).await.unwrap();
    client.put("/b", b"", Some(lease.id())).await.unwrap();
    // A key that was rewritten without the lease is not removed with it.
    client.put("/b", b"", None).await.unwrap();
    let other = store.client().lease(Duration::from_secs(60)).await.unwrap();
    assert_ne!(other.id(), lease.id());
    let mut watch = client.watch_after("/", &client.list("/").await.unwrap());
    // Another client revokes it: the keeper notices at its next keep-alive.
    revoke_as_other(&store, lease.id().0).await;
    lease.lost().await;
    let event = watch.next().await.unwrap();
    assert!(matches!(&event, WatchEvent::Deleted { key, .. } if key == "/a"), "{event:?}");
    let left: Vec<String> = client.list("/").await.unwrap().items.into_iter().map(|item| item.key).collect();
    assert_eq!(left, ["/b"]);
    assert_eq!(client.lease_time_left(lease.id()).await.unwrap(), None);
    let refused = client.put("/c", b"", Some(lease.id())).await;
    assert!(matches!(refused, Err(CoordError::LeaseLost { .. })), "{refused:?}");
}

async fn revoke_as_other(store: &Store, id: i64) {
    use mainstay_coord::etcd::etcdserverpb as pb;
    let address = format!("http://127.0.0.1:{}", store.port);
    let mut client = pb::lease_client::LeaseClient::connect(address).await.unwrap();
    client.lease_revoke(pb::LeaseRevokeRequest { id }).await.unwrap();
}

async fn acknowledged_writes_survive_a_kill(mut store: Store) {
    let client = store.client();
    let writer = tokio::spawn({
        let client = client.clone();
        async move {
            let mut last = 0;
            for n in 1..10_000_u32 {
                if client.txn(Txn::new().then_put("/n", n.to_string().as_bytes(), None)).await.is_err() {
                    break;
                }
                last = n;
            }
            last
        }
    });
    let mut watch = client.watch("/n", Some(1));
    for _ in 0..20 {
        watch.next().await.unwrap();
    }
    store.kill();
    let acknowledged = writer.await.unwrap();
    store.resume().await;
    let found = client.get("/n").await.unwrap().unwrap();
    let there: u32 = String::from_utf8(found.value).unwrap().parse().unwrap();
    // The write whose answer was lost may be there too.
    assert!(there == acknowledged || there == acknowledged + 1, "{acknowledged} acknowledged, {there} there");
    assert_eq!(found.version, i64::from(there));
}

async fn a_watch_reports_puts_and_deletions_with_previous_values(store: Store) {
    let client = store.client();
    let before = client.put("/w/1", b"old", None).await.unwrap();
    client.put("/v", b"", None).await.unwrap();
    let mut watch = client.watch("/w/", Some(before + 1));
    client.put("/w/1", b"new", None).await.unwrap();
    client.txn(Txn::new().then_delete("/w/1").then_put("/w/2", b"", None)).await.unwrap();
    let WatchEvent::Put { now, before: Some(old) } = watch.next().await.unwrap() else { panic!() };
    assert_eq!((now.value.as_slice(), old.value.as_slice()), (b"new".as_slice(), b"old".as_slice()));
    let WatchEvent::Deleted { key, revision, before: Some(old) } = watch.next().await.unwrap() else {
        panic!()
    };
    assert_eq!((key.as_str(), old.value.as_slice()), ("/w/1", b"new".as_slice()));
    let WatchEvent::Put { now, before: None } = watch.next().await.unwrap() else { panic!() };
    assert_eq!((now.key.as_str(), now.mod_revision), ("/w/2", revision));
}

async fn a_watch_from_a_compacted_revision_lists_and_reports_it(store: Store) {
    let client = store.client();
    let first = client.put("/c/1", b"", None).await.unwrap();
    for _ in 0..5 {
        client.put("/c/2", b"", None).await.unwrap();
    }
    client.delete("/c/1").await.unwrap();
    let last = client.put("/c/3", b"", None).await.unwrap();
    client.compact(last).await.unwrap();
    assert!(client.compact(first).await.unwrap_err().to_string().contains("compacted"));
    let mut watch = client.watch("/c/", Some(first));
    let WatchEvent::Listed { items, revision, why } = watch.next().await.unwrap() else { panic!() };
    assert_eq!((why, revision), (Relisted::Compacted, last));
    let keys: Vec<&str> = items.iter().map(|item| item.key.as_str()).collect();
    assert_eq!(keys, ["/c/2", "/c/3"]);
    client.put("/c/4", b"", None).await.unwrap();
    let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!() };
    assert_eq!(now.key, "/c/4");
}

async fn an_early_revision_can_be_read_until_it_is_compacted(store: Store) {
    use mainstay_coord::etcd::etcdserverpb as pb;
    let client = store.client();
    client.put("/a", b"1", None).await.unwrap();
    let early = client.put("/b", b"1", None).await.unwrap();
    client.put("/a", b"2", None).await.unwrap();
    client.delete("/b").await.unwrap();
    let last = client.put("/c", b"1", None).await.unwrap();
    let address = format!("http://127.0.0.1:{}", store.port);
    let mut raw = pb::kv_client::KvClient::connect(address).await.unwrap();
    let mut at = async |revision: i64| {
        let (key, range_end) = (b"/".to_vec(), b"0".to_vec());
        let found = raw.range(pb::RangeRequest { key, range_end, revision, ..Default::default() }).await?;
        let found = found.into_inner().kvs.into_iter();
        Ok::<_, tonic::Status>(found.map(|item| (item.key, item.value)).collect::<Vec<_>>())
    };
    let pair = |key: &str, value: &str| (key.as_bytes().to_vec(), value.as_bytes().to_vec());
    assert_eq!(at(early).await.unwrap(), [pair("/a", "1"), pair("/b", "1")]);
    assert_eq!(at(early + 1).await.unwrap(), [pair("/a", "2"), pair("/b", "1")]);
    assert_eq!(at(0).await.unwrap(), [pair("/a", "2"), pair("/c", "1")]);
    let future = at(last + 1).await.unwrap_err();
    assert_eq!(future.code(), tonic::Code::OutOfRange);
    client.compact(last).await.unwrap();
    let gone = at(early).await.unwrap_err();
    assert_eq!(gone.code(), tonic::Code::OutOfRange);
    assert!(gone.message().contains("compacted"), "{gone:?}");
    assert_eq!(at(last).await.unwrap().len(), 2);
}

async fn errors_name_the_cause(store: Store) {
    let client = store.client();
    let empty = client.put("", b"", None).await.unwrap_err().to_string();
    let without_port = |error: &str| error.replace(&store.port.to_string(), "PORT");
    assert!(empty.contains(&store.port.to_string()), "{empty}");
    testing::snapshot!("errors", "an empty key", without_port(&empty));
    let large = client.put("/large", &vec![0; 1_800_000], None).await.unwrap_err().to_string();
    testing::snapshot!("errors", "a large value", without_port(&large));
    let many = (0..200).fold(Txn::new(), |txn, n| txn.then_put(&format!("/{n}"), b"", None));
    let many = client.txn(many).await.unwrap_err().to_string();
    testing::snapshot!("errors", "many operations", without_port(&many));
    assert!(client.status().await.unwrap().revision >= 1);
}

async fn jobs_of_one_cluster_do_not_see_each_other(store: Store) {
    let (one, other) = (store.client(), store.client());
    // The name of one job is a prefix of another's.
    let mut watch = one.watch_after("/jobs/a/", &one.list("/jobs/a/").await.unwrap());
    other.put("/jobs/ab/x", b"", None).await.unwrap();
    other.put("/jobs/a", b"", None).await.unwrap();
    other.put("/jobs/b/x", b"", None).await.unwrap();
    one.put("/jobs/a/x", b"", None).await.unwrap();
    let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!() };
    assert_eq!(now.key, "/jobs/a/x");
    assert_eq!(one.list("/jobs/a/").await.unwrap().items.len(), 1);
    one.delete_prefix("/jobs/a/").await.unwrap();
    assert_eq!(other.list("/jobs/").await.unwrap().items.len(), 3);
}
