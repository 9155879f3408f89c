//! From text to tokens. Lines are joined inside brackets; blocks are marked by `Indent` and `Dedent`.

use super::{Fault, Place};

/// A name, a literal or a sign.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Keyword(&'static str),
    Int(i64),
    Float(f64),
    Text(String),
    Sign(&'static str),
    Newline,
    Indent,
    Dedent,
    End,
}

impl Token {
    /// Its name in messages.
    pub(super) fn words(&self) -> String {
        match self {
            Token::Name(name) => format!("{name:?}"),
            Token::Keyword(word) | Token::Sign(word) => format!("{word:?}"),
            Token::Int(number) => number.to_string(),
            Token::Float(number) => number.to_string(),
            Token::Text(_) => "a string".to_owned(),
            Token::Newline => "the end of the line".to_owned(),
            Token::Indent => "a deeper indentation".to_owned(),
            Token::Dedent => "the end of the block".to_owned(),
            Token::End => "the end of the file".to_owned(),
        }
    }
}

const KEYWORDS: [&str; 16] = [
    "and", "or", "not", "in", "if", "elif", "else", "for", "def", "return", "pass", "break", "continue",
    "True", "False", "None",
];

/// Keywords of other languages that are not supported here, each with the alternative.
const NOT_HERE: [(&str, &str); 8] = [
    ("while", "there is no `while`: loop over a list or a range"),
    ("lambda", "there is no `lambda`: define a function with `def` at the top level"),
    ("import", "there is no `import`: a policy is one file"),
    ("load", "there is no `load`: a policy is one file"),
    ("class", "there is no `class`: use `struct(...)`"),
    ("try", "there is no `try`: the built-in policy replaces one that fails"),
    ("raise", "there is no `raise`: call `fail(\"why\")`"),
    ("global", "there is no `global`: what is defined at the top level cannot be changed"),
];

/// Longest first, so that `//=` is not read as `//` and `=`.
const SIGNS: [&str; 29] = [
    "//=", "**", "==", "!=", "<=", ">=", "//", "+=", "-=", "*=", "/=", "%=", "->", "(", ")", "[", "]", "{",
    "}", ",", ":", ".", "=", "<", ">", "+", "-", "*", "/",
];

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    line_begins: usize,
    brackets: u32,
    indents: Vec<usize>,
    tokens: Vec<(Token, Place)>,
}

/// The tokens of a text, each with its place.
pub(super) fn tokens(text: &str) -> Result<Vec<(Token, Place)>, Fault> {
    let mut lexer =
        Lexer { text, at: 0, line: 1, line_begins: 0, brackets: 0, indents: vec![0], tokens: Vec::new() };
    lexer.run()?;
    Ok(lexer.tokens)
}

impl Lexer<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        let mut line_is_new = true;
        while self.at < self.text.len() {
            if line_is_new && self.brackets == 0 {
                line_is_new = false;
                if !self.indentation()? {
                    line_is_new = true;
                    continue;
                }
            }
            match self.rest().as_bytes().first() {
                Some(b'\n') => {
                    if self.brackets == 0 {
                        self.push(Token::Newline);
                        line_is_new = true;
                    }
                    self.next_line();
                }
                Some(b' ' | b'\t' | b'\r') => self.at += 1,
                Some(b'#') => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                Some(b'\\') if self.rest()[1..].starts_with(['\n', '\r']) => {
                    self.at += self.rest().find('\n').unwrap_or(0);
                    self.next_line();
                }
                Some(_) => self.token()?,
                None => break,
            }
        }
        if !matches!(self.tokens.last(), Some((Token::Newline, _)) | None) {
            self.push(Token::Newline);
        }
        for _ in 1..self.indents.len() {
            self.push(Token::Dedent);
        }
        self.push(Token::End);
        Ok(())
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn place(&self) -> Place {
        Place { line: self.line, column: u32::try_from(self.at - self.line_begins + 1).unwrap_or(u32::MAX) }
    }

    fn push(&mut self, token: Token) {
        let place = self.place();
        self.tokens.push((token, place));
    }

    fn next_line(&mut self) {
        self.at += 1;
        self.line += 1;
        self.line_begins = self.at;
    }

    /// Reads the indentation of the line. False if the line is empty.
    fn indentation(&mut self) -> Result<bool, Fault> {
        let rest = self.rest();
        let width = rest.len() - rest.trim_start_matches(' ').len();
        let code = &rest[width..];
        if code.starts_with('\t') {
            return Err(Fault::at(self.place(), "indent with spaces, not with tabs"));
        }
        if code.is_empty() || code.starts_with(['\n', '\r', '#']) {
            let to_end = rest.find('\n').unwrap_or(rest.len());
            self.at += to_end;
            if self.at < self.text.len() {
                self.next_line();
            }
            return Ok(false);
        }
        self.at += width;
        let now = self.indents.last().copied().unwrap_or(0);
        if width > now {
            self.indents.push(width);
            self.push(Token::Indent);
        }
        while self.indents.last().is_some_and(|indent| *indent > width) {
            self.indents.pop();
            self.push(Token::Dedent);
        }
        if self.indents.last() != Some(&width) {
            return Err(Fault::at(self.place(), "this indentation matches no enclosing block"));
        }
        Ok(true)
    }

    fn token(&mut self) -> Result<(), Fault> {
        let place = self.place();
        let rest = &self.text[self.at..];
        let first = rest.chars().next().unwrap_or(' ');
        if first.is_ascii_digit()
            || (first == '.' && rest[1..].starts_with(|next: char| next.is_ascii_digit()))
        {
            return self.number(place);
        }
        if first == '"' || first == '\'' {
            return self.string(place, false);
        }
        if first == 'r' && rest[1..].starts_with(['"', '\'']) {
            self.at += 1;
            return self.string(place, true);
        }
        if first.is_ascii_alphabetic() || first == '_' {
            let length = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            let name = &rest[..length.unwrap_or(rest.len())];
            if let Some((_, instead)) = NOT_HERE.iter().find(|(word, _)| *word == name) {
                return Err(Fault::at(place, *instead));
            }
            self.at += name.len();
            let token = KEYWORDS.iter().find(|word| **word == name);
            self.tokens.push((
                token.map_or_else(|| Token::Name(name.to_owned()), |word| Token::Keyword(word)),
                place,
            ));
            return Ok(());
        }
        let sign = SIGNS.iter().chain(&["%"]).find(|sign| rest.starts_with(**sign));
        let Some(sign) = sign.filter(|sign| !["**", "->"].contains(*sign)) else {
            return Err(Fault::at(place, format!("{first:?} has no meaning here")));
        };
        match *sign {
            "(" | "[" | "{" => self.brackets += 1,
            ")" | "]" | "}" => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        self.at += sign.len();
        self.tokens.push((Token::Sign(sign), place));
        Ok(())
    }

    fn number(&mut self, place: Place) -> Result<(), Fault> {
        let rest = &self.text[self.at..];
        let mut length = 0;
        let bytes = rest.as_bytes();
        let mut float = false;
        while let Some(byte) = bytes.get(length) {
            match byte {
                b'0'..=b'9' | b'_' => {}
                b'.' => float = true,
                b'e' | b'E' => {
                    float = true;
                    if matches!(bytes.get(length + 1), Some(b'+' | b'-')) {
                        length += 1;
                    }
                }
                byte if byte.is_ascii_alphabetic() => {
                    return Err(Fault::at(place, "a number is written in digits, like 30 or 0.5"));
                }
                _ => break,
            }
            length += 1;
        }
        let text = rest[..length].replace('_', "");
        let token = if float {
            text.parse().ok().filter(|number: &f64| number.is_finite()).map(Token::Float)
        } else {
            text.parse().ok().map(Token::Int)
        };
        self.at += length;
        let token =
            token.ok_or_else(|| Fault::at(place, format!("{text} is not a number that can be held")))?;
        self.tokens.push((token, place));
        Ok(())
    }

    /// A string, in one or three quotes of either kind.
    fn string(&mut self, place: Place, raw: bool) -> Result<(), Fault> {
        let quote = if self.rest().starts_with('"') { '"' } else { '\'' };
        let three: String = [quote; 3].iter().collect();
        let long = self.rest().starts_with(&three);
        self.at += if long { 3 } else { 1 };
        let mut value = String::new();
        loop {
            let rest = &self.text[self.at..];
            if long && rest.starts_with(&three) {
                self.at += 3;
                break;
            }
            let Some(letter) = rest.chars().next() else {
                return Err(Fault::at(place, "this string has no end"));
            };
            match letter {
                letter if letter == quote && !long => {
                    self.at += 1;
                    break;
                }
                '\n' if !long => return Err(Fault::at(place, "this string has no end on its line")),
                '\n' => {
                    value.push('\n');
                    self.next_line();
                }
                '\\' if !raw => {
                    let escaped = rest[1..].chars().next().unwrap_or(' ');
                    match escaped {
                        'n' => value.push('\n'),
                        't' => value.push('\t'),
                        '\\' | '"' | '\'' => value.push(escaped),
                        '\n' => {}
                        _ => {
                            let what = format!(
                                "\\{escaped} is not understood; there are \\n, \\t, \\\\, \\\" and \\'"
                            );
                            return Err(Fault::at(self.place(), what));
                        }
                    }
                    if escaped == '\n' {
                        self.at += 1;
                        self.next_line();
                    } else {
                        self.at += 1 + escaped.len_utf8();
                    }
                }
                letter => {
                    value.push(letter);
                    self.at += letter.len_utf8();
                }
            }
        }
        self.tokens.push((Token::Text(value), place));
        Ok(())
    }
}
