//! How text is made fit for a line: nothing that moves the cursor or breaks the line, and no longer than it may be, counted in
//! columns of a terminal or in widths of a printed letter.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Stands for a character that would move the cursor.
const TAMED: char = '·';
/// Ends what was cut.
const CUT: char = '…';

/// A text without characters that move the cursor, break the line or turn the direction of writing.
pub(crate) fn tamed(text: &str) -> String {
    text.chars().map(|c| if c.width().is_none() || turns(c) { TAMED } else { c }).collect()
}

/// Whether a character breaks a line or changes the direction of what follows.
fn turns(c: char) -> bool {
    matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// A tamed text of at most so many columns of a terminal.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let text = tamed(text);
    if text.width() <= most {
        return text;
    }
    let mut columns = 0;
    let fits = |c: &char| {
        columns += c.width().unwrap_or(0);
        columns < most
    };
    text.chars().take_while(fits).chain([CUT]).collect()
}

/// About how wide a text is in print, in units of its size: a little more than a wide sans-serif font takes, so that what is
/// planned to fit does fit.
pub(crate) fn printed(text: &str) -> f64 {
    text.chars().map(letter).sum()
}

fn letter(c: char) -> f64 {
    match c {
        _ if c.width() == Some(2) => 1.02,
        _ if c.width() == Some(0) => 0.0,
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | ' ' | 'I' | '·' => 0.36,
        'f' | 't' | 'r' | '(' | ')' | '[' | ']' | '/' | '-' | '"' | '!' => 0.46,
        'm' | 'M' | 'W' | '@' | '%' | '…' | '—' | '⏹' | '▶' => 1.02,
        'w' | 'A'..='Z' | '+' | '=' | '<' | '>' | '×' | '→' | '#' | '&' | '^' | '~' => 0.84,
        c if c.is_ascii() => 0.65,
        'ж' | 'ш' | 'щ' | 'ю' | 'ф' | 'ы' | 'ω' => 0.95,
        c if c.is_uppercase() => 1.1,
        _ => 0.78,
    }
}

/// A tamed text that takes at most `most` times its size in print.
pub(crate) fn shortened(text: &str, most: f64) -> String {
    let text = tamed(text);
    if printed(&text) <= most {
        return text;
    }
    let mut used = letter(CUT);
    let fits = |c: &char| {
        used += letter(*c);
        used <= most
    };
    let kept: String = text.chars().take_while(fits).collect();
    kept.trim_end().to_owned() + &CUT.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_are_long_or_would_move_the_cursor_are_tamed() {
        assert_eq!(shown("a\x1b[2Jb", 24), "a·[2Jb");
        let long = shown(&"长".repeat(30), 24);
        assert!(long.width() <= 24 && long.ends_with('…'), "{long}");
    }

    #[test]
    fn what_turns_the_direction_of_writing_is_tamed() {
        assert_eq!(tamed("a\u{202e}b\u{2028}c\n"), "a·b·c·");
    }

    #[test]
    fn what_is_shortened_fits() {
        for most in [1.5, 3.0, 7.5] {
            for text in ["a long label of many words", "很长的一个标签在这里", "short", "WWWWWWWW"] {
                let short = shortened(text, most);
                assert!(printed(&short) <= most, "{short} in {most}");
                assert!(short == text || short.ends_with('…'));
            }
        }
    }
}
