//! What a policy's text is made of.

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

/// What an expression is.
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
    /// Value, condition, value otherwise.
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

/// What is assigned to.
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
    /// `target += value` and its like.
    Change(Place, Target, &'static str, Expr),
    /// Conditions with their blocks, and what is done otherwise.
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
    /// Parameters with what they are if they are not given.
    pub(crate) parameters: Vec<(Name, Option<Expr>)>,
    /// All names that are assigned in it.
    pub(crate) locals: Vec<Name>,
    pub(crate) body: Vec<Statement>,
}

/// A whole file: constants and functions in their order.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) items: Vec<Item>,
}

/// Something at the top level.
#[derive(Debug)]
pub(crate) enum Item {
    Constant(Place, Target, Expr),
    Function(Arc<Function>),
}
