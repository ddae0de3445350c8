//! What speech models are trained with: the distance between spectrograms, and the waves of guided attention.

use super::launch::{Argument, count};
use super::{Array, Kind, Operations};
use Argument::{F32, Ptr};

impl Operations {
    /// `|x − there| + (x − there)²`, averaged over `width`, for the rows that are `counted` (u32, one per row); its
    /// gradient times `scale` is written to `d_x`, if given. Adds to `totals` as
    /// [`cross_entropy`](Operations::cross_entropy) does. `there` is f32.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn distance(
        &self,
        [x, there, counted]: [&Array; 3],
        d_x: Option<&Array>,
        width: usize,
        scale: f32,
        totals: &Array,
    ) {
        let (kind, rows) = (self.activation_kind(), counted.len());
        let losses = self.empty(Kind::F32, 4 * rows, "losses");
        let pointers = [
            x.expect(kind, rows * width),
            there.expect(Kind::F32, rows * width),
            counted.expect(Kind::U32, rows),
            d_x.map_or(0, |d_x| d_x.expect(kind, rows * width)),
            losses.ptr(),
        ];
        let arguments = [&pointers.map(Ptr)[..], &[count(rows), count(width), F32(scale)]].concat();
        // SAFETY: `distance(const T*, const float*, const u32*, T*, float*, u32, int, float)`.
        unsafe { self.launch("distance", [self.blocks(32 * rows), 1], &arguments) };
        self.sum_losses(&losses, totals, rows);
    }

    /// Waves over the places of tokens, `y [B, N, heads, width]`: `factor · cos(frequency · place − phase)`, where the
    /// place of a token is its middle as a fraction of its sequence, or given by `places` (f32, `[B, N]`); zeros past
    /// the end. `waves` is f32, `[3, width]`: frequencies, phases, factors.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn place_waves(
        &self,
        y: &Array,
        lengths: &Array,
        places: Option<&Array>,
        waves: &Array,
        [length, heads, width]: [usize; 3],
    ) {
        let rows = lengths.len() * length * heads;
        let pointers = [
            y.expect(self.activation_kind(), rows * width),
            lengths.expect(Kind::U32, lengths.len()),
            places.map_or(0, |places| places.expect(Kind::F32, lengths.len() * length)),
            waves.expect(Kind::F32, 3 * width),
        ];
        let numbers = [rows, length, heads, width].map(count);
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `place_waves(T*, const u32*, const float*, const float*, u32, u32, u32, int)`.
        unsafe { self.launch("place_waves", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// Adds `Σ x·y` over `rows` of `width` to the first of `totals`, four f64.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn add_product(&self, [x, y]: [&Array; 2], [rows, width]: [usize; 2], totals: &Array) {
        let kind = self.activation_kind();
        let losses = self.empty(Kind::F32, 4 * rows, "losses");
        let pointers = [x.expect(kind, rows * width), y.expect(kind, rows * width), losses.ptr()];
        let arguments = [&pointers.map(Ptr)[..], &[count(rows), count(width)]].concat();
        // SAFETY: `row_products(const T*, const T*, float*, u32, int)`.
        unsafe { self.launch("row_products", [self.blocks(32 * rows), 1], &arguments) };
        self.sum_losses(&losses, totals, rows);
    }
}
