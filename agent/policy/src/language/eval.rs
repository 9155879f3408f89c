//! Runs a tree: step by step, each one counted. Nothing in here loops without an end, waits, or looks outside.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::builtins::{self, Arguments};
use super::tree::{Clause, Expr, Function, Item, Kind, Module, Name, Statement, Target};
use super::value::{Heap, Made, Object, Value};
use super::{Branch, Fault, Host, Limits, Place};

/// How many calls may stand inside each other, and how deep expressions and blocks of all of them together.
const DEEPEST_CALL: usize = 24;
const DEEPEST: u32 = 200;

/// A module that is run.
pub(crate) struct Run<'a> {
    pub(crate) heap: Heap<'a>,
    globals: BTreeMap<Name, Value>,
    host: &'a dyn Host,
    calls: Vec<Arc<Function>>,
    depth: u32,
    /// The conditions that were met on the way.
    pub(crate) branches: Vec<Branch>,
}

/// So many conditions are remembered.
const BRANCHES: usize = 1000;

/// The names of a call.
struct Frame<'f> {
    function: Option<&'f Function>,
    names: Vec<(Name, Value)>,
}

enum Flow {
    On,
    Break,
    Continue,
    Return(Value, Place),
}

type Ran<T> = Result<T, Fault>;

impl<'a> Run<'a> {
    pub(crate) fn new(limits: Limits, out_of_time: &'a dyn Fn() -> bool, host: &'a dyn Host) -> Run<'a> {
        let heap = Heap {
            objects: Vec::new(),
            frozen: 0,
            steps_left: limits.steps,
            bytes_left: limits.bytes,
            out_of_time,
        };
        Run { heap, globals: BTreeMap::new(), host, calls: Vec::new(), depth: 0, branches: Vec::new() }
    }

    /// Makes the constants and functions of a file. They cannot be changed from then on.
    pub(crate) fn load(&mut self, module: &Module) -> Ran<()> {
        for item in &module.items {
            match item {
                Item::Function(function) => {
                    self.globals.insert(function.name.clone(), Value::Function(function.clone()));
                }
                Item::Constant(place, target, value) => {
                    let mut frame = Frame { function: None, names: Vec::new() };
                    let value = self.expr(value, &mut frame)?;
                    frame.names.clear();
                    self.assign(*place, target, value, &mut frame)?;
                    self.globals.extend(frame.names);
                }
            }
        }
        Ok(())
    }

    /// What was made so far cannot be changed any more.
    pub(crate) fn freeze(&mut self) {
        self.heap.frozen = self.heap.objects.len();
    }

    pub(crate) fn function(&self, name: &str) -> Option<&Value> {
        self.globals.get(name)
    }

    /// Calls a function of the file, and says where it returned.
    pub(crate) fn call_function(&mut self, value: &Value, arguments: Vec<Value>) -> Ran<(Value, Place)> {
        match value {
            Value::Function(function) => {
                let given = Arguments { plain: arguments, named: Vec::new() };
                self.call(&function.clone(), given, function.place)
            }
            other => Err(Fault::at(Place::default(), format!("{} cannot be called", other.kind()))),
        }
    }

    fn call(&mut self, function: &Arc<Function>, given: Arguments, from: Place) -> Ran<(Value, Place)> {
        if self.calls.iter().any(|running| Arc::ptr_eq(running, function)) {
            return Err(Fault::at(
                from,
                format!("{} calls itself; loop over a list or a range instead", function.name),
            ));
        }
        if self.calls.len() >= DEEPEST_CALL {
            return Err(Fault::at(from, "too many functions call each other"));
        }
        let mut frame = Frame { function: Some(function), names: Vec::new() };
        self.bind(function, given, from, &mut frame)?;
        self.calls.push(function.clone());
        let flow = self.block(&function.body, &mut frame);
        self.calls.pop();
        Ok(match flow? {
            Flow::Return(value, place) => (value, place),
            _ => (Value::None, function.place),
        })
    }

    fn bind(&mut self, function: &Function, given: Arguments, from: Place, frame: &mut Frame<'_>) -> Ran<()> {
        let wrong = |what: String| Err(Fault::at(from, format!("{}(): {what}", function.name)));
        if given.plain.len() > function.parameters.len() {
            let (takes, got) = (function.parameters.len(), given.plain.len());
            return wrong(format!("it takes {takes} argument(s), and got {got}"));
        }
        let mut plain = given.plain.into_iter();
        let mut named = given.named;
        for (name, default) in &function.parameters {
            let by_name = named.iter().position(|(given, _)| given == name).map(|at| named.remove(at).1);
            let value = match (plain.next(), by_name, default) {
                (Some(_), Some(_), _) => return wrong(format!("{name} is given twice")),
                (Some(value), None, _) | (None, Some(value), _) => value,
                (None, None, Some(default)) => {
                    let mut outside = Frame { function: None, names: Vec::new() };
                    self.expr(default, &mut outside)?
                }
                (None, None, None) => return wrong(format!("{name} is missing")),
            };
            frame.names.push((name.clone(), value));
        }
        match named.first() {
            Some((name, _)) => wrong(format!("there is no parameter {name}")),
            None => Ok(()),
        }
    }

    fn block(&mut self, statements: &[Statement], frame: &mut Frame<'_>) -> Ran<Flow> {
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

    fn assign(&mut self, place: Place, target: &Target, value: Value, frame: &mut Frame<'_>) -> Ran<()> {
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
            other => Err(format!("nothing can be put into {}", other.kind())),
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

    fn deeper(&mut self, place: Place) -> Ran<()> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(Fault::at(place, "this is nested too deeply"));
        }
        Ok(())
    }

    fn expr(&mut self, expr: &Expr, frame: &mut Frame<'_>) -> Ran<Value> {
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

    fn name(&mut self, name: &Name, place: Place, frame: &Frame<'_>) -> Ran<Value> {
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

    /// Goes through a comprehension's clauses. The names that it gives are its own.
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
        // A method, unless it is a struct whose field is called.
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

    /// By what `key` makes of each item, if it is given.
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

/// What is wrong, at its place.
fn at(place: Place) -> impl Fn(String) -> Fault {
    move |what| Fault::at(place, what)
}
