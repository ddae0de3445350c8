//! The patches of an image in a terminal, shaded by weight: two columns and one line per patch.

use super::alignment::{PLAIN, push_line, shade};
use super::document::paint;
use super::scale::Scale;
use super::terminal::Colors;

/// Draws the weights of patches in row-major order, `across` per row.
///
/// ```
/// use qkv_explore::draw::{Colors, patches};
/// assert_eq!(patches(&[0.0, 0.1, 0.2, 0.7], 2, Colors::None), "  ░░\n▒▒██\n");
/// ```
pub fn patches(weights: &[f32], across: usize, colors: Colors) -> String {
    let scaled = Scale::Linear.over(weights.iter().copied());
    let mut drawing = String::new();
    for row in weights.chunks(across.max(1)) {
        let cell = |&weight: &f32| {
            let place = scaled.place(weight);
            match (paint(place, colors), colors) {
                (Some(before), _) => format!("{before}  {PLAIN}"),
                (None, Colors::Cube | Colors::All) => "  ".into(),
                (None, _) => shade(place).to_string().repeat(2),
            }
        };
        push_line(&mut drawing, &row.iter().map(cell).collect::<String>());
    }
    drawing
}
