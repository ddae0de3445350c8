//! Rotary positions (Su et al. 2021, arXiv:2104.09864): the two halves of each head, taken as pairs of numbers, are turned by
//! angles that grow with the position. The dot product of a query and a key then knows how far apart they stand.
//!
//! The pairs are `(x[i], x[i + D/2])`, as the Llama checkpoints of Hugging Face have them.

use crate::float::Float;
use crate::machine::Machine;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::pass::Pass;
use std::sync::Arc;

/// Cosines and sines for some positions in a row, which all layers of a model share.
#[derive(Clone, Debug)]
pub struct Angles<T> {
    /// `[N, D/2]` each.
    table: Arc<[Vec<T>; 2]>,
    half: usize,
    length: usize,
}

impl<T: Float> Angles<T> {
    /// For heads of `width`, the positions from `start` on: pair `i` turns by `p / θ^(2i/D)` at position `p`.
    ///
    /// # Panics
    /// Where the width is odd.
    pub fn new(width: usize, theta: f64, start: usize, length: usize) -> Self {
        assert!(width.is_multiple_of(2), "pairs cannot be made of {width} numbers");
        let half = width / 2;
        let speeds: Vec<f64> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / width as f64)).collect();
        let angle = |at: usize| (start + at / half) as f64 * speeds[at % half];
        let cosines = (0..length * half).map(|at| T::of_f64(angle(at).cos())).collect();
        let sines = (0..length * half).map(|at| T::of_f64(angle(at).sin())).collect();
        Angles { table: Arc::new([cosines, sines]), half, length }
    }

    /// Turns rows `[.., N, H·D]` in place, or back with `back`.
    fn turn(&self, machine: &Machine, x: &mut Tensor<T>, back: bool) {
        let (width, half) = (x.width(), self.half);
        assert!(width.is_multiple_of(2 * half), "heads of {} cannot share a width of {width}", 2 * half);
        assert!(x.rows().is_multiple_of(self.length.max(1)), "angles for {} positions", self.length);
        let each = machine.rows_each(x.rows(), width);
        let parts = x.data_mut().chunks_mut(each * width).collect();
        machine.each(parts, |part, rows: &mut [T]| {
            for (r, row) in rows.chunks_exact_mut(width).enumerate() {
                let at = (part * each + r) % self.length * half;
                let [cos, sin] = self.table.each_ref().map(|numbers| &numbers[at..at + half]);
                machine.run(Turn { row, cos, sin, back });
            }
        });
    }
}

struct Turn<'a, T> {
    row: &'a mut [T],
    cos: &'a [T],
    sin: &'a [T],
    back: bool,
}

impl<T: Float> Pass for Turn<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let half = self.cos.len();
        let sign = if self.back { -T::ONE } else { T::ONE };
        for head in self.row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b, sin) = (first[i], second[i], self.sin[i] * sign);
                first[i] = a * self.cos[i] - b * sin;
                second[i] = b * self.cos[i] + a * sin;
            }
        }
    }
}

struct RotaryBackward<T> {
    x: Option<usize>,
    angles: Angles<T>,
}

impl<T: Float> Backward<T> for RotaryBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        self.angles.turn(context.machine, &mut upstream, true);
        context.add(self.x, upstream);
    }
}

impl<T: Float> Tape<'_, T> {
    /// Queries or keys `x [B, N, H·D]`, each head turned by the angles of its position.
    ///
    /// # Panics
    /// Where the angles are for other widths or lengths.
    pub fn rotary(&mut self, x: Var<T>, angles: &Angles<T>) -> Var<T> {
        let (slot, mut value) = (x.slot, x.value);
        angles.turn(self.machine, &mut value, false);
        self.record(value, || RotaryBackward { x: slot, angles: angles.clone() })
    }
}
