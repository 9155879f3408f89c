//! Where the launchers of a job meet: the coordination store, with this launcher as a member. It learns here who leads, and
//! is elected here. What a leader writes for its successor goes through its [`RecordWriter`].

pub(crate) mod access;
mod events;
mod record_writer;
mod seal;

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use mainstay_coord::{
    Client, CoordError, Group, GroupOptions, JobEndedNote, Leader, Managed, ManagedState, Member,
    MemberState, Membership, Server, StoredRecord,
};
use mainstay_group::electors::Electors;
use mainstay_group::record::Record;
use mainstay_group::wire::Join;
use mainstay_model::id::Pid;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::tls::Tls;
use mainstay_tier::peer::token::{Token as PeerToken, TokenError};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::group::plan::{Aborting, HostsPlan, StoreKind, TOKEN_VARIABLE};
use crate::group::streams::api::KnownHosts;
use crate::group::streams::{Ends, Token};
use events::{PublishedState, StoreListener, missed, report, watch_group};
pub use record_writer::RecordWriter;
use record_writer::{StoreRequest, hold};
use seal::Seal;

/// The pause before the store is asked again.
const PAUSE: Duration = Duration::from_millis(300);

/// The same trouble is reported at most this often.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// How long the end of the job waits for the store.
const END_WITHIN: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub enum FromStore {
    Leader(Option<Leader>),
    Elected(Box<Elected>),
    /// Most followers that have a say miss the current leader.
    LeaderMissed,
    /// The leadership of this epoch is over, or the store lost it.
    Deposed(u64),
    Written(u64),
    /// A launcher of the job has ended it.
    Ended(JobEndedNote),
    /// What people should know of the store. The job goes on.
    Notice(String),
    Problem(String),
}

/// This launcher leads from now on.
#[derive(Debug)]
pub struct Elected {
    pub record_writer: RecordWriter,
    pub record: Option<Record>,
    /// The epoch of the previous leader, if the store has it.
    pub last: Option<u64>,
}

/// This launcher's part in the group of the job.
#[derive(Debug)]
pub struct StoreSession {
    group: Group,
    membership: Arc<Membership>,
    pub(super) launcher: String,
    events: mpsc::UnboundedReceiver<FromStore>,
    sender: mpsc::UnboundedSender<FromStore>,
    campaign: Option<Aborting>,
    /// Removes a dead leader from the store.
    removal: Option<Aborting>,
    _watch: Aborting,
    /// The leader, as far as known.
    pub(super) leader: Option<Leader>,
    /// What this launcher publishes about itself.
    says: PublishedState,
    published: watch::Sender<PublishedState>,
    _publisher: Aborting,
    /// Whether it has a say on the leader.
    has_vote: watch::Receiver<bool>,
    record: watch::Receiver<Option<StoredRecord>>,
    silent_since: Option<Instant>,
    /// Whether this launcher may be elected before there is a round.
    pub may_begin: bool,
    /// Proves that this launcher belongs to the job, when it writes its end.
    seal: Seal,
    /// The proof between launchers.
    pub token: Token,
    /// The same proof, for launchers that keep copies of each other's checkpoints.
    pub pass: Credentials,
    /// Runs for as long as this field is kept.
    server: Option<Server>,
    managed: Option<Managed>,
    /// Reports the ends of the store's process on this host.
    _etcd: Option<Aborting>,
}

impl StoreSession {
    /// Opens the store and joins the group. Waits for a store that does not answer. Returns the end of the job if it has
    /// ended well and cannot start again.
    ///
    /// # Errors
    /// The store does not answer in time or refuses this launcher. The error names what to check.
    pub async fn open(
        plan: &HostsPlan,
        join: &Join,
        port: u16,
        directory: &Path,
        print: &impl Fn(String),
    ) -> anyhow::Result<Result<StoreSession, JobEndedNote>> {
        let until = Instant::now() + Duration::from_nanos(plan.waits().0);
        let (server, managed) = match plan.store {
            StoreKind::Etcd { .. } => (None, None),
            StoreKind::Builtin => (access::builtin(plan, join, print).await?, None),
            StoreKind::Managed => (None, access::managed(plan, join, directory, print).await?),
        };
        let client = Client::new(access::settings(plan, join, server.as_ref()))?;
        let options = GroupOptions { member_ttl: plan.lease, ..GroupOptions::default() };
        let options = match plan.runs_once {
            // A host may come late: Slurm starts a lost task of an array again after minutes.
            true => GroupOptions { farewell: options.retention, ..options },
            false => options,
        };
        let group = Group::new(client, access::job_id(&join.run_id)?, options);
        let me = member(join, port);
        let reported = Cell::new(false);
        let joining = retry(plan, until, print, || {
            // Without etcd on most hosts, this waits for as long as the user allows.
            if let Some(managed) = &managed
                && let ManagedState::Restarting { why } = &*managed.state().borrow()
                && !reported.replace(true)
            {
                print(has_ended(why));
            }
            join_group(&group, &me, plan, &join.run_id)
        });
        let membership = match joining.await? {
            Ok(membership) => Arc::new(membership),
            Err(ended) => return Ok(Err(ended)),
        };
        let secret = retry(plan, until, print, || group.secret()).await?;
        let seal = Seal::new(plan, &join.run_id, &secret);
        let secret = format!("{}\0{secret}", plan.token.as_deref().unwrap_or_default());
        let encryption =
            plan.encrypt.then(|| Tls::from_secret(format!("{secret}\0{}", join.run_id).as_bytes()));
        let encryption = encryption.transpose().context("encrypting what goes between the hosts")?;
        let ends = encryption.as_ref().map(|tls| {
            let (client, server) = tls.configurations();
            Ends { client, server }
        });
        let token = Token::new(&join.run_id, Some(&secret)).over(ends);
        let pass = pass(&join.run_id, &secret, encryption).context("the secret of the job")?;
        let (sender, events) = mpsc::unbounded_channel();
        let (record_sender, record) = watch::channel(None);
        let (say_sender, has_vote) = watch::channel(false);
        let etcd = managed.as_ref().map(|managed| report_ends(managed.state(), sender.clone()));
        let etcd = etcd.map(|reporting| Aborting(tokio::spawn(reporting)));
        let listener = StoreListener {
            me: join.launcher.clone(),
            update: sender.clone(),
            record: record_sender,
            has_vote: say_sender,
            electors: Electors::default(),
            leader: None,
            seal: seal.clone(),
            foreign_end_reported: None,
        };
        let watch = Aborting(tokio::spawn(watch_group(group.clone(), listener)));
        let (published, to_report) = watch::channel(PublishedState::default());
        let teller = Aborting(tokio::spawn(report(Arc::downgrade(&membership), to_report)));
        let may_begin = match plan.store {
            StoreKind::Builtin => server.is_some(),
            StoreKind::Managed | StoreKind::Etcd { .. } => true,
        };
        Ok(Ok(StoreSession {
            group,
            membership,
            launcher: join.launcher.clone(),
            events,
            sender,
            campaign: None,
            removal: None,
            _watch: watch,
            leader: None,
            says: PublishedState::default(),
            published,
            _publisher: teller,
            has_vote,
            record,
            silent_since: None,
            may_begin,
            seal,
            token,
            pass,
            server,
            managed,
            _etcd: etcd,
        }))
    }

    /// The next news. May be dropped and called again.
    pub async fn next(&mut self) -> FromStore {
        match self.events.recv().await {
            Some(update) => {
                if let FromStore::Leader(leader) = &update {
                    self.leader.clone_from(leader);
                }
                if let FromStore::Elected(_) = &update {
                    self.campaign = None;
                }
                update
            }
            None => std::future::pending().await,
        }
    }

    /// Whether this is the launcher that leads.
    pub fn is_me(&self, leader: &Leader) -> bool {
        leader.launch == self.launcher
    }

    /// The other launchers of the job, and the one that leads if this one follows.
    pub(super) fn known_hosts(&self, follows: bool) -> KnownHosts {
        let leader = self.leader.as_ref().filter(|leader| follows && !self.is_me(leader));
        KnownHosts::new(leader, &self.group, &self.launcher, &self.token)
    }

    /// Stands for election, until it is elected or withdraws.
    pub fn campaign(&mut self) {
        if self.campaign.is_some() {
            return;
        }
        let (membership, sender, record, seal) =
            (Arc::clone(&self.membership), self.sender.clone(), self.record.clone(), self.seal.clone());
        self.campaign = Some(Aborting(tokio::spawn(async move {
            let elected = loop {
                match membership.campaign().await {
                    // If a launcher of the job wrote it, this one is told. Else it is removed.
                    Err(CoordError::Ended { .. }) => tokio::time::sleep(PAUSE).await,
                    elected => break elected,
                }
            };
            match elected {
                Ok(leadership) => {
                    // A wiped store has no record; then the last one that was read counts.
                    let last = leadership.record().map(|record| record.epoch);
                    let kept = leadership.record().and_then(read);
                    let record = kept.or_else(|| record.borrow().as_ref().and_then(read));
                    let (requests, orders) = mpsc::unbounded_channel();
                    let record_writer = RecordWriter { epoch: leadership.epoch(), seal, requests };
                    let _ =
                        sender.send(FromStore::Elected(Box::new(Elected { record_writer, record, last })));
                    tokio::spawn(hold(leadership, orders, sender));
                }
                Err(error) => {
                    let _ = sender.send(FromStore::Problem(format!("this host cannot lead: {error}")));
                }
            }
        })));
    }

    pub fn stand_down(&mut self) {
        (self.campaign, self.removal) = (None, None);
    }

    /// Removes a dead leader from the store, so that no one waits for the end of its lease.
    pub fn remove_leader(&mut self, launcher: &str) {
        let Some(leader) = self.leader.clone().filter(|leader| leader.launch == launcher) else { return };
        let group = self.group.clone();
        self.removal = Some(Aborting(tokio::spawn(async move {
            while let Err(error) = group.depose(&leader).await {
                if !error.is_unreachable() && !error.is_unsure() {
                    tracing::debug!(%error, "the dead leader stays in the store until its lease ends");
                    return;
                }
                tokio::time::sleep(PAUSE).await;
            }
        })));
    }

    /// Publishes whether this launcher has a seat: then it goes on with the job if the leader is lost.
    pub fn set_seated(&mut self, seated: bool) {
        self.says.seated = seated;
        self.published.send_replace(self.says.clone());
    }

    /// Whether this launcher has a say on whether the leader lives.
    pub fn has_vote(&self) -> bool {
        *self.has_vote.borrow()
    }

    /// Publishes whether this launcher misses the leader.
    pub fn miss_leader(&mut self, misses: bool) {
        self.says.misses = self.leader.as_ref().filter(|_| misses).map(missed);
        self.published.send_replace(self.says.clone());
    }

    /// Whether another launcher can go on with the job. If so, this one, which has no seat, must not start it again.
    pub async fn goes_on_elsewhere(&self) -> bool {
        match self.group.state().await {
            Ok(state) => state.members.values().any(|member| PublishedState::of(member).seated),
            Err(_) => true,
        }
    }

    /// How long the store has not answered; none while it answers.
    pub fn silent_for(&mut self) -> Option<Duration> {
        self.silent_since = match *self.membership.state().borrow() {
            MemberState::Kept | MemberState::Ended => None,
            MemberState::Unanswered { since } => Some(since),
            MemberState::Lost => self.silent_since.or_else(|| Some(Instant::now())),
        };
        self.silent_since.map(|since| since.elapsed())
    }

    /// The process of etcd that runs on this host for the job.
    pub fn store_process(&self) -> Option<Pid> {
        match *self.managed.as_ref()?.state().borrow() {
            ManagedState::Running { pid, .. } => i32::try_from(pid).ok().map(Pid),
            ManagedState::Restarting { .. } | ManagedState::Stopped => None,
        }
    }

    /// Ends the job in the store: its leader removes the job's keys.
    pub async fn end(self, record_writer: RecordWriter, exit: i32, why: &str) {
        let (done, is_done) = oneshot::channel();
        let body = record_writer.seal.sealed(record_writer.epoch, exit);
        let _ = record_writer.requests.send(StoreRequest::End { why: why.to_owned(), body, done });
        let _ = tokio::time::timeout(END_WITHIN, is_done).await;
        self.stop_store().await;
    }

    /// Leaves the group while the job goes on.
    pub async fn leave_early(mut self, why: &str) {
        self.campaign = None;
        let StoreSession { membership, server, managed, .. } = self;
        if let Some(membership) = Arc::into_inner(membership) {
            let _ = tokio::time::timeout(END_WITHIN, membership.goodbye(why)).await;
        }
        drop(server);
        if let Some(managed) = managed {
            managed.stop().await;
        }
    }

    /// Stops the part of the store that runs on this host.
    pub async fn stop_store(self) {
        // The built-in store ends when this is dropped.
        if let Some(managed) = self.managed {
            managed.stop().await;
        }
    }
}

/// Reports when etcd on this host ends. It is started again, but without it the job may not survive the loss of a host.
async fn report_ends(mut state: watch::Receiver<ManagedState>, update: mpsc::UnboundedSender<FromStore>) {
    let mut reported_at = None::<Instant>;
    while state.changed().await.is_ok() {
        let ManagedState::Restarting { why } = state.borrow_and_update().clone() else { continue };
        if reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            reported_at = Some(Instant::now());
            let _ = update.send(FromStore::Notice(has_ended(&why)));
        }
    }
}

fn has_ended(why: &str) -> String {
    format!("coordination: etcd on this host has ended and is started again: {why}")
}

/// The proof that launchers of the job show each other to keep copies of checkpoints.
fn pass(run_id: &str, secret: &str, encryption: Option<Tls>) -> Result<Credentials, TokenError> {
    let token = PeerToken::new(format!("{secret}\0{run_id}").as_bytes())?;
    Ok(match encryption {
        Some(tls) => Credentials::Certificate(tls, Some(token)),
        None => Credentials::Token(token),
    })
}

/// Joins the group; removes the note of an earlier job of the same name, unless that was this job, and it ended well.
async fn join_group(
    group: &Group,
    me: &Member,
    plan: &HostsPlan,
    run_id: &str,
) -> Result<Result<Membership, JobEndedNote>, CoordError> {
    match group.join(me.clone()).await {
        Err(CoordError::Ended { .. }) => {
            // Without a token, the secret of the proof was removed with the job's other keys.
            let is_of_job = |ended: &JobEndedNote| {
                plan.token.as_ref().is_none_or(|token| Seal::new(plan, run_id, token).is_of(ended))
            };
            let is_late = |ended: &JobEndedNote| {
                is_of_job(ended) && (plan.returning || (plan.runs_once && exit_of(ended) == 0))
            };
            if let Some(ended) = group.state().await?.ended.filter(is_late) {
                return Ok(Err(ended));
            }
            group.forget_end(|_| false).await?;
            group.join(me.clone()).await.map(Ok)
        }
        joined => joined.map(Ok),
    }
}

/// Retries for as long as the store does not answer.
async fn retry<T, F: Future<Output = Result<T, CoordError>>>(
    plan: &HostsPlan,
    until: Instant,
    print: &impl Fn(String),
    ask: impl Fn() -> F,
) -> anyhow::Result<T> {
    let mut reported_at = None::<Instant>;
    loop {
        let error = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if error.is_refused() && !matches!(plan.store, StoreKind::Etcd { .. }) {
            let file = plan.token_file.as_ref().map(|file| format!(" (this host has {})", file.display()));
            bail!(
                "the launcher at {} does not have the same secret of the job{}: use the same --rdzv-id and \
                 {TOKEN_VARIABLE} on all hosts",
                plan.endpoint(),
                file.unwrap_or_default()
            );
        }
        if !error.is_unreachable() && !error.is_unsure() {
            return Err(error).with_context(|| format!("meeting at {} (--rdzv-endpoint)", plan.endpoint()));
        }
        if Instant::now() >= until {
            bail!("{}", access::not_met(plan, &error));
        }
        if reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            reported_at = Some(Instant::now());
            print(format!("no answer at {} yet: still trying", plan.endpoint()));
            tracing::debug!(%error, "the coordination store does not answer");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

pub fn exit_of(ended: &JobEndedNote) -> i32 {
    let exit = ended.body.get("exit").and_then(serde_json::Value::as_i64);
    exit.and_then(|exit| i32::try_from(exit).ok()).unwrap_or(1)
}

fn read(record: &StoredRecord) -> Option<Record> {
    record.body().ok()
}

fn member(join: &Join, port: u16) -> Member {
    Member {
        addresses: vec![format!("{}:{port}", access::bracketed(&join.address))],
        ranks: join.ranks,
        mainstay: join.version.clone(),
        script: join.program.clone(),
        node_rank: join.node_rank,
        ..Member::new(join.launcher.clone(), join.host.clone())
    }
}
