//! The tensors of a call: conversion from Python objects to the library's [`Inputs`].

use crate::borrowed::{Borrowed, Memory, lengths_of, pair};
use crate::dtype::Typed;
use crate::errors::{kind, value};
use crate::pool::Accumulator;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use qkv::{Element, Inputs, Tensor};

/// An element type that is exchanged with Python, as is its accumulator type.
pub trait Float: Element + qkv_simd::Element<Acc: Typed + Accumulator> + Typed {}
impl Float for f32 {}
impl Float for f64 {}
impl Float for bf16 {}
impl Float for f16 {}

macro_rules! optional_tensors {
    ($($name:ident)*) => {
        /// The optional tensors of a call.
        #[derive(Default)]
        pub struct Optional {
            $(pub $name: Option<Borrowed>,)*
        }

        impl Optional {
            /// Their names, in the order in which `ops` receives them.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Borrows the tensor called `name`; `false` if there is no optional tensor of that name.
            pub fn set(&mut self, name: &str, object: &Bound<'_, PyAny>, memory: Memory) -> PyResult<bool> {
                match name {
                    $(stringify!($name) => self.$name = Some(Borrowed::new_in(stringify!($name), object, memory)?),)*
                    _ => return Ok(false),
                }
                Ok(true)
            }

            /// The tensors that were given.
            pub fn given(&self) -> impl Iterator<Item = &Borrowed> {
                [$(&self.$name),*].into_iter().flatten()
            }
        }
    };
}
optional_tensors! {
    w w_q w_k v_score scale bias table sinks center
    lengths segments_q segments_k bits positions buckets_q buckets_k
}

/// The tensors of a call.
pub struct Tensors {
    pub q: Borrowed,
    pub k: Borrowed,
    pub v: Borrowed,
    pub optional: Optional,
    pub seed: Option<u64>,
}

impl Tensors {
    /// Borrows positional arguments and keywords; `of` first checks each object, and may replace it.
    pub fn new<'py>(
        [q, k, v]: [&Bound<'py, PyAny>; 3],
        inputs: Option<&Bound<'py, PyDict>>,
        memory: Memory,
        of: impl Fn(&str, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Tensors> {
        let borrow =
            |name: &'static str, object: &Bound<'py, PyAny>| Borrowed::new_in(name, &of(name, object)?, memory);
        let (q, k, v) = (borrow("q", q)?, borrow("k", k)?, borrow("v", v)?);
        let (mut optional, mut seed) = (Optional::default(), None);
        for (name, object) in inputs.into_iter().flat_map(|inputs| inputs.iter()) {
            let name: String = name.extract()?;
            if object.is_none() {
                continue;
            }
            if name == "seed" {
                seed = Some(object.extract()?);
            } else if name == "segments" || name == "buckets" {
                let (queries, keys) = pair(&name, &object)?;
                for (name, object) in [(format!("{name}_q"), queries), (format!("{name}_k"), keys)] {
                    optional.set(&name, &of(&name, &object)?, memory)?;
                }
            } else if name.contains("segments_")
                || name.contains("buckets_")
                || !optional.set(&name, &of(&name, &object)?, memory)?
            {
                return Err(kind(format!("unexpected keyword argument '{name}'")));
            }
        }
        Ok(Tensors { q, k, v, optional, seed })
    }

    /// All tensors that were given.
    pub fn all(&self) -> impl Iterator<Item = &Borrowed> {
        [&self.q, &self.k, &self.v].into_iter().chain(self.optional.given())
    }

    /// Multiply-adds of the forward pass, ignoring the mask.
    pub fn work(&self) -> usize {
        let length = |of: &Borrowed| of.shape().iter().rev().nth(1).copied().unwrap_or(1);
        let size = |of: &Borrowed| of.shape().iter().fold(1usize, |size, &axis| size.saturating_mul(axis));
        let weighted = size(&self.v).saturating_mul(length(&self.q));
        size(&self.q).saturating_mul(length(&self.k)).saturating_add(weighted)
    }
}

/// Copies of the inputs that the library takes as slices; all of them are small compared to q, k and v.
pub struct Vectors<T: Float> {
    v_score: Option<Vec<T>>,
    scale: Option<Vec<T>>,
    sinks: Option<Vec<T>>,
    center: Option<Vec<T>>,
    lengths: Option<Vec<usize>>,
    segments: Option<(Vec<i32>, Vec<i32>)>,
    positions: Option<Vec<i64>>,
    buckets: Option<(Tensor<i32, 4>, Tensor<i32, 4>)>,
}

impl<T: Float> Vectors<T> {
    pub fn new(tensors: &Tensors) -> PyResult<Self> {
        let given = &tensors.optional;
        let vector = |of: &Option<Borrowed>| of.as_ref().map(|of| of.to_vec::<T>()).transpose();
        Ok(Vectors {
            v_score: vector(&given.v_score)?,
            scale: vector(&given.scale)?,
            sinks: vector(&given.sinks)?,
            center: vector(&given.center)?,
            lengths: given.lengths.as_ref().map(lengths_of).transpose()?,
            segments: match (&given.segments_q, &given.segments_k) {
                (Some(queries), Some(keys)) => Some((queries.integers_i32()?, keys.integers_i32()?)),
                (None, None) => None,
                _ => return Err(value("`segments` needs both, of queries and of keys")),
            },
            positions: given.positions.as_ref().map(Borrowed::integers).transpose()?,
            buckets: match (&given.buckets_q, &given.buckets_k) {
                (Some(queries), Some(keys)) => Some((queries.tensor_i32()?, keys.tensor_i32()?)),
                (None, None) => None,
                _ => return Err(value("`buckets` needs both, of queries and of keys")),
            },
        })
    }

    /// The library's inputs over borrowed memory.
    pub fn inputs<'a>(&'a self, tensors: &'a Tensors) -> PyResult<Inputs<'a, T>> {
        let given = &tensors.optional;
        let view = |of: &'a Option<Borrowed>| of.as_ref().map(Borrowed::view::<T>).transpose();
        let mut inputs = Inputs::new(tensors.q.view::<T>()?, tensors.k.view::<T>()?, tensors.v.view::<T>()?);
        inputs.w = view(&given.w)?;
        inputs.w_q = view(&given.w_q)?;
        inputs.w_k = view(&given.w_k)?;
        inputs.bias = view(&given.bias)?;
        inputs.table = view(&given.table)?;
        inputs.v_score = self.v_score.as_deref();
        inputs.scale = self.scale.as_deref();
        inputs.sinks = self.sinks.as_deref();
        inputs.center = self.center.as_deref();
        inputs.lengths = self.lengths.as_deref();
        inputs.segments = self.segments.as_ref().map(|(queries, keys)| (&queries[..], &keys[..]));
        inputs.bits = given.bits.as_ref().map(Borrowed::bits).transpose()?;
        inputs.positions = self.positions.as_deref();
        inputs.buckets = self.buckets.as_ref().map(|(queries, keys)| (queries.into(), keys.into()));
        inputs.seed = tensors.seed;
        Ok(inputs)
    }
}
