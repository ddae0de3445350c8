//! `cargo xtask words`: fails if a word that the glossary retired comes back.

use crate::files;
use crate::glossary::{Retired, retired};
use std::fs;

/// The file with the tables.
const GLOSSARY: &str = "docs/glossary.md";

/// Files whose history may use old words.
const EXEMPT: [&str; 3] = ["glossary.md", "LADDER.md", "CHANGELOG.md"];

/// Extensions of files that people read.
const KINDS: [&str; 12] = ["rs", "md", "cu", "cuh", "toml", "py", "js", "css", "html", "yml", "cff", "sh"];

/// Prints the places of retired words as `path:line: …`; the error says what is wrong.
pub fn check() -> Result<(), String> {
    let glossary = fs::read_to_string(GLOSSARY).map_err(|error| format!("error: {GLOSSARY}: {error}"))?;
    let words = retired(&glossary);
    if words.is_empty() {
        return Err(format!("error: {GLOSSARY} has no table of retired words"));
    }
    let mut found = 0;
    for path in files::tracked(&KINDS)? {
        if EXEMPT.iter().any(|name| path.rsplit('/').next() == Some(name)) {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for (line, word) in in_text(&words, &path, &text) {
            println!("{path}:{line}: `{}` is retired; use {}", word.word, word.instead);
            found += 1;
        }
    }
    match found {
        0 => Ok(()),
        _ => Err(format!("error: {found} retired words\nhint: {GLOSSARY} says what to use")),
    }
}

/// The retired words in a file, each with its line number.
fn in_text<'w>(words: &'w [Retired], path: &str, text: &str) -> Vec<(usize, &'w Retired)> {
    let here: Vec<&Retired> = words
        .iter()
        .filter(|word| word.paths.is_empty() || word.paths.iter().any(|prefix| path.starts_with(prefix.as_str())))
        .collect();
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        found.extend(here.iter().filter(|word| stands_in(&word.word, line)).map(|&word| (at + 1, word)));
    }
    found
}

/// Whether a line contains the word: a single word as a whole word, case-sensitively, or a phrase in any case.
fn stands_in(word: &str, line: &str) -> bool {
    if !word.contains(' ') {
        return has_whole(word, line);
    }
    let spaced: Vec<String> = line.split_whitespace().map(str::to_lowercase).collect();
    has_whole(&word.to_lowercase(), &spaced.join(" "))
}

fn has_whole(word: &str, line: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
        // A path such as `qkv::gadget` contains whole words, and so does `--gadget`.
        !before.is_some_and(part_of_word) && !after.is_some_and(part_of_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: &str = "\
# Glossary

| word | meaning |
| --- | --- |
| fine | a word that stays |

## Retired words

### All crates

| retired | use |
| --- | --- |
| gadget, Gadget | device |
| `Heap` (the arithmetic) | `Sum` |
| shiny part | tensor core |

### qkv-simd

| retired | use | where |
| --- | --- | --- |
| `widget` | `kernel` | |
| `knob` | `option` | crates/qkv/, docs/ |
";

    fn hits(path: &str, text: &str) -> Vec<(usize, String)> {
        let words = retired(TABLES);
        in_text(&words, path, text).into_iter().map(|(line, word)| (line, word.word.clone())).collect()
    }

    #[test]
    fn tables_below_the_heading_are_read_and_no_others() {
        let words: Vec<String> = retired(TABLES).into_iter().map(|word| word.word).collect();
        assert_eq!(words, ["gadget", "Gadget", "Heap", "shiny part", "widget", "knob"]);
    }

    #[test]
    fn a_word_is_matched_whole_and_in_its_case() {
        assert_eq!(hits("a.rs", "fn gadget() {}\nlet gadgets = my_gadget;"), [(1, "gadget".into())]);
        assert_eq!(hits("a.rs", "GADGET heap"), []);
        assert_eq!(hits("a.md", "qkv::gadget, `Heap`"), [(1, "gadget".into()), (1, "Heap".into())]);
    }

    #[test]
    fn a_phrase_is_matched_in_any_case_and_over_any_spaces() {
        assert_eq!(hits("a.md", "The Shiny  part"), [(1, "shiny part".into())]);
        assert_eq!(hits("a.md", "shiny parts"), []);
    }

    #[test]
    fn a_word_is_retired_where_its_heading_or_its_row_says() {
        assert_eq!(hits("crates/qkv-simd/src/a.rs", "widget knob"), [(1, "widget".into())]);
        assert_eq!(hits("crates/qkv/src/a.rs", "widget knob"), [(1, "knob".into())]);
        assert_eq!(hits("docs/a.md", "widget\nknob"), [(2, "knob".into())]);
    }
}
