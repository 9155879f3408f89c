//! The links between the hosts of a job before its ranks start: who measures whom and when, and which hosts and pairs are
//! slow compared with the others.

use serde::{Deserialize, Serialize};

use mainstay_model::time::Span;

/// A rate below a third of the typical one is slow. Links of one kind that share switches with other traffic differ less.
const SLOW_RATE: u64 = 3;

/// A round trip of more than five typical ones and a millisecond is slow. The best of several is compared.
const SLOW_ROUND_TRIP: (u64, Span) = (5, Span::millis(1));

/// Fewer hosts have nothing to compare with.
const LEAST_HOSTS: usize = 3;

/// What a host has measured of the link to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkQuality {
    /// The shortest of some round trips.
    pub round_trip: Span,
    /// Bytes per second to the other host.
    pub sent: u64,
    /// Bytes per second from the other host.
    pub received: u64,
}

/// A measured link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkMeasured {
    /// The other launcher.
    pub launcher: String,
    /// How it is, or why it could not be measured.
    pub quality: Result<LinkQuality, String>,
}

/// The link between two hosts, by their places in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The hosts; the first has measured.
    pub hosts: (usize, usize),
    /// How it is, or why it could not be measured.
    pub quality: Result<LinkQuality, String>,
}

/// What is slow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// A typical link: of most hosts, the best one is about as good. None if too little was measured.
    pub typical: Option<LinkQuality>,
    /// Hosts most of whose links are slow.
    pub hosts: Vec<usize>,
    /// Slow links between other hosts.
    pub links: Vec<Link>,
}

/// The pairs of hosts that measure at the same time, one group after the other. Each host is in one pair of a group, and
/// after `hosts - 1` groups all pairs were measured; with fewer groups each host measures as many others.
pub fn schedule(hosts: usize, most_groups: usize) -> Vec<Vec<(usize, usize)>> {
    // One host stays, and the others go round the table. An odd one out has no partner.
    let places = hosts + hosts % 2;
    let groups = places.saturating_sub(1);
    let group = |turn: usize| {
        let at = |place: usize| if place == 0 { 0 } else { 1 + (place - 1 + turn) % (places - 1) };
        let pairs = (0..places / 2).map(|place| (at(place), at(places - 1 - place)));
        pairs.filter(|(a, b)| *a < hosts && *b < hosts).collect::<Vec<_>>()
    };
    let count = groups.min(most_groups);
    (0..count).map(|number| group(number * groups / count)).collect()
}

impl LinkQuality {
    /// Bytes per second in the slower direction.
    pub fn rate(&self) -> u64 {
        self.sent.min(self.received)
    }

    fn is_slow(&self, typical: &LinkQuality) -> bool {
        let (times, plus) = SLOW_ROUND_TRIP;
        let longest = typical.round_trip.0.saturating_mul(times).saturating_add(plus.0);
        self.rate().saturating_mul(SLOW_RATE) < typical.rate() || self.round_trip.0 > longest
    }
}

impl std::fmt::Display for LinkQuality {
    /// "940 Mb/s, 0.21 ms".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let megabits = self.rate() as f64 * 8e-6;
        let rate = match megabits {
            1000.0.. => format!("{:.1} Gb/s", megabits / 1e3),
            10.0.. => format!("{megabits:.0} Mb/s"),
            _ => format!("{megabits:.1} Mb/s"),
        };
        write!(f, "{rate}, {:.2} ms", self.round_trip.0 as f64 / 1e6)
    }
}

impl Link {
    /// How it is, in words.
    pub fn describe(&self) -> String {
        self.quality.as_ref().map_or_else(Clone::clone, ToString::to_string)
    }
}

/// Compares the links. A host is slow if most of its links are; a link between two others is slow by itself.
pub fn judge(hosts: usize, links: &[Link]) -> Judgement {
    let Some(typical) = typical(hosts, links) else { return Judgement::default() };
    let is_slow = |link: &Link| link.quality.as_ref().map_or(true, |quality| quality.is_slow(&typical));
    let mut left: Vec<(&Link, bool)> = links.iter().map(|link| (link, is_slow(link))).collect();
    let mut slow_hosts = Vec::new();
    // A slow host makes the links of the others slow: the worst is left out first.
    while hosts - slow_hosts.len() >= LEAST_HOSTS {
        let counted = (0..hosts).map(|host| {
            let own = left.iter().filter(|(link, _)| link.is_of(host));
            let (all, slow) =
                own.fold((0, 0), |(all, slow), (_, is_slow)| (all + 1, slow + usize::from(*is_slow)));
            (host, all, slow)
        });
        let worst = counted
            .filter(|(_, all, slow)| slow * 2 > *all)
            .max_by_key(|(host, all, slow)| (slow * 1000 / all, *slow, std::cmp::Reverse(*host)));
        let Some((host, ..)) = worst else { break };
        slow_hosts.push(host);
        left.retain(|(link, _)| !link.is_of(host));
    }
    slow_hosts.sort_unstable();
    let links = left.into_iter().filter(|(_, is_slow)| *is_slow).map(|(link, _)| link.clone()).collect();
    Judgement { typical: Some(typical), hosts: slow_hosts, links }
}

impl Link {
    /// Whether one of its ends is this host.
    pub fn is_of(&self, host: usize) -> bool {
        self.hosts.0 == host || self.hosts.1 == host
    }
}

/// The median of the best link of each host: one slow host does not change it, also where it is one of three.
fn typical(hosts: usize, links: &[Link]) -> Option<LinkQuality> {
    let of = |host: usize| {
        links.iter().filter(move |link| link.is_of(host)).filter_map(|link| link.quality.as_ref().ok())
    };
    let mut rates: Vec<u64> = (0..hosts).filter_map(|host| of(host).map(LinkQuality::rate).max()).collect();
    let mut trips: Vec<Span> =
        (0..hosts).filter_map(|host| of(host).map(|quality| quality.round_trip).min()).collect();
    rates.sort_unstable();
    trips.sort_unstable();
    let (rate, round_trip) = (*rates.get(rates.len() / 2)?, *trips.get((trips.len().max(1) - 1) / 2)?);
    Some(LinkQuality { round_trip, sent: rate, received: rate })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const GOOD: LinkQuality =
        LinkQuality { round_trip: Span(200_000), sent: 1_000_000_000, received: 900_000_000 };

    /// All links between these hosts, good or as `of` says.
    fn links(hosts: usize, of: impl Fn(usize, usize) -> Option<Result<LinkQuality, String>>) -> Vec<Link> {
        let pairs = (0..hosts).flat_map(|a| (a + 1..hosts).map(move |b| (a, b)));
        pairs.map(|(a, b)| Link { hosts: (a, b), quality: of(a, b).unwrap_or(Ok(GOOD)) }).collect()
    }

    #[test]
    fn a_host_with_slow_links_is_named_and_not_its_peers() {
        let slow = LinkQuality { received: 90_000_000, ..GOOD };
        let far = LinkQuality { round_trip: Span::millis(5), ..GOOD };
        let none = Err("no answer".to_owned());
        for quality in [Ok(slow), Ok(far), none] {
            for hosts in [3, 4, 64] {
                let links = links(hosts, |a, b| (a == 2 || b == 2).then(|| quality.clone()));
                let found = judge(hosts, &links);
                assert_eq!((found.hosts, found.links), (vec![2], Vec::new()), "{quality:?} of {hosts}");
            }
        }
    }

    #[test]
    fn a_slow_pair_of_good_hosts_is_named_as_a_pair() {
        let slow = LinkQuality { sent: 1_000_000, ..GOOD };
        for hosts in [3, 8] {
            let found = judge(hosts, &links(hosts, |a, b| ((a, b) == (0, 2)).then_some(Ok(slow))));
            assert_eq!((found.hosts.len(), found.links.len()), (0, 1), "of {hosts}");
            assert_eq!(found.links[0].hosts, (0, 2));
        }
    }

    #[test]
    fn nothing_is_slow_where_all_are_alike_or_nothing_was_measured() {
        assert_eq!(judge(2, &links(2, |_, _| None)).typical, Some(LinkQuality { sent: GOOD.rate(), ..GOOD }));
        assert!(judge(2, &links(2, |_, _| None)).hosts.is_empty());
        let halves = LinkQuality { received: GOOD.received / 2, ..GOOD };
        let found = judge(5, &links(5, |a, _| (a == 1).then_some(Ok(halves))));
        assert_eq!((found.hosts.len(), found.links.len()), (0, 0));
        assert_eq!(judge(4, &[]), Judgement::default());
    }

    proptest! {
        #[test]
        fn each_pair_is_measured_once_and_no_host_measures_two_at_a_time(hosts in 0_usize..70) {
            let groups = schedule(hosts, usize::MAX);
            let mut all = BTreeSet::new();
            for group in &groups {
                let mut busy = BTreeSet::new();
                for (a, b) in group {
                    prop_assert!(busy.insert(*a) && busy.insert(*b));
                    prop_assert!(all.insert((*a.min(b), *a.max(b))));
                }
            }
            prop_assert_eq!(all.len(), hosts * hosts.saturating_sub(1) / 2);
        }

        #[test]
        fn with_fewer_groups_each_host_measures_about_as_many(hosts in 2_usize..300, most in 1_usize..64) {
            let groups = schedule(hosts, most);
            prop_assert!(groups.len() <= most);
            let count = |host| groups.iter().flatten().filter(|(a, b)| *a == host || *b == host).count();
            for host in 0..hosts {
                prop_assert!(count(host) + 1 >= groups.len());
            }
        }
    }
}
