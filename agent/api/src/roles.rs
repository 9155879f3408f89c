//! Who may do what on the agent's Unix socket. The kernel reports the caller's user. Each call that is refused or
//! changes something is reported to the node, which writes it to the journal.

use std::sync::Arc;

use mainstay_model::id::Pid;
use mainstay_tier::peer::{User, Users};
use tokio::sync::mpsc;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use super::local_only::LOCAL_ONLY;
use super::refusal::Reason;
use mainstay_node::{Called, CalledBy, Input};

/// Users and groups of a role.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Users.
    pub uids: Vec<u32>,
    /// Groups: the caller's process must be in one of them.
    pub gids: Vec<u32>,
}

impl Allowed {
    fn is_empty(&self) -> bool {
        self.uids.is_empty() && self.gids.is_empty()
    }

    fn has(&self, user: User, groups: &[u32]) -> bool {
        self.uids.contains(&user.uid)
            || self.gids.contains(&user.gid)
            || groups.iter().any(|group| self.gids.contains(group))
    }
}

/// The roles of an agent.
#[derive(Clone, Debug)]
pub struct Roles {
    /// Who may attach launchers and manage their own runs, in addition to the agent's user and its group; everyone who
    /// can connect if nobody is named.
    launchers: Allowed,
    /// Who may manage the runs of all users, and acknowledge, silence and reset components.
    operators: Allowed,
    /// The node, which records refused calls and changes.
    inputs: mpsc::Sender<Input>,
    users: Arc<Users>,
}

/// A calling process.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Its user and group.
    pub user: User,
    /// Its process; 0 in another PID namespace.
    pub pid: Pid,
}

impl Roles {
    /// New roles.
    pub fn new(
        launchers: Allowed,
        operators: Allowed,
        inputs: mpsc::Sender<Input>,
        users: Arc<Users>,
    ) -> Roles {
        Roles { launchers, operators, inputs, users }
    }

    /// The caller, if it may use this agent for its own runs.
    ///
    /// # Errors
    /// The call came over another socket, or the user is not allowed.
    pub(super) fn user<T>(&self, request: &Request<T>, call: &'static str) -> Result<Caller, Status> {
        let caller = who(request)?;
        if self.is_user(caller.user) {
            return Ok(caller);
        }
        let User { uid, gid } = caller.user;
        Err(self.refuse(
            caller,
            call,
            format!(
                "user {uid} (group {gid}) may not use this agent: put the user into the agent's group, or into \
                 allow_uids or allow_gids of the agent's configuration"
            ),
        ))
    }

    /// The caller, if it is an operator.
    ///
    /// # Errors
    /// The call came over another socket, or the user is not an operator.
    pub(super) fn operator<T>(&self, request: &Request<T>, call: &'static str) -> Result<Caller, Status> {
        let caller = who(request)?;
        if self.is_operator(caller.user) {
            return Ok(caller);
        }
        Err(self.refuse(
            caller,
            call,
            format!(
                "user {} is no operator: ask root, or have the user put into operator_uids or a group of the user into \
                 operator_gids of the agent's configuration",
                caller.user.uid
            ),
        ))
    }

    fn is_user(&self, user: User) -> bool {
        let groups = self.users.groups_of(user);
        let own = nix::unistd::getegid().as_raw();
        self.launchers.is_empty()
            || self.is_operator(user)
            || user.gid == own
            || groups.contains(&own)
            || self.launchers.has(user, &groups)
    }

    /// Whether a user may see and change the runs of others: root, the agent's own user and the operators in the
    /// configuration.
    pub(super) fn is_operator(&self, user: User) -> bool {
        user.uid == 0
            || user.uid == nix::unistd::geteuid().as_raw()
            || self.operators.has(user, &self.users.groups_of(user))
    }

    /// Refuses a call and records it.
    pub(super) fn refuse(&self, caller: Caller, call: &'static str, why: String) -> Status {
        self.report(caller, call, &why, true);
        Reason::CALLER_NOT_ALLOWED.refuse(why)
    }

    /// Records a call that changes something.
    pub(super) fn changes(&self, caller: Caller, call: &'static str, what: &str) {
        self.report(caller, call, what, false);
    }

    fn report(&self, caller: Caller, call: &'static str, what: &str, refused: bool) {
        let by = CalledBy::Process { uid: caller.user.uid, pid: caller.pid };
        record(&self.inputs, by, call, what, refused);
    }
}

/// Has a call written to the journal.
pub(super) fn record(inputs: &mpsc::Sender<Input>, by: CalledBy, call: &str, what: &str, refused: bool) {
    let what = what.chars().take(MAX_RECORDED_CHARS).collect();
    let called = Called { by, call: call.to_owned(), what, refused };
    // If the node is too busy, the record is dropped; the call itself is not delayed.
    if let Err(error) = inputs.try_send(Input::Called(called))
        && let Input::Called(Called { by, .. }) = error.into_inner()
    {
        tracing::warn!(%by, call, refused, "a call is not in the journal: the node is busy");
    }
}

/// Maximum number of characters recorded of a call.
const MAX_RECORDED_CHARS: usize = 300;

fn who<T>(request: &Request<T>) -> Result<Caller, Status> {
    let connection = request.extensions().get::<UdsConnectInfo>();
    let credentials = connection
        .and_then(|connection| connection.peer_cred)
        .ok_or_else(|| Reason::UNIX_SOCKET_ONLY.refuse(LOCAL_ONLY))?;
    let user = User { uid: credentials.uid(), gid: credentials.gid() };
    Ok(Caller { user, pid: Pid(credentials.pid().unwrap_or(0)) })
}
