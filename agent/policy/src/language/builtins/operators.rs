//! Operators.

use std::cmp::Ordering;

use super::super::value::{Heap, Made, Value};

/// `left operator right`.
pub(in crate::language) fn binary(
    heap: &mut Heap<'_>,
    operator: &str,
    left: &Value,
    right: &Value,
) -> Made<Value> {
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
            // The result has the sign of the divisor.
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

pub(in crate::language) fn minus(value: &Value) -> Made<Value> {
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
        (other, _) => Err(format!("{} does not support `in`", other.kind())),
    }
}
