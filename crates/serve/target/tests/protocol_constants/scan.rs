//! Finds numbers in Rust sources: constants, discriminants (of `open_enum!` too), match arms that
//! give a variant its number or a number its variant, and the commands of the SCSI table.

use std::collections::HashMap;

/// One number of a source file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    pub(crate) file: String,
    /// With the module, type or enum that it is in.
    pub(crate) name: String,
    /// In hexadecimal; several joined by commas, code pairs too.
    pub(crate) value: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Number(u128),
    Text(String),
    Sign(char),
}

use Token::{Number, Sign, Text, Word};

/// The tokens of `text` without comments and attributes; what `#[cfg(test)]` stands before ends it.
fn tokens(text: &str) -> Vec<Token> {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let chars: Vec<char> = text.chars().collect();
    let mut out = Vec::new();
    let mut i = 0;
    while let Some(&c) = chars.get(i) {
        let rest = &chars[i..];
        let word = rest.iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
        i += match c {
            '/' if rest.get(1) == Some(&'/') => rest.iter().take_while(|c| **c != '\n').count(),
            '"' => string(rest, &mut out),
            '\'' if rest.get(2) == Some(&'\'') => 3,
            '\'' if rest.get(1) == Some(&'\\') => 3 + usize::from(rest.get(3) == Some(&'\'')),
            _ if c.is_ascii_digit() => {
                out.extend(number(&rest[..word]).map(Number));
                word
            }
            _ if word > 0 => {
                out.push(Word(rest[..word].iter().collect()));
                word
            }
            _ => {
                if !c.is_whitespace() {
                    out.push(Sign(c));
                }
                1
            }
        };
    }
    out
}

fn string(rest: &[char], out: &mut Vec<Token>) -> usize {
    let mut len = 1;
    while rest.get(len).is_some_and(|c| *c != '"') {
        len += 1 + usize::from(rest[len] == '\\');
    }
    let end = len.min(rest.len());
    out.push(Text(rest[1..end].iter().collect()));
    end + 1
}

fn number(digits: &[char]) -> Option<u128> {
    let text: String = digits.iter().filter(|c| **c != '_').collect();
    let text = ["u8", "u16", "u32", "u64", "u128", "usize"]
        .iter()
        .find_map(|suffix| text.strip_suffix(suffix))
        .unwrap_or(&text);
    match text.get(..2) {
        Some("0x") => u128::from_str_radix(&text[2..], 16).ok(),
        Some("0b") => u128::from_str_radix(&text[2..], 2).ok(),
        _ => text.parse().ok(),
    }
}

/// Reads expressions of numbers: `|`, `<<`, `+`, `-`, `*`, groups, casts, and calls that wrap.
struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    known: &'a HashMap<String, Vec<u128>>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn takes(&mut self, sign: char) -> bool {
        let there = self.peek() == Some(&Sign(sign));
        self.at += usize::from(there);
        there
    }

    fn or(&mut self) -> Option<Vec<u128>> {
        let mut left = self.shift()?;
        while self.takes('|') {
            left = both(&left, &self.shift()?, |a, b| Some(a | b))?;
        }
        Some(left)
    }

    fn shift(&mut self) -> Option<Vec<u128>> {
        let mut left = self.sum()?;
        while self.takes('<') {
            if !self.takes('<') {
                return None;
            }
            left = both(&left, &self.sum()?, |a, b| a.checked_shl(b.try_into().ok()?))?;
        }
        Some(left)
    }

    fn sum(&mut self) -> Option<Vec<u128>> {
        let mut left = self.product()?;
        loop {
            if self.takes('+') {
                left = both(&left, &self.product()?, u128::checked_add)?;
            } else if self.takes('-') {
                left = both(&left, &self.product()?, u128::checked_sub)?;
            } else {
                return Some(left);
            }
        }
    }

    fn product(&mut self) -> Option<Vec<u128>> {
        let mut left = self.atom()?;
        while self.takes('*') {
            left = both(&left, &self.atom()?, u128::checked_mul)?;
        }
        Some(left)
    }

    fn atom(&mut self) -> Option<Vec<u128>> {
        let token = self.peek()?.clone();
        self.at += 1;
        let value = match token {
            Number(n) => vec![n],
            Sign('(') => self.list(')')?,
            Sign('[') => self.list(']')?,
            Word(word) => self.named(word)?,
            _ => return None,
        };
        if self.peek() == Some(&Word("as".to_owned())) {
            self.at += 2;
        }
        Some(value)
    }

    /// Values up to `end`, also of nested groups.
    fn list(&mut self, end: char) -> Option<Vec<u128>> {
        let mut values = Vec::new();
        while !self.takes(end) {
            values.extend(self.or()?);
            if !self.takes(',') && self.peek() != Some(&Sign(end)) {
                return None;
            }
        }
        Some(values)
    }

    /// A constant by its path, or a call that wraps a number.
    fn named(&mut self, mut word: String) -> Option<Vec<u128>> {
        while self.takes(':') {
            let type_name = word;
            if !self.takes(':') {
                return None;
            }
            let Some(Word(next)) = self.peek().cloned() else { return None };
            self.at += 1;
            word = next;
            if word == "MAX" {
                let bits = type_name.strip_prefix('u')?.parse::<u32>().ok()?;
                return Some(vec![u128::MAX >> (128 - bits)]);
            }
        }
        if !self.takes('(') {
            return self.known.get(&word).cloned();
        }
        let inner = self.list(')')?;
        // NVMe status: the type is part of the number.
        let kind = match word.as_str() {
            "generic" | "Self" | "ok" => 0x000,
            "specific" => 0x100,
            "media" => 0x200,
            "path" => 0x300,
            _ => return None,
        };
        Some(inner.into_iter().map(|n| kind | n).collect())
    }
}

fn both(a: &[u128], b: &[u128], f: fn(u128, u128) -> Option<u128>) -> Option<Vec<u128>> {
    match (a, b) {
        ([a], [b]) => Some(vec![f(*a, *b)?]),
        _ => None,
    }
}

/// The value that `tokens` begin with, and how many of them it takes.
fn value(tokens: &[Token], known: &HashMap<String, Vec<u128>>) -> Option<(Vec<u128>, usize)> {
    let mut reader = Reader { tokens, at: 0, known };
    let value = reader.or()?;
    Some((value, reader.at))
}

/// The numbers of a file.
pub(crate) fn found_in(file: &str, text: &str) -> Vec<Found> {
    let tokens = tokens(text);
    let mut walk = Walk {
        file,
        tokens: &tokens,
        known: HashMap::new(),
        inside: Vec::new(),
        found: Vec::new(),
    };
    for at in 0..tokens.len() {
        walk.step(at);
    }
    walk.found
}

struct Walk<'a> {
    file: &'a str,
    tokens: &'a [Token],
    known: HashMap<String, Vec<u128>>,
    /// Open braces: what they belong to, if it has a name, and whether it is an enum.
    inside: Vec<(Option<String>, bool)>,
    found: Vec<Found>,
}

impl Walk<'_> {
    fn word(&self, at: usize) -> Option<&str> {
        match self.tokens.get(at) {
            Some(Word(word)) => Some(word),
            _ => None,
        }
    }

    fn is(&self, at: usize, sign: char) -> bool {
        self.tokens.get(at) == Some(&Sign(sign))
    }

    fn step(&mut self, at: usize) {
        match &self.tokens[at] {
            Sign('{') => {
                let opened = self.opened_by(at);
                self.inside.push(opened);
            }
            Sign('}') => {
                self.inside.pop();
            }
            Word(word) if word == "const" || word == "static" => self.constant(at),
            Word(word) if word == "CommandEntry" => self.command(at),
            Word(_) if self.is(at + 1, '=') && self.inside.last().is_some_and(|i| i.1) => {
                self.keep(at, at + 2);
            }
            Sign('=') if self.is(at + 1, '>') => self.arm(at),
            _ => {}
        }
    }

    /// `mod x {`, `impl x {`, `impl t for x {`, `enum x {`, `enum x : u8 {`.
    fn opened_by(&self, at: usize) -> (Option<String>, bool) {
        let ends = |token: &Token| matches!(token, Sign('{' | '}' | ';'));
        let start = self.tokens[..at].iter().rposition(ends).map_or(0, |i| i + 1);
        let head = &self.tokens[start..at];
        let after = |key: &str| {
            let i = head.iter().rposition(|token| *token == Word(key.to_owned()))?;
            match head.get(i + 1) {
                Some(Word(name)) => Some(name.clone()),
                _ => None,
            }
        };
        if let Some(name) = after("enum") {
            return (Some(name), true);
        }
        (after("mod").or_else(|| after("for")).or_else(|| after("impl")), false)
    }

    /// `const NAME: type = value;`
    fn constant(&mut self, at: usize) {
        let Some(name) = self.word(at + 1).filter(|_| self.is(at + 2, ':')) else { return };
        let name = name.to_owned();
        let Some(equals) = (at + 3..self.tokens.len()).find(|i| self.is(*i, '=')) else { return };
        let Some((value, _)) = value(&self.tokens[equals + 1..], &self.known) else { return };
        self.known.insert(name, value);
        if self.word(at + 1) != Some("_") {
            self.keep(at + 1, equals + 1);
        }
    }

    /// `Self::Variant => number`, `number => Some(Self::Variant)`.
    fn arm(&mut self, at: usize) {
        let Some(Word(left)) = at.checked_sub(1).map(|i| &self.tokens[i]) else {
            return self.number_arm(at);
        };
        let of_self = at >= 4 && self.is(at - 2, ':') && self.word(at - 4) == Some("Self");
        if of_self && left.starts_with(char::is_uppercase) {
            self.keep(at - 1, at + 2);
        }
    }

    fn number_arm(&mut self, at: usize) {
        let Some(Number(number)) = at.checked_sub(1).map(|i| &self.tokens[i]) else { return };
        if at >= 2 && self.is(at - 2, '.') {
            return;
        }
        let number = *number;
        let end = (at + 2..self.tokens.len()).find(|i| self.is(*i, ','));
        let end = end.unwrap_or(at + 2);
        let of_self = (at + 2..end).find(|i| self.word(*i) == Some("Self"));
        if let Some(name) = of_self.and_then(|i| self.word(i + 3)) {
            let name = self.path(name);
            self.put(name, &[number]);
        }
    }

    /// `CommandEntry::new("NAME", access, usage, …)` of the SCSI commands:
    /// operation code, service action.
    fn command(&mut self, at: usize) {
        let Some(Text(name)) = self.tokens.get(at + 5) else { return };
        let name = name.replace(' ', "_");
        let commas: Vec<usize> =
            (at + 6..self.tokens.len()).filter(|i| self.is(*i, ',')).take(2).collect();
        let usage = commas.get(1).map_or(0, |comma| comma + 1);
        let value = match (self.word(usage), self.tokens.get(usage + 1)) {
            (Some(_), Some(Sign('('))) => self.usage_at(usage),
            (Some(constant), _) => {
                let is_it = |i: &usize| {
                    self.word(*i) == Some("const") && self.word(i + 1) == Some(constant)
                };
                let found = (0..at).find(is_it).expect("a usage is declared before the table");
                let equals = (found..at).find(|i| self.is(*i, '=')).expect("it has a value");
                self.usage_at(equals + 1)
            }
            _ => return,
        };
        self.put(name, &value);
    }

    /// Operation code, and service action where there is one, of an expression that makes a usage.
    fn usage_at(&self, at: usize) -> Vec<u128> {
        let maker = self.word(at).expect("a function makes it");
        let numbers: Vec<&Token> = self.tokens[at..]
            .iter()
            .take_while(|token| **token != Sign(';'))
            .filter(|token| matches!(token, Number(_)) || self.known_word(token).is_some())
            .take(2)
            .collect();
        let number = |i: usize| match numbers.get(i) {
            Some(Number(n)) => *n,
            Some(token) => self.known_word(token).expect("it is known"),
            None => 0,
        };
        let tail = &self.tokens[at..];
        let end = tail.iter().position(|token| *token == Sign(';')).unwrap_or(tail.len());
        let has_action = tail[..end].contains(&Word("with_service_action".to_owned()));
        match maker {
            "reserve_in" => vec![0x5e, number(0)],
            "reserve_out" => vec![0x5f, number(0)],
            "token" => vec![0x83, number(0)],
            "third_party" => vec![number(0), number(1)],
            _ if has_action && maker != "plain_six" => vec![number(0), number(1) & 0x1f],
            _ => vec![number(0)],
        }
    }

    fn known_word(&self, token: &Token) -> Option<u128> {
        // Service actions are declared in copy.rs, and checked there.
        const ACTIONS: [(&str, u128); 10] = [
            ("EXTENDED_COPY_LID1", 0x00),
            ("EXTENDED_COPY_LID4", 0x01),
            ("POPULATE_TOKEN", 0x10),
            ("WRITE_USING_TOKEN", 0x11),
            ("COPY_OPERATION_ABORT", 0x1c),
            ("COPY_STATUS_LID1", 0x00),
            ("OPERATING_PARAMETERS", 0x03),
            ("FAILED_SEGMENT_DETAILS", 0x04),
            ("COPY_STATUS_LID4", 0x05),
            ("ROD_TOKEN_INFORMATION", 0x07),
        ];
        let Word(word) = token else { return None };
        ACTIONS.iter().find(|(name, _)| name == word).map(|(_, value)| *value)
    }

    fn path(&self, name: &str) -> String {
        let inside = self.inside.iter().rev().find_map(|(container, _)| container.as_ref());
        inside.map_or_else(|| name.to_owned(), |container| format!("{container}::{name}"))
    }

    fn keep(&mut self, name: usize, from: usize) {
        let name = self.word(name).expect("it is a word").to_owned();
        if let Some((value, _)) = value(&self.tokens[from..], &self.known) {
            self.put(self.path(&name), &value);
        }
    }

    fn put(&mut self, name: String, value: &[u128]) {
        if value.is_empty() {
            return;
        }
        let value: Vec<String> = value.iter().map(|n| format!("{n:#x}")).collect();
        self.found.push(Found { file: self.file.to_owned(), name, value: value.join(",") });
    }
}
