//! The tables of retired words in `docs/glossary.md`.
//!
//! A row names one or more words, separated by commas: identifiers in backticks, or plain words. A single word is
//! matched as a whole word, case-sensitively; a phrase of several words ignores case. A third column with
//! comma-separated paths, or else the crate in the heading above the table, limits where the word is retired.

/// A retired word or phrase, and what replaced it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retired {
    /// The word, without backticks.
    pub word: String,
    /// Its replacement, as written in the table.
    pub instead: String,
    /// Path prefixes under which it is retired; if empty, it is retired everywhere.
    pub paths: Vec<String>,
}

/// Reads the tables below the heading `## Retired words`.
pub fn retired(glossary: &str) -> Vec<Retired> {
    let mut words = Vec::new();
    let mut inside = false;
    let mut heading = Vec::new();
    for line in glossary.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            inside = title.trim() == "Retired words";
        }
        if let Some(title) = line.strip_prefix("### ") {
            let title = title.trim();
            heading = match title {
                "All crates" => Vec::new(),
                "xtask" => vec!["xtask/".to_string()],
                krate => vec![format!("crates/{krate}/")],
            };
        }
        if inside && line.trim_start().starts_with('|') {
            words.extend(row(line, &heading));
        }
    }
    words
}

fn row(line: &str, heading: &[String]) -> Vec<Retired> {
    let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
    let is_rule = cells[0].chars().all(|c| matches!(c, '-' | ':' | ' '));
    if cells.len() < 2 || is_rule || cells[0] == "retired" {
        return Vec::new();
    }
    let paths: Vec<String> = match cells.get(2) {
        Some(paths) if !paths.is_empty() => items(paths).map(str::to_string).collect(),
        _ => heading.to_vec(),
    };
    let retired = |word: &str| Retired { word: word.into(), instead: cells[1].into(), paths: paths.clone() };
    items(cells[0]).map(retired).collect()
}

/// The items of a cell, without backticks and remarks in parentheses.
fn items(cell: &str) -> impl Iterator<Item = &str> {
    cell.split(',')
        .map(|item| item.split(" (").next().unwrap_or_default().trim().trim_matches('`').trim())
        .filter(|item| !item.is_empty() && !item.starts_with('('))
}
