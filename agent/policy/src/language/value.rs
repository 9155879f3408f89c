//! Values of a running policy, and their heap: a list of objects that is dropped as a whole, so that cycles and depth
//! do not matter.

use std::cmp::Ordering;
use std::sync::Arc;

use super::tree::{Function, Name};

/// Values that are nested more deeply than this cannot be compared or written as text.
const DEEPEST: u32 = 24;

/// A place on the heap.
pub(crate) type Id = usize;

/// A value.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    List(Id),
    Tuple(Id),
    Dict(Id),
    Struct(Id),
    /// Start, end, step.
    Range(i64, i64, i64),
    Function(Arc<Function>),
    Builtin(&'static str),
}

/// An object with other values.
#[derive(Debug)]
pub(crate) enum Object {
    /// A list or a tuple.
    Items(Vec<Value>),
    /// In insertion order.
    Pairs(Vec<(Value, Value)>),
    /// Its fields, in order.
    Fields(Vec<(Name, Value)>),
}

/// The objects, and the remaining steps and bytes.
pub(crate) struct Heap<'a> {
    pub(super) objects: Vec<Object>,
    /// Objects below this index are frozen.
    pub(super) frozen: usize,
    pub(crate) steps_left: u64,
    pub(crate) bytes_left: u64,
    pub(super) out_of_time: &'a dyn Fn() -> bool,
}

/// A value, or the error as text without a place.
pub(crate) type Made<T> = Result<T, String>;

impl Heap<'_> {
    /// Uses this number of steps.
    pub(crate) fn work(&mut self, steps: u64) -> Made<()> {
        let before = self.steps_left;
        self.steps_left = before.checked_sub(steps).ok_or("it takes too many steps")?;
        if before / 512 != self.steps_left / 512 && (self.out_of_time)() {
            return Err("it takes too long".to_owned());
        }
        Ok(())
    }

    /// Uses this amount of memory, in bytes, and the steps to fill it.
    pub(crate) fn room(&mut self, bytes: usize) -> Made<()> {
        self.bytes_left = self.bytes_left.checked_sub(bytes as u64).ok_or("it takes too much memory")?;
        self.work(bytes as u64 / 64)
    }

    fn put(&mut self, object: Object) -> Made<Id> {
        let count = match &object {
            Object::Items(items) => items.len(),
            Object::Pairs(pairs) => pairs.len() * 2,
            Object::Fields(fields) => fields.len() * 2,
        };
        self.room(64 + 32 * count)?;
        self.objects.push(object);
        Ok(self.objects.len() - 1)
    }

    pub(crate) fn list(&mut self, items: Vec<Value>) -> Made<Value> {
        self.put(Object::Items(items)).map(Value::List)
    }

    pub(crate) fn tuple(&mut self, items: Vec<Value>) -> Made<Value> {
        self.put(Object::Items(items)).map(Value::Tuple)
    }

    pub(crate) fn dict(&mut self, pairs: Vec<(Value, Value)>) -> Made<Value> {
        self.put(Object::Pairs(pairs)).map(Value::Dict)
    }

    pub(crate) fn fields(&mut self, fields: Vec<(Name, Value)>) -> Made<Value> {
        self.put(Object::Fields(fields)).map(Value::Struct)
    }

    pub(crate) fn text(&mut self, text: &str) -> Made<Value> {
        self.room(text.len() + 32)?;
        Ok(Value::Text(text.into()))
    }

    pub(crate) fn items_of(&self, id: Id) -> &[Value] {
        match self.objects.get(id) {
            Some(Object::Items(items)) => items,
            _ => &[],
        }
    }

    pub(crate) fn pairs_of(&self, id: Id) -> &[(Value, Value)] {
        match self.objects.get(id) {
            Some(Object::Pairs(pairs)) => pairs,
            _ => &[],
        }
    }

    pub(crate) fn fields_of(&self, id: Id) -> &[(Name, Value)] {
        match self.objects.get(id) {
            Some(Object::Fields(fields)) => fields,
            _ => &[],
        }
    }

    /// An object that may be modified.
    pub(super) fn changing(&mut self, id: Id) -> Made<&mut Object> {
        if id < self.frozen {
            return Err("this cannot be changed: it was made outside of the functions; make a copy with list(…) or dict(…)"
                .to_owned());
        }
        self.objects.get_mut(id).ok_or_else(|| "there is no such value".to_owned())
    }

    /// The items of a value, in order, for iteration.
    pub(crate) fn iterate(&mut self, value: &Value) -> Made<Vec<Value>> {
        let length = self.length(value).ok_or_else(|| format!("{} is not iterable", value.kind()))?;
        self.room(length.saturating_mul(32))?;
        Ok(match value {
            Value::List(id) | Value::Tuple(id) => self.items_of(*id).to_vec(),
            Value::Dict(id) => self.pairs_of(*id).iter().map(|(key, _)| key.clone()).collect(),
            Value::Range(from, _, by) => (0..length as i64)
                .map(|index| Value::Int(from.wrapping_add(index.wrapping_mul(*by))))
                .collect(),
            _ => return Err(format!("{} is not iterable", value.kind())),
        })
    }

    /// The number of items of a value.
    pub(crate) fn length(&self, value: &Value) -> Option<usize> {
        Some(match value {
            Value::Text(text) => text.chars().count(),
            Value::List(id) | Value::Tuple(id) => self.items_of(*id).len(),
            Value::Dict(id) => self.pairs_of(*id).len(),
            Value::Range(from, to, by) => {
                let span = i128::from(*to) - i128::from(*from);
                let by = i128::from(*by);
                let count = if by > 0 { (span + by - 1) / by } else { (span + by + 1) / by };
                usize::try_from(count.max(0)).unwrap_or(usize::MAX)
            }
            _ => return None,
        })
    }

    pub(crate) fn is_true(&self, value: &Value) -> bool {
        match value {
            Value::None => false,
            Value::Bool(yes) => *yes,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Text(text) => !text.is_empty(),
            other => self.length(other) != Some(0),
        }
    }

    pub(crate) fn equal(&mut self, left: &Value, right: &Value) -> Made<bool> {
        self.equal_within(left, right, DEEPEST)
    }

    fn equal_within(&mut self, left: &Value, right: &Value, depth: u32) -> Made<bool> {
        let depth = depth.checked_sub(1).ok_or("these values are nested too deeply to be compared")?;
        self.work(1)?;
        Ok(match (left, right) {
            (Value::None, Value::None) => true,
            (Value::Bool(left), Value::Bool(right)) => left == right,
            (Value::Text(left), Value::Text(right)) => {
                self.work(left.len().min(right.len()) as u64 / 64)?;
                left == right
            }
            (Value::Int(left), Value::Int(right)) => left == right,
            (Value::Int(_) | Value::Float(_), Value::Int(_) | Value::Float(_)) => {
                left.number() == right.number()
            }
            (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
                let (left, right) = (*left, *right);
                self.items_of(left).len() == self.items_of(right).len() && {
                    for index in 0..self.items_of(left).len() {
                        let (a, b) =
                            (self.items_of(left)[index].clone(), self.items_of(right)[index].clone());
                        if !self.equal_within(&a, &b, depth)? {
                            return Ok(false);
                        }
                    }
                    true
                }
            }
            (Value::Struct(left), Value::Struct(right)) => {
                let (left, right) = (*left, *right);
                self.fields_of(left).len() == self.fields_of(right).len() && {
                    for index in 0..self.fields_of(left).len() {
                        let (name, a) = self.fields_of(left)[index].clone();
                        let (other, b) = self.fields_of(right)[index].clone();
                        if name != other || !self.equal_within(&a, &b, depth)? {
                            return Ok(false);
                        }
                    }
                    true
                }
            }
            (Value::Dict(left), Value::Dict(right)) => {
                let (left, right) = (*left, *right);
                self.pairs_of(left).len() == self.pairs_of(right).len() && {
                    for index in 0..self.pairs_of(left).len() {
                        let (key, a) = self.pairs_of(left)[index].clone();
                        let Some(b) = self.get(right, &key)? else { return Ok(false) };
                        if !self.equal_within(&a, &b, depth)? {
                            return Ok(false);
                        }
                    }
                    true
                }
            }
            (Value::Range(..), Value::Range(..)) => {
                let (left, right) = (self.iterate(left)?, self.iterate(right)?);
                left.iter().map(Value::number).eq(right.iter().map(Value::number))
            }
            (Value::Function(left), Value::Function(right)) => Arc::ptr_eq(left, right),
            (Value::Builtin(left), Value::Builtin(right)) => left == right,
            _ => false,
        })
    }

    /// The value of a key in a dict.
    pub(crate) fn get(&mut self, dict: Id, key: &Value) -> Made<Option<Value>> {
        self.can_be_a_key(key)?;
        for index in 0..self.pairs_of(dict).len() {
            let (known, value) = self.pairs_of(dict)[index].clone();
            if self.equal(&known, key)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    pub(super) fn set(&mut self, dict: Id, key: Value, value: Value) -> Made<()> {
        self.can_be_a_key(&key)?;
        let mut at = None;
        for index in 0..self.pairs_of(dict).len() {
            let known = self.pairs_of(dict)[index].0.clone();
            if self.equal(&known, &key)? {
                at = Some(index);
                break;
            }
        }
        self.room(64)?;
        if let Object::Pairs(pairs) = self.changing(dict)? {
            match at {
                Some(index) => pairs[index].1 = value,
                None => pairs.push((key, value)),
            }
        }
        Ok(())
    }

    fn can_be_a_key(&self, key: &Value) -> Made<()> {
        match key {
            Value::List(_) | Value::Dict(_) => {
                Err(format!("{} cannot be a key; use a string or a number", key.kind()))
            }
            _ => Ok(()),
        }
    }

    /// The order of two values: numbers with numbers, strings with strings, lists and tuples item by item.
    pub(crate) fn order(&mut self, left: &Value, right: &Value) -> Made<Ordering> {
        self.order_within(left, right, DEEPEST)
    }

    fn order_within(&mut self, left: &Value, right: &Value, depth: u32) -> Made<Ordering> {
        let depth = depth.checked_sub(1).ok_or("these values are nested too deeply to be compared")?;
        self.work(1)?;
        match (left, right) {
            (Value::Int(left), Value::Int(right)) => Ok(left.cmp(right)),
            (Value::Int(_) | Value::Float(_), Value::Int(_) | Value::Float(_)) => {
                Ok(left.number().partial_cmp(&right.number()).unwrap_or(Ordering::Equal))
            }
            (Value::Text(left), Value::Text(right)) => {
                self.work(left.len().min(right.len()) as u64 / 64)?;
                Ok(left.cmp(right))
            }
            (Value::Bool(left), Value::Bool(right)) => Ok(left.cmp(right)),
            (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
                let (left, right) = (*left, *right);
                for index in 0..self.items_of(left).len().min(self.items_of(right).len()) {
                    let (a, b) = (self.items_of(left)[index].clone(), self.items_of(right)[index].clone());
                    let order = self.order_within(&a, &b, depth)?;
                    if order != Ordering::Equal {
                        return Ok(order);
                    }
                }
                Ok(self.items_of(left).len().cmp(&self.items_of(right).len()))
            }
            _ => Err(format!("{} and {} cannot be put in order", left.kind(), right.kind())),
        }
    }

    /// A value as text; nested strings have quotes.
    pub(crate) fn write(&mut self, value: &Value) -> Made<String> {
        let mut text = String::new();
        match value {
            Value::Text(plain) => {
                self.room(plain.len())?;
                text.push_str(plain);
            }
            other => self.write_into(other, &mut text, DEEPEST)?,
        }
        Ok(text)
    }

    fn write_into(&mut self, value: &Value, text: &mut String, depth: u32) -> Made<()> {
        let depth = depth.checked_sub(1).ok_or("this value is nested too deeply to be written")?;
        let before = text.len();
        match value {
            Value::None => text.push_str("None"),
            Value::Bool(true) => text.push_str("True"),
            Value::Bool(false) => text.push_str("False"),
            Value::Int(number) => text.push_str(&number.to_string()),
            Value::Float(number) => text.push_str(&format!("{number:?}")),
            Value::Text(plain) => {
                self.room(plain.len() * 2)?;
                text.push_str(&format!("{plain:?}"));
            }
            Value::Range(from, to, by) => text.push_str(&format!("range({from}, {to}, {by})")),
            Value::Function(function) => text.push_str(&format!("<function {}>", function.name)),
            Value::Builtin(name) => text.push_str(&format!("<function {name}>")),
            Value::List(id) | Value::Tuple(id) => {
                let (open, close) = if matches!(value, Value::List(_)) { ("[", "]") } else { ("(", ")") };
                text.push_str(open);
                for index in 0..self.items_of(*id).len() {
                    text.push_str(if index > 0 { ", " } else { "" });
                    let item = self.items_of(*id)[index].clone();
                    self.write_into(&item, text, depth)?;
                }
                text.push_str(close);
            }
            Value::Dict(id) => {
                text.push('{');
                for index in 0..self.pairs_of(*id).len() {
                    text.push_str(if index > 0 { ", " } else { "" });
                    let (key, item) = self.pairs_of(*id)[index].clone();
                    self.write_into(&key, text, depth)?;
                    text.push_str(": ");
                    self.write_into(&item, text, depth)?;
                }
                text.push('}');
            }
            Value::Struct(id) => {
                text.push_str("struct(");
                for index in 0..self.fields_of(*id).len() {
                    text.push_str(if index > 0 { ", " } else { "" });
                    let (name, item) = self.fields_of(*id)[index].clone();
                    text.push_str(&format!("{name} = "));
                    self.write_into(&item, text, depth)?;
                }
                text.push(')');
            }
        }
        self.room((text.len() - before).min(64))
    }
}

impl Value {
    /// Its type, with an article.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an int",
            Value::Float(_) => "a float",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Tuple(_) => "a tuple",
            Value::Dict(_) => "a dict",
            Value::Struct(_) => "a struct",
            Value::Range(..) => "a range",
            Value::Function(_) | Value::Builtin(_) => "a function",
        }
    }

    /// The value as a number, if it is one.
    pub(crate) fn number(&self) -> Option<f64> {
        match self {
            Value::Int(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            _ => None,
        }
    }
}
