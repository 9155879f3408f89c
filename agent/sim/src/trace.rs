//! Replays the faults of real servers under a job that goes on with fewer hosts, and with spares. With the memory of
//! hosts it prefers others to those that failures have implicated, by the rule of [`mainstay_group::round::to_avoid`].

use std::collections::{BTreeMap, BTreeSet};

use mainstay_group::round::{Member, to_avoid};

/// The trace, with its source and licence.
const TRACE: &str = include_str!("../data/infinitehbd.tsv");

/// The servers of the trace, most without any fault.
pub const SERVERS: u32 = 400;

/// The length of the trace in days.
pub const DAYS: f64 = 348.98;

const DAY: f64 = 86_400.0;

/// How long a failure counts, in seconds.
const MEMORY: f64 = 14.0 * DAY;

/// What takes a server out of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A test or a change: it is announced.
    Planned,
    /// A fault whose verdict implicates the host: of its hardware or its system software. Not of the network.
    Host,
    /// Another or an unknown fault.
    Other,
}

/// A time in which a server is out of service.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// The server.
    pub host: u32,
    /// When it starts, in seconds since the start of the trace.
    pub from: f64,
    /// When the server is back in service.
    pub to: f64,
    /// What it is.
    pub kind: Kind,
}

/// The faults of the trace, by their start.
pub fn faults() -> Vec<Fault> {
    let lines = TRACE.lines().filter(|line| !line.starts_with('#'));
    let mut faults: Vec<Fault> = lines.filter_map(fault).collect();
    faults.sort_by(|one, other| one.from.total_cmp(&other.from));
    faults
}

fn fault(line: &str) -> Option<Fault> {
    let mut columns = line.split('\t');
    let mut next = || columns.next();
    let (from, to): (f64, f64) = (next()?.parse().ok()?, next()?.parse().ok()?);
    let (host, level, class) = (next()?.parse().ok()?, next()?, next()?);
    let kind = match (level, class) {
        (_, "Stress Test Failure" | "Test" | "Change") => Kind::Planned,
        (_, "NIC" | "Parameter Plane Cable") => Kind::Other,
        ("Hardware Failure", _) | ("Software Failure", "Operating System" | "Firmware") => Kind::Host,
        _ => Kind::Other,
    };
    Some(Fault { host, from: from * DAY, to: to * DAY, kind })
}

/// The job and its recovery. All times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Hosts of [`SERVERS`] that get no ranks while all others are in service.
    pub spares: u32,
    /// Whether hosts that failures implicated are avoided.
    pub remembers: bool,
    /// From a failure until all ranks train again.
    pub restart: f64,
    /// The same where the ranks saved before: no fault is detected, and no step is lost.
    pub ordered_restart: f64,
    /// How long ranks run at least before they are stopped so that more hosts can take part.
    pub grow_after: f64,
    /// The interval of saves, the time for which one stops training, and the time until it can be loaded.
    pub saves_every: f64,
    /// See `saves_every`.
    pub stall: f64,
    /// See `saves_every`.
    pub saved_after: f64,
}

/// What became of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replayed {
    /// The time of hosts with steps that were kept, as a share of the time of all hosts that the job wants.
    pub productive: f64,
    /// Failures that stopped the job.
    pub failures: u32,
    /// How often a host in service was avoided.
    pub exclusions: u32,
    /// Of these: how often it had another fault later, and how often within 14 days.
    pub confirmed: u32,
    /// See `confirmed`.
    pub confirmed_soon: u32,
}

struct State<'t> {
    job: Job,
    faults: &'t [Fault],
    /// The number of faults that keep each server out of service.
    down: BTreeMap<u32, u32>,
    /// Hosts with ranks; the first leads.
    taking_part: Vec<u32>,
    /// Hosts in service without ranks, in order of their arrival.
    free: Vec<u32>,
    /// When failures implicated a host.
    implicated: BTreeMap<u32, Vec<f64>>,
    avoided: BTreeSet<u32>,
    /// When all ranks train in this run, and with how many hosts.
    trains_from: f64,
    runs_on: f64,
    /// Since when more hosts could take part.
    could_grow: Option<f64>,
    kept: f64,
    replayed: Replayed,
}

/// Replays the trace under a job.
pub fn replay(job: Job, faults: &[Fault]) -> Replayed {
    let wanted = SERVERS - job.spares;
    let mut state = State {
        job,
        faults,
        down: BTreeMap::new(),
        taking_part: (0..wanted).collect(),
        free: (wanted..SERVERS).collect(),
        implicated: BTreeMap::new(),
        avoided: BTreeSet::new(),
        trains_from: 0.0,
        runs_on: f64::from(wanted),
        could_grow: None,
        kept: 0.0,
        replayed: Replayed::default(),
    };
    let starts = faults.iter().map(|fault| (fault.from, true, *fault));
    let ends = faults.iter().map(|fault| (fault.to, false, *fault));
    let mut events: Vec<(f64, bool, Fault)> = starts.chain(ends).collect();
    // A fault without duration starts before it ends.
    events.sort_by(|one, other| one.0.total_cmp(&other.0).then(other.1.cmp(&one.1)));
    for of_one_time in events.chunk_by(|one, other| one.0.to_bits() == other.0.to_bits()) {
        if let Some((at, ..)) = of_one_time.first() {
            state.grow_until(*at);
            state.step(*at, of_one_time);
        }
    }
    let end = DAYS * DAY;
    state.grow_until(end);
    state.end_run(end, true);
    Replayed { productive: state.kept / (f64::from(wanted) * end), ..state.replayed }
}

impl State<'_> {
    /// Stops the ranks for hosts that could take part, once they have run for long enough.
    fn grow_until(&mut self, at: f64) {
        let Some(since) = self.could_grow else { return };
        let due = since.max(self.trains_from + self.job.grow_after);
        if due < at {
            self.end_run(due, true);
            self.round(due, self.job.ordered_restart);
        }
    }

    fn lacking(&self) -> usize {
        ((SERVERS - self.job.spares) as usize).saturating_sub(self.taking_part.len())
    }

    /// Servers fail or come back at the same time.
    fn step(&mut self, at: f64, events: &[(f64, bool, Fault)]) {
        let (mut fails, mut leaves) = (false, false);
        for (_, starts, fault) in events {
            let down = self.down.entry(fault.host).or_default();
            if !starts {
                *down = down.saturating_sub(1);
                if *down == 0 && !self.taking_part.contains(&fault.host) && !self.free.contains(&fault.host) {
                    self.free.push(fault.host);
                }
                continue;
            }
            *down += 1;
            self.free.retain(|host| *host != fault.host);
            if self.taking_part.contains(&fault.host) {
                self.taking_part.retain(|host| *host != fault.host);
                fails |= fault.kind != Kind::Planned;
                leaves = true;
                if fault.kind == Kind::Host {
                    self.implicated.entry(fault.host).or_default().push(at);
                }
            }
        }
        if leaves {
            self.end_run(at, !fails);
            self.replayed.failures += u32::from(fails);
            let restart = if fails { self.job.restart } else { self.job.ordered_restart };
            self.round(at, restart);
        }
        if self.lacking() > 0 && !self.free.is_empty() {
            self.could_grow.get_or_insert(at);
        }
    }

    /// A run of the ranks ends. Steps after the last save are kept only if the ranks were asked to save.
    fn end_run(&mut self, at: f64, saves: bool) {
        let Job { saves_every, stall, saved_after, .. } = self.job;
        let ran = (at - self.trains_from).max(0.0);
        let steps = match saves {
            true => ran * saves_every / (saves_every + stall),
            false => ((ran - saved_after).max(0.0) / (saves_every + stall)).floor() * saves_every,
        };
        self.kept += steps * self.runs_on;
    }

    /// Free hosts get the places of lost ones, and one that failures implicated is exchanged.
    fn round(&mut self, at: f64, restart: f64) {
        let count = |host: &u32| self.implicated.get(host).map_or(0, |times| recent(times, at));
        let member = |host: &u32| Member {
            launcher: host.to_string(),
            leads: self.taking_part.first() == Some(host),
            ranks: 8,
            implicated: if self.job.remembers { count(host) } else { 0 },
            ..Member::default()
        };
        let mut free: Vec<(u32, Member)> = self.free.iter().map(|host| (*host, member(host))).collect();
        free.sort_by_key(|(_, member)| member.is_avoided());
        let mut members: Vec<(u32, Member)> =
            self.taking_part.iter().map(|host| (*host, member(host))).collect();
        members.extend(free.drain(..self.lacking().min(free.len())));
        let leads = |member: &Member| member.leads;
        let swap = to_avoid(members.iter().map(|(_, of)| of), free.iter().map(|(_, of)| of), leads);
        if let Some((seat, by)) = swap
            && let (Some(avoided), Some(instead)) = (members.get_mut(seat), free.get_mut(by))
        {
            std::mem::swap(avoided, instead);
        }
        let has_seated = members.len() > self.taking_part.len() || swap.is_some();
        let passed: BTreeSet<u32> =
            free.iter().filter(|(_, of)| of.is_avoided()).map(|(host, _)| *host).collect();
        self.avoided.retain(|host| passed.contains(host));
        for host in passed.into_iter().filter(|_| has_seated) {
            if self.avoided.insert(host) {
                self.exclude(host, at);
            }
        }
        self.taking_part = members.into_iter().map(|(host, _)| host).collect();
        self.free = free.into_iter().map(|(host, _)| host).collect();
        (self.trains_from, self.runs_on) = (at + restart, self.taking_part.len() as f64);
        self.could_grow = None;
    }

    /// A host in service is avoided: whether that was right is known from the rest of the trace.
    fn exclude(&mut self, host: u32, at: f64) {
        let is_later = |fault: &&Fault| fault.host == host && fault.from > at && fault.kind != Kind::Planned;
        let next = self.faults.iter().find(is_later).map(|fault| fault.from - at);
        self.replayed.exclusions += 1;
        self.replayed.confirmed += u32::from(next.is_some());
        self.replayed.confirmed_soon += u32::from(next.is_some_and(|after| after <= MEMORY));
    }
}

fn recent(times: &[f64], at: f64) -> u32 {
    u32::try_from(times.iter().filter(|time| at - **time <= MEMORY).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(spares: u32, remembers: bool) -> Job {
        Job {
            spares,
            remembers,
            restart: 100.0,
            ordered_restart: 50.0,
            grow_after: 300.0,
            saves_every: 10.0,
            stall: 0.0,
            saved_after: 0.0,
        }
    }

    fn fault(host: u32, day: f64, days: f64, kind: Kind) -> Fault {
        Fault { host, from: day * DAY, to: (day + days) * DAY, kind }
    }

    #[test]
    fn the_whole_trace_is_read() {
        let faults = faults();
        assert_eq!(faults.len(), 584);
        assert!(faults.iter().all(|fault| fault.from <= fault.to && fault.host < SERVERS));
        assert_eq!(faults.iter().filter(|fault| fault.kind == Kind::Planned).count(), 103);
    }

    #[test]
    fn a_lost_host_costs_a_restart_and_without_a_spare_its_time() {
        let one = [fault(7, 10.0, 1.0, Kind::Host)];
        let with_spare = replay(job(1, false), &one).productive;
        assert!((with_spare - (1.0 - 100.0 / (DAYS * DAY))).abs() < 1e-6, "{with_spare}");
        let without = replay(job(0, false), &one).productive;
        assert!((with_spare - without - 1.0 / (400.0 * DAYS)).abs() < 1e-5, "{without}");
    }

    #[test]
    fn a_host_that_was_implicated_twice_is_avoided_while_another_one_is_free() {
        let other = |host, day, days| fault(host, day, days, Kind::Other);
        let lemon = |day, days| fault(7, day, days, Kind::Host);
        let faults = [
            lemon(1.0, 0.1),
            other(10, 1.5, 0.3),
            // No other host is free: it gets ranks again.
            other(11, 1.6, 0.3),
            lemon(2.0, 0.3),
            other(12, 2.5, 0.05),
            // It is the first that is free.
            other(13, 2.6, 0.05),
            lemon(3.0, 0.1),
        ];
        let forgets = replay(job(2, false), &faults);
        assert_eq!((forgets.failures, forgets.exclusions), (7, 0));
        let remembers = replay(job(2, true), &faults);
        assert_eq!((remembers.failures, remembers.exclusions), (6, 1));
        assert_eq!((remembers.confirmed, remembers.confirmed_soon), (1, 1));
        assert_eq!(replay(job(0, true), &faults).exclusions, 0, "no other host is free");
    }
}
