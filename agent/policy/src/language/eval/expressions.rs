//! Expressions: names, containers, operators and calls.

use crate::language::builtins::{self, Arguments};
use crate::language::tree::{Clause, Expr, Kind, Name};
use crate::language::value::{Made, Value};
use crate::language::{Fault, Place};

use super::{Frame, Ran, Run, at};

impl Run<'_> {
    pub(super) fn expr(&mut self, expr: &Expr, frame: &mut Frame<'_>) -> Ran<Value> {
        self.heap.work(1).map_err(at(expr.place))?;
        self.deeper(expr.place)?;
        let value = match &expr.kind {
            Kind::None => Ok(Value::None),
            Kind::Bool(yes) => Ok(Value::Bool(*yes)),
            Kind::Int(number) => Ok(Value::Int(*number)),
            Kind::Float(number) => Ok(Value::Float(*number)),
            Kind::Text(text) => Ok(Value::Text(text.clone())),
            Kind::Name(name) => self.name(name, expr.place, frame),
            Kind::List(parts) => {
                self.all(parts, frame).and_then(|parts| self.heap.list(parts).map_err(at(expr.place)))
            }
            Kind::Tuple(parts) => {
                self.all(parts, frame).and_then(|parts| self.heap.tuple(parts).map_err(at(expr.place)))
            }
            Kind::Dict(pairs) => self.dict(pairs, expr.place, frame),
            Kind::ListOf(item, clauses) => self.list_of(item, clauses, expr.place, frame),
            Kind::DictOf(pair, clauses) => self.dict_of(pair, clauses, expr.place, frame),
            Kind::Not(value) => self.expr(value, frame).map(|value| Value::Bool(!self.heap.is_true(&value))),
            Kind::Minus(value) => {
                self.expr(value, frame).and_then(|value| builtins::minus(&value).map_err(at(expr.place)))
            }
            Kind::And(pair) => self.either(pair, false, frame),
            Kind::Or(pair) => self.either(pair, true, frame),
            Kind::Binary(operator, pair) => self.binary(operator, pair, expr.place, frame),
            Kind::If(parts) => self.conditional(parts, frame),
            Kind::Field(of, name) => {
                self.expr(of, frame).and_then(|of| self.field(&of, name).map_err(at(expr.place)))
            }
            Kind::Index(pair) => self.index(pair, expr.place, frame),
            Kind::Slice(of, from, to) => self.slice(of, from.as_deref(), to.as_deref(), expr.place, frame),
            Kind::Call(what, arguments) => self.call_expr(what, arguments, expr.place, frame),
        };
        self.depth -= 1;
        value
    }

    pub(super) fn name(&mut self, name: &Name, place: Place, frame: &Frame<'_>) -> Ran<Value> {
        if let Some((_, value)) = frame.names.iter().find(|(known, _)| known == name) {
            return Ok(value.clone());
        }
        if frame.function.is_some_and(|function| function.locals.contains(name)) {
            return Err(Fault::at(place, format!("{name} has no value yet")));
        }
        if let Some(value) = self.globals.get(name) {
            return Ok(value.clone());
        }
        if let Some(known) = builtins::NAMES.iter().chain(self.host.names()).find(|known| ***known == **name)
        {
            return Ok(Value::Builtin(known));
        }
        Err(Fault::at(place, format!("there is no {name}")))
    }

    fn all(&mut self, parts: &[Expr], frame: &mut Frame<'_>) -> Ran<Vec<Value>> {
        parts.iter().map(|part| self.expr(part, frame)).collect()
    }

    fn dict(&mut self, pairs: &[(Expr, Expr)], place: Place, frame: &mut Frame<'_>) -> Ran<Value> {
        let dict = self.heap.dict(Vec::new()).map_err(at(place))?;
        let Value::Dict(id) = dict else { return Ok(dict) };
        for (key, value) in pairs {
            let (key, value) = (self.expr(key, frame)?, self.expr(value, frame)?);
            self.heap.set(id, key, value).map_err(at(place))?;
        }
        Ok(dict)
    }

    fn list_of(
        &mut self,
        item: &Expr,
        clauses: &[Clause],
        place: Place,
        frame: &mut Frame<'_>,
    ) -> Ran<Value> {
        let mut items = Vec::new();
        self.clauses(clauses, place, frame, &mut |run, frame| {
            run.heap.room(32).map_err(at(place))?;
            items.push(run.expr(item, frame)?);
            Ok(())
        })?;
        self.heap.list(items).map_err(at(place))
    }

    fn dict_of(
        &mut self,
        pair: &(Expr, Expr),
        clauses: &[Clause],
        place: Place,
        frame: &mut Frame<'_>,
    ) -> Ran<Value> {
        let dict = self.heap.dict(Vec::new()).map_err(at(place))?;
        let Value::Dict(id) = dict else { return Ok(dict) };
        self.clauses(clauses, place, frame, &mut |run, frame| {
            let (key, value) = (run.expr(&pair.0, frame)?, run.expr(&pair.1, frame)?);
            run.heap.set(id, key, value).map_err(at(place))
        })?;
        Ok(dict)
    }

    /// Evaluates the clauses of a comprehension. The names that they bind are local.
    fn clauses(
        &mut self,
        clauses: &[Clause],
        place: Place,
        frame: &mut Frame<'_>,
        each: &mut dyn FnMut(&mut Self, &mut Frame<'_>) -> Ran<()>,
    ) -> Ran<()> {
        let Some((first, rest)) = clauses.split_first() else { return each(self, frame) };
        self.deeper(place)?;
        match first {
            Clause::If(condition) => {
                let met = self.expr(condition, frame)?;
                if self.heap.is_true(&met) {
                    self.clauses(rest, place, frame, each)?;
                }
            }
            Clause::For(target, over) => {
                let over_value = self.expr(over, frame)?;
                let outside = frame.names.clone();
                self.heap.room(outside.len() * 32).map_err(at(place))?;
                for item in self.heap.iterate(&over_value).map_err(at(over.place))? {
                    self.heap.work(1).map_err(at(place))?;
                    self.assign(place, target, item, frame)?;
                    self.clauses(rest, place, frame, each)?;
                }
                frame.names = outside;
            }
        }
        self.depth -= 1;
        Ok(())
    }

    fn either(&mut self, pair: &(Expr, Expr), ends_with: bool, frame: &mut Frame<'_>) -> Ran<Value> {
        let first = self.expr(&pair.0, frame)?;
        if self.heap.is_true(&first) == ends_with { Ok(first) } else { self.expr(&pair.1, frame) }
    }

    fn binary(
        &mut self,
        operator: &'static str,
        pair: &(Expr, Expr),
        place: Place,
        frame: &mut Frame<'_>,
    ) -> Ran<Value> {
        let (left, right) = (self.expr(&pair.0, frame)?, self.expr(&pair.1, frame)?);
        builtins::binary(&mut self.heap, operator, &left, &right).map_err(at(place))
    }

    fn conditional(&mut self, parts: &(Expr, Expr, Expr), frame: &mut Frame<'_>) -> Ran<Value> {
        let met = self.expr(&parts.1, frame)?;
        let met = self.heap.is_true(&met);
        self.expr(if met { &parts.0 } else { &parts.2 }, frame)
    }

    fn index(&mut self, pair: &(Expr, Expr), place: Place, frame: &mut Frame<'_>) -> Ran<Value> {
        let (of, index) = (self.expr(&pair.0, frame)?, self.expr(&pair.1, frame)?);
        builtins::item(&mut self.heap, &of, &index).map_err(at(place))
    }

    fn slice(
        &mut self,
        of: &Expr,
        from: Option<&Expr>,
        to: Option<&Expr>,
        place: Place,
        frame: &mut Frame<'_>,
    ) -> Ran<Value> {
        let of = self.expr(of, frame)?;
        let from = from.map(|from| self.expr(from, frame)).transpose()?;
        let to = to.map(|to| self.expr(to, frame)).transpose()?;
        builtins::slice(&mut self.heap, &of, from.as_ref(), to.as_ref()).map_err(at(place))
    }

    fn field(&mut self, of: &Value, name: &Name) -> Made<Value> {
        let Value::Struct(id) = of else {
            return Err(format!("{} has no field {name}", of.kind()));
        };
        let fields = self.heap.fields_of(*id);
        let found = fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        found.ok_or_else(|| {
            let known: Vec<&str> = fields.iter().map(|(name, _)| &**name).collect();
            format!("there is no field {name}; there are {}", known.join(", "))
        })
    }

    fn call_expr(
        &mut self,
        what: &Expr,
        arguments: &[(Option<Name>, Expr)],
        place: Place,
        frame: &mut Frame<'_>,
    ) -> Ran<Value> {
        // A method, unless it is a field of a struct that is called.
        if let Kind::Field(of, name) = &what.kind {
            let of = self.expr(of, frame)?;
            if !matches!(of, Value::Struct(_)) {
                let given = self.arguments(arguments, frame)?;
                return builtins::method(&mut self.heap, &of, name, given).map_err(at(what.place));
            }
            let function = self.field(&of, name).map_err(at(what.place))?;
            let given = self.arguments(arguments, frame)?;
            return self.call_value(&function, given, place);
        }
        let function = self.expr(what, frame)?;
        let given = self.arguments(arguments, frame)?;
        self.call_value(&function, given, place)
    }

    fn arguments(&mut self, arguments: &[(Option<Name>, Expr)], frame: &mut Frame<'_>) -> Ran<Arguments> {
        let mut given = Arguments::default();
        for (name, value) in arguments {
            let value = self.expr(value, frame)?;
            match name {
                None => given.plain.push(value),
                Some(name) => given.named.push((name.clone(), value)),
            }
        }
        Ok(given)
    }

    fn call_value(&mut self, function: &Value, given: Arguments, place: Place) -> Ran<Value> {
        match function {
            Value::Function(function) => self.call(function, given, place).map(|(value, _)| value),
            Value::Builtin("sorted") => self.sorted(given, place),
            Value::Builtin(name) => {
                let made = match self.host.call(name, &given, place, &mut self.heap) {
                    Some(made) => made,
                    None => builtins::call(&mut self.heap, name, given),
                };
                made.map_err(at(place))
            }
            other => Err(Fault::at(place, format!("{} cannot be called", other.kind()))),
        }
    }

    /// Sorts by the result of `key` for each item, if given.
    fn sorted(&mut self, mut given: Arguments, place: Place) -> Ran<Value> {
        let key = given.take("key");
        let reverse = given.take("reverse").is_some_and(|reverse| self.heap.is_true(&reverse));
        let [over] = given.only::<1>("sorted").map_err(at(place))?;
        let items = self.heap.iterate(&over).map_err(at(place))?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let by = match &key {
                Some(key) => {
                    let given = Arguments { plain: vec![item.clone()], named: Vec::new() };
                    self.call_value(key, given, place)?
                }
                None => item.clone(),
            };
            keyed.push((by, item));
        }
        let sorted = builtins::sort(&mut self.heap, keyed, reverse).map_err(at(place))?;
        self.heap.list(sorted).map_err(at(place))
    }
}
