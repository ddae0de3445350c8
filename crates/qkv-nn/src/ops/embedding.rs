//! Scaled embedding lookup, with position embeddings added.

use crate::float::Float;
use crate::loops::{AddScaled, Scaled};
use crate::machine::Machine;
use crate::parameters::Param;
use crate::stored_matrix::DeviceMatrix;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, DecodeBatch, Kind, MatrixRef, Operations, RowSums};
use std::sync::Arc;

/// Position embeddings, added to the token embeddings.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a, T> {
    /// None.
    None,
    /// Constants, `[positions, C]`.
    Fixed(&'a [T]),
    /// A parameter, `[positions, C]`.
    Learned(Param),
}

struct EmbeddingBackward<T> {
    ids: Arc<[u32]>,
    /// On a device: which rows add to which table entry, and to which position. Made in the forward pass, when there is
    /// nothing to wait for yet.
    by: [Option<RowSums>; 2],
    table: Param,
    scale: T,
    positions: Option<(Param, usize, usize)>,
}

impl<T: Float> Tape<'_, T> {
    /// `scale · table[id] + positions[start + n]` for `ids [B, N]`: a tensor `[B, N, C]`.
    ///
    /// # Panics
    /// If an id or position is not in its table.
    pub fn embedding(
        &mut self,
        ids: &[u32],
        length: usize,
        table: Param,
        scale: f64,
        positions: Positions<'_, T>,
        start: usize,
    ) -> Var<T> {
        let &[entries, width] = self.parameters.shape(table) else { panic!("a table of embeddings is a matrix") };
        assert!(ids.iter().all(|&id| (id as usize) < entries), "an id beyond the {entries} of the table");
        let factor = scale;
        let scale = T::of_f64(scale);
        if let Some(operations) = self.machine.cuda() {
            let (at, learned) = match positions {
                Positions::None => (None, None),
                Positions::Fixed(at) => (Some(operations.constant(&T::to_floats(at))), None),
                Positions::Learned(param) => {
                    (Some(self.parameters.array(param, operations)), Some((param, length, start)))
                }
            };
            let y = Tensor::activations(operations, &[ids.len() / length.max(1), length, width]);
            let numbers = operations.upload(Kind::U32, ids, "token ids");
            let rows = match self.is_inference() {
                true => self.parameters.device_table(table, operations),
                false => DeviceMatrix::Elements(self.parameters.array(table, operations)),
            };
            let (rows, into) = (rows.as_ref(), y.array(operations));
            operations.embedding(&numbers, rows, at.as_ref(), &into, width, factor as f32, [length, start]);
            let depends = self.depends(&[], &[Some(table), learned.map(|(param, ..)| param)]);
            return self.record(y, depends, || {
                let position = |r: usize| Some((start + r % length) as u32);
                let of_ids = operations.row_sums(ids.iter().map(|&id| Some(id)));
                let of_positions = learned.map(|_| operations.row_sums((0..ids.len()).map(position)));
                let by = [Some(of_ids), of_positions];
                EmbeddingBackward { ids: ids.into(), by, table, scale, positions: learned }
            });
        }
        let data = self.parameters.get(table);
        let (at, learned) = match positions {
            Positions::None => (None, None),
            Positions::Fixed(at) => (Some(at), None),
            Positions::Learned(param) => (Some(self.parameters.get(param)), Some((param, length, start))),
        };
        let mut y = Tensor::unwritten(self.pool, &[ids.len() / length.max(1), length, width]);
        let each = self.machine.rows_each(ids.len(), width);
        let parts = y.data_mut().chunks_mut((each * width).max(1)).zip(ids.chunks(each)).collect();
        self.machine.each(parts, |part, (rows, ids): (&mut [T], &[u32])| {
            for (r, (row, &id)) in rows.chunks_exact_mut(width).zip(ids).enumerate() {
                let entry = &data[id as usize * width..][..width];
                let more = at.map(|at| &at[(start + (part * each + r) % length) * width..][..width]);
                self.machine.run(Scaled { y: row, x: entry, scale, more });
            }
        });
        let depends = self.depends(&[], &[Some(table), learned.map(|(param, ..)| param)]);
        let by = [None, None];
        self.record(y, depends, || EmbeddingBackward { ids: ids.into(), by, table, scale, positions: learned })
    }
}

impl<T: Float> Tape<'_, T> {
    /// `scale · table[id] + positions[position]` for the next token of each sequence, tracked on a device: a tensor
    /// `[B, 1, C]`. For inference.
    ///
    /// # Panics
    /// If the tape computes on the CPU.
    pub fn embedding_counted(
        &mut self,
        batch: &DecodeBatch,
        table: Param,
        scale: f64,
        positions: Positions<'_, T>,
    ) -> Var<T> {
        let operations = self.machine.cuda().expect("a device that counts");
        let width = self.parameters.shape(table)[1];
        let rows_of = |ids: &Array, table: MatrixRef<'_>, scale: f64| {
            let y = Tensor::activations(operations, &[batch.len(), 1, width]);
            let into = y.array(operations);
            operations.embedding(ids, table, None, &into, width, scale as f32, [1, 0]);
            y
        };
        let x = rows_of(batch.ids(), self.parameters.device_table(table, operations).as_ref(), scale);
        let at = match positions {
            Positions::None => return self.constant(x),
            Positions::Fixed(at) => operations.constant(&T::to_floats(at)),
            Positions::Learned(param) => self.parameters.array(param, operations),
        };
        let at = rows_of(batch.positions(), (&at).into(), 1.0);
        let (x, at) = (self.constant(x), self.constant(at));
        self.add(&x, at)
    }
}

/// `sums[at(r)] += scale · rows[r]`. Each task handles all rows of some columns, so the order of the sums is fixed.
fn scatter<T: Float>(
    machine: &Machine,
    sums: &mut [T],
    rows: &[T],
    width: usize,
    scale: T,
    at: impl Fn(usize) -> usize + Sync,
) {
    let columns = width.div_ceil(machine.threads()).next_multiple_of(COLUMNS).min(width.max(1));
    machine.each(T::columns(sums, width, columns), |part, mut sums: Vec<&mut [T]>| {
        for (r, row) in rows.chunks_exact(width).enumerate() {
            machine.run(AddScaled { sum: sums[at(r)], x: &row[part * columns..], scale });
        }
    });
}

/// Smallest number of columns per task: a few cache lines.
const COLUMNS: usize = 64;

impl<T: Float> Backward<T> for EmbeddingBackward<T> {
    fn parameters(&self) -> Option<Vec<Param>> {
        Some([self.table].into_iter().chain(self.positions.map(|(param, ..)| param)).collect())
    }

    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let width = upstream.width();
        if let Some(operations) = context.machine.cuda() {
            return self.backward_on_cuda(operations, &upstream, context);
        }
        if let Some(sums) = context.gradients.sum(self.table) {
            scatter(context.machine, sums, upstream.data(), width, self.scale, |r| self.ids[r] as usize);
        }
        if let Some((param, length, start)) = self.positions
            && let Some(sums) = context.gradients.sum(param)
        {
            scatter(context.machine, sums, upstream.data(), width, T::ONE, |r| start + r % length);
        }
    }
}

impl<T: Float> EmbeddingBackward<T> {
    fn backward_on_cuda(&self, operations: &Operations, upstream: &Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let (width, rows) = (upstream.width(), upstream.array(operations));
        let params = [Some(self.table), self.positions.map(|(param, ..)| param)];
        let scales = [self.scale.to_f64() as f32, 1.0];
        for ((param, by), scale) in params.into_iter().zip(&self.by).zip(scales) {
            if let (Some(param), Some(by)) = (param, by)
                && let Some(sums) = context.gradients.array(param, operations)
            {
                operations.scatter(&rows, by, &sums, width, scale);
            }
        }
    }
}
