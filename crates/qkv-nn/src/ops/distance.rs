//! The regression loss of spectrogram models: absolute plus squared error.

use super::loss::{Loss, PendingLoss};
use crate::float::Float;
use crate::loops::Distance;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Kind, Operations};

/// The target values of rows.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a, T: Float> {
    /// The target values, in the shape of the rows.
    pub values: &'a Tensor<T>,
    /// Whether each row counts.
    pub counted: &'a [bool],
    /// Factor of each row's gradient.
    pub scale: f64,
}

impl<T: Float> Tape<'_, T> {
    /// `|x − y| + (x − y)²`, the mean over the width of `x [.., C]`, summed over the rows that count. On a training
    /// tape the backward pass starts here.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn distance_loss(&mut self, x: &Var<T>, expected: Expected<'_, T>) -> PendingLoss {
        let width = x.value.width();
        assert_eq!((x.value.len(), x.value.rows()), (expected.values.len(), expected.counted.len()), "a row for each");
        if let Some(operations) = self.machine.cuda() {
            return self.distance_on_cuda(operations, x, expected);
        }
        let mut gradient = Tensor::zeros(self.pool, x.shape());
        let mut loss = 0.0;
        let rows = x.value.data().chunks_exact(width).zip(expected.values.data().chunks_exact(width));
        let rows = gradient.data_mut().chunks_exact_mut(width).zip(rows).zip(expected.counted);
        for ((gradient, (found, expected_row)), _) in rows.filter(|(_, counted)| **counted) {
            let (mut row, scale) = (0.0, expected.scale / width as f64);
            self.machine.run(Distance { found, expected: expected_row, scale, gradient, loss: &mut row });
            loss += row / width as f64;
        }
        if self.is_training() {
            self.seed(x, gradient);
        }
        let rows = expected.counted.iter().filter(|&&counted| counted).count();
        Loss { smoothed: loss, nll: loss, rows, right: 0 }.into()
    }

    fn distance_on_cuda(&mut self, operations: &Operations, x: &Var<T>, expected: Expected<'_, T>) -> PendingLoss {
        let counted: Vec<u32> = expected.counted.iter().map(|&counted| u32::from(counted)).collect();
        let counted = operations.upload(Kind::U32, &counted, "rows that count");
        let totals = operations.zeros(Kind::F64, 4, "a loss");
        let d_x = (self.is_training() && x.slot.is_some()).then(|| Tensor::activations(operations, x.shape()));
        let gradient = d_x.as_ref().map(|d_x| d_x.array(operations));
        let (found, there) = (x.value.array(operations), expected.values.floats(operations));
        let (width, scale) = (x.value.width(), expected.scale as f32);
        operations.distance([&found, &there, &counted], gradient.as_ref(), width, scale, &totals);
        if let Some(d_x) = d_x {
            self.seed(x, d_x);
        }
        PendingLoss::on_device(operations, totals)
    }
}
