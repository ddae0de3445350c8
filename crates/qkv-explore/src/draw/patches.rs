//! The patches of an image in a terminal, shaded by weight: two columns and one line per patch.

use super::alignment::{PLAIN, push_line, shade};
use super::document::paint;
use super::scale::Scale;
use super::terminal::Colours;

/// Draws the weights of patches in row-major order, `across` per row.
///
/// ```
/// use qkv_explore::draw::{Colours, patches};
/// assert_eq!(patches(&[0.0, 0.1, 0.2, 0.7], 2, Colours::None), "  ░░\n▒▒██\n");
/// ```
pub fn patches(weights: &[f32], across: usize, colours: Colours) -> String {
    let scaled = Scale::Linear.over(weights.iter().copied());
    let mut drawing = String::new();
    for row in weights.chunks(across.max(1)) {
        let cell = |&weight: &f32| {
            let place = scaled.place(weight);
            match (paint(place, colours), colours) {
                (Some(before), _) => format!("{before}  {PLAIN}"),
                (None, Colours::Cube | Colours::All) => "  ".into(),
                (None, _) => shade(place).to_string().repeat(2),
            }
        };
        push_line(&mut drawing, &row.iter().map(cell).collect::<String>());
    }
    drawing
}
