//! What there is beside what a policy defines itself: operators, functions, and methods of strings, lists and dicts.

use std::cmp::Ordering;

use super::tree::Name;
use super::value::{Heap, Made, Object, Value};

/// The functions.
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

/// What a function is called with.
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

    /// So many arguments without names, and no others.
    pub(super) fn only<const N: usize>(self, of: &str) -> Made<[Value; N]> {
        if let Some((name, _)) = self.named.first() {
            return Err(format!("{of}(): there is no parameter {name}"));
        }
        let got = self.plain.len();
        self.plain.try_into().map_err(|_| format!("{of}(): it takes {N} argument(s), and got {got}"))
    }
}

/// `left operator right`.
pub(super) fn binary(heap: &mut Heap<'_>, operator: &str, left: &Value, right: &Value) -> Made<Value> {
    match operator {
        "==" => heap.equal(left, right).map(Value::Bool),
        "!=" => heap.equal(left, right).map(|equal| Value::Bool(!equal)),
        "<" => heap.order(left, right).map(|order| Value::Bool(order == Ordering::Less)),
        ">" => heap.order(left, right).map(|order| Value::Bool(order == Ordering::Greater)),
        "<=" => heap.order(left, right).map(|order| Value::Bool(order != Ordering::Greater)),
        ">=" => heap.order(left, right).map(|order| Value::Bool(order != Ordering::Less)),
        "in" => contains(heap, right, left).map(Value::Bool),
        "not in" => contains(heap, right, left).map(|there| Value::Bool(!there)),
        "+" if !matches!((left, right), (Value::Int(_) | Value::Float(_), _)) => join(heap, left, right),
        "*" if !matches!(
            (left, right),
            (Value::Int(_) | Value::Float(_), Value::Int(_) | Value::Float(_))
        ) =>
        {
            repeat(heap, left, right)
        }
        _ => arithmetic(operator, left, right),
    }
}

fn arithmetic(operator: &str, left: &Value, right: &Value) -> Made<Value> {
    let too_large = || "the result is too large for an int".to_owned();
    if let (Value::Int(a), Value::Int(b)) = (left, right) {
        let (a, b) = (*a, *b);
        if b == 0 && matches!(operator, "/" | "//" | "%") {
            return Err("division by zero".to_owned());
        }
        return match operator {
            "+" => a.checked_add(b).map(Value::Int).ok_or_else(too_large),
            "-" => a.checked_sub(b).map(Value::Int).ok_or_else(too_large),
            "*" => a.checked_mul(b).map(Value::Int).ok_or_else(too_large),
            "/" => Ok(Value::Float(a as f64 / b as f64)),
            "//" => a
                .checked_div(b)
                .map(|whole| if a % b != 0 && (a < 0) != (b < 0) { whole - 1 } else { whole })
                .map(Value::Int)
                .ok_or_else(too_large),
            // The sign of the result is that of the divisor.
            _ => Ok(Value::Int(
                a.checked_rem(b)
                    .map_or(0, |rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
            )),
        };
    }
    let (Some(a), Some(b)) = (left.number(), right.number()) else {
        return Err(format!("{} {operator} {} means nothing", left.kind(), right.kind()));
    };
    if b == 0.0 && matches!(operator, "/" | "//" | "%") {
        return Err("division by zero".to_owned());
    }
    let number = match operator {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" => a / b,
        "//" => (a / b).floor(),
        _ => a - (a / b).floor() * b,
    };
    if number.is_finite() {
        Ok(Value::Float(number))
    } else {
        Err("the result is too large for a float".to_owned())
    }
}

pub(super) fn minus(value: &Value) -> Made<Value> {
    match value {
        Value::Int(number) => number
            .checked_neg()
            .map(Value::Int)
            .ok_or_else(|| "the result is too large for an int".to_owned()),
        Value::Float(number) => Ok(Value::Float(-number)),
        other => Err(format!("-{} means nothing", other.kind())),
    }
}

fn join(heap: &mut Heap<'_>, left: &Value, right: &Value) -> Made<Value> {
    match (left, right) {
        (Value::Text(a), Value::Text(b)) => {
            heap.room(a.len() + b.len())?;
            Ok(Value::Text(format!("{a}{b}").into()))
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            heap.room((heap.items_of(*a).len() + heap.items_of(*b).len()) * 32)?;
            let items = [heap.items_of(*a), heap.items_of(*b)].concat();
            if matches!(left, Value::List(_)) { heap.list(items) } else { heap.tuple(items) }
        }
        (Value::Text(_), other) | (other, Value::Text(_)) => Err(format!(
            "a string and {} cannot be joined; write str(…) around it, or use \"…{{}}\".format(…)",
            other.kind()
        )),
        _ => Err(format!("{} + {} means nothing", left.kind(), right.kind())),
    }
}

fn repeat(heap: &mut Heap<'_>, left: &Value, right: &Value) -> Made<Value> {
    let (value, count) = match (left, right) {
        (value, Value::Int(count)) | (Value::Int(count), value) => {
            (value, usize::try_from(*count).unwrap_or(0))
        }
        _ => return Err(format!("{} * {} means nothing", left.kind(), right.kind())),
    };
    match value {
        Value::Text(text) => {
            heap.room(text.len().saturating_mul(count))?;
            Ok(Value::Text(text.repeat(count).into()))
        }
        Value::List(id) | Value::Tuple(id) => {
            heap.room(heap.items_of(*id).len().saturating_mul(count).saturating_mul(32))?;
            let items = heap.items_of(*id).to_vec();
            let all: Vec<Value> =
                if items.is_empty() { items } else { std::iter::repeat_n(items, count).flatten().collect() };
            if matches!(value, Value::List(_)) { heap.list(all) } else { heap.tuple(all) }
        }
        other => Err(format!("{} cannot be repeated", other.kind())),
    }
}

fn contains(heap: &mut Heap<'_>, holder: &Value, value: &Value) -> Made<bool> {
    match (holder, value) {
        (Value::Text(text), Value::Text(part)) => {
            heap.work(text.len() as u64 / 16)?;
            Ok(text.contains(&**part))
        }
        (Value::Text(_), other) => Err(format!("{} cannot be in a string", other.kind())),
        (Value::Dict(id), key) => Ok(heap.get(*id, key)?.is_some()),
        (Value::List(id) | Value::Tuple(id), value) => {
            for index in 0..heap.items_of(*id).len() {
                let item = heap.items_of(*id)[index].clone();
                if heap.equal(&item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (Value::Range(..), value) => {
            for item in heap.iterate(holder)? {
                if heap.equal(&item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (other, _) => Err(format!("nothing can be in {}", other.kind())),
    }
}

/// The place that an index means; a negative one counts from the end.
pub(super) fn index(index: &Value, length: usize) -> Made<usize> {
    let Value::Int(number) = index else { return Err(format!("an index is an int, not {}", index.kind())) };
    let from_start = if *number < 0 { number.saturating_add(length as i64) } else { *number };
    usize::try_from(from_start)
        .ok()
        .filter(|at| *at < length)
        .ok_or_else(|| format!("index {number} is outside of {length} item(s)"))
}

/// `of[index]`.
pub(super) fn item(heap: &mut Heap<'_>, of: &Value, by: &Value) -> Made<Value> {
    match of {
        Value::Dict(id) => {
            let found = heap.get(*id, by)?;
            match found {
                Some(value) => Ok(value),
                None => Err(format!(
                    "there is no key {}; ask with get(…) for what may be missing",
                    heap.write(by)?
                )),
            }
        }
        Value::List(id) | Value::Tuple(id) => {
            let items = heap.items_of(*id);
            index(by, items.len()).map(|at| items[at].clone())
        }
        Value::Text(text) => {
            heap.work(text.len() as u64 / 16)?;
            let at = index(by, text.chars().count())?;
            let letter: String = text.chars().skip(at).take(1).collect();
            heap.text(&letter)
        }
        Value::Range(from, _, step) => {
            let at = index(by, heap.length(of).unwrap_or(0))?;
            Ok(Value::Int(from.wrapping_add((at as i64).wrapping_mul(*step))))
        }
        other => Err(format!("{} has no items", other.kind())),
    }
}

/// `of[from:to]`.
pub(super) fn slice(
    heap: &mut Heap<'_>,
    of: &Value,
    from: Option<&Value>,
    to: Option<&Value>,
) -> Made<Value> {
    let length = heap.length(of).ok_or_else(|| format!("{} has no items", of.kind()))?;
    let bound = |value: Option<&Value>, otherwise: usize| match value {
        None | Some(Value::None) => Ok(otherwise),
        Some(Value::Int(number)) => {
            let from_start = if *number < 0 { number.saturating_add(length as i64) } else { *number };
            Ok(usize::try_from(from_start).unwrap_or(0).min(length))
        }
        Some(other) => Err(format!("an index is an int, not {}", other.kind())),
    };
    let (from, to) = (bound(from, 0)?, bound(to, length)?);
    let count = to.saturating_sub(from);
    if let Value::Text(text) = of {
        heap.room(text.len())?;
        let part: String = text.chars().skip(from).take(count).collect();
        return heap.text(&part);
    }
    if matches!(of, Value::Dict(_)) {
        return Err("a dict cannot be cut".to_owned());
    }
    let part = heap.iterate(of)?.into_iter().skip(from).take(count).collect();
    if matches!(of, Value::Tuple(_)) { heap.tuple(part) } else { heap.list(part) }
}

/// Sorts by the first of each pair; equal ones keep their order.
pub(super) fn sort(heap: &mut Heap<'_>, items: Vec<(Value, Value)>, reverse: bool) -> Made<Vec<Value>> {
    heap.room(items.len().saturating_mul(64))?;
    // By insertion into halves: the comparison may fail, which sort_by does not know.
    let mut sorted: Vec<(Value, Value)> = Vec::with_capacity(items.len());
    for item in items {
        let (mut low, mut high) = (0, sorted.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let order = heap.order(&sorted[middle].0, &item.0)?;
            let stays = if reverse { order != Ordering::Less } else { order != Ordering::Greater };
            if stays { low = middle + 1 } else { high = middle }
        }
        heap.work((sorted.len() - low) as u64 / 64)?;
        sorted.insert(low, item);
    }
    Ok(sorted.into_iter().map(|(_, item)| item).collect())
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
                update(heap, id, &from)?;
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
            other => Err(format!("abs(): {} is no number", other.kind())),
        },
        "int" => match value {
            Value::Int(number) => Ok(Value::Int(*number)),
            Value::Bool(yes) => Ok(Value::Int((*yes).into())),
            Value::Float(number) if number.abs() < 9e18 => Ok(Value::Int(number.trunc() as i64)),
            Value::Text(text) => {
                text.trim().parse().map(Value::Int).map_err(|_| format!("int(): {text:?} is no number"))
            }
            other => Err(format!("int(): {} is no number that fits", other.kind())),
        },
        "float" => match value {
            Value::Bool(yes) => Ok(Value::Float((*yes).into())),
            Value::Text(text) => {
                let number = text.trim().parse().ok().filter(|number: &f64| number.is_finite());
                number.map(Value::Float).ok_or_else(|| format!("float(): {text:?} is no number"))
            }
            other => other
                .number()
                .map(Value::Float)
                .ok_or_else(|| format!("float(): {} is no number", other.kind())),
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

fn update(heap: &mut Heap<'_>, id: usize, from: &Value) -> Made<()> {
    let pairs = match from {
        Value::Dict(other) => heap.pairs_of(*other).to_vec(),
        other => {
            let mut pairs = Vec::new();
            for row in heap.iterate(other)? {
                let row = heap.iterate(&row)?;
                let [key, value] = <[Value; 2]>::try_from(row)
                    .map_err(|_| "a pair of key and value is expected".to_owned())?;
                pairs.push((key, value));
            }
            pairs
        }
    };
    heap.room(pairs.len() * 64)?;
    pairs.into_iter().try_for_each(|(key, value)| heap.set(id, key, value))
}

/// Calls a method of a string, a list or a dict.
pub(super) fn method(heap: &mut Heap<'_>, of: &Value, name: &str, given: Arguments) -> Made<Value> {
    match of {
        Value::Text(text) => text_method(heap, text, name, given),
        Value::List(id) => list_method(heap, *id, name, given),
        Value::Dict(id) => dict_method(heap, *id, name, given),
        other => Err(format!("{} has no {name}()", other.kind())),
    }
}

fn list_method(heap: &mut Heap<'_>, id: usize, name: &str, given: Arguments) -> Made<Value> {
    match name {
        "append" | "extend" => {
            let [value] = given.only::<1>(name)?;
            let more = if name == "append" { vec![value] } else { heap.iterate(&value)? };
            heap.room(more.len() * 32)?;
            if let Object::Items(items) = heap.changing(id)? {
                items.extend(more);
            }
            Ok(Value::None)
        }
        "pop" => {
            if let Object::Items(items) = heap.changing(id)? {
                return items.pop().ok_or_else(|| "pop() of nothing".to_owned());
            }
            Ok(Value::None)
        }
        "index" => {
            let [value] = given.only::<1>(name)?;
            for index in 0..heap.items_of(id).len() {
                let item = heap.items_of(id)[index].clone();
                if heap.equal(&item, &value)? {
                    return Ok(Value::Int(index as i64));
                }
            }
            Err("index(): it is not in the list".to_owned())
        }
        _ => Err(format!("a list has no {name}(); it has append, extend, index, pop")),
    }
}

fn dict_method(heap: &mut Heap<'_>, id: usize, name: &str, given: Arguments) -> Made<Value> {
    match name {
        "get" => {
            let key = given.plain.first().ok_or("get(): the key is missing")?;
            let found = heap.get(id, key)?;
            Ok(found.or_else(|| given.plain.get(1).cloned()).unwrap_or(Value::None))
        }
        "keys" | "values" | "items" => {
            let pairs = heap.pairs_of(id).to_vec();
            heap.room(pairs.len() * 64)?;
            let mut all = Vec::new();
            for (key, value) in pairs {
                all.push(match name {
                    "keys" => key,
                    "values" => value,
                    _ => heap.tuple(vec![key, value])?,
                });
            }
            heap.list(all)
        }
        "update" => {
            let [from] = given.only::<1>(name)?;
            update(heap, id, &from).map(|()| Value::None)
        }
        _ => Err(format!("a dict has no {name}(); it has get, items, keys, update, values")),
    }
}

fn text_method(heap: &mut Heap<'_>, text: &str, name: &str, given: Arguments) -> Made<Value> {
    heap.work(text.len() as u64 / 16)?;
    match name {
        "format" => return format(heap, text, given),
        "join" => {
            let [over] = given.only::<1>(name)?;
            let mut whole = String::new();
            for (index, part) in heap.iterate(&over)?.iter().enumerate() {
                let Value::Text(part) = part else {
                    return Err(format!("join(): {} is no string", part.kind()));
                };
                heap.room(part.len() + text.len())?;
                whole.push_str(if index > 0 { text } else { "" });
                whole.push_str(part);
            }
            return heap.text(&whole);
        }
        _ => {}
    }
    let mut words = Vec::new();
    for value in &given.plain {
        match value {
            Value::Text(word) => words.push(word.clone()),
            other => return Err(format!("{name}(): {} is no string", other.kind())),
        }
    }
    match (name, &words[..]) {
        ("startswith", [word]) => Ok(Value::Bool(text.starts_with(&**word))),
        ("endswith", [word]) => Ok(Value::Bool(text.ends_with(&**word))),
        ("find", [word]) => {
            let at = text.find(&**word).map_or(-1, |at| text[..at].chars().count() as i64);
            Ok(Value::Int(at))
        }
        ("lower", []) => heap.text(&text.to_lowercase()),
        ("upper", []) => heap.text(&text.to_uppercase()),
        ("strip", []) => heap.text(text.trim()),
        ("replace", [from, to]) => {
            let times = if from.is_empty() { text.len() + 1 } else { text.len() / from.len() };
            heap.room(text.len().saturating_add(times.saturating_mul(to.len())))?;
            heap.text(&text.replace(&**from, to))
        }
        ("split", [] | [_]) => {
            heap.room(text.len().saturating_mul(32))?;
            let parts: Vec<&str> = match words.first() {
                None => text.split_whitespace().collect(),
                Some(word) if word.is_empty() => return Err("split(): the separator is empty".to_owned()),
                Some(word) => text.split(&**word).collect(),
            };
            let parts: Made<Vec<Value>> = parts.into_iter().map(|part| heap.text(part)).collect();
            heap.list(parts?)
        }
        _ => Err(format!(
            "a string has no {name}() with {} argument(s); it has endswith, find, format, join, lower, replace, split, \
             startswith, strip, upper",
            words.len()
        )),
    }
}

/// `{}`, `{0}` and `{name}`, and `{{` for a bracket.
fn format(heap: &mut Heap<'_>, text: &str, given: Arguments) -> Made<Value> {
    let mut whole = String::new();
    let mut rest = text;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        whole.push_str(&rest[..at]);
        heap.room(at)?;
        let bracket = &rest[at..=at];
        rest = &rest[at + 1..];
        if rest.starts_with(bracket) {
            whole.push_str(bracket);
            rest = &rest[1..];
            continue;
        }
        let end = rest.find('}').filter(|_| bracket == "{");
        let Some(end) = end else {
            return Err("format(): a bracket is alone; write {{ or }} for one".to_owned());
        };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let value = if field.is_empty() {
            next += 1;
            given.plain.get(next - 1)
        } else if let Ok(number) = field.parse::<usize>() {
            given.plain.get(number)
        } else {
            given.named.iter().find(|(name, _)| **name == *field).map(|(_, value)| value)
        };
        let value = value.ok_or_else(|| format!("format(): there is no argument for {{{field}}}"))?;
        let words = heap.write(value)?;
        heap.room(words.len())?;
        whole.push_str(&words);
    }
    whole.push_str(rest);
    heap.text(&whole)
}
