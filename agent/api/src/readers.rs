//! Who may read what a job's program wrote: its command line, paths, messages and tracebacks. They can contain
//! names of data sets, prompts, or a token in an address. Health, phases, steps, causes and all other numbers are
//! for everyone who can connect.

use std::collections::BTreeMap;

use mainstay_checkpoint::divergence::REPLICAS;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::JobId;
use mainstay_tier::peer::User;
use mainstay_view::node::NodeView;
use tonic::Request;
use tonic::transport::server::UdsConnectInfo;

use super::certificate::TcpCallerInfo;
use super::roles::Roles;
use mainstay_node::CALLS_COMPONENT;

/// Who may read the texts of jobs.
#[derive(Clone, Debug, Default)]
pub enum Readers {
    /// Everyone who can connect.
    #[default]
    Everyone,
    /// Everyone who can connect to the Unix socket: that of a launcher is for its own user. No one over the network.
    OfSocket,
    /// A job's user, and operators.
    Owners(Roles),
}

/// A caller and the texts that it may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// May read the texts of all jobs.
    All,
    /// May read those of this user's jobs.
    User(u32),
    /// May read the texts of all jobs, with secrets masked: it connected over the network.
    Masked,
    /// May read none: it connected over the network, and its certificate is not that of an operator.
    Stranger,
}

impl Readers {
    /// The reader that a request comes from.
    pub(super) fn reader<T>(&self, request: &Request<T>) -> Reader {
        let connection = request.extensions().get::<UdsConnectInfo>();
        let caller = connection.and_then(|connection| connection.peer_cred);
        match (self, caller) {
            (Readers::Everyone, _) if connection.is_none() => Reader::Masked,
            (Readers::Everyone, _) | (Readers::OfSocket, Some(_)) => Reader::All,
            (Readers::Owners(_), None) if TcpCallerInfo::is_operator(request.extensions()) => Reader::Masked,
            (Readers::OfSocket | Readers::Owners(_), None) => Reader::Stranger,
            (Readers::Owners(roles), Some(credentials)) => {
                let user = User { uid: credentials.uid(), gid: credentials.gid() };
                if roles.is_operator(user) { Reader::All } else { Reader::User(user.uid) }
            }
        }
    }
}

impl Reader {
    /// Whether the caller may read the texts of a job of this user; `None` is a job whose user is unknown.
    pub(super) fn may_read(self, owner: Option<u32>) -> bool {
        match self {
            Reader::All | Reader::Masked => true,
            Reader::User(uid) => owner == Some(uid),
            Reader::Stranger => false,
        }
    }
}

/// The users of the journal's jobs, for entries that are read in order.
#[derive(Debug, Default)]
pub(super) struct Owners(BTreeMap<JobId, u32>);

/// Components whose observations belong to the user in their value `uid`.
const OF_A_USER: [&str; 2] = [CALLS_COMPONENT, REPLICAS];

/// Maximum number of jobs remembered while the journal is read.
const JOBS: usize = 4096;

impl Owners {
    /// Entries are missing before the next one: the users of jobs that started there are unknown.
    pub(super) fn after_a_gap(&mut self) {
        self.0.clear();
    }

    /// Whether the caller may read the texts of the next entry. Entries without a job and a user are for everyone.
    ///
    /// Another user can take a name once its job has ended. So the user of a job that `view` shows counts only from
    /// the entry with which the job started.
    pub(super) fn may_read(&mut self, reader: Reader, entry: &Entry, view: &NodeView) -> bool {
        let Some(job) = &entry.job else {
            return match &entry.body {
                // Calls name directories of users, and differing replicas name groups of programs.
                Body::Fact(Fact::Observed(seen)) if OF_A_USER.contains(&seen.component.as_str()) => {
                    reader.may_read(seen.values.get("uid").and_then(|uid| uid.parse().ok()))
                }
                _ => true,
            };
        };
        if let Body::Fact(Fact::JobStarted(spec)) = &entry.body {
            if self.0.len() >= JOBS {
                self.0.pop_first();
            }
            self.0.insert(job.clone(), spec.uid);
        }
        let shown = || view.jobs.get(job).filter(|job| job.began <= entry.seq).map(|job| job.spec.uid);
        reader.may_read(shown().or_else(|| self.0.get(job).copied()))
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::JobSpec;
    use mainstay_model::id::BootId;
    use mainstay_model::observation::{Observation, Weight};
    use mainstay_model::time::Stamp;

    use super::*;

    fn entry(seq: u64, job: Option<&str>, fact: Fact) -> Entry {
        let job = job.map(|job| JobId(job.to_owned()));
        let boot = BootId("b".to_owned());
        Entry { seq, at: Stamp::default(), boot, job, origin_seq: None, body: Body::Fact(fact) }
    }

    fn started(seq: u64, uid: u32) -> Entry {
        entry(seq, Some("x"), Fact::JobStarted(JobSpec { uid, ..JobSpec::default() }))
    }

    fn notice(seq: u64) -> Entry {
        entry(seq, Some("x"), Fact::PagesUnavailable { reason: "full".to_owned() })
    }

    #[test]
    fn a_user_who_takes_the_name_of_an_ended_job_reads_nothing_of_the_job_before() {
        let all = [started(1, 7), notice(2), started(3, 8), notice(4)];
        let mut view = NodeView::default();
        all.iter().for_each(|entry| view.apply(entry));
        let read = |uid, from: usize| {
            let mut owners = Owners::default();
            let entries = all.iter().skip(from);
            entries.map(|entry| owners.may_read(Reader::User(uid), entry, &view)).collect::<Vec<bool>>()
        };
        assert_eq!(read(7, 0), [true, true, false, false]);
        assert_eq!(read(8, 0), [false, false, true, true]);
        // If reading starts in the middle, the owner of the first entry is unknown.
        assert_eq!(read(7, 1), [false, false, false]);
        assert_eq!(read(8, 1), [false, true, true]);
        assert_eq!(read(8, 3), [true]);
    }

    #[test]
    fn entries_of_unknown_owners_after_a_gap_are_withheld() {
        let view = NodeView::default();
        let mut owners = Owners::default();
        assert!(owners.may_read(Reader::User(7), &started(1, 7), &view));
        assert!(owners.may_read(Reader::User(7), &notice(2), &view));
        owners.after_a_gap();
        assert!(!owners.may_read(Reader::User(7), &notice(9), &view));
    }

    #[test]
    fn a_users_calls_are_for_that_user_and_operators() {
        let values = BTreeMap::from([("uid".to_owned(), "7".to_owned())]);
        let (component, event) = (CALLS_COMPONENT.to_owned(), "called".to_owned());
        let (weight, detail) = (Weight::Info, "run x into /home/a/secret".to_owned());
        let called = entry(1, None, Fact::Observed(Observation { component, event, weight, detail, values }));
        let view = NodeView::default();
        let read = |reader| Owners::default().may_read(reader, &called, &view);
        assert_eq!(
            [read(Reader::User(7)), read(Reader::User(8)), read(Reader::Stranger), read(Reader::All)],
            [true, false, false, true]
        );
    }

    #[test]
    fn what_belongs_to_no_job_is_for_everyone_and_operators_read_all() {
        let view = NodeView::default();
        let of_the_host = entry(1, None, Fact::AgentStopped);
        assert!(Owners::default().may_read(Reader::Stranger, &of_the_host, &view));
        assert!(!Owners::default().may_read(Reader::Stranger, &notice(2), &view));
        assert!(Owners::default().may_read(Reader::All, &notice(2), &view));
    }
}
