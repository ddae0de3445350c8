//! Which words of a source each word of its translation looked at: pieces put together to words, and drawn as text or
//! written in Pharaoh format. Data in, words out; who prints them decides how wide they may be.

use qkv_models::Alignment;
use qkv_models::text::tokenizer::{Piece, Tokenizer};
use serde::Serialize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Weights from words to words.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Words {
    /// The words of the source: Han characters and signs are words.
    pub source: Vec<String>,
    /// Those of the target.
    pub target: Vec<String>,
    /// One row for each target word, one weight for each source word. What is missing to 1 went to the end of the source.
    pub weights: Vec<Vec<f32>>,
}

/// From which weight on a cell is drawn darker.
const SHADES: [(f32, char); 4] = [(0.6, '█'), (0.35, '▓'), (0.15, '▒'), (0.05, '░')];
/// From which weight on a source word is linked, beside the one with the largest.
const LINKED: f32 = 0.3;
/// The longest word that is drawn whole, in columns.
const LONGEST: usize = 24;
/// The strongest of a row, where there is colour.
const STRONG: &str = "\x1b[1;36m";
const PLAIN: &str = "\x1b[0m";

impl Words {
    /// Pieces put together: the weight on a word is the sum over its pieces, the weight of a word the mean over its pieces.
    /// The ends of both sides are left out.
    pub fn of(alignment: &Alignment, tokenizer: &Tokenizer) -> Words {
        let (source, from) = words(tokenizer, &alignment.source);
        let (target, to) = words(tokenizer, &alignment.target);
        let mut weights = vec![vec![0.0; source.len()]; target.len()];
        for (&word, row) in to.iter().zip(&alignment.weights) {
            let pieces = to.iter().filter(|&&other| other == word).count() as f32;
            for (&seen, &weight) in from.iter().zip(row) {
                weights[word][seen] += weight / pieces;
            }
        }
        Words { source, target, weights }
    }

    /// As `0-0 1-2 …`, source word and target word, counted from 0: for each target word the source word with the largest
    /// weight (the first of several), and every other with a weight of at least 0.3.
    pub fn pharaoh(&self) -> String {
        let mut links = Vec::new();
        for (to, row) in self.weights.iter().enumerate() {
            let most = strongest(row);
            let linked = |from: &usize| Some(*from) == most || row[*from] >= LINKED;
            links.extend((0..row.len()).filter(linked).map(|from| (from, to)));
        }
        links.sort();
        links.iter().map(|(from, to)| format!("{from}-{to}")).collect::<Vec<_>>().join(" ")
    }

    /// As a grid: target words down, source words across, darker where the weight is larger. What is wider than `width`
    /// columns goes on below.
    pub fn drawn(&self, width: usize, colour: bool) -> String {
        let label = self.target.iter().map(|word| shown(word).width()).max().unwrap_or(0);
        let columns: Vec<(String, usize)> = self
            .source
            .iter()
            .map(|word| {
                let word = shown(word);
                let width = word.width().max(2);
                (word, width)
            })
            .collect();
        let mut drawing = String::new();
        for (band, range) in bands(&columns, width.saturating_sub(label)).into_iter().enumerate() {
            if band > 0 {
                drawing.push('\n');
            }
            let head: Vec<String> = columns[range.clone()].iter().map(|(word, width)| fill(word, *width)).collect();
            push_line(&mut drawing, &format!("{} {}", " ".repeat(label), head.join(" ")));
            for (word, row) in self.target.iter().zip(&self.weights) {
                let word = shown(word);
                let mut line = " ".repeat(label - word.width()) + &word;
                let most = strongest(row);
                for at in range.clone() {
                    let cell = shade(row[at]).to_string().repeat(columns[at].1);
                    line.push(' ');
                    if colour && Some(at) == most && row[at] >= SHADES[3].0 {
                        line.extend([STRONG, &cell, PLAIN]);
                    } else {
                        line.push_str(&cell);
                    }
                }
                push_line(&mut drawing, &line);
            }
        }
        drawing
    }
}

/// The words of a side, its end left out, and which of them each piece belongs to. A piece that is only a space belongs to
/// the word behind it.
fn words(tokenizer: &Tokenizer, tokens: &[u32]) -> (Vec<String>, Vec<usize>) {
    let tokens = &tokens[..tokens.len().saturating_sub(1)];
    join(tokenizer.pieces(tokens))
}

fn join(pieces: Vec<Piece>) -> (Vec<String>, Vec<usize>) {
    let (mut words, mut owners): (Vec<String>, Vec<usize>) = (Vec::new(), Vec::new());
    for Piece { text, begins_word } in pieces {
        let text = text.trim();
        match words.last_mut() {
            Some(word) if !begins_word || word.is_empty() => word.push_str(text),
            _ => words.push(text.to_owned()),
        }
        owners.push(words.len() - 1);
    }
    (words, owners)
}

/// The place of the largest weight, the first of several.
fn strongest(row: &[f32]) -> Option<usize> {
    (0..row.len()).reduce(|most, at| if row[at] > row[most] { at } else { most })
}

fn shade(weight: f32) -> char {
    SHADES.iter().find(|(least, _)| weight >= *least).map_or(' ', |(_, shade)| *shade)
}

/// A word as it is drawn: nothing that moves the cursor, and not too long.
fn shown(word: &str) -> String {
    let word: String = word.chars().map(|c| if c.width().is_none() { '·' } else { c }).collect();
    if word.width() <= LONGEST {
        return word;
    }
    let mut columns = 0;
    let fits = |c: &char| {
        columns += c.width().unwrap_or(0);
        columns < LONGEST
    };
    word.chars().take_while(fits).chain(['…']).collect()
}

fn fill(word: &str, width: usize) -> String {
    word.to_owned() + &" ".repeat(width - word.width())
}

/// Columns that fit beside each other, and then the next ones: at least one at a time.
fn bands(columns: &[(String, usize)], width: usize) -> Vec<std::ops::Range<usize>> {
    let (mut bands, mut from, mut used) = (Vec::new(), 0, 0);
    for (at, (_, column)) in columns.iter().enumerate() {
        if at > from && used + column + 1 > width {
            bands.push(from..at);
            (from, used) = (at, 0);
        }
        used += column + 1;
    }
    if from < columns.len() {
        bands.push(from..columns.len());
    }
    bands
}

fn push_line(drawing: &mut String, line: &str) {
    drawing.push_str(line.trim_end());
    drawing.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Words {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect();
        Words {
            source: words("好 久 不 见 。"),
            target: words("Long time no see ."),
            weights: vec![
                vec![0.7, 0.2, 0.0, 0.0, 0.0],
                vec![0.4, 0.5, 0.0, 0.0, 0.1],
                vec![0.0, 0.0, 0.9, 0.1, 0.0],
                vec![0.0, 0.1, 0.02, 0.2, 0.0],
                vec![0.0, 0.0, 0.0, 0.0, 1.0],
            ],
        }
    }

    #[test]
    fn a_wide_character_has_a_wide_column() {
        let expected = "     好 久 不 见 。\nLong ██ ▒▒\ntime ▓▓ ▓▓       ░░\n  no       ██ ░░\n see    ░░    ▒▒\n   .             ██\n";
        assert_eq!(example().drawn(80, false), expected);
    }

    #[test]
    fn what_is_too_wide_goes_on_below() {
        for width in 1..30 {
            let drawn = example().drawn(width, false);
            assert!(drawn.lines().all(|line| line.width() <= width.max(4 + 3)), "{width}:\n{drawn}");
            for word in ["好", "久", "不", "见", "。"] {
                assert_eq!(drawn.matches(word).count(), 1);
            }
        }
        assert_eq!(example().drawn(10, false).matches("Long").count(), 3);
    }

    #[test]
    fn colour_marks_the_strongest_of_a_row_and_changes_nothing_else() {
        let coloured = example().drawn(80, true);
        assert_eq!(coloured.matches(STRONG).count(), 5);
        assert_eq!(coloured.replace(STRONG, "").replace(PLAIN, ""), example().drawn(80, false));
    }

    #[test]
    fn pharaoh_has_the_largest_weight_of_each_target_word_and_all_from_a_threshold_on() {
        assert_eq!(example().pharaoh(), "0-0 0-1 1-1 2-2 3-3 4-4");
    }

    #[test]
    fn words_that_are_long_or_would_move_the_cursor_are_tamed() {
        assert_eq!(shown("a\x1b[2Jb"), "a·[2Jb");
        let long = shown(&"长".repeat(30));
        assert!(long.width() <= LONGEST && long.ends_with('…'), "{long}");
    }

    #[test]
    fn pieces_become_words_and_a_space_belongs_to_the_word_behind_it() {
        let pieces =
            [("Nov", true), ("ember", false), (" ", true), ("1", true), ("5", false), ("", true), ("日", false)];
        let pieces = pieces.map(|(text, begins_word)| Piece { text: text.into(), begins_word });
        let (words, owners) = join(pieces.to_vec());
        assert_eq!((words, owners), (["November", "15", "日"].map(String::from).to_vec(), vec![0, 0, 1, 1, 1, 2, 2]));
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        let nothing = Words { source: vec![], target: vec![], weights: vec![] };
        assert_eq!((nothing.drawn(80, false), nothing.pharaoh()), (String::new(), String::new()));
    }
}
