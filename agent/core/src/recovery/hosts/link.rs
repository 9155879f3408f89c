//! A follower as its leader sees it: its seat, its connection, and the messages of both directions.

use crate::base::time::{Mono, Span};

use super::lost::Vital;
use super::round::Seated;
use super::sequence::{Inbox, Outbox};
use super::wire::Command;

/// A connection between two launchers. Each has its number, and no number is used twice.
pub type Connection = u64;

/// Commands that a follower has not acknowledged; with more it counts as lost.
const COMMANDS: usize = 1024;

/// A follower that was never connected has this long to come.
pub const BACK_WITHIN: Span = Span::seconds(2);

/// A follower.
#[derive(Clone, Debug)]
pub struct Link {
    pub(super) seated: Seated,
    pub(super) connection: Option<Connection>,
    /// Whether it lives.
    pub(super) vital: Vital,
    /// Why it is given up whatever is seen of it.
    pub(super) given_up: Option<String>,
    pub(super) lost: bool,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox<Command>,
    /// The newest entry that it was sent.
    pub(super) entries: u64,
}

impl Link {
    /// One that has not been connected yet, and has so long to come.
    pub(super) fn new(seated: Seated, at: Mono, within: Span) -> Link {
        Link {
            seated,
            connection: None,
            vital: Vital::expected(at, within),
            given_up: None,
            lost: false,
            inbox: Inbox::default(),
            outbox: Outbox::new(COMMANDS),
            entries: 0,
        }
    }

    /// It is connected; the connection that it had before.
    pub(super) fn connected(&mut self, at: Mono, connection: Connection) -> Option<Connection> {
        self.vital.connects(at);
        self.connection.replace(connection)
    }

    /// It has no connection any more; the one that it had.
    pub(super) fn disconnected(&mut self, at: Mono, why: String) -> Option<Connection> {
        self.vital.breaks(at, why);
        self.connection.take()
    }

    /// Whether it can be asked to look at others.
    pub(super) fn can_look(&self, at: Mono) -> bool {
        self.connection.is_some() && !self.seated.member.listens.is_empty() && self.vital.is_well(at)
    }
}
