//! Placement of replicas with excluded hosts and with hosts whose ranks are next in the pipeline.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_checkpoint::placement::{self, Rules, place};

use super::support::{Host, RUN, bytes, hosts, until};

fn excluded() -> PlacementEligibility {
    PlacementEligibility {
        excluded: Some("gpu.0000:3b:00: lost".to_owned()),
        ..PlacementEligibility::default()
    }
}

fn stage(run: &str, stage: u32) -> PlacementEligibility {
    PlacementEligibility {
        stages: BTreeMap::from([(run.to_owned(), BTreeSet::from([stage]))]),
        ..PlacementEligibility::default()
    }
}

/// Three hosts that know each other, with the index of the first host's first choice and of the third host.
fn three() -> (Vec<Host>, usize, usize) {
    let hosts = hosts(3, |_, _| {});
    hosts[0].wait_for_peers(2);
    let placed = |host: &Host| placement::Host {
        name: host.name.clone(),
        domain: host.settings.domain.clone(),
        usable: true,
        excluded: false,
    };
    let known: Vec<placement::Host> = hosts.iter().map(placed).collect();
    let chosen = place(&hosts[0].name, &known, &Rules { copies: 1, ..Rules::default() }).hosts;
    let first = hosts.iter().position(|host| host.name == chosen[0]).unwrap();
    (hosts, first, 3 - first)
}

impl Host {
    /// Sets the host's eligibility and waits until `other` has received it.
    fn stands(&self, standing: &PlacementEligibility, other: &Host) {
        self.service().stands(standing.clone());
        until("the standing to be known", || {
            other.service().peers()[&self.name].inventory.standing == *standing
        });
    }

    fn keeps(&self, step: u64) -> bool {
        let place = format!("/step-{step:012}.0/");
        self.replicas().iter().any(|path| path.to_str().unwrap().contains(&place))
    }
}

/// Saves steps from `step` on until one has its replica on `chosen` and none on `left_out`; returns
/// that step. A peer that misses an answer on a busy machine is briefly not eligible, and the
/// other host gets that step: only a broken rule causes that for every step.
fn saves_until_placed(host: &Host, step: u64, chosen: &Host, left_out: &Host) -> u64 {
    let mut step = step;
    until("a replica on the chosen host only", || {
        host.save(0, step, &[0], 1);
        host.wait_for_copies(step, 2);
        let placed = chosen.keeps(step) && !left_out.keeps(step);
        step += u64::from(!placed);
        placed
    });
    step
}

#[test]
fn replicas_on_an_excluded_host_are_made_again_elsewhere_and_no_others_go_there() {
    let (hosts, first, other) = three();
    let (source, first, other) = (&hosts[0], &hosts[first], &hosts[other]);
    let step = saves_until_placed(source, 10, first, other);
    first.stands(&excluded(), source);
    until("another replica", || other.keeps(step));
    let step = saves_until_placed(source, step + 1, other, first);
    // When it is eligible again, it is the first choice as before.
    first.stands(&PlacementEligibility::default(), source);
    saves_until_placed(source, step + 1, first, other);
}

#[test]
fn replicas_on_an_excluded_host_are_still_restored() {
    let (mut hosts, first, other) = three();
    hosts[0].save(0, 10, &[0], 1);
    hosts[0].wait_for_copies(10, 2);
    // No host is left to make another copy.
    hosts[other].lose();
    hosts[first].stands(&excluded(), &hosts[0]);
    hosts[0].lose();
    hosts[0].start();
    assert_eq!(hosts[0].restore().unwrap().0, Some(10));
    hosts[0].has(10, &[0]);
}

#[test]
fn an_excluded_host_is_better_than_none() {
    let hosts = hosts(2, |_, _| {});
    hosts[1].stands(&excluded(), &hosts[0]);
    for step in [10, 20] {
        hosts[0].save(0, step, &[0], 1);
        hosts[0].wait_for_copies(step, 2);
    }
    let sent = 2 * bytes(10, 0).len() as u64;
    until("both to be counted", || hosts[0].service().counts().bytes_sent >= sent);
    assert_eq!(hosts[0].service().counts().bytes_sent, sent, "each is sent once");
}

#[test]
fn the_host_of_the_next_stage_is_avoided_but_not_that_of_another_run() {
    let (hosts, first, other) = three();
    hosts[0].service().stands(stage(RUN, 1));
    hosts[first].stands(&stage("another run", 2), &hosts[0]);
    hosts[other].stands(&stage(RUN, 1), &hosts[0]);
    let step = saves_until_placed(&hosts[0], 10, &hosts[first], &hosts[other]);
    hosts[first].stands(&stage(RUN, 2), &hosts[0]);
    let step = saves_until_placed(&hosts[0], step + 1, &hosts[other], &hosts[first]);
    // There is no other host: the neighbor is better than none.
    hosts[other].stands(&excluded(), &hosts[0]);
    saves_until_placed(&hosts[0], step + 1, &hosts[first], &hosts[other]);
}
