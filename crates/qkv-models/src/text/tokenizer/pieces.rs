//! TokenizerSource as a person reads them: without the marks by which tokenizers say where spaces and bytes were.

/// One piece of a text, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it says. Where a character is spelled in several pieces, the first has it; a piece that is only a space has
    /// nothing.
    pub text: String,
    /// Whether a word begins here. Han characters and signs of punctuation are words; the rest of a word, a number or
    /// a contraction is not, nor is what follows a piece that is only the space before it.
    pub begins_word: bool,
}

/// How a vocabulary says where spaces were, and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marks {
    /// A sign for a space, `▁`, and bytes as `<0xE4>`: what is trained here, and SentencePiece.
    Spaces,
    /// Every byte as a character, a space as `Ġ`: the GPTs.
    Bytes,
    /// A sign where there was no space, `##`: BERT.
    Joints,
    /// None: every token is a word.
    None,
}

impl Marks {
    /// The marks that most tokens of a vocabulary have.
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

    /// Whether there was a space before a token, and the bytes of its text.
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
                // What is not in the table is a token that was added as text.
                let bytes: Option<Vec<u8>> = rest.chars().map(standing_for).collect();
                (space, bytes.unwrap_or_else(|| rest.into()))
            }
        }
    }
}

/// The byte that a token such as `<0xE4>` stands for.
fn byte(token: &str) -> Option<u8> {
    u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>').filter(|hex| hex.len() == 2)?, 16).ok()
}

/// The byte that a character stands for where every byte is a character: itself where it can be seen, and the 68 others from
/// U+0100 on, in their order.
fn standing_for(c: char) -> Option<u8> {
    let seen = |b: &u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    match u8::try_from(u32::from(c)) {
        Ok(b) => Some(b).filter(seen),
        Err(_) => (0..=255u8).filter(|b| !seen(b)).nth(u32::from(c).checked_sub(256)? as usize),
    }
}

/// Whether this is part of a word that goes on, rather than a word by itself.
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
