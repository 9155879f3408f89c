//! The messages of a rank-monitor client, and the replies to them.

use crate::pickle::{Class, MODULE, Node, Pickle, PickleError};

/// Maximum length of a section name; the page has room for no more.
const NAME_BYTES: usize = 56;

/// A message of a client.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first message. Its key protects nothing.
    Authkey,
    /// Identifies the client.
    Init {
        /// The pid of the rank, as it reports it.
        pid: Option<u32>,
        /// Whether the client waits for a reply to each message. Clients up to 0.4 do.
        waits: bool,
    },
    /// A heartbeat.
    Heartbeat,
    /// A section starts or ends.
    Section {
        /// What happened.
        change: Change,
        /// The training iteration, if the client knows it.
        iteration: Option<u64>,
    },
    /// Time-outs. Mainstay ignores them.
    UpdateConfig,
}

/// A change of a client's open sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This section starts.
    Open(String),
    /// This section ends.
    Close(String),
    /// All sections end.
    CloseAll,
}

/// Why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// It is no valid pickle.
    #[error("the message is refused: {0}")]
    Pickle(#[from] PickleError),
    /// It is no message of a client.
    #[error("the message is refused: it is not a message that a rank's client sends to its monitor")]
    Unknown,
}

impl Message {
    /// Parses a message.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn read(bytes: &[u8]) -> Result<Self, MessageError> {
        let pickle = Pickle::read(bytes)?;
        let root = pickle.root();
        let Node::Object { class, number: None, .. } = root else { return Err(MessageError::Unknown) };
        match class {
            Class::AuthkeyMsg => Ok(Self::Authkey),
            Class::HeartbeatMsg => Ok(Self::Heartbeat),
            Class::UpdateConfigMsg => Ok(Self::UpdateConfig),
            Class::InitMsg => {
                let info = pickle.attribute(root, "rank_info");
                let pid = info.and_then(|info| number(pickle.attribute(info, "pid")));
                let waits = pickle.attribute(root, "iteration").is_none();
                Ok(Self::Init { pid: pid.and_then(|pid| u32::try_from(pid).ok()), waits })
            }
            Class::SectionMsg => {
                let change = change(&pickle, root).ok_or(MessageError::Unknown)?;
                Ok(Self::Section { change, iteration: number(pickle.attribute(root, "iteration")) })
            }
            _ => Err(MessageError::Unknown),
        }
    }
}

fn change(pickle: &Pickle, message: &Node) -> Option<Change> {
    let name = match pickle.attribute(message, "section") {
        Some(Node::Text(name)) => Some(name[..name.floor_char_boundary(NAME_BYTES)].to_owned()),
        _ => None,
    };
    let Some(Node::Object { class: Class::SectionAction, number: Some(action), .. }) =
        pickle.attribute(message, "action")
    else {
        return None;
    };
    match action {
        1 => name.map(Change::Open),
        2 => name.map(Change::Close),
        3 => Some(Change::CloseAll),
        _ => None,
    }
}

fn number(node: Option<&Node>) -> Option<u64> {
    match node? {
        Node::Int(value) => u64::try_from(*value).ok(),
        _ => None,
    }
}

/// The frame that reports success.
#[must_use]
pub fn ok() -> Vec<u8> {
    let mut pickle = begin("OkMsg");
    pickle.push(b'.');
    frame(&pickle)
}

/// The frame that reports an error.
#[must_use]
pub fn error(cause: &str) -> Vec<u8> {
    let mut pickle = begin("ErrorMsg");
    pickle.push(b'}');
    text(&mut pickle, "cause");
    text(&mut pickle, cause);
    pickle.extend(b"sb.");
    frame(&pickle)
}

/// The reply to [`Message::Init`] as a frame: the configuration, with the sections whose changes the client must report.
///
/// The client reads seven attributes of `cfg` and not its class, so the reply works for every version.
#[must_use]
pub fn configuration(sections: &[&str]) -> Vec<u8> {
    let mut pickle = begin("OkMsg");
    pickle.push(b'}');
    text(&mut pickle, "cfg");
    text(&mut pickle, "types");
    text(&mut pickle, "SimpleNamespace");
    pickle.extend(b"\x93)R}(");
    text(&mut pickle, "rank_section_timeouts");
    pickle.extend(b"}(");
    for section in sections {
        text(&mut pickle, section);
        pickle.push(b'N');
    }
    pickle.push(b'u');
    text(&mut pickle, "safety_factor");
    pickle.push(b'G');
    pickle.extend(5.0_f64.to_bits().to_be_bytes());
    text(&mut pickle, "skip_section_response");
    pickle.push(0x88);
    text(&mut pickle, "install_exception_hook");
    pickle.push(0x89);
    for timeout in ["initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout"]
    {
        text(&mut pickle, timeout);
        pickle.push(b'N');
    }
    pickle.extend(b"ubsb.");
    frame(&pickle)
}

/// PROTO 4 and a new instance of a class.
fn begin(class: &str) -> Vec<u8> {
    let mut pickle = vec![0x80, 4];
    text(&mut pickle, MODULE);
    text(&mut pickle, class);
    pickle.extend(b"\x93)\x81");
    pickle
}

/// BINUNICODE.
fn text(pickle: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(1 << 12)];
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.as_bytes());
}

fn frame(pickle: &[u8]) -> Vec<u8> {
    let mut frame = (pickle.len() as u32).to_be_bytes().to_vec();
    frame.extend(pickle);
    frame
}
