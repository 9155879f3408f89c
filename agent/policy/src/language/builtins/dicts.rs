//! Methods of dicts.

use super::super::value::{Heap, Made, Value};
use super::Arguments;

pub(super) fn method(heap: &mut Heap<'_>, id: usize, name: &str, given: Arguments) -> Made<Value> {
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

/// Adds all pairs of a dict, or of a list of pairs.
pub(super) fn update(heap: &mut Heap<'_>, id: usize, from: &Value) -> Made<()> {
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
