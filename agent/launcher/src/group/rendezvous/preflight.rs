//! `--preflight`: the leader has all hosts measure their links before it gives them seats. A slow host becomes a spare if
//! there are enough others.

use std::collections::BTreeMap;
use std::time::Duration;

use mainstay_group::preflight::{Judgement, Link, LinkMeasured, judge, schedule};
use mainstay_group::round::Member;
use mainstay_group::wire::Down;
use mainstay_model::entry::Fact;
use mainstay_model::observation::HostsEvent;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::group::plan::Preflight;
use crate::group::rendezvous::gathering::Waiting;
use crate::group::streams::measure::{measure_all, takes};
use crate::group::streams::{Token, streams};

/// Hosts that come within this time after the last one that is needed are measured too: spares start with the others.
const GRACE: Duration = Duration::from_secs(1);

/// Time between two groups of pairs, and the most groups: 64 hosts take 7 s with the grace, and less than 10 s if their
/// last links are slow.
const EVERY: Duration = Duration::from_millis(90);
const MOST_GROUPS: usize = 63;

/// Slow pairs are measured once more, at most so many: a moment of other traffic does not count.
const MOST_AGAIN: usize = 8;

/// Hosts whose measurements are late are not waited for any longer.
const LATE: Duration = Duration::from_millis(500);

/// The most slow links that are reported one by one.
const MOST_REPORTED: usize = 8;

/// The check of the links before the first round.
pub(super) struct LinkCheck {
    wanted: Option<Preflight>,
    state: State,
    own: (mpsc::UnboundedSender<Vec<LinkMeasured>>, mpsc::UnboundedReceiver<Vec<LinkMeasured>>),
    /// Launchers of slow hosts.
    slow: Vec<String>,
    facts: Vec<Fact>,
    problems: Vec<Problem>,
}

/// Something slow.
struct Problem {
    /// The launcher of the host, or those of both ends of the link.
    launchers: Vec<String>,
    detail: String,
}

enum State {
    /// Not all hosts are there.
    Waits,
    /// They are, and others may come.
    Grace(Instant),
    Measures(Measuring),
    Done,
}

struct Measuring {
    hosts: Vec<Member>,
    links: BTreeMap<(usize, usize), Link>,
    /// The launchers that have not reported.
    awaited: Vec<String>,
    until: Instant,
    is_second: bool,
}

impl LinkCheck {
    pub(super) fn new(wanted: Option<Preflight>) -> LinkCheck {
        let state = if wanted.is_some() { State::Waits } else { State::Done };
        let (slow, facts, problems) = (Vec::new(), Vec::new(), Vec::new());
        LinkCheck { wanted, state, own: mpsc::unbounded_channel(), slow, facts, problems }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// When to look again.
    pub(super) fn wake(&self) -> Option<Instant> {
        match &self.state {
            State::Grace(until) => Some(*until),
            State::Measures(measuring) => Some(measuring.until),
            State::Waits | State::Done => None,
        }
    }

    /// The members that get seats: slow hosts stay out if there are enough others. The leader has a seat in any case.
    pub(super) fn fit(&self, members: &[Member], hosts: u32) -> Vec<Member> {
        let fits = |member: &&Member| member.leads || !self.slow.contains(&member.launcher);
        let fit: Vec<Member> = members.iter().filter(fits).cloned().collect();
        let numbered = members.iter().any(|member| member.node_rank.is_some());
        if numbered || fit.len() < hosts as usize { members.to_vec() } else { fit }
    }

    /// What was found, for the journal; and the reason not to start, if the user wants none then.
    pub(super) fn result(&mut self, seats: &[&Member]) -> (Vec<Fact>, Option<String>) {
        let has_seat = |problem: &&Problem| {
            problem.launchers.iter().all(|of| seats.iter().any(|member| member.launcher == *of))
        };
        let left: Vec<&str> = self.problems.iter().filter(has_seat).map(|problem| &*problem.detail).collect();
        let is_refused = self.wanted == Some(Preflight::Require) && !left.is_empty();
        (std::mem::take(&mut self.facts), is_refused.then(|| left.join("; ")))
    }

    /// All hosts that are needed are there: measures in time. Returns a line for the terminals when it begins to.
    pub(super) fn look(&mut self, me: &Member, waiting: &[Waiting], token: &Token) -> Option<String> {
        let now = Instant::now();
        match &self.state {
            State::Waits => self.state = State::Grace(now + GRACE),
            State::Grace(until) if now >= *until => {
                let hosts: Vec<Member> =
                    std::iter::once(me).chain(waiting.iter().map(|other| &other.member)).cloned().collect();
                let groups = schedule(hosts.len(), MOST_GROUPS);
                let line = format!("preflight: measuring the links between {} hosts", hosts.len());
                self.begin(hosts, BTreeMap::new(), &groups, (waiting, token), false);
                return Some(line);
            }
            State::Measures(measuring) if measuring.awaited.is_empty() || now >= measuring.until => {
                self.end(waiting, token);
            }
            State::Grace(_) | State::Measures(_) | State::Done => {}
        }
        None
    }

    fn begin(
        &mut self,
        hosts: Vec<Member>,
        links: BTreeMap<(usize, usize), Link>,
        groups: &[Vec<(usize, usize)>],
        (waiting, token): (&[Waiting], &Token),
        is_second: bool,
    ) {
        let known =
            |host: usize| hosts.get(host).map(|member| (member.launcher.clone(), member.listens.clone()));
        let peers = |host: usize| -> Vec<Option<(String, String)>> {
            let partner = |group: &Vec<(usize, usize)>| {
                group.iter().find(|(first, _)| *first == host).and_then(|(_, second)| known(*second))
            };
            groups.iter().map(partner).collect()
        };
        let mut awaited = Vec::new();
        for (place, member) in hosts.iter().enumerate() {
            let peers = peers(place);
            if peers.iter().all(Option::is_none) {
                continue;
            }
            if member.leads {
                let (token, answer) = (token.clone(), self.own.0.clone());
                streams().spawn(async move {
                    // The receiver goes only with the round.
                    let _ = answer.send(measure_all(peers, EVERY, token).await);
                });
            } else if let Some(other) = waiting.iter().find(|other| other.member.launcher == member.launcher)
            {
                let every = crate::group::plan::span(EVERY);
                let _ = other.to.try_send(Down::Measure { peers, every });
            }
            awaited.push(member.launcher.clone());
        }
        let until = Instant::now() + Duration::from_nanos(takes(groups.len(), EVERY).0) + LATE;
        self.state = State::Measures(Measuring { hosts, links, awaited, until, is_second });
    }

    /// What the leader's own host has measured.
    pub(super) async fn own(&mut self) -> Vec<LinkMeasured> {
        match self.own.1.recv().await {
            Some(links) => links,
            // This side keeps a sender.
            None => std::future::pending().await,
        }
    }

    /// What a host has measured.
    pub(super) fn measured(&mut self, launcher: &str, links: Vec<LinkMeasured>) {
        let State::Measures(measuring) = &mut self.state else { return };
        measuring.awaited.retain(|of| of != launcher);
        let place = |launcher: &str| measuring.hosts.iter().position(|member| member.launcher == launcher);
        let Some(from) = place(launcher) else { return };
        for LinkMeasured { launcher, quality } in links {
            let Some(to) = place(&launcher) else { continue };
            let link = Link { hosts: (from, to), quality };
            let best = match measuring.links.remove(&link.hosts) {
                Some(before) if is_better(&before, &link) => before,
                _ => link,
            };
            measuring.links.insert(best.hosts, best);
        }
    }

    fn end(&mut self, waiting: &[Waiting], token: &Token) {
        let State::Measures(measuring) = std::mem::replace(&mut self.state, State::Done) else {
            return;
        };
        let Measuring { hosts, links, awaited, is_second, .. } = measuring;
        let all: Vec<Link> = links.values().cloned().collect();
        let found = judge(hosts.len(), &all);
        let is_slow =
            |link: &Link| found.links.contains(link) || found.hosts.iter().any(|host| link.is_of(*host));
        let again: Vec<Vec<(usize, usize)>> =
            all.iter().filter(|link| is_slow(link)).take(MOST_AGAIN).map(|link| vec![link.hosts]).collect();
        if !is_second && !again.is_empty() {
            return self.begin(hosts, links, &again, (waiting, token), true);
        }
        self.report(&hosts, &all, &found, &awaited);
    }

    /// Keeps what was found for the journal, which shows it on all terminals.
    fn report(&mut self, hosts: &[Member], all: &[Link], found: &Judgement, awaited: &[String]) {
        let name = |place: usize| hosts.get(place).map_or("?", |member| &member.host);
        let launcher = |place: usize| hosts.get(place).map(|member| member.launcher.clone());
        let host_of = |launcher: &String| hosts.iter().find(|member| member.launcher == *launcher);
        let late: Vec<&str> = awaited.iter().filter_map(host_of).map(|member| member.host.as_str()).collect();
        let typical = found.typical.map_or("nothing was measured".to_owned(), |of| format!("typical {of}"));
        let mut summary = format!("preflight: {} links between {} hosts: {typical}", all.len(), hosts.len());
        if !late.is_empty() {
            summary.push_str(&format!("; no measurements of {}", late.join(", ")));
        }
        let more = found.links.len().saturating_sub(MOST_REPORTED);
        if more > 0 {
            summary.push_str(&format!("; {more} slow links are not listed"));
        }
        let values = [("hosts", hosts.len().to_string()), ("links", all.len().to_string())];
        self.facts.push(Fact::Observed(HostsEvent::LinksMeasured.observed(summary, &values)));
        for host in &found.hosts {
            let own: Vec<&Link> = all.iter().filter(|link| link.is_of(*host)).collect();
            let best = own.iter().filter_map(|link| link.quality.as_ref().ok());
            let best = best.max_by_key(|quality| quality.rate());
            let best =
                best.map_or_else(|| "no host reaches it".to_owned(), |best| format!("the best has {best}"));
            let detail =
                format!("preflight: host {} is slow: of its {} links {best}", name(*host), own.len());
            self.slow.extend(launcher(*host));
            self.found_slow(detail, name(*host).to_owned(), launcher(*host).into_iter().collect());
        }
        for link in found.links.iter().take(MOST_REPORTED) {
            let (a, b) = link.hosts;
            let names = format!("{} {}", name(a), name(b));
            let detail = format!(
                "preflight: the link between hosts {} and {} is slow: {}",
                name(a),
                name(b),
                link.describe()
            );
            self.found_slow(detail, names, launcher(a).into_iter().chain(launcher(b)).collect());
        }
    }

    /// A slow host, or a slow link between two.
    fn found_slow(&mut self, detail: String, names: String, launchers: Vec<String>) {
        let slow = HostsEvent::LinkSlow.observed(detail.clone(), &[("hosts", names)]);
        self.facts.push(Fact::Observed(slow));
        self.problems.push(Problem { launchers, detail });
    }
}

fn is_better(link: &Link, than: &Link) -> bool {
    match (&link.quality, &than.quality) {
        (Ok(link), Ok(than)) => link.rate() > than.rate(),
        (link, _) => link.is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use mainstay_group::preflight::LinkQuality;
    use mainstay_model::time::Span;

    use super::*;

    fn members() -> Vec<Member> {
        let member = |number: usize| Member {
            launcher: format!("l{number}"),
            host: format!("h{number}"),
            leads: number == 0,
            ..Member::default()
        };
        (0..4).map(member).collect()
    }

    /// What is found if the links of the host `l2` are slow.
    fn checked(wanted: Preflight) -> LinkCheck {
        let mut check = LinkCheck::new(Some(wanted));
        let hosts = members();
        let awaited = hosts.iter().map(|member| member.launcher.clone()).collect();
        let (links, until) = (BTreeMap::new(), Instant::now());
        check.state =
            State::Measures(Measuring { hosts: hosts.clone(), links, awaited, until, is_second: true });
        for (place, host) in hosts.iter().enumerate() {
            let link = |other: &Member| {
                let rate =
                    if [&host.launcher, &other.launcher].contains(&&"l2".to_owned()) { 1 } else { 100 };
                let quality = LinkQuality { round_trip: Span::millis(1), sent: rate, received: rate };
                LinkMeasured { launcher: other.launcher.clone(), quality: Ok(quality) }
            };
            check.measured(&host.launcher, hosts.iter().skip(place + 1).map(link).collect());
        }
        check.look(&hosts[0], &[], &Token::new("run", None));
        assert!(check.is_done());
        check
    }

    #[test]
    fn a_slow_host_gets_no_seat_if_there_are_enough_others() {
        let names = |check: &LinkCheck, hosts| {
            check.fit(&members(), hosts).into_iter().map(|member| member.host).collect::<Vec<_>>()
        };
        let check = checked(Preflight::Report);
        assert_eq!(names(&check, 3), ["h0", "h1", "h3"]);
        assert_eq!(names(&check, 4), ["h0", "h1", "h2", "h3"]);
    }

    #[test]
    fn a_job_is_refused_only_if_the_user_wants_it_and_a_slow_host_has_a_seat() {
        let all = members();
        let refused = |wanted, with: &[usize]| {
            let seats: Vec<&Member> = with.iter().map(|place| &all[*place]).collect();
            let (facts, why) = checked(wanted).result(&seats);
            assert_eq!(facts.len(), 2, "{facts:?}");
            why.is_some()
        };
        assert!(refused(Preflight::Require, &[0, 1, 2]));
        assert!(!refused(Preflight::Require, &[0, 1, 3]));
        assert!(!refused(Preflight::Report, &[0, 1, 2]));
    }
}
