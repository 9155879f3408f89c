//! The group of the job's hosts, as this launcher takes part in it: it leads the job or follows another launcher. A job of
//! one host is a group of one. Each event on this host goes into [`Group::step`], and what this launcher has to do comes
//! out of [`Group::poll`].

mod following;
mod leading;
pub mod meeting;
pub mod plan;
pub mod rendezvous;
mod spare;
pub(crate) mod store;
pub mod streams;

use std::collections::VecDeque;

use mainstay_group::lead::{Here, Lead};
use mainstay_group::round::Seated;
use mainstay_hang::RankSeen;
use mainstay_model::entry::{Body, Fact, JobSpec};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::time::{Mono, Stamp};
use mainstay_progress::monitor::Pace;
use mainstay_recovery::job::{Job, Output as JobOutput, Summary};
use mainstay_recovery::protocol::{Command, Event, ProbeResult};
use mainstay_sys::clock;
use tokio::sync::{mpsc, watch};

use crate::group::plan::{HostsPlan, span};
use crate::group::rendezvous::Gathered;
use crate::group::store::{Elected, FromStore, StoreSession};
use crate::group::streams::api::KnownHosts;
use crate::group::streams::connect::FromLeader;
use crate::group::streams::listen::{FromHost, Listener};
use crate::group::streams::{probe, streams};
use crate::hang::Hang;
use crate::ranks::RankSpec;
pub use following::Followed;
pub(crate) use following::Following;
use leading::Leading;

/// This launcher's part in the group of the job.
#[derive(Debug)]
pub(crate) struct Group {
    role: Role,
    /// The other launchers; none for a job of one host.
    remote: Option<Remote>,
    acts: VecDeque<Act>,
    /// The attempt of steps or shards that the leader compares, until [`Group::vouched`] is asked.
    compares: Option<Attempt>,
    /// The channel for checks whether other launchers are alive.
    probes: (mpsc::UnboundedSender<Probed>, mpsc::UnboundedReceiver<Probed>),
}

/// A launcher, and the result of the check whether it is alive.
type Probed = (String, ProbeResult);

#[derive(Debug)]
pub(crate) enum Role {
    Leads(Box<Leading>),
    Follows(Box<Following>),
    /// While a follower becomes the leader, and after the end.
    Gone,
}

/// What connects this launcher with those of other hosts.
#[derive(Debug)]
pub struct Remote {
    plan: HostsPlan,
    store_session: StoreSession,
    /// Where followers connect if this launcher leads.
    listener: Listener,
    /// Shows the API of this launcher who the others are.
    known_hosts: watch::Sender<Option<KnownHosts>>,
}

impl Remote {
    /// Shows the API who the other launchers are, and which of them leads if this one follows.
    fn show_hosts(&self, follows: bool) {
        let now = self.store_session.known_hosts(follows);
        self.known_hosts.send_if_modified(|shown| {
            let is_news = shown.as_ref().is_none_or(|shown| !shown.is_as(&now));
            if is_news {
                *shown = Some(now);
            }
            is_news
        });
    }
}

/// What this launcher has to do for its group, in order.
#[derive(Debug)]
pub(crate) enum Act {
    Record(Mono, Body),
    /// Write an entry of the leader's journal; `is_past`: it was written before this host joined.
    Entry {
        seq: u64,
        at: Stamp,
        body: Body,
        is_past: bool,
    },
    Obey(Command),
    /// Show the user a line.
    Print(String),
    Finished(Attempt, Rank),
    Seen(Attempt, Vec<RankSeen>),
    /// Keep copies of checkpoints on these hosts and spares from now on.
    Meet {
        hosts: Vec<String>,
        spares: Vec<String>,
    },
    /// The seat of this host was given to another, and its ranks end; or it has a seat again.
    LeftSeat,
    TookSeat,
    /// This host is lost to the job, with this reason: no launcher can lead it.
    Orphaned(String),
    /// Nothing more is decided for this host: its ranks are stopped.
    StopRanks,
    /// Nothing more is decided for this host, and its ranks have ended.
    HandBack,
    /// The job has ended with this status.
    End(i32),
}

/// Messages from other launchers of the job, and from the store.
pub(crate) enum FromOthers {
    Host(Box<FromHost>),
    Leader(Box<FromLeader>),
    Store(FromStore),
    Probed(Probed),
}

impl FromOthers {
    pub(crate) fn is_loss_of_leader(&self) -> bool {
        matches!(self, FromOthers::Leader(event) if matches!(**event, FromLeader::Lost { .. }))
    }
}

impl Group {
    /// The leader of a job of one host.
    pub(crate) fn alone(job: Job, rank_spec: &RankSpec) -> Group {
        Group::new(Role::Leads(Box::new(Leading::alone(job, rank_spec))), None)
    }

    /// The leader of a complete round.
    pub(crate) fn leads(job: Job, gathered: Gathered, remote: Remote, names: (String, String)) -> Group {
        let leading = Leading::gathered(job, gathered, &remote, names);
        Group::new(Role::Leads(Box::new(leading)), Some(remote))
    }

    /// A follower, or a spare.
    pub(crate) fn follows(followed: Followed, remote: Remote, spec: JobSpec) -> Group {
        let following = Following::new(followed, &remote, JobSpec { follows: true, ..spec });
        Group::new(Role::Follows(Box::new(following)), Some(remote))
    }

    fn new(role: Role, remote: Option<Remote>) -> Group {
        Group { role, remote, acts: VecDeque::new(), compares: None, probes: mpsc::unbounded_channel() }
    }

    /// The leader, if the job is decided here.
    pub(crate) fn lead(&self) -> Option<&Lead> {
        match &self.role {
            Role::Leads(leading) => Some(&leading.lead),
            Role::Follows(_) | Role::Gone => None,
        }
    }

    /// Begins to lead the job with these outputs of its start.
    pub(crate) fn begin(&mut self, at: Mono, out: Vec<JobOutput>) {
        let Role::Leads(leading) = &mut self.role else { return };
        leading.lead.begin_with(at, out);
        let links = std::mem::take(&mut leading.links);
        links.into_iter().for_each(|found| leading.lead.fact(at, found));
    }

    pub(crate) fn lead_mut(&mut self) -> Option<&mut Lead> {
        match &mut self.role {
            Role::Leads(leading) => Some(&mut leading.lead),
            Role::Follows(_) | Role::Gone => None,
        }
    }

    /// Something happened on this host now.
    pub(crate) fn fact(&mut self, fact: Fact) {
        self.step(clock::mono(), Event::Fact(fact));
    }

    /// Something happened on this host. [`Group::poll`] has what is to be done about it.
    pub(crate) fn step(&mut self, at: Mono, event: Event) {
        if let Event::Steps { attempt, .. } | Event::Saved { attempt, .. } = &event {
            self.compares = Some(*attempt);
        }
        match &mut self.role {
            Role::Leads(leading) if !leading.lead.is_deposed() => leading.lead.step(at, event),
            Role::Follows(following) if following.reports(&event) => following.follow.step(at, event),
            Role::Leads(_) | Role::Follows(_) => self.record_here(at, event),
            Role::Gone => {}
        }
    }

    /// After another launcher has taken over, and for what concerns no other host: events go only to this host's journal.
    fn record_here(&mut self, at: Mono, event: Event) {
        let Event::Fact(fact) = event else { return };
        if self.is_cut_off() && matches!(fact, Fact::AttemptEnded { .. }) {
            self.acts.push_back(Act::HandBack);
        }
        self.acts.push_back(Act::Record(at, Body::Fact(fact)));
    }

    /// The next action; none when all are done. Call it until then after each of the other calls.
    pub(crate) fn poll(&mut self, now: Mono, here: &dyn Here) -> Option<Act> {
        loop {
            if let Some(act) = self.acts.pop_front() {
                return Some(act);
            }
            match &mut self.role {
                Role::Leads(leading) => {
                    let act = leading.lead.poll(now, here)?;
                    self.act_as_leader(now, act);
                }
                Role::Follows(following) => {
                    following.remember();
                    let act = following.follow.poll()?;
                    self.act_as_follower(act);
                }
                Role::Gone => return None,
            }
        }
    }

    /// To be called as time passes. `keeps_world`: whether the saved checkpoints can be loaded only by the same number of
    /// ranks.
    pub(crate) fn look(&mut self, now: Mono, keeps_world: impl FnOnce() -> bool) {
        let Some(remote) = &mut self.remote else { return };
        remote.show_hosts(matches!(self.role, Role::Follows(_)));
        let silent = remote.store_session.silent_for().map(span);
        match &mut self.role {
            Role::Leads(leading) => {
                if remote.plan.limits().vary() {
                    leading.lead.keep_world(keeps_world());
                }
                leading.lead.look(now, silent);
            }
            Role::Follows(following) => {
                let store = &remote.store_session;
                let led = store.leader.as_ref().is_some_and(|leader| !store.is_me(leader));
                following.follow.look(now, silent, led);
            }
            Role::Gone => {}
        }
    }

    /// The next message of another launcher or of the store. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> FromOthers {
        let Some(remote) = &mut self.remote else { return std::future::pending().await };
        loop {
            let Remote { store_session, listener, .. } = &mut *remote;
            let follower = match &mut self.role {
                Role::Follows(following) => Some(&mut following.events),
                Role::Leads(_) | Role::Gone => None,
            };
            let follows = follower.is_some();
            let leader = async {
                match follower {
                    Some(events) => events.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(event) = leader => return FromOthers::Leader(Box::new(event)),
                // A launcher that takes a follower for the leader gets no answer.
                Some(event) = listener.events.recv() => if !follows { return FromOthers::Host(Box::new(event)) },
                update = store_session.next() => return FromOthers::Store(update),
                Some(probed) = self.probes.1.recv() => return FromOthers::Probed(probed),
            }
        }
    }

    /// A message of another launcher or of the store; `newest`: the newest entry of this host's journal. Returns the
    /// election of a follower that can take over.
    pub(crate) fn receive(&mut self, now: Mono, newest: u64, event: FromOthers) -> Option<Elected> {
        match event {
            FromOthers::Host(event) => self.follower_sent(now, *event),
            FromOthers::Leader(event) => self.leader_sent(now, *event),
            FromOthers::Probed((launcher, sight)) => self.step(now, Event::Looked { launcher, sight }),
            FromOthers::Store(update) => match &self.role {
                Role::Leads(_) => self.store_sent_to_leader(now, update),
                Role::Follows(_) => return self.store_sent_to_follower(now, newest, update),
                Role::Gone => {}
            },
        }
        None
    }

    /// Checks outside the loop whether another launcher is alive, and reports the result.
    pub(crate) fn probe(&self, launcher: String, address: String) {
        let Some(remote) = &self.remote else { return };
        let (token, probes) = (remote.store_session.token.clone(), self.probes.0.clone());
        streams().spawn(async move {
            let sight = probe::probe(address, token).await;
            // The receiver goes only when the launcher does.
            let _ = probes.send((launcher, sight));
        });
    }

    /// The step that can be resumed from, once for each comparison, with its attempt.
    pub(crate) fn vouched(&mut self) -> Option<(Attempt, u64)> {
        let attempt = self.compares.take()?;
        Some((attempt, self.lead()?.job().vouched()?))
    }

    pub(crate) fn pace(&self, rank: Rank) -> Pace {
        self.lead().map(|lead| lead.job().pace(rank)).unwrap_or_default()
    }

    /// Whether launchers of other hosts take part, or may.
    pub(crate) fn has_other_hosts(&self) -> bool {
        self.remote.is_some()
    }

    /// " on host NAME" in a job of several hosts, whose other terminals show it too.
    pub(crate) fn on_host(&self) -> String {
        let name = nix::unistd::gethostname().ok().filter(|_| self.has_other_hosts());
        name.map_or_else(String::new, |name| format!(" on host {}", name.to_string_lossy()))
    }

    /// This launcher as a follower, if it is one.
    pub(crate) fn follower(&self) -> Option<&Following> {
        match &self.role {
            Role::Follows(following) => Some(following),
            Role::Leads(_) | Role::Gone => None,
        }
    }

    pub(crate) fn follower_mut(&mut self) -> Option<&mut Following> {
        match &mut self.role {
            Role::Follows(following) => Some(following),
            Role::Leads(_) | Role::Gone => None,
        }
    }

    /// Whether this host started as a spare.
    pub(crate) fn was_spare(&self) -> bool {
        self.follower().is_some_and(|following| following.ready.is_some())
    }

    /// This launcher as a follower, while it waits for a seat.
    pub(crate) fn waiting(&self) -> Option<&Following> {
        self.follower().filter(|following| following.follow.waits_for_a_seat())
    }

    /// Whether the job is decided elsewhere from now on, without this host.
    fn is_cut_off(&self) -> bool {
        match &self.role {
            Role::Leads(leading) => leading.lead.is_deposed(),
            Role::Follows(following) => following.follow.is_cut_off(),
            Role::Gone => false,
        }
    }

    /// Whether the status with which this launcher ends is that of the job: it was not left behind, and is no spare that
    /// was asked to leave.
    pub(crate) fn ends_with_the_job(&self) -> bool {
        !self.is_cut_off() && self.follower().is_none_or(|following| following.cut_off.is_none())
    }

    /// Whether the job goes on without this launcher, and a new one on this host may take part.
    pub(crate) fn may_return(&self) -> bool {
        match &self.role {
            Role::Leads(leading) => leading.lead.is_deposed(),
            Role::Follows(following) => following.may_return,
            Role::Gone => false,
        }
    }

    /// The process of the coordination store that runs on this host.
    pub(crate) fn store_process(&self) -> Option<Pid> {
        self.remote.as_ref()?.store_session.store_process()
    }

    /// Sets which ranks are judged here: those of all hosts if this launcher leads.
    pub(crate) fn judge_hangs_with(&self, hang: &mut Hang, at: Mono) {
        match &self.role {
            Role::Leads(leading) if self.remote.is_some() => {
                let of_each = |seated: &Seated| {
                    std::iter::repeat_n(seated.seat.group_rank, seated.member.ranks as usize)
                };
                hang.job.judge_all(leading.lead.seats().flat_map(of_each).collect(), at);
            }
            Role::Follows(following) => hang.job.judged_by_leader(following.follow.seat().group_world_size),
            Role::Leads(_) | Role::Gone => {}
        }
    }

    /// How the job went, if this launcher or its leader has accounted it to the end.
    pub(crate) fn summary(&self, at: Mono, exit: i32) -> Option<Summary> {
        match &self.role {
            Role::Leads(leading) if leading.lead.is_deposed() => {
                Some(Summary { exit, reason: self.reason(), ..leading.lead.job().summary(at) })
            }
            Role::Follows(following) => following.summary.clone(),
            Role::Leads(leading) => Some(leading.lead.job().summary(at)),
            Role::Gone => None,
        }
    }

    /// Why this launcher ends before the job, or without knowing how the job ended.
    pub(crate) fn reason(&self) -> String {
        let cut_off = match &self.role {
            Role::Follows(following) => following.cut_off.clone(),
            Role::Leads(_) => Some("another launcher leads the job, or this host is cut off".to_owned()),
            Role::Gone => None,
        };
        cut_off.unwrap_or_else(|| "the leader of the job was lost".to_owned())
    }

    /// Leaves the group; `left`: a spare was asked to.
    pub(crate) async fn leave(self, exit: i32, why: &str, left: bool) {
        let Some(Remote { store_session, .. }) = self.remote else { return };
        match self.role {
            Role::Leads(leading) => match (leading.record_writer, leading.lead.over()) {
                (Some(writer), Some(_)) => store_session.end(writer, exit, why).await,
                _ => store_session.leave_early(why).await,
            },
            Role::Follows(following)
                if following.follow.is_cut_off() || (following.follow.waits_for_a_seat() && left) =>
            {
                store_session.leave_early(why).await;
            }
            // The leader removes what the job has in the store.
            Role::Follows(_) => store_session.stop_store().await,
            Role::Gone => {}
        }
    }

    fn print(&mut self, line: String) {
        self.acts.push_back(Act::Print(line));
    }
}
