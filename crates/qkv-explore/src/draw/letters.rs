//! Labels: replaces characters that move the cursor or break the line, and truncates to a width in terminal columns or
//! in em.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Replaces control characters.
const REPLACEMENT: char = '·';
/// Ends a truncated label.
const ELLIPSIS: char = '…';

/// Replaces characters that move the cursor, break the line or change the writing direction.
pub(crate) fn sanitized(text: &str) -> String {
    text.chars().map(|c| if c.width().is_none() || is_directional(c) { REPLACEMENT } else { c }).collect()
}

/// Whether a character breaks a line or changes the direction of what follows.
fn is_directional(c: char) -> bool {
    let breaks = matches!(c, '\u{2028}' | '\u{2029}');
    let directions = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    breaks || directions || matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Sanitizes and truncates to `most` terminal columns.
pub(crate) fn fit_columns(text: &str, most: usize) -> String {
    let text = sanitized(text);
    if text.width() <= most {
        return text;
    }
    let mut columns = 0;
    let fits = |c: &char| {
        columns += c.width().unwrap_or(0);
        columns < most
    };
    text.chars().take_while(fits).chain([ELLIPSIS]).collect()
}

/// Estimated width in em: a little more than a wide sans-serif font takes, so that a layout by estimates holds.
pub(crate) fn text_width(text: &str) -> f64 {
    text.chars().map(char_width).sum()
}

fn char_width(c: char) -> f64 {
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

/// Sanitizes and truncates to `most` em.
pub(crate) fn fit_em(text: &str, most: f64) -> String {
    let text = sanitized(text);
    if text_width(&text) <= most {
        return text;
    }
    let mut used = char_width(ELLIPSIS);
    let fits = |c: &char| {
        used += char_width(*c);
        used <= most
    };
    let kept: String = text.chars().take_while(fits).collect();
    kept.trim_end().to_owned() + &ELLIPSIS.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_truncated_and_escape_sequences_replaced() {
        assert_eq!(fit_columns("a\x1b[2Jb", 24), "a·[2Jb");
        let long = fit_columns(&"长".repeat(30), 24);
        assert!(long.width() <= 24 && long.ends_with('…'), "{long}");
    }

    #[test]
    fn characters_that_change_the_writing_direction_are_replaced() {
        assert_eq!(sanitized("a\u{202e}b\u{2028}c\n"), "a·b·c·");
    }

    #[test]
    fn truncated_labels_fit() {
        for most in [1.5, 3.0, 7.5] {
            for text in ["a long label of many words", "很长的一个标签在这里", "short", "WWWWWWWW"] {
                let short = fit_em(text, most);
                assert!(text_width(&short) <= most, "{short} in {most}");
                assert!(short == text || short.ends_with('…'));
            }
        }
    }
}
