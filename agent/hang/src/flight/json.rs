//! The JSON form of a flight record, as `_dump_fr_trace_json` and PyTorch's worker server write it. It is read into
//! the same tree as a pickle, so that one reader handles both.

use std::fmt;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use mainstay_wire::pickle::{Id, MOST_NODES, Node, Pickle};

/// The stacks of operations. They make up most of a dump and are not used.
const FRAMES: &str = "frames";

/// Reads a document.
///
/// # Errors
/// It is not JSON, is nested too deeply (128 levels), or holds more than [`MOST_NODES`] values.
pub(super) fn read(bytes: &[u8]) -> Result<Pickle, serde_json::Error> {
    let mut nodes = Vec::new();
    let mut document = serde_json::Deserializer::from_slice(bytes);
    let root = Value { nodes: &mut nodes }.deserialize(&mut document)?;
    document.end()?;
    Ok(Pickle::from_nodes(nodes, root))
}

/// Reads one value into the tree.
struct Value<'n> {
    nodes: &'n mut Vec<Node>,
}

impl Value<'_> {
    fn push<E: Error>(self, node: Node) -> Result<Id, E> {
        if self.nodes.len() >= MOST_NODES {
            return Err(E::custom(format_args!("it holds more than {MOST_NODES} values")));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = Id;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Id, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = Id;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Id, E> {
        self.push(Node::None)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Id, E> {
        self.push(Node::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Id, E> {
        self.push(Node::Int(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Id, E> {
        self.push(Node::Int(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Id, E> {
        self.push(Node::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Id, E> {
        self.push(Node::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Id, A::Error> {
        let mut read = Vec::new();
        while let Some(item) = items.next_element_seed(Value { nodes: &mut *self.nodes })? {
            read.push(item);
        }
        self.push(Node::Sequence(read))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Id, A::Error> {
        let mut read = Vec::new();
        while let Some(key) = items.next_key::<String>()? {
            if key == FRAMES {
                items.next_value::<IgnoredAny>()?;
                continue;
            }
            let key = Value { nodes: &mut *self.nodes }.push(Node::Text(key))?;
            read.push((key, items.next_value_seed(Value { nodes: &mut *self.nodes })?));
        }
        self.push(Node::Dict(read))
    }
}
