//! Gathers rows of several tensors: sentences into their documents, a class token in front of patches.

use crate::float::Float;
use crate::loops::{AddAssign, Fill};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::Kind;

/// The source of each output row: a tensor and its row; `None` for a row of zeros.
type Places = Vec<Option<(usize, usize)>>;

struct GatherBackward {
    /// Slot and shape of each tensor.
    parts: Vec<(Option<usize>, Vec<usize>)>,
    places: Places,
}

impl<T: Float> Backward<T> for GatherBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let width = upstream.width();
        if let Some(operations) = context.machine.cuda() {
            let rows = upstream.array(operations);
            for (part, (slot, shape)) in self.parts.iter().enumerate() {
                let Some(sum) = context.sum_or_zeros(*slot, shape, operations) else { continue };
                let places = self.places.iter().map(|place| Some(place.filter(|at| at.0 == part)?.1 as u32));
                operations.scatter(&rows, &operations.row_sums(places), &sum, width, 1.0);
            }
            return;
        }
        let machine = context.machine;
        for (part, (slot, shape)) in self.parts.iter().enumerate() {
            let Some(sum) = context.sum(*slot, shape) else { continue };
            let rows = self.places.iter().zip(upstream.data().chunks_exact(width));
            for (row, g) in rows.filter_map(|(place, g)| Some((place.filter(|at| at.0 == part)?.1, g))) {
                machine.run(AddAssign(&mut sum[row * width..][..width], g));
            }
        }
    }
}

impl<T: Float> Tape<'_, T> {
    /// Gathers rows `[B, N, C]`: output row `[b, n]` is row `places[b · N + n]` of the concatenated tensors, or zeros
    /// if that is `None`.
    ///
    /// # Panics
    /// If the tensors have different widths, the number of places is not `B · N`, or a place is beyond the rows.
    pub fn gather(&mut self, parts: &[&Var<T>], places: &[Option<usize>], [batch, length]: [usize; 2]) -> Var<T> {
        let width = parts[0].value.width();
        assert!(parts.iter().all(|part| part.value.width() == width), "rows of one width");
        assert_eq!(places.len(), batch * length, "a place for each row");
        let place = |place: &Option<usize>| {
            let mut row = (*place)?;
            for (at, part) in parts.iter().enumerate() {
                match row.checked_sub(part.value.rows()) {
                    None => return Some((at, row)),
                    Some(later) => row = later,
                }
            }
            panic!("row {place:?} is beyond those there are")
        };
        let numbers = places;
        let places: Places = places.iter().map(place).collect();
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, &[batch, length, width]);
            // The tensors concatenated, as the places index them.
            let joined = match parts {
                [part] => part.value.array(operations),
                _ => operations.joined(&parts.iter().map(|part| part.value.array(operations)).collect::<Vec<_>>()),
            };
            let numbers: Vec<u32> = numbers.iter().map(|place| place.map_or(u32::MAX, |row| row as u32)).collect();
            let numbers = operations.upload(Kind::U32, &numbers, "numbers of rows");
            operations.gather(&joined, &numbers, &y.array(operations), width);
            let slots: Vec<Option<usize>> = parts.iter().map(|part| part.slot).collect();
            let depends = self.depends(&slots, &[]);
            let parts = parts.iter().map(|part| (part.slot, part.shape().to_vec())).collect();
            return self.record(y, depends, || GatherBackward { parts, places });
        }
        let mut y = Tensor::unwritten(self.pool, &[batch, length, width]);
        for (to, place) in y.data_mut().chunks_exact_mut(width.max(1)).zip(&places) {
            match place {
                Some((part, row)) => to.copy_from_slice(&parts[*part].value.data()[row * width..][..width]),
                None => self.machine.run(Fill(to, T::ZERO)),
            }
        }
        let slots: Vec<Option<usize>> = parts.iter().map(|part| part.slot).collect();
        let depends = self.depends(&slots, &[]);
        let parts = parts.iter().map(|part| (part.slot, part.shape().to_vec())).collect();
        self.record(y, depends, || GatherBackward { parts, places })
    }
}
