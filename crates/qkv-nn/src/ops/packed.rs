//! Attention within packed sequences, `[1, T, H·D]`: sequences of different lengths concatenated without padding, so
//! that no layer computes rows that nobody reads. For inference.

use super::attention::{AttendOptions, Pass};
use crate::float::Float;
use crate::heads::head_strides;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use qkv::View;

impl<T: Float> Tape<'_, T> {
    /// Self-attention within each packed sequence: from `q [1, T, Hq·D]`, `k [1, T, Hk·D]` and `v [1, T, Hk·Dv]`, a
    /// tensor `[1, T, Hq·Dv]`. Neighbors of equal length are computed together, so sort sequences by length.
    ///
    /// # Errors
    /// As [`attend`](Tape::attend).
    ///
    /// # Panics
    /// On a training tape, or if the lengths do not add up to the number of rows.
    pub fn attend_packed(
        &mut self,
        [q, k, v]: [&Var<T>; 3],
        lengths: &[usize],
        options: &AttendOptions<'_>,
    ) -> qkv::Result<Var<T>> {
        assert!(!self.is_training(), "packed sequences are for inference");
        let rows = q.value.rows();
        assert_eq!(lengths.iter().sum::<usize>(), rows, "the lengths add up to the rows");
        let mut call = self.save_call(q, &k.value, &v.value, None, &AttendOptions { key_lengths: None, ..*options });
        if let Some(operations) = self.machine.cuda()
            && call.attention.mask.lsh_buckets().is_none()
            && let Some(out) = self.attend_packed_on_device(operations, &call, lengths)?
        {
            return Ok(self.constant(out));
        }
        let width = v.value.width() / options.heads.key * options.heads.query;
        let mut out = Tensor::unwritten(self.pool, &[1, rows, width]); // (1, T, Hq·Dv)
        let (mut first, lsh) = (0, call.attention.mask.lsh_buckets());
        for equal in lengths.chunk_by(|a, b| a == b) {
            let (count, length) = (equal.len(), equal[0]);
            let views = [(q, options.heads.query), (k, options.heads.key), (v, options.heads.key)]
                .map(|(var, heads)| group(var, heads, [first, count, length])); // (B, H, L, D)
            call.buckets = match &lsh {
                Some(lsh) => Some([lsh.hash(views[0])?, lsh.hash(views[1])?]),
                None => None,
            };
            let to = &mut out.data_mut()[first * width..][..count * length * width];
            self.attend_into(&call.attention, call.inputs_over(self.parameters, views), Pass::Forward, to)?;
            first += count * length;
        }
        Ok(self.constant(out))
    }
}

/// A view of `count` sequences of equal length, starting at row `first`, as `[B, H, L, D]`.
fn group<T: Float>(var: &Var<T>, heads: usize, [first, count, length]: [usize; 3]) -> View<'_, T> {
    let (width, d) = (var.value.width(), var.value.width() / heads);
    View::strided(var.value.data(), first * width, [count, heads, length, d], head_strides(length, heads, d))
        .expect("a tensor holds its rows")
}
