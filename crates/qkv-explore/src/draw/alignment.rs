//! The word alignment of a translation as a grid of block characters, as `qkv translate` prints it. Shades stand for
//! absolute weights, not for shares of the largest, so that alignments can be compared.

use super::letters::fit_columns;
use crate::words::Matrix;
use std::ops::Range;
use unicode_width::UnicodeWidthStr;

/// Lower bounds of the shades, darkest first.
pub(crate) const SHADES: [(f32, char); 4] = [(0.6, '█'), (0.35, '▓'), (0.15, '▒'), (0.05, '░')];
/// Maximum label width in terminal columns.
pub(crate) const LONGEST: usize = 24;
/// ANSI style of the largest weight of a row.
pub(crate) const STRONG: &str = "\x1b[1;36m";
pub(crate) const PLAIN: &str = "\x1b[0m";

/// Draws an alignment as a grid, darker where the weight is larger. Columns that do not fit into `width` continue
/// below. With color, the largest weight of each row is highlighted.
///
/// ```
/// use qkv_explore::{Matrix, draw};
/// let alignment = Matrix {
///     rows: ["Good", "morning"].map(String::from).to_vec(),
///     columns: ["早上", "好"].map(String::from).to_vec(),
///     weights: vec![vec![0.1, 0.9], vec![0.7, 0.2]],
/// };
/// assert_eq!(draw::alignment(&alignment, 80, false), "        早上 好\n   Good ░░░░ ██\nmorning ████ ▒▒\n");
/// ```
pub fn alignment(matrix: &Matrix, width: usize, color: bool) -> String {
    let grid = Grid::of(matrix, LONGEST);
    let mut drawing = String::new();
    for (band, range) in grid.bands(width).into_iter().enumerate() {
        if band > 0 {
            drawing.push('\n');
        }
        grid.write(&mut drawing, matrix, range, |row, at| {
            let weight = matrix.weights[row].get(at).copied().unwrap_or(0.0);
            let strong = color && weight >= SHADES[3].0 && Some(at) == strongest(&matrix.weights[row]);
            Cell { shade: shade(weight), before: if strong { STRONG } else { "" }.into() }
        });
    }
    drawing
}

/// The content of a cell.
pub(crate) struct Cell {
    pub shade: char,
    /// ANSI sequence that sets its color; may be empty.
    pub before: String,
}

/// The labels of a grid, truncated, with their widths.
pub(crate) struct Grid {
    rows: Vec<String>,
    columns: Vec<(String, usize)>,
    /// Width of the widest row label.
    label: usize,
}

impl Grid {
    /// A grid with labels of at most `longest` columns.
    pub fn of(matrix: &Matrix, longest: usize) -> Grid {
        let rows: Vec<String> = matrix.rows.iter().map(|word| fit_columns(word, longest)).collect();
        let columns = matrix.columns.iter().map(|word| {
            let word = fit_columns(word, longest);
            let width = word.width().max(2);
            (word, width)
        });
        Grid { label: rows.iter().map(|word| word.width()).max().unwrap_or(0), columns: columns.collect(), rows }
    }

    /// Splits the columns into bands that fit into `width`, of at least one column each.
    pub fn bands(&self, width: usize) -> Vec<Range<usize>> {
        let width = width.saturating_sub(self.label);
        let (mut bands, mut from, mut used) = (Vec::new(), 0, 0);
        for (at, (_, column)) in self.columns.iter().enumerate() {
            if at > from && used + column + 1 > width {
                bands.push(from..at);
                (from, used) = (at, 0);
            }
            used += column + 1;
        }
        if from < self.columns.len() {
            bands.push(from..self.columns.len());
        }
        bands
    }

    /// Writes one band: column labels, then rows.
    pub fn write(
        &self,
        drawing: &mut String,
        matrix: &Matrix,
        range: Range<usize>,
        mut cell: impl FnMut(usize, usize) -> Cell,
    ) {
        let head: Vec<String> = self.columns[range.clone()].iter().map(|(word, width)| fill(word, *width)).collect();
        push_line(drawing, &format!("{} {}", " ".repeat(self.label), head.join(" ")));
        for (row, word) in self.rows.iter().enumerate().take(matrix.weights.len()) {
            let mut line = " ".repeat(self.label - word.width()) + word;
            for at in range.clone() {
                let Cell { shade, before } = cell(row, at);
                let filled = shade.to_string().repeat(self.columns[at].1);
                line.push(' ');
                match before.is_empty() {
                    true => line.push_str(&filled),
                    false => line.extend([&before, &filled, PLAIN]),
                }
            }
            push_line(drawing, &line);
        }
    }
}

/// Index of the largest weight, the first on a tie.
pub(crate) fn strongest(row: &[f32]) -> Option<usize> {
    (0..row.len()).reduce(|most, at| if row[at] > row[most] { at } else { most })
}

/// The block character for a level.
pub(crate) fn shade(place: f32) -> char {
    SHADES.iter().find(|(least, _)| place >= *least).map_or(' ', |(_, shade)| *shade)
}

fn fill(word: &str, width: usize) -> String {
    word.to_owned() + &" ".repeat(width - word.width())
}

pub(crate) fn push_line(drawing: &mut String, line: &str) {
    drawing.push_str(line.trim_end());
    drawing.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Matrix {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect();
        Matrix {
            columns: words("好 久 不 见 。"),
            rows: words("Long time no see ."),
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
        assert_eq!(alignment(&example(), 80, false), expected);
    }

    #[test]
    fn columns_that_do_not_fit_continue_below() {
        for width in 1..30 {
            let drawn = alignment(&example(), width, false);
            assert!(drawn.lines().all(|line| line.width() <= width.max(4 + 3)), "{width}:\n{drawn}");
            for word in ["好", "久", "不", "见", "。"] {
                assert_eq!(drawn.matches(word).count(), 1);
            }
        }
        assert_eq!(alignment(&example(), 10, false).matches("Long").count(), 3);
    }

    #[test]
    fn color_marks_the_largest_of_a_row_and_changes_nothing_else() {
        let colored = alignment(&example(), 80, true);
        assert_eq!(colored.matches(STRONG).count(), 5);
        assert_eq!(colored.replace(STRONG, "").replace(PLAIN, ""), alignment(&example(), 80, false));
    }

    #[test]
    fn pharaoh_has_the_largest_weight_of_each_target_word_and_all_from_a_threshold_on() {
        assert_eq!(example().pharaoh(), "0-0 0-1 1-1 2-2 3-3 4-4");
    }

    #[test]
    fn an_empty_matrix_draws_nothing() {
        let nothing = Matrix { rows: vec![], columns: vec![], weights: vec![] };
        assert_eq!((alignment(&nothing, 80, false), nothing.pharaoh()), (String::new(), String::new()));
    }
}
