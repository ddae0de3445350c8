//! Attention within sequences of several lengths that lie one behind the other, `[1, T, H·D]`: nothing is filled up, so no
//! layer computes rows that count for nothing. For inference.

use super::attention::{Attend, put_side_by_side};
use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv::View;

impl<T: Float> Tape<'_, T> {
    /// Self-attention within each of the sequences, whose lengths add up to the rows: from `q [1, T, Hq·D]`, `k [1, T, Hk·D]` and
    /// `v [1, T, Hk·Dv]`, a tensor `[1, T, Hq·Dv]`. Neighbours of one length are computed together: put them beside each other.
    ///
    /// # Errors
    /// What `qkv` refuses.
    ///
    /// # Panics
    /// On a tape that remembers the way back, and where the lengths do not add up to the rows.
    pub fn attend_packed(
        &mut self,
        [q, k, v]: [&Var<T>; 3],
        sequences: &[usize],
        how: &Attend<'_>,
    ) -> qkv::Result<Var<T>> {
        assert!(!self.is_training(), "sequences that lie one behind the other are for inference");
        let rows = q.value.rows();
        assert_eq!(sequences.iter().sum::<usize>(), rows, "the lengths add up to the rows");
        let mut call = self.call(q, &k.value, &v.value, None, &Attend { lengths: None, ..*how });
        let width = v.value.width() / how.heads.key * how.heads.query;
        let mut out = Tensor::unwritten(self.pool, &[1, rows, width]); // (1, T, Hq·Dv)
        let (mut from, hash) = (0, call.attention.mask.hash());
        for alike in sequences.chunk_by(|a, b| a == b) {
            let (count, length) = (alike.len(), alike[0]);
            let place = [from, count, length];
            let views = [(q, how.heads.query), (k, how.heads.key), (v, how.heads.key)]
                .map(|(var, heads)| part(var, heads, place));
            call.buckets = match &hash {
                Some(lsh) => Some([lsh.hash(views[0])?, lsh.hash(views[1])?]),
                None => None,
            };
            let found = call.attention.forward(call.inputs_over(self.parameters, views))?; // (B, Hq, L, Dv)
            let to = &mut out.data_mut()[from * width..][..count * length * width];
            put_side_by_side(self.machine, to, &found.values);
            from += count * length;
        }
        Ok(self.constant(out))
    }
}

/// `count` sequences of one length from row `from` on, as `[B, H, L, D]`.
fn part<T: Float>(var: &Var<T>, heads: usize, [from, count, length]: [usize; 3]) -> View<'_, T> {
    let width = var.value.width();
    let (d, strides) = (width / heads, [length * width, width / heads, width, 1].map(|stride| stride as isize));
    View::strided(var.value.data(), from * width, [count, heads, length, d], strides).expect("a tensor holds its rows")
}
