//! Placement of replicas, whole steps, retention and restore plans: for clusters of all shapes, and in a simulation
//! that loses hosts at any point.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::decision::{DecisionReply, Decisions};
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, StepState, restorable, steps};
use mainstay_checkpoint::placement::{Host, Rules, groups, place};
use mainstay_checkpoint::plan::plan;
use mainstay_checkpoint::prepared_memory::expected;
use mainstay_checkpoint::retention::{Retention, counting, deletable, repairs};
use proptest::prelude::*;

fn host(name: &str, domain: &str) -> Host {
    Host { name: name.to_owned(), domain: domain.to_owned(), usable: true, excluded: false }
}

fn key(step: u64, attempt: u64, world: u32) -> StepKey {
    StepKey { step, job: "job.2".into(), run: "job".into(), attempt, world }
}

fn copy(holder: &str, own: bool, key: &StepKey, rank: u32) -> Copy {
    let root = format!("{}-{}-{rank}", key.step, key.attempt);
    let shard =
        Shard { key: key.clone(), rank, root, bytes: 100, created: key.step.cast_signed(), piece: None };
    Copy { holder: holder.into(), medium: Medium::Disk, own, verified: true, shard }
}

fn newest_whole(copies: &[Copy], run: &str) -> Option<StepState> {
    choose(copies, RestoreRequest { run: Some(run), ..RestoreRequest::default() }).step.map(StepState::owned)
}

fn rules(copies: usize) -> Rules {
    Rules { copies, ..Rules::default() }
}

/// The client's tests read the same file: on one host the ranks choose.
#[test]
fn the_leader_chooses_the_step_that_ranks_of_one_host_would_choose() {
    let cases: serde_json::Value = serde_json::from_str(include_str!("../choices.json")).unwrap();
    for case in cases.as_array().unwrap() {
        let world = case["world"].as_u64().unwrap();
        let saved = case["saved"].as_array().unwrap().iter().map(|shard| {
            let number = |name: &str, otherwise| shard[name].as_u64().unwrap_or(otherwise);
            let ranks = u32::try_from(number("of", world)).unwrap();
            let run = format!("job@{}", shard["launch"].as_str().unwrap_or("a")).into();
            let step_key = StepKey { run, ..key(number("step", 0), number("attempt", 0), ranks) };
            copy("a", true, &step_key, u32::try_from(number("rank", 0)).unwrap())
        });
        let saved: Vec<Copy> = saved.collect();
        let wanted = RestoreRequest { world: u32::try_from(world).ok(), ..RestoreRequest::default() };
        let chosen = choose(&saved, wanted).key().map(|key| key.step);
        assert_eq!(chosen, case["chosen"].as_u64(), "{}", case["case"]);
    }
}

#[test]
fn a_restore_also_uses_replicas_that_are_not_verified_yet_but_no_damaged_shard_of_its_owner() {
    let step_key = key(10, 0, 2);
    let unverified =
        |holder: &str, own: bool, rank: u32| Copy { verified: false, ..copy(holder, own, &step_key, rank) };
    let replicas = vec![unverified("a", false, 0), unverified("b", false, 1)];
    assert!(newest_whole(&replicas, "job").is_none());
    assert_eq!(newest_whole(&restorable(replicas), "job").unwrap().key, step_key);
    let damaged = vec![unverified("a", true, 0), copy("b", false, &step_key, 1)];
    assert!(newest_whole(&restorable(damaged), "job").is_none());
}

#[test]
fn a_step_is_whole_if_one_attempt_has_a_verified_shard_of_every_rank() {
    let (old, new) = (key(10, 0, 2), key(10, 1, 2));
    // Two attempts each saved half of the same step: together they are not a whole step.
    let mut copies = vec![copy("a", true, &old, 0), copy("b", true, &new, 1)];
    assert!(newest_whole(&copies, "job").is_none());
    copies.push(copy("c", false, &new, 0));
    let whole = newest_whole(&copies, "job").unwrap();
    assert_eq!((whole.key.attempt, whole.least_copies(), whole.missing(9)), (1, 1, vec![]));
    copies[2].verified = false;
    assert!(newest_whole(&copies, "job").is_none(), "unverified copies do not count");
    assert_eq!(steps(&copies, Some("job"))[0].missing(9), [0]);
    assert!(steps(&copies, Some("another")).is_empty());
}

#[test]
fn of_a_shard_sealed_twice_only_the_later_one_counts() {
    let step_key = key(5, 0, 1);
    let mut again = copy("a", true, &step_key, 0);
    again.shard.root = "later".to_owned();
    again.shard.created += 1;
    let whole = newest_whole(&[copy("b", false, &step_key, 0), again], "job").unwrap();
    assert_eq!(whole.ranks[&0].len(), 1);
    assert_eq!(whole.ranks[&0][0].shard.root, "later");
}

#[test]
fn memory_is_prepared_where_a_step_may_arrive_and_none_can_be_reused() {
    let (small, large) = (key(20, 0, 1), StepKey { run: "large".into(), ..key(10, 0, 2) });
    let sized = |holder: &str, own, step_key: &StepKey, rank, bytes| {
        let mut copy = copy(holder, own, step_key, rank);
        copy.shard.root.push_str(&step_key.run);
        copy.shard.bytes = bytes;
        copy
    };
    let mut copies = vec![sized("a", true, &small, 0, 50), sized("a", true, &large, 0, 70)];
    assert_eq!(expected(&copies, "standby", &[], 1), [50], "an incomplete step is not sent");
    copies.push(sized("b", true, &large, 1, 80));
    assert_eq!(expected(&copies, "standby", &[], 1), [80, 70], "the larger of two runs");
    copies.push(sized("standby", false, &small, 0, 50));
    assert_eq!(expected(&copies, "standby", &[], 1), [80, 70], "a replica is not a shard of its own ranks");
    assert!(expected(&copies, "a", &[], 1).is_empty(), "it has the shards of its ranks");
    assert_eq!(
        expected(&copies, "c", &[30, 40], 2),
        [40, 40, 30, 30],
        "it sends two replicas of each shard and receives as many"
    );
    assert!(expected(&copies, "standby", &[30, 40], 2).is_empty(), "it reuses memory of older replicas");
}

#[test]
fn launches_of_a_run_are_found_by_run_id_and_not_mixed() {
    let key_of_launch = |launch: &str| StepKey { run: format!("job@{launch}").into(), ..key(5, 0, 2) };
    let mut copies =
        vec![copy("a", true, &key_of_launch("a-17"), 0), copy("b", true, &key_of_launch("b-4"), 1)];
    assert!(newest_whole(&copies, "job").is_none(), "half a step of each launch");
    copies.push(copy("a", true, &key_of_launch("a-17"), 1));
    assert_eq!(newest_whole(&copies, "job").unwrap().key.run, "job@a-17");
    assert!(newest_whole(&copies, "jo").is_none());
}

#[test]
fn a_rank_outside_its_world_makes_no_step_whole() {
    let step_key = key(5, 0, 1);
    assert!(newest_whole(&[copy("a", true, &step_key, 7)], "job").is_none());
    assert!(newest_whole(&[copy("a", true, &key(5, 0, 0), 0)], "job").is_none());
}

#[test]
fn replicas_go_to_the_own_domain_or_a_pipeline_neighbour_only_as_a_last_resort() {
    let mut hosts = vec![host("a", "r1"), host("b", "r1"), host("c", "r2"), host("d", "r3")];
    let avoid = Rules { copies: 1, avoid: BTreeSet::from(["c".to_owned()]), parity: None };
    assert_eq!(place("a", &hosts, &avoid).hosts, ["d"]);
    hosts[3].usable = false;
    let placement = place("a", &hosts, &avoid);
    assert_eq!(placement.hosts, ["c"]);
    testing::snapshot!(
        "messages",
        "checkpoint: replicas go to the own domain or a pipeline neighbour only as a last resort",
        placement.compromises[0]
    );
    hosts[2].usable = false;
    let placement = place("a", &hosts, &avoid);
    assert_eq!(placement.hosts, ["b"]);
    testing::snapshot!(
        "messages",
        "checkpoint: replicas go to the own domain or a pipeline neighbour only as a last resort 2",
        placement.compromises[0]
    );
    hosts[1].usable = false;
    let placement = place("a", &hosts, &avoid);
    assert!(placement.hosts.is_empty());
    assert!(placement.compromises[0].contains("no host"), "{:?}", placement.compromises);
}

#[test]
fn a_clock_jump_does_not_change_the_order_of_steps() {
    const YEAR: i64 = 365 * 86_400;
    let sealed = |step, attempt, created| {
        let mut copy = copy("a", true, &key(step, attempt, 1), 0);
        copy.shard.created = created;
        copy
    };
    for (first, second) in [(YEAR, 0), (0, YEAR), (i64::MAX, i64::MIN)] {
        // The same step of two attempts of a launch, an earlier step and a later one.
        let copies =
            [sealed(20, 0, first), sealed(20, 1, second), sealed(10, 1, first), sealed(30, 1, second)];
        let order: Vec<(u64, u64)> =
            steps(&copies, None).iter().map(|state| (state.key.step, state.key.attempt)).collect();
        assert_eq!(order, [(30, 1), (20, 1), (20, 0), (10, 1)], "{first} and {second}");
        let gone = deletable(&steps(&copies, None), |_| false, Retention { keep: 2, copies: 1 });
        assert_eq!(gone, [key(10, 1, 1), key(20, 0, 1)], "{first} and {second}");
    }
    // Launches are ordered only by their clocks, and the attempts of a launch stay together.
    let sealed_at = |job: &str, attempt, created| {
        let mut copy = sealed(20, attempt, created);
        copy.shard.key.job = job.into();
        copy
    };
    let copies = [sealed_at("x", 0, 5), sealed_at("y", 1, 7), sealed_at("y", 2, 3)];
    let order: Vec<u64> = steps(&copies, None).iter().map(|state| state.key.attempt).collect();
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn copies_on_an_excluded_host_neither_keep_nor_free_a_step() {
    let mut hosts: Vec<Host> = ["a", "b", "c"].map(|name| host(name, name)).into();
    let (one, two) = (key(1, 0, 1), key(2, 0, 1));
    let copies: Vec<Copy> = [&one, &two]
        .into_iter()
        .flat_map(|step_key| [copy("a", true, step_key, 0), copy("b", false, step_key, 0)])
        .collect();
    let gone = |hosts: &[Host], copies: &[Copy]| {
        let (copies, wanted) = counting("a", copies.to_vec(), hosts, 2);
        deletable(&steps(&copies, None), |_| false, Retention { keep: 1, copies: wanted })
    };
    assert_eq!(gone(&hosts, &copies), std::slice::from_ref(&one));
    hosts[1].excluded = true;
    assert!(gone(&hosts, &copies).is_empty(), "the second copy that counts does not exist yet");
    let mut more = copies.clone();
    more.push(copy("c", false, &two, 0));
    assert_eq!(gone(&hosts, &more), std::slice::from_ref(&one));
    // If too few other hosts are left, fewer copies suffice, so that steps do not pile up.
    hosts[2].excluded = true;
    hosts.push(host("d", "d"));
    let mut beside_d = copies.clone();
    beside_d.push(copy("d", false, &two, 0));
    let (_, wanted) = counting("a", copies.clone(), &hosts, 3);
    assert_eq!(wanted, 2, "a and d");
    assert_eq!(gone(&hosts, &beside_d), std::slice::from_ref(&one));
    // No other host is left: all copies count again.
    hosts.pop();
    assert_eq!(gone(&hosts, &copies), [one]);
}

#[test]
fn a_plan_takes_the_nearest_copy_and_balances_the_load() {
    let step_key = key(1, 0, 4);
    let mut copies = Vec::new();
    for rank in 0..4 {
        copies.extend(["x", "y"].map(|holder| copy(holder, false, &step_key, rank)));
    }
    copies.push(copy("new", true, &step_key, 3));
    let state = newest_whole(&copies, "job").unwrap();
    let wanted = (0..4).map(|rank| (rank, vec!["new".to_owned()])).collect();
    let plan = plan(&state, &wanted);
    assert!(plan.missing.is_empty());
    assert_eq!(plan.bytes(), 300);
    let mut loads: BTreeMap<&str, usize> = BTreeMap::new();
    for transfer in &plan.transfers {
        assert_eq!(transfer.is_local(), transfer.rank == 3);
        *loads.entry(&transfer.sources[0].holder).or_default() += 1;
    }
    assert_eq!((loads["x"].abs_diff(loads["y"]), loads["new"]), (1, 1));
    // A peer's memory is nearer than a peer's disk. Durable storage comes last.
    let mut near = copies.clone();
    near.retain(|copy| copy.holder != "new");
    near.iter_mut().filter(|copy| copy.holder == "y").for_each(|copy| copy.medium = Medium::Memory);
    let mut far = copy("bucket", false, &step_key, 0);
    far.medium = Medium::Durable;
    near.push(far);
    let state = newest_whole(&near, "job").unwrap();
    let order: Vec<String> =
        sources_of_rank_0(&state).into_iter().map(|copy| copy.holder.to_string()).collect();
    assert_eq!(order, ["y", "x", "bucket"]);
}

fn sources_of_rank_0(state: &mainstay_checkpoint::inventory::StepState) -> Vec<Copy> {
    plan(state, &BTreeMap::from([(0, vec!["new".to_owned()])])).transfers.remove(0).sources
}

#[test]
fn a_plan_lists_shards_without_a_copy() {
    let state = &steps(&[copy("a", true, &key(1, 0, 3), 1)], None)[0];
    let wanted = (0..3).map(|rank| (rank, vec!["a".to_owned()])).collect();
    assert_eq!(plan(state, &wanted).missing, [0, 2]);
}

#[test]
fn no_step_is_deleted_before_a_newer_one_has_all_its_copies() {
    let retention = Retention { keep: 1, copies: 2 };
    let (one, two) = (key(1, 0, 2), key(2, 0, 2));
    let mut copies = Vec::new();
    for (rank, holder, other) in [(0, "a", "b"), (1, "b", "a")] {
        copies.extend([copy(holder, true, &one, rank), copy(other, false, &one, rank)]);
        copies.push(copy(holder, true, &two, rank));
    }
    assert!(
        deletable(&steps(&copies, None), |_| false, retention).is_empty(),
        "step 2 is whole but has one copy"
    );
    copies.push(copy("b", false, &two, 0));
    assert!(
        deletable(&steps(&copies, None), |_| false, retention).is_empty(),
        "one of its shards has one copy"
    );
    copies.push(copy("a", false, &two, 1));
    assert_eq!(deletable(&steps(&copies, None), |_| false, retention), [one]);
    assert!(deletable(&steps(&copies, None), |_| false, Retention { keep: 2, ..retention }).is_empty());
}

#[test]
fn an_incomplete_step_that_may_be_whole_is_kept_like_a_whole_one() {
    let whole = |step_key: &StepKey| {
        [
            copy("a", true, step_key, 0),
            copy("b", false, step_key, 0),
            copy("b", true, step_key, 1),
            copy("a", false, step_key, 1),
        ]
    };
    let steps_of_two = [1, 2, 3, 4, 5].map(|step| key(step, 0, 2));
    let [one, two, three, four, five] = &steps_of_two;
    let mut copies: Vec<Copy> = [one, two, five].into_iter().flat_map(whole).collect();
    // The other rank's copies are on hosts that were restarted: they are not verified yet.
    copies.extend([three, four].map(|step_key| copy("a", true, step_key, 0)));
    let gone = |keep, may_be_whole: &[&StepKey]| -> Vec<u64> {
        let retention = Retention { keep, copies: 2 };
        let gone = deletable(&steps(&copies, None), |step_key| may_be_whole.contains(&step_key), retention);
        gone.into_iter().map(|step_key| step_key.step).collect()
    };
    assert_eq!(gone(2, &[]), [3, 4, 1]);
    assert_eq!(gone(2, &[four]), [3, 1], "the two newest whole ones, and the one between");
    assert_eq!(gone(2, &[three, four]), [3, 1], "as many as if all are whole, and as if none is");
    assert_eq!(gone(1, &[three, four]), [3, 4, 1, 2], "no other is needed");
}

#[test]
fn all_hosts_of_a_round_get_one_decision_and_a_new_round_has_a_higher_number() {
    let (mut leader, mut other) = (Decisions::default(), Decisions::default());
    let (five, six) = (key(5, 0, 2), key(6, 0, 2));
    let first = leader.decide("a", "job", "a", Some(&five));
    assert_eq!(first.fence, 1);
    assert_eq!(other.store(&first), DecisionReply::Accepted);
    assert_eq!(other.store(&first), DecisionReply::Accepted, "a repeated report is accepted");
    assert_eq!(
        leader.decide("a", "job", "b", Some(&five)),
        first,
        "the second host of the round gets the same decision"
    );
    let again = leader.decide("a", "job", "b", Some(&five));
    assert_eq!(
        (again.fence, &again.step),
        (2, &Some(five.clone())),
        "a host that asks again starts a new round"
    );
    assert_eq!(leader.decide("a", "job", "a", Some(&five)), again, "and the others join it");
    assert_eq!(leader.decide("a", "job", "c", Some(&six)).fence, 3, "a newer whole step starts a new round");
    assert_eq!(other.store(&again), DecisionReply::Accepted);
    assert_eq!(other.store(&first), DecisionReply::Refused(again.clone()), "a late decision is refused");
    let rival = mainstay_checkpoint::decision::Decision { by: "b".to_owned(), step: None, ..again.clone() };
    assert_eq!(
        other.store(&rival),
        DecisionReply::Refused(again),
        "of two with the same number the first holds"
    );
}

/// Hosts in several failure domains, some of them not usable.
fn clusters() -> impl Strategy<Value = Vec<Host>> {
    prop::collection::vec((0..6_u8, prop::bool::weighted(0.85)), 1..24).prop_map(|hosts| {
        let host = |(index, (domain, usable)): (usize, (u8, bool))| Host {
            name: format!("host{index}"),
            // Domain 0: a host without a label.
            domain: if domain == 0 { String::new() } else { format!("rack{domain}") },
            usable,
            excluded: false,
        };
        hosts.into_iter().enumerate().map(host).collect()
    })
}

fn domain_of(hosts: &[Host], name: &str) -> String {
    let host = hosts.iter().find(|host| host.name == name).unwrap();
    if host.domain.is_empty() { host.name.clone() } else { host.domain.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn groups_contain_every_host_once_and_have_the_right_size(hosts in clusters(), size in 1..5_usize) {
        let groups = groups(&hosts, size);
        let mut all: Vec<&String> = groups.iter().flatten().collect();
        all.sort();
        all.dedup();
        prop_assert_eq!(all.len(), hosts.len());
        prop_assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), hosts.len());
        if hosts.len() >= size {
            prop_assert!(groups.iter().all(|group| group.len() >= size), "{:?}", groups);
            prop_assert_eq!(groups.len(), hosts.len() / size);
        }
    }

    #[test]
    fn groups_span_different_domains_if_no_domain_is_too_large(hosts in clusters(), size in 2..4_usize) {
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        for host in &hosts {
            *sizes.entry(domain_of(&hosts, &host.name)).or_default() += 1;
        }
        prop_assume!(hosts.len().is_multiple_of(size));
        prop_assume!(sizes.values().all(|count| count * size <= hosts.len()));
        for group in groups(&hosts, size) {
            let domains: BTreeSet<String> = group.iter().map(|name| domain_of(&hosts, name)).collect();
            prop_assert_eq!(domains.len(), group.len(), "{:?}", group);
        }
    }

    #[test]
    fn replicas_go_to_usable_hosts_of_other_domains_as_far_as_possible(hosts in clusters(), copies in 1..4_usize) {
        for owner in &hosts {
            let placement = place(&owner.name, &hosts, &rules(copies));
            let unique: BTreeSet<&String> = placement.hosts.iter().collect();
            prop_assert_eq!(unique.len(), placement.hosts.len());
            prop_assert!(!placement.hosts.contains(&owner.name));
            let usable: Vec<&Host> = hosts.iter().filter(|host| host.usable && host.name != owner.name).collect();
            prop_assert_eq!(placement.hosts.len(), copies.min(usable.len()));
            let own = domain_of(&hosts, &owner.name);
            let elsewhere: BTreeSet<String> =
                usable.iter().map(|host| domain_of(&hosts, &host.name)).filter(|domain| *domain != own).collect();
            let taken: BTreeSet<String> =
                placement.hosts.iter().map(|name| domain_of(&hosts, name)).filter(|domain| *domain != own).collect();
            prop_assert_eq!(taken.len(), copies.min(elsewhere.len()), "other domains come first");
            prop_assert_eq!(placement.compromises.is_empty(), elsewhere.len() >= copies);
        }
    }

    #[test]
    fn a_failed_host_moves_only_the_replicas_that_it_held(hosts in clusters(), copies in 1..3_usize, lost in any::<prop::sample::Index>()) {
        let lost = lost.get(&hosts).name.clone();
        let mut after = hosts.clone();
        after.iter_mut().filter(|host| host.name == lost).for_each(|host| host.usable = false);
        for owner in hosts.iter().filter(|host| host.name != lost) {
            let before = place(&owner.name, &hosts, &rules(copies)).hosts;
            if !before.contains(&lost) {
                prop_assert_eq!(&before, &place(&owner.name, &after, &rules(copies)).hosts);
            }
        }
    }

    #[test]
    fn an_excluded_host_holds_and_counts_for_nothing_while_another_is_usable(
        hosts in clusters(), copies in 1..4_usize, out in prop::collection::vec(any::<prop::sample::Index>(), 1..6)
    ) {
        let mut hosts = hosts;
        for index in out {
            let at = index.index(hosts.len());
            hosts[at].excluded = true;
        }
        let step_key = key(1, 0, 1);
        for owner in &hosts {
            let is_fit = |host: &&Host| host.name != owner.name && host.usable && !host.excluded;
            let fit: BTreeSet<&str> = hosts.iter().filter(is_fit).map(|host| host.name.as_str()).collect();
            let others = hosts.iter().filter(|host| host.usable && host.name != owner.name).count();
            let placed = place(&owner.name, &hosts, &rules(copies)).hosts;
            if fit.is_empty() {
                prop_assert_eq!(placed.len(), copies.min(others), "excluded hosts are better than none");
                continue;
            }
            prop_assert_eq!(placed.len(), copies.min(fit.len()));
            prop_assert!(placed.iter().all(|name| fit.contains(name.as_str())), "{:?}", placed);
            // The same if the excluded hosts already have a copy: as many other hosts get one.
            let mut known = vec![copy(&owner.name, true, &step_key, 0)];
            let out = hosts.iter().filter(|host| host.excluded && host.name != owner.name);
            known.extend(out.map(|host| copy(&host.name, false, &step_key, 0)));
            let sent: Vec<String> =
                repairs(&owner.name, &known, &hosts, &rules(copies)).into_iter().map(|repair| repair.to).collect();
            prop_assert_eq!(sent, placed);
        }
    }

    #[test]
    fn a_plan_sends_each_shard_once_and_balances_the_holders(world in 1..40_u32, holders in 1..6_usize) {
        let step_key = key(1, 0, world);
        let names: Vec<String> = (0..holders).map(|index| format!("h{index}")).collect();
        let copies: Vec<Copy> =
            (0..world).flat_map(|rank| names.iter().map(move |name| (rank, name))).map(|(rank, name)| copy(name, false, &step_key, rank)).collect();
        let state = newest_whole(&copies, "job").unwrap();
        let wanted = (0..world).map(|rank| (rank, vec![format!("new{}", rank % 3)])).collect();
        let plan = plan(&state, &wanted);
        let ranks: BTreeSet<u32> = plan.transfers.iter().map(|transfer| transfer.rank).collect();
        prop_assert_eq!((ranks.len(), plan.transfers.len()), (world as usize, world as usize));
        let mut loads: BTreeMap<&str, usize> = names.iter().map(|name| (name.as_str(), 0)).collect();
        for transfer in &plan.transfers {
            *loads.get_mut(transfer.sources[0].holder.as_str()).unwrap() += 1;
        }
        let (least, most) = (loads.values().min().unwrap(), loads.values().max().unwrap());
        prop_assert!(most - least <= 1, "{:?}", loads);
    }
}

/// A cluster with one rank on each host, and the copies that the hosts hold.
struct Cluster {
    hosts: Vec<Host>,
    copies: Vec<Copy>,
    redundancy: usize,
    next_step: u64,
    /// The ranks that have sealed the step that is being saved.
    sealed: BTreeSet<usize>,
}

impl Cluster {
    fn new(hosts: usize, domains: usize, redundancy: usize) -> Cluster {
        let hosts =
            (0..hosts).map(|index| host(&format!("h{index}"), &format!("d{}", index % domains))).collect();
        Cluster { hosts, copies: Vec::new(), redundancy, next_step: 1, sealed: BTreeSet::new() }
    }

    fn key(&self, step: u64) -> StepKey {
        key(step, 0, u32::try_from(self.hosts.len()).unwrap())
    }

    /// Seals a rank's shard of the current step. The next step starts when all ranks have sealed.
    fn seal(&mut self, rank: usize) {
        if self.sealed.insert(rank) {
            let copy =
                copy(&self.hosts[rank].name, true, &self.key(self.next_step), u32::try_from(rank).unwrap());
            self.copies.push(copy);
        }
        if self.sealed.len() == self.hosts.len() {
            self.sealed.clear();
            self.next_step += 1;
        }
    }

    /// Sends one shard from a host. Returns whether there was one to send.
    fn replicate(&mut self, from: usize) -> bool {
        let me = self.hosts[from].name.clone();
        let Some(repair) =
            repairs(&me, &self.copies, &self.hosts, &rules(self.redundancy)).into_iter().next()
        else {
            return false;
        };
        assert_ne!(repair.to, me);
        assert!(
            !self.copies.iter().any(|copy| copy.holder == repair.to && copy.shard == repair.shard),
            "no shard is sent twice"
        );
        let copy = Copy {
            holder: repair.to.into(),
            medium: Medium::Disk,
            own: false,
            verified: true,
            shard: repair.shard,
        };
        self.copies.push(copy);
        true
    }

    fn prune(&mut self) {
        let retention = Retention { keep: 1, copies: self.redundancy + 1 };
        let gone = deletable(&steps(&self.copies, None), |_| false, retention);
        self.copies.retain(|copy| !gone.contains(&copy.shard.key));
    }

    /// The newest step that has all its copies, and the newest whole step.
    fn standing(&self) -> (Option<u64>, Option<u64>) {
        let steps = steps(&self.copies, None);
        let safe =
            steps.iter().filter(|step| step.least_copies() > self.redundancy).map(|step| step.key.step).max();
        (safe, newest_whole(&self.copies, "job").map(|step| step.key.step))
    }

    fn lose(&mut self, lost: &BTreeSet<usize>) {
        let names: BTreeSet<&String> = lost.iter().map(|index| &self.hosts[*index].name).collect();
        self.copies.retain(|copy| !names.iter().any(|name| copy.holder == **name));
    }

    /// New hosts replace the lost ones, the ranks go back to step `to`, and all missing copies are made again.
    fn recover(&mut self, to: Option<u64>) {
        let to = to.unwrap_or(0);
        self.copies.retain(|copy| copy.shard.key.step <= to);
        self.sealed.clear();
        self.next_step = to + 1;
        while (0..self.hosts.len()).any(|from| self.replicate(from)) {}
    }
}

#[derive(Clone, Debug)]
enum Happening {
    Seal(usize),
    Replicate(usize),
    Prune,
    Lose(usize, usize),
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    let any = 0..64_usize;
    prop::collection::vec(
        prop_oneof![
            6 => any.clone().prop_map(Happening::Seal),
            8 => any.clone().prop_map(Happening::Replicate),
            2 => Just(Happening::Prune),
            1 => (any.clone(), any).prop_map(|(first, second)| Happening::Lose(first, second)),
        ],
        50..300,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn losing_hosts_at_any_point_loses_no_step_that_had_all_its_copies(
        hosts in 2..9_usize, domains in 2..5_usize, redundancy in 1..3_usize, happenings in happenings()
    ) {
        let redundancy = redundancy.min(hosts.min(domains) - 1);
        let mut cluster = Cluster::new(hosts, domains, redundancy);
        for happening in happenings {
            match happening {
                Happening::Seal(rank) => cluster.seal(rank % hosts),
                Happening::Replicate(from) => { cluster.replicate(from % hosts); }
                Happening::Prune => cluster.prune(),
                Happening::Lose(first, second) => {
                    // At most as many hosts as there are replicas, in different domains.
                    let mut lost = BTreeSet::from([first % hosts]);
                    if redundancy > 1 && (first % hosts) % domains != (second % hosts) % domains {
                        lost.insert(second % hosts);
                    }
                    let (safe, _) = cluster.standing();
                    cluster.lose(&lost);
                    let (_, whole) = cluster.standing();
                    prop_assert!(whole >= safe, "had {safe:?} with all copies, has {whole:?} after losing {lost:?}");
                    cluster.recover(whole);
                    let (safe, whole) = cluster.standing();
                    prop_assert_eq!(safe, whole, "after repairs the newest whole step has its copies again");
                }
            }
        }
    }

    #[test]
    fn if_replication_keeps_up_at_most_the_step_being_saved_is_lost(
        hosts in 2..8_usize, orders in prop::collection::vec((0..64_usize, 0..64_usize, any::<bool>()), 1..12)
    ) {
        let mut cluster = Cluster::new(hosts, hosts, 1);
        for (lost, after, in_replication) in orders {
            // A step is saved and replicated. Then the next one is saved, and a host fails at some point of that.
            (0..hosts).for_each(|rank| cluster.seal(rank));
            while (0..hosts).any(|from| cluster.replicate(from)) {}
            cluster.prune();
            let started = cluster.next_step;
            let ranks = if in_replication { hosts } else { after % hosts };
            (0..ranks).for_each(|rank| cluster.seal(rank));
            (0..after % (hosts + 1)).for_each(|from| { cluster.replicate(from % hosts); cluster.prune(); });
            cluster.lose(&BTreeSet::from([lost % hosts]));
            let (_, whole) = cluster.standing();
            prop_assert!(whole >= Some(started - 1), "{whole:?} of {started}");
            cluster.recover(whole);
        }
    }
}
