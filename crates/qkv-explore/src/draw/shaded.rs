//! A document or an image for print, shaded by attention: words with the weight of each sentence beside it, or an image
//! next to itself overlaid with the weights of its patches. Shades are those of `document`.

use super::document::strengths;
use super::fonts::Fonts;
use super::letters::{fit_em, sanitized, text_width};
use super::palette::{Color, Palette, Theme};
use super::png::{self, Png};
use super::scale::Scale;
use super::sheet::{Anchor, Mark, Sheet};
use super::svg;
use crate::recording::Form;
use qkv_models::{Error, Reading, Result};

pub(super) const MARGIN: f64 = 16.0;
pub(super) const TITLE: f64 = 15.0;
/// Font size, line height and line width of a document.
const SIZE: f64 = 14.0;
const LINE: f64 = 22.0;
const WIDE: f64 = 620.0;
/// Font size and column width of sentence weights.
const SHARE: f64 = 11.0;
const BESIDE: f64 = 52.0;
/// Levels below this have no background.
const PAINTED: f32 = 0.02;
/// Side of an image, and the maximum number of cells per side.
const IMAGE: f64 = 256.0;
const CELLS: usize = 64;
/// Opacity of the overlay.
const COVER: f32 = 0.65;

/// A shaded document or image, laid out.
#[derive(Clone, Debug, PartialEq)]
pub struct Shaded {
    sheet: Sheet,
    title: String,
}

/// Colors of a drawing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// The color map.
    pub palette: Palette,
    /// The background.
    pub theme: Theme,
    /// How weights map to levels.
    pub scale: Scale,
}

impl Shaded {
    /// A document with a title.
    ///
    /// ```
    /// use qkv_explore::draw::{Shaded, Style};
    /// use qkv_models::{ReadSentence, ReadWord, Reading};
    /// let word = |text: &str, weight| ReadWord { text: text.into(), weight };
    /// let words = vec![word("So", 0.1), word("<good>!", 0.9)];
    /// let sentence = ReadSentence { text: "So <good>!".into(), weight: 1.0, words };
    /// let read = Reading { probabilities: vec![], sentences: vec![sentence], left_out: 0 };
    /// let svg = Shaded::document(&read, "pos 0.9", Style::default()).svg();
    /// for text in ["&lt;good&gt;!", "1.000", "pos 0.9"] {
    ///     assert!(svg.contains(&format!(">{text}</text>")));
    /// }
    /// ```
    pub fn document(read: &Reading, title: &str, style: Style) -> Shaded {
        let Style { palette, theme, scale } = style;
        let (of_words, of_sentences) = strengths(read);
        let words = scale.over(of_words.iter().flatten().copied());
        let sentences = scale.over(of_sentences.iter().copied());
        let mut marks = Vec::new();
        let mut y = MARGIN + TITLE + 14.0;
        let text = |x: f64, y: f64, size: f64, color: Color, text: String| {
            let (anchor, turn) = (Anchor::Start, 0.0);
            Mark::Text { x, y, size, anchor, turn, color, text }
        };
        for (at, sentence) in read.sentences.iter().enumerate() {
            let place = sentences.place(of_sentences[at]);
            if place >= PAINTED {
                let color = palette.color(place, theme);
                marks.push(Mark::Box { x: MARGIN, y: y + 2.0, width: 10.0, height: LINE - 4.0, color });
            }
            let beside = format!("{:.3}", sentence.weight);
            marks.push(text(MARGIN + 15.0, y + LINE * 0.68, SHARE, theme.quiet(), beside));
            let start = MARGIN + BESIDE;
            let mut x = start;
            for (word, &strength) in sentence.words.iter().zip(&of_words[at]) {
                let label = fit_em(&sanitized(&word.text), (WIDE - BESIDE) / SIZE);
                let width = text_width(&label) * SIZE;
                if x > start && x + width > MARGIN + WIDE {
                    (x, y) = (start, y + LINE);
                }
                let place = words.place(strength);
                let mut ink = theme.ink();
                if place >= PAINTED {
                    let color = palette.color(place, theme);
                    marks.push(Mark::Box { x: x - 2.0, y: y + 2.0, width: width + 4.0, height: LINE - 4.0, color });
                    ink = if is_light(color) { [16, 18, 24] } else { [244, 246, 250] };
                }
                marks.push(text(x, y + LINE * 0.72, SIZE, ink, label));
                x += width + SIZE * 0.4;
            }
            y += LINE;
        }
        if read.left_out > 0 {
            let note = format!("{} more sentences were not read", read.left_out);
            marks.push(text(MARGIN + BESIDE, y + LINE * 0.72, SHARE, theme.quiet(), note));
            y += LINE;
        }
        Shaded::titled(title, marks, [2.0 * MARGIN + WIDE, y + MARGIN], style)
    }

    /// An image, and beside it the same image overlaid with the weights of its patches, row by row.
    ///
    /// # Errors
    /// If the form is not an image, or there is not one weight for each patch.
    pub fn image(form: &Form, weights: &[f32], title: &str, style: Style) -> Result<Shaded> {
        let Form::Image { grid: [down, across], width, height, points } = form else {
            return Err(Error::invalid("the recording is not of an image"));
        };
        if weights.len() != down * across || points.len() != 3 * width * height || points.is_empty() {
            return Err(Error::invalid(format!("an image of {down} × {across} patches has {} weights", weights.len())));
        }
        let Style { palette, theme, scale } = style;
        let scaled = scale.over(weights.iter().copied());
        let (columns, rows) = ((*width).min(CELLS), (*height).min(CELLS));
        let cell = (IMAGE / columns.max(rows) as f64).floor();
        let (left, top) = (MARGIN, MARGIN + TITLE + 14.0);
        let beside = left + cell * columns as f64 + 20.0;
        let mut marks = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                // The point in the middle of the cell, and the patch that it belongs to.
                let (py, px) = ((2 * row + 1) * height / (2 * rows), (2 * column + 1) * width / (2 * columns));
                let at = 3 * (py * width + px);
                let color = [points[at], points[at + 1], points[at + 2]];
                let weight = weights[(py * down / height) * across + px * across / width];
                let shade = palette.color(scaled.place(weight), theme);
                let grey = color.iter().map(|&c| f32::from(c)).sum::<f32>() / 3.0;
                let under = shade.map(|c| (COVER * f32::from(c) + (1.0 - COVER) * grey).round() as u8);
                for (x, color) in [(left, color), (beside, under)] {
                    let (x, y) = (x + cell * column as f64, top + cell * row as f64);
                    marks.push(Mark::Box { x, y, width: cell, height: cell, color });
                }
            }
        }
        let right = beside + cell * columns as f64 + MARGIN;
        Ok(Shaded::titled(title, marks, [right, top + cell * rows as f64 + MARGIN], style))
    }

    pub(super) fn titled(title: &str, mut marks: Vec<Mark>, [width, height]: [f64; 2], style: Style) -> Shaded {
        let title = sanitized(title);
        let room = width - 2.0 * MARGIN;
        let shown = fit_em(&title, room / TITLE);
        let (anchor, turn, color) = (Anchor::Start, 0.0, style.theme.ink());
        marks.push(Mark::Text { x: MARGIN, y: MARGIN + TITLE, size: TITLE, anchor, turn, color, text: shown });
        let (paper, colors) = (style.theme.paper(), style.palette.colors(style.theme));
        Shaded { sheet: Sheet { width: width.ceil(), height: height.ceil(), paper, colors, marks }, title }
    }

    /// As SVG.
    pub fn svg(&self) -> String {
        svg::of_sheet(&self.sheet, Some(&self.title))
    }

    /// As PNG, `magnified` times the size of the SVG.
    ///
    /// # Errors
    /// If it would be too large.
    pub fn png(&self, magnified: f64, fonts: &Fonts) -> Result<Png> {
        png::of_sheet(&self.sheet, magnified, fonts)
    }
}

/// Whether dark text is legible on a color.
fn is_light([r, g, b]: Color) -> bool {
    299 * u32::from(r) + 587 * u32::from(g) + 114 * u32::from(b) > 140_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_models::{ReadSentence, ReadWord};

    fn read(words: usize) -> Reading {
        let word = |at: usize| ReadWord { text: format!("word{at}"), weight: if at == 7 { 0.9 } else { 0.01 } };
        let sentence = ReadSentence { text: "…".into(), weight: 1.0, words: (0..words).map(word).collect() };
        Reading { probabilities: Vec::new(), sentences: vec![sentence], left_out: 2 }
    }

    #[test]
    fn words_stay_on_the_sheet_and_the_strong_one_is_shaded() {
        let Shaded { sheet, .. } = Shaded::document(&read(90), "pos", Style::default());
        let painted = sheet.marks.iter().filter(|mark| matches!(mark, Mark::Box { .. })).count();
        assert_eq!(painted, 1, "one word stands out; one sentence has no more than its share");
        let mut lines = std::collections::BTreeSet::new();
        for mark in &sheet.marks {
            let Mark::Text { x, y, size, text, .. } = mark else { continue };
            assert!(x + text_width(text) * size <= sheet.width && *y < sheet.height, "{text} at {x}, {y}");
            lines.insert(*y as i64);
        }
        assert!(lines.len() > 5, "{lines:?}");
    }

    #[test]
    fn an_image_is_drawn_twice_with_a_box_for_each_cell() {
        let form = Form::Image { grid: [2, 2], width: 4, height: 4, points: vec![200; 48] };
        let shaded = Shaded::image(&form, &[0.1, 0.2, 0.3, 0.4], "seven 0.99", Style::default()).unwrap();
        let boxes: Vec<Color> = (shaded.sheet.marks.iter())
            .filter_map(|mark| if let Mark::Box { color, .. } = mark { Some(*color) } else { None })
            .collect();
        assert_eq!(boxes.len(), 2 * 16);
        let under: std::collections::BTreeSet<Color> = boxes.into_iter().filter(|color| *color != [200; 3]).collect();
        assert_eq!(under.len(), 4, "four patches, four shades");
        assert!(Shaded::image(&form, &[0.1], "", Style::default()).is_err());
        let png = shaded.png(1.0, &Fonts::none()).unwrap();
        assert_eq!(&png.bytes[1..4], b"PNG");
    }
}
