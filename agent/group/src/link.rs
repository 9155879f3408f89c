//! A follower as its leader sees it: its seat, its connection, and the messages of both directions.

use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::Command;

use super::lost::LivenessMonitor;
use super::round::Seated;
use super::sequence::{Inbox, Outbox};

/// A connection between two launchers. Each has a number, and no number is used twice.
pub type Connection = u64;

/// The limit of commands that a follower has not acknowledged. With more it counts as lost.
const COMMANDS: usize = 1024;

/// How long a follower that was never connected has to connect.
pub const BACK_WITHIN: Span = Span::seconds(2);

/// A follower.
#[derive(Clone, Debug)]
pub struct Link {
    pub(super) seated: Seated,
    pub(super) connection: Option<Connection>,
    /// Whether it is alive.
    pub(super) vital: LivenessMonitor,
    /// Why it counts as lost, whatever else is seen of it.
    pub(super) given_up: Option<String>,
    pub(super) lost: bool,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox<Command>,
    /// The newest entry that was sent to it.
    pub(super) entries: u64,
}

impl Link {
    /// A follower that is not connected yet, and has this long to connect.
    pub(super) fn new(seated: Seated, at: Mono, within: Span) -> Link {
        Link {
            seated,
            connection: None,
            vital: LivenessMonitor::expected(at, within),
            given_up: None,
            lost: false,
            inbox: Inbox::default(),
            outbox: Outbox::new(COMMANDS),
            entries: 0,
        }
    }

    /// Records a new connection. Returns the previous one.
    pub(super) fn connected(&mut self, at: Mono, connection: Connection) -> Option<Connection> {
        self.vital.connects(at);
        self.connection.replace(connection)
    }

    /// Records the end of its connection, and returns it.
    pub(super) fn disconnected(&mut self, at: Mono, why: String) -> Option<Connection> {
        self.vital.breaks(at, why);
        self.connection.take()
    }

    /// Whether it can be asked to check others.
    pub(super) fn can_look(&self, at: Mono) -> bool {
        self.connection.is_some() && !self.seated.member.listens.is_empty() && self.vital.is_well(at)
    }
}
