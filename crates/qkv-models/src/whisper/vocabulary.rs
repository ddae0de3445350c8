//! The tokens of Whisper: text as bytes, then the end, the start, languages, tasks, marks and times. Text is assembled
//! from bytes, so a character may be spread over several tokens.

use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// Languages in the order of their tokens: ISO 639 codes.
pub const LANGUAGES: [&str; 100] = [
    "en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar", "sv", "it", "id", "hi", "fi",
    "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu", "ta", "no", "th", "ur", "hr", "bg", "lt", "la", "mi", "ml",
    "cy", "sk", "te", "fa", "lv", "bn", "sr", "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn", "bs",
    "kk", "sq", "sw", "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc", "ka", "be", "tg", "sd", "gu", "am",
    "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn", "mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw", "ln",
    "ha", "ba", "jw", "su", "yue",
];

/// Languages whose words are not separated by spaces.
const WITHOUT_SPACES: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];

/// Vocabulary size of the English-only models.
const ENGLISH_ONLY: usize = 51_864;
/// Seconds per step of time tokens.
pub(crate) const TIME_STEP: f64 = 0.02;

/// The vocabulary of a model.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    /// The bytes of each text token: all ids below `end`.
    pieces: Vec<Vec<u8>>,
    /// `<|endoftext|>`.
    pub end: u32,
    /// `<|startoftranscript|>`.
    pub start: u32,
    /// Codes of languages and their tokens; empty in an English-only model.
    pub languages: Vec<(String, u32)>,
    pub translate: u32,
    pub transcribe: u32,
    /// `<|startoflm|>`, which is never written.
    pub start_of_lm: u32,
    /// `<|startofprev|>`: followed by the text before the window.
    pub previous: u32,
    pub no_speech: u32,
    pub no_timestamps: u32,
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The character that represents a byte: see [`byte_of`].
pub(super) fn char_of(byte: u8) -> char {
    match is_printable(byte) {
        true => char::from(byte),
        false => {
            let at = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
            char::from_u32(256 + at).expect("a letter of Latin Extended")
        }
    }
}

/// The byte of a character in byte-level tokenizers, which represent bytes by printable characters (GPT-2).
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code if code < 256 && is_printable(code as u8) => Some(code as u8),
        code @ 256..=323 => (0..=255u8).filter(|&byte| !is_printable(byte)).nth(code as usize - 256),
        _ => None,
    }
}

impl Vocabulary {
    /// From a `tokenizer.json`, for a model of `len` tokens.
    pub fn of_tokenizer(tokenizer: &Tokenizer, len: usize, path: &Path) -> Result<Vocabulary> {
        let wrong = |what: String| Error::format(path, "tokenizer", what);
        let specials: HashMap<String, u32> = tokenizer.specials().into_iter().collect();
        let find = |names: &[&str]| {
            let found = names.iter().find_map(|name| specials.get(&format!("<|{name}|>")).copied());
            let found = found.filter(|&id| (id as usize) < len);
            found.ok_or_else(|| wrong(format!("it has no token `<|{}|>` within the model's {len}", names[0])))
        };
        let (end, start) = (find(&["endoftext"])?, find(&["startoftranscript"])?);
        let (translate, transcribe) = (find(&["translate"])?, find(&["transcribe"])?);
        let mut languages: Vec<(String, u32)> = specials
            .iter()
            .filter(|(_, id)| (start + 1..translate.min(transcribe)).contains(id))
            .map(|(name, &id)| (name.trim_matches(['<', '|', '>']).to_owned(), id))
            .collect();
        languages.sort_by_key(|&(_, id)| id);
        let name = |id: u32| tokenizer.name(id).unwrap_or_default();
        let bytes = |id: u32| name(id).chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_default();
        let vocabulary = Vocabulary {
            pieces: (0..end).map(bytes).collect(),
            end,
            start,
            languages,
            translate,
            transcribe,
            start_of_lm: find(&["startoflm"])?,
            previous: find(&["startofprev"])?,
            no_speech: find(&["nospeech", "nocaptions"])?,
            no_timestamps: find(&["notimestamps"])?,
        };
        vocabulary.checked(len).map_err(wrong)
    }

    /// From the bytes of the text tokens, for a model of `len` tokens. The other tokens have their usual order.
    pub fn of_pieces(mut pieces: Vec<Vec<u8>>, len: usize, path: &Path) -> Result<Vocabulary> {
        let wrong = |what: String| Error::format(path, "vocabulary", what);
        // The file of a multilingual model lists one text token more than the model has.
        let end = if len == ENGLISH_ONLY { 50_256 } else { 50_257 };
        let languages = len.checked_sub(end as usize + 8 + 1501).filter(|&count| count <= LANGUAGES.len());
        let Some(count) = languages.filter(|_| pieces.len() >= end as usize) else {
            return Err(wrong(format!("{len} tokens, {} of them text, are not those of Whisper", pieces.len())));
        };
        pieces.truncate(end as usize);
        let (start, after) = (end + 1, end + 2 + count as u32);
        let language = |(at, code): (usize, &&str)| (code.to_string(), start + 1 + at as u32);
        let vocabulary = Vocabulary {
            pieces,
            end,
            start,
            languages: LANGUAGES[..count].iter().enumerate().map(language).collect(),
            translate: after,
            transcribe: after + 1,
            start_of_lm: after + 2,
            previous: after + 3,
            no_speech: after + 4,
            no_timestamps: after + 5,
        };
        vocabulary.checked(len).map_err(wrong)
    }

    /// Bytes as text, all languages, and times for windows of `positions`; also returns the number of all tokens.
    pub fn of_bytes(positions: usize) -> (Vocabulary, usize) {
        let languages = LANGUAGES.iter().zip(258..).map(|(code, id)| (code.to_string(), id)).collect();
        let vocabulary = Vocabulary {
            pieces: (0..=255).map(|byte| vec![byte]).collect(),
            end: 256,
            start: 257,
            languages,
            translate: 358,
            transcribe: 359,
            start_of_lm: 360,
            previous: 361,
            no_speech: 362,
            no_timestamps: 363,
        };
        (vocabulary, 364 + positions + 1)
    }

    /// Final checks; clears the languages of an English-only model.
    fn checked(mut self, len: usize) -> Result<Vocabulary, String> {
        if self.no_timestamps as usize + 1 >= len {
            return Err("it has no tokens for times".into());
        }
        if self.end > self.start || self.start > self.no_timestamps {
            return Err("its special tokens are in another order".into());
        }
        if len == ENGLISH_ONLY {
            self.languages.clear();
        }
        Ok(self)
    }

    /// The bytes of each text token.
    pub fn pieces(&self) -> &[Vec<u8>] {
        &self.pieces
    }

    /// The first time token.
    pub fn times(&self) -> u32 {
        self.no_timestamps + 1
    }

    /// The text of tokens; only text tokens contribute.
    pub fn text(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.bytes(tokens)).into_owned()
    }

    fn bytes(&self, tokens: &[u32]) -> Vec<u8> {
        tokens.iter().filter_map(|&token| self.pieces.get(token as usize)).flatten().copied().collect()
    }

    /// Whether words of the language are separated by spaces.
    pub fn has_spaces(language: &str) -> bool {
        !WITHOUT_SPACES.contains(&language)
    }

    /// The longest token that a text starts with, and whether it is the whole text.
    fn longest(&self, index: &HashMap<&[u8], u32>, text: &str) -> Option<(u32, bool)> {
        let bytes = text.as_bytes();
        (1..=bytes.len()).rev().find_map(|end| index.get(&bytes[..end]).map(|&id| (id, end == bytes.len())))
    }

    /// Tokens that are never written: marks of speakers and of music, and the special tokens of tasks, starts, previous
    /// text and no speech.
    pub fn suppressed(&self) -> Vec<u32> {
        let index: HashMap<&[u8], u32> =
            self.pieces.iter().enumerate().map(|(id, piece)| (&piece[..], id as u32)).collect();
        let single = "\" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 \
                      << >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪";
        let mut tokens: Vec<u32> = [" -", " '"].iter().filter_map(|text| index.get(text.as_bytes()).copied()).collect();
        for symbol in single.split_whitespace() {
            for text in [symbol.to_owned(), format!(" {symbol}")] {
                tokens.extend(self.longest(&index, &text).filter(|&(_, whole)| whole).map(|(id, _)| id));
            }
        }
        for symbol in "♩♪♫♬♭♮♯".chars() {
            for text in [symbol.to_string(), format!(" {symbol}")] {
                tokens.extend(self.longest(&index, &text).map(|(id, _)| id));
            }
        }
        tokens.extend([self.transcribe, self.translate, self.start, self.previous, self.start_of_lm, self.no_speech]);
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    /// Tokens that may not start a text: a space, and the end.
    pub fn suppressed_at_start(&self) -> Vec<u32> {
        let space = self.pieces.iter().position(|piece| piece == b" ").map(|id| id as u32);
        space.into_iter().chain([self.end]).collect()
    }

    /// Splits text tokens into words, each with its number of tokens.
    pub fn words(&self, tokens: &[u32], language: &str) -> Vec<(String, usize)> {
        let characters = self.characters(tokens);
        if !Vocabulary::has_spaces(language) {
            return characters;
        }
        const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
        let mut words: Vec<(String, usize)> = Vec::new();
        for (text, count) in characters {
            match words.last_mut() {
                Some(word) if !text.starts_with(' ') && !PUNCTUATION.contains(text.trim()) => {
                    word.0 += &text;
                    word.1 += count;
                }
                _ => words.push((text, count)),
            }
        }
        words
    }

    /// Splits tokens into groups whose bytes are whole characters.
    fn characters(&self, tokens: &[u32]) -> Vec<(String, usize)> {
        const REPLACEMENT: char = '\u{fffd}';
        let full: Vec<char> = self.text(tokens).chars().collect();
        let (mut found, mut from, mut offset) = (Vec::new(), 0, 0);
        for end in 1..=tokens.len() {
            let text = self.text(&tokens[from..end]);
            let broken = text.chars().position(|c| c == REPLACEMENT);
            // A replacement character that is also in the whole text does not come from a character cut in two.
            if broken.is_none_or(|at| full.get(offset + at) == Some(&REPLACEMENT)) {
                offset += text.chars().count();
                found.push((text, end - from));
                from = end;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, then words, in a vocabulary of the usual size.
    fn vocabulary() -> Vocabulary {
        let mut pieces: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        pieces.extend([" Hello", " wor", "ld", " (", "((", " \u{266a}"].map(|text| text.as_bytes().to_vec()));
        pieces.push(b" \xe2\x99".to_vec());
        pieces.resize(50_257, b"filler of the usual length".to_vec());
        Vocabulary::of_pieces(pieces, 51_865, Path::new("m.bin")).unwrap()
    }

    #[test]
    fn special_tokens_of_the_published_models_have_their_numbers() {
        let v = vocabulary();
        let found = [v.end, v.start, v.translate, v.transcribe, v.previous, v.no_speech, v.no_timestamps, v.times()];
        assert_eq!(found, [50257, 50258, 50358, 50359, 50361, 50362, 50363, 50364]);
        assert_eq!((v.languages.len(), &v.languages[1]), (99, &("zh".to_owned(), 50260)));
        let english = Vocabulary::of_pieces(vec![Vec::new(); 50_256], 51_864, Path::new("m.bin")).unwrap();
        assert_eq!((english.start, english.times(), english.languages.len()), (50257, 50363, 0));
        assert!(Vocabulary::of_pieces(vec![Vec::new(); 9], 51_865, Path::new("m.bin")).is_err());
    }

    #[test]
    fn words_are_split_at_spaces_and_characters_are_not_split() {
        let v = vocabulary();
        let tokens = [256, 257, 258, u32::from(b'!'), u32::from(b' '), 0xe4, 0xbd, 0xa0];
        assert_eq!(v.text(&tokens), " Hello world! 你");
        let words = v.words(&tokens, "en");
        let said: Vec<(&str, usize)> = words.iter().map(|(word, count)| (word.as_str(), *count)).collect();
        assert_eq!(said, [(" Hello", 1), (" world", 2), ("!", 1), (" 你", 4)]);
        // A byte that is not part of a character stays alone.
        assert_eq!(v.words(&[0xff, 256], "zh").len(), 2);
    }

    #[test]
    fn marks_of_speakers_and_music_are_suppressed() {
        let v = vocabulary();
        let found = v.suppressed();
        for token in [u32::from(b'('), 259, 260, 262, 0xe2, v.start, v.no_speech] {
            assert!(found.contains(&token), "{token}");
        }
        assert!(!found.contains(&256) && !found.contains(&v.end) && !found.contains(&u32::from(b'-')));
        assert_eq!(v.suppressed_at_start(), [32, v.end]);
    }

    #[test]
    fn every_byte_has_a_character() {
        let bytes: std::collections::BTreeSet<u8> =
            (0u32..324).filter_map(char::from_u32).filter_map(byte_of).collect();
        assert_eq!(bytes.len(), 256);
        assert!((0..=255).all(|byte| byte_of(char_of(byte)) == Some(byte)));
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('a'), byte_of('好')), (Some(32), Some(10), Some(97), None));
    }
}
