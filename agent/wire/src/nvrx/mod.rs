//! The monitor side of the rank-monitor protocol of NVRx (nvidia-resiliency-ext): jobs that use its `RankMonitorClient` (Megatron-LM,
//! NeMo) are monitored without a change.
//!
//! A frame consists of a four-byte big-endian length and a pickle. A [`Session`] takes the bytes of one connection and returns the
//! client's messages and the replies to send.
//!
//! ```text
//!  AuthkeyMsg → ok    InitMsg → configuration    HeartbeatMsg, SectionMsg → (ok, for clients up to 0.4)
//!  UpdateConfigMsg → ok                          anything else → error, and the connection is over
//! ```

pub mod message;
pub use crate::pickle;

use message::{Change, Message, MessageError};

/// Maximum length of a message. A client's messages have a few hundred bytes, plus its time-outs.
pub const MESSAGE_BYTES: usize = 64 << 10;

/// Sections that Megatron-LM and NeMo open. A client newer than 0.4 reports no others. A client up to 0.4 treats others as an error, as
/// it does under NVRx unless they are configured.
pub const SECTIONS: [&str; 4] = ["setup", "warmup", "step", "checkpointing"];

/// The name of a rank's socket in the directory of its job.
#[must_use]
pub fn socket_name(local_rank: u32) -> String {
    format!("nvrx-{local_rank}.sock")
}

/// A message from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientMessage {
    /// It connected.
    Connected {
        /// Its pid as it reports it, or 0.
        pid: u32,
    },
    /// A heartbeat.
    Beat,
    /// A section starts.
    Enter(String),
    /// A section ends.
    Leave(String),
    /// A step is complete.
    Step(u64),
}

/// Why a connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// A message is too long.
    #[error("a message of {0} bytes is refused: at most {MESSAGE_BYTES} are read")]
    TooLong(usize),
    /// A message is not a client's.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The client did not identify itself before this message.
    #[error("the message is refused: the client has not said who it is")]
    NotInitialised,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Session {
    buffer: Vec<u8>,
    /// Whether the client waits for replies. `None` until it identifies itself.
    waits: Option<bool>,
    open: Vec<String>,
    steps: u64,
    newest: Option<u64>,
}

impl Session {
    /// Processes received bytes. Appends the rank's messages to `messages` and the replies to `answers`.
    ///
    /// # Errors
    /// [`SessionError`]: close the connection after sending `answers`.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        messages: &mut Vec<ClientMessage>,
        answers: &mut Vec<u8>,
    ) -> Result<(), SessionError> {
        self.buffer.extend_from_slice(bytes);
        let received = self.messages(messages, answers);
        if let Err(error) = &received {
            answers.extend(message::error(&error.to_string()));
        }
        received
    }

    /// Ends the connection and closes all open sections.
    pub fn end(&mut self, messages: &mut Vec<ClientMessage>) {
        self.close_all(messages);
    }

    fn messages(
        &mut self,
        messages: &mut Vec<ClientMessage>,
        answers: &mut Vec<u8>,
    ) -> Result<(), SessionError> {
        while let Some((length, rest)) = self.buffer.split_first_chunk::<4>() {
            let length = u32::from_be_bytes(*length) as usize;
            if length > MESSAGE_BYTES {
                return Err(SessionError::TooLong(length));
            }
            let Some(body) = rest.get(..length) else { break };
            let message = Message::read(body)?;
            self.buffer.drain(..4 + length);
            self.message(message, messages, answers)?;
        }
        Ok(())
    }

    fn message(
        &mut self,
        message: Message,
        messages: &mut Vec<ClientMessage>,
        answers: &mut Vec<u8>,
    ) -> Result<(), SessionError> {
        match message {
            Message::Authkey => answers.extend(message::ok()),
            Message::Init { pid, waits } => {
                self.close_all(messages);
                self.waits = Some(waits);
                messages.push(ClientMessage::Connected { pid: pid.unwrap_or(0) });
                answers.extend(message::configuration(&SECTIONS));
            }
            Message::UpdateConfig => answers.extend(message::ok()),
            Message::Heartbeat | Message::Section { .. } => {
                let waits = self.waits.ok_or(SessionError::NotInitialised)?;
                match message {
                    Message::Section { change, iteration } => self.section(change, iteration, messages),
                    _ => messages.push(ClientMessage::Beat),
                }
                if waits {
                    answers.extend(message::ok());
                }
            }
        }
        Ok(())
    }

    fn section(&mut self, change: Change, iteration: Option<u64>, messages: &mut Vec<ClientMessage>) {
        match change {
            Change::Open(name) if self.open.len() < 64 && !self.open.contains(&name) => {
                messages.push(ClientMessage::Enter(shown(&name).to_owned()));
                self.open.push(name);
            }
            // Already open, or more than any client opens.
            Change::Open(_) => messages.push(ClientMessage::Beat),
            Change::Close(name) => {
                match self.open.iter().rposition(|open| *open == name) {
                    Some(at) => self.close(at, messages),
                    None => messages.push(ClientMessage::Beat),
                }
                if name == "step" {
                    self.step(iteration, messages);
                }
            }
            Change::CloseAll => {
                self.close_all(messages);
                messages.push(ClientMessage::Beat);
            }
        }
    }

    /// Sections of this protocol may overlap, but on the page they are a stack. Sections that were opened later stay open.
    fn close(&mut self, at: usize, messages: &mut Vec<ClientMessage>) {
        messages.push(ClientMessage::Leave(shown(&self.open[at]).to_owned()));
        self.open.remove(at);
        messages.extend(self.open[at..].iter().map(|name| ClientMessage::Enter(shown(name).to_owned())));
    }

    fn close_all(&mut self, messages: &mut Vec<ClientMessage>) {
        while let Some(name) = self.open.pop() {
            messages.push(ClientMessage::Leave(shown(&name).to_owned()));
        }
    }

    /// Megatron-LM also opens `step` for an evaluation step, in the same iteration.
    fn step(&mut self, iteration: Option<u64>, messages: &mut Vec<ClientMessage>) {
        if iteration.is_some() && iteration == self.newest {
            return;
        }
        self.steps += 1;
        self.newest = iteration;
        messages.push(ClientMessage::Step(iteration.unwrap_or(self.steps)));
    }
}

/// The name of a section in Mainstay.
fn shown(name: &str) -> &str {
    if name == "checkpointing" { "checkpoint" } else { name }
}
