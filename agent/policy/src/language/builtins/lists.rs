//! Methods of lists.

use super::super::value::{Heap, Made, Object, Value};
use super::Arguments;

pub(super) fn method(heap: &mut Heap<'_>, id: usize, name: &str, given: Arguments) -> Made<Value> {
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
                return items.pop().ok_or_else(|| "pop() from an empty list".to_owned());
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
