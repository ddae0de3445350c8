//! Weights as pictures and as data: drawn in a terminal, rendered as SVG or PNG, exported. A [`Picture`] holds what is
//! drawn and how; every output format has its own file.
//!
//! | module | owns |
//! | --- | --- |
//! | `picture` | what is drawn, and pooling of large matrices |
//! | `scale`, `palette`, `ticks` | weight to level, level to color, and the labels of the color bar |
//! | `letters` | truncating and escaping labels |
//! | `alignment`, `terminal` | heat maps of block characters |
//! | `document`, `patches`, `shaded` | text and images shaded by weight, in a terminal and for print |
//! | `looks` | maps of where a model looked for each word, and boxes around detected objects |
//! | `sheet` | layout of a rendered picture |
//! | `svg`, `png` | rendering of a layout |
//! | `fonts`, `strokes` | glyphs for PNG: system fonts, or a built-in stroke font |
//! | `data` | `.npy`, `.safetensors`, JSON, CSV |

mod alignment;
mod data;
mod document;
mod fonts;
mod letters;
mod looks;
mod palette;
mod patches;
mod picture;
mod png;
mod scale;
mod shaded;
mod sheet;
mod strokes;
mod svg;
mod terminal;
mod ticks;

pub use alignment::alignment;
pub use document::document;
pub use fonts::Fonts;
pub use looks::LabelledBox;
pub use palette::{Color, Palette, Theme};
pub use patches::patches;
pub use picture::Picture;
pub use png::Png;
pub use scale::{DECADES, Scale, Scaled};
pub use shaded::{Shaded, Style};
pub use terminal::Colors;
