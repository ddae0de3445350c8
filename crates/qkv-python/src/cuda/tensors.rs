//! Conversion of borrowed tensors to the CUDA engine's form: addresses with shapes and strides.

use crate::borrowed::Borrowed;
use crate::dtype::Dtype;
use crate::errors::{kind, refused, refused_on_cuda, value};
use crate::inputs::Tensors;
use pyo3::prelude::*;
use qkv_cuda::{Cuda, Error, Strided, Vector};

/// The engine's equivalent of a type.
pub fn dtype_of(of: &Borrowed) -> PyResult<qkv_cuda::Dtype> {
    match of.dtype() {
        Dtype::F32 => Ok(qkv_cuda::Dtype::F32),
        Dtype::Bf16 => Ok(qkv_cuda::Dtype::Bf16),
        Dtype::F16 => Ok(qkv_cuda::Dtype::F16),
        Dtype::F64 => Err(refused_on_cuda(Error::CpuOnly {
            what: "the type `float64`".into(),
            instead: "move the tensors there, or convert them to float32",
        })),
        other => {
            let (name, other) = (of.name(), other.name());
            Err(kind(format!("`{name}` has the type {other}, expected float32, bfloat16 or float16")))
        }
    }
}

fn expect(of: &Borrowed, expected: Dtype, like: &str) -> PyResult<()> {
    if of.dtype() == expected {
        return Ok(());
    }
    let (name, found, expected) = (of.name(), of.dtype().name(), expected.name());
    Err(kind(format!("`{name}` has the type {found}, expected {expected}{like}")))
}

fn four_axes(of: &Borrowed) -> PyResult<Strided> {
    let (shape, strides) = of.four()?;
    Ok(Strided { ptr: of.address(), shape, strides: strides.map(|stride| stride as i64) })
}

/// A tensor with the type of `q`.
pub fn strided(of: &Borrowed, q: &Borrowed) -> PyResult<Strided> {
    expect(of, q.dtype(), ", as `q` has")?;
    four_axes(of)
}

/// A contiguous vector.
pub fn vector(of: &Borrowed, dtype: Dtype, like: &str) -> PyResult<Vector> {
    expect(of, dtype, like)?;
    if !of.is_contiguous() {
        return Err(value(format!("`{}` has to be contiguous", of.name())));
    }
    Ok(Vector::new(of.address(), of.shape().iter().product()))
}

/// A contiguous vector with the type of `q`.
pub fn typed_vector(of: &Borrowed, q: &Borrowed) -> PyResult<Vector> {
    vector(of, q.dtype(), ", as `q` has")
}

/// A contiguous vector of f32.
pub fn float_vector(of: &Borrowed) -> PyResult<Vector> {
    vector(of, Dtype::F32, "")
}

/// The inputs of a call. Inputs that only the CPU supports are rejected: if the description needs them, the error is
/// that of the description.
pub fn given(attention: &qkv::Attention, tensors: &Tensors) -> PyResult<qkv_cuda::Tensors> {
    Cuda::supports(attention).map_err(refused_on_cuda)?;
    let (q, more) = (&tensors.q, &tensors.optional);
    dtype_of(q)?;
    let of_the_cpu = [&more.w, &more.w_q, &more.w_k, &more.v_score, &more.center];
    if let Some(found) = of_the_cpu.into_iter().flatten().next() {
        let reason = "the description does not ask for it";
        return Err(refused(qkv::Error::Unused { tensor: found.name(), reason }));
    }
    let tensor = |of: &Option<Borrowed>| of.as_ref().map(|of| strided(of, q)).transpose();
    let numbers = |of: &Option<Borrowed>| of.as_ref().map(|of| typed_vector(of, q)).transpose();
    let integers = |of: &Option<Borrowed>, dtype| of.as_ref().map(|of| vector(of, dtype, "")).transpose();
    let both = |name: &str, queries: &Option<Borrowed>, keys: &Option<Borrowed>| match (
        integers(queries, Dtype::I32)?,
        integers(keys, Dtype::I32)?,
    ) {
        (Some(queries), Some(keys)) => Ok(Some((queries, keys))),
        (None, None) => Ok(None),
        _ => Err(value(format!("`{name}` needs both, of queries and of keys"))),
    };
    let mut found = qkv_cuda::Tensors::new(strided(q, q)?, strided(&tensors.k, q)?, strided(&tensors.v, q)?);
    found.bias = tensor(&more.bias)?;
    found.table = tensor(&more.table)?;
    found.scale = numbers(&more.scale)?;
    found.sinks = numbers(&more.sinks)?;
    found.lengths = integers(&more.lengths, Dtype::I32)?;
    found.segments = both("segments", &more.segments_q, &more.segments_k)?;
    found.bits = more.bits.as_ref().map(bits).transpose()?;
    found.positions = integers(&more.positions, Dtype::I64)?;
    found.buckets = both("buckets", &more.buckets_q, &more.buckets_k)?;
    found.seed = tensors.seed;
    Ok(found)
}

fn bits(of: &Borrowed) -> PyResult<Strided> {
    match of.dtype() {
        Dtype::Bool | Dtype::U8 => four_axes(of),
        other => Err(kind(format!("`{}` has the type {}, expected bool or uint8", of.name(), other.name()))),
    }
}
