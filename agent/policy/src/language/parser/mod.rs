//! From tokens to a tree: statements in `statements.rs`, expressions in `expressions.rs`. Recursive descent to a
//! depth of at most [`DEEPEST`], so that walking and dropping the tree cannot overflow the stack.

mod expressions;
mod statements;

use super::lexer::{Token, tokens};
use super::tree::{Module, Name};
use super::{Fault, Place};

/// The maximum nesting depth of statements and expressions.
const DEEPEST: u32 = 80;

/// The maximum number of operators in a row in one expression, as in `a + b + c`.
const LONGEST_CHAIN: u32 = 40;

struct Parser {
    tokens: Vec<(Token, Place)>,
    at: usize,
    depth: u32,
    /// Whether the parser is inside a function, and in how many of its loops.
    in_function: bool,
    loops: u32,
    locals: Vec<Name>,
}

type Parsed<T> = Result<T, Fault>;

/// Parses a file.
pub(super) fn parse(text: &str) -> Parsed<Module> {
    let tokens = tokens(text)?;
    let mut parser = Parser { tokens, at: 0, depth: 0, in_function: false, loops: 0, locals: Vec::new() };
    parser.module()
}

impl Parser {
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
