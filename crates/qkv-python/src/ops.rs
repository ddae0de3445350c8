//! The functions that operators of frameworks call: inputs and outputs are in the framework's memory, the description
//! is JSON, and all arguments are positional, because a call takes microseconds.

use crate::allocated::Allocated;
use crate::borrowed::{Borrowed, Memory, apart, exchange_of};
use crate::dlpack::Exchange;
use crate::dtype::Typed;
use crate::dtype::of_type;
use crate::errors::{kind, refused, value};
use crate::inputs::{Float, Optional, Tensors, Vectors};
use crate::parsed::parsed;
use crate::pool;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use qkv::{GradientsMut, OutputMut, OutputRef, Upstream, ViewMut};
use qkv_simd::Real;

/// The tensors of a call: q, k, v and the optional ones in the order of [`Optional::NAMES`], which may end early.
pub fn tensors_of(given: &Bound<'_, PyTuple>, seed: Option<u64>, memory: Memory) -> PyResult<Tensors> {
    let most = 3 + Optional::NAMES.len();
    if given.len() < 3 || given.len() > most {
        return Err(kind(format!("{} tensors were given, expected 3 to {most}", given.len())));
    }
    let borrow = |name, at| Borrowed::new_in(name, &*given.get_borrowed_item(at)?, memory);
    let (q, k, v) = (borrow("q", 0)?, borrow("k", 1)?, borrow("v", 2)?);
    let mut optional = Optional::default();
    for (at, name) in (3..given.len()).zip(Optional::NAMES) {
        let object = given.get_borrowed_item(at)?;
        if !object.is_none() {
            optional.set(name, &object, memory)?;
        }
    }
    Ok(Tensors { q, k, v, optional, seed })
}

fn borrowed(name: &'static str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Borrowed>> {
    object.map(|object| Borrowed::new(name, object)).transpose()
}

/// Computes a softmax attention into the caller's memory: `values [B, Hq, N, Dv]`, `lse` and `entropy` `[B, Hq, N, 1]`.
#[pyfunction]
#[pyo3(signature = (description, tensors, values, lse, entropy, seed, threads))]
#[expect(clippy::too_many_arguments, reason = "an operator's arguments, by position")]
pub fn forward_into(
    py: Python<'_>,
    description: &str,
    tensors: &Bound<'_, PyTuple>,
    values: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    entropy: Option<&Bound<'_, PyAny>>,
    seed: Option<u64>,
    threads: usize,
) -> PyResult<()> {
    let attention = parsed(description)?;
    let tensors = tensors_of(tensors, seed, Memory::Host)?;
    let (values, lse) = (Borrowed::new("out", values)?, Borrowed::new("lse", lse)?);
    let entropy = borrowed("entropy", entropy)?;
    let into = (values, lse, entropy);
    of_type!(tensors.q.dtype(), "q", T => forward_of::<T>(py, &attention, &tensors, into, threads))
}

fn forward_of<T: Float>(
    py: Python<'_>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    (mut values, mut lse, mut entropy): (Borrowed, Borrowed, Option<Borrowed>),
    threads: usize,
) -> PyResult<()> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work());
    let written: Vec<&Borrowed> = [&values, &lse].into_iter().chain(&entropy).collect();
    apart(&written, tensors.all())?;
    let mut into = OutputMut::new(values.view_mut::<T>()?, lse.view_mut::<T::Acc>()?);
    if let Some(entropy) = &mut entropy {
        into = into.entropy(entropy.view_mut::<T::Acc>()?);
    }
    let forward = |threads, scratch: &_| attention.forward_into(inputs, into, scratch, threads);
    py.detach(|| pool::run(threads, work, forward)).map_err(refused)
}

/// Computes a softmax attention into tensors that the framework of `q` allocates, if its type has DLPack's exchange
/// functions: `values [B, Hq, N, Dv]`, with the heads side by side in memory, and `lse [B, Hq, N]`.
#[pyfunction]
#[pyo3(signature = (description, tensors, seed, threads))]
pub fn forward_new<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    seed: Option<u64>,
    threads: usize,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let attention = parsed(description)?;
    let (given, exchange) = (tensors_of(tensors, seed, Memory::Host)?, exchange_of_first(tensors)?);
    of_type!(given.q.dtype(), "q", T => forward_new_of::<T>(py, &attention, &given, exchange, threads))
}

/// [`forward_new`] that returns only the values.
#[pyfunction]
#[pyo3(signature = (description, tensors, seed, threads))]
pub fn values_new<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    seed: Option<u64>,
    threads: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let attention = parsed(description)?;
    let (given, exchange) = (tensors_of(tensors, seed, Memory::Host)?, exchange_of_first(tensors)?);
    of_type!(given.q.dtype(), "q", T => values_new_of::<T>(py, &attention, &given, exchange, threads))
}

fn exchange_of_first(tensors: &Bound<'_, PyTuple>) -> PyResult<&'static Exchange> {
    let exchange = exchange_of(&tensors.get_borrowed_item(0)?.get_type())?;
    exchange.ok_or_else(|| kind("the type of `q` has no DLPack exchange functions"))
}

fn values_new_of<'py, T: Float>(
    py: Python<'py>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    exchange: &'static Exchange,
    threads: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work());
    let ([b, h, n, _], [.., dv]) = (inputs.q.shape(), inputs.v.shape());
    let mut values = Allocated::new(exchange, T::DTYPE, [b, h, n, dv], [0, 2, 1, 3])?;
    let rows = b.saturating_mul(h).saturating_mul(n);
    let mut lse = Vec::new();
    lse.try_reserve_exact(rows).map_err(|error| PyMemoryError::new_err(error.to_string()))?;
    lse.resize(rows, T::Acc::ZERO);
    let lse = ViewMut::new(&mut lse, [b, h, n, 1]).map_err(|error| value(error.to_string()))?;
    let into = OutputMut::new(values.view_mut::<T>()?, lse);
    let forward = |threads, scratch: &_| attention.forward_into(inputs, into, scratch, threads);
    py.detach(|| pool::run(threads, work, forward)).map_err(refused)?;
    values.into_object(py, 4)
}

fn forward_new_of<'py, T: Float>(
    py: Python<'py>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    exchange: &'static Exchange,
    threads: usize,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work());
    let ([b, h, n, _], [.., dv]) = (inputs.q.shape(), inputs.v.shape());
    let mut values = Allocated::new(exchange, T::DTYPE, [b, h, n, dv], [0, 2, 1, 3])?;
    let mut lse = Allocated::new(exchange, <T::Acc as Typed>::DTYPE, [b, h, n, 1], [0, 1, 2, 3])?;
    let into = OutputMut::new(values.view_mut::<T>()?, lse.view_mut::<T::Acc>()?);
    let forward = |threads, scratch: &_| attention.forward_into(inputs, into, scratch, threads);
    py.detach(|| pool::run(threads, work, forward)).map_err(refused)?;
    Ok((values.into_object(py, 4)?, lse.into_object(py, 3)?))
}

/// Computes the gradients of a softmax attention into the caller's memory. `gradients` has those of q, k and v and, in
/// the order of the tensors, of the optional inputs that have a gradient, or `None` for one that is not needed. `saved`
/// is (values, lse, entropy or None), `upstream` (d_out, d_lse or None, d_entropy or None).
#[pyfunction]
#[pyo3(signature = (description, tensors, saved, upstream, gradients, seed, threads))]
#[expect(clippy::too_many_arguments, reason = "an operator's arguments, by position")]
pub fn backward_into<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    saved: [Option<Bound<'py, PyAny>>; 3],
    upstream: [Option<Bound<'py, PyAny>>; 3],
    gradients: &Bound<'py, PyTuple>,
    seed: Option<u64>,
    threads: usize,
) -> PyResult<()> {
    let attention = parsed(description)?;
    let tensors = tensors_of(tensors, seed, Memory::Host)?;
    let three = |names: [&'static str; 3], given: &[Option<Bound<'py, PyAny>>; 3]| {
        let one = |at: usize| borrowed(names[at], given[at].as_ref());
        PyResult::Ok([one(0)?, one(1)?, one(2)?])
    };
    let saved = three(["out", "lse", "entropy"], &saved)?;
    let upstream = three(["d_out", "d_lse", "d_entropy"], &upstream)?;
    if gradients.len() != GRADIENTS.len() {
        return Err(kind(format!("{} gradients were given, expected {}", gradients.len(), GRADIENTS.len())));
    }
    let mut into: [Option<Borrowed>; GRADIENTS.len()] = Default::default();
    for (at, to) in into.iter_mut().enumerate() {
        let object = gradients.get_borrowed_item(at)?;
        if !object.is_none() {
            *to = Some(Borrowed::new(GRADIENTS[at], &object)?);
        }
    }
    of_type!(tensors.q.dtype(), "q", T => backward_of::<T>(py, &attention, &tensors, (saved, upstream), into, threads))
}

/// The names of the gradients in order.
pub const GRADIENTS: [&str; 12] =
    ["d_q", "d_k", "d_v", "d_w", "d_w_q", "d_w_k", "d_v_score", "d_scale", "d_bias", "d_table", "d_sinks", "d_center"];

type Three = [Option<Borrowed>; 3];

fn backward_of<T: Float>(
    py: Python<'_>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    (saved, upstream): (Three, Three),
    mut into: [Option<Borrowed>; GRADIENTS.len()],
    threads: usize,
) -> PyResult<()> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work().saturating_mul(2));
    let written: Vec<&Borrowed> = into.iter().flatten().collect();
    apart(&written, tensors.all().chain(saved.iter().chain(&upstream).flatten()))?;
    let column = |of: &Option<Borrowed>| of.as_ref().map(Borrowed::to_vec::<T::Acc>).transpose();
    let missing = |name: &str| value(format!("`{name}` is missing"));
    let (lse, entropy) = (column(&saved[1])?.ok_or_else(|| missing("lse"))?, column(&saved[2])?);
    let values = saved[0].as_ref().ok_or_else(|| missing("out"))?;
    let mut out = OutputRef::new(values.view::<T>()?, &lse);
    if let Some(entropy) = &entropy {
        out = out.entropy(entropy);
    }
    let (d_lse, d_entropy) = (column(&upstream[1])?, column(&upstream[2])?);
    let d_out = upstream[0].as_ref().ok_or_else(|| missing("d_out"))?;
    let mut from = Upstream::new(d_out.view::<T>()?);
    from.lse = d_lse.as_deref();
    from.entropy = d_entropy.as_deref();
    from.for_bias = into[8].is_some();
    let [q, k, v, w, w_q, w_k, v_score, scale, bias, table, sinks, center] = &mut into;
    fn needed<'a, T: Float>(name: &str, of: &'a mut Option<Borrowed>) -> PyResult<qkv::ViewMut<'a, T>> {
        of.as_mut().ok_or_else(|| value(format!("`{name}` is missing")))?.view_mut::<T>()
    }
    fn wanted<T: Float>(of: &mut Option<Borrowed>) -> PyResult<Option<qkv::ViewMut<'_, T>>> {
        of.as_mut().map(Borrowed::view_mut::<T>).transpose()
    }
    let (q, k, v) = (needed::<T>("d_q", q)?, needed::<T>("d_k", k)?, needed::<T>("d_v", v)?);
    let mut gradients = GradientsMut::new(q, k, v);
    gradients.w = wanted(w)?;
    gradients.w_q = wanted(w_q)?;
    gradients.w_k = wanted(w_k)?;
    gradients.bias = wanted(bias)?;
    gradients.table = wanted(table)?;
    // Vectors are computed into temporary memory and copied, because they are small and may have any strides.
    let zeros = |of: &Option<Borrowed>| of.as_ref().map(|of| vec![T::default(); of.shape().iter().product()]);
    let mut columns = [zeros(v_score), zeros(scale), zeros(sinks), zeros(center)];
    let [d_v_score, d_scale, d_sinks, d_center] = &mut columns;
    gradients.v_score = d_v_score.as_deref_mut();
    gradients.scale = d_scale.as_deref_mut();
    gradients.sinks = d_sinks.as_deref_mut();
    gradients.center = d_center.as_deref_mut();
    let backward = |threads, scratch: &_| attention.backward_into(inputs, out, from, gradients, scratch, threads);
    py.detach(|| pool::run(threads, work, backward)).map_err(refused)?;
    for (to, from) in [v_score, scale, sinks, center].into_iter().zip(&columns) {
        if let (Some(to), Some(from)) = (to, from) {
            to.fill_from::<T>(from)?;
        }
    }
    Ok(())
}
