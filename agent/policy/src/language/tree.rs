//! The syntax tree of a policy.

use std::sync::Arc;

use super::Place;

/// A name, shared by all its uses.
pub(crate) type Name = Arc<str>;

/// An expression with its place.
#[derive(Clone, Debug)]
pub(crate) struct Expr {
    pub(crate) place: Place,
    pub(crate) kind: Kind,
}

/// The kind of an expression.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// `[item for … if …]`
    ListOf(Box<Expr>, Vec<Clause>),
    /// `{key: value for … if …}`
    DictOf(Box<(Expr, Expr)>, Vec<Clause>),
    Not(Box<Expr>),
    Minus(Box<Expr>),
    And(Box<(Expr, Expr)>),
    Or(Box<(Expr, Expr)>),
    Binary(&'static str, Box<(Expr, Expr)>),
    /// Value, condition, value if the condition is false.
    If(Box<(Expr, Expr, Expr)>),
    Field(Box<Expr>, Name),
    Index(Box<(Expr, Expr)>),
    Slice(Box<Expr>, Option<Box<Expr>>, Option<Box<Expr>>),
    Call(Box<Expr>, Vec<(Option<Name>, Expr)>),
}

/// A part of a comprehension.
#[derive(Clone, Debug)]
pub(crate) enum Clause {
    For(Target, Expr),
    If(Expr),
}

/// The target of an assignment.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Name(Name),
    Tuple(Vec<Target>),
    Index(Box<(Expr, Expr)>),
}

/// A statement.
#[derive(Clone, Debug)]
pub(crate) enum Statement {
    Expr(Expr),
    Assign(Place, Target, Expr),
    /// `target += value` and similar.
    Change(Place, Target, &'static str, Expr),
    /// Conditions with their blocks, and the `else` block.
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    For(Place, Target, Expr, Vec<Statement>),
    Return(Place, Option<Expr>),
    Break,
    Continue,
    Pass,
}

/// A function.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: Name,
    pub(crate) place: Place,
    /// Parameters with their default values.
    pub(crate) parameters: Vec<(Name, Option<Expr>)>,
    /// All names that the function assigns.
    pub(crate) locals: Vec<Name>,
    pub(crate) body: Vec<Statement>,
}

/// A file: constants and functions, in order.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) items: Vec<Item>,
}

/// An item at the top level.
#[derive(Debug)]
pub(crate) enum Item {
    Constant(Place, Target, Expr),
    Function(Arc<Function>),
}
