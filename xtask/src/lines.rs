//! `cargo xtask lines`: fails if a line of code or comment is wider than 120 columns. String literals, links and table
//! rows may be wider, because breaking them would change their meaning.

use crate::files;
use std::fs;

/// The width limit.
const COLUMNS: usize = 120;

/// Prints wider lines as `path:line: …`; the error says how many there are.
pub fn check() -> Result<(), String> {
    let mut found = 0;
    for path in files::tracked(&["rs", "cu", "cuh"])? {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for (line, width) in wide(&text) {
            println!("{path}:{line}: {width} columns");
            found += 1;
        }
    }
    match found {
        0 => Ok(()),
        _ => Err(format!("error: {found} lines are wider than {COLUMNS} columns")),
    }
}

/// The kind of text that a character belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Code,
    LineComment,
    BlockComment,
    Text,
    /// A raw string that ends with a quote and this many hashes.
    RawText(usize),
}

/// The numbers and widths of the lines that are too wide.
fn wide(source: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut state = State::Code;
    for (at, line) in source.lines().enumerate() {
        let mut at_limit = state;
        let chars: Vec<char> = line.chars().collect();
        let mut column = 0;
        while column < chars.len() {
            let (next, taken) = advance(state, &chars[column..]);
            if column < COLUMNS && column + taken >= COLUMNS {
                // An opening quote exactly at the limit still counts as code.
                at_limit = state;
            }
            state = next;
            column += taken;
        }
        if state == State::LineComment {
            state = State::Code;
        }
        let excused = matches!(at_limit, State::Text | State::RawText(_)) || line.contains("://") || is_row(line);
        if chars.len() > COLUMNS && !excused {
            found.push((at + 1, chars.len()));
        }
    }
    found
}

/// Whether a line is a row of a table in a doc comment.
fn is_row(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("/// |") || line.starts_with("//! |")
}

/// The state after the next token, and how many characters it has.
fn advance(state: State, rest: &[char]) -> (State, usize) {
    let starts = |text: &str| text.chars().enumerate().all(|(at, c)| rest.get(at) == Some(&c));
    match state {
        State::LineComment => (state, rest.len()),
        State::BlockComment if starts("*/") => (State::Code, 2),
        State::Text if starts("\\") => (state, 2.min(rest.len())),
        State::Text if starts("\"") => (State::Code, 1),
        State::RawText(hashes) if starts(&format!("\"{}", "#".repeat(hashes))) => (State::Code, 1 + hashes),
        State::BlockComment | State::Text | State::RawText(_) => (state, 1),
        State::Code if starts("//") => (State::LineComment, 2),
        State::Code if starts("/*") => (State::BlockComment, 2),
        State::Code if starts("'\"'") || starts("'\\\"'") => (state, if starts("'\"'") { 3 } else { 4 }),
        State::Code if starts("\"") => (State::Text, 1),
        State::Code if starts("r\"") || starts("r#") => {
            let hashes = rest[1..].iter().take_while(|&&c| c == '#').count();
            match rest.get(1 + hashes) {
                Some('"') => (State::RawText(hashes), 2 + hashes),
                _ => (state, 1),
            }
        }
        State::Code => (state, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_code_and_comments_are_found() {
        let comment = format!("// {}", "x".repeat(120));
        let code = format!("let {} = 1;", "x".repeat(120));
        assert_eq!(wide(&format!("{comment}\nlet a = 1;\n{code}")), [(1, 123), (3, 129)]);
        assert_eq!(wide(&"x".repeat(120)), []);
    }

    #[test]
    fn strings_and_links_may_be_wider() {
        let text = "x".repeat(130);
        assert_eq!(wide(&format!("let a = \"{text}\";")), []);
        assert_eq!(wide(&format!("let a = r#\"\n{text}\n\"#;")), []);
        assert_eq!(wide(&format!("// https://{text}")), []);
        assert_eq!(wide(&format!("    /// | {text} |")), []);
        assert_eq!(wide(&format!("// | {text} |")), [(1, 137)]);
        assert_eq!(wide(&format!("let a = \"\\\"\"; // {text}")), [(1, 147)]);
        assert_eq!(wide(&format!("let a = '\"'; // {text}")), [(1, 146)]);
    }
}
