//! The tensors of a call in device memory: what goes in, what comes out, what comes back from above. They are the
//! counterparts of the library's `Inputs`, `Output`, `Upstream` and `Gradients`, and are checked by the library itself.

use crate::error::{Error, Result};
use crate::memory::Strided;
use qkv::engine::Problem;
use qkv::{Attention, Inputs, Place, View};

/// Numbers one after the other in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// The address of the first.
    pub at: u64,
    /// How many.
    pub len: usize,
}

impl Vector {
    /// So many from there on.
    pub fn new(at: u64, len: usize) -> Vector {
        Vector { at, len }
    }
}

/// What goes in. Letters as everywhere: `B` sequences, `Hq` query and `Hk` key heads, `N` queries, `M` keys.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Tensors {
    /// Queries, `[B, Hq, N, D]`.
    pub q: Strided,
    /// Keys, `[B, Hk, M, D]`.
    pub k: Strided,
    /// Values, `[B, Hk, M, Dv]`.
    pub v: Strided,
    /// The bias tensor: each axis of `[B, Hq, N, M]` as it is, or 1.
    pub bias: Option<Strided>,
    /// The relative table, `[1, 1, 1 or Hq, 2·reach + 1]`.
    pub table: Option<Strided>,
    /// The learned scale, 1 or `Hq`.
    pub scale: Option<Vector>,
    /// The sink logits, `Hq`.
    pub sinks: Option<Vector>,
    /// How many keys each sequence has, `B` numbers of type i32.
    pub lengths: Option<Vector>,
    /// The segment of each query, `B·N`, and of each key, `B·M`, of type i32.
    pub segments: Option<(Vector, Vector)>,
    /// The bits of a mask, of type u8: each axis of `[B, Hq, N, M]` as it is, or 1.
    pub bits: Option<Strided>,
    /// The place of each query among the keys, `B·N` of type i64.
    pub positions: Option<Vector>,
    /// The hash buckets of queries, `B·Hq·N·rounds`, and of keys, `B·Hk·M·rounds`, of type i32.
    pub buckets: Option<(Vector, Vector)>,
    /// The seed of dropout.
    pub seed: Option<u64>,
}

impl Tensors {
    /// Queries, keys and values alone.
    pub fn new(q: Strided, k: Strided, v: Strided) -> Tensors {
        Tensors {
            q,
            k,
            v,
            bias: None,
            table: None,
            scale: None,
            sinks: None,
            lengths: None,
            segments: None,
            bits: None,
            positions: None,
            buckets: None,
            seed: None,
        }
    }

    /// Holds them to the description: the library's own checks of shapes, on tensors of these shapes that hold nothing.
    pub(crate) fn check(&self, attention: &Attention, place: Place) -> Result<()> {
        let zero = [0.0f32];
        let nothing = |tensor: &Strided| hollow(&zero, tensor.shape);
        let numbers = |vector: Option<Vector>| vector.map(|vector| vec![0.0f32; vector.len]);
        let mut inputs = Inputs::new(nothing(&self.q)?, nothing(&self.k)?, nothing(&self.v)?);
        let (scale, sinks) = (numbers(self.scale), numbers(self.sinks));
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(nothing(bias)?);
        }
        if let Some(table) = &self.table {
            inputs = inputs.table(nothing(table)?);
        }
        if let Some(scale) = &scale {
            inputs = inputs.scale(scale);
        }
        if let Some(sinks) = &sinks {
            inputs = inputs.sinks(sinks);
        }
        let lengths = self.lengths.map(|lengths| vec![0; lengths.len]);
        if let Some(lengths) = &lengths {
            inputs = inputs.lengths(lengths);
        }
        let segments = self.segments.map(|(queries, keys)| (vec![0; queries.len], vec![0; keys.len]));
        if let Some((queries, keys)) = &segments {
            inputs = inputs.segments(queries, keys);
        }
        if let Some(bits) = &self.bits {
            inputs = inputs.bits(hollow(&[0u8], bits.shape)?);
        }
        let positions = self.positions.map(|positions| vec![0; positions.len]);
        if let Some(positions) = &positions {
            inputs = inputs.positions(positions);
        }
        let (rounds, [b, hq, n, _], [_, hk, m, _]) =
            (attention.mask.lsh_buckets().map_or(1, |lsh| lsh.rounds), self.q.shape, self.k.shape);
        if let Some((queries, keys)) = &self.buckets {
            let shapes = [[b, hq, n, rounds], [b, hk, m, rounds]];
            for (tensor, vector, shape) in
                [("buckets of queries", queries, shapes[0]), ("buckets of keys", keys, shapes[1])]
            {
                if vector.len != shape.iter().product::<usize>() {
                    return Err(
                        qkv::Error::Shape { tensor, found: vec![vector.len], expected: format!("{shape:?}") }.into()
                    );
                }
            }
            inputs = inputs.buckets(hollow(&[0], shapes[0])?, hollow(&[0], shapes[1])?);
        }
        inputs.seed = self.seed;
        Problem::placed(attention, inputs, place)?;
        Ok(())
    }
}

/// A view of any shape over one number.
fn hollow<T>(one: &[T; 1], shape: [usize; 4]) -> Result<View<'_, T>> {
    let view = View::strided(one, 0, shape, [0; 4]);
    view.map_err(|error| Error::Refused(error.into()))
}

/// What comes out of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// `[B, Hq, N, Dv]`.
    pub values: Strided,
    /// The log-sum-exp, f32 `[B, Hq, N]`.
    pub lse: Vector,
    /// The entropy of each row, f32 `[B, Hq, N]`, if the attention has it.
    pub entropy: Option<Vector>,
}

/// What comes back from above.
#[derive(Clone, Copy, Debug)]
pub struct Upstreams {
    /// `[B, Hq, N, Dv]`.
    pub values: Strided,
    /// Of the log-sum-exp, f32 `[B, Hq, N]`.
    pub lse: Option<Vector>,
    /// Of the entropy, f32 `[B, Hq, N]`.
    pub entropy: Option<Vector>,
}

/// Where gradients go. Those of q, k and v always; of the others, those that are given.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// `[B, Hq, N, D]`.
    pub q: Strided,
    /// `[B, Hk, M, D]`.
    pub k: Strided,
    /// `[B, Hk, M, Dv]`.
    pub v: Strided,
    /// In the shape of the bias tensor.
    pub bias: Option<Strided>,
    /// `[1 or Hq, 2·reach + 1]`, one row after the other.
    pub table: Option<Vector>,
    /// Of the learned scale.
    pub scale: Option<Vector>,
    /// Of the sinks.
    pub sinks: Option<Vector>,
}
