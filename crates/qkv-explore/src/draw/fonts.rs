//! System fonts, and glyph lookup with fallback: a character comes from the first font, in order of preference, that
//! has it.

use fontdb::{Database, ID, Stretch, Style, Weight};
use std::path::Path;
use ttf_parser::{Face, GlyphId};

/// Preferred families, legible at small sizes: Latin first, then Chinese.
const PREFERRED: [&str; 14] = [
    "Noto Sans",
    "DejaVu Sans",
    "Liberation Sans",
    "Helvetica Neue",
    "Segoe UI",
    "Arial",
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Microsoft YaHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Noto Sans Symbols",
    "Noto Sans Symbols2",
];

/// Fonts in order of preference.
pub struct Fonts {
    database: Database,
    order: Vec<ID>,
}

impl std::fmt::Debug for Fonts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fonts({} faces)", self.order.len())
    }
}

/// A glyph of a font.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Glyph {
    font: ID,
    glyph: GlyphId,
    /// Advance width in em.
    pub advance: f64,
}

impl Fonts {
    /// The installed fonts.
    pub fn of_system() -> Fonts {
        let mut database = Database::new();
        database.load_system_fonts();
        Fonts::ordered(database)
    }

    /// No fonts: the built-in stroke font draws ASCII.
    pub fn none() -> Fonts {
        Fonts::ordered(Database::new())
    }

    /// The fonts in a folder and its subfolders.
    pub fn in_folder(folder: impl AsRef<Path>) -> Fonts {
        let mut database = Database::new();
        database.load_fonts_dir(folder);
        Fonts::ordered(database)
    }

    /// Whether it has no fonts.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn ordered(database: Database) -> Fonts {
        let mut faces: Vec<_> = database.faces().collect();
        let rank = |face: &fontdb::FaceInfo| {
            let family = face.families.first().map_or("", |(name, _)| name.as_str());
            let preferred = PREFERRED.iter().position(|name| *name == family).unwrap_or(PREFERRED.len());
            let weight = Weight::NORMAL.0.abs_diff(face.weight.0);
            (
                face.style != Style::Normal,
                weight > 100,
                preferred,
                face.stretch != Stretch::Normal,
                face.monospaced,
                family.contains("Serif"),
                weight,
                family.to_owned(),
                face.post_script_name.clone(),
            )
        };
        faces.sort_by_cached_key(|face| rank(face));
        let order = faces.into_iter().map(|face| face.id).collect();
        Fonts { database, order }
    }

    /// The glyph of a character in the first font that has it with an outline.
    pub(crate) fn glyph(&self, c: char) -> Option<Glyph> {
        self.order.iter().find_map(|&font| {
            self.database.with_face_data(font, |data, index| {
                let face = Face::parse(data, index).ok()?;
                let glyph = face.glyph_index(c).filter(|glyph| glyph.0 != 0)?;
                let drawn = c.is_whitespace() || face.outline_glyph(glyph, &mut NullBuilder).is_some();
                let advance = f64::from(face.glyph_hor_advance(glyph)?) / f64::from(face.units_per_em());
                (drawn && advance.is_finite()).then_some(Glyph { font, glyph, advance })
            })?
        })
    }

    /// Draws the outline of a glyph into `pen`, in em with y up.
    pub(crate) fn outline(&self, glyph: Glyph, pen: &mut dyn Pen) {
        self.database.with_face_data(glyph.font, |data, index| {
            let Ok(face) = Face::parse(data, index) else { return };
            let unit = 1.0 / f64::from(face.units_per_em());
            let mut scaled = EmBuilder { pen, unit, start: (0.0, 0.0), last: (0.0, 0.0) };
            face.outline_glyph(glyph.glyph, &mut scaled);
        });
    }
}

/// Receives an outline as lines and curves with explicit start points.
pub(crate) trait Pen {
    fn line(&mut self, from: (f64, f64), to: (f64, f64));
    fn quad(&mut self, from: (f64, f64), over: (f64, f64), to: (f64, f64));
    fn cubic(&mut self, from: (f64, f64), over: [(f64, f64); 2], to: (f64, f64));
}

/// An outline builder that discards the outline, to check whether there is one.
struct NullBuilder;

impl ttf_parser::OutlineBuilder for NullBuilder {
    fn move_to(&mut self, _: f32, _: f32) {}
    fn line_to(&mut self, _: f32, _: f32) {}
    fn quad_to(&mut self, _: f32, _: f32, _: f32, _: f32) {}
    fn curve_to(&mut self, _: f32, _: f32, _: f32, _: f32, _: f32, _: f32) {}
    fn close(&mut self) {}
}

/// Converts font units to em.
struct EmBuilder<'a> {
    pen: &'a mut dyn Pen,
    unit: f64,
    start: (f64, f64),
    last: (f64, f64),
}

impl EmBuilder<'_> {
    fn at(&self, x: f32, y: f32) -> (f64, f64) {
        (f64::from(x) * self.unit, f64::from(y) * self.unit)
    }
}

impl ttf_parser::OutlineBuilder for EmBuilder<'_> {
    fn move_to(&mut self, x: f32, y: f32) {
        self.start = self.at(x, y);
        self.last = self.start;
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let to = self.at(x, y);
        self.pen.line(self.last, to);
        self.last = to;
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let (over, to) = (self.at(x1, y1), self.at(x, y));
        self.pen.quad(self.last, over, to);
        self.last = to;
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (over, to) = ([self.at(x1, y1), self.at(x2, y2)], self.at(x, y));
        self.pen.cubic(self.last, over, to);
        self.last = to;
    }

    fn close(&mut self) {
        if self.last != self.start {
            self.pen.line(self.last, self.start);
        }
        self.last = self.start;
    }
}
