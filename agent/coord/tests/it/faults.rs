//! Broken and silent connections, and stores that are stalled, wiped or down.

use std::time::Duration;

use mainstay_coord::{Client, LeaseState, Relisted, Settings, Txn, WatchEvent};
use nix::sys::signal::{Signal, kill};

use crate::contract;
use crate::proxy::Proxy;
use testing::free_port;

use crate::stores::{Kind, Store, Ways, endpoint};

contract!(
    a_watch_over_broken_connections_neither_misses_nor_repeats_events,
    a_watch_on_a_silent_connection_continues,
    a_watch_continues_after_a_restart_of_the_store,
    a_lease_is_lost_only_after_its_ttl_without_an_answer,
    a_transaction_without_an_answer_is_unsure_and_not_repeated,
    the_next_endpoint_is_asked_if_one_is_down_or_silent,
    an_unreachable_store_is_reported_by_name,
    leases_survive_a_stall_of_the_store,
    watches_notice_a_wiped_store,
);

async fn a_watch_over_broken_connections_neither_misses_nor_repeats_events(store: Store) {
    const EVENTS: u32 = 300;
    let proxy = Proxy::to(store.port).await;
    let direct = store.client();
    let watched = store.client_through(proxy.port);
    let mut watch = watched.watch_after("/n/", &watched.list("/n/").await.unwrap());
    let writer = tokio::spawn(async move {
        for n in 0..EVENTS {
            direct.put("/n/x", n.to_string().as_bytes(), None).await.unwrap();
        }
    });
    for n in 0..EVENTS {
        let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!("at {n}") };
        assert_eq!(now.value, n.to_string().as_bytes(), "event {n} of {EVENTS}");
        if n % 30 == 7 {
            proxy.cut();
        }
    }
    writer.await.unwrap();
}

async fn a_watch_on_a_silent_connection_continues(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let watched = store.client_through(proxy.port);
    let mut watch = watched.watch("/s/", Some(1));
    store.client().put("/s/1", b"", None).await.unwrap();
    watch.next().await.unwrap();
    proxy.silence();
    store.client().put("/s/2", b"", None).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_secs(1), watch.next()).await.is_err());
    // Connections that were opened during the silence stay silent; the client has to open another one.
    proxy.open();
    let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!() };
    assert_eq!(now.key, "/s/2");
}

async fn a_watch_continues_after_a_restart_of_the_store(mut store: Store) {
    let client = store.client();
    let mut watch = client.watch("/r/", Some(1));
    client.put("/r/1", b"", None).await.unwrap();
    watch.next().await.unwrap();
    for n in 2..5 {
        store.kill();
        store.resume().await;
        client.put(&format!("/r/{n}"), b"", None).await.unwrap();
        let event = watch.next().await.unwrap();
        assert!(matches!(&event, WatchEvent::Put { now, .. } if now.key == format!("/r/{n}")), "{event:?}");
    }
}

async fn a_lease_is_lost_only_after_its_ttl_without_an_answer(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let client = store.client_through(proxy.port);
    let lease = client.lease(Duration::from_secs(4)).await.unwrap();
    client.put("/l", b"", Some(lease.id())).await.unwrap();
    let mut state = lease.state();
    // Broken for less than its TTL several times: kept.
    for _ in 0..3 {
        proxy.close();
        state.wait_for(|state| matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
        proxy.open();
        let now = *state.wait_for(|state| !matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
        assert_eq!(now, LeaseState::Kept);
    }
    // Broken for longer: lost, but not before the TTL.
    proxy.silence();
    let LeaseState::Unanswered { since } =
        *state.wait_for(|state| matches!(state, LeaseState::Unanswered { .. })).await.unwrap()
    else {
        panic!()
    };
    lease.lost().await;
    // The last answered keep-alive was sent a third of the TTL before the first unanswered one, and the TTL has
    // passed.
    assert!(
        since.elapsed() + lease.ttl() / 3 + Duration::from_millis(500) >= lease.ttl(),
        "{:?}",
        since.elapsed()
    );
    // The store eventually agrees.
    while store.client().get("/l").await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn a_transaction_without_an_answer_is_unsure_and_not_repeated(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let client = store.client_through(proxy.port);
    client.get("/t").await.unwrap();
    proxy.silence();
    let unsure = client.txn(Txn::new().if_absent("/t").then_put("/t", b"", None)).await.unwrap_err();
    assert!(unsure.is_unsure(), "{unsure}");

    drop(proxy);
    assert!(client.get("/t").await.unwrap_err().is_unreachable());
    // The client now knows that the old connection is gone. A refused new one is certain: nothing was sent.
    let unsent = client.txn(Txn::new().then_put("/t", b"", None)).await.unwrap_err();
    assert!(unsent.is_unreachable(), "{unsent}");
}

async fn the_next_endpoint_is_asked_if_one_is_down_or_silent(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let endpoints = vec![endpoint(free_port()), endpoint(proxy.port), endpoint(store.port)];
    let client = Client::new(Settings { endpoints, ..store.settings() }).unwrap();
    client.put("/e", b"1", None).await.unwrap();
    proxy.silence();
    client.put("/e", b"2", None).await.unwrap();
    let lease = client.lease(Duration::from_secs(3)).await.unwrap();
    client.put("/e", b"3", Some(lease.id())).await.unwrap();
    proxy.close();
    assert_eq!(client.get("/e").await.unwrap().unwrap().value, b"3");
    let mut watch = client.watch("/e", Some(1));
    for _ in 0..3 {
        watch.next().await.unwrap();
    }
}

async fn an_unreachable_store_is_reported_by_name(mut store: Store) {
    let client = store.client();
    client.get("/x").await.unwrap();
    store.kill();
    let error = client.get("/x").await.unwrap_err();
    assert!(error.is_unreachable(), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("127.0.0.1:{}", store.port)), "{text}");
}

async fn leases_survive_a_stall_of_the_store(store: Store) {
    let client = store.client();
    let lease = client.lease(Duration::from_secs(4)).await.unwrap();
    client.put("/still", b"", Some(lease.id())).await.unwrap();
    let mut state = lease.state();
    kill(store.pid(), Signal::SIGSTOP).unwrap();
    state.wait_for(|state| matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
    kill(store.pid(), Signal::SIGCONT).unwrap();
    let now = *state.wait_for(|state| !matches!(state, LeaseState::Unanswered { .. })).await.unwrap();
    assert_eq!(now, LeaseState::Kept);
    assert!(client.get("/still").await.unwrap().is_some());
}

async fn watches_notice_a_wiped_store(mut store: Store) {
    let client = store.client();
    for _ in 0..20 {
        client.put("/z/1", b"", None).await.unwrap();
    }
    let mut watch = client.watch_after("/z/", &client.list("/z/").await.unwrap());
    store.kill();
    let mut other = Store::start(store.kind, Ways::default()).await;
    other.kill();
    // Another store at the same port, with its own key.
    std::mem::swap(&mut other.data, &mut store.data);
    store.resume().await;
    client.put("/z/2", b"", None).await.unwrap();
    let event = watch.next().await.unwrap();
    let WatchEvent::Listed { items, why, .. } = event else { panic!("{event:?}") };
    assert_eq!(why, Relisted::StoreReplaced);
    // The listing ran before or after the write. If before, an event has the key.
    if items.is_empty() {
        let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!() };
        assert_eq!(now.key, "/z/2");
    } else {
        assert_eq!(items[0].key, "/z/2");
    }
}

#[tokio::test]
async fn a_directory_that_another_store_uses_is_reported() {
    let store = Store::start(Kind::Builtin, Ways::default()).await;
    let mut options = mainstay_coord::ServerOptions::new(([127, 0, 0, 1], 0).into());
    options.directory = Some(store.data.path().join("store"));
    let error = mainstay_coord::Server::start(options).await.unwrap_err().to_string();
    let directory = store.data.path().display().to_string();
    testing::snapshot!("errors", "a directory of another store", error.replace(&directory, "DATA"));
}
