//! Tokens as text that can be told at once. A character of several tokens is told when it is whole; a text that may yet turn out
//! to be one that stops is held back until it is clear.

use crate::text::tokenizer::Tokenizer;

/// What stands where bytes are no text yet.
const BROKEN: char = '\u{fffd}';
/// Tokens that a character may wait for.
const PATIENCE: usize = 8;

/// Who says it.
pub(super) struct Voice<'a> {
    tokenizer: &'a Tokenizer,
    stop: Vec<&'a str>,
    tokens: Vec<u32>,
    /// Where the tokens begin with which the new ones are read: a piece can depend on the one before it.
    from: usize,
    /// Where the new ones begin.
    new: usize,
    /// All that was said, without what stops it.
    pub text: String,
    told: usize,
}

impl<'a> Voice<'a> {
    pub fn new(tokenizer: &'a Tokenizer, stop: &'a [String]) -> Self {
        let stop = stop.iter().map(String::as_str).filter(|stop| !stop.is_empty()).collect();
        Voice { tokenizer, stop, tokens: Vec::new(), from: 0, new: 0, text: String::new(), told: 0 }
    }

    /// One more token; whether a text that stops has come.
    pub fn hear(&mut self, token: u32) -> bool {
        self.tokens.push(token);
        self.read(false);
        let searched = self.stop.iter().map(|stop| stop.len()).max().unwrap_or(0);
        // Nothing that was told is part of a stop: it cannot begin before what is held back.
        let from = floor(&self.text, self.told.saturating_sub(searched));
        let found = self.stop.iter().filter_map(|stop| self.text[from..].find(stop)).min();
        if let Some(at) = found {
            self.text.truncate((from + at).max(self.told));
        }
        found.is_some()
    }

    /// Reads the new tokens, unless they end within a character.
    fn read(&mut self, last: bool) {
        let before = self.tokenizer.decode(&self.tokens[self.from..self.new]);
        let now = self.tokenizer.decode(&self.tokens[self.from..]);
        let waits = now.ends_with(BROKEN) && self.tokens.len() - self.new < PATIENCE && !last;
        if waits || now.len() <= before.len() {
            return;
        }
        self.text += now.strip_prefix(before.as_str()).unwrap_or(&now[floor(&now, before.len())..]);
        (self.from, self.new) = (self.new, self.tokens.len());
    }

    /// Tells what cannot change any more; whether anyone listens.
    pub fn tell(&mut self, told: &mut (dyn FnMut(&str) -> bool + Send)) -> bool {
        let rest = &self.text[self.told..];
        let begins = |end: &str| self.stop.iter().any(|stop| stop.starts_with(end));
        let held = (0..rest.len()).find(|&at| rest.is_char_boundary(at) && begins(&rest[at..]));
        let sure = held.unwrap_or(rest.len());
        let listens = sure == 0 || told(&rest[..sure]);
        self.told += sure;
        listens
    }

    /// Tells all that is left.
    pub fn finish(&mut self, told: &mut (dyn FnMut(&str) -> bool + Send)) {
        if self.stop.iter().all(|stop| !self.text.contains(stop)) {
            self.read(true);
        }
        if self.told < self.text.len() {
            told(&self.text[self.told..]);
            self.told = self.text.len();
        }
    }
}

/// The last boundary of a character at or before a place.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Kind;

    fn heard(text: &str, stop: &[&str]) -> (Vec<String>, String) {
        let tokenizer = Tokenizer::train([text, "abc 好"], Kind::Characters).unwrap();
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut voice = Voice::new(&tokenizer, &stop);
        let mut told = Vec::new();
        let mut tell = |piece: &str| {
            told.push(piece.to_owned());
            true
        };
        for token in tokenizer.encode(text) {
            let stopped = voice.hear(token);
            voice.tell(&mut tell);
            if stopped {
                break;
            }
        }
        voice.finish(&mut tell);
        (told, voice.text)
    }

    #[test]
    fn what_is_told_is_what_is_said() {
        let (told, text) = heard("to be, or not 好", &[]);
        assert_eq!((told.concat(), &text[..]), ("to be, or not 好".into(), "to be, or not 好"));
        assert!(told.len() > 5);
    }

    #[test]
    fn what_stops_is_never_told() {
        let (told, text) = heard("to be, or not", &["or not", "o!"]);
        assert_eq!((told.concat(), &text[..]), ("to be, ".into(), "to be, "));
        let (told, _) = heard("so so sot", &["sot"]);
        assert_eq!(told.concat(), "so so ");
        let (told, _) = heard("so so so", &["sot"]);
        assert_eq!(told.concat(), "so so so");
    }
}
