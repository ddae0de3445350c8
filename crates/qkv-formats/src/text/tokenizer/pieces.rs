//! Tokens for display, without the marks that encode spaces and bytes.

/// A token for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its text. A character spelled in several tokens belongs to the first; a token that is only a space has no text.
    pub text: String,
    /// Whether it starts a word. Han characters and punctuation marks are words. The continuation of a word, number or
    /// contraction does not start one, nor does the token after one that is only a space.
    pub begins_word: bool,
}

/// How a vocabulary marks spaces and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marks {
    /// `▁` for a space and `<0xE4>` for a byte: tokenizers trained here, SentencePiece.
    Spaces,
    /// A character for every byte, `Ġ` for a space: GPT-2.
    Bytes,
    /// `##` if no space precedes: BERT.
    Joints,
    /// No marks: every token is a word.
    None,
}

impl Marks {
    /// The most frequent kind of marks in a vocabulary.
    pub(super) fn of<'a>(vocabulary: impl Iterator<Item = &'a String>) -> Self {
        let (mut bytes, mut joints, mut spaces) = (0, 0, 0);
        for token in vocabulary {
            bytes += usize::from(token.starts_with('Ġ'));
            joints += usize::from(token.starts_with("##"));
            spaces += usize::from(token.starts_with('▁'));
        }
        match bytes.max(joints) {
            most if most <= spaces => Marks::Spaces,
            most if most == bytes => Marks::Bytes,
            _ => Marks::Joints,
        }
    }

    /// Whether a space precedes a token, and the bytes of its text.
    fn read(self, token: &str) -> (bool, Vec<u8>) {
        match self {
            Marks::Spaces => {
                let (space, rest) = token.strip_prefix('▁').map_or((false, token), |rest| (true, rest));
                (space, byte(rest).map_or_else(|| rest.into(), |byte| vec![byte]))
            }
            Marks::None => (true, token.into()),
            Marks::Joints => token.strip_prefix("##").map_or((true, token.into()), |rest| (false, rest.into())),
            Marks::Bytes => {
                let (space, rest) = token.strip_prefix('Ġ').map_or((false, token), |rest| (true, rest));
                // Added tokens are plain text, whose characters may be missing from the table.
                let bytes: Option<Vec<u8>> = rest.chars().map(standing_for).collect();
                (space, bytes.unwrap_or_else(|| rest.into()))
            }
        }
    }
}

/// The byte of a token such as `<0xE4>`.
fn byte(token: &str) -> Option<u8> {
    u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>').filter(|hex| hex.len() == 2)?, 16).ok()
}

/// The byte that a character stands for in a byte-level vocabulary: printable bytes stand for themselves, the other 68
/// are U+0100 and up, in order.
fn standing_for(c: char) -> Option<u8> {
    let seen = |b: &u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    match u8::try_from(u32::from(c)) {
        Ok(b) => Some(b).filter(seen),
        Err(_) => (0..=255u8).filter(|b| !seen(b)).nth(u32::from(c).checked_sub(256)? as usize),
    }
}

/// Whether a character can continue a word, rather than being one by itself.
fn goes_on(c: char) -> bool {
    let ideograph = matches!(c, '\u{2e80}'..='\u{2fdf}' | '\u{3001}'..='\u{303f}' | '\u{3400}'..='\u{9fff}'
        | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ffef}' | '\u{20000}'..='\u{3ffff}');
    !ideograph && (c.is_alphanumeric() || matches!(c, '\u{300}'..='\u{36f}'))
}

pub(super) fn pieces(tokens: &[String], marks: Marks) -> Vec<Piece> {
    let (mut spaces, mut bytes, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    for (at, token) in tokens.iter().enumerate() {
        let (space, text) = marks.read(token);
        spaces.push(space);
        owners.resize(owners.len() + text.len(), at);
        bytes.extend(text);
    }
    let mut texts = vec![String::new(); tokens.len()];
    let mut at = 0;
    while at < bytes.len() {
        let whole = (1..=4).find_map(|n| std::str::from_utf8(bytes.get(at..at + n)?).ok());
        match whole {
            Some(letter) => texts[owners[at]].push_str(letter),
            None => texts[owners[at]].push_str(&format!("<{:#04X}>", bytes[at])),
        }
        at += whole.map_or(1, str::len);
    }

    let mut pieces: Vec<Piece> = Vec::with_capacity(tokens.len());
    let (mut last, mut spaced): (Option<char>, bool) = (None, false);
    for (text, space) in texts.into_iter().zip(spaces) {
        let mut letters = text.chars();
        let (first, second) = (letters.next(), letters.next());
        let contraction = matches!(first, Some('\'' | '’')) && second.is_some_and(char::is_alphabetic);
        let inside = last.is_some_and(goes_on) && (first.is_some_and(goes_on) || contraction);
        let spelled = first.is_none() && !space && !pieces.is_empty();
        if !spelled {
            last = text.chars().last();
        }
        pieces.push(Piece { begins_word: space || !(inside || spaced || spelled), text });
        spaced = space && first.is_none();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(tokens: &[&str]) -> String {
        let tokens: Vec<String> = tokens.iter().map(|token| token.to_string()).collect();
        pieces(&tokens, Marks::of(tokens.iter()))
            .iter()
            .map(|p| if p.begins_word { format!("|{}", p.text) } else { format!("·{}", p.text) })
            .collect()
    }

    #[test]
    fn words_numbers_and_contractions_go_on_and_signs_do_not() {
        assert_eq!(shown(&["▁Don", "'t", "▁trans", "late", "▁2", "0", "2", "6", "!"]), "|Don·'t|trans·late|2·0·2·6|!");
        assert_eq!(shown(&["我", "的", "▁i", "Phone", "。"]), "|我|的|i·Phone|。");
        assert_eq!(shown(&["a", "▁", "2", "▁", "不"]), "|a|·2|·不");
    }

    #[test]
    fn a_character_that_is_spelled_in_bytes_is_shown_once() {
        assert_eq!(shown(&["<0xE4>", "<0xB8>", "<0x80>", "<0xE4>", "▁a"]), "|一··|<0xE4>|a");
    }

    #[test]
    fn the_marks_of_other_tokenizers_are_read() {
        assert_eq!(shown(&["Hel", "lo", "Ġworld"]), "|Hel·lo|world");
        assert_eq!(shown(&["un", "##like", "##ly", "so"]), "|un·like·ly|so");
        assert_eq!(shown(&["ĠcafÃ©", "?", "Ġ", "ä½", "ł", "å¥", "½"]), "|café|?|·你·|好·");
    }
}
