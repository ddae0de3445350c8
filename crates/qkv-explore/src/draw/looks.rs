//! Images for print: where a model looked for each word, one small map after another, and boxes around detected
//! objects.

use super::letters::{fit_em, sanitized};
use super::palette::Color;
use super::shaded::{MARGIN, Shaded, Style, TITLE};
use super::sheet::{Anchor, Mark};
use qkv_models::image::Image;
use qkv_models::{Error, Result};

/// Length of the longer edge of a map, its cells along that edge, and maps per row.
const MAP: f64 = 128.0;
const CELLS: usize = 48;
const ACROSS: usize = 5;
/// The most maps that are drawn; a text may have more tokens, but nobody would look at all of them here.
const MOST_MAPS: usize = 60;
/// Font size and height of a map's label.
const LABEL: f64 = 12.0;
const UNDER: f64 = 20.0;
/// Opacity of the overlay.
const COVER: f32 = 0.65;
/// Longer edge of an image with boxes, cells along it, and the width of a box's line.
const WHOLE: f64 = 480.0;
const FINE: usize = 160;
const STROKE: f64 = 2.0;
/// Colors of classes, in order.
const CLASSES: [Color; 8] = [
    [214, 39, 40],
    [31, 119, 180],
    [44, 160, 44],
    [255, 127, 14],
    [148, 103, 189],
    [23, 190, 207],
    [227, 119, 194],
    [140, 86, 75],
];

/// A box around something, with its class and label.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelledBox {
    /// Left, top, right and bottom, as fractions of the image.
    pub edges: [f64; 4],
    /// Decides the color.
    pub class: usize,
    /// The text beside it.
    pub label: String,
}

/// An image as at most `cells` cells each way: their number down and across, their size in points, and the color of the
/// pixel in the middle of each.
fn cells(image: &Image, cells: usize, side: f64) -> ([usize; 2], f64, Vec<Color>) {
    let (width, height) = (image.width(), image.height());
    let longest = width.max(height);
    let scaled = |edge: usize| (edge * cells.min(longest)).div_ceil(longest).max(1);
    let (rows, columns) = (scaled(height), scaled(width));
    let color = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        let (y, x) = ((2 * row + 1) * height / (2 * rows), (2 * column + 1) * width / (2 * columns));
        let pixel = &image.points()[(y * width + x) * image.channels()..][..image.channels()];
        if let [r, g, b] = *pixel { [r, g, b] } else { [pixel[0]; 3] }
    };
    ([rows, columns], side / cells.min(longest) as f64, (0..rows * columns).map(color).collect())
}

impl Shaded {
    /// An image, and for each word the same image overlaid with the word's weights on a grid of places, row by row.
    ///
    /// ```
    /// use qkv_explore::draw::{Shaded, Style};
    /// use qkv_models::image::Image;
    /// let image = Image::new(2, 2, 1, vec![0, 90, 180, 255])?;
    /// let maps = [("red".to_owned(), vec![0.1, 0.2, 0.3, 0.4])];
    /// let svg = Shaded::looks(&image, [2, 2], &maps, "a red circle", Style::default())?.svg();
    /// assert!(svg.contains(">red</text>") && svg.contains(">a red circle</text>"));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is not one weight for each place.
    pub fn looks(
        image: &Image,
        [down, across]: [usize; 2],
        maps: &[(String, Vec<f32>)],
        title: &str,
        style: Style,
    ) -> Result<Shaded> {
        if let Some((_, weights)) =
            maps.iter().find(|(_, weights)| weights.len() != down * across || weights.is_empty())
        {
            return Err(Error::invalid(format!("an image of {down} × {across} places has {} weights", weights.len())));
        }
        let Style { palette, theme, scale } = style;
        let ([rows, columns], cell, colors) = cells(image, CELLS, MAP);
        let (step_x, step_y) = (cell * columns as f64 + 14.0, cell * rows as f64 + UNDER + 8.0);
        let top = MARGIN + TITLE + 14.0;
        let shown = &maps[..maps.len().min(MOST_MAPS)];
        let mut marks = Vec::new();
        let plain = std::iter::once(None);
        for (at, map) in plain.chain(shown.iter().map(Some)).enumerate() {
            let (left, above) = (MARGIN + step_x * (at % ACROSS) as f64, top + step_y * (at / ACROSS) as f64);
            let scaled = map.map(|(_, weights)| (weights, scale.over(weights.iter().copied())));
            for (place, &color) in colors.iter().enumerate() {
                let (row, column) = (place / columns, place % columns);
                let color = match &scaled {
                    None => color,
                    Some((weights, scaled)) => {
                        let weight = weights[(row * down / rows) * across + column * across / columns];
                        let shade = palette.color(scaled.place(weight), theme);
                        let grey = color.iter().map(|&c| f32::from(c)).sum::<f32>() / 3.0;
                        shade.map(|c| (COVER * f32::from(c) + (1.0 - COVER) * grey).round() as u8)
                    }
                };
                let (x, y) = (left + cell * column as f64, above + cell * row as f64);
                marks.push(Mark::Box { x, y, width: cell, height: cell, color });
            }
            if let Some((label, _)) = map {
                let text = fit_em(&sanitized(label), cell * columns as f64 / LABEL);
                let (y, size, anchor, turn) = (above + cell * rows as f64 + LABEL + 3.0, LABEL, Anchor::Start, 0.0);
                marks.push(Mark::Text { x: left, y, size, anchor, turn, color: theme.ink(), text });
            }
        }
        let lines = (shown.len() + 1).div_ceil(ACROSS) as f64;
        let wide = (shown.len() + 1).min(ACROSS) as f64;
        Ok(Shaded::titled(title, marks, [2.0 * MARGIN + step_x * wide, top + step_y * lines + MARGIN], style))
    }

    /// An image with labeled boxes.
    pub fn boxes(image: &Image, boxes: &[LabelledBox], title: &str, style: Style) -> Shaded {
        let ([rows, columns], cell, colors) = cells(image, FINE, WHOLE);
        let top = MARGIN + TITLE + 14.0;
        let (wide, high) = (cell * columns as f64, cell * rows as f64);
        let mut marks: Vec<Mark> = (colors.iter().enumerate())
            .map(|(at, &color)| {
                let (x, y) = (MARGIN + cell * (at % columns) as f64, top + cell * (at / columns) as f64);
                Mark::Box { x, y, width: cell, height: cell, color }
            })
            .collect();
        for LabelledBox { edges, class, label } in boxes {
            let [left, above, right, below] =
                edges.map(|edge| if edge.is_finite() { edge.clamp(0.0, 1.0) } else { 0.0 });
            let (left, right) = (MARGIN + left * wide, MARGIN + right * wide);
            let (above, below) = (top + above * high, top + below * high);
            let color = CLASSES[class % CLASSES.len()];
            let (width, height) = ((right - left).max(STROKE), (below - above).max(STROKE));
            for [x, y, width, height] in [
                [left, above, width, STROKE],
                [left, below - STROKE, width, STROKE],
                [left, above, STROKE, height],
                [right - STROKE, above, STROKE, height],
            ] {
                marks.push(Mark::Box { x, y, width, height, color });
            }
            let (y, size, anchor, turn) = ((above + LABEL + 2.0).min(top + high), LABEL, Anchor::Start, 0.0);
            let text = fit_em(&sanitized(label), (width / LABEL).max(6.0));
            marks.push(Mark::Text { x: left + 4.0, y, size, anchor, turn, color, text });
        }
        Shaded::titled(title, marks, [2.0 * MARGIN + wide, top + high + MARGIN], style)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Fonts;

    #[test]
    fn a_map_has_a_weight_for_each_place_and_a_wide_image_stays_wide() {
        let image = Image::new(512, 64, 1, vec![255; 512 * 64]).unwrap();
        let maps: Vec<(String, Vec<f32>)> = (0..80).map(|at| (format!("w{at}"), vec![0.125; 8])).collect();
        let shaded = Shaded::looks(&image, [1, 8], &maps, "t", Style::default()).unwrap();
        let svg = shaded.svg();
        assert!(svg.contains(">w59</text>") && !svg.contains(">w60</text>"));
        assert!(Shaded::looks(&image, [2, 8], &maps, "t", Style::default()).is_err());
        let ([rows, columns], _, _) = cells(&image, CELLS, MAP);
        assert_eq!([rows, columns], [6, 48]);
    }

    #[test]
    fn boxes_stay_on_the_image() {
        let image = Image::new(4, 4, 3, vec![9; 48]).unwrap();
        let found = LabelledBox { edges: [-1.0, 0.25, f64::NAN, 9.0], class: 11, label: "<cell>".into() };
        let shaded = Shaded::boxes(&image, &[found], "three", Style::default());
        assert!(shaded.svg().contains("&lt;cell&gt;"));
        assert_eq!(&shaded.png(1.0, &Fonts::none()).unwrap().bytes[1..4], b"PNG");
    }
}
