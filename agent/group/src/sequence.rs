//! Numbered messages over unreliable connections: unacknowledged messages are sent again, and each takes effect once.

use std::collections::VecDeque;

/// Outgoing messages, until the other side has acknowledged them.
#[derive(Clone, Debug)]
pub struct Outbox<T> {
    next: u64,
    kept: VecDeque<(u64, T)>,
    most: usize,
}

/// More messages wait for an acknowledgement than are kept: the other side has not read for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} messages were not acknowledged")]
pub struct Overflow(pub usize);

impl<T: Clone> Outbox<T> {
    /// An empty outbox that keeps at most `most` messages.
    pub fn new(most: usize) -> Outbox<T> {
        Outbox { next: 1, kept: VecDeque::new(), most }
    }

    /// Adds a message and returns its number.
    ///
    /// # Errors
    /// [`Overflow`]: the message is not added, and the other side counts as lost.
    pub fn push(&mut self, message: T) -> Result<u64, Overflow> {
        if self.kept.len() >= self.most {
            return Err(Overflow(self.kept.len()));
        }
        let number = self.next;
        self.next += 1;
        self.kept.push_back((number, message));
        Ok(number)
    }

    /// The other side has all messages up to this one.
    pub fn acknowledged(&mut self, up_to: u64) {
        while self.kept.front().is_some_and(|(number, _)| *number <= up_to) {
            self.kept.pop_front();
        }
    }

    /// The messages to send on a new connection, in order.
    pub fn unacknowledged(&self) -> impl Iterator<Item = (u64, &T)> {
        self.kept.iter().map(|(number, message)| (*number, message))
    }

    /// Whether the other side has everything.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}

/// The newest message that was received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inbox {
    have: u64,
}

/// The meaning of a received number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The next one: it takes effect.
    New,
    /// It was received before.
    Again,
    /// A number in between is missing: the connection is faulty and must be made again.
    Gap,
}

impl Inbox {
    /// Records a received number.
    pub fn receive(&mut self, number: u64) -> Received {
        if number <= self.have {
            return Received::Again;
        }
        if number != self.have + 1 {
            return Received::Gap;
        }
        self.have = number;
        Received::New
    }

    /// The newest number that was received: the one to acknowledge.
    pub fn have(&self) -> u64 {
        self.have
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_outbox_is_bounded() {
        let mut outbox = Outbox::new(2);
        assert_eq!(outbox.push('a'), Ok(1));
        assert_eq!(outbox.push('b'), Ok(2));
        assert_eq!(outbox.push('c'), Err(Overflow(2)));
        outbox.acknowledged(1);
        assert_eq!(outbox.push('c'), Ok(3));
    }

    proptest! {
        /// For any loss of connections and of acknowledgements, each message takes effect once and in order.
        #[test]
        fn each_message_takes_effect_once_and_in_order(events in proptest::collection::vec(0u8..4, 0..200)) {
            let mut outbox = Outbox::new(1000);
            let mut inbox = Inbox::default();
            let (mut sent, mut effects) = (0u64, Vec::new());
            // Messages in transit. A broken connection loses a part of them.
            let mut wire: Vec<(u64, u64)> = Vec::new();
            for event in events {
                match event {
                    0 => {
                        sent += 1;
                        let number = outbox.push(sent).expect("room");
                        wire.push((number, sent));
                    }
                    1 if !wire.is_empty() => {
                        let (number, message) = wire.remove(0);
                        if inbox.receive(number) == Received::New {
                            effects.push(message);
                        }
                    }
                    2 => outbox.acknowledged(inbox.have()),
                    3 => wire = outbox.unacknowledged().map(|(number, message)| (number, *message)).collect(),
                    _ => {}
                }
            }
            wire = outbox.unacknowledged().map(|(number, message)| (number, *message)).collect();
            for (number, message) in wire {
                if inbox.receive(number) == Received::New {
                    effects.push(message);
                }
            }
            prop_assert_eq!(effects, (1..=sent).collect::<Vec<_>>());
        }
    }
}
