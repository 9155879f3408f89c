//! A follower as its leader sees it: its seat, its connection, and the messages of both directions.

use crate::base::time::{Mono, Span};

use super::round::Seated;
use super::sequence::{Inbox, Outbox};
use super::wire::Command;

/// A connection between two launchers. Each has its number, and no number is used twice.
pub type Connection = u64;

/// Commands that a follower has not acknowledged; with more it counts as lost.
const COMMANDS: usize = 1024;

/// A follower whose connection has ended has this long to come back: a launcher that was killed does not.
pub const BACK_WITHIN: Span = Span::seconds(2);

/// A follower.
#[derive(Clone, Debug)]
pub struct Link {
    pub(super) seated: Seated,
    pub(super) connection: Option<Connection>,
    /// Since when there is none, and why.
    pub(super) gone: Option<(Mono, String)>,
    /// How long it may be gone.
    pub(super) back_within: Span,
    pub(super) lost: bool,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox<Command>,
    /// The newest entry that it was sent.
    pub(super) entries: u64,
}

impl Link {
    /// One that has never been connected. It has no time to come back unless it is said to be gone.
    pub(super) fn new(seated: Seated) -> Link {
        Link {
            seated,
            connection: None,
            gone: None,
            back_within: BACK_WITHIN,
            lost: false,
            inbox: Inbox::default(),
            outbox: Outbox::new(COMMANDS),
            entries: 0,
        }
    }

    /// It is connected; the connection that it had before.
    pub(super) fn connected(&mut self, connection: Connection) -> Option<Connection> {
        (self.gone, self.back_within) = (None, BACK_WITHIN);
        self.connection.replace(connection)
    }

    /// It has no connection any more; the one that it had.
    pub(super) fn disconnected(&mut self, at: Mono, why: String) -> Option<Connection> {
        self.gone = Some((at, why));
        self.connection.take()
    }

    /// For how long it has been gone and why, if that is too long.
    pub(super) fn is_gone_too_long(&self, now: Mono) -> Option<(Span, String)> {
        let (since, why) = self.gone.as_ref()?;
        let gone = now.since(*since);
        (gone >= self.back_within).then(|| (gone, why.clone()))
    }
}
