//! The container of a shard: a safetensors file. Eight bytes of header length, a header in JSON, then the tensors'
//! bytes in sequence. The header is padded with spaces so that the data starts on a page of memory.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::json::text;

/// The tensor that holds the small Python state next to the others.
pub const STATE_TENSOR: &str = "__mainstay_state__";

/// Data starts at a multiple of this.
pub const ALIGNMENT: u64 = 4096;

/// A longer header is refused, as safetensors itself refuses it.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// More dimensions than any framework has.
const MAX_DIMENSIONS: usize = 64;

const METADATA: &str = "__metadata__";

/// The types of elements that safetensors knows, with their bits.
const DTYPES: &[(&str, u64)] = &[
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its path in the state, such as `model.layer1.weight`.
    pub name: String,
    /// The type of its elements, in safetensors' words: `F32`, `BF16`, `U8`, …
    pub dtype: String,
    /// Its shape; empty for a scalar.
    pub shape: Vec<u64>,
}

/// A tensor and the position of its bytes, from the start of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTensor {
    /// The tensor.
    pub tensor: Tensor,
    /// The offset of its first byte.
    pub at: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The content of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// The tensors in the order of their bytes.
    pub tensors: Vec<PlacedTensor>,
    /// The size of the whole file in bytes.
    pub file_bytes: u64,
}

/// Why bytes are not a header, or a table cannot be one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// There are fewer bytes than the header claims.
    #[error("the file ends within its header")]
    Short,
    /// The header claims to be longer than the limit.
    #[error("the header says that it has {0} bytes, which is more than {MAX_HEADER_BYTES}")]
    Long(u64),
    /// It is not a JSON object of the right form.
    #[error("the header is not one of safetensors: {0}")]
    Form(&'static str),
    /// A tensor has an impossible type, shape or place.
    #[error("tensor {name:?}: {why}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Tensors overlap, leave holes, or do not fill the file.
    #[error("the tensors do not lie one behind the other to the file's end")]
    Holes,
}

/// The number of bytes of a tensor of that type and shape.
///
/// # Errors
/// The type is unknown, or the number of bytes overflows.
pub fn tensor_bytes(dtype: &str, shape: &[u64]) -> Result<u64, &'static str> {
    let bits = DTYPES.iter().find(|(name, _)| *name == dtype).map(|(_, bits)| *bits);
    let bits = bits.ok_or("safetensors has no such type")?;
    if shape.len() > MAX_DIMENSIONS {
        return Err("it has more dimensions than there are");
    }
    let elements = shape.iter().try_fold(1_u64, |product, length| product.checked_mul(*length));
    elements.and_then(|elements| elements.checked_mul(bits / 8)).ok_or("it is larger than can be counted")
}

/// The header for these tensors in this order, and the offset of each.
///
/// # Errors
/// A tensor has a name that safetensors does not allow, two tensors have one name, or the header exceeds its limit.
pub fn encode(
    metadata: &BTreeMap<String, String>,
    tensors: Vec<Tensor>,
) -> Result<(Vec<u8>, Header), ContainerError> {
    let mut placed = Vec::with_capacity(tensors.len());
    let mut names = std::collections::BTreeSet::new();
    let mut end = 0_u64;
    for tensor in tensors {
        let wrong = |why| ContainerError::Tensor { name: tensor.name.clone(), why };
        let bytes = tensor_bytes(&tensor.dtype, &tensor.shape).map_err(wrong)?;
        if tensor.name == METADATA || !names.insert(tensor.name.clone()) {
            return Err(wrong("its name is taken"));
        }
        let at = end;
        end = end.checked_add(bytes).ok_or_else(|| wrong("it is larger than can be counted"))?;
        placed.push(PlacedTensor { tensor, at, bytes });
    }
    let mut header = json_of(metadata, &placed).into_bytes();
    let data_at = (8 + header.len() as u64).next_multiple_of(ALIGNMENT);
    header.resize(usize::try_from(data_at - 8).map_err(|_| ContainerError::Short)?, b' ');
    if header.len() as u64 > MAX_HEADER_BYTES {
        return Err(ContainerError::Long(header.len() as u64));
    }
    for tensor in &mut placed {
        tensor.at += data_at;
    }
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    Ok((bytes, Header { metadata: metadata.clone(), tensors: placed, file_bytes: data_at + end }))
}

fn json_of(metadata: &BTreeMap<String, String>, tensors: &[PlacedTensor]) -> String {
    let mut out = String::from("{");
    text(METADATA, &mut out);
    out.push_str(":{");
    for (index, (name, value)) in metadata.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        text(name, &mut out);
        out.push(':');
        text(value, &mut out);
    }
    out.push('}');
    for PlacedTensor { tensor, at, bytes } in tensors {
        out.push(',');
        text(&tensor.name, &mut out);
        out.push_str(":{\"dtype\":");
        text(&tensor.dtype, &mut out);
        let shape: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
        out.push_str(&format!(",\"shape\":[{}],\"data_offsets\":[{at},{}]}}", shape.join(","), at + bytes));
    }
    out.push('}');
    out
}

/// How many bytes from the start of the file [`decode`] needs, computed from its first eight.
///
/// # Errors
/// The header claims more than [`MAX_HEADER_BYTES`].
pub fn header_bytes(first: [u8; 8]) -> Result<u64, ContainerError> {
    let length = u64::from_le_bytes(first);
    if length > MAX_HEADER_BYTES { Err(ContainerError::Long(length)) } else { Ok(8 + length) }
}

/// Reads the header at the start of a file of `file_bytes` bytes; bytes after it in `start` are ignored.
///
/// # Errors
/// It is not a header, or its tensors do not match the data after it exactly.
pub fn decode(start: &[u8], file_bytes: u64) -> Result<Header, ContainerError> {
    let first = start.first_chunk::<8>().ok_or(ContainerError::Short)?;
    let data_at = header_bytes(*first)?;
    let end = usize::try_from(data_at).map_err(|_| ContainerError::Short)?;
    let header = start.get(8..end).ok_or(ContainerError::Short)?;
    if header.first() != Some(&b'{') {
        return Err(ContainerError::Form("it does not begin with a brace"));
    }
    let document: Value =
        serde_json::from_slice(header).map_err(|_| ContainerError::Form("it is not JSON"))?;
    let Value::Object(mut fields) = document else { return Err(ContainerError::Form("it is not an object")) };
    let metadata = metadata_of(fields.remove(METADATA))?;
    let mut tensors = fields
        .into_iter()
        .map(|(name, value)| placed(name, &value, data_at))
        .collect::<Result<Vec<_>, _>>()?;
    // An empty tensor sorts before the one that starts at the same byte.
    tensors.sort_by_key(|tensor| (tensor.at, tensor.bytes));
    let mut next = data_at;
    for tensor in &tensors {
        if tensor.at != next {
            return Err(ContainerError::Holes);
        }
        next = next.checked_add(tensor.bytes).ok_or(ContainerError::Holes)?;
    }
    if next != file_bytes { Err(ContainerError::Holes) } else { Ok(Header { metadata, tensors, file_bytes }) }
}

fn metadata_of(fields: Option<Value>) -> Result<BTreeMap<String, String>, ContainerError> {
    let wrong = ContainerError::Form("its __metadata__ is not of words");
    match fields {
        None => Ok(BTreeMap::new()),
        Some(Value::Object(words)) => words
            .into_iter()
            .map(|(name, value)| match value {
                Value::String(value) => Ok((name, value)),
                _ => Err(wrong.clone()),
            })
            .collect(),
        Some(_) => Err(wrong),
    }
}

fn placed(name: String, value: &Value, data_at: u64) -> Result<PlacedTensor, ContainerError> {
    let wrong = |why| ContainerError::Tensor { name: name.clone(), why };
    let value: &Map<String, Value> = value.as_object().ok_or_else(|| wrong("it is not an object"))?;
    let numbers =
        |field| -> Option<Vec<u64>> { value.get(field)?.as_array()?.iter().map(Value::as_u64).collect() };
    let dtype = value.get("dtype").and_then(Value::as_str).ok_or_else(|| wrong("it has no type"))?.to_owned();
    let shape = numbers("shape").ok_or_else(|| wrong("it has no shape"))?;
    let offsets = numbers("data_offsets").ok_or_else(|| wrong("it has no place"))?;
    let bytes = tensor_bytes(&dtype, &shape).map_err(wrong)?;
    let &[begin, end] = offsets.as_slice() else { return Err(wrong("its place has no begin and end")) };
    if begin.checked_add(bytes) != Some(end) {
        return Err(wrong("its place is not as large as its shape"));
    }
    let at = data_at.checked_add(begin).ok_or_else(|| wrong("it lies beyond the file"))?;
    Ok(PlacedTensor { tensor: Tensor { name, dtype, shape }, at, bytes })
}
