//! Values with items: index, slice and sort.

use std::cmp::Ordering;

use super::super::value::{Heap, Made, Value};

/// The position of an index; a negative one counts from the end.
pub(in crate::language) fn index(index: &Value, length: usize) -> Made<usize> {
    let Value::Int(number) = index else { return Err(format!("an index is an int, not {}", index.kind())) };
    let from_start = if *number < 0 { number.saturating_add(length as i64) } else { *number };
    usize::try_from(from_start)
        .ok()
        .filter(|at| *at < length)
        .ok_or_else(|| format!("index {number} is outside of {length} item(s)"))
}

/// `of[index]`.
pub(in crate::language) fn item(heap: &mut Heap<'_>, of: &Value, by: &Value) -> Made<Value> {
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
pub(in crate::language) fn slice(
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
        return Err("a dict cannot be sliced".to_owned());
    }
    let part = heap.iterate(of)?.into_iter().skip(from).take(count).collect();
    if matches!(of, Value::Tuple(_)) { heap.tuple(part) } else { heap.list(part) }
}

/// Sorts by the first value of each pair. The sort is stable.
pub(in crate::language) fn sort(
    heap: &mut Heap<'_>,
    items: Vec<(Value, Value)>,
    reverse: bool,
) -> Made<Vec<Value>> {
    heap.room(items.len().saturating_mul(64))?;
    // Binary insertion sort: the comparison may fail, which `sort_by` does not support.
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
