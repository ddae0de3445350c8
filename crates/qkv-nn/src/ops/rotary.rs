//! Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864): pairs of elements of each head are rotated by
//! angles that grow with the position, so that the dot product of a query and a key depends on their distance.
//!
//! The pairs are `(x[i], x[i + D/2])`, as in the Llama checkpoints of Hugging Face.

use crate::float::Float;
use crate::loops::Rotate;
use crate::machine::Machine;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, Kind, Operations};
use std::sync::Arc;

/// Cosines and sines for a range of positions, shared by all layers of a model.
#[derive(Clone, Debug)]
pub struct Angles<T> {
    /// `[N, D/2]` each.
    table: Arc<[Vec<T>; 2]>,
    half: usize,
    length: usize,
    /// The table in the memory of a device that tracks the positions of sequences.
    on_device: Option<[Array; 2]>,
}

impl<T: Float> Angles<T> {
    /// Angles for heads of `width` and positions from `start` on: at position `p`, pair `i` is rotated by
    /// `p / θ^(2i/D)`.
    ///
    /// # Panics
    /// If the width is odd.
    pub fn new(width: usize, theta: f64, start: usize, length: usize) -> Self {
        Angles::at(width, theta, &(start..start + length).collect::<Vec<_>>())
    }

    /// Angles for arbitrary positions, such as those of packed sequences.
    ///
    /// # Panics
    /// If the width is odd.
    pub fn at(width: usize, theta: f64, positions: &[usize]) -> Self {
        assert!(width.is_multiple_of(2), "{width} elements are no pairs");
        let (half, length) = (width / 2, positions.len());
        let speeds: Vec<f64> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / width as f64)).collect();
        let angle = |at: usize| positions[at / half] as f64 * speeds[at % half];
        let cosines = (0..length * half).map(|at| T::of_f64(angle(at).cos())).collect();
        let sines = (0..length * half).map(|at| T::of_f64(angle(at).sin())).collect();
        Angles { table: Arc::new([cosines, sines]), half, length, on_device: None }
    }

    /// Angles for sequences whose positions are tracked on a device, with room for this many tokens.
    ///
    /// # Panics
    /// If the width is odd.
    pub fn counted(width: usize, theta: f64, operations: &Operations, room: usize) -> Self {
        let angles = Angles::<T>::new(width, theta, 0, room);
        let upload = |numbers: &Vec<T>| operations.upload(Kind::F32, &T::to_floats(numbers), "angles");
        let tables = angles.table.each_ref().map(upload);
        Angles { on_device: Some(tables), ..angles }
    }

    /// Cosines and sines of all positions, if the positions are tracked on a device.
    pub(crate) fn on_device(&self) -> Option<&[Array; 2]> {
        self.on_device.as_ref()
    }

    /// Rotates rows `[.., N, H·D]` in place, by the negated angles if `inverse`.
    fn rotate(&self, machine: &Machine, x: &mut Tensor<T>, inverse: bool) {
        let (width, half) = (x.width(), self.half);
        assert!(width.is_multiple_of(2 * half), "heads of {} cannot share a width of {width}", 2 * half);
        assert!(x.rows().is_multiple_of(self.length.max(1)), "angles for {} positions", self.length);
        if let Some(operations) = machine.cuda() {
            let [cos, sin] = self.table.each_ref().map(|numbers| operations.constant(&T::to_floats(numbers)));
            let (heads, array) = (width / (2 * half).max(1), x.array_mut(operations));
            return operations.rotate(&array, [&cos, &sin], heads, self.length, inverse);
        }
        let each = machine.rows_each(x.rows(), width);
        let parts = x.data_mut().chunks_mut(each * width).collect();
        machine.each(parts, |part, rows: &mut [T]| {
            for (r, row) in rows.chunks_exact_mut(width).enumerate() {
                let at = (part * each + r) % self.length * half;
                let [cos, sin] = self.table.each_ref().map(|numbers| &numbers[at..at + half]);
                machine.run(Rotate { row, cos, sin, inverse });
            }
        });
    }
}

struct RotaryBackward<T> {
    x: Option<usize>,
    angles: Angles<T>,
}

impl<T: Float> Backward<T> for RotaryBackward<T> {
    fn backward(self: Box<Self>, mut upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        self.angles.rotate(context.machine, &mut upstream, true);
        context.add(self.x, upstream);
    }
}

impl<T: Float> Tape<'_, T> {
    /// Rotates each head of queries or keys `x [B, N, H·D]` by the angles of its position.
    ///
    /// # Panics
    /// If the angles are for another width or length.
    pub fn rotary(&mut self, x: Var<T>, angles: &Angles<T>) -> Var<T> {
        let (slot, mut value) = (x.slot, x.value);
        angles.rotate(self.machine, &mut value, false);
        self.record(value, self.depends(&[slot], &[]), || RotaryBackward { x: slot, angles: angles.clone() })
    }
}
