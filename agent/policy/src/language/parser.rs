//! From tokens to a tree. Recursive descent, as deep as [`DEEPEST`] and no deeper: the tree can be walked and dropped
//! without a thought for the stack.

use std::sync::Arc;

use super::lexer::{Token, tokens};
use super::tree::{Clause, Expr, Function, Item, Kind, Module, Name, Statement, Target};
use super::{Fault, Place};

/// How deep statements and expressions may be nested.
const DEEPEST: u32 = 80;

/// How many signs may stand in a row in one expression, as in `a + b + c`.
const LONGEST_CHAIN: u32 = 40;

struct Parser {
    tokens: Vec<(Token, Place)>,
    at: usize,
    depth: u32,
    /// Whether inside a function, and a loop of it.
    in_function: bool,
    loops: u32,
    locals: Vec<Name>,
}

type Parsed<T> = Result<T, Fault>;

/// Reads a file.
pub(super) fn parse(text: &str) -> Parsed<Module> {
    let tokens = tokens(text)?;
    let mut parser = Parser { tokens, at: 0, depth: 0, in_function: false, loops: 0, locals: Vec::new() };
    parser.module()
}

impl Parser {
    fn module(&mut self) -> Parsed<Module> {
        let mut module = Module::default();
        loop {
            if self.take_sign_token(&Token::Newline) {
                continue;
            }
            match self.peek() {
                Token::End => return Ok(module),
                Token::Keyword("def") => module.items.push(Item::Function(Arc::new(self.function()?))),
                Token::Text(_) => {
                    // Words for the reader.
                    self.next();
                    self.end_of_line()?;
                }
                Token::Keyword("if" | "for" | "return") => {
                    return self.wrong("at the top level there are only constants and functions");
                }
                _ => {
                    let place = self.place();
                    let Statement::Assign(place_of, target, value) = self.simple()? else {
                        return Err(Fault::at(
                            place,
                            "at the top level there are only constants and functions",
                        ));
                    };
                    self.end_of_line()?;
                    module.items.push(Item::Constant(place_of, target, value));
                }
            }
        }
    }

    fn function(&mut self) -> Parsed<Function> {
        let place = self.place();
        self.next();
        let name = self.name("the function's name")?;
        self.sign("(")?;
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        while !self.take(")") {
            let at = self.place();
            let parameter = self.name("a parameter's name")?;
            if parameters.iter().any(|(known, _)| *known == parameter) {
                return Err(Fault::at(at, format!("{parameter} is there twice")));
            }
            let default = if self.take("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.iter().any(|(_, default)| default.is_some()) {
                return Err(Fault::at(at, "parameters without a default come first"));
            }
            parameters.push((parameter, default));
            if !self.take(",") {
                self.sign(")")?;
                break;
            }
        }
        self.in_function = true;
        self.locals = parameters.iter().map(|(name, _)| name.clone()).collect();
        let body = self.block()?;
        self.in_function = false;
        Ok(Function { name, place, parameters, locals: std::mem::take(&mut self.locals), body })
    }

    /// `:`, and what is indented below it or stands behind it.
    fn block(&mut self) -> Parsed<Vec<Statement>> {
        self.sign(":")?;
        if !self.take_sign_token(&Token::Newline) {
            let statement = self.simple()?;
            self.end_of_line()?;
            return Ok(vec![statement]);
        }
        if !self.take_sign_token(&Token::Indent) {
            return self.wrong("the block after `:` must be indented; write `pass` for an empty one");
        }
        self.deeper()?;
        let mut statements = Vec::new();
        while !self.take_sign_token(&Token::Dedent) {
            statements.push(self.statement()?);
        }
        self.depth -= 1;
        Ok(statements)
    }

    fn statement(&mut self) -> Parsed<Statement> {
        match self.peek() {
            Token::Keyword("if") => self.if_statement(),
            Token::Keyword("for") => {
                let place = self.place();
                self.next();
                let target = self.loop_target()?;
                self.keyword("in")?;
                let over = self.expression()?;
                self.loops += 1;
                let body = self.block()?;
                self.loops -= 1;
                Ok(Statement::For(place, target, over, body))
            }
            Token::Keyword("def") => self.wrong("functions are defined at the top level"),
            _ => {
                let statement = self.simple()?;
                self.end_of_line()?;
                Ok(statement)
            }
        }
    }

    fn if_statement(&mut self) -> Parsed<Statement> {
        self.next();
        let mut branches = vec![(self.expression()?, self.block()?)];
        loop {
            match self.peek() {
                Token::Keyword("elif") => {
                    self.next();
                    branches.push((self.expression()?, self.block()?));
                }
                Token::Keyword("else") => {
                    self.next();
                    return Ok(Statement::If(branches, self.block()?));
                }
                _ => return Ok(Statement::If(branches, Vec::new())),
            }
        }
    }

    fn simple(&mut self) -> Parsed<Statement> {
        let place = self.place();
        match self.peek() {
            Token::Keyword("pass") => {
                self.next();
                return Ok(Statement::Pass);
            }
            Token::Keyword(word @ ("break" | "continue")) => {
                let word = *word;
                if self.loops == 0 {
                    return self.wrong("this belongs into a loop");
                }
                self.next();
                return Ok(if word == "break" { Statement::Break } else { Statement::Continue });
            }
            Token::Keyword("return") => {
                self.next();
                if matches!(self.peek(), Token::Newline) {
                    return Ok(Statement::Return(place, None));
                }
                return Ok(Statement::Return(place, Some(self.expressions()?)));
            }
            _ => {}
        }
        let left = self.expressions()?;
        if self.take("=") {
            let target = self.target(left)?;
            let value = self.expressions()?;
            return Ok(Statement::Assign(place, target, value));
        }
        for (sign, operator) in
            [("+=", "+"), ("-=", "-"), ("*=", "*"), ("/=", "/"), ("//=", "//"), ("%=", "%")]
        {
            if self.take(sign) {
                let target = self.target(left)?;
                if matches!(target, Target::Tuple(_)) {
                    return Err(Fault::at(place, format!("only one thing can be changed by {sign}")));
                }
                let value = self.expressions()?;
                return Ok(Statement::Change(place, target, operator, value));
            }
        }
        Ok(Statement::Expr(left))
    }

    fn target(&mut self, from: Expr) -> Parsed<Target> {
        Ok(match from.kind {
            Kind::Name(name) => {
                self.local(&name);
                Target::Name(name)
            }
            Kind::Tuple(parts) | Kind::List(parts) => {
                let parts: Parsed<Vec<Target>> = parts.into_iter().map(|part| self.target(part)).collect();
                Target::Tuple(parts?)
            }
            Kind::Index(pair) => Target::Index(pair),
            Kind::Field(..) => return Err(Fault::at(from.place, "fields cannot be changed")),
            _ => return Err(Fault::at(from.place, "nothing can be assigned to this")),
        })
    }

    fn local(&mut self, name: &Name) {
        if self.in_function && !self.locals.contains(name) {
            self.locals.push(name.clone());
        }
    }

    /// The names between `for` and `in`.
    fn loop_target(&mut self) -> Parsed<Target> {
        let bracket = self.take("(");
        let mut names = Vec::new();
        loop {
            let name = self.name("a name")?;
            self.local(&name);
            names.push(Target::Name(name));
            if !self.take(",") {
                break;
            }
        }
        if bracket {
            self.sign(")")?;
        }
        Ok(match names.pop() {
            Some(only) if names.is_empty() => only,
            last => {
                names.extend(last);
                Target::Tuple(names)
            }
        })
    }

    /// One expression, or several with commas between them: a tuple.
    fn expressions(&mut self) -> Parsed<Expr> {
        let first = self.expression()?;
        if !matches!(self.peek(), Token::Sign(",")) {
            return Ok(first);
        }
        let place = first.place;
        let mut parts = vec![first];
        while self.take(",") {
            parts.push(self.expression()?);
        }
        Ok(Expr { place, kind: Kind::Tuple(parts) })
    }

    fn expression(&mut self) -> Parsed<Expr> {
        self.deeper()?;
        let value = self.binary(0)?;
        let whole = if self.take_keyword("if") {
            let condition = self.binary(0)?;
            self.keyword("else")?;
            let otherwise = self.expression()?;
            Expr { place: value.place, kind: Kind::If(Box::new((value, condition, otherwise))) }
        } else {
            value
        };
        self.depth -= 1;
        Ok(whole)
    }

    /// Signs that bind at least so tightly.
    fn binary(&mut self, tight: u8) -> Parsed<Expr> {
        self.deeper()?;
        let place = self.place();
        let mut left = if tight <= NOT && self.take_keyword("not") {
            Expr { place, kind: Kind::Not(Box::new(self.binary(NOT)?)) }
        } else {
            self.unary()?
        };
        let mut chain = 0;
        while let Some((operator, binds)) = self.operator().filter(|(_, binds)| *binds >= tight) {
            chain += 1;
            if chain > LONGEST_CHAIN {
                return self.wrong("this expression is too long; give its parts names");
            }
            let place = self.place();
            self.next();
            if operator == "not in" {
                self.keyword("in")?;
            }
            let right = self.binary(binds + 1)?;
            if binds == COMPARE && self.operator().is_some_and(|(_, next)| next == COMPARE) {
                return self.wrong("comparisons cannot be chained; join them with `and`");
            }
            let pair = Box::new((left, right));
            let kind = match operator {
                "and" => Kind::And(pair),
                "or" => Kind::Or(pair),
                operator => Kind::Binary(operator, pair),
            };
            left = Expr { place, kind };
        }
        self.depth -= 1;
        Ok(left)
    }

    /// The sign between two values that comes next, and how tightly it binds.
    fn operator(&self) -> Option<(&'static str, u8)> {
        Some(match self.peek() {
            Token::Keyword("or") => ("or", OR),
            Token::Keyword("and") => ("and", AND),
            Token::Keyword("in") => ("in", COMPARE),
            Token::Keyword("not")
                if matches!(self.tokens.get(self.at + 1), Some((Token::Keyword("in"), _))) =>
            {
                ("not in", COMPARE)
            }
            Token::Sign(sign @ ("==" | "!=" | "<" | ">" | "<=" | ">=")) => (sign, COMPARE),
            Token::Sign(sign @ ("+" | "-")) => (sign, SUM),
            Token::Sign(sign @ ("*" | "/" | "//" | "%")) => (sign, PRODUCT),
            _ => return None,
        })
    }

    fn unary(&mut self) -> Parsed<Expr> {
        let place = self.place();
        if self.take("-") {
            self.deeper()?;
            let value = self.unary()?;
            self.depth -= 1;
            return Ok(Expr { place, kind: Kind::Minus(Box::new(value)) });
        }
        let mut value = self.atom()?;
        let mut chain = 0;
        loop {
            chain += 1;
            if chain > LONGEST_CHAIN {
                return self.wrong("this expression is too long; give its parts names");
            }
            let place = self.place();
            value = if self.take(".") {
                Expr { place, kind: Kind::Field(Box::new(value), self.name("a field's name")?) }
            } else if self.take("(") {
                Expr { place, kind: Kind::Call(Box::new(value), self.arguments()?) }
            } else if self.take("[") {
                Expr { place, kind: self.index(value)? }
            } else {
                return Ok(value);
            };
        }
    }

    fn arguments(&mut self) -> Parsed<Vec<(Option<Name>, Expr)>> {
        let mut arguments: Vec<(Option<Name>, Expr)> = Vec::new();
        while !self.take(")") {
            let place = self.place();
            let named = matches!(
                (self.peek(), self.tokens.get(self.at + 1)),
                (Token::Name(_), Some((Token::Sign("="), _)))
            );
            let name = if named { Some(self.name("an argument's name")?) } else { None };
            if named {
                self.sign("=")?;
            }
            if name.is_none() && arguments.last().is_some_and(|(name, _)| name.is_some()) {
                return Err(Fault::at(place, "arguments without a name come first"));
            }
            if name.is_some() && arguments.iter().any(|(known, _)| *known == name) {
                return Err(Fault::at(place, "this argument is given twice"));
            }
            arguments.push((name, self.expression()?));
            if !self.take(",") {
                self.sign(")")?;
                break;
            }
        }
        Ok(arguments)
    }

    fn index(&mut self, of: Expr) -> Parsed<Kind> {
        let from = if matches!(self.peek(), Token::Sign(":")) { None } else { Some(self.expression()?) };
        if self.take(":") {
            let to = if matches!(self.peek(), Token::Sign("]")) { None } else { Some(self.expression()?) };
            self.sign("]")?;
            return Ok(Kind::Slice(Box::new(of), from.map(Box::new), to.map(Box::new)));
        }
        self.sign("]")?;
        match from {
            Some(index) => Ok(Kind::Index(Box::new((of, index)))),
            None => self.wrong("an index is missing"),
        }
    }

    fn atom(&mut self) -> Parsed<Expr> {
        let place = self.place();
        let kind = match self.next() {
            Token::Keyword("None") => Kind::None,
            Token::Keyword("True") => Kind::Bool(true),
            Token::Keyword("False") => Kind::Bool(false),
            Token::Int(number) => Kind::Int(number),
            Token::Float(number) => Kind::Float(number),
            Token::Name(name) => Kind::Name(name.into()),
            Token::Text(text) => {
                let mut text = text;
                while let Token::Text(more) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Kind::Text(text.into())
            }
            Token::Sign("(") => self.tuple()?,
            Token::Sign("[") => self.list()?,
            Token::Sign("{") => self.dict()?,
            other => {
                return Err(Fault::at(place, format!("a value is missing before {}", other.words())));
            }
        };
        Ok(Expr { place, kind })
    }

    fn tuple(&mut self) -> Parsed<Kind> {
        if self.take(")") {
            return Ok(Kind::Tuple(Vec::new()));
        }
        let first = self.expression()?;
        if self.take(")") {
            return Ok(first.kind);
        }
        let mut parts = vec![first];
        while self.take(",") {
            if matches!(self.peek(), Token::Sign(")")) {
                break;
            }
            parts.push(self.expression()?);
        }
        self.sign(")")?;
        Ok(Kind::Tuple(parts))
    }

    fn list(&mut self) -> Parsed<Kind> {
        if self.take("]") {
            return Ok(Kind::List(Vec::new()));
        }
        let first = self.expression()?;
        if matches!(self.peek(), Token::Keyword("for")) {
            let clauses = self.clauses()?;
            self.sign("]")?;
            return Ok(Kind::ListOf(Box::new(first), clauses));
        }
        let mut parts = vec![first];
        while self.take(",") {
            if matches!(self.peek(), Token::Sign("]")) {
                break;
            }
            parts.push(self.expression()?);
        }
        self.sign("]")?;
        Ok(Kind::List(parts))
    }

    fn dict(&mut self) -> Parsed<Kind> {
        let mut parts = Vec::new();
        while !self.take("}") {
            let key = self.expression()?;
            self.sign(":")?;
            let value = self.expression()?;
            if parts.is_empty() && matches!(self.peek(), Token::Keyword("for")) {
                let clauses = self.clauses()?;
                self.sign("}")?;
                return Ok(Kind::DictOf(Box::new((key, value)), clauses));
            }
            parts.push((key, value));
            if !self.take(",") {
                self.sign("}")?;
                break;
            }
        }
        Ok(Kind::Dict(parts))
    }

    fn clauses(&mut self) -> Parsed<Vec<Clause>> {
        let mut clauses = Vec::new();
        loop {
            if clauses.len() as u32 > LONGEST_CHAIN {
                return self.wrong("this expression is too long; give its parts names");
            }
            if self.take_keyword("for") {
                let target = self.loop_target()?;
                self.keyword("in")?;
                clauses.push(Clause::For(target, self.binary(0)?));
            } else if self.take_keyword("if") {
                clauses.push(Clause::If(self.binary(0)?));
            } else {
                return Ok(clauses);
            }
        }
    }

    fn deeper(&mut self) -> Parsed<()> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return self.wrong("this is nested too deeply; put a part of it into a function");
        }
        Ok(())
    }

    fn peek(&self) -> &Token {
        self.tokens.get(self.at).map_or(&Token::End, |(token, _)| token)
    }

    fn place(&self) -> Place {
        let last = self.tokens.last().map_or(Place { line: 1, column: 1 }, |(_, place)| *place);
        self.tokens.get(self.at).map_or(last, |(_, place)| *place)
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn take_sign_token(&mut self, token: &Token) -> bool {
        let there = self.peek() == token;
        if there {
            self.at += 1;
        }
        there
    }

    fn take(&mut self, sign: &'static str) -> bool {
        self.take_sign_token(&Token::Sign(sign))
    }

    fn take_keyword(&mut self, word: &'static str) -> bool {
        self.take_sign_token(&Token::Keyword(word))
    }

    fn sign(&mut self, sign: &'static str) -> Parsed<()> {
        if self.take(sign) {
            Ok(())
        } else {
            self.wrong(&format!("{sign:?} is missing before {}", self.peek().words()))
        }
    }

    fn keyword(&mut self, word: &'static str) -> Parsed<()> {
        if self.take_keyword(word) {
            Ok(())
        } else {
            self.wrong(&format!("`{word}` is missing before {}", self.peek().words()))
        }
    }

    fn name(&mut self, what: &str) -> Parsed<Name> {
        match self.peek().clone() {
            Token::Name(name) => {
                self.at += 1;
                Ok(name.into())
            }
            other => self.wrong(&format!("{what} is missing before {}", other.words())),
        }
    }

    fn end_of_line(&mut self) -> Parsed<()> {
        if self.take_sign_token(&Token::Newline) || matches!(self.peek(), Token::End) {
            return Ok(());
        }
        self.wrong(&format!("the line should end before {}", self.peek().words()))
    }

    fn wrong<T>(&self, what: &str) -> Parsed<T> {
        Err(Fault::at(self.place(), what))
    }
}

const OR: u8 = 1;
const AND: u8 = 2;
const NOT: u8 = 3;
const COMPARE: u8 = 4;
const SUM: u8 = 5;
const PRODUCT: u8 = 6;
