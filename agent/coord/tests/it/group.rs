//! The group of a job's launchers.

use std::time::Duration;

use mainstay_coord::{
    Client, CoordError, Fitness, Gone, Group, GroupEvent, GroupOptions, GroupWatch, JobId, Leadership,
    Member, MemberState, Membership, Relisted, WatchEvent,
};
use serde_json::{Value, json};

use crate::contract;
use crate::proxy::Proxy;
use crate::stores::{Store, Ways};

contract!(
    members_join_change_and_leave,
    a_launcher_that_vanishes_is_reported_when_its_lease_ends,
    each_new_leader_has_a_greater_epoch,
    a_slow_leader_is_superseded,
    only_the_dead_leader_is_deposed,
    a_candidate_that_stopped_waiting_does_not_lead,
    record_and_rounds_are_passed_to_the_next_leader,
    after_the_store_is_wiped_members_rejoin_and_epochs_grow,
    an_ended_job_leaves_only_the_note_of_its_end,
    members_join_again_when_a_note_that_no_leader_wrote_is_removed,
    jobs_do_not_see_each_other,
    all_launchers_get_the_same_secret,
    values_of_newer_versions_are_reported_and_not_overwritten,
    a_member_rejoins_after_the_store_was_down_longer_than_its_lease,
);

const OPTIONS: GroupOptions = GroupOptions {
    member_ttl: Duration::from_secs(3),
    retention: Duration::from_secs(600),
    farewell: Duration::from_secs(60),
};

fn group(client: Client, job: &str) -> Group {
    Group::new(client, job.parse::<JobId>().unwrap(), OPTIONS)
}

fn member(launch: &str) -> Member {
    Member { ranks: 4, ..Member::new(launch, format!("host-of-{launch}")) }
}

async fn join(store: &Store, launch: &str) -> (Group, Membership) {
    let group = group(store.client(), "job");
    let membership = group.join(member(launch)).await.unwrap();
    (group, membership)
}

/// The next event that the function accepts; others are skipped.
async fn until<T>(watch: &mut GroupWatch, mut take: impl FnMut(GroupEvent) -> Option<T>) -> T {
    loop {
        if let Some(taken) = take(watch.next().await.unwrap()) {
            return taken;
        }
    }
}

fn superseded(result: Result<impl Sized, CoordError>) -> (u64, Option<String>) {
    match result {
        Err(CoordError::Superseded { epoch, by, .. }) => (epoch, by),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a superseded leader wrote"),
    }
}

async fn members_join_change_and_leave(store: Store) {
    let (group, a) = join(&store, "a").await;
    let mut watch = group.watch();
    let GroupEvent::Snapshot(state) = watch.next().await.unwrap() else { panic!() };
    assert_eq!(state.members.keys().collect::<Vec<_>>(), ["a"]);
    let (_, b) = join(&store, "b").await;
    let GroupEvent::Joined(joined) = watch.next().await.unwrap() else { panic!() };
    assert_eq!(joined, member("b"));
    let changed = Member { fitness: Fitness::Unfit { why: "ECC".to_owned() }, spare: true, ..member("b") };
    b.update(changed.clone()).await.unwrap();
    let event = watch.next().await.unwrap();
    assert_eq!(event, GroupEvent::Changed { now: changed.clone(), before: member("b") });
    b.goodbye("maintenance").await.unwrap();
    let GroupEvent::Changed { now, .. } = watch.next().await.unwrap() else { panic!() };
    assert_eq!(now.leaving.as_deref(), Some("maintenance"));
    let GroupEvent::Left { member, why } = watch.next().await.unwrap() else { panic!() };
    assert_eq!((member.launch.as_str(), why), ("b", Gone::Goodbye("maintenance".to_owned())));
    assert_eq!(watch.state().members.len(), 1);
    assert_eq!(a.rejoins(), 0);
}

async fn a_launcher_that_vanishes_is_reported_when_its_lease_ends(store: Store) {
    let (group, _a) = join(&store, "a").await;
    let (_, b) = join(&store, "b").await;
    let mut watch = group.watch();
    watch.next().await.unwrap();
    // Its task ends as if the process died, without a message to the store.
    drop(b);
    let GroupEvent::Left { member, why } = watch.next().await.unwrap() else { panic!() };
    assert_eq!((member.launch.as_str(), why), ("b", Gone::LeaseEnded));
}

async fn each_new_leader_has_a_greater_epoch(store: Store) {
    let (group, _observer) = join(&store, "observer").await;
    let mut watch = group.watch();
    let mut candidates = Vec::new();
    for n in 0..5 {
        let (_, membership) = join(&store, &format!("c{n}")).await;
        candidates.push(tokio::spawn(async move {
            let leadership = membership.campaign().await.unwrap();
            let epoch = leadership.epoch();
            leadership.write_record(json!({ "epoch": epoch })).await.unwrap();
            leadership.resign().await.unwrap();
            (epoch, membership)
        }));
    }
    let mut epochs = Vec::new();
    for candidate in candidates {
        epochs.push(candidate.await.unwrap().0);
    }
    epochs.sort_unstable();
    assert_eq!(epochs, [1, 2, 3, 4, 5]);
    // The watch sees them in sequence: no leader before the end of the previous one.
    let (mut leading, mut seen) = (None, Vec::new());
    while seen.len() < 5 || leading.is_some() {
        match watch.next().await.unwrap() {
            GroupEvent::Elected(leader) => {
                assert_eq!(leading, None);
                leading = Some(leader.epoch);
                seen.push(leader.epoch);
            }
            GroupEvent::LeaderGone(leader) => assert_eq!(leading.take(), Some(leader.epoch)),
            _ => {}
        }
    }
    assert_eq!(seen, [1, 2, 3, 4, 5]);
    assert_eq!(group.highest_epoch(), 5);
}

async fn a_slow_leader_is_superseded(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let slow_group = group(store.client_through(proxy.port), "job");
    let slow = slow_group.join(member("slow")).await.unwrap();
    let first = slow.campaign().await.unwrap();
    first.write_record(json!("first")).await.unwrap();
    let (_, other) = join(&store, "other").await;
    proxy.silence();
    let second = other.campaign().await.unwrap();
    assert_eq!((first.epoch(), second.epoch()), (1, 2));
    assert_eq!(second.record().unwrap().body::<Value>().unwrap(), json!("first"));
    // The old leader notices it by its own clock, without the store.
    first.lost().await;
    assert!(first.is_lost());
    proxy.open();
    second.write_record(json!("second")).await.unwrap();
    let (epoch, by) = superseded(first.write_record(json!("late")).await);
    assert_eq!(epoch, 1);
    testing::snapshot!("errors", "a leader that is replaced", by.unwrap_or_default());
    superseded(first.publish_round(1, Value::Null, None).await);
    superseded(first.confirm().await);
    superseded(first.end("late", Value::Null).await);
    second.confirm().await.unwrap();
    let state = slow_group.state().await.unwrap();
    assert_eq!(state.record.unwrap().body::<Value>().unwrap(), json!("second"));
    assert_eq!((state.round, state.leader.unwrap().epoch), (None, 2));
}

async fn only_the_dead_leader_is_deposed(store: Store) {
    let (group, a) = join(&store, "a").await;
    let (_, b) = join(&store, "b").await;
    let first = a.campaign().await.unwrap();
    let dead = group.state().await.unwrap().leader.unwrap();
    let next = tokio::spawn(async move { (b.campaign().await.unwrap(), b) });
    group.depose(&dead).await.unwrap();
    let (second, _b) = next.await.unwrap();
    assert_eq!((second.epoch(), a.rejoins()), (first.epoch() + 1, 0), "its lease still runs");
    // Another follower, which detects the death later.
    group.depose(&dead).await.unwrap();
    second.confirm().await.unwrap();
    // The deposed leader was still alive.
    assert_eq!(superseded(first.write_record(json!(1)).await).0, first.epoch());
}

async fn a_candidate_that_stopped_waiting_does_not_lead(store: Store) {
    let (_, a) = join(&store, "a").await;
    let (_, b) = join(&store, "b").await;
    let (_, c) = join(&store, "c").await;
    let first = a.campaign().await.unwrap();
    let waited = tokio::time::timeout(Duration::from_millis(300), b.campaign()).await;
    assert!(waited.is_err());
    // Dropped during an election that it may win.
    for _ in 0..5 {
        let _ = tokio::time::timeout(Duration::from_millis(1), b.campaign()).await;
    }
    first.resign().await.unwrap();
    let second = c.campaign().await.unwrap();
    second.confirm().await.unwrap();
    assert!(second.epoch() >= 2);
}

async fn record_and_rounds_are_passed_to_the_next_leader(store: Store) {
    let (group, a) = join(&store, "a").await;
    let first = a.campaign().await.unwrap();
    assert!(first.record().is_none() && first.round().is_none());
    let mut watch = group.watch();
    watch.next().await.unwrap();
    first.publish_round(1, json!({ "ranks": [0, 1] }), Some(json!({ "attempts": 1 }))).await.unwrap();
    let published = until(&mut watch, |event| match event {
        GroupEvent::RoundPublished(round) => Some(round),
        _ => None,
    });
    let published = published.await;
    assert_eq!((published.round, published.epoch, &published.body["ranks"][1]), (1, 1, &json!(1)));
    let again = first.publish_round(1, Value::Null, None).await.unwrap_err().to_string();
    testing::snapshot!("errors", "a round that exists", again);
    first.resign().await.unwrap();
    let (_, b) = join(&store, "b").await;
    let second = b.campaign().await.unwrap();
    assert_eq!(second.record().unwrap().body::<Value>().unwrap(), json!({ "attempts": 1 }));
    assert_eq!(second.round().unwrap().round, 1);
    assert!(second.publish_round(1, Value::Null, None).await.is_err());
    second.publish_round(2, json!({}), None).await.unwrap();
    let state = group.state().await.unwrap();
    assert_eq!((state.round.unwrap().epoch, state.record.unwrap().epoch), (2, 2));
}

async fn after_the_store_is_wiped_members_rejoin_and_epochs_grow(mut store: Store) {
    let (group, a) = join(&store, "a").await;
    let (_, b) = join(&store, "b").await;
    let first = a.campaign().await.unwrap();
    first.resign().await.unwrap();
    let second = a.campaign().await.unwrap();
    assert_eq!(second.epoch(), 2);
    let mut watch = group.watch();
    watch.next().await.unwrap();
    store.kill();
    let mut empty = Store::start(store.kind, Ways::default()).await;
    empty.kill();
    std::mem::swap(&mut empty.data, &mut store.data);
    store.resume().await;
    second.lost().await;
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 2 {
        match watch.next().await.unwrap() {
            GroupEvent::Snapshot(state) => seen = state.members.into_keys().collect(),
            GroupEvent::Joined(member) => {
                seen.insert(member.launch);
            }
            _ => {}
        }
    }
    assert!(a.rejoins() >= 1);
    let third = a.campaign().await.unwrap();
    assert_eq!(third.epoch(), 3, "the epoch grows though the store remembers none");
    superseded(second.write_record(Value::Null).await);
    b.goodbye("").await.unwrap();
}

async fn an_ended_job_leaves_only_the_note_of_its_end(store: Store) {
    let (group, a) = join(&store, "a").await;
    let (_, b) = join(&store, "b").await;
    let leadership = a.campaign().await.unwrap();
    leadership.publish_round(1, json!({}), Some(json!({}))).await.unwrap();
    group.secret().await.unwrap();
    let mut watch = group.watch();
    watch.next().await.unwrap();
    let waiting = tokio::spawn(async move { (b.campaign().await.map(|_| ()), b) });
    leadership.end("all steps done", json!({ "steps": 100 })).await.unwrap();
    let ended = until(&mut watch, |event| match event {
        GroupEvent::Ended(ended) => Some(ended),
        _ => None,
    });
    let ended = ended.await;
    assert_eq!((ended.why.as_str(), ended.epoch), ("all steps done", 1));
    let (refused, b) = waiting.await.unwrap();
    assert!(matches!(refused, Err(CoordError::Ended { why, .. }) if why == "all steps done"));
    // No update creates a key again.
    assert!(matches!(b.update(member("b")).await, Err(CoordError::Ended { .. })));
    let left = store.client().list("/mainstay/v1/jobs/job/").await.unwrap();
    let keys: Vec<&str> = left.items.iter().map(|item| item.key.as_str()).collect();
    assert_eq!(keys, ["/mainstay/v1/jobs/job/ended"]);
    assert!(left.items[0].lease.is_some(), "it expires");
    let late = group.join(member("late")).await.unwrap_err();
    assert!(matches!(late, CoordError::Ended { .. }), "{late}");
    testing::snapshot!("errors", "a job that has ended", late);
    group.forget_end(|ended| ended.epoch == 1).await.unwrap();
    assert!(group.join(member("late")).await.is_err(), "the note that is kept");
    group.forget_end(|_| false).await.unwrap();
    group.join(member("next")).await.unwrap();
}

async fn members_join_again_when_a_note_that_no_leader_wrote_is_removed(store: Store) {
    let (group, a) = join(&store, "a").await;
    let stranger = store.client();
    for note in [&br#"{"epoch": 9, "why": "", "needs": 1}"#[..], b"garbage"] {
        stranger.put("/mainstay/v1/jobs/job/ended", note, None).await.unwrap();
        let members = stranger.list("/mainstay/v1/jobs/job/members/").await.unwrap();
        let lease = members.items.first().and_then(|item| item.lease);
        stranger.revoke(lease.unwrap()).await.unwrap();
        let mut state = a.state();
        state.wait_for(|state| *state == MemberState::Ended).await.unwrap();
        group.forget_end(|ended| ended.epoch == 1).await.unwrap();
        state.wait_for(|state| *state == MemberState::Kept).await.unwrap();
        assert!(group.state().await.unwrap().members.contains_key("a"));
    }
    let leadership = a.campaign().await.unwrap();
    leadership.end("", Value::Null).await.unwrap();
}

async fn jobs_do_not_see_each_other(store: Store) {
    let (one, two) = (group(store.client(), "job"), group(store.client(), "job-2"));
    let mut watch = one.watch();
    watch.next().await.unwrap();
    let a = one.join(member("a")).await.unwrap();
    let b = two.join(member("b")).await.unwrap();
    let (first, second) = (a.campaign().await.unwrap(), b.campaign().await.unwrap());
    second.publish_round(1, json!({}), None).await.unwrap();
    assert_ne!(one.secret().await.unwrap(), two.secret().await.unwrap());
    second.end("", Value::Null).await.unwrap();
    first.publish_round(1, json!("own"), None).await.unwrap();
    let round = until(&mut watch, |event| match event {
        GroupEvent::RoundPublished(round) => Some(round),
        GroupEvent::Joined(member) => {
            assert_eq!(member.launch, "a");
            None
        }
        GroupEvent::Ended(_) => panic!("the end of another job"),
        _ => None,
    });
    assert_eq!(round.await.body, json!("own"));
    assert_eq!(one.state().await.unwrap().members.len(), 1);
    for wrong in ["", "a/b", "../x", "a b", &"x".repeat(129)] {
        assert!(wrong.parse::<JobId>().is_err(), "{wrong}");
    }
}

async fn all_launchers_get_the_same_secret(store: Store) {
    let mut asked = Vec::new();
    for _ in 0..6 {
        let group = group(store.client(), "job");
        asked.push(tokio::spawn(async move { group.secret().await.unwrap() }));
    }
    let mut secrets = std::collections::BTreeSet::new();
    for secret in asked {
        secrets.insert(secret.await.unwrap());
    }
    assert_eq!(secrets.len(), 1);
    let secret = secrets.pop_first().unwrap();
    assert_eq!(secret.len(), 64);
    // A leader takes it over: it is kept as long as a leader exists.
    let (group, a) = join(&store, "a").await;
    let lease = |item: Option<mainstay_coord::KeyValue>| item.unwrap().lease;
    let key = "/mainstay/v1/jobs/job/secret";
    let before = lease(store.client().get(key).await.unwrap());
    let _leads: Leadership = a.campaign().await.unwrap();
    assert_ne!(lease(store.client().get(key).await.unwrap()), before);
    assert_eq!(group.secret().await.unwrap(), secret);
}

async fn values_of_newer_versions_are_reported_and_not_overwritten(store: Store) {
    let (group, a) = join(&store, "a").await;
    let client = store.client();
    let mut watch = group.watch();
    watch.next().await.unwrap();
    client.put("/mainstay/v1/jobs/job/members/new", br#"{"needs": 7, "odd": 1}"#, None).await.unwrap();
    let GroupEvent::Unreadable { key, why } = watch.next().await.unwrap() else { panic!() };
    assert!(key.ends_with("/members/new"), "{key}");
    testing::snapshot!("errors", "a member of a newer version", why);
    // An unreadable member does not block the others.
    let first = a.campaign().await.unwrap();
    first.resign().await.unwrap();
    let newer = br#"{"needs": 7, "epoch": 1}"#;
    client.put("/mainstay/v1/jobs/job/record", newer, None).await.unwrap();
    let error = a.campaign().await.unwrap_err();
    testing::snapshot!("errors", "a record of a newer version", error);
    assert_eq!(client.get("/mainstay/v1/jobs/job/record").await.unwrap().unwrap().value, newer);
}

async fn a_member_rejoins_after_the_store_was_down_longer_than_its_lease(store: Store) {
    let proxy = Proxy::to(store.port).await;
    let group = group(store.client_through(proxy.port), "job");
    let membership = group.join(member("a")).await.unwrap();
    let mut state = membership.state();
    let mut keys = store.client().watch("/mainstay/", Some(1));
    assert!(matches!(keys.next().await.unwrap(), WatchEvent::Put { .. }));
    proxy.close();
    state.wait_for(|state| matches!(state, MemberState::Unanswered { .. })).await.unwrap();
    state.wait_for(|state| *state == MemberState::Lost).await.unwrap();
    // Updates in the meantime are not lost.
    membership.update(Member { spare: true, ..member("a") }).await.unwrap();
    loop {
        match keys.next().await.unwrap() {
            WatchEvent::Deleted { .. } => break,
            WatchEvent::Listed { why: Relisted::Compacted, .. } => panic!(),
            _ => {}
        }
    }
    proxy.open();
    state.wait_for(|state| *state == MemberState::Kept).await.unwrap();
    assert_eq!(membership.rejoins(), 1);
    assert!(group.state().await.unwrap().members["a"].spare);
}
