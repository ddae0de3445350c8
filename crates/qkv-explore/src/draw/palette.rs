//! Color maps. A palette is a list of control points in OKLCH (lightness, chroma, hue in degrees), interpolated in
//! OKLab. Lightness is monotonic, so that order survives color blindness and grayscale print. In the light theme 0 is
//! nearly white and 1 is dark; in the dark theme it is the other way round. `page/palette.js` has the same points under
//! the same names.

use serde::{Deserialize, Serialize};

/// Red, green and blue.
pub type Color = [u8; 3];

/// A color map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Palette {
    /// White, green, blue, deep violet; safe for the color-blind.
    #[default]
    Sea,
    /// White, yellow, red, dark red.
    Ember,
    /// Black and white.
    Grey,
}

/// The background.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Theme {
    /// Dark on white.
    #[default]
    Light,
    /// Light on dark.
    Dark,
}

type Point = [f64; 3];

const SEA: [[Point; 6]; 2] = [
    [
        [0.985, 0.004, 120.0],
        [0.915, 0.062, 150.0],
        [0.78, 0.1, 182.0],
        [0.6, 0.108, 225.0],
        [0.42, 0.125, 268.0],
        [0.26, 0.1, 288.0],
    ],
    [
        [0.235, 0.012, 275.0],
        [0.36, 0.095, 278.0],
        [0.5, 0.12, 250.0],
        [0.66, 0.115, 205.0],
        [0.81, 0.125, 155.0],
        [0.95, 0.11, 108.0],
    ],
];
const EMBER: [[Point; 6]; 2] = [
    [
        [0.985, 0.004, 90.0],
        [0.92, 0.07, 88.0],
        [0.8, 0.13, 66.0],
        [0.62, 0.17, 40.0],
        [0.43, 0.14, 22.0],
        [0.25, 0.07, 5.0],
    ],
    [
        [0.235, 0.012, 20.0],
        [0.36, 0.09, 10.0],
        [0.5, 0.16, 25.0],
        [0.66, 0.17, 45.0],
        [0.82, 0.14, 75.0],
        [0.96, 0.07, 100.0],
    ],
];
const GREY: [[Point; 2]; 2] = [[[0.985, 0.0, 0.0], [0.2, 0.0, 0.0]], [[0.235, 0.0, 0.0], [0.97, 0.0, 0.0]]];

impl Palette {
    /// All palettes, with their names on the command line.
    pub const ALL: [(&'static str, Palette); 3] =
        [("sea", Palette::Sea), ("ember", Palette::Ember), ("grey", Palette::Grey)];

    /// The color of a level from 0 to 1.
    ///
    /// ```
    /// use qkv_explore::draw::{Palette, Theme};
    /// assert_eq!(Palette::Grey.color(1.0, Theme::Light), [0x16, 0x16, 0x16]);
    /// ```
    pub fn color(self, place: f32, theme: Theme) -> Color {
        let at = theme as usize;
        let points: &[Point] = match self {
            Palette::Sea => &SEA[at],
            Palette::Ember => &EMBER[at],
            Palette::Grey => &GREY[at],
        };
        let place = f64::from(if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }) * (points.len() - 1) as f64;
        let before = (place.floor() as usize).min(points.len() - 2);
        let (from, to) = (lab(points[before]), lab(points[before + 1]));
        let part = place - before as f64;
        rgb(std::array::from_fn(|i| from[i] + (to[i] - from[i]) * part))
    }

    /// 256 colors, from level 0 to level 1.
    pub fn colors(self, theme: Theme) -> [Color; 256] {
        std::array::from_fn(|level| self.color(level as f32 / 255.0, theme))
    }
}

impl Theme {
    /// The background color.
    pub fn paper(self) -> Color {
        match self {
            Theme::Light => [255, 255, 255],
            Theme::Dark => [22, 24, 29],
        }
    }

    /// The color of text.
    pub fn ink(self) -> Color {
        match self {
            Theme::Light => [31, 41, 51],
            Theme::Dark => [230, 233, 239],
        }
    }

    /// The color of secondary text and lines.
    pub fn quiet(self) -> Color {
        match self {
            Theme::Light => [107, 117, 128],
            Theme::Dark => [150, 158, 170],
        }
    }
}

fn lab([lightness, chroma, hue]: Point) -> [f64; 3] {
    let (sin, cos) = hue.to_radians().sin_cos();
    [lightness, chroma * cos, chroma * sin]
}

/// From OKLab (Björn Ottosson 2020) to sRGB.
fn rgb([l, a, b]: [f64; 3]) -> Color {
    let x = (l + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
    let y = (l - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
    let z = (l - 0.089_484_177_5 * a - 1.291_485_548_0 * b).powi(3);
    let linear = [
        4.076_741_662_1 * x - 3.307_711_591_3 * y + 0.230_969_929_2 * z,
        -1.268_438_004_6 * x + 2.609_757_401_1 * y - 0.341_319_396_5 * z,
        -0.004_196_086_3 * x - 0.703_418_614_7 * y + 1.707_614_701_0 * z,
    ];
    linear.map(|x| {
        let x = if x <= 0.003_130_8 { 12.92 * x } else { 1.055 * x.powf(1.0 / 2.4) - 0.055 };
        (255.0 * x.clamp(0.0, 1.0)).round() as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(color: Color) -> [f64; 3] {
        color.map(|x| {
            let x = f64::from(x) / 255.0;
            if x <= 0.040_45 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) }
        })
    }

    fn luminance([r, g, b]: [f64; 3]) -> f64 {
        0.2126 * r + 0.7152 * g + 0.0722 * b
    }

    /// A color as seen by someone without one kind of cone (Machado, Oliveira and Fernandes 2009).
    fn seen_without(cone: &str, [r, g, b]: [f64; 3]) -> [f64; 3] {
        let rows = match cone {
            "red" => {
                [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
            }
            "green" => [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
            _ => [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
        };
        rows.map(|row| row[0] * r + row[1] * g + row[2] * b)
    }

    #[test]
    fn lightness_only_rises_or_only_falls_for_every_eye() {
        for (name, palette) in Palette::ALL {
            for theme in [Theme::Light, Theme::Dark] {
                for cone in ["none", "red", "green", "blue"] {
                    let light = |at: usize| {
                        let color = linear(palette.color(at as f32 / 32.0, theme));
                        luminance(if cone == "none" { color } else { seen_without(cone, color) })
                    };
                    for at in 0..32 {
                        let falls = light(at + 1) < light(at);
                        assert_eq!(falls, theme == Theme::Light, "{name} {theme:?} at {at} without {cone}");
                    }
                }
            }
        }
    }

    #[test]
    fn words_stand_out_from_the_paper() {
        for theme in [Theme::Light, Theme::Dark] {
            let paper = luminance(linear(theme.paper()));
            for (color, least) in [(theme.ink(), 7.0), (theme.quiet(), 4.5)] {
                let words = luminance(linear(color));
                let contrast = (paper.max(words) + 0.05) / (paper.min(words) + 0.05);
                assert!(contrast >= least, "{theme:?}: {contrast}");
            }
        }
    }

    #[test]
    fn nothing_looks_like_the_paper_and_most_does_not() {
        for (_, palette) in Palette::ALL {
            for theme in [Theme::Light, Theme::Dark] {
                let paper = luminance(linear(theme.paper()));
                let at = |place| (luminance(linear(palette.color(place, theme))) - paper).abs();
                assert!(at(0.0) < 0.07 && at(1.0) > 0.6, "{palette:?} {theme:?}");
            }
        }
    }
}
