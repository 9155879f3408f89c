//! The built-ins of the language: operators, functions, and methods of strings, lists and dicts.

mod dicts;
mod items;
mod lists;
mod operators;
mod strings;

use std::cmp::Ordering;

pub(super) use items::{index, item, slice, sort};
pub(super) use operators::{binary, minus};

use super::tree::Name;
use super::value::{Heap, Made, Value};

/// The names of the functions.
pub(super) const NAMES: &[&str] = &[
    "abs",
    "all",
    "any",
    "bool",
    "dict",
    "enumerate",
    "fail",
    "float",
    "getattr",
    "hasattr",
    "int",
    "len",
    "list",
    "max",
    "min",
    "range",
    "repr",
    "reversed",
    "sorted",
    "str",
    "struct",
    "tuple",
    "type",
    "zip",
];

/// The arguments of a call.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) plain: Vec<Value>,
    pub(crate) named: Vec<(Name, Value)>,
}

impl Arguments {
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.named.iter().position(|(known, _)| **known == *name)?;
        Some(self.named.remove(at).1)
    }

    /// Exactly `N` positional arguments, and no named ones.
    pub(super) fn only<const N: usize>(self, of: &str) -> Made<[Value; N]> {
        if let Some((name, _)) = self.named.first() {
            return Err(format!("{of}(): there is no parameter {name}"));
        }
        let got = self.plain.len();
        self.plain.try_into().map_err(|_| format!("{of}(): it takes {N} argument(s), and got {got}"))
    }
}

/// Calls a function by its name.
pub(super) fn call(heap: &mut Heap<'_>, name: &str, mut given: Arguments) -> Made<Value> {
    match name {
        "struct" => {
            if !given.plain.is_empty() {
                return Err("struct(): its fields need names, as in struct(a = 1)".to_owned());
            }
            heap.fields(given.named)
        }
        "dict" => {
            let named = std::mem::take(&mut given.named);
            let dict = heap.dict(Vec::new())?;
            let Value::Dict(id) = dict else { return Ok(dict) };
            if !given.plain.is_empty() {
                let [from] = given.only::<1>(name)?;
                dicts::update(heap, id, &from)?;
            }
            for (key, value) in named {
                heap.set(id, Value::Text(key), value)?;
            }
            Ok(dict)
        }
        "min" | "max" => {
            let values = if given.plain.len() == 1 {
                let [over] = given.only::<1>(name)?;
                heap.iterate(&over)?
            } else {
                given.plain
            };
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut values = values.into_iter();
            let mut best = values.next().ok_or_else(|| format!("{name}() of nothing"))?;
            for value in values {
                if heap.order(&value, &best)? == wanted {
                    best = value;
                }
            }
            Ok(best)
        }
        "range" => range(given),
        "zip" => {
            let mut all = Vec::new();
            for over in &given.plain {
                all.push(heap.iterate(over)?);
            }
            let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
            let mut rows = Vec::new();
            for row in 0..shortest {
                let row = all.iter().map(|of| of[row].clone()).collect();
                rows.push(heap.tuple(row)?);
            }
            heap.list(rows)
        }
        "enumerate" => {
            let start = match given.plain.get(1) {
                Some(Value::Int(start)) => *start,
                _ => 0,
            };
            let over = given.plain.first().ok_or("enumerate(): it takes 1 argument(s), and got 0")?;
            let mut rows = Vec::new();
            for (index, item) in heap.iterate(over)?.into_iter().enumerate() {
                rows.push(heap.tuple(vec![Value::Int(start.saturating_add(index as i64)), item])?);
            }
            heap.list(rows)
        }
        "getattr" | "hasattr" => attribute(heap, name, given),
        "list" | "tuple" if given.plain.is_empty() => {
            if name == "list" {
                heap.list(Vec::new())
            } else {
                heap.tuple(Vec::new())
            }
        }
        _ => {
            let [value] = given.only::<1>(name)?;
            of_one(heap, name, &value)
        }
    }
}

fn of_one(heap: &mut Heap<'_>, name: &str, value: &Value) -> Made<Value> {
    match name {
        "len" => {
            let length = heap.length(value).ok_or_else(|| format!("{} has no length", value.kind()))?;
            Ok(Value::Int(i64::try_from(length).unwrap_or(i64::MAX)))
        }
        "any" | "all" => {
            let ends_with = name == "any";
            let found = heap.iterate(value)?.iter().any(|item| heap.is_true(item) == ends_with);
            Ok(Value::Bool(found == ends_with))
        }
        "list" => {
            let items = heap.iterate(value)?;
            heap.list(items)
        }
        "tuple" => {
            let items = heap.iterate(value)?;
            heap.tuple(items)
        }
        "reversed" => {
            let mut items = heap.iterate(value)?;
            items.reverse();
            heap.list(items)
        }
        "bool" => Ok(Value::Bool(heap.is_true(value))),
        "str" => {
            let text = heap.write(value)?;
            heap.text(&text)
        }
        "repr" => {
            let list = heap.list(vec![value.clone()])?;
            let text = heap.write(&list)?;
            heap.text(&text[1..text.len() - 1])
        }
        "type" => {
            let kind = value.kind();
            heap.text(match kind {
                "None" => "NoneType",
                kind => kind.rsplit(' ').next().unwrap_or(kind),
            })
        }
        "abs" => match value {
            Value::Int(number) => number
                .checked_abs()
                .map(Value::Int)
                .ok_or_else(|| "the result is too large for an int".to_owned()),
            Value::Float(number) => Ok(Value::Float(number.abs())),
            other => Err(format!("abs(): {} is not a number", other.kind())),
        },
        "int" => match value {
            Value::Int(number) => Ok(Value::Int(*number)),
            Value::Bool(yes) => Ok(Value::Int((*yes).into())),
            Value::Float(number) if number.abs() < 9e18 => Ok(Value::Int(number.trunc() as i64)),
            Value::Text(text) => {
                text.trim().parse().map(Value::Int).map_err(|_| format!("int(): {text:?} is not a number"))
            }
            other => Err(format!("int(): {} is not a number that fits", other.kind())),
        },
        "float" => match value {
            Value::Bool(yes) => Ok(Value::Float((*yes).into())),
            Value::Text(text) => {
                let number = text.trim().parse().ok().filter(|number: &f64| number.is_finite());
                number.map(Value::Float).ok_or_else(|| format!("float(): {text:?} is not a number"))
            }
            other => other
                .number()
                .map(Value::Float)
                .ok_or_else(|| format!("float(): {} is not a number", other.kind())),
        },
        "fail" => Err(format!("fail: {}", heap.write(value)?)),
        other => Err(format!("there is no {other}")),
    }
}

fn attribute(heap: &mut Heap<'_>, name: &str, given: Arguments) -> Made<Value> {
    let (Some(Value::Struct(id)), Some(Value::Text(field))) = (given.plain.first(), given.plain.get(1))
    else {
        return Err(format!("{name}(): it takes a struct and the name of a field"));
    };
    let found = heap.fields_of(*id).iter().find(|(known, _)| known == field).map(|(_, value)| value.clone());
    if name == "hasattr" {
        return Ok(Value::Bool(found.is_some()));
    }
    found.or_else(|| given.plain.get(2).cloned()).ok_or_else(|| format!("there is no field {field}"))
}

fn range(given: Arguments) -> Made<Value> {
    let numbers: Option<Vec<i64>> = given
        .plain
        .iter()
        .map(|value| if let Value::Int(number) = value { Some(*number) } else { None })
        .collect();
    match numbers.as_deref() {
        Some([to]) => Ok(Value::Range(0, *to, 1)),
        Some([from, to]) => Ok(Value::Range(*from, *to, 1)),
        Some([from, to, by]) if *by != 0 => Ok(Value::Range(*from, *to, *by)),
        _ => Err("range(): it takes one to three whole numbers, the third not 0".to_owned()),
    }
}

/// Calls a method of a string, a list or a dict.
pub(super) fn method(heap: &mut Heap<'_>, of: &Value, name: &str, given: Arguments) -> Made<Value> {
    match of {
        Value::Text(text) => strings::method(heap, text, name, given),
        Value::List(id) => lists::method(heap, *id, name, given),
        Value::Dict(id) => dicts::method(heap, *id, name, given),
        other => Err(format!("{} has no {name}()", other.kind())),
    }
}
