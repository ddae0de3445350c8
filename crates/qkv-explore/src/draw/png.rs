//! A picture as PNG: the layout rasterized, with text from system fonts. Characters that no font has become hollow
//! boxes and are reported. Without any font a built-in stroke font draws ASCII.

use super::fonts::{Fonts, Glyph, Pen};
use super::palette::Color;
use super::picture::Picture;
use super::sheet::{Anchor, Mark, Sheet};
use super::strokes::{THICK, UNIT, advance, strokes};
use ab_glyph_rasterizer::{Rasterizer, point};
use qkv_models::{Error, Result};
use std::collections::{BTreeSet, HashMap};

/// Maximum number of pixels.
const MAX_PIXELS: f64 = 64e6;
/// Left, right and top of the box for a missing character, in em.
const BOX: [f64; 3] = [0.08, 0.82, 0.74];
/// Pixels per inch at magnification 1.
const DENSITY: f64 = 96.0;

/// A PNG file, and the characters it could not draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Png {
    /// The file.
    pub bytes: Vec<u8>,
    /// Characters that no font has, sorted; each is drawn as a hollow box.
    pub missing: Vec<char>,
}

impl Picture {
    /// The picture as PNG, `magnified` times the size of the SVG.
    ///
    /// ```
    /// use qkv_explore::{Matrix, draw::{Fonts, Picture}};
    /// let (rows, columns) = (vec!["hello".into()], vec!["你".into(), "好".into()]);
    /// let matrix = Matrix { rows, columns, weights: vec![vec![0.3, 0.7]] };
    /// let png = Picture::from(matrix).png(2.0, &Fonts::none())?;
    /// assert_eq!((&png.bytes[1..4], png.missing), (&b"PNG"[..], vec!['你', '好']));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`svg`](Picture::svg), and if it would be too large.
    pub fn png(&self, magnified: f64, fonts: &Fonts) -> Result<Png> {
        of_sheet(&Sheet::of(self)?, magnified, fonts)
    }
}

/// Renders a layout.
pub(super) fn of_sheet(sheet: &Sheet, magnified: f64, fonts: &Fonts) -> Result<Png> {
    let [width, height] = [sheet.width, sheet.height].map(|side| (side * magnified).round());
    if !(magnified > 0.0 && width >= 1.0 && height >= 1.0 && width * height <= MAX_PIXELS) {
        let most = (MAX_PIXELS / (sheet.width * sheet.height)).sqrt().floor();
        let what = format!("a picture of {width} × {height} pixels is too large or too small");
        return Err(Error::invalid(what).with_hint(format!("magnify it by at most {most}")));
    }
    let mut canvas = Canvas {
        width: width as usize,
        height: height as usize,
        points: sheet.paper.repeat(width as usize * height as usize),
        zoom: magnified,
        fonts,
        known: HashMap::new(),
        missing: BTreeSet::new(),
    };
    sheet.marks.iter().for_each(|mark| canvas.draw(mark, &sheet.colors));
    let bytes = canvas.encoded()?;
    Ok(Png { bytes, missing: canvas.missing.into_iter().collect() })
}

struct Canvas<'a> {
    width: usize,
    height: usize,
    /// RGB in row-major order.
    points: Vec<u8>,
    zoom: f64,
    fonts: &'a Fonts,
    known: HashMap<char, Option<Glyph>>,
    missing: BTreeSet<char>,
}

impl Canvas<'_> {
    fn encoded(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let per_metre = (DENSITY * self.zoom / 0.0254).round() as u32;
        encoder.set_pixel_dims(Some(png::PixelDimensions { xppu: per_metre, yppu: per_metre, unit: png::Unit::Meter }));
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.points));
        written.map_err(|error| Error::invalid(format!("the picture cannot be written as PNG: {error}")))?;
        Ok(bytes)
    }

    fn draw(&mut self, mark: &Mark, colors: &[Color; 256]) {
        match mark {
            Mark::Box { x, y, width, height, color } => self.fill([*x, *y, x + width, y + height], *color),
            Mark::Cells { x, y, cell, gap, columns, levels } => {
                for (at, &level) in levels.iter().enumerate() {
                    let (left, top) = (x + cell * (at % columns) as f64, y + cell * (at / columns) as f64);
                    let side = cell - gap;
                    self.fill([left, top, left + side, top + side], colors[usize::from(level)]);
                }
            }
            Mark::Text { x, y, size, anchor, turn, color, text } => {
                let advances: Vec<f64> = text.chars().map(|c| self.advance(c) * size).collect();
                let length: f64 = advances.iter().sum();
                let mut along = match anchor {
                    Anchor::Start => 0.0,
                    Anchor::Middle => -length / 2.0,
                    Anchor::End => -length,
                };
                let (sin, cos) = turn.to_radians().sin_cos();
                for (c, advance) in text.chars().zip(advances) {
                    let place = GlyphTransform {
                        x: x + along * cos,
                        y: y + along * sin,
                        size: *size,
                        sin,
                        cos,
                        zoom: self.zoom,
                    };
                    self.letter(c, place, *color);
                    along += advance;
                }
            }
        }
    }

    /// Fills a rectangle given by left, top, right and bottom, rounded to whole pixels.
    fn fill(&mut self, edges: [f64; 4], color: Color) {
        let [left, top, right, bottom] = edges.map(|edge| (edge * self.zoom).round().max(0.0) as usize);
        let (right, bottom) = (right.min(self.width), bottom.min(self.height));
        for y in top..bottom {
            let row = &mut self.points[3 * y * self.width..3 * (y + 1) * self.width];
            for point in row[3 * left.min(right)..3 * right].chunks_exact_mut(3) {
                point.copy_from_slice(&color);
            }
        }
    }

    fn glyph(&mut self, c: char) -> Option<Glyph> {
        let fonts = self.fonts;
        *self.known.entry(c).or_insert_with(|| fonts.glyph(c))
    }

    fn advance(&mut self, c: char) -> f64 {
        match self.glyph(c) {
            Some(glyph) => glyph.advance,
            None if strokes(c).is_some() => advance(c),
            None if c.is_whitespace() => advance(' '),
            None => BOX[0] + BOX[1],
        }
    }

    fn letter(&mut self, c: char, place: GlyphTransform, color: Color) {
        let mut outline = Outline { place, lines: Vec::new() };
        match (self.glyph(c), strokes(c)) {
            (Some(glyph), _) => self.fonts.outline(glyph, &mut outline),
            (None, Some(strokes)) => strokes.for_each(|stroke| outline.stroke(&stroke)),
            (None, None) if c.is_whitespace() => {}
            (None, None) => {
                self.missing.insert(c);
                outline.hollow();
            }
        }
        self.ink(&outline.lines, color);
    }

    /// Fills an outline with antialiasing.
    fn ink(&mut self, lines: &[[Point2; 2]], color: Color) {
        let ends = || lines.iter().flatten();
        let least = |by: fn(&Point2) -> f64| ends().map(by).fold(f64::INFINITY, f64::min).floor() - 1.0;
        let most = |by: fn(&Point2) -> f64| ends().map(by).fold(f64::NEG_INFINITY, f64::max).ceil() + 1.0;
        let (left, top, right, bottom) = (least(|s| s.0), least(|s| s.1), most(|s| s.0), most(|s| s.1));
        let (width, height) = (right - left, bottom - top);
        // Empty, or a glyph as large as the picture from a broken font.
        if !(width >= 1.0 && height >= 1.0 && width <= self.width as f64 && height <= self.height as f64) {
            return;
        }
        let mut grey = Rasterizer::new(width as usize, height as usize);
        let spot = |(x, y): Point2| point((x - left) as f32, (y - top) as f32);
        lines.iter().for_each(|&[from, to]| grey.draw_line(spot(from), spot(to)));
        let (size, points) = ([self.width as f64, self.height as f64], &mut self.points);
        grey.for_each_pixel_2d(|x, y, cover| {
            let (x, y) = (left + f64::from(x), top + f64::from(y));
            if cover <= 0.0 || x < 0.0 || y < 0.0 || x >= size[0] || y >= size[1] {
                return;
            }
            let at = 3 * (y as usize * self.width + x as usize);
            for (point, ink) in points[at..at + 3].iter_mut().zip(color) {
                let mixed = f32::from(*point) + (f32::from(ink) - f32::from(*point)) * cover.min(1.0);
                *point = mixed.round() as u8;
            }
        });
    }
}

/// A position on the canvas, in pixels.
type Point2 = (f64, f64);

/// Position, size and rotation of a glyph.
#[derive(Clone, Copy)]
struct GlyphTransform {
    x: f64,
    y: f64,
    size: f64,
    sin: f64,
    cos: f64,
    zoom: f64,
}

impl GlyphTransform {
    /// From em, with y up, to pixels.
    fn at(&self, (right, up): Point2) -> Point2 {
        let (right, down) = (right * self.size, -up * self.size);
        let (x, y) = (self.x + right * self.cos - down * self.sin, self.y + right * self.sin + down * self.cos);
        (x * self.zoom, y * self.zoom)
    }
}

/// The outline of a glyph in pixels, with curves flattened to lines.
struct Outline {
    place: GlyphTransform,
    lines: Vec<[Point2; 2]>,
}

/// Lines per curve: enough at these sizes.
const CURVE_LINES: usize = 6;

impl Outline {
    /// A stroke of the built-in font: each segment a thin box, all with the same orientation.
    fn stroke(&mut self, points: &[(f64, f64)]) {
        let place = |&(x, y): &(f64, f64)| ((x + 0.5) * UNIT, (6.0 - y) * UNIT);
        let half = THICK / 2.0;
        let dot = [points[0], points[0]];
        let pieces: Vec<&[(f64, f64)]> = if points.len() == 1 { vec![&dot] } else { points.windows(2).collect() };
        for piece in pieces {
            let ((ax, ay), (bx, by)) = (place(&piece[0]), place(&piece[1]));
            let length = (bx - ax).hypot(by - ay);
            let (ux, uy) =
                if length > 0.0 { ((bx - ax) / length * half, (by - ay) / length * half) } else { (half, 0.0) };
            // Extended by half the thickness at both ends, so that corners are closed.
            let (ax, ay, bx, by) = (ax - ux, ay - uy, bx + ux, by + uy);
            self.ring(&[(ax - uy, ay + ux), (bx - uy, by + ux), (bx + uy, by - ux), (ax + uy, ay - ux)]);
        }
    }

    /// A hollow box.
    fn hollow(&mut self) {
        let [left, right, top] = BOX;
        let line = 0.06;
        self.ring(&[(left, 0.0), (right, 0.0), (right, top), (left, top)]);
        self.ring(&[(left + line, line), (left + line, top - line), (right - line, top - line), (right - line, line)]);
    }

    fn ring(&mut self, corners: &[Point2]) {
        for at in 0..corners.len() {
            self.line(corners[at], corners[(at + 1) % corners.len()]);
        }
    }
}

impl Pen for Outline {
    fn line(&mut self, from: Point2, to: Point2) {
        self.lines.push([self.place.at(from), self.place.at(to)]);
    }

    fn quad(&mut self, from: Point2, over: Point2, to: Point2) {
        // Degree elevation: the same curve as a cubic.
        let two_thirds = |end: Point2| (end.0 + (over.0 - end.0) * 2.0 / 3.0, end.1 + (over.1 - end.1) * 2.0 / 3.0);
        self.cubic(from, [two_thirds(from), two_thirds(to)], to);
    }

    fn cubic(&mut self, from: Point2, [a, b]: [Point2; 2], to: Point2) {
        let at = |t: f64| {
            let s = 1.0 - t;
            let by = [s * s * s, 3.0 * s * s * t, 3.0 * s * t * t, t * t * t];
            let sum = |pick: fn(Point2) -> f64| [from, a, b, to].into_iter().zip(by).map(|(p, w)| pick(p) * w).sum();
            (sum(|p| p.0), sum(|p| p.1))
        };
        let mut last = from;
        for piece in 1..=CURVE_LINES {
            let next = if piece == CURVE_LINES { to } else { at(piece as f64 / CURVE_LINES as f64) };
            self.line(last, next);
            last = next;
        }
    }
}
