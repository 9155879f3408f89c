//! Decides when a host is lost. Its leader suspects it when its beats stop or its connection ends, and asks others to
//! check it, so that a host with a slow link, or one cut off from the leader alone, does not count as dead:
//!
//! | what happened | beats | what the checks find | lost |
//! |---|---|---|---|
//! | no power, or all that it sends is lost | stop | nothing answers | after the checks |
//! | its kernel or its launcher is stalled | stop | its port is open, no launcher answers | after the checks |
//! | its launcher is gone | the connection ends | its port is closed | after the checks |
//! | a slow link | late | it answers | no |
//! | no route between it and the leader alone | stop | it answers | when it cannot follow the leader any more |

use std::collections::BTreeMap;

use super::suspicion::Suspicion;
use mainstay_model::entry::HostLoss;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::ProbeResult;

/// How long the hosts that were asked have to answer.
const LOOK_WITHIN: Span = Span::millis(1200);

/// A host that is still suspected is checked again after this time.
const RECHECK_AFTER: Span = Span::millis(1500);

/// A host that no one reaches is lost after at least this long a silence.
const UNREACHED: Span = Span::millis(1500);

/// The same for a host whose launcher does not answer: a busy machine may be slow to answer.
const UNANSWERED: Span = Span::millis(2400);

/// A host that still has time to connect is not checked before this time.
const UNASKED: Span = Span::seconds(2);

/// A host without a connection is lost after this time if no one could check it.
const UNSEEN: Span = Span::seconds(2);

/// How many other hosts are asked to check, in addition to the leader's.
pub const PROBERS: usize = 2;

/// What to do about a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing: it is not silent, or the evidence is not sufficient yet.
    Wait,
    /// Have others check it: see [`LivenessMonitor::asks`].
    Look,
    /// It is lost: [`LivenessMonitor::describe`] returns the reason.
    Lost,
}

/// Whether a follower is alive, as its leader sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct LivenessMonitor {
    suspicion: Suspicion,
    was_connected: bool,
    broken: Option<BrokenConnection>,
    inquiry: Option<Inquiry>,
}

/// There is no connection.
#[derive(Clone, Debug, PartialEq)]
struct BrokenConnection {
    since: Mono,
    why: String,
    /// How long it has to connect, unless others find that it is not alive.
    within: Span,
}

#[derive(Clone, Debug, PartialEq)]
struct Inquiry {
    since: Mono,
    probers: Vec<u32>,
    found: BTreeMap<u32, ProbeResult>,
}

impl LivenessMonitor {
    /// A follower that is not connected yet, and has this long to connect.
    pub fn expected(at: Mono, within: Span) -> LivenessMonitor {
        let broken = BrokenConnection { since: at, why: "it has not come back".to_owned(), within };
        LivenessMonitor {
            suspicion: Suspicion::new(at),
            was_connected: false,
            broken: Some(broken),
            inquiry: None,
        }
    }

    /// Shortens the time that it has to connect.
    pub fn is_expected_within(&mut self, within: Span) {
        if let Some(broken) = &mut self.broken {
            broken.within = within;
        }
    }

    /// It has a connection, the first or a new one.
    pub fn connects(&mut self, at: Mono) {
        self.suspicion.connected(at);
        (self.was_connected, self.broken, self.inquiry) = (true, None, None);
    }

    /// Its connection ended.
    pub fn breaks(&mut self, at: Mono, why: String) {
        if self.broken.is_none() {
            self.suspicion.connected(at);
            self.broken = Some(BrokenConnection { since: at, why, within: Span(0) });
            self.inquiry = None;
        }
    }

    /// A message arrived.
    pub fn received(&mut self, at: Mono) {
        self.suspicion.received(at);
    }

    /// A beat arrived.
    pub fn beat(&mut self, at: Mono) {
        self.suspicion.beat(at);
    }

    /// The leader itself was stalled for this long until now, or could decide nothing.
    pub fn exclude(&mut self, at: Mono, span: Span) {
        self.suspicion.exclude(at, span);
        if let Some(broken) = &mut self.broken {
            broken.since = broken.since.after(span).min(at);
        }
        self.inquiry = None;
    }

    /// Whether it was ever connected.
    pub fn was_connected(&self) -> bool {
        self.was_connected
    }

    /// Whether it can be asked to check others.
    pub fn is_well(&self, at: Mono) -> bool {
        self.broken.is_none() && !self.suspicion.is_suspect(at)
    }

    /// These were asked to check it.
    pub fn asks(&mut self, at: Mono, probers: Vec<u32>) {
        self.inquiry = Some(Inquiry { since: at, probers, found: BTreeMap::new() });
    }

    /// The result of one check.
    pub fn looked(&mut self, by: u32, sight: ProbeResult) {
        if let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.probers.contains(&by)) {
            inquiry.found.insert(by, sight);
        }
    }

    /// Whether someone checked, and no one got an answer.
    pub fn is_unreached(&self) -> bool {
        let found = self.inquiry.as_ref().map(|inquiry| &inquiry.found);
        found.is_some_and(|found| {
            !found.is_empty() && found.values().all(|sight| *sight != ProbeResult::Answers)
        })
    }

    /// How long it has been silent or disconnected.
    pub fn silence(&self, at: Mono) -> Span {
        match &self.broken {
            Some(broken) => at.since(broken.since),
            None => self.suspicion.silence(at),
        }
    }

    /// Decides what to do. `patience`: how long a follower continues without its leader.
    pub fn judge(&mut self, at: Mono, patience: Span) -> Judgement {
        let silence = self.silence(at);
        let within = self.broken.as_ref().map_or(Span(0), |broken| broken.within);
        if self.is_well(at) || silence < within.min(UNASKED) {
            self.inquiry = None;
            return Judgement::Wait;
        }
        let Some(inquiry) = &self.inquiry else { return Judgement::Look };
        let took = at.since(inquiry.since);
        if took < LOOK_WITHIN && inquiry.found.len() < inquiry.probers.len() {
            return Judgement::Wait;
        }
        let found = |sight| inquiry.found.values().any(|found| *found == sight);
        let lost = match () {
            () if inquiry.found.is_empty() && self.broken.is_none() => silence >= patience,
            () if inquiry.found.is_empty() => silence >= UNSEEN.max(within),
            () if found(ProbeResult::Answers) => silence >= patience.max(within),
            () if found(ProbeResult::Accepts) => silence >= UNANSWERED,
            () if self.broken.is_some() && !found(ProbeResult::Silent) => true,
            () => silence >= UNREACHED,
        };
        match lost {
            true => Judgement::Lost,
            false if took >= RECHECK_AFTER => Judgement::Look,
            false => Judgement::Wait,
        }
    }

    /// The kind of loss, once it is [`Judgement::Lost`].
    pub fn loss(&self) -> HostLoss {
        let found =
            |sight| self.inquiry.iter().any(|inquiry| inquiry.found.values().any(|found| *found == sight));
        match () {
            () if found(ProbeResult::Answers) => HostLoss::NotFollowing,
            () if found(ProbeResult::Accepts) => HostLoss::Unresponsive,
            () if found(ProbeResult::Silent) => HostLoss::Unreachable,
            () if found(ProbeResult::Refuses) => HostLoss::LauncherGone,
            () => HostLoss::Unknown,
        }
    }

    /// What was seen, and by whom: "no heartbeat for 2.40 s; hosts c and d cannot reach it either". `name` returns a
    /// host's name.
    pub fn describe(&self, at: Mono, name: impl Fn(u32) -> String) -> String {
        let silence = self.silence(at);
        let seen = match &self.broken {
            None => format!("no heartbeat for {silence}"),
            Some(BrokenConnection { why, .. }) => {
                format!("its launcher has had no connection for {silence} ({why})")
            }
        };
        let by = |sight: ProbeResult| -> Vec<String> {
            let found = self.inquiry.iter().flat_map(|inquiry| &inquiry.found);
            found.filter(|(_, found)| **found == sight).map(|(seat, _)| name(*seat)).collect()
        };
        let mut parts = vec![seen];
        for (sight, what) in [
            (ProbeResult::Silent, "cannot reach it either"),
            (ProbeResult::Accepts, "can connect to it and get no answer"),
            (ProbeResult::Refuses, "can reach it and find that its launcher is gone"),
            (ProbeResult::Answers, "can reach it"),
        ] {
            let who = by(sight);
            if !who.is_empty() {
                parts.push(format!("{} {what}", listed(&who)));
            }
        }
        parts.join("; ")
    }
}

/// "host a", "hosts a and b", "hosts a, b and c".
fn listed(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => format!("host {one}"),
        [all @ .., last] => format!("hosts {} and {last}", all.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Span = Span::seconds(10);

    /// A follower whose beats were regular for half a minute until now.
    struct Watched {
        vital: LivenessMonitor,
        now: Mono,
        /// When its last message arrived.
        received: Mono,
    }

    impl Watched {
        fn new() -> Watched {
            let mut watched =
                Watched { vital: LivenessMonitor::expected(Mono(0), LEASE), now: Mono(0), received: Mono(0) };
            watched.vital.connects(Mono(0));
            for _ in 0..60 {
                watched.now = watched.now.after(Span::millis(500));
                watched.vital.beat(watched.now);
            }
            watched.received = watched.now;
            watched
        }

        /// Time passes in looks of the leader. The hosts that are asked, seats 0, 2 and 3, find these sights. Returns
        /// when it is lost, if within `span`.
        fn lost_within(&mut self, span: Span, sights: &[(u32, ProbeResult)]) -> Option<Span> {
            let until = self.now.after(span);
            let mut asked = None;
            while self.now < until {
                self.now = self.now.after(Span::millis(100));
                match self.vital.judge(self.now, LEASE) {
                    Judgement::Wait => {}
                    Judgement::Look => {
                        self.vital.asks(self.now, vec![0, 2, 3]);
                        asked = Some(self.now);
                    }
                    Judgement::Lost => return Some(self.now.since(self.received)),
                }
                if asked.is_some_and(|asked| self.now.since(asked) >= Span::millis(900)) {
                    sights.iter().for_each(|(seat, sight)| self.vital.looked(*seat, *sight));
                }
            }
            None
        }

        fn describe(&self) -> String {
            self.vital.describe(self.now, |seat| ["a", "b", "c", "d"][seat as usize].to_owned())
        }
    }

    fn all(sight: ProbeResult) -> [(u32, ProbeResult); 3] {
        [(0, sight), (2, sight), (3, sight)]
    }

    #[test]
    fn a_host_without_power_is_lost_within_three_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(LEASE, &all(ProbeResult::Silent)).expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        assert_eq!(watched.vital.loss(), HostLoss::Unreachable);
        testing::snapshot!("lost", "no power", watched.describe());
    }

    #[test]
    fn a_host_whose_kernel_hangs_is_lost_within_three_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(LEASE, &all(ProbeResult::Accepts)).expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        assert_eq!(watched.vital.loss(), HostLoss::Unresponsive);
        testing::snapshot!("lost", "its kernel hangs", watched.describe());
    }

    #[test]
    fn a_host_whose_launcher_was_killed_is_lost_when_its_port_is_closed() {
        let mut watched = Watched::new();
        watched.vital.breaks(watched.now, "closed".to_owned());
        let lost = watched.lost_within(LEASE, &all(ProbeResult::Refuses)).expect("it is lost");
        assert!(lost < Span::seconds(2), "{lost}");
        assert_eq!(watched.vital.loss(), HostLoss::LauncherGone);
        testing::snapshot!("lost", "its launcher was killed", watched.describe());
    }

    #[test]
    fn a_host_that_receives_or_sends_nothing_is_lost_within_three_seconds_even_if_others_do_not_answer() {
        // What it sends is lost, or what is sent to it: in both cases no one gets an answer. One of the other hosts
        // is slow.
        let mut watched = Watched::new();
        let lost = watched
            .lost_within(LEASE, &[(0, ProbeResult::Silent), (2, ProbeResult::Silent)])
            .expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        assert_eq!(watched.vital.loss(), HostLoss::Unreachable);
    }

    #[test]
    fn a_host_that_others_reach_is_lost_only_when_it_cannot_follow_any_more() {
        let mut watched = Watched::new();
        let lost =
            watched.lost_within(Span::seconds(30), &[(0, ProbeResult::Silent), (2, ProbeResult::Answers)]);
        let lost = lost.expect("it is lost");
        assert!(lost >= LEASE, "{lost}");
        assert_eq!(watched.vital.loss(), HostLoss::NotFollowing);
        testing::snapshot!("lost", "one host reaches it", watched.describe());
    }

    #[test]
    fn a_host_that_sends_again_or_reconnects_is_not_lost() {
        let mut watched = Watched::new();
        assert_eq!(watched.lost_within(Span::millis(1900), &[]), None, "it is suspected only");
        watched.vital.received(watched.now);
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
        watched.vital.breaks(watched.now, "closed".to_owned());
        assert_eq!(watched.lost_within(Span::millis(500), &all(ProbeResult::Answers)), None);
        watched.vital.connects(watched.now);
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
    }

    #[test]
    fn a_stalled_leader_declares_no_host_lost() {
        let mut watched = Watched::new();
        watched.now = watched.now.after(Span::seconds(60));
        watched.vital.exclude(watched.now, Span::seconds(60));
        watched.received = watched.now;
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
        let lost = watched.lost_within(LEASE, &all(ProbeResult::Silent)).expect("it is gone after all");
        assert!(lost > Span::seconds(1), "{lost}");
    }

    #[test]
    fn without_checks_a_silent_host_has_the_lease_and_a_disconnected_one_two_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(Span::seconds(30), &[]).expect("it is lost");
        assert!(lost >= LEASE, "{lost}");
        let mut watched = Watched::new();
        watched.vital.breaks(watched.now, "closed".to_owned());
        let lost = watched.lost_within(LEASE, &[]).expect("it is lost");
        assert!(lost >= UNSEEN && lost < Span::seconds(3), "{lost}");
    }

    #[test]
    fn a_host_with_time_to_join_a_new_leader_is_lost_sooner_only_if_unreachable() {
        let lost = |sights: &[(u32, ProbeResult)]| {
            let vital = LivenessMonitor::expected(Mono(0), Span::seconds(12));
            let mut watched = Watched { vital, now: Mono(0), received: Mono(0) };
            watched.lost_within(Span::seconds(30), sights).expect("it is lost")
        };
        assert!(lost(&[]) >= Span::seconds(12));
        assert!(lost(&all(ProbeResult::Answers)) >= Span::seconds(12));
        assert!(lost(&all(ProbeResult::Silent)) < Span::seconds(4));
    }
}
