//! Decoding that keeps its state on the device: the tokens and positions of sequences are in device memory, so that a
//! step makes the same launches for every token and can be recorded as a [`Graph`](super::Graph).

use super::launch::{Argument, count};
use super::{Array, Gate, Kind, MatrixRef, Operations};
use Argument::Ptr;

/// Sequences that are decoded side by side, each at its own position.
#[derive(Clone, Debug)]
pub struct DecodeBatch {
    ids: Array,
    positions: Array,
    /// The positions in the type that attention reads, i64.
    places: Array,
    /// The number of keys of each sequence, that of its new token included, i32.
    lengths: Array,
    room: usize,
}

impl DecodeBatch {
    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tokens that each sequence has room for.
    pub fn room(&self) -> usize {
        self.room
    }

    /// The token that each sequence reads next, u32.
    pub fn ids(&self) -> &Array {
        &self.ids
    }

    /// Its position, u32.
    pub fn positions(&self) -> &Array {
        &self.positions
    }

    /// Its position, i64.
    pub fn places(&self) -> &Array {
        &self.places
    }

    /// The number of keys that it sees, i32.
    pub fn lengths(&self) -> &Array {
        &self.lengths
    }
}

/// Where the keys and values of each sequence's new token go.
#[derive(Clone, Copy, Debug)]
pub struct CacheEnd<'a> {
    /// Keys and values, `[B, room, width]` each.
    pub caches: [&'a Array; 2],
    /// Tables of cosines and sines, f32 `[room, half]`: the heads of keys and queries are rotated by the angles of
    /// their position.
    pub angles: Option<[&'a Array; 2]>,
    /// The positions.
    pub batch: &'a DecodeBatch,
}

impl CacheEnd<'_> {
    /// Widths of keys and values.
    fn widths(&self) -> [usize; 2] {
        self.caches.map(|cache| cache.len() / (self.batch.len() * self.batch.room).max(1))
    }

    /// Half the width of a rotated head, or 0.
    pub(super) fn half(&self) -> usize {
        self.angles.map_or(0, |[cosines, _]| cosines.len() / self.batch.room.max(1))
    }

    /// The pointers to the caches, the tables and the positions.
    pub(super) fn pointers(&self, kind: Kind) -> [u64; 5] {
        let all = self.batch.room * self.half();
        let [cosines, sines] = self.angles.map_or([0; 2], |of| of.map(|table| table.expect(Kind::F32, all)));
        let [keys, values] = self.caches.map(|cache| cache.expect(kind, 0));
        [keys, values, cosines, sines, self.batch.positions.ptr()]
    }
}

/// What [`Operations::next_token`] chooses if a logit is not finite.
pub const NO_TOKEN: u32 = u32::MAX;

/// One matrix of [`few_rows`](Operations::few_rows).
#[derive(Clone, Copy, Debug)]
pub struct FewRowsProduct<'a> {
    /// `[outputs, inner]`.
    pub w: MatrixRef<'a>,
    /// `[outputs]`.
    pub bias: Option<&'a Array>,
    /// Where the product goes, `[rows, outputs]`.
    pub y: &'a Array,
    /// Rows of the matrix.
    pub outputs: usize,
    /// What is added, `[rows, outputs]`, if this is the only matrix.
    pub residual: Option<&'a Array>,
}

/// The most rows of [`few_rows`](Operations::few_rows).
pub const FEW_ROWS: usize = 8;

/// Elements of the few rows that a block stages in shared memory at a time.
pub(crate) const STAGED: usize = 8192;

/// A norm of rows, which a product of few rows computes itself.
#[derive(Clone, Debug)]
pub struct RowNorm {
    /// `[rows, width]`.
    pub x: Array,
    /// `[width]`, f32.
    pub gain: Array,
    /// The bias of layer norm, `[width]`, f32; RMS norm has none.
    pub bias: Option<Array>,
    /// Added to the variance.
    pub epsilon: f32,
}

/// The input of [`few_rows`](Operations::few_rows).
#[derive(Clone, Copy, Debug)]
pub enum FewRowsInput<'a> {
    /// `[rows, inner]`.
    Rows(&'a Array),
    /// The same after a norm.
    Normalized(&'a RowNorm),
}

impl FewRowsInput<'_> {
    pub(super) fn x(&self) -> &Array {
        match self {
            FewRowsInput::Rows(x) => x,
            FewRowsInput::Normalized(norm) => &norm.x,
        }
    }

    /// The pointers to the input, the gain and the bias, and ε.
    pub(super) fn arguments(&self, kind: Kind, rows: usize, inner: usize) -> ([u64; 3], Argument) {
        let x = self.x().expect(kind, rows * inner);
        match self {
            FewRowsInput::Rows(_) => ([x, 0, 0], Argument::F32(0.0)),
            FewRowsInput::Normalized(RowNorm { gain, bias, epsilon, .. }) => {
                let bias = bias.as_ref().map_or(0, |bias| bias.expect(Kind::F32, inner));
                ([x, gain.expect(Kind::F32, inner), bias], Argument::F32(*epsilon))
            }
        }
    }
}

/// Whether products of this many rows can normalize them: a block must hold all of them in shared memory.
pub fn has_row_norm(rows: usize, width: usize) -> bool {
    rows <= FEW_ROWS && width.is_multiple_of(8) && rows.next_power_of_two() * width <= STAGED
}

impl Operations {
    /// Sequences with room for this many tokens each, all at position 0.
    pub fn decode_batch(&self, sequences: usize, room: usize) -> DecodeBatch {
        let zeros = |kind| self.zeros(kind, sequences, "positions");
        let (ids, positions, places, lengths) =
            (zeros(Kind::U32), zeros(Kind::U32), zeros(Kind::U64), zeros(Kind::U32));
        DecodeBatch { ids, positions, places, lengths, room }
    }

    /// Sets the token that each sequence reads next, and its position.
    ///
    /// # Panics
    /// If there is not one of each per sequence, or a position is beyond the room.
    pub fn set_decode_batch(&self, batch: &DecodeBatch, ids: &[u32], positions: &[u32]) {
        assert!(positions.iter().all(|&at| (at as usize) < batch.room), "positions within {}", batch.room);
        self.write(&batch.ids, ids);
        self.write(&batch.positions, positions);
        self.write(&batch.places, &positions.iter().map(|&at| i64::from(at)).collect::<Vec<_>>());
        self.write(&batch.lengths, &positions.iter().map(|&at| at as i32 + 1).collect::<Vec<_>>());
    }

    /// Writes the keys and values of each sequence's new token, `[B, width]` each, to the end of its cache. With
    /// angles, the heads of keys and, in place, of queries are rotated first.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn append_at(&self, [q, k, v]: [&Array; 3], end: CacheEnd<'_>) {
        let (kind, rows, half) = (self.activation_kind(), end.batch.len(), end.half());
        let ([k_width, v_width], q_width) = (end.widths(), q.len() / rows.max(1));
        assert!(half == 0 || q_width % (2 * half) == 0 && k_width % (2 * half) == 0, "whole heads");
        let new = [q.expect(kind, 0), k.expect(kind, rows * k_width), v.expect(kind, rows * v_width)];
        let pointers = [&new[..], &end.pointers(kind)].concat().into_iter().map(Ptr);
        let grid = [self.blocks(rows * (q_width + k_width + v_width)), 1];
        let numbers = [rows, end.batch.room, half, q_width, k_width, v_width].map(count);
        // SAFETY: `append_at(T*, const T* × 2, T* × 2, const float* × 2, const u32*, u32 × 6)`; positions are within
        // the room.
        unsafe { self.launch("append_at", grid, &pointers.chain(numbers).collect::<Vec<_>>()) };
    }

    /// Lets sequences continue from others, `parents [B]`, as beam search does: the part before their positions, in
    /// caches `[B, room, width]`, becomes that of their parents.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn reorder<'a>(&self, caches: impl Iterator<Item = &'a Array>, parents: &Array, batch: &DecodeBatch) {
        let (kind, sequences, room) = (self.activation_kind(), batch.len(), batch.room);
        let mut scratch: Option<Array> = None;
        for cache in caches {
            let width = cache.len() / (sequences * room).max(1);
            let scratch = match &scratch {
                Some(scratch) if scratch.len() >= cache.len() => scratch,
                _ => scratch.insert(self.activations(cache.len())),
            };
            let pointers = [cache.expect(kind, 0), scratch.ptr(), parents.expect(Kind::U32, sequences)];
            let grid = [self.blocks_of_eights(sequences * room, width), 1];
            for back in [0, 1] {
                let pointers = [&pointers[..], &[batch.positions.ptr()]].concat().into_iter().map(Ptr);
                let arguments: Vec<Argument> = pointers.chain([sequences, room, width, back].map(count)).collect();
                // SAFETY: `reorder_rows(T* × 2, const u32* × 2, u32 × 2, int × 2)`; parents are sequences.
                unsafe { self.launch("reorder_rows", grid, &arguments) };
            }
        }
    }

    /// Chooses the likeliest token of each sequence, by logits `[B, V]`, as the one that it reads next, and advances it
    /// by one position; [`NO_TOKEN`] if a logit is not finite.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn next_token(&self, logits: &Array, batch: &DecodeBatch) {
        let classes = logits.len() / batch.len().max(1);
        let DecodeBatch { ids, positions, places, lengths, room } = batch;
        let logits = logits.expect(self.activation_kind(), batch.len() * classes);
        let pointers = [logits, ids.ptr(), positions.ptr(), places.ptr(), lengths.ptr()];
        let arguments = [&pointers.map(Ptr)[..], &[count(classes), count(*room)]].concat();
        // SAFETY: `next_token(const T*, u32*, u32*, i64*, i32*, int, u32)`.
        unsafe { self.launch("next_token", [batch.len(), 1], &arguments) };
    }

    /// `y = x · Wᵀ + bias + residual` with up to three matrices in one launch, for at most eight rows, or for a few
    /// times as many if the matrices are in blocks. Returns `false`, and does nothing, if there are more rows, if rows
    /// are not aligned to 16 bytes, or if some matrices are in blocks and others are not. The bits of a row do not
    /// depend on the other rows, and are those of a separate norm and product.
    ///
    /// # Panics
    /// If there are more matrices, or an array is too short.
    pub fn few_rows(&self, x: FewRowsInput<'_>, rows: usize, products: &[FewRowsProduct<'_>]) -> bool {
        let in_blocks =
            products.iter().map(|product| Some((*product, product.w.blocks()?))).collect::<Option<Vec<_>>>();
        if let Some(products) = in_blocks {
            return self.few_rows_blocks(x, rows, &products);
        }
        let (kind, inner) = (self.activation_kind(), x.x().len() / rows.max(1));
        let outs = products.iter().all(|product| product.y.kind() == kind);
        let matrices: Option<Vec<&Array>> = products.iter().map(|product| product.w.elements()).collect();
        let Some(matrices) = matrices.filter(|_| outs) else { return false };
        let Some(variant) = self.few_rows_variant(x, rows, &matrices) else { return false };
        assert!(products.len() <= 3, "three matrices at most");
        let residual = products.iter().find_map(|product| product.residual);
        assert!(residual.is_none() || products.len() == 1, "a residual of one matrix");
        let name = ["few_rows_1", "few_rows_2", "few_rows_4", "few_rows_8"][variant];
        let of = |at: usize, get: &dyn Fn(&FewRowsProduct<'_>) -> u64| products.get(at).map_or(0, get);
        let outputs = [0, 1, 2].map(|at| of(at, &|product| product.outputs as u64) as usize);
        let w = [0, 1, 2].map(|at| matrices.get(at).map_or(0, |w| w.expect(kind, outputs[at] * inner)));
        let bias = |product: &FewRowsProduct<'_>| product.bias.map_or(0, |bias| bias.expect(kind, product.outputs));
        let bias = [0, 1, 2].map(|at| of(at, &bias));
        let y = [0, 1, 2].map(|at| of(at, &|product| product.y.expect(kind, rows * product.outputs)));
        let residual = residual.map_or(0, |residual| residual.expect(kind, rows * outputs[0]));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &y, &[residual]].concat();
        let numbers = [&[rows, inner][..], &outputs].concat();
        let grid = [if rows == 0 { 0 } else { outputs.iter().sum::<usize>().div_ceil(8) }, 1];
        let arguments = pointers.into_iter().map(Ptr).chain(numbers.into_iter().map(count)).chain([epsilon]);
        // SAFETY: `few_rows_N(const T*, const float* × 2, const T* × 6, T* × 3, const T*, u32, int × 4, float)`, a warp
        // of eight for each output.
        unsafe { self.launch(name, grid, &arguments.collect::<Vec<_>>()) };
        true
    }

    /// `y = f(gate) · up` with the products `x · Wᵀ + bias` of two matrices `[outputs, inner]`, for at most eight rows,
    /// in one launch with the bits of the three that it replaces. Returns `false`, and does nothing, in the cases of
    /// [`few_rows`](Operations::few_rows).
    ///
    /// # Panics
    /// If an array is too short.
    pub fn few_rows_gated(
        &self,
        x: FewRowsInput<'_>,
        rows: usize,
        [gate, up]: [(MatrixRef<'_>, Option<&Array>); 2],
        y: &Array,
        of: Gate,
    ) -> bool {
        if let (Some(v), Some(w)) = (gate.0.blocks(), up.0.blocks()) {
            return self.few_rows_blocks_gated(x, rows, [(v, gate.1), (w, up.1)], y, of);
        }
        let (Some(v), Some(w)) = (gate.0.elements(), up.0.elements()) else { return false };
        let [gate, up] = [(v, gate.1), (w, up.1)];
        let (kind, inner, outputs) = (self.activation_kind(), x.x().len() / rows.max(1), y.len() / rows.max(1));
        let Some(variant) = self.few_rows_variant(x, rows, &[gate.0, up.0]) else { return false };
        let name = ["few_rows_gated_1", "few_rows_gated_2", "few_rows_gated_4", "few_rows_gated_8"][variant];
        let w = [gate, up].map(|(w, _)| w.expect(kind, outputs * inner));
        let bias = [gate, up].map(|(_, bias)| bias.map_or(0, |bias| bias.expect(kind, outputs)));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &[y.expect(kind, rows * outputs)]].concat();
        let numbers = [count(rows), count(inner), count(outputs), Argument::U32(of as u32), epsilon];
        let grid = [if rows == 0 { 0 } else { outputs.div_ceil(8) }, 1];
        let arguments: Vec<Argument> = pointers.into_iter().map(Ptr).chain(numbers).collect();
        // SAFETY: `few_rows_gated_N(const T*, const float* × 2, const T* × 4, T*, u32, int × 3, float)`, a warp of
        // eight for each output.
        unsafe { self.launch(name, grid, &arguments) };
        true
    }

    /// The new token of each of at most eight sequences: queries, which go to `q`, keys and values as products of `x`
    /// with three matrices `[outputs, inner]`, then [`append_at`](Operations::append_at), in one launch with the same
    /// bits. Returns `false`, and does nothing, in the cases of [`few_rows`](Operations::few_rows).
    ///
    /// # Panics
    /// If an array is too short.
    pub fn few_rows_appended(
        &self,
        x: FewRowsInput<'_>,
        matrices: [(MatrixRef<'_>, Option<&Array>); 3],
        q: &Array,
        end: CacheEnd<'_>,
    ) -> bool {
        let (kind, rows, half) = (self.activation_kind(), end.batch.len(), end.half());
        let (inner, [k_width, v_width]) = (x.x().len() / rows.max(1), end.widths());
        let outputs = [q.len() / rows.max(1), k_width, v_width];
        if let [Some(a), Some(b), Some(c)] = matrices.map(|(w, _)| w.blocks()) {
            let matrices = [(a, matrices[0].1), (b, matrices[1].1), (c, matrices[2].1)];
            return self.few_rows_blocks_appended(x, matrices, q, outputs, end);
        }
        let [Some(a), Some(b), Some(c)] = matrices.map(|(w, _)| w.elements()) else { return false };
        let pairs = outputs.iter().all(|outputs| outputs % 2 == 0);
        let variant = self.few_rows_variant(x, rows, &[a, b, c]);
        let Some(variant) = variant.filter(|_| pairs) else { return false };
        assert!(half == 0 || outputs[..2].iter().all(|outputs| outputs % (2 * half) == 0), "whole heads");
        let name =
            ["few_rows_appended_1", "few_rows_appended_2", "few_rows_appended_4", "few_rows_appended_8"][variant];
        let w = [(a, outputs[0]), (b, outputs[1]), (c, outputs[2])].map(|(w, outputs)| w.expect(kind, outputs * inner));
        let bias = [0, 1, 2].map(|at| matrices[at].1.map_or(0, |bias: &Array| bias.expect(kind, outputs[at])));
        let (x, epsilon) = x.arguments(kind, rows, inner);
        let pointers = [&x[..], &w, &bias, &[q.expect(kind, 0)], &end.pointers(kind)].concat();
        let numbers = [&[rows, end.batch.room, half, inner][..], &outputs].concat();
        let grid = [if rows == 0 { 0 } else { outputs.iter().sum::<usize>().div_ceil(16) }, 1];
        let arguments = pointers.into_iter().map(Ptr).chain(numbers.into_iter().map(count)).chain([epsilon]);
        // SAFETY: `few_rows_appended_N(const T*, const float* × 2, const T* × 6, T* × 3, const float* × 2, const u32*,
        // u32 × 3, int × 4, float)`, a warp of eight for each pair of outputs; positions are within the room.
        unsafe { self.launch(name, grid, &arguments.collect::<Vec<_>>()) };
        true
    }

    /// Which of the kernels for 1, 2, 4 and 8 rows to use; `None` if there are more rows, or if rows of an operand are
    /// not aligned to 16 bytes.
    fn few_rows_variant(&self, x: FewRowsInput<'_>, rows: usize, matrices: &[&Array]) -> Option<usize> {
        let fits = rows <= FEW_ROWS && self.is_few_rows_input(x, rows) && matrices.iter().all(|w| self.is_aligned(w));
        fits.then(|| rows.max(1).next_power_of_two().ilog2() as usize)
    }

    /// Whether rows of activations in this array are aligned to 16 bytes, given that their size is a multiple of 16
    /// bytes.
    fn is_aligned(&self, array: &Array) -> bool {
        array.ptr().is_multiple_of(16) && array.kind() == self.activation_kind()
    }

    /// Whether products of few rows can read these, and compute their norm.
    pub(super) fn is_few_rows_input(&self, x: FewRowsInput<'_>, rows: usize) -> bool {
        let inner = x.x().len() / rows.max(1);
        let staged = matches!(x, FewRowsInput::Rows(_)) || has_row_norm(rows, inner);
        staged && inner.is_multiple_of(8) && self.is_aligned(x.x())
    }

    /// Computes a norm that no product has computed.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn normalize(&self, norm: &RowNorm, [rows, width]: [usize; 2]) -> Array {
        let RowNorm { x, gain, bias, epsilon } = norm;
        let y = self.activations(rows * width);
        let moments = self.empty(Kind::F32, 2 * rows, "a norm");
        match bias {
            Some(bias) => self.layer_norm(x, [&y, &moments], [gain, bias], [rows, width], *epsilon),
            None => self.rms_norm(x, [&y, &moments], gain, [rows, width], *epsilon),
        }
        y
    }
}
