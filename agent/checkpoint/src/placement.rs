//! Selects the hosts that store each host's replicas: groups across failure domains.
//!
//! Groups, not a ring: if two hosts fail at once, pairs lose data in 1 of n-1 cases, a ring in 2. Groups contain all
//! configured hosts, dead or alive. A host that fails or is replaced under its name therefore moves no other host's
//! replicas; only the owners that used it take their next choice.

use std::collections::{BTreeMap, BTreeSet};

use crate::parity::Parity;

/// A host that may store replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name: the same on all hosts.
    pub name: String,
    /// Its failure domain: a rack, a power feed, an NVLink domain. Empty: it fails alone.
    pub domain: String,
    /// Whether it responds and has room.
    pub usable: bool,
    /// Whether it is leaving or will be removed: it gets replicas only if no other host is usable, and its copies do
    /// not count.
    pub excluded: bool,
}

impl Host {
    /// The failure domain; a host without one is its own domain.
    fn domain(&self) -> &str {
        if self.domain.is_empty() { &self.name } else { &self.domain }
    }
}

/// The requirements for a placement.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Number of replicas in addition to the owner's copy.
    pub copies: usize,
    /// Hosts that are chosen only if there is no other: neighbours in the pipeline, which fail with the owner's stage.
    pub avoid: BTreeSet<String>,
    /// Store pieces instead of replicas if there are enough hosts.
    pub parity: Option<Parity>,
}

/// The excluded hosts, which get no replicas; empty if `owner` has no other usable host. A copy that will be lost is
/// better than none, and if all hosts are excluded at once, the exclusion is probably wrong.
pub fn excluded_hosts<'a>(owner: &str, hosts: &'a [Host]) -> BTreeSet<&'a str> {
    if !hosts.iter().any(|host| host.name != owner && host.usable && !host.excluded) {
        return BTreeSet::new();
    }
    hosts.iter().filter(|host| host.excluded).map(|host| host.name.as_str()).collect()
}

/// The hosts as choices for `owner`: excluded hosts are not usable.
pub(super) fn as_choices(owner: &str, hosts: &[Host]) -> Vec<Host> {
    let out = excluded_hosts(owner, hosts);
    let as_choice =
        |host: &Host| Host { usable: host.usable && !out.contains(host.name.as_str()), ..host.clone() };
    hosts.iter().map(as_choice).collect()
}

/// How shards of `owner` can be cut now, with each piece in a separate failure domain and none in the owner's. `None`:
/// pieces are not configured, or there are too few usable domains.
pub fn cut_for(owner: &str, hosts: &[Host], rules: &Rules) -> Option<Parity> {
    let hosts = &as_choices(owner, hosts);
    let own = hosts.iter().find(|host| host.name == owner).map_or(owner, Host::domain);
    let usable = hosts.iter().filter(|host| host.usable && host.name != owner && host.domain() != own);
    let domains: BTreeSet<&str> = usable.map(Host::domain).collect();
    rules.parity.filter(|parity| domains.len() >= parity.pieces() as usize)
}

/// The hosts for an owner's replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The hosts, first choice first.
    pub hosts: Vec<String>,
    /// The rules that could not be met, one message each.
    pub compromises: Vec<String>,
}

/// Divides `hosts` into groups of `size`, each across as many domains as possible. The remaining hosts join groups of
/// other domains.
pub fn groups(hosts: &[Host], size: usize) -> Vec<Vec<String>> {
    let size = size.max(1);
    let mut domains: BTreeMap<&str, Vec<&Host>> = BTreeMap::new();
    for host in hosts {
        domains.entry(host.domain()).or_default().push(host);
    }
    for members in domains.values_mut() {
        members.sort_by_key(|host| (score("order", &host.name), host.name.clone()));
        members.dedup_by(|a, b| a.name == b.name);
    }
    let mut groups: Vec<Vec<&Host>> = Vec::new();
    let mut left: usize = domains.values().map(Vec::len).sum();
    while left >= size {
        groups.push(draw(&mut domains, size));
        left -= size;
    }
    for host in draw(&mut domains, left) {
        let has_domain = |group: &Vec<&Host>| group.iter().any(|other| other.domain() == host.domain());
        let joins = groups.iter_mut().min_by_key(|group| {
            (has_domain(group), group.len(), score(&host.name, group.first().map_or("", |first| &first.name)))
        });
        match joins {
            Some(group) => group.push(host),
            None => groups.push(vec![host]),
        }
    }
    groups.into_iter().map(|group| group.into_iter().map(|host| host.name.clone()).collect()).collect()
}

/// Takes one host from each of the largest domains, and more from the largest if there are too few domains.
fn draw<'a>(domains: &mut BTreeMap<&'a str, Vec<&'a Host>>, count: usize) -> Vec<&'a Host> {
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let mut by_size: Vec<&str> =
            domains.iter().filter(|(_, members)| !members.is_empty()).map(|(name, _)| *name).collect();
        by_size.sort_by_key(|name| (std::cmp::Reverse(domains[name].len()), score("domain", name), *name));
        if by_size.is_empty() {
            break;
        }
        for name in by_size.into_iter().take(count - drawn.len()) {
            drawn.extend(domains.get_mut(name).and_then(Vec::pop));
        }
    }
    drawn
}

/// Places the replicas of `owner`: first in its group, then on other hosts by rendezvous hashing. Never on the owner
/// itself. Its own domain, or two hosts of one domain, are used only if no other host is usable.
pub fn place(owner: &str, hosts: &[Host], rules: &Rules) -> Placement {
    place_beside(owner, hosts, rules, &BTreeSet::new())
}

/// Like [`place`], but the hosts `have` already store copies: they are not chosen again, their domains count as taken,
/// and only the missing replicas are placed.
pub fn place_beside(owner: &str, hosts: &[Host], rules: &Rules, have: &BTreeSet<&str>) -> Placement {
    let hosts = &as_choices(owner, hosts);
    let count = (rules.copies + 1).saturating_sub(have.len() + usize::from(!have.contains(owner)));
    let group =
        groups(hosts, rules.copies + 1).into_iter().find(|group| group.iter().any(|name| name == owner));
    let in_group = group.map_or_else(Vec::new, |group| after(&group, owner));
    let own_domain = hosts.iter().find(|host| host.name == owner).map_or(owner, Host::domain);
    let is_choice = |host: &&Host| host.usable && host.name != owner && !have.contains(host.name.as_str());
    let mut candidates: Vec<&Host> = hosts.iter().filter(is_choice).collect();
    let mut placement = Placement::default();
    let keeps = |host: &&Host| host.name != owner && have.contains(host.name.as_str());
    let mut taken: BTreeSet<&str> = hosts.iter().filter(keeps).map(Host::domain).collect();
    while placement.hosts.len() < count {
        let best = candidates.iter().enumerate().min_by_key(|(_, host)| {
            let place = in_group.iter().position(|name| *name == host.name).unwrap_or(usize::MAX);
            (
                host.domain() == own_domain,
                taken.contains(host.domain()),
                rules.avoid.contains(&host.name),
                place,
                std::cmp::Reverse(score(owner, &host.name)),
                &host.name,
            )
        });
        let Some((index, _)) = best else { break };
        let host = candidates.swap_remove(index);
        compromise(host, own_domain, &taken, rules, &mut placement.compromises);
        if host.excluded {
            placement.compromises.push(format!("{} is excluded; no other host is usable", host.name));
        }
        taken.insert(host.domain());
        placement.hosts.push(host.name.clone());
    }
    let short = count - placement.hosts.len();
    if short > 0 {
        placement
            .compromises
            .push(format!("{short} of {count} replica(s) have no host that could keep them"));
    }
    placement
}

fn compromise(
    host: &Host,
    own_domain: &str,
    taken: &BTreeSet<&str>,
    rules: &Rules,
    reported: &mut Vec<String>,
) {
    let Host { name, .. } = host;
    if host.domain() == own_domain {
        reported
            .push(format!("{name} is in the owner's own failure domain {own_domain:?}; no other is usable"));
    } else if taken.contains(host.domain()) {
        reported.push(format!("{name} shares the failure domain {:?} with another replica", host.domain()));
    } else if rules.avoid.contains(name) {
        reported.push(format!("{name} is a neighbour in the pipeline; no other host is usable"));
    }
}

/// The other members of a group, starting after `owner`: in a group of three, each owner has a different first choice.
fn after(group: &[String], owner: &str) -> Vec<String> {
    let at = group.iter().position(|name| name == owner).unwrap_or(0);
    group.iter().cycle().skip(at + 1).take(group.len().saturating_sub(1)).cloned().collect()
}

/// The score of `a` and `b` for rendezvous hashing: the highest wins. FNV-1a, followed by the finalizer of SplitMix64,
/// because FNV alone mixes the last bytes too little.
pub fn score(a: &str, b: &str) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in a.bytes().chain([0]).chain(b.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}
