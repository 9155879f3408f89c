//! When a host is lost. Its leader suspects it when its beats stay away or its connection ends, and asks others to look at it,
//! so that a link that is slow, or broken to the leader alone, is not taken for a dead host:
//!
//! | what happened | beats | what those find who look | lost |
//! |---|---|---|---|
//! | power, or all it sends is lost | stay away | nothing answers | when they have looked |
//! | its kernel or its launcher stands still | stay away | its port is open, no launcher answers | when they have looked |
//! | its launcher is gone | the connection ends | its port is closed | when they have looked |
//! | a slow link | late | it answers | no |
//! | no way between it and the leader alone | stay away | it answers | when it cannot follow the leader any more |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::suspicion::Suspicion;
use crate::base::time::{Mono, Span};

/// How long those who were asked have to answer.
const LOOK_WITHIN: Span = Span::millis(1200);

/// A host that is suspected still is looked at again after so long.
const AGAIN_AFTER: Span = Span::millis(1500);

/// A host that no one reaches is lost after a silence of so long at least.
const UNREACHED: Span = Span::millis(1500);

/// The same for one whose launcher does not answer: a busy machine may be slow to.
const UNANSWERED: Span = Span::millis(2400);

/// A host that has time to come is not looked at before.
const UNASKED: Span = Span::seconds(2);

/// A host without a connection is lost after so long where no one could look.
const UNSEEN: Span = Span::seconds(2);

/// Other hosts that are asked to look, apart from the leader's.
pub const LOOKERS: usize = 2;

/// What one finds that looks at a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sight {
    /// A launcher of the job answers.
    Answers,
    /// The kernel accepts connections, and no launcher answers on them.
    Accepts,
    /// The host answers that no process listens there.
    Refuses,
    /// Nothing comes back.
    Silent,
}

/// What is to be done about a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing: it is heard, or what is known of it does not suffice yet.
    Wait,
    /// Others are to look at it: see [`Vital::asks`].
    Look,
    /// It is lost: [`Vital::reported`] says why.
    Lost,
}

/// Whether a follower lives, as its leader sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Vital {
    suspicion: Suspicion,
    was_connected: bool,
    broken: Option<Broken>,
    inquiry: Option<Inquiry>,
}

/// There is no connection.
#[derive(Clone, Debug, PartialEq)]
struct Broken {
    since: Mono,
    why: String,
    /// How long it has to come, unless others find that it does not live.
    within: Span,
}

#[derive(Clone, Debug, PartialEq)]
struct Inquiry {
    since: Mono,
    asked: Vec<u32>,
    found: BTreeMap<u32, Sight>,
}

impl Vital {
    /// Of a follower that has so long to connect, and is not connected yet.
    pub fn expected(at: Mono, within: Span) -> Vital {
        let broken = Broken { since: at, why: "it has not come back".to_owned(), within };
        Vital { suspicion: Suspicion::new(at), was_connected: false, broken: Some(broken), inquiry: None }
    }

    /// It has no more time than that after all.
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
            self.broken = Some(Broken { since: at, why, within: Span(0) });
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

    /// The leader itself stood still for so long until now, or could decide nothing.
    pub fn deaf_for(&mut self, at: Mono, span: Span) {
        self.suspicion.deaf_for(at, span);
        if let Some(broken) = &mut self.broken {
            broken.since = broken.since.after(span).min(at);
        }
        self.inquiry = None;
    }

    /// Whether it was ever connected.
    pub fn was_connected(&self) -> bool {
        self.was_connected
    }

    /// Whether it can be asked to look at others.
    pub fn is_well(&self, at: Mono) -> bool {
        self.broken.is_none() && !self.suspicion.is_suspect(at)
    }

    /// These were asked to look at it.
    pub fn asks(&mut self, at: Mono, asked: Vec<u32>) {
        self.inquiry = Some(Inquiry { since: at, asked, found: BTreeMap::new() });
    }

    /// One of those found this.
    pub fn looked(&mut self, by: u32, sight: Sight) {
        if let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.asked.contains(&by)) {
            inquiry.found.insert(by, sight);
        }
    }

    /// Whether someone looked, and no one got an answer.
    pub fn is_unreached(&self) -> bool {
        let found = self.inquiry.as_ref().map(|inquiry| &inquiry.found);
        found.is_some_and(|found| !found.is_empty() && found.values().all(|sight| *sight != Sight::Answers))
    }

    /// For how long it has not been heard, or connected.
    pub fn silence(&self, at: Mono) -> Span {
        match &self.broken {
            Some(broken) => at.since(broken.since),
            None => self.suspicion.silence(at),
        }
    }

    /// What is to be done. `patience`: how long a follower goes on without its leader.
    pub fn judge(&mut self, at: Mono, patience: Span) -> Judgement {
        let silence = self.silence(at);
        let within = self.broken.as_ref().map_or(Span(0), |broken| broken.within);
        if self.is_well(at) || silence < within.min(UNASKED) {
            self.inquiry = None;
            return Judgement::Wait;
        }
        let Some(inquiry) = &self.inquiry else { return Judgement::Look };
        let took = at.since(inquiry.since);
        if took < LOOK_WITHIN && inquiry.found.len() < inquiry.asked.len() {
            return Judgement::Wait;
        }
        let found = |sight| inquiry.found.values().any(|found| *found == sight);
        let lost = match () {
            () if inquiry.found.is_empty() && self.broken.is_none() => silence >= patience,
            () if inquiry.found.is_empty() => silence >= UNSEEN.max(within),
            () if found(Sight::Answers) => silence >= patience.max(within),
            () if found(Sight::Accepts) => silence >= UNANSWERED,
            () if self.broken.is_some() && !found(Sight::Silent) => true,
            () => silence >= UNREACHED,
        };
        match lost {
            true => Judgement::Lost,
            false if took >= AGAIN_AFTER => Judgement::Look,
            false => Judgement::Wait,
        }
    }

    /// What was seen, and by whom: "no beat for 2.40 s; hosts c and d cannot reach it either". `name`: a host, for people.
    pub fn reported(&self, at: Mono, name: impl Fn(u32) -> String) -> String {
        let silence = self.silence(at);
        let seen = match &self.broken {
            None => format!("no beat for {silence}"),
            Some(Broken { why, .. }) => {
                format!("its launcher has had no connection for {silence} ({why})")
            }
        };
        let by = |sight: Sight| -> Vec<String> {
            let found = self.inquiry.iter().flat_map(|inquiry| &inquiry.found);
            found.filter(|(_, found)| **found == sight).map(|(seat, _)| name(*seat)).collect()
        };
        let mut reported = vec![seen];
        for (sight, what) in [
            (Sight::Silent, "cannot reach it either"),
            (Sight::Accepts, "can connect to it and get no answer"),
            (Sight::Refuses, "can reach it and find no launcher there any more"),
            (Sight::Answers, "can reach it"),
        ] {
            let who = by(sight);
            if !who.is_empty() {
                reported.push(format!("{} {what}", listed(&who)));
            }
        }
        reported.join("; ")
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

    /// A follower whose beats came regularly for half a minute, until now.
    struct Watched {
        vital: Vital,
        now: Mono,
        /// When it was heard last.
        received: Mono,
    }

    impl Watched {
        fn new() -> Watched {
            let mut watched =
                Watched { vital: Vital::expected(Mono(0), LEASE), now: Mono(0), received: Mono(0) };
            watched.vital.connects(Mono(0));
            for _ in 0..60 {
                watched.now = watched.now.after(Span::millis(500));
                watched.vital.beat(watched.now);
            }
            watched.received = watched.now;
            watched
        }

        /// Time goes on in looks of the leader. Those who are asked, seats 0, 2 and 3, find this. When it is lost, at most
        /// within so long.
        fn lost_within(&mut self, span: Span, sights: &[(u32, Sight)]) -> Option<Span> {
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

        fn reported(&self) -> String {
            self.vital.reported(self.now, |seat| ["a", "b", "c", "d"][seat as usize].to_owned())
        }
    }

    fn all(sight: Sight) -> [(u32, Sight); 3] {
        [(0, sight), (2, sight), (3, sight)]
    }

    #[test]
    fn a_host_without_power_is_lost_within_three_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(LEASE, &all(Sight::Silent)).expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        assert_eq!(
            watched.reported(),
            format!("no beat for {lost}; hosts a, c and d cannot reach it either")
        );
    }

    #[test]
    fn a_host_whose_kernel_hangs_is_lost_within_three_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(LEASE, &all(Sight::Accepts)).expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        let reported = format!("no beat for {lost}; hosts a, c and d can connect to it and get no answer");
        assert_eq!(watched.reported(), reported);
    }

    #[test]
    fn a_host_whose_launcher_was_killed_is_lost_when_others_find_none_there() {
        let mut watched = Watched::new();
        watched.vital.breaks(watched.now, "the connection was closed by the other side".to_owned());
        let lost = watched.lost_within(LEASE, &all(Sight::Refuses)).expect("it is lost");
        assert!(lost < Span::seconds(2), "{lost}");
        assert!(
            watched.reported().ends_with("hosts a, c and d can reach it and find no launcher there any more")
        );
    }

    #[test]
    fn a_host_that_hears_or_says_nothing_is_lost_within_three_seconds_though_others_may_not_answer() {
        // What it sends is lost, or what is sent to it: either way no one gets an answer. One of the others is slow.
        let mut watched = Watched::new();
        let lost = watched.lost_within(LEASE, &[(0, Sight::Silent), (2, Sight::Silent)]).expect("it is lost");
        assert!(lost < Span::seconds(3), "{lost}");
        assert!(watched.reported().ends_with("hosts a and c cannot reach it either"));
    }

    #[test]
    fn a_host_that_others_reach_is_lost_only_when_it_could_not_follow_any_more() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(Span::seconds(30), &[(0, Sight::Silent), (2, Sight::Answers)]);
        let lost = lost.expect("it is lost");
        assert!(lost >= LEASE, "{lost}");
        assert!(watched.reported().ends_with("host a cannot reach it either; host c can reach it"));
    }

    #[test]
    fn a_host_that_is_heard_again_is_not_lost_and_neither_is_one_that_comes_back() {
        let mut watched = Watched::new();
        assert_eq!(watched.lost_within(Span::millis(1900), &[]), None, "it is suspected only");
        watched.vital.received(watched.now);
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
        watched.vital.breaks(watched.now, "closed".to_owned());
        assert_eq!(watched.lost_within(Span::millis(500), &all(Sight::Answers)), None);
        watched.vital.connects(watched.now);
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
    }

    #[test]
    fn a_leader_that_stood_still_takes_no_one_for_lost() {
        let mut watched = Watched::new();
        watched.now = watched.now.after(Span::seconds(60));
        watched.vital.deaf_for(watched.now, Span::seconds(60));
        watched.received = watched.now;
        assert_eq!(watched.vital.judge(watched.now, LEASE), Judgement::Wait);
        let lost = watched.lost_within(LEASE, &all(Sight::Silent)).expect("it is gone after all");
        assert!(lost > Span::seconds(1), "{lost}");
    }

    #[test]
    fn where_no_one_can_look_silence_has_the_lease_and_a_broken_connection_two_seconds() {
        let mut watched = Watched::new();
        let lost = watched.lost_within(Span::seconds(30), &[]).expect("it is lost");
        assert!(lost >= LEASE, "{lost}");
        let mut watched = Watched::new();
        watched.vital.breaks(watched.now, "closed".to_owned());
        let lost = watched.lost_within(LEASE, &[]).expect("it is lost");
        assert!(lost >= UNSEEN && lost < Span::seconds(3), "{lost}");
    }

    #[test]
    fn a_host_that_has_time_to_come_to_a_new_leader_is_lost_sooner_only_if_no_one_reaches_it() {
        let lost = |sights: &[(u32, Sight)]| {
            let vital = Vital::expected(Mono(0), Span::seconds(12));
            let mut watched = Watched { vital, now: Mono(0), received: Mono(0) };
            watched.lost_within(Span::seconds(30), sights).expect("it is lost")
        };
        assert!(lost(&[]) >= Span::seconds(12));
        assert!(lost(&all(Sight::Answers)) >= Span::seconds(12));
        assert!(lost(&all(Sight::Silent)) < Span::seconds(4));
    }
}
