//! Expressions, by operator precedence.

use super::{LONGEST_CHAIN, Parsed, Parser};
use crate::language::Fault;
use crate::language::lexer::Token;
use crate::language::tree::{Clause, Expr, Kind, Name};

const OR: u8 = 1;
const AND: u8 = 2;
const NOT: u8 = 3;
const COMPARE: u8 = 4;
const SUM: u8 = 5;
const PRODUCT: u8 = 6;

impl Parser {
    /// One expression, or several separated by commas: a tuple.
    pub(super) fn expressions(&mut self) -> Parsed<Expr> {
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

    pub(super) fn expression(&mut self) -> Parsed<Expr> {
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

    /// Binary operators with at least this precedence.
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

    /// The next binary operator and its precedence.
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
}
