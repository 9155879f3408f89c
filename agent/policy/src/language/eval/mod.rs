//! Runs a tree step by step and counts each step. Nothing here loops forever, waits or does I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

mod expressions;
mod statements;

use super::builtins::Arguments;
use super::tree::{Function, Item, Module, Name};
use super::value::{Heap, Value};
use super::{Branch, Fault, Host, Limits, Place};

/// The maximum depth of nested calls, and of expressions and blocks of all of them together.
const DEEPEST_CALL: usize = 24;
const DEEPEST: u32 = 200;

/// A running module.
pub(crate) struct Run<'a> {
    pub(crate) heap: Heap<'a>,
    globals: BTreeMap<Name, Value>,
    host: &'a dyn Host,
    calls: Vec<Arc<Function>>,
    depth: u32,
    /// The conditions that were evaluated.
    pub(crate) branches: Vec<Branch>,
}

/// The maximum number of conditions that are kept.
const BRANCHES: usize = 1000;

/// The local names of a call.
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

    /// Evaluates the constants and functions of a file. They are frozen afterwards.
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

    /// Freezes all existing objects.
    pub(crate) fn freeze(&mut self) {
        self.heap.frozen = self.heap.objects.len();
    }

    pub(crate) fn function(&self, name: &str) -> Option<&Value> {
        self.globals.get(name)
    }

    /// Calls a function of the file. Also returns the place of its `return`.
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

    fn deeper(&mut self, place: Place) -> Ran<()> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(Fault::at(place, "this is nested too deeply"));
        }
        Ok(())
    }
}

/// Adds a place to an error.
fn at(place: Place) -> impl Fn(String) -> Fault {
    move |what| Fault::at(place, what)
}
