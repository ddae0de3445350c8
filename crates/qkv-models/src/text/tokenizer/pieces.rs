//! Pieces as a person reads them: without the marks by which tokenizers say where spaces and bytes were.

/// One piece of a text, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it says. The first of the bytes that spell a character has the character, the others nothing; a piece that is
    /// only a space has nothing.
    pub text: String,
    /// Whether a word begins here. Han characters and signs of punctuation are words; the rest of a word, a number or
    /// a contraction is not, nor is what follows a piece that is only the space before it.
    pub begins_word: bool,
}

/// How the vocabulary says that there was a space: by a sign before the piece, or by one before the pieces that had none.
fn marks(token: &str) -> (bool, &str) {
    for space in ['▁', 'Ġ'] {
        if let Some(rest) = token.strip_prefix(space) {
            return (true, rest);
        }
    }
    (false, token.strip_prefix("##").unwrap_or(token))
}

/// The byte that a token such as `<0xE4>` stands for.
fn byte(token: &str) -> Option<u8> {
    u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>').filter(|hex| hex.len() == 2)?, 16).ok()
}

/// Whether this is part of a word that goes on, rather than a word by itself.
fn goes_on(c: char) -> bool {
    let ideograph = matches!(c, '\u{2e80}'..='\u{2fdf}' | '\u{3001}'..='\u{303f}' | '\u{3400}'..='\u{9fff}'
        | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ffef}' | '\u{20000}'..='\u{3ffff}');
    !ideograph && (c.is_alphanumeric() || matches!(c, '\u{300}'..='\u{36f}'))
}

pub(super) fn pieces(tokens: &[String]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::with_capacity(tokens.len());
    let mut last: Option<char> = None;
    let (mut spaced, mut spelled) = (false, 0);
    // A vocabulary that marks what has no space before it has words without a mark.
    let continued = tokens.iter().any(|token| token.starts_with("##"));
    for (at, token) in tokens.iter().enumerate() {
        if spelled > 0 {
            spelled -= 1;
            pieces.push(Piece { text: String::new(), begins_word: false });
            continue;
        }
        let (mut space, mut text) = (continued && !token.starts_with("##"), token.clone());
        if byte(token).is_some() {
            let bytes: Vec<u8> = tokens[at..].iter().map_while(|token| byte(token)).take(4).collect();
            if let Some(length) = (1..=bytes.len()).find(|&n| std::str::from_utf8(&bytes[..n]).is_ok()) {
                text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                spelled = length - 1;
            }
        } else {
            let (marked, rest) = marks(token);
            space |= marked;
            text = rest.to_owned();
        }
        let mut letters = text.chars();
        let (first, second) = (letters.next(), letters.next());
        let contraction = matches!(first, Some('\'' | '’')) && second.is_some_and(char::is_alphabetic);
        let inside = last.is_some_and(goes_on) && (first.is_some_and(goes_on) || contraction);
        pieces.push(Piece { begins_word: space || !(inside || spaced), text });
        spaced = space && pieces.last().is_some_and(|piece| piece.text.is_empty());
        last = pieces.last().and_then(|piece| piece.text.chars().last());
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(tokens: &[&str]) -> String {
        let tokens: Vec<String> = tokens.iter().map(|token| token.to_string()).collect();
        pieces(&tokens)
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
    }
}
