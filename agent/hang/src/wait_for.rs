//! Finds who holds up whom, by collective counters.
//!
//! A rank that waits in a communicator waits for the members that have not entered the operation it is in. A walk
//! from rank to rank ends at a rank that waits in no communicator (the root), at a rank that does not report, at an
//! operation that all members have entered and none has left (the network), or in a circle (incompatible orders of
//! collectives). Every blocked rank is followed. Known paths are not walked again, so the work is proportional to the
//! number of counters.
//!
//! A walk that ends at a silent rank may end too early: the silent rank may itself wait for another. It does if one
//! of its communicators has a member that reports, has not entered and waits elsewhere. Then the walk continues from
//! that member.

use std::collections::BTreeMap;

use crate::counters::Counters;
use mainstay_model::time::{Mono, Span};

/// What the judge knows about a rank in addition to its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Its counters are current.
    Reports,
    /// Its counters are from before the others stopped; the time of its last report.
    Silent(Mono),
    /// It takes part in no communicator, whatever its counters show: stopped, ended, or in a section outside of
    /// collectives.
    OtherHosts,
}

/// Where a walk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// At a rank that waits in no communicator.
    Root(u32),
    /// At a rank that does not report.
    Silent(u32),
    /// At an operation that members entered with different kinds, types or sizes.
    Mismatch(u32),
    /// Ranks wait for each other in a circle; its lowest rank.
    Cycle(u32),
    /// At an operation that all members have entered.
    Network(u32),
}

/// What the walks found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Located {
    /// Ends with the number of other ranks that wait for them, the most first.
    pub(crate) ends: Vec<(End, u32)>,
    /// The members of the circle, if there is one.
    pub(crate) circle: Vec<u32>,
    /// Ranks that wait.
    pub(crate) waiting: u32,
}

/// The members of a communicator, summarized.
#[derive(Clone, Copy, Debug)]
struct Row {
    least: u64,
    /// A member with the lowest count.
    late: u32,
    most: u64,
    /// A member that is elsewhere, even if it may have entered.
    away: u32,
    /// Silent members, with the operations that they had entered: the one that reported last, because it fell silent
    /// together with the job, and the one that had entered the fewest.
    last_received: (Mono, u64, u32),
    least_received: (u64, u32),
    /// A member that reports and waits for nothing in this communicator.
    idle: u32,
    signature: u64,
    /// The number of members at the highest count with a signature other than `signature`, and one of them.
    others: u32,
    other: u32,
    agreeing: u32,
    one: u32,
}

/// Ranks whose last reports are within this time of each other fell silent together. Allows for lost reports.
pub(crate) const TOGETHER: Span = Span::seconds(5);

const NO_ONE: u32 = u32::MAX;

const EMPTY: Row = Row {
    least: u64::MAX,
    late: NO_ONE,
    most: 0,
    away: NO_ONE,
    last_received: (Mono(0), u64::MAX, NO_ONE),
    least_received: (u64::MAX, NO_ONE),
    idle: NO_ONE,
    signature: 0,
    others: 0,
    other: NO_ONE,
    agreeing: 0,
    one: NO_ONE,
};

/// Where a rank's walk goes next.
#[derive(Clone, Copy, Debug)]
enum Next {
    To(u32),
    Ends(End),
}

/// Walks from every rank that waits. `host` gives the host of a rank: its ranks fall silent together.
pub(crate) fn locate(
    counters: &Counters,
    presence: impl Fn(usize) -> Presence,
    host: impl Fn(usize) -> u32,
    ranks: usize,
) -> Located {
    let rows = rows(counters, &presence, ranks);
    let mut ends: Vec<Option<End>> = vec![None; ranks];
    let mut on_path = vec![0_u32; ranks];
    let mut located = Located::default();
    let mut path: Vec<u32> = Vec::new();
    let mut waiting = Vec::new();
    for start in 0..ranks {
        if presence(start) != Presence::Reports
            || !counters.entries_of(start).iter().any(|entry| entry.is_open())
        {
            continue;
        }
        waiting.push(start);
        path.clear();
        let mark = u32::try_from(start).unwrap_or(NO_ONE).wrapping_add(1);
        let mut at = start;
        let end = loop {
            if let Some(end) = ends[at] {
                break end;
            }
            if on_path[at] == mark {
                let from = path.iter().position(|rank| *rank as usize == at).unwrap_or(0);
                if located.circle.is_empty() {
                    located.circle = path[from..].to_vec();
                    located.circle.sort_unstable();
                }
                break End::Cycle(path[from..].iter().copied().min().unwrap_or(NO_ONE));
            }
            on_path[at] = mark;
            path.push(u32::try_from(at).unwrap_or(NO_ONE));
            match next(counters, &rows, &presence, at) {
                Next::To(rank) => at = rank as usize,
                Next::Ends(end) => break end,
            }
        };
        for rank in &path {
            ends[*rank as usize] = Some(end);
        }
    }
    beyond_silence(counters, &rows, &presence, &host, &mut ends, &waiting);
    located.waiting = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
    located.ends = tally(&ends, &waiting);
    located
}

/// Ranks that report, have entered operations, and have completed fewer than the furthest member of a communicator: where all have
/// entered, their devices stand still.
pub(crate) fn behind(counters: &Counters, presence: impl Fn(usize) -> Presence, ranks: usize) -> Vec<u32> {
    let mut furthest = vec![0; counters.communicators()];
    let known = |rank: usize| {
        let entries = if presence(rank) == Presence::Reports { counters.entries_of(rank) } else { &[] };
        // A member without a record of a communicator may have completed anything.
        entries.iter().filter(|entry| entry.count.entered > 0)
    };
    for entry in (0..ranks).flat_map(known) {
        let row = &mut furthest[entry.row as usize];
        *row = entry.count.completed.max(*row);
    }
    let is_behind =
        |rank: &usize| known(*rank).any(|entry| entry.count.completed < furthest[entry.row as usize]);
    (0..ranks).filter(is_behind).filter_map(|rank| u32::try_from(rank).ok()).collect()
}

fn rows(counters: &Counters, presence: &impl Fn(usize) -> Presence, ranks: usize) -> Vec<Row> {
    let mut rows = vec![EMPTY; counters.communicators()];
    for rank in 0..ranks {
        let presence = presence(rank);
        let number = u32::try_from(rank).unwrap_or(NO_ONE);
        for entry in counters.entries_of(rank) {
            let Some(row) = rows.get_mut(entry.row as usize) else { continue };
            if let Presence::Silent(since) = presence {
                let entered = entry.count.entered;
                row.least_received = row.least_received.min((entered, number));
                if row.last_received.2 == NO_ONE || since > row.last_received.0 {
                    row.last_received = (since, entered, number);
                }
                continue;
            }
            if !entry.is_open() {
                row.idle = row.idle.min(number);
            }
            if presence == Presence::OtherHosts {
                row.away = row.away.min(number);
            }
            if entry.count.entered < row.least {
                (row.least, row.late) = (entry.count.entered, number);
            }
            let signature = entry.count.signature;
            if entry.count.entered > row.most || row.agreeing == 0 {
                row.most = entry.count.entered.max(row.most);
                (row.signature, row.agreeing, row.one, row.others, row.other) =
                    (signature, 1, number, 0, NO_ONE);
            } else if entry.count.entered == row.most && signature != 0 && row.signature != 0 {
                if signature == row.signature {
                    row.agreeing += 1;
                } else {
                    row.others += 1;
                    row.other = row.other.min(number);
                }
            }
        }
    }
    rows
}

fn next(counters: &Counters, rows: &[Row], presence: &impl Fn(usize) -> Presence, rank: usize) -> Next {
    let number = u32::try_from(rank).unwrap_or(NO_ONE);
    match presence(rank) {
        Presence::Silent(_) => return Next::Ends(End::Silent(number)),
        Presence::OtherHosts => return Next::Ends(End::Root(number)),
        Presence::Reports => {}
    }
    let mut best = End::Root(number);
    for entry in counters.entries_of(rank).iter().filter(|entry| entry.is_open()) {
        let Some(row) = rows.get(entry.row as usize) else { continue };
        let wanted = entry.count.completed + 1;
        if row.least < wanted && row.late != number {
            return Next::To(row.late);
        }
        if row.away != NO_ONE {
            return Next::To(row.away);
        }
        // A rank that reported having entered before it fell silent is not waited for.
        let found = if row.last_received.1 < wanted {
            End::Silent(row.last_received.2)
        } else if row.least_received.0 < wanted {
            End::Silent(row.least_received.1)
        } else if row.others > 0 && row.least == row.most {
            // The minority is assumed to be wrong.
            End::Mismatch(if row.others <= row.agreeing { row.other } else { row.one })
        } else {
            End::Network(entry.row)
        };
        // Not being in a communicator is the weakest evidence: it counts only if nothing is open. Of the others the
        // first kind counts, and of silent ranks the one that fell silent last.
        best = match (best, found) {
            (End::Root(_), found) => found,
            (End::Silent(a), End::Silent(b)) if received(presence, b) > received(presence, a) => found,
            (End::Silent(_), End::Silent(_)) => best,
            _ => best.min(found),
        };
    }
    Next::Ends(best)
}

/// When a silent rank last reported.
fn received(presence: &impl Fn(usize) -> Presence, rank: u32) -> Mono {
    match presence(rank as usize) {
        Presence::Silent(since) => since,
        Presence::Reports | Presence::OtherHosts => Mono::NEVER,
    }
}

/// Continues the walks that end at silent hosts whose ranks are themselves waiting.
fn beyond_silence(
    counters: &Counters,
    rows: &[Row],
    presence: &impl Fn(usize) -> Presence,
    host: &impl Fn(usize) -> u32,
    ends: &mut [Option<End>],
    waiting: &[usize],
) {
    let mut silent: Vec<u32> = waiting
        .iter()
        .filter_map(|rank| if let Some(End::Silent(rank)) = ends[*rank] { Some(rank) } else { None })
        .collect();
    silent.sort_unstable();
    silent.dedup();
    let mut leads: BTreeMap<u32, End> = BTreeMap::new();
    for rank in silent {
        let own = host(rank as usize);
        let idle = counters.entries_of(rank as usize).iter().map(|entry| rows[entry.row as usize].idle);
        let on =
            idle.filter(|idle| *idle != NO_ONE).map(|idle| ends[idle as usize].unwrap_or(End::Root(idle)));
        // A rank that waits for this same host does not explain why the host would wait. Nor does an operation that
        // all have entered, which may only be queued behind another. A rank that fell silent long before the job
        // stopped does not explain ranks that did not: the job continued without it.
        let since = received(presence, rank);
        let elsewhere = |end: &End| match end {
            End::Root(_) => true,
            End::Silent(rank) => {
                host(*rank as usize) != own && received(presence, *rank).after(TOGETHER) >= since
            }
            End::Mismatch(_) | End::Cycle(_) | End::Network(_) => false,
        };
        if let Some(end) = on.filter(elsewhere).min_by_key(|end| kind_order(*end)) {
            leads.entry(own).or_insert(end);
        }
    }
    if leads.is_empty() {
        return;
    }
    let follow = |mut end: End| {
        for _ in 0..=leads.len() {
            let End::Silent(rank) = end else { return Some(end) };
            let Some(on) = leads.get(&host(rank as usize)) else { return Some(end) };
            end = *on;
        }
        // Silent hosts that only wait for each other explain nothing.
        None
    };
    for rank in waiting {
        if let Some(end) = ends[*rank].and_then(follow) {
            ends[*rank] = Some(end);
        }
    }
}

/// Counts for each end the ranks that wait for it, without the end itself.
fn tally(ends: &[Option<End>], waiting: &[usize]) -> Vec<(End, u32)> {
    let mut found: Vec<(End, u32)> = Vec::new();
    let mut sorted: Vec<End> = waiting
        .iter()
        .filter_map(|rank| ends[*rank].map(|end| (rank, end)))
        .filter(|(rank, end)| !matches!(end, End::Root(root) if *root as usize == **rank))
        .map(|(_, end)| end)
        .collect();
    sorted.sort_unstable();
    for end in sorted {
        match found.last_mut() {
            Some((last, votes)) if *last == end => *votes += 1,
            _ => found.push((end, 1)),
        }
    }
    // Strongest evidence first: a rank that is known to be elsewhere, then a silent rank, then the network.
    found.sort_by_key(|(end, votes)| (kind_order(*end), std::cmp::Reverse(*votes), *end));
    found
}

fn kind_order(end: End) -> u8 {
    match end {
        End::Root(_) => 0,
        End::Silent(_) => 1,
        End::Mismatch(_) => 2,
        End::Cycle(_) => 3,
        End::Network(_) => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Count;

    fn count(comm: u64, entered: u64, completed: u64) -> Count {
        Count { comm, entered, completed, signature: 0 }
    }

    fn located(ranks: &[&[Count]], presence: impl Fn(usize) -> Presence) -> Located {
        let mut counters = Counters::new(ranks.len());
        for (rank, counts) in ranks.iter().enumerate() {
            counters.set(rank, counts);
        }
        locate(&counters, presence, |rank| rank as u32, ranks.len())
    }

    #[test]
    fn the_rank_that_never_enters_is_the_root_of_a_chain() {
        // 0 and 1 wait in A for 2, which waits in B for 3, which waits in none.
        let found = located(
            &[&[count(1, 5, 4)], &[count(1, 5, 4)], &[count(1, 4, 4), count(2, 9, 8)], &[count(2, 8, 8)]],
            |_| Presence::Reports,
        );
        assert_eq!(found.ends, [(End::Root(3), 3)]);
    }

    #[test]
    fn an_operation_that_all_entered_and_none_left_is_the_network() {
        let found = located(&[&[count(7, 5, 4)], &[count(7, 5, 4)]], |_| Presence::Reports);
        assert_eq!(found.ends, [(End::Network(0), 2)]);
    }

    #[test]
    fn of_ranks_that_entered_everything_those_that_completed_less_are_behind() {
        let counts_of = |ranks: &[&[Count]]| {
            let mut counters = Counters::new(ranks.len());
            for (rank, counts) in ranks.iter().enumerate() {
                counters.set(rank, counts);
            }
            behind(&counters, |_| Presence::Reports, ranks.len())
        };
        let alike: &[Count] = &[count(7, 9, 4)];
        assert_eq!(counts_of(&[alike, alike, alike]), [] as [u32; 0]);
        assert_eq!(counts_of(&[alike, &[count(7, 9, 3)], alike, &[count(7, 9, 2), count(8, 3, 3)]]), [1, 3]);
        assert_eq!(
            counts_of(&[alike, &[Count { comm: 7, ..Count::default() }]]),
            [] as [u32; 0],
            "not recorded"
        );
    }

    #[test]
    fn a_silent_member_is_named_only_if_no_reporting_member_is_late() {
        let silent = |rank| if rank == 2 { Presence::Silent(Mono(1)) } else { Presence::Reports };
        let ranks: [&[Count]; 3] = [&[count(7, 5, 4)], &[count(7, 5, 4)], &[count(7, 4, 4)]];
        assert_eq!(located(&ranks, silent).ends, [(End::Silent(2), 2)]);
        let ranks: [&[Count]; 3] = [&[count(7, 5, 4)], &[count(7, 4, 4)], &[count(7, 4, 4)]];
        assert_eq!(located(&ranks, silent).ends, [(End::Root(1), 1)]);
    }

    #[test]
    fn a_silent_rank_that_waits_itself_is_skipped() {
        // 0 waits for 1, which is silent; 1 can only wait for 2, which has not entered and waits for 3.
        let ranks: [&[Count]; 4] = [
            &[count(1, 5, 4)],
            &[count(1, 4, 4), count(2, 4, 4)],
            &[count(2, 4, 4), count(3, 9, 8)],
            &[count(3, 8, 8)],
        ];
        let silent =
            |rank| if rank == 1 || rank == 3 { Presence::Silent(Mono(1)) } else { Presence::Reports };
        assert_eq!(located(&ranks, silent).ends, [(End::Silent(3), 2)]);
    }

    #[test]
    fn a_rank_that_entered_before_it_fell_silent_is_not_waited_for() {
        let silent = |rank| if rank > 0 { Presence::Silent(Mono(1)) } else { Presence::Reports };
        let ranks: [&[Count]; 3] = [&[count(7, 5, 4)], &[count(7, 5, 4)], &[count(7, 4, 4)]];
        assert_eq!(located(&ranks, silent).ends, [(End::Silent(2), 1)]);
    }

    #[test]
    fn incompatible_orders_are_a_circle() {
        let found = located(&[&[count(1, 1, 0), count(2, 0, 0)], &[count(1, 0, 0), count(2, 1, 0)]], |_| {
            Presence::Reports
        });
        assert_eq!(found.ends, [(End::Cycle(0), 2)]);
        assert_eq!(found.circle, [0, 1]);
    }

    #[test]
    fn different_operations_with_one_number_are_a_mismatch_of_the_minority() {
        let with = |signature| Count { signature, ..count(7, 5, 4) };
        let counts = [[with(1)], [with(1)], [with(2)]];
        let ranks: Vec<&[Count]> = counts.iter().map(<[Count; 1]>::as_slice).collect();
        assert_eq!(located(&ranks, |_| Presence::Reports).ends, [(End::Mismatch(2), 3)]);
    }

    #[test]
    fn a_stopped_rank_with_work_in_progress_is_the_root() {
        let stopped = |rank| if rank == 1 { Presence::OtherHosts } else { Presence::Reports };
        let found = located(&[&[count(7, 5, 4)], &[count(7, 5, 4)]], stopped);
        // It has entered, but takes no part in the operation.
        assert_eq!(found.ends, [(End::Root(1), 1)]);
    }
}
