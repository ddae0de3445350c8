//! The layout of a rendered picture: cells, labels, color bar, title and note, as a list of marks that SVG and PNG draw
//! alike. Labels are placed by estimated text widths (`letters`), so that no two overlap.

use super::letters::{fit_em, text_width};
use super::palette::Color;
use super::picture::{Picture, Pooled};
use super::ticks::ticks;
use qkv_models::Result;

/// Maximum rows and columns; larger matrices are pooled.
const MAX_CELLS: usize = 300;
/// Side of a large heat map.
const WIDE: f64 = 640.0;
const LARGEST_CELL: f64 = 30.0;
const SMALLEST_CELL: f64 = 2.0;
/// Cells of at least this size have a gap between them.
const APART: f64 = 10.0;
const MARGIN: f64 = 16.0;
const TITLE: f64 = 15.0;
/// Maximum width of labels and titles.
const LABEL: f64 = 150.0;
const LONGEST_TITLE: f64 = 600.0;
/// Angle of slanted labels, and the fraction of their length that they take horizontally and vertically.
const TURN: f64 = -45.0;
const LEAN: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// Size of the color bar.
const BAR: [f64; 2] = [14.0, 128.0];
const NOTE: f64 = 11.0;

/// Text anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing instruction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mark {
    /// A filled rectangle.
    Box { x: f64, y: f64, width: f64, height: f64, color: Color },
    /// Cells in row-major order, as indices into the colors of the sheet.
    Cells { x: f64, y: f64, cell: f64, gap: f64, columns: usize, levels: Vec<u8> },
    /// A line of text on its baseline, rotated about its anchor by degrees.
    Text { x: f64, y: f64, size: f64, anchor: Anchor, turn: f64, color: Color, text: String },
}

/// A picture after layout.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sheet {
    pub width: f64,
    pub height: f64,
    pub paper: Color,
    pub colors: [Color; 256],
    pub marks: Vec<Mark>,
}

/// The labels of one axis that have room, each with the index of its row or column.
struct Labels {
    shown: Vec<(usize, String)>,
    /// Width of the longest label, in pixels.
    length: f64,
}

impl Labels {
    fn of(names: &[String], every: usize, size: f64) -> Labels {
        let shown: Vec<(usize, String)> =
            names.iter().enumerate().step_by(every.max(1)).map(|(at, name)| (at, fit_em(name, LABEL / size))).collect();
        let length = shown.iter().map(|(_, name)| text_width(name) * size).fold(0.0, f64::max);
        Labels { shown, length }
    }
}

/// How many cells a label needs.
fn every(needed: f64, cell: f64) -> usize {
    (needed / cell).ceil().max(1.0) as usize
}

impl Sheet {
    pub fn of(picture: &Picture) -> Result<Sheet> {
        picture.check()?;
        let scaled = picture.scaled();
        let pooled = Pooled::of(&picture.matrix, [MAX_CELLS, MAX_CELLS]);
        let (rows, columns) = (pooled.matrix.rows.len(), pooled.matrix.columns.len());
        let (ink, quiet) = (picture.theme.ink(), picture.theme.quiet());
        let cell = (WIDE / rows.max(columns) as f64).floor().clamp(SMALLEST_CELL, LARGEST_CELL);
        let size = (cell * 0.5).clamp(9.0, 13.0);
        let mut marks = Vec::new();

        let left = Labels::of(&pooled.matrix.rows, every(size * 1.2, cell), size);
        let upright = Labels::of(&pooled.matrix.columns, 1, size);
        let leans = upright.length > cell - 2.0;
        let top =
            if leans { Labels::of(&pooled.matrix.columns, every(size * 1.3 / LEAN, cell), size) } else { upright };
        let above = if leans { top.length * LEAN + size * 0.8 } else { size * 1.2 };

        let x0 = (MARGIN + left.length + 7.0).ceil();
        let title = picture.title.as_ref().map(|title| fit_em(title, LONGEST_TITLE / TITLE));
        let y0 = (MARGIN + if title.is_some() { TITLE + 14.0 } else { 0.0 } + above + 5.0).ceil();
        let (x1, y1) = (x0 + cell * columns as f64, y0 + cell * rows as f64);
        let text = |x: f64, y: f64, size: f64, anchor: Anchor, turn: f64, color: Color, text: String| Mark::Text {
            x,
            y,
            size,
            anchor,
            turn,
            color,
            text,
        };

        for (at, name) in left.shown {
            let y = y0 + cell * (at as f64 + 0.5) + size * 0.36;
            marks.push(text(x0 - 7.0, y, size, Anchor::End, 0.0, ink, name));
        }
        let mut right = x1;
        for (at, name) in top.shown {
            let middle = x0 + cell * (at as f64 + 0.5);
            if leans {
                right = right.max(middle + (text_width(&name) * size + size) * LEAN);
                marks.push(text(middle + size * 0.3, y0 - 5.0, size, Anchor::Start, TURN, ink, name));
            } else {
                marks.push(text(middle, y0 - 6.0, size, Anchor::Middle, 0.0, ink, name));
            }
        }

        let gap = if cell >= APART { 1.0 } else { 0.0 };
        // A frame, so that white cells have an edge on a white background.
        let frame = |x, y, width, height| Mark::Box { x, y, width, height, color: quiet };
        marks.push(frame(x0 - 1.0 - gap, y0 - 1.0 - gap, x1 - x0 + 2.0 + gap, y1 - y0 + 2.0 + gap));
        let paper = picture.theme.paper();
        marks.push(Mark::Box { x: x0 - gap, y: y0 - gap, width: x1 - x0 + gap, height: y1 - y0 + gap, color: paper });
        let level = |&w: &f32| (255.0 * scaled.place(w)).round() as u8;
        let levels = pooled.matrix.weights.iter().flatten().map(level).collect();
        marks.push(Mark::Cells { x: x0, y: y0, cell, gap, columns, levels });

        // The color bar, from 1 at the top to 0.
        let (bar, colors) = (x1 + 20.0, picture.palette.colors(picture.theme));
        let [bar_width, bar_height] = BAR;
        marks.push(frame(bar - 1.0, y0 - 1.0, bar_width + 2.0, bar_height + 2.0));
        for step in 0..64usize {
            let (y, height) = (y0 + 2.0 * step as f64, 2.0);
            marks.push(Mark::Box { x: bar, y, width: bar_width, height, color: colors[255 - 4 * step] });
        }
        let mut ends = bar + bar_width;
        for (place, name) in ticks(&scaled) {
            let y = y0 + bar_height * (1.0 - f64::from(place));
            marks.push(frame(bar + bar_width + 1.0, y.round() - 0.5, 4.0, 1.0));
            ends = ends.max(bar + bar_width + 9.0 + text_width(&name) * NOTE);
            marks.push(text(bar + bar_width + 9.0, y + NOTE * 0.36, NOTE, Anchor::Start, 0.0, quiet, name));
        }
        let mut bottom = y1.max(y0 + bar_height) + 8.0;
        if let Some(note) = pooled.note() {
            bottom += NOTE + 8.0;
            right = right.max(MARGIN + text_width(&note) * NOTE);
            marks.push(text(MARGIN, bottom - 4.0, NOTE, Anchor::Start, 0.0, quiet, note));
        }
        if let Some(title) = title {
            right = right.max(MARGIN + text_width(&title) * TITLE);
            marks.push(text(MARGIN, MARGIN + TITLE, TITLE, Anchor::Start, 0.0, ink, title));
        }
        let (width, height) = ((right.max(ends) + MARGIN).ceil(), (bottom + MARGIN - 8.0).ceil());
        Ok(Sheet { width, height, paper, colors, marks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::Matrix;

    type Corner = (f64, f64);

    /// The corners of a text, rotated.
    fn corners(mark: &Mark) -> Option<[Corner; 4]> {
        let Mark::Text { x, y, size, anchor, turn, text, .. } = mark else { return None };
        let length = text_width(text) * size;
        let start = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => -length / 2.0,
            Anchor::End => -length,
        };
        let (sin, cos) = turn.to_radians().sin_cos();
        // From descenders to the top of a capital.
        let flat = [(start, -0.75), (start + length, -0.75), (start + length, 0.2), (start, 0.2)];
        Some(flat.map(|(along, down)| (x + along * cos - down * size * sin, y + along * sin + down * size * cos)))
    }

    /// Whether two boxes are disjoint, by the separating axis theorem.
    fn apart(a: &[Corner; 4], b: &[Corner; 4]) -> bool {
        [a, b].into_iter().any(|of| {
            [(of[0], of[1]), (of[1], of[2])].into_iter().any(|(from, to)| {
                let along = |corner: &Corner| corner.0 * (to.0 - from.0) + corner.1 * (to.1 - from.1);
                let least = |of: &[Corner; 4]| of.iter().map(along).fold(f64::INFINITY, f64::min);
                let most = |of: &[Corner; 4]| of.iter().map(along).fold(f64::NEG_INFINITY, f64::max);
                most(a) <= least(b) + 1e-6 || most(b) <= least(a) + 1e-6
            })
        })
    }

    #[test]
    fn no_text_overlaps_another_or_leaves_the_sheet() {
        let names = ["好", "a", "internationalisation", "WWWWWW", "很长很长很长很长很长很长的标签在这里", "it"];
        for (rows, columns) in [(1, 1), (1, 40), (40, 1), (7, 7), (25, 18), (64, 64), (150, 90), (299, 300), (900, 2)] {
            for shift in 0..names.len() {
                let labels =
                    |count: usize| (0..count).map(|at| names[(at / 2 + shift) % names.len()].to_owned()).collect();
                let matrix =
                    Matrix { rows: labels(rows), columns: labels(columns), weights: vec![vec![0.3; columns]; rows] };
                for title in [None, Some("A title that says what this is, at some length".repeat(shift))] {
                    let sheet = Sheet::of(&Picture { title, ..Picture::from(matrix.clone()) }).unwrap();
                    let texts: Vec<_> = sheet.marks.iter().filter_map(|mark| Some((mark, corners(mark)?))).collect();
                    for (at, (mark, corners)) in texts.iter().enumerate() {
                        for &(x, y) in corners {
                            let inside = (0.0..=sheet.width).contains(&x) && (0.0..=sheet.height).contains(&y);
                            assert!(inside, "{rows} × {columns}: {mark:?}");
                        }
                        for (other, beside) in &texts[..at] {
                            assert!(apart(corners, beside), "{rows} × {columns}: {mark:?} lies on {other:?}");
                        }
                    }
                }
            }
        }
    }
}
