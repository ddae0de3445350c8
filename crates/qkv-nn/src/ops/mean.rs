//! Mean pooling of a sequence, excluding padding.

use crate::float::Float;
use crate::loops::{AddAssign, Scale, Scaled};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, Kind, Operations};

struct MeanBackward {
    x: Option<usize>,
    shape: [usize; 3],
    lengths: Vec<usize>,
}

impl<T: Float> Backward<T> for MeanBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let [_, length, width] = self.shape;
        if let Some(operations) = context.machine.cuda() {
            let d_x = Tensor::activations(operations, &self.shape);
            let lengths = counts(operations, &self.lengths);
            operations.mean_gradient(&upstream.array(operations), &lengths, &d_x.array(operations), self.shape);
            return context.add(self.x, d_x);
        }
        let mut d_x = Tensor::zeros(context.pool, &self.shape);
        let sequences = d_x.data_mut().chunks_exact_mut((length * width).max(1));
        for ((sequence, g), &count) in sequences.zip(upstream.data().chunks_exact(width)).zip(&self.lengths) {
            let share = T::ONE / T::of_f64(count.max(1) as f64);
            for row in sequence.chunks_exact_mut(width).take(count) {
                context.machine.run(Scaled { y: row, x: g, scale: share, more: None });
            }
        }
        context.add(self.x, d_x);
    }
}

impl<T: Float> Tape<'_, T> {
    /// The mean over the first `lengths[b]` tokens of each sequence `[B, N, C]`, or over all tokens without `lengths`:
    /// `[B, 1, C]`.
    ///
    /// # Panics
    /// If a sequence has fewer tokens than its length.
    pub fn mean(&mut self, x: &Var<T>, lengths: Option<&[usize]>) -> Var<T> {
        let &[batch, length, width] = x.shape() else { panic!("sequences have three axes, not {:?}", x.shape()) };
        let lengths = lengths.map_or_else(|| vec![length; batch], <[usize]>::to_vec);
        assert!(lengths.len() == batch && lengths.iter().all(|&count| count <= length), "lengths within {length}");
        let (slot, shape) = (x.slot, [batch, length, width]);
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, &[batch, 1, width]);
            let (input, numbers) = (x.value.array(operations), counts(operations, &lengths));
            operations.mean(&input, &numbers, &y.array(operations), shape);
            return self.record(y, self.depends(&[slot], &[]), || MeanBackward { x: slot, shape, lengths });
        }
        let mut y = Tensor::zeros(self.pool, &[batch, 1, width]);
        let sequences = x.value.data().chunks_exact((length * width).max(1));
        for ((sequence, y), &count) in sequences.zip(y.data_mut().chunks_exact_mut(width)).zip(&lengths) {
            for row in sequence.chunks_exact(width).take(count) {
                self.machine.run(AddAssign(y, row));
            }
            let share = T::ONE / T::of_f64(count.max(1) as f64);
            self.machine.run(Scale(y, share));
        }
        self.record(y, self.depends(&[slot], &[]), || MeanBackward { x: slot, shape, lengths })
    }
}

fn counts(operations: &Operations, lengths: &[usize]) -> Array {
    let lengths: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
    operations.upload(Kind::U32, &lengths, "lengths")
}
