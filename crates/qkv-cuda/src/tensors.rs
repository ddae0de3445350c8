//! The tensors of a call in device memory: the counterparts of the `Inputs`, `Output`, `Upstream` and `Gradients` of
//! `qkv`, whose own checks are applied to their shapes.

use crate::error::{Error, Result};
use crate::memory::Strided;
use qkv::engine::Problem;
use qkv::{Attention, Inputs, Place, View};

/// Consecutive numbers in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// The address of the first.
    pub ptr: u64,
    /// How many there are.
    pub len: usize,
}

impl Vector {
    /// `len` numbers from `ptr` on.
    pub fn new(ptr: u64, len: usize) -> Vector {
        Vector { ptr, len }
    }
}

/// The inputs of a call. Letters: `B` sequences, `Hq` query and `Hk` key heads, `N` queries, `M` keys.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Tensors {
    /// Queries, `[B, Hq, N, D]`.
    pub q: Strided,
    /// Keys, `[B, Hk, M, D]`.
    pub k: Strided,
    /// Values, `[B, Hk, M, Dv]`.
    pub v: Strided,
    /// The bias tensor, each axis as in `[B, Hq, N, M]` or 1.
    pub bias: Option<Strided>,
    /// The relative table, `[1, 1, 1 or Hq, 2·reach + 1]`.
    pub table: Option<Strided>,
    /// The learned scale, `1` or `Hq` elements.
    pub scale: Option<Vector>,
    /// The sink logits, `Hq` elements.
    pub sinks: Option<Vector>,
    /// The number of keys of each sequence, `B` × i32.
    pub lengths: Option<Vector>,
    /// The segment of each query, `B·N` × i32, and of each key, `B·M` × i32.
    pub segments: Option<(Vector, Vector)>,
    /// The bits of a mask, u8, each axis as in `[B, Hq, N, M]` or 1.
    pub bits: Option<Strided>,
    /// The position of each query among the keys, `B·N` × i64.
    pub positions: Option<Vector>,
    /// The hash buckets of queries, `B·Hq·N·rounds` × i32, and of keys, `B·Hk·M·rounds` × i32.
    pub buckets: Option<(Vector, Vector)>,
    /// The seed of dropout.
    pub seed: Option<u64>,
}

impl Tensors {
    /// Queries, keys and values.
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

    /// Applies the checks of `qkv` to these shapes, by views of one element with strides of 0.
    pub(crate) fn check(&self, attention: &Attention, place: Place) -> Result<()> {
        let zero = [0.0f32];
        let view = |tensor: &Strided| shaped(&zero, tensor.shape);
        let numbers = |vector: Option<Vector>| vector.map(|vector| vec![0.0f32; vector.len]);
        let mut inputs = Inputs::new(view(&self.q)?, view(&self.k)?, view(&self.v)?);
        let (scale, sinks) = (numbers(self.scale), numbers(self.sinks));
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(view(bias)?);
        }
        if let Some(table) = &self.table {
            inputs = inputs.table(view(table)?);
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
            inputs = inputs.bits(shaped(&[0u8], bits.shape)?);
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
            inputs = inputs.buckets(shaped(&[0], shapes[0])?, shaped(&[0], shapes[1])?);
        }
        inputs.seed = self.seed;
        Problem::placed(attention, inputs, place)?;
        Ok(())
    }

    /// The shape of every tensor, by name; empty if it is absent.
    pub(crate) fn shapes(&self) -> [(&'static str, Vec<usize>); 14] {
        let tensor = |tensor: Option<Strided>| tensor.map_or(Vec::new(), |tensor| tensor.shape.to_vec());
        let vector = |vector: Option<Vector>| vector.map_or(Vec::new(), |vector| vec![vector.len]);
        let (segments, buckets) = (self.segments.unzip(), self.buckets.unzip());
        [
            ("q", self.q.shape.to_vec()),
            ("k", self.k.shape.to_vec()),
            ("v", self.v.shape.to_vec()),
            ("bias", tensor(self.bias)),
            ("table", tensor(self.table)),
            ("bits", tensor(self.bits)),
            ("scale", vector(self.scale)),
            ("sinks", vector(self.sinks)),
            ("lengths", vector(self.lengths)),
            ("segments of queries", vector(segments.0)),
            ("segments of keys", vector(segments.1)),
            ("positions", vector(self.positions)),
            ("buckets of queries", vector(buckets.0)),
            ("buckets of keys", vector(buckets.1)),
        ]
    }
}

/// A view of any shape over one element.
fn shaped<T>(one: &[T; 1], shape: [usize; 4]) -> Result<View<'_, T>> {
    let view = View::strided(one, 0, shape, [0; 4]);
    view.map_err(|error| Error::Refused(error.into()))
}

/// Where the forward pass writes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Outputs {
    /// `[B, Hq, N, Dv]`.
    pub values: Strided,
    /// The log-sum-exp, f32 `[B, Hq, N]`.
    pub lse: Vector,
    /// The entropy of each row, f32 `[B, Hq, N]`, if the attention computes it.
    pub entropy: Option<Vector>,
}

impl Outputs {
    /// Values and log-sum-exp.
    pub fn new(values: Strided, lse: Vector) -> Outputs {
        Outputs { values, lse, entropy: None }
    }
}

/// Upstream gradients.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Upstreams {
    /// Of the values, `[B, Hq, N, Dv]`.
    pub values: Strided,
    /// Of the log-sum-exp, f32 `[B, Hq, N]`.
    pub lse: Option<Vector>,
    /// Of the entropy, f32 `[B, Hq, N]`.
    pub entropy: Option<Vector>,
}

impl Upstreams {
    /// Only the gradient of the values.
    pub fn new(values: Strided) -> Upstreams {
        Upstreams { values, lse: None, entropy: None }
    }
}

/// Where the backward pass writes: always q, k and v, and whichever of the others are present.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Gradients {
    /// `[B, Hq, N, D]`.
    pub q: Strided,
    /// `[B, Hk, M, D]`.
    pub k: Strided,
    /// `[B, Hk, M, Dv]`.
    pub v: Strided,
    /// In the shape of the bias tensor.
    pub bias: Option<Strided>,
    /// Row-major `[1 or Hq, 2·reach + 1]`.
    pub table: Option<Vector>,
    /// Of the learned scale.
    pub scale: Option<Vector>,
    /// Of the sinks.
    pub sinks: Option<Vector>,
}

impl Gradients {
    /// Gradients of queries, keys and values.
    pub fn new(q: Strided, k: Strided, v: Strided) -> Gradients {
        Gradients { q, k, v, bias: None, table: None, scale: None, sinks: None }
    }
}
