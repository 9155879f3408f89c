//! Who takes part in a round and with which ranks. Pure and deterministic: the same members get the same seats, in
//! any order of joining. A host that took part before keeps its ranks.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::wire::Join;
use mainstay_model::entry::Fact;
use mainstay_model::observation::HostsEvent;
use mainstay_recovery::protocol::Seat;

/// A host that this many failures implicated is avoided while another one is free. A single failure may be chance.
pub const AVOIDED_FROM: u32 = 2;

/// A launcher that wants to take part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The launcher, unique among all.
    pub launcher: String,
    /// Its host's name.
    pub host: String,
    /// The node rank that the user gave.
    pub node_rank: Option<u32>,
    /// Ranks on this host.
    pub ranks: u32,
    /// The address by which ranks of other hosts reach it.
    #[serde(default)]
    pub address: String,
    /// `HOST:PORT` at which it keeps copies of other hosts' checkpoints; empty if it keeps none.
    #[serde(default)]
    pub replicas: String,
    /// `HOST:PORT` at which other launchers can check whether it is alive; empty if they cannot.
    #[serde(default)]
    pub listens: String,
    /// Whether it is the launcher that leads.
    #[serde(default)]
    pub leads: bool,
    /// Its failure domain, if known.
    #[serde(default)]
    pub domain: String,
    /// Whether it can get other ranks while the job runs.
    #[serde(default)]
    pub moves: bool,
    /// Whether it prepares while it waits as a spare: see [`Join::prepares`].
    #[serde(default)]
    pub prepares: bool,
    /// The number of recent failures that implicated its host: see [`Join::implicated`]. The leader adds those of this
    /// job.
    #[serde(default)]
    pub implicated: u32,
}

impl Member {
    /// The member that a launcher describes in its join.
    pub fn from_join(join: &Join) -> Member {
        Member {
            launcher: join.launcher.clone(),
            host: join.host.clone(),
            node_rank: join.node_rank,
            ranks: join.ranks,
            address: join.address.clone(),
            replicas: join.replicas.clone(),
            listens: join.listens.clone(),
            leads: false,
            domain: join.domain.clone(),
            moves: join.moves,
            prepares: join.prepares,
            implicated: join.implicated,
        }
    }

    /// Whether other hosts are preferred to it.
    pub fn is_avoided(&self) -> bool {
        self.implicated >= AVOIDED_FROM
    }

    /// Reports that it has no ranks because it is avoided, and which host has them instead, if one has.
    pub(super) fn avoided(&self, instead: Option<&Member>) -> Fact {
        let Member { host, implicated, .. } = self;
        let then = instead.map_or_else(
            || "it waits as a spare".to_owned(),
            |instead| format!("host {} gets its ranks", instead.host),
        );
        let detail = format!(
            "host {host} is avoided, because {implicated} failures of hardware or platform implicated it in the last 14 days: {then}"
        );
        let mut values = vec![("host", host.clone()), ("implicated", implicated.to_string())];
        values.extend(instead.map(|instead| ("instead", instead.host.clone())));
        Fact::Observed(HostsEvent::HostAvoided.observed(detail, &values))
    }
}

/// A member with its seat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seated {
    /// The member.
    pub member: Member,
    /// Its seat.
    pub seat: Seat,
}

impl Seated {
    /// The ranks of its host.
    pub fn ranks(&self) -> Range<u32> {
        let first = self.seat.first_rank;
        first..first.saturating_add(self.member.ranks)
    }
}

/// What a round still lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// Hosts that have joined.
    pub joined: u32,
    /// Hosts that the round needs.
    pub needed: u32,
    /// Missing node ranks, if users number their hosts.
    pub node_ranks: Vec<u32>,
    /// Names of missing hosts of the previous round.
    pub hosts: Vec<String>,
}

impl std::fmt::Display for Lacking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} hosts joined", self.joined, self.needed)?;
        let numbered = self.node_ranks.iter().map(|rank| format!("node rank {rank}"));
        let missing: Vec<String> = self.hosts.iter().cloned().chain(numbered).collect();
        if !missing.is_empty() {
            write!(f, "; missing: {}", missing.join(", "))?;
        }
        Ok(())
    }
}

/// Why a launcher cannot have a seat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSeat {
    /// Its number is too high.
    #[error("--node-rank {0}: the job has {1} hosts, and node ranks are counted from 0")]
    TooHigh(u32, u32),
    /// Another launcher has the number.
    #[error("--node-rank {0}: host {1} has joined with the same node rank; give each host its own")]
    Taken(u32, String),
    /// Some hosts are numbered and this one is not, or the reverse.
    #[error("--node-rank: give it on all hosts or on none")]
    Mixed,
}

/// Whether there is a seat for one more member.
///
/// # Errors
/// The reason why there is not.
pub fn admit(members: &[Member], new: &Member, most: u32) -> Result<(), NoSeat> {
    if let Some(rank) = new.node_rank {
        if rank >= most {
            return Err(NoSeat::TooHigh(rank, most));
        }
        if let Some(other) = members.iter().find(|other| other.node_rank == Some(rank)) {
            return Err(NoSeat::Taken(rank, other.host.clone()));
        }
    }
    if members.iter().any(|other| other.node_rank.is_some() != new.node_rank.is_some()) {
        return Err(NoSeat::Mixed);
    }
    Ok(())
}

/// The first round: `hosts` of the members get seats. The leader's host gets the first if hosts are not numbered.
///
/// # Errors
/// The hosts that are missing.
pub fn first(members: &[Member], hosts: u32) -> Result<Vec<Seated>, Lacking> {
    let joined = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let numbered = members.iter().any(|member| member.node_rank.is_some());
    let have: BTreeSet<u32> = members.iter().filter_map(|member| member.node_rank).collect();
    let node_ranks: Vec<u32> = (0..hosts).filter(|rank| numbered && !have.contains(rank)).collect();
    if joined < hosts || !node_ranks.is_empty() {
        return Err(Lacking { joined, needed: hosts, node_ranks, hosts: Vec::new() });
    }
    let mut members = members.to_vec();
    members.sort_by_cached_key(|member| {
        (member.node_rank, !member.leads, by_number(&member.host), member.launcher.clone())
    });
    let mut free = members.split_off((hosts as usize).min(members.len()));
    let swap = to_avoid(members.iter(), free.iter(), |member| member.leads);
    if let Some((at, by)) = swap
        && let (Some(avoided), Some(instead)) = (members.get_mut(at), free.get_mut(by))
    {
        std::mem::swap(avoided, instead);
    }
    Ok(seated(members))
}

/// The host to avoid in this round and the free one with as many ranks that gets its place, as positions in the lists.
/// One at most: a wrong record must not exchange a whole job. The leader decides, and stays. Hosts that the user
/// numbered stay too.
pub fn to_avoid<'m>(
    taking_part: impl Iterator<Item = &'m Member>,
    free: impl Iterator<Item = &'m Member> + Clone,
    leads: impl Fn(&Member) -> bool,
) -> Option<(usize, usize)> {
    let mut avoided: Vec<(usize, &Member)> = taking_part
        .enumerate()
        .filter(|(_, member)| member.is_avoided() && !leads(member) && member.node_rank.is_none())
        .collect();
    avoided.sort_by_key(|(_, member)| Reverse(member.implicated));
    avoided.into_iter().find_map(|(at, member)| {
        let fits =
            |free: &Member| free.ranks == member.ranks && !free.is_avoided() && free.node_rank.is_none();
        let fitting = free.clone().enumerate().filter(|(_, free)| fits(free));
        let best = fitting.min_by_key(|(_, free)| (free.domain != member.domain, free.implicated));
        best.map(|(by, _)| (at, by))
    })
}

/// Seats the members in this order, with consecutive ranks.
pub(super) fn seated(members: Vec<Member>) -> Vec<Seated> {
    let world_size = members.iter().map(|member| member.ranks).sum();
    let group_world_size = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let mut first_rank = 0;
    let seats = members.into_iter().zip(0..).map(|(member, group_rank)| {
        let seat = Seat { group_rank, group_world_size, first_rank, world_size };
        first_rank += member.ranks;
        Seated { member, seat }
    });
    seats.collect()
}

/// The seat of a lost host that this launcher can take: that of its own number or name, else the first with the same
/// number of ranks. A launcher with a number takes no other host's seat.
pub fn vacant(lost: &[Seated], new: &Member) -> Option<u32> {
    let fits = |seated: &&Seated| seated.member.ranks == new.ranks;
    let lost = || lost.iter().filter(fits);
    let found = match new.node_rank {
        Some(rank) => lost().find(|seated| seated.member.node_rank == Some(rank)),
        None => lost().find(|seated| seated.member.host == new.host).or_else(|| lost().next()),
    };
    found.map(|seated| seated.seat.group_rank)
}

/// A sort key by which host10 comes after host9.
fn by_number(name: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let word = rest.find(|letter: char| letter.is_ascii_digit()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(word);
        let digits = after.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(after.len());
        let (digits, after) = after.split_at(digits);
        // Numbers with more than 19 digits are compared as text.
        parts.push((0, word.to_owned()));
        parts.push((digits.parse().unwrap_or(0), digits.to_owned()));
        rest = after;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(host: &str, node_rank: Option<u32>, ranks: u32) -> Member {
        Member { launcher: host.to_owned(), host: host.to_owned(), node_rank, ranks, ..Member::default() }
    }

    #[test]
    fn missing_hosts_are_named_by_number() {
        let members = [member("a", Some(0), 2)];
        let lacking = first(&members, 3).expect_err("two are missing");
        testing::snapshot!("missing", "hosts with numbers", lacking);
        let lacking = first(&[member("a", None, 2)], 2).expect_err("one is missing");
        testing::snapshot!("missing", "a host without a number", lacking);
    }

    #[test]
    fn the_leader_has_the_first_ranks_where_hosts_are_not_numbered() {
        let leader = Member { leads: true, ..member("z", None, 2) };
        let round =
            first(&[member("host10", None, 1), leader, member("host9", None, 4)], 3).expect("a round");
        let hosts: Vec<(&str, u32)> =
            round.iter().map(|at| (at.member.host.as_str(), at.seat.first_rank)).collect();
        assert_eq!(hosts, [("z", 0), ("host9", 2), ("host10", 6)]);
        assert!(round.iter().all(|at| at.seat.world_size == 7 && at.seat.group_world_size == 3));
    }

    /// The hosts with seats, of these with the number of failures that implicated each; the first leads.
    fn chosen(implicated: &[(&str, u32)], hosts: u32) -> Vec<String> {
        let of = |(at, (host, implicated)): (usize, &(&str, u32))| Member {
            leads: at == 0,
            implicated: *implicated,
            ..member(host, None, 2)
        };
        let members: Vec<Member> = implicated.iter().enumerate().map(of).collect();
        first(&members, hosts).expect("a round").into_iter().map(|at| at.member.host).collect()
    }

    #[test]
    fn a_host_that_failures_implicated_twice_is_exchanged_if_another_one_is_free() {
        assert_eq!(chosen(&[("a", 0), ("b", 2), ("c", 0), ("d", 0)], 3), ["a", "d", "c"]);
        assert_eq!(chosen(&[("a", 0), ("b", 1), ("c", 0), ("d", 0)], 3), ["a", "b", "c"], "once is chance");
        assert_eq!(chosen(&[("a", 0), ("b", 2), ("c", 0)], 3), ["a", "b", "c"], "no other host is free");
        assert_eq!(chosen(&[("a", 0), ("b", 2), ("c", 0), ("d", 9)], 3), ["a", "b", "c"], "none is better");
        assert_eq!(chosen(&[("a", 9), ("b", 0), ("c", 0), ("d", 0)], 3), ["a", "b", "c"], "it leads");
    }

    #[test]
    fn one_host_at_most_is_exchanged_in_a_round_the_worst() {
        assert_eq!(chosen(&[("a", 0), ("b", 2), ("c", 5), ("d", 0), ("e", 0)], 3), ["a", "b", "d"]);
    }

    #[test]
    fn only_a_host_with_as_many_ranks_takes_the_place_and_rather_one_of_the_same_domain() {
        let lemon = Member { implicated: 3, domain: "x".to_owned(), ..member("b", None, 2) };
        let small = member("c", None, 1);
        let far = member("d", None, 2);
        let near = Member { domain: "x".to_owned(), ..member("e", None, 2) };
        let by = |free: &[&Member]| to_avoid([&lemon].into_iter(), free.iter().copied(), |_| false);
        assert_eq!(by(&[&small]), None);
        assert_eq!(by(&[&small, &far]), Some((0, 1)));
        assert_eq!(by(&[&small, &far, &near]), Some((0, 2)));
        let numbered = Member { node_rank: Some(0), ..lemon.clone() };
        assert_eq!(to_avoid([&numbered].into_iter(), [&far].into_iter(), |_| false), None);
    }

    #[test]
    fn a_node_rank_is_given_once_and_within_the_job() {
        let members = [member("a", Some(0), 2)];
        assert_eq!(admit(&members, &member("b", Some(0), 2), 2), Err(NoSeat::Taken(0, "a".to_owned())));
        assert_eq!(admit(&members, &member("b", Some(2), 2), 2), Err(NoSeat::TooHigh(2, 2)));
        assert_eq!(admit(&members, &member("b", None, 2), 2), Err(NoSeat::Mixed));
        assert_eq!(admit(&members, &member("b", Some(1), 2), 2), Ok(()));
    }

    #[test]
    fn a_lost_hosts_seat_goes_to_the_one_with_its_number_or_name() {
        let round = first(&[member("a", None, 2), member("b", None, 2), member("c", None, 4)], 3);
        let round = round.expect("a round");
        assert_eq!(vacant(&round[..], &member("b", None, 2)), Some(1));
        assert_eq!(vacant(&round[..], &member("spare", None, 4)), Some(2), "the one with as many ranks");
        assert_eq!(vacant(&round[..], &member("spare", None, 3)), None);
        let numbered = first(&[member("a", Some(0), 2), member("b", Some(1), 2)], 2).expect("a round");
        assert_eq!(vacant(&numbered[..1], &member("x", Some(1), 2)), None, "that one is not lost");
    }

    proptest! {
        #[test]
        fn the_order_of_joining_does_not_matter_and_no_rank_is_given_twice(
            sizes in proptest::collection::vec(1u32..9, 1..12),
            numbered in any::<bool>(),
            turn in 0usize..12,
        ) {
            let members: Vec<Member> = sizes.iter().zip(0u32..).map(|(ranks, number)| Member {
                leads: number == 3,
                ..member(&format!("host{number}"), numbered.then_some(number), *ranks)
            }).collect();
            let hosts = u32::try_from(members.len()).expect("few");
            let mut turned = members.clone();
            turned.rotate_left(turn % members.len());
            let round = first(&members, hosts).expect("a round");
            prop_assert_eq!(&round, &first(&turned, hosts).expect("a round"));
            let ranks: Vec<u32> = round
                .iter()
                .flat_map(|at| at.seat.first_rank..at.seat.first_rank + at.member.ranks)
                .collect();
            prop_assert_eq!(ranks, (0..sizes.iter().sum()).collect::<Vec<u32>>());
        }
    }
}
