//! Incremental detokenization: text is handed out as soon as no later token can change it. A character spelled by
//! several tokens waits until it is complete, and text that may be the start of a stop string waits until that is
//! decided.

use crate::text::tokenizer::Tokenizer;

/// Replaces bytes that do not form a character yet.
const REPLACEMENT: char = '\u{fffd}';
/// Tokens after which an incomplete character is handed out as it is.
const MAX_PENDING: usize = 8;

/// Turns tokens into text piece by piece.
pub(super) struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    stop: Vec<&'a str>,
    tokens: Vec<u32>,
    /// Index of the first token that is decoded together with the new ones: the spelling of a token can depend on the
    /// one before it.
    prefix: usize,
    /// Index of the first token that is not in `text` yet.
    new: usize,
    /// The text so far, without the stop string.
    pub text: String,
    /// Bytes of `text` that were handed out.
    sent: usize,
}

impl<'a> StreamDecoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer, stop: &'a [String]) -> Self {
        let stop = stop.iter().map(String::as_str).filter(|stop| !stop.is_empty()).collect();
        StreamDecoder { tokenizer, stop, tokens: Vec::new(), prefix: 0, new: 0, text: String::new(), sent: 0 }
    }

    /// Adds a token. Returns whether the text now contains a stop string, which is cut off.
    pub fn push(&mut self, token: u32) -> bool {
        self.tokens.push(token);
        self.decode(false);
        let longest = self.stop.iter().map(|stop| stop.len()).max().unwrap_or(0);
        // A stop string cannot begin earlier: text that was sent is not part of one.
        let from = floor_char_boundary(&self.text, self.sent.saturating_sub(longest));
        let found = self.stop.iter().filter_map(|stop| self.text[from..].find(stop)).min();
        if let Some(at) = found {
            self.text.truncate((from + at).max(self.sent));
        }
        found.is_some()
    }

    /// Decodes the new tokens, unless they end within a character.
    fn decode(&mut self, last: bool) {
        let before = self.tokenizer.decode(&self.tokens[self.prefix..self.new]);
        let now = self.tokenizer.decode(&self.tokens[self.prefix..]);
        let incomplete = now.ends_with(REPLACEMENT) && self.tokens.len() - self.new < MAX_PENDING && !last;
        if incomplete || now.len() <= before.len() {
            return;
        }
        let added = now.strip_prefix(before.as_str());
        self.text += added.unwrap_or(&now[floor_char_boundary(&now, before.len())..]);
        (self.prefix, self.new) = (self.new, self.tokens.len());
    }

    /// Hands out the text that can no longer change. Returns `false` if the receiver cancels.
    pub fn flush(&mut self, receive: &mut (dyn FnMut(&str) -> bool + Send)) -> bool {
        let rest = &self.text[self.sent..];
        let starts_stop = |end: &str| self.stop.iter().any(|stop| stop.starts_with(end));
        let held = (0..rest.len()).find(|&at| rest.is_char_boundary(at) && starts_stop(&rest[at..]));
        let ready = held.unwrap_or(rest.len());
        let wanted = ready == 0 || receive(&rest[..ready]);
        self.sent += ready;
        wanted
    }

    /// Hands out everything that is left.
    pub fn finish(&mut self, receive: &mut (dyn FnMut(&str) -> bool + Send)) {
        if self.stop.iter().all(|stop| !self.text.contains(stop)) {
            self.decode(true);
        }
        if self.sent < self.text.len() {
            receive(&self.text[self.sent..]);
            self.sent = self.text.len();
        }
    }
}

/// The last character boundary at or before a byte.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Kind;

    fn stream(text: &str, stop: &[&str]) -> (Vec<String>, String) {
        let tokenizer = Tokenizer::train([text, "abc 好"], Kind::Characters).unwrap();
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut decoder = StreamDecoder::new(&tokenizer, &stop);
        let mut pieces = Vec::new();
        let mut receive = |piece: &str| {
            pieces.push(piece.to_owned());
            true
        };
        for token in tokenizer.encode(text) {
            let stopped = decoder.push(token);
            decoder.flush(&mut receive);
            if stopped {
                break;
            }
        }
        decoder.finish(&mut receive);
        (pieces, decoder.text)
    }

    #[test]
    fn the_pieces_are_the_text() {
        let (pieces, text) = stream("to be, or not 好", &[]);
        assert_eq!((pieces.concat(), &text[..]), ("to be, or not 好".into(), "to be, or not 好"));
        assert!(pieces.len() > 5);
    }

    #[test]
    fn no_part_of_a_stop_string_is_handed_out() {
        let (pieces, text) = stream("to be, or not", &["or not", "o!"]);
        assert_eq!((pieces.concat(), &text[..]), ("to be, ".into(), "to be, "));
        let (pieces, _) = stream("so so sot", &["sot"]);
        assert_eq!(pieces.concat(), "so so ");
        let (pieces, _) = stream("so so so", &["sot"]);
        assert_eq!(pieces.concat(), "so so so");
    }
}
