//! Statements: blocks, loops and assignments.

use crate::language::builtins;
use crate::language::tree::{Expr, Statement, Target};
use crate::language::value::{Made, Object, Value};
use crate::language::{Branch, Fault, Place};

use super::{BRANCHES, Flow, Frame, Ran, Run, at};

impl Run<'_> {
    pub(super) fn block(&mut self, statements: &[Statement], frame: &mut Frame<'_>) -> Ran<Flow> {
        for statement in statements {
            match self.statement(statement, frame)? {
                Flow::On => {}
                other => return Ok(other),
            }
        }
        Ok(Flow::On)
    }

    fn statement(&mut self, statement: &Statement, frame: &mut Frame<'_>) -> Ran<Flow> {
        match statement {
            Statement::Expr(value) => self.expr(value, frame).map(|_| Flow::On),
            Statement::Assign(place, target, value) => {
                let value = self.expr(value, frame)?;
                self.assign(*place, target, value, frame)?;
                Ok(Flow::On)
            }
            Statement::Change(place, target, operator, value) => {
                self.change(*place, target, operator, value, frame)?;
                Ok(Flow::On)
            }
            Statement::If(branches, otherwise) => {
                for (condition, block) in branches {
                    let met = self.expr(condition, frame)?;
                    let met = self.heap.is_true(&met);
                    if self.branches.len() < BRANCHES {
                        self.branches.push(Branch { line: condition.place.line, met });
                    }
                    if met {
                        return self.inner(condition.place, block, frame);
                    }
                }
                self.inner(Place::default(), otherwise, frame)
            }
            Statement::For(place, target, over, body) => self.each(*place, target, over, body, frame),
            Statement::Return(place, None) => Ok(Flow::Return(Value::None, *place)),
            Statement::Return(place, Some(value)) => Ok(Flow::Return(self.expr(value, frame)?, *place)),
            Statement::Break => Ok(Flow::Break),
            Statement::Continue => Ok(Flow::Continue),
            Statement::Pass => Ok(Flow::On),
        }
    }

    fn inner(&mut self, place: Place, block: &[Statement], frame: &mut Frame<'_>) -> Ran<Flow> {
        self.deeper(place)?;
        let flow = self.block(block, frame);
        self.depth -= 1;
        flow
    }

    fn each(
        &mut self,
        place: Place,
        target: &Target,
        over: &Expr,
        body: &[Statement],
        frame: &mut Frame<'_>,
    ) -> Ran<Flow> {
        let over_value = self.expr(over, frame)?;
        for item in self.heap.iterate(&over_value).map_err(at(over.place))? {
            self.heap.work(1).map_err(at(place))?;
            self.assign(place, target, item, frame)?;
            match self.inner(place, body, frame)? {
                Flow::On | Flow::Continue => {}
                Flow::Break => break,
                Flow::Return(value, place) => return Ok(Flow::Return(value, place)),
            }
        }
        Ok(Flow::On)
    }

    pub(super) fn assign(
        &mut self,
        place: Place,
        target: &Target,
        value: Value,
        frame: &mut Frame<'_>,
    ) -> Ran<()> {
        match target {
            Target::Name(name) => {
                match frame.names.iter_mut().find(|(known, _)| known == name) {
                    Some((_, known)) => *known = value,
                    None => frame.names.push((name.clone(), value)),
                }
                Ok(())
            }
            Target::Tuple(parts) => {
                let values = self.heap.iterate(&value).map_err(at(place))?;
                if values.len() != parts.len() {
                    let (names, got) = (parts.len(), values.len());
                    return Err(Fault::at(place, format!("{names} name(s) for {got} value(s)")));
                }
                for (part, value) in parts.iter().zip(values) {
                    self.assign(place, part, value, frame)?;
                }
                Ok(())
            }
            Target::Index(pair) => {
                let of = self.expr(&pair.0, frame)?;
                let index = self.expr(&pair.1, frame)?;
                self.put(&of, index, value).map_err(at(place))
            }
        }
    }

    fn put(&mut self, of: &Value, index: Value, value: Value) -> Made<()> {
        match of {
            Value::Dict(id) => {
                self.heap.changing(*id)?;
                self.heap.set(*id, index, value)
            }
            Value::List(id) => {
                let at = builtins::index(&index, self.heap.items_of(*id).len())?;
                if let Object::Items(items) = self.heap.changing(*id)? {
                    items[at] = value;
                }
                Ok(())
            }
            other => Err(format!("{} does not support item assignment", other.kind())),
        }
    }

    fn change(
        &mut self,
        place: Place,
        target: &Target,
        operator: &'static str,
        value: &Expr,
        frame: &mut Frame<'_>,
    ) -> Ran<()> {
        match target {
            Target::Name(name) => {
                let before = self.name(name, place, frame)?;
                let by = self.expr(value, frame)?;
                let after = builtins::binary(&mut self.heap, operator, &before, &by).map_err(at(place))?;
                self.assign(place, target, after, frame)
            }
            Target::Index(pair) => {
                let of = self.expr(&pair.0, frame)?;
                let index = self.expr(&pair.1, frame)?;
                let before = builtins::item(&mut self.heap, &of, &index).map_err(at(place))?;
                let by = self.expr(value, frame)?;
                let after = builtins::binary(&mut self.heap, operator, &before, &by).map_err(at(place))?;
                self.put(&of, index, after).map_err(at(place))
            }
            Target::Tuple(_) => Err(Fault::at(place, "only one thing can be changed at once")),
        }
    }
}
