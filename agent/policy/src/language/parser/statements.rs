//! Functions, blocks and statements.

use std::sync::Arc;

use super::{Parsed, Parser};
use crate::language::Fault;
use crate::language::lexer::Token;
use crate::language::tree::{Expr, Function, Item, Kind, Module, Name, Statement, Target};

impl Parser {
    pub(super) fn module(&mut self) -> Parsed<Module> {
        let mut module = Module::default();
        loop {
            if self.take_sign_token(&Token::Newline) {
                continue;
            }
            match self.peek() {
                Token::End => return Ok(module),
                Token::Keyword("def") => module.items.push(Item::Function(Arc::new(self.function()?))),
                Token::Text(_) => {
                    // A docstring.
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
                return Err(Fault::at(at, format!("the parameter {parameter} is given twice")));
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

    /// `:`, and the block that is indented below or follows on the line.
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
                    return self.wrong("this is only allowed in a loop");
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
    pub(super) fn loop_target(&mut self) -> Parsed<Target> {
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
}
