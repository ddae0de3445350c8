//! Keys and values of one sequence in f16, head by head: half the bytes of f32, and the rows of a head are contiguous.
//! A decoding step reads all of them once, which dominates the cost of its attention.

use half::f16;
use half::slice::HalfFloatSliceExt;
use qkv::{Scratch, View};

/// Keys and values, `[Hk, room, D]` each.
#[derive(Debug)]
pub(crate) struct HalfRows {
    heads: usize,
    /// Width of a key, and of a value.
    widths: [usize; 2],
    rows: [Vec<f16>; 2],
    /// Capacity in tokens.
    room: usize,
    pub(crate) scratch: Scratch<f32>,
}

impl Clone for HalfRows {
    fn clone(&self) -> Self {
        let (rows, scratch) = (self.rows.clone(), Scratch::new());
        HalfRows { rows, scratch, ..*self }
    }
}

/// Converts numbers to f16; `None` if one of them is too large.
pub(crate) fn halved(numbers: &[f32]) -> Option<Vec<f16>> {
    let mut halves = vec![f16::ZERO; numbers.len()];
    halves.convert_from_f32_slice(numbers);
    let fits = halves.iter().zip(numbers).all(|(half, number)| half.is_finite() || !number.is_finite());
    fits.then_some(halves)
}

impl HalfRows {
    /// An empty cache.
    pub fn new(heads: usize, widths: [usize; 2]) -> Self {
        HalfRows { heads, widths, rows: [Vec::new(), Vec::new()], room: 0, scratch: Scratch::new() }
    }

    /// Appends the keys and values of tokens, `[new, Hk·D]` each, after the first `length`; returns `false` and does
    /// nothing if a number is too large.
    #[must_use]
    pub fn append(&mut self, length: usize, new_rows: [&[f32]; 2]) -> bool {
        let [Some(keys), Some(values)] = new_rows.map(halved) else { return false };
        for (x, fresh) in [keys, values].into_iter().enumerate() {
            let row = self.heads * self.widths[x];
            let new = fresh.len() / row.max(1);
            if x == 0 {
                self.reserve(length, length + new);
            }
            for (at, head) in fresh.chunks_exact(self.widths[x].max(1)).enumerate() {
                let (token, h) = (length + at / self.heads, at % self.heads);
                let start = (h * self.room + token) * self.widths[x];
                self.rows[x][start..start + head.len()].copy_from_slice(head);
            }
        }
        true
    }

    /// Makes room for `needed` tokens.
    fn reserve(&mut self, length: usize, needed: usize) {
        if needed <= self.room {
            return;
        }
        let room = needed.max(2 * self.room).max(64);
        for (rows, width) in self.rows.iter_mut().zip(self.widths) {
            let mut larger = vec![f16::ZERO; self.heads * room * width];
            for h in 0..self.heads {
                let old = &rows[h * self.room * width..][..length * width];
                larger[h * room * width..][..length * width].copy_from_slice(old);
            }
            *rows = larger;
        }
        self.room = room;
    }

    /// The keys (0) or values (1) of the first `length` tokens, `[1, Hk, length, D]`.
    pub fn view(&self, x: usize, length: usize) -> qkv::Result<View<'_, f16>> {
        let width = self.widths[x];
        let strides = [0, self.room * width, width, 1].map(|stride| stride as isize);
        Ok(View::strided(&self.rows[x], 0, [1, self.heads, length, width], strides)?)
    }

    /// The rows of the first `length` tokens, `[length, Hk·D]`: keys, then values.
    pub fn widened(&self, length: usize) -> [Vec<f32>; 2] {
        [0, 1].map(|x| {
            let width = self.widths[x];
            let head = |at: usize| &self.rows[x][(at % self.heads * self.room + at / self.heads) * width..][..width];
            (0..length * self.heads).flat_map(|at| head(at).iter().map(|number| number.to_f32())).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_rounded_to_eleven_bits_however_they_were_appended() {
        let (heads, widths) = (3, [2, 5]);
        let number = |at: usize| (at as f32 * 0.7).sin() * 3.0;
        let rows = |tokens: std::ops::Range<usize>, x: usize| -> Vec<f32> {
            (tokens.start * heads * widths[x]..tokens.end * heads * widths[x]).map(number).collect()
        };
        let mut cache = HalfRows::new(heads, widths);
        let mut length = 0;
        for new in [1, 70, 3, 0, 200] {
            let tokens = length..length + new;
            assert!(cache.append(length, [&rows(tokens.clone(), 0), &rows(tokens, 1)]));
            length += new;
        }
        let found = cache.widened(length);
        for x in [0, 1] {
            let wanted: Vec<f32> = rows(0..length, x).iter().map(|&number| f16::from_f32(number).to_f32()).collect();
            assert_eq!(found[x], wanted);
            let view = cache.view(x, length).unwrap();
            let row = view.row(0, 2, length - 1).unwrap();
            assert_eq!(row[0].to_f32(), wanted[((length - 1) * heads + 2) * widths[x]]);
        }
    }

    #[test]
    fn numbers_that_f16_does_not_have_are_refused() {
        let mut cache = HalfRows::new(1, [2, 2]);
        assert!(cache.append(0, [&[1.0, 2.0], &[3.0, 4.0]]));
        assert!(!cache.append(1, [&[1.0, 7e4], &[3.0, 4.0]]));
        // Non-finite numbers are preserved.
        assert!(cache.append(1, [&[f32::NAN, 2.0], &[3.0, f32::INFINITY]]));
        assert!(cache.widened(2)[0][2].is_nan());
    }
}
