//! With how many hosts a job of MIN to MAX hosts continues, and who has which ranks then. Pure and deterministic.
//!
//! Hosts that stay keep their ranks as far as ranks without gaps allow: the highest seated host moves into the place
//! of a lost one. If hosts report their domain, that happens within a domain, so that its hosts stay next to each
//! other.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use mainstay_model::time::Span;

use super::round::{Member, Seated, seated};

/// The limits within which the number of hosts may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The least and the most hosts.
    pub hosts: (u32, u32),
    /// The number of ranks must be a multiple of this.
    pub multiple: u32,
    /// How long the job waits for a lost host before it continues without it.
    pub shrink_after: Span,
    /// How long ranks run at least before they are stopped so that more hosts can take part.
    pub grow_after: Span,
}

impl Limits {
    /// A fixed number of hosts.
    pub fn fixed(hosts: u32) -> Limits {
        Limits {
            hosts: (hosts, hosts),
            multiple: 1,
            shrink_after: Span(u64::MAX),
            grow_after: Span(u64::MAX),
        }
    }

    /// Whether the number of hosts may change at all.
    pub fn vary(&self) -> bool {
        self.hosts.0 < self.hosts.1
    }
}

/// Another number of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arranged {
    /// The seats.
    pub seats: Vec<Seated>,
    /// Hosts that had ranks and have none now: they wait, for example because the number of ranks must be a multiple.
    pub benched: Vec<Member>,
}

/// The largest permitted world of the present and the waiting hosts. `before` has the hosts in the order of their
/// ranks, and whether each is present. The launcher `leader` keeps a seat. `None` if there are too few hosts.
pub fn arrange(
    before: &[(Seated, bool)],
    waiting: &[Member],
    limits: &Limits,
    leader: &str,
) -> Option<Arranged> {
    let (least, most) = (limits.hosts.0 as usize, limits.hosts.1 as usize);
    let mut staying: Vec<&Member> =
        before.iter().filter(|(_, here)| *here).map(|(seated, _)| &seated.member).collect();
    let room = most.saturating_sub(staying.len());
    let mut joining: Vec<&Member> = waiting.iter().take(room).collect();
    let mut benched = Vec::new();
    let multiple = limits.multiple.max(1);
    while !ranks(&staying).saturating_add(ranks(&joining)).is_multiple_of(multiple) {
        // The last to join is the first to go. The leader decides, and stays.
        if joining.pop().is_none() {
            let at = staying.iter().rposition(|member| member.launcher != leader)?;
            benched.insert(0, staying.remove(at).clone());
        }
    }
    let hosts = staying.len() + joining.len();
    if hosts < least.max(1) {
        return None;
    }
    let launchers: BTreeSet<&str> = staying.iter().map(|member| member.launcher.as_str()).collect();
    let stays = |member: &Member| launchers.contains(member.launcher.as_str());
    let mut places: Vec<HostSlot> = before
        .iter()
        .map(|(seated, here)| HostSlot {
            domain: seated.member.domain.clone(),
            member: (*here && stays(&seated.member)).then(|| seated.member.clone()),
        })
        .collect();
    for member in joining {
        take_place(&mut places, member);
    }
    Some(Arranged { seats: seated(closed_up(places)), benched })
}

/// A place in the order of ranks: the domain of its present or former host, and the host that is there.
struct HostSlot {
    domain: String,
    member: Option<Member>,
}

/// Places a joining host: in a free place of its domain, else in any free place, else behind its domain, else at the
/// end.
fn take_place(places: &mut Vec<HostSlot>, member: &Member) {
    let free = |place: &HostSlot| place.member.is_none();
    let same = |place: &HostSlot| place.domain == member.domain;
    let at = places.iter().position(|place| free(place) && same(place));
    let taken = HostSlot { domain: member.domain.clone(), member: Some(member.clone()) };
    let at = at.or_else(|| places.iter().position(free));
    if let Some(place) = at.and_then(|at| places.get_mut(at)) {
        *place = taken;
        return;
    }
    let after = places.iter().rposition(same).map_or(places.len(), |at| at + 1);
    places.insert(after, taken);
}

/// Closes the gaps: within each run of places of one domain the last host moves into the first gap.
fn closed_up(places: Vec<HostSlot>) -> Vec<Member> {
    let mut members = Vec::new();
    for run in places.chunk_by(|one, next| one.domain == next.domain) {
        let mut run: Vec<Option<&Member>> = run.iter().map(|place| place.member.as_ref()).collect();
        while let Some(gap) = run.iter().position(Option::is_none) {
            // If the last place is a gap itself, it is dropped.
            if let Some(Some(last)) = run.pop()
                && let Some(place) = run.get_mut(gap)
            {
                *place = Some(last);
            }
        }
        members.extend(run.into_iter().flatten().cloned());
    }
    members
}

fn ranks(members: &[&Member]) -> u32 {
    members.iter().map(|member| member.ranks).fold(0, u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(host: &str, domain: &str) -> Member {
        Member {
            launcher: host.to_owned(),
            host: host.to_owned(),
            ranks: 2,
            domain: domain.to_owned(),
            ..Member::default()
        }
    }

    /// Hosts by name, with the domain after a colon. A "-" marks lost hosts.
    fn hosts(text: &str) -> Vec<(Seated, bool)> {
        let each = text.split_whitespace().map(|host| {
            let (name, domain) = host.split_once(':').unwrap_or((host, ""));
            (member(name.trim_start_matches('-'), domain), !name.starts_with('-'))
        });
        let (members, here): (Vec<Member>, Vec<bool>) = each.unzip();
        seated(members).into_iter().zip(here).collect()
    }

    fn limits(least: u32, most: u32, multiple: u32) -> Limits {
        Limits { hosts: (least, most), multiple, ..Limits::fixed(most) }
    }

    fn order(arranged: &Arranged) -> String {
        let names: Vec<&str> = arranged.seats.iter().map(|at| at.member.host.as_str()).collect();
        names.join(" ")
    }

    fn check(before: &str, waiting: &str, limits: &Limits, expect: &str) {
        let waiting: Vec<Member> = waiting
            .split_whitespace()
            .map(|host| host.split_once(':').map_or_else(|| member(host, ""), |(name, of)| member(name, of)))
            .collect();
        let arranged = arrange(&hosts(before), &waiting, limits, "a").expect("a world");
        assert_eq!(order(&arranged), expect, "{before} + {waiting:?}");
        let world = arranged.seats.len() as u32 * 2;
        assert!(arranged.seats.iter().all(|at| at.seat.world_size == world));
    }

    #[test]
    fn the_highest_seated_host_moves_into_the_place_of_a_lost_one() {
        check("a b c", "", &limits(1, 3, 1), "a b c");
        check("a b -c", "", &limits(1, 3, 1), "a b");
        check("a -b c d", "", &limits(1, 4, 1), "a d c");
        check("-a b c d", "", &limits(1, 4, 1), "d b c");
        check("-a -b c -d", "", &limits(1, 4, 1), "c");
    }

    #[test]
    fn hosts_of_a_domain_stay_next_to_each_other() {
        check("-a:x b:x c:y d:y", "", &limits(1, 4, 1), "b c d");
        check("a:x b:x -c:y d:y e:y", "", &limits(1, 5, 1), "a b e d");
        check("a:x -b:x c:y -d:y", "e:y f:z", &limits(1, 4, 1), "a f c e");
        check("a:x b:x c:y", "d:x", &limits(1, 4, 1), "a b d c");
        check("a:x b:x c:y", "d:z", &limits(1, 4, 1), "a b c d");
    }

    #[test]
    fn returning_hosts_take_the_last_ranks() {
        check("a b", "c", &limits(1, 3, 1), "a b c");
        check("a b", "c d e", &limits(1, 3, 1), "a b c");
    }

    #[test]
    fn the_world_is_a_multiple_of_what_the_user_gave() {
        let arranged = arrange(&hosts("a b -c d"), &[], &limits(1, 4, 4), "a").expect("a world");
        assert_eq!(order(&arranged), "a b");
        assert_eq!(arranged.benched, [member("d", "")]);
        let arranged = arrange(&hosts("a b"), &[member("c", "")], &limits(1, 4, 4), "a").expect("a world");
        assert_eq!((order(&arranged).as_str(), arranged.benched.len()), ("a b", 0), "one more is too few");
        assert_eq!(arrange(&hosts("a -b -c"), &[], &limits(1, 3, 4), "a"), None);
    }

    #[test]
    fn fewer_hosts_than_the_least_are_too_few() {
        assert_eq!(arrange(&hosts("a -b -c"), &[], &limits(2, 3, 1), "a"), None);
    }

    proptest! {
        #[test]
        fn ranks_have_no_gaps_and_no_host_has_two_seats(
            here in proptest::collection::vec((any::<bool>(), 0u8..3, 1u32..5), 1..9),
            more in proptest::collection::vec((0u8..3, 1u32..5), 0..4),
            multiple in 1u32..5,
        ) {
            let sized = |name: String, domain: u8, ranks| Member { ranks, ..member(&name, &domain.to_string()) };
            let members: Vec<Member> =
                here.iter().zip(0..).map(|((_, domain, ranks), at)| sized(format!("h{at}"), *domain, *ranks)).collect();
            let before: Vec<(Seated, bool)> =
                seated(members).into_iter().zip(&here).zip(0..).map(|((at, (here, ..)), n)| (at, *here || n == 0)).collect();
            let waiting: Vec<Member> =
                more.iter().zip(0..).map(|((domain, ranks), at)| sized(format!("w{at}"), *domain, *ranks)).collect();
            let limits = limits(1, 9, multiple);
            if let Some(Arranged { seats, benched }) = arrange(&before, &waiting, &limits, "h0") {
                let ranks: Vec<u32> =
                    seats.iter().flat_map(|at| at.seat.first_rank..at.seat.first_rank + at.member.ranks).collect();
                prop_assert_eq!(&ranks, &(0..ranks.len() as u32).collect::<Vec<u32>>());
                prop_assert!((ranks.len() as u32).is_multiple_of(multiple));
                prop_assert!(seats.iter().all(|at| at.seat.world_size as usize == ranks.len()));
                let mut names: Vec<&str> = seats.iter().map(|at| at.member.launcher.as_str()).collect();
                names.extend(benched.iter().map(|member| member.launcher.as_str()));
                names.sort_unstable();
                names.dedup();
                prop_assert_eq!(names.len(), seats.len() + benched.len());
                prop_assert!(before.iter().filter(|(_, here)| *here).all(|(at, _)| names.contains(&at.member.launcher.as_str())));
                prop_assert!(seats.iter().any(|at| at.member.launcher == "h0"), "the leader has a seat");
            }
        }
    }
}
