//! Attention to a cache in f16: queries are rounded to f16 too, sums are accumulated in f32.

use super::{SavedCall, ScoreParameters, Tape, Tensor, head_strides};
use crate::float::Float;
use crate::layers::half_rows::{HalfRows, halved};
use half::f16;
use half::slice::HalfFloatSliceExt;
use qkv::{Decode, Inputs, OutputMut, Score, Select, View, ViewMut};

impl<T: Float> Tape<'_, T> {
    /// Attention from new queries to the first `length` rows of a cache; `None` if the call needs more than a softmax
    /// over products of queries and keys, or a query is too large.
    pub(super) fn attend_half(
        &self,
        call: &SavedCall<T>,
        cache: &HalfRows,
        length: usize,
    ) -> qkv::Result<Option<Tensor<T>>> {
        let ScoreParameters { w, v, scale, table, sinks } = call.parameters;
        let products = matches!(call.attention.score, Score::Dot | Score::ScaledDot);
        let plain = products && call.attention.select == Select::Soft && call.attention.mask.lsh_buckets().is_none();
        let has_more = [w, v, scale, table, sinks].iter().any(Option::is_some) || call.center.is_some();
        if !plain || has_more || call.segments.is_some() {
            return Ok(None);
        }
        let Some(q) = halved(&T::to_floats(call.q.data())) else { return Ok(None) };
        let (&[batch, new, width], heads) = (call.q.shape(), call.heads.query) else {
            panic!("attention takes [B, L, H·D], not {:?}", call.q.shape())
        };
        let (k, v) = (cache.view(0, length)?, cache.view(1, length)?);
        let (d, dv) = (width / heads.max(1), v.shape()[3]);
        let q = View::strided(&q, 0, [batch, heads, new, d], head_strides(new, heads, d))?;
        let mut inputs = Inputs::new(q, k, v);
        if let Some(lengths) = &call.key_lengths {
            inputs = inputs.lengths(lengths);
        }
        if let Some(positions) = &call.positions {
            inputs = inputs.positions(positions);
        }
        let (mut values, mut lse) = (vec![f16::ZERO; batch * new * heads * dv], vec![0.0; batch * heads * new]);
        let into = ViewMut::strided(&mut values, 0, [batch, heads, new, dv], head_strides(new, heads, dv))?;
        let into = OutputMut::new(into, ViewMut::new(&mut lse, [batch, heads, new, 1])?);
        let threads = self.machine.threads();
        let bytes = [k.shape(), v.shape()].map(|shape| shape.iter().product::<usize>() * size_of::<f16>());
        let decode = || call.attention.decode_into(inputs, into, Decode::Fast, &cache.scratch, threads);
        self.run_decode(bytes[0] + bytes[1], decode)?;
        Ok(Some(Tensor::new(T::from_floats(values.to_f32_vec()), &[batch, new, heads * dv])))
    }
}
