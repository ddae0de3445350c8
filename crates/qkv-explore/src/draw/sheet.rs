//! Where everything of a printed picture stands: cells, labels, the bar of colours, title and note, as a list of marks that SVG
//! and PNG draw alike. Labels are planned by estimated widths (`letters`), so that no two of them overlap.

use super::letters::{printed, shortened};
use super::palette::Colour;
use super::picture::{Picture, Pooled};
use super::ticks::ticks;
use qkv_models::Result;

/// The most rows and columns that are drawn.
const MOST: usize = 300;
/// The size of the cells of a large picture, all together.
const WIDE: f64 = 640.0;
const LARGEST_CELL: f64 = 30.0;
const SMALLEST_CELL: f64 = 2.0;
/// Cells from this size on have a gap between them.
const APART: f64 = 10.0;
const MARGIN: f64 = 16.0;
const TITLE: f64 = 15.0;
/// The longest label, and the longest title.
const LABEL: f64 = 150.0;
const LONGEST_TITLE: f64 = 600.0;
/// Text that leans, and what its length covers across and up.
const TURN: f64 = -45.0;
const LEAN: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// The bar of colours.
const BAR: [f64; 2] = [14.0, 128.0];
const NOTE: f64 = 11.0;

/// From where a text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// One thing that is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mark {
    /// A filled rectangle.
    Box { x: f64, y: f64, width: f64, height: f64, colour: Colour },
    /// The cells, row by row: each a place in the sheet's colours.
    Cells { x: f64, y: f64, cell: f64, gap: f64, columns: usize, levels: Vec<u8> },
    /// A line of text on its baseline, turned about its anchor by degrees.
    Text { x: f64, y: f64, size: f64, anchor: Anchor, turn: f64, colour: Colour, text: String },
}

/// A picture, laid out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sheet {
    pub width: f64,
    pub height: f64,
    pub paper: Colour,
    pub colours: [Colour; 256],
    pub marks: Vec<Mark>,
}

/// Labels along one side: each with the number of its line, none nearer to the next than it may be.
struct Labels {
    shown: Vec<(usize, String)>,
    /// The longest, in pixels.
    length: f64,
}

impl Labels {
    fn of(names: &[String], every: usize, size: f64) -> Labels {
        let shown: Vec<(usize, String)> = names
            .iter()
            .enumerate()
            .step_by(every.max(1))
            .map(|(at, name)| (at, shortened(name, LABEL / size)))
            .collect();
        let length = shown.iter().map(|(_, name)| printed(name) * size).fold(0.0, f64::max);
        Labels { shown, length }
    }
}

/// Every so many lines a label has room.
fn every(needed: f64, cell: f64) -> usize {
    (needed / cell).ceil().max(1.0) as usize
}

impl Sheet {
    pub fn of(picture: &Picture) -> Result<Sheet> {
        picture.check()?;
        let scaled = picture.scaled();
        let pooled = Pooled::of(&picture.matrix, [MOST, MOST]);
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
        let title = picture.title.as_ref().map(|title| shortened(title, LONGEST_TITLE / TITLE));
        let y0 = (MARGIN + if title.is_some() { TITLE + 14.0 } else { 0.0 } + above + 5.0).ceil();
        let (x1, y1) = (x0 + cell * columns as f64, y0 + cell * rows as f64);
        let text = |x: f64, y: f64, size: f64, anchor: Anchor, turn: f64, colour: Colour, text: String| Mark::Text {
            x,
            y,
            size,
            anchor,
            turn,
            colour,
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
                right = right.max(middle + (printed(&name) * size + size) * LEAN);
                marks.push(text(middle + size * 0.3, y0 - 5.0, size, Anchor::Start, TURN, ink, name));
            } else {
                marks.push(text(middle, y0 - 6.0, size, Anchor::Middle, 0.0, ink, name));
            }
        }

        let gap = if cell >= APART { 1.0 } else { 0.0 };
        // A frame, so that white cells have an end on white paper.
        let frame = |x, y, width, height| Mark::Box { x, y, width, height, colour: quiet };
        marks.push(frame(x0 - 1.0 - gap, y0 - 1.0 - gap, x1 - x0 + 2.0 + gap, y1 - y0 + 2.0 + gap));
        let paper = picture.theme.paper();
        marks.push(Mark::Box { x: x0 - gap, y: y0 - gap, width: x1 - x0 + gap, height: y1 - y0 + gap, colour: paper });
        let level = |&w: &f32| (255.0 * scaled.place(w)).round() as u8;
        let levels = pooled.matrix.weights.iter().flatten().map(level).collect();
        marks.push(Mark::Cells { x: x0, y: y0, cell, gap, columns, levels });

        // The bar: its colours from most at the top to nothing.
        let (bar, colours) = (x1 + 20.0, picture.palette.colours(picture.theme));
        let [bar_width, bar_height] = BAR;
        marks.push(frame(bar - 1.0, y0 - 1.0, bar_width + 2.0, bar_height + 2.0));
        for step in 0..64usize {
            let (y, height) = (y0 + 2.0 * step as f64, 2.0);
            marks.push(Mark::Box { x: bar, y, width: bar_width, height, colour: colours[255 - 4 * step] });
        }
        let mut ends = bar + bar_width;
        for (place, name) in ticks(&scaled) {
            let y = y0 + bar_height * (1.0 - f64::from(place));
            marks.push(frame(bar + bar_width + 1.0, y.round() - 0.5, 4.0, 1.0));
            ends = ends.max(bar + bar_width + 9.0 + printed(&name) * NOTE);
            marks.push(text(bar + bar_width + 9.0, y + NOTE * 0.36, NOTE, Anchor::Start, 0.0, quiet, name));
        }
        let mut bottom = y1.max(y0 + bar_height) + 8.0;
        if let Some(note) = pooled.note() {
            bottom += NOTE + 8.0;
            right = right.max(MARGIN + printed(&note) * NOTE);
            marks.push(text(MARGIN, bottom - 4.0, NOTE, Anchor::Start, 0.0, quiet, note));
        }
        if let Some(title) = title {
            right = right.max(MARGIN + printed(&title) * TITLE);
            marks.push(text(MARGIN, MARGIN + TITLE, TITLE, Anchor::Start, 0.0, ink, title));
        }
        let (width, height) = ((right.max(ends) + MARGIN).ceil(), (bottom + MARGIN - 8.0).ceil());
        Ok(Sheet { width, height, paper, colours, marks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::Matrix;

    type Corner = (f64, f64);

    /// Where a text lies: its corners, turned.
    fn corners(mark: &Mark) -> Option<[Corner; 4]> {
        let Mark::Text { x, y, size, anchor, turn, text, .. } = mark else { return None };
        let length = printed(text) * size;
        let start = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => -length / 2.0,
            Anchor::End => -length,
        };
        let (sin, cos) = turn.to_radians().sin_cos();
        // From a little below the line to the top of a capital.
        let flat = [(start, -0.75), (start + length, -0.75), (start + length, 0.2), (start, 0.2)];
        Some(flat.map(|(along, down)| (x + along * cos - down * size * sin, y + along * sin + down * size * cos)))
    }

    /// Whether two boxes have a line between them that follows one of their sides.
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
    fn no_text_lies_on_another_or_beyond_the_paper() {
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
