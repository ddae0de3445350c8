//! Decoding where the device counts: tokens and positions of sequences are in device memory, so that a step is the same
//! launches for every token, and can be recorded as a [`Graph`](super::Graph).

use super::launch::{Argument, count};
use super::{Array, Kind, Operations};
use Argument::Ptr;

/// Sequences that are decoded side by side, each at a position of its own.
#[derive(Clone, Debug)]
pub struct DecodeBatch {
    ids: Array,
    positions: Array,
    /// The positions as attention takes them, i64.
    places: Array,
    /// Keys of each sequence, with that of its new token, i32.
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

    /// Tokens that a sequence has room for.
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

/// What [`Operations::next_token`] chooses where a logit is not finite.
pub const NO_TOKEN: u32 = u32::MAX;

/// The most rows of [`few_rows`](Operations::few_rows).
const FEW_ROWS: usize = 8;

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
    /// Where there are not as many, or a position is beyond the room.
    pub fn set_decode_batch(&self, batch: &DecodeBatch, ids: &[u32], positions: &[u32]) {
        assert!(positions.iter().all(|&at| (at as usize) < batch.room), "positions within {}", batch.room);
        self.write(&batch.ids, ids);
        self.write(&batch.positions, positions);
        self.write(&batch.places, &positions.iter().map(|&at| i64::from(at)).collect::<Vec<_>>());
        self.write(&batch.lengths, &positions.iter().map(|&at| at as i32 + 1).collect::<Vec<_>>());
    }

    /// Rotates the heads of `x [B, heads · 2 · half]` by the angles of each sequence's position, of tables
    /// `[room, half]`.
    ///
    /// # Panics
    /// Where an array is too short.
    pub fn rotate_at(&self, x: &Array, angles: [&Array; 2], heads: usize, batch: &DecodeBatch) {
        let (rows, half) = (batch.len(), angles[0].len() / batch.room.max(1));
        let [cosines, sines] = angles.map(|table| table.expect(Kind::F32, batch.room * half));
        let x = x.expect(self.activation_kind(), rows * heads * 2 * half);
        let pointers = [x, cosines, sines, batch.positions.ptr()];
        let grid = [self.blocks(rows * heads * half), 1];
        let numbers = [rows, heads, half].map(count);
        // SAFETY: `rotate_at(T*, const float* × 2, const u32*, u32 × 3)`; positions are within the room.
        unsafe { self.launch("rotate_at", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// Writes the keys and values of each sequence's new token, `[B, width]` each, into caches `[B, room, width]`.
    ///
    /// # Panics
    /// Where an array is too short.
    pub fn append_at(&self, [k, v]: [&Array; 2], caches: [&Array; 2], batch: &DecodeBatch) {
        let (kind, rows) = (self.activation_kind(), batch.len());
        let widths = [k, v].map(|new| new.len() / rows.max(1));
        let [keys, values] = [0, 1].map(|at| caches[at].expect(kind, rows * batch.room * widths[at]));
        let pointers = [k.expect(kind, 0), v.expect(kind, 0), keys, values, batch.positions.ptr()];
        let grid = [self.blocks(rows * (widths[0] + widths[1])), 1];
        let numbers = [rows, batch.room, widths[0], widths[1]].map(count);
        // SAFETY: `append_at(const T* × 2, T* × 2, const u32*, u32 × 4)`; positions are within the room.
        unsafe { self.launch("append_at", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// Takes the likeliest token of each sequence, by logits `[B, V]`, as the one that it reads next, one position
    /// further; [`NO_TOKEN`] where a logit is not finite.
    ///
    /// # Panics
    /// Where an array is too short.
    pub fn next_token(&self, logits: &Array, batch: &DecodeBatch) {
        let classes = logits.len() / batch.len().max(1);
        let DecodeBatch { ids, positions, places, lengths, room } = batch;
        let logits = logits.expect(self.activation_kind(), batch.len() * classes);
        let pointers = [logits, ids.ptr(), positions.ptr(), places.ptr(), lengths.ptr()];
        let arguments = [&pointers.map(Ptr)[..], &[count(classes), count(*room)]].concat();
        // SAFETY: `next_token(const T*, u32*, u32*, i64*, i32*, int, u32)`.
        unsafe { self.launch("next_token", [batch.len(), 1], &arguments) };
    }

    /// `y = x · Wᵀ + bias` for at most eight rows; `false`, and nothing is done, where there are more, or where rows do
    /// not begin at 16 bytes. The bits of a row do not depend on the others.
    pub(super) fn few_rows(
        &self,
        y: &Array,
        x: &Array,
        w: &Array,
        bias: Option<&Array>,
        [rows, outputs, inner]: [usize; 3],
    ) -> bool {
        let kind = self.activation_kind();
        let aligned = |array: &Array| array.ptr().is_multiple_of(16);
        let of_kind = [y, x, w].iter().all(|array| array.kind() == kind);
        if rows > FEW_ROWS || !inner.is_multiple_of(8) || !of_kind || !aligned(x) || !aligned(w) {
            return false;
        }
        let name = match rows {
            0..=1 => "few_rows_1",
            2 => "few_rows_2",
            3..=4 => "few_rows_4",
            _ => "few_rows_8",
        };
        let pointers = [
            x.expect(kind, rows * inner),
            w.expect(kind, outputs * inner),
            bias.map_or(0, |bias| bias.expect(kind, outputs)),
            y.expect(kind, rows * outputs),
        ];
        let grid = [if rows == 0 { 0 } else { outputs.div_ceil(8) }, 1];
        let arguments = [&pointers.map(Ptr)[..], &[rows, inner, outputs].map(count)].concat();
        // SAFETY: `few_rows_N(const T* × 3, T*, u32, int, int)` with a warp of eight for each output.
        unsafe { self.launch(name, grid, &arguments) };
        true
    }
}
