//! Weights as something to see or to keep: drawn in a terminal, printed as SVG or PNG, written as data. A [`Picture`] says what is
//! drawn and how; every way of drawing has a file of its own.
//!
//! | module | owns |
//! | --- | --- |
//! | `picture` | what is drawn, and how a large matrix becomes a small one |
//! | `scale`, `palette`, `ticks` | from a weight to a place, from a place to a colour, and the numbers beside the colours |
//! | `letters` | text that fits |
//! | `alignment`, `terminal` | drawings of block characters |
//! | `document`, `patches`, `shaded` | a text and an image, shaded: in a terminal, and for print |
//! | `sheet` | where everything of a printed picture stands |
//! | `svg`, `png` | the sheet as a file |
//! | `fonts`, `strokes` | letters for PNG: this machine's, or a few of our own |
//! | `data` | `.npy`, `.safetensors`, JSON, CSV |

mod alignment;
mod data;
mod document;
mod fonts;
mod letters;
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
pub use palette::{Colour, Palette, Theme};
pub use patches::patches;
pub use picture::Picture;
pub use png::Png;
pub use scale::{DECADES, Scale, Scaled};
pub use shaded::{Shaded, Style};
pub use terminal::Colours;
