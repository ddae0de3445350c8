//! A picture in a terminal: cells of block characters with labels, colored if the terminal supports it, shaded
//! otherwise. A matrix that is too wide continues below; a much larger one is pooled to a map that fits, with a note.

use super::alignment::{Cell, Grid, LONGEST, PLAIN, SHADES, STRONG, push_line, strongest};
use super::letters::fit_columns;
use super::palette::{Color, Theme};
use super::picture::{Picture, Pooled};
use super::scale::{Scale, Scaled};
use super::ticks::number;
use std::ops::Range;
use unicode_width::UnicodeWidthStr;

/// Maximum bands and rows of a drawing with labels; larger ones become a map.
const BANDS: usize = 3;
const ROWS: usize = 80;
/// Maximum lines of a map.
const LINES: usize = 40;
/// Cells below this level keep the background of the terminal.
const PAINTED: f32 = 0.02;
/// Lower bounds of the shades for logarithmic and rank scales: evenly spaced.
const EVEN: [(f32, char); 4] = [(0.8, '█'), (0.6, '▓'), (0.4, '▒'), (0.2, '░')];
/// Steps of the color legend.
const STRIP: usize = 24;

/// Color support of a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colors {
    /// None: weights are drawn as shades.
    #[default]
    None,
    /// 16: weights are drawn as shades, and the largest of a row is highlighted.
    Few,
    /// 256: a 6 × 6 × 6 cube and grays.
    Cube,
    /// 24-bit.
    All,
}

impl Colors {
    /// ANSI sequence for a background; `None` with too few colors.
    pub(crate) fn behind(self, [r, g, b]: Color) -> Option<String> {
        match self {
            Colors::None | Colors::Few => None,
            Colors::Cube => Some(format!("\x1b[48;5;{}m", cube([r, g, b]))),
            Colors::All => Some(format!("\x1b[48;2;{r};{g};{b}m")),
        }
    }

    pub(crate) fn before(self, [r, g, b]: Color) -> Option<String> {
        match self {
            Colors::None | Colors::Few => None,
            Colors::Cube => Some(format!("\x1b[38;5;{}m", cube([r, g, b]))),
            Colors::All => Some(format!("\x1b[38;2;{r};{g};{b}m")),
        }
    }
}

/// The nearest of the 256 colors, from the cube or the grays.
fn cube(color: Color) -> usize {
    const LEVELS: [u8; 6] = [0, 95, 135, 175, 215, 255];
    let nearest = |x: u8| (0..6).min_by_key(|&at| LEVELS[at].abs_diff(x)).unwrap_or(0);
    let [r, g, b] = color.map(nearest);
    let mean = color.iter().map(|&x| usize::from(x)).sum::<usize>() / 3;
    let grey = (mean.saturating_sub(3) / 10).min(23);
    let away = |other: Color| (0..3).map(|i| usize::from(color[i].abs_diff(other[i])).pow(2)).sum::<usize>();
    let of_grey = [8 + 10 * grey as u8; 3];
    match away(of_grey) < away([LEVELS[r], LEVELS[g], LEVELS[b]]) {
        true => 232 + grey,
        false => 16 + 36 * r + 6 * g + b,
    }
}

impl Picture {
    /// Draws the picture for a terminal of `width` columns. Colors are those of the dark theme.
    ///
    /// ```
    /// use qkv_explore::{Matrix, draw::{Colors, Picture}};
    /// let matrix = Matrix {
    ///     rows: ["Good", "morning"].map(String::from).to_vec(),
    ///     columns: ["早上", "好"].map(String::from).to_vec(),
    ///     weights: vec![vec![0.05, 0.45], vec![0.5, 0.1]],
    /// };
    /// let drawn = Picture::from(matrix).terminal(80, Colors::None);
    /// assert_eq!(drawn, "
    ///         早上 好
    ///    Good ░░░░ ██
    /// morning ████ ▒▒
    ///
    /// ░ 0.025  ▒ 0.075  ▓ 0.17  █ 0.30  largest 0.50
    /// ".trim_start_matches('\n'));
    /// ```
    pub fn terminal(&self, width: usize, colors: Colors) -> String {
        if self.check().is_err() {
            return String::new();
        }
        let scaled = self.scaled();
        let mut drawing = String::new();
        match self.grid(width) {
            None => self.map(&mut drawing, &scaled, width, colors),
            Some((grid, bands)) => {
                for (band, range) in bands.into_iter().enumerate() {
                    if band > 0 {
                        drawing.push('\n');
                    }
                    grid.write(&mut drawing, &self.matrix, range, |row, at| {
                        self.cell(&scaled, &self.matrix.weights[row], at, colors)
                    });
                }
            }
        }
        drawing.push('\n');
        push_line(&mut drawing, &self.legend(&scaled, colors));
        drawing
    }

    /// A grid with the longest labels that fit, and its bands.
    fn grid(&self, width: usize) -> Option<(Grid, Vec<Range<usize>>)> {
        if self.matrix.rows.len() > ROWS {
            return None;
        }
        let grids = [LONGEST, LONGEST / 2, LONGEST / 4].map(|longest| Grid::of(&self.matrix, longest));
        grids.into_iter().find_map(|grid| {
            let bands = grid.bands(width);
            (bands.len() <= BANDS).then_some((grid, bands))
        })
    }

    fn painted(&self, place: f32) -> Color {
        self.palette.color(place, Theme::Dark)
    }

    fn cell(&self, scaled: &Scaled, row: &[f32], at: usize, colors: Colors) -> Cell {
        let place = scaled.place(row[at]);
        let behind = colors.behind(self.painted(place)).filter(|_| place >= PAINTED);
        match (colors, behind) {
            (_, Some(before)) => Cell { shade: ' ', before },
            (Colors::Cube | Colors::All, None) => Cell { shade: ' ', before: String::new() },
            (Colors::Few, _) if strongest(row) == Some(at) && place >= shades(scaled)[3].0 => {
                Cell { shade: shade(scaled, place), before: STRONG.into() }
            }
            _ => Cell { shade: shade(scaled, place), before: String::new() },
        }
    }

    /// A pooled map: one character per cell, or per two cells above each other with color; some rows are labeled.
    fn map(&self, drawing: &mut String, scaled: &Scaled, width: usize, colors: Colors) {
        let high = if matches!(colors, Colors::Cube | Colors::All) { 2 } else { 1 };
        let widest = self.matrix.rows.iter().map(|row| fit_columns(row, LONGEST).width()).max().unwrap_or(0);
        let label = widest.min(width / 4);
        let room = width.saturating_sub(label + 1).max(8);
        let pooled = Pooled::of(&self.matrix, [LINES * high, room]);
        let place = |row: usize, at: usize| pooled.matrix.weights.get(row).map_or(0.0, |row| scaled.place(row[at]));
        for first in (0..pooled.matrix.rows.len()).step_by(high) {
            // Every second row is labeled, so that a label is next to its row.
            let name = if (first / high).is_multiple_of(2) {
                fit_columns(&pooled.matrix.rows[first], label)
            } else {
                String::new()
            };
            let mut line = format!("{}{name} ", " ".repeat(label - name.width()));
            for at in 0..pooled.matrix.columns.len() {
                match high {
                    1 => line.push(shade(scaled, place(first, at))),
                    _ => {
                        let [upper, lower] = [first, first + 1].map(|row| self.painted(place(row, at)));
                        line.extend(colors.before(upper));
                        line.extend(colors.behind(lower));
                        line.push('▀');
                    }
                }
            }
            if high == 2 {
                line.push_str(PLAIN);
            }
            push_line(drawing, &line);
        }
        let columns = &self.matrix.columns;
        let longest = LONGEST.min((room - 1) / 2);
        let ends =
            [columns.first(), columns.last()].map(|name| name.map_or(String::new(), |name| fit_columns(name, longest)));
        let across = pooled.matrix.columns.len();
        let between = " ".repeat(across.saturating_sub(ends[0].width() + ends[1].width()).max(1));
        push_line(drawing, &format!("{} {}{between}{}", " ".repeat(label), ends[0], ends[1]));
        if let Some(note) = pooled.note() {
            let (n, m) = (self.matrix.rows.len(), columns.len());
            push_line(drawing, &format!("{n} × {m}, {note}"));
        }
    }

    /// The legend of shades or colors.
    fn legend(&self, scaled: &Scaled, colors: Colors) -> String {
        let written = |weight: f32| {
            let weight = f64::from(weight);
            // Two significant digits.
            number(weight, 10f64.powf(weight.log10().floor() - 1.0))
        };
        let (largest, name) = (written(scaled.largest()), name(scaled));
        if let Colors::None | Colors::Few = colors {
            let shades =
                shades(scaled).iter().rev().map(|&(least, shade)| format!("{shade} {}", written(scaled.weight(least))));
            return format!("{}  largest {largest}{name}", shades.collect::<Vec<_>>().join("  "));
        }
        let step = |at: usize| colors.behind(self.painted(at as f32 / (STRIP - 1) as f32)).unwrap_or_default() + " ";
        let strip: String = (0..STRIP).map(step).collect();
        let least = match scaled.scale() {
            Scale::Linear => "0".into(),
            _ => written(scaled.weight(0.0)),
        };
        format!("{least} {strip}{PLAIN} {largest}{name}")
    }
}

fn shades(scaled: &Scaled) -> &'static [(f32, char); 4] {
    if scaled.scale() == Scale::Linear { &SHADES } else { &EVEN }
}

fn shade(scaled: &Scaled, place: f32) -> char {
    shades(scaled).iter().find(|(least, _)| place >= *least).map_or(' ', |(_, shade)| *shade)
}

fn name(scaled: &Scaled) -> &'static str {
    match scaled.scale() {
        Scale::Linear => "",
        Scale::Log => ", log scale",
        Scale::Rank => ", by rank",
    }
}
