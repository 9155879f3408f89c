//! A reader for the few pickles that others send: from NVRx's rank-monitor client and PyTorch's flight recorder. It accepts an
//! allow-list of opcodes and classes.
//!
//! Python's unpickling runs any code that the sender chooses. This reader runs nothing: a class is one of an enumeration, an object is
//! a class and its dict, and everything else is refused. Nodes are in one flat list and refer to each other by index. So a value used
//! many times is not copied, cycles do no harm, and memory is bounded by the message's length: each opcode creates at most one node.

use std::collections::BTreeMap;

/// The module of all allowed classes.
pub const MODULE: &str = "nvidia_resiliency_ext.fault_tolerance.data";

macro_rules! classes {
    ($($name:ident,)*) => {
        /// The allowed classes of a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "named as the classes of NVRx are")]
        pub enum Class { $($name,)* }

        impl Class {
            fn named(name: &str) -> Option<Self> {
                match name { $(stringify!($name) => Some(Self::$name),)* _ => None }
            }
        }
    };
}

classes! {
    AuthkeyMsg, InitMsg, RankInfo, HeartbeatMsg, SectionMsg, SectionAction, UpdateConfigMsg, HeartbeatTimeouts,
    SectionTimeouts, OkMsg, ErrorMsg, WorkloadControlRequest, WorkloadAction,
}

impl Class {
    /// Whether it is an enumeration, created by calling the class with a number.
    fn is_enumeration(self) -> bool {
        matches!(self, Self::SectionAction | Self::WorkloadAction)
    }
}

/// Why a pickle is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// It is truncated.
    #[error("it ends in the middle of an instruction")]
    Truncated,
    /// The instruction is not allowed.
    #[error("instruction 0x{opcode:02x} at byte {at} is not allowed")]
    Opcode {
        /// The instruction.
        opcode: u8,
        /// Its offset.
        at: usize,
    },
    /// The class is not allowed.
    #[error("the class {name} is not allowed")]
    Class {
        /// Its module and name.
        name: String,
    },
    /// The instruction does not match the stack.
    #[error("instruction 0x{opcode:02x} at byte {at} does not fit what comes before it")]
    Stack {
        /// The instruction.
        opcode: u8,
        /// Its offset.
        at: usize,
    },
    /// The protocol version is not supported.
    #[error("pickle protocol {0} is unknown")]
    Protocol(u8),
    /// It has too many values.
    #[error("it holds more than {MOST_NODES} values")]
    TooMany,
}

/// Maximum number of values. The flight record of 20,000 operations with their stacks has some four million.
pub const MOST_NODES: usize = 8 << 20;

/// The index of a value in a [`Pickle`].
pub type Id = usize;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer. Values beyond 64 bits are clamped.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes. The content is dropped (a client's key protects nothing).
    Bytes,
    /// A tuple, list or set.
    Sequence(Vec<Id>),
    /// A dict.
    Dict(Vec<(Id, Id)>),
    /// A class itself.
    Class(Class),
    /// An instance: its class, its dict once it is built, and the number of an enumeration.
    Object {
        /// Its class.
        class: Class,
        /// Its `__dict__`.
        state: Option<Id>,
        /// The number it was created from.
        number: Option<i64>,
    },
}

/// A parsed pickle.
#[derive(Clone, Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
}

impl Pickle {
    /// Parses a complete pickle.
    ///
    /// # Errors
    /// [`PickleError`]: it is malformed or contains something that is not allowed.
    pub fn read(bytes: &[u8]) -> Result<Self, PickleError> {
        let mut machine = Machine { bytes, ..Machine::default() };
        let root = machine.run()?;
        Ok(Self { nodes: machine.nodes, root })
    }

    /// Wraps the same tree, parsed from another format.
    pub fn from_nodes(nodes: Vec<Node>, root: Id) -> Self {
        Self { nodes, root }
    }

    /// The outermost value.
    #[must_use]
    pub fn root(&self) -> &Node {
        self.node(self.root)
    }

    /// The value at an index.
    #[must_use]
    pub fn node(&self, id: Id) -> &Node {
        self.nodes.get(id).unwrap_or(&Node::None)
    }

    /// The value for a text key of a dict. `None` if there is none, or if it is no dict.
    #[must_use]
    pub fn item(&self, object: &Node, name: &str) -> Option<&Node> {
        let Node::Dict(items) = object else { return None };
        let named = |key: Id| matches!(self.node(key), Node::Text(text) if text == name);
        // The last value set for a key counts, as in a dict.
        items.iter().rev().find(|(key, _)| named(*key)).map(|(_, value)| self.node(*value))
    }

    /// An attribute of an instance. `None` if it has no such attribute.
    #[must_use]
    pub fn attribute(&self, object: &Node, name: &str) -> Option<&Node> {
        let Node::Object { state: Some(state), .. } = object else { return None };
        self.item(self.node(*state), name)
    }
}

/// The pickle machine.
#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: BTreeMap<u32, Id>,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Id, PickleError> {
        loop {
            let at = self.at;
            let opcode = self.byte()?;
            if self.nodes.len() > MOST_NODES {
                return Err(PickleError::TooMany);
            }
            let misfit = PickleError::Stack { opcode, at };
            match opcode {
                b'.' => return self.pop().ok_or(misfit),
                0x80 => match self.byte()? {
                    2..=5 => {}
                    protocol => return Err(PickleError::Protocol(protocol)),
                },
                // FRAME: the length is ignored.
                0x95 => self.take(8).map(drop)?,
                b'N' => self.push(Node::None),
                0x88 => self.push(Node::Bool(true)),
                0x89 => self.push(Node::Bool(false)),
                b'K' => {
                    let value = self.byte()?;
                    self.push(Node::Int(value.into()));
                }
                b'M' => {
                    let value = self.number(2)?;
                    self.push(Node::Int(value as i64));
                }
                b'J' => {
                    let value = self.number(4)?;
                    self.push(Node::Int((value as u32).cast_signed().into()));
                }
                0x8a => {
                    let length = self.byte()?.into();
                    let value = signed(self.take(length)?);
                    self.push(Node::Int(value));
                }
                b'G' => {
                    let bits = self.take(8)?.iter().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
                    self.push(Node::Float(f64::from_bits(bits)));
                }
                0x8c => {
                    let length = self.byte()?.into();
                    self.text(length)?;
                }
                b'X' => {
                    let length = self.number(4)? as usize;
                    self.text(length)?;
                }
                b'C' => {
                    let length = self.byte()?.into();
                    self.take(length)?;
                    self.push(Node::Bytes);
                }
                b'}' => self.push(Node::Dict(Vec::new())),
                b')' | b']' | 0x8f => self.push(Node::Sequence(Vec::new())),
                b'(' => self.marks.push(self.stack.len()),
                0x85..=0x87 => {
                    let length = usize::from(opcode - 0x84);
                    let start = self.stack.len().checked_sub(length).filter(|&start| start >= self.floor());
                    let items = self.stack.split_off(start.ok_or(misfit)?);
                    self.push(Node::Sequence(items));
                }
                b't' => {
                    let items = self.above_mark().ok_or(misfit)?;
                    self.push(Node::Sequence(items));
                }
                b'a' => {
                    let item = self.pop().ok_or(misfit.clone())?;
                    self.extend(vec![item]).ok_or(misfit)?;
                }
                // APPENDS, ADDITEMS
                b'e' | 0x90 => {
                    let items = self.above_mark().ok_or(misfit.clone())?;
                    self.extend(items).ok_or(misfit)?;
                }
                b's' => {
                    let value = self.pop().ok_or(misfit.clone())?;
                    let key = self.pop().ok_or(misfit.clone())?;
                    self.set(&[key, value]).ok_or(misfit)?;
                }
                b'u' => {
                    let items = self.above_mark().ok_or(misfit.clone())?;
                    self.set(&items).ok_or(misfit)?;
                }
                0x93 => self.class(misfit)?,
                0x81 => self.construct(misfit)?,
                b'R' => self.call(misfit)?,
                b'b' => self.build(misfit)?,
                0x94 => {
                    let next = u32::try_from(self.memo.len()).map_err(|_| misfit.clone())?;
                    self.remember(next, misfit)?;
                }
                b'q' => {
                    let key = self.byte()?.into();
                    self.remember(key, misfit)?;
                }
                b'r' => {
                    let key = self.number(4)? as u32;
                    self.remember(key, misfit)?;
                }
                b'h' => {
                    let key = self.byte()?.into();
                    self.recall(key, misfit)?;
                }
                b'j' => {
                    let key = self.number(4)? as u32;
                    self.recall(key, misfit)?;
                }
                opcode => return Err(PickleError::Opcode { opcode, at }),
            }
        }
    }

    fn class(&mut self, misfit: PickleError) -> Result<(), PickleError> {
        let (name, module) = (self.pop(), self.pop());
        let text = |id: Option<Id>| match id.map(|id| &self.nodes[id]) {
            Some(Node::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        let (Some(module), Some(name)) = (text(module), text(name)) else { return Err(misfit) };
        let class = if module == MODULE { Class::named(name) } else { None };
        let class = class.ok_or_else(|| {
            // Truncate names from an untrusted sender.
            let shown: String = format!("{module}.{name}").chars().take(120).collect();
            PickleError::Class { name: shown }
        })?;
        self.push(Node::Class(class));
        Ok(())
    }

    /// NEWOBJ: an instance without arguments.
    fn construct(&mut self, misfit: PickleError) -> Result<(), PickleError> {
        let (arguments, class) = (self.pop(), self.pop());
        match (arguments.map(|id| &self.nodes[id]), class.map(|id| &self.nodes[id])) {
            (Some(Node::Sequence(arguments)), Some(&Node::Class(class)))
                if arguments.is_empty() && !class.is_enumeration() =>
            {
                self.push(Node::Object { class, state: None, number: None });
                Ok(())
            }
            _ => Err(misfit),
        }
    }

    /// REDUCE: creates a member of an enumeration from its number.
    fn call(&mut self, misfit: PickleError) -> Result<(), PickleError> {
        let (arguments, class) = (self.pop(), self.pop());
        let (Some(Node::Sequence(arguments)), Some(&Node::Class(class))) =
            (arguments.map(|id| &self.nodes[id]), class.map(|id| &self.nodes[id]))
        else {
            return Err(misfit);
        };
        match arguments.as_slice() {
            [only] if class.is_enumeration() => match self.nodes[*only] {
                Node::Int(number) => {
                    self.push(Node::Object { class, state: None, number: Some(number) });
                    Ok(())
                }
                _ => Err(misfit),
            },
            _ => Err(misfit),
        }
    }

    /// BUILD: sets an instance's dict.
    fn build(&mut self, misfit: PickleError) -> Result<(), PickleError> {
        let (given, object) = (self.pop(), self.stack.last().copied());
        let (Some(given), Some(object)) = (given, object) else { return Err(misfit) };
        let is_dict = matches!(self.nodes[given], Node::Dict(_));
        match &mut self.nodes[object] {
            Node::Object { state, .. } if is_dict => *state = Some(given),
            _ => return Err(misfit),
        }
        Ok(())
    }

    fn extend(&mut self, items: Vec<Id>) -> Option<()> {
        match self.stack.last().map(|&id| &mut self.nodes[id])? {
            Node::Sequence(known) => known.extend(items),
            _ => return None,
        }
        Some(())
    }

    fn set(&mut self, items: &[Id]) -> Option<()> {
        let (pairs, []) = items.as_chunks::<2>() else { return None };
        match self.stack.last().map(|&id| &mut self.nodes[id])? {
            Node::Dict(known) => known.extend(pairs.iter().map(|&[key, value]| (key, value))),
            _ => return None,
        }
        Some(())
    }

    fn remember(&mut self, key: u32, misfit: PickleError) -> Result<(), PickleError> {
        let top = *self.stack.last().ok_or(misfit)?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u32, misfit: PickleError) -> Result<(), PickleError> {
        let known = *self.memo.get(&key).ok_or(misfit)?;
        self.stack.push(known);
        Ok(())
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    /// The stack below the newest mark must not be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Option<Id> {
        if self.stack.len() > self.floor() { self.stack.pop() } else { None }
    }

    fn above_mark(&mut self) -> Option<Vec<Id>> {
        let mark = self.marks.pop()?;
        Some(self.stack.split_off(mark))
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        Ok(self.take(1)?[0])
    }

    /// Reads a little-endian number of this many bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, PickleError> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn text(&mut self, length: usize) -> Result<(), PickleError> {
        let text = String::from_utf8_lossy(self.take(length)?).into_owned();
        self.push(Node::Text(text));
        Ok(())
    }

    fn take(&mut self, length: usize) -> Result<&[u8], PickleError> {
        let end = self.at.checked_add(length).ok_or(PickleError::Truncated)?;
        let taken = self.bytes.get(self.at..end).ok_or(PickleError::Truncated)?;
        self.at = end;
        Ok(taken)
    }
}

/// A little-endian number in two's complement, Python's form for large ones; clamped to 64 bits.
fn signed(bytes: &[u8]) -> i64 {
    let negative = bytes.last().is_some_and(|&byte| byte & 0x80 != 0);
    let filler = if negative { 0xff } else { 0 };
    if bytes.iter().skip(8).any(|&byte| byte != filler) {
        return if negative { i64::MIN } else { i64::MAX };
    }
    let mut padded = [filler; 8];
    for (to, &from) in padded.iter_mut().zip(bytes) {
        *to = from;
    }
    i64::from_le_bytes(padded)
}
