//! The calls of a description over device memory: `Attention.forward`, `decode`, `backward` and `weights`. Results are
//! arrays of the queries' library, on the queries' device.

use super::on::On;
use super::plans::{self, Call};
use super::tensors::{dtype_of, float_vector, given, strided, typed_vector};
use crate::array::Library;
use crate::borrowed::Borrowed;
use crate::description::to_json;
use crate::dtype::Dtype;
use crate::errors::{refused, refused_on_cuda, value};
use crate::inputs::Tensors;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use qkv::{Decode, Place, Pool};
use qkv_cuda::{Error, Outputs, Stream, Upstreams, Vector, Workspace};
use std::ops::Range;

type Object = Py<PyAny>;

/// The results of a forward pass: arrays, and the state that its backward pass needs.
pub struct Kept {
    /// `[B, Hq, N, Dv]`, with the rank of the queries.
    pub values: Object,
    /// f32 `[B, Hq, N]`.
    pub lse: Object,
    /// f32 `[B, Hq, N]`.
    pub entropy: Option<Object>,
    /// The place of the queries.
    pub place: Place,
    /// The seed of random draws.
    pub seed: Option<u64>,
}

/// Upstream gradients.
pub struct Upstream<'a, 'py> {
    pub d_out: &'a Bound<'py, PyAny>,
    pub d_lse: Option<&'a Bound<'py, PyAny>>,
    pub d_entropy: Option<&'a Bound<'py, PyAny>>,
    pub constant_bias: bool,
}

/// Gradients as arrays in the shapes of the inputs.
pub struct Found {
    pub q: Object,
    pub k: Object,
    pub v: Object,
    pub scale: Option<Object>,
    pub bias: Option<Object>,
    pub table: Option<Object>,
    pub sinks: Option<Object>,
}

/// A part of the weights: of one head of one sequence, or everything.
pub enum Part {
    /// Every weight, `[B, Hq, N, M]`.
    All,
    /// A rectangle of one head.
    Rectangle { at: [usize; 2], rows: Option<(usize, usize)>, cols: Option<(usize, usize)> },
    /// The same, pooled to `[height, width]` cells.
    Pooled { at: [usize; 2], rows: Option<(usize, usize)>, cols: Option<(usize, usize)>, size: [usize; 2], pool: Pool },
}

/// The inputs of a call, each in the form that the kernels accept.
fn tensors<'py>(on: &On<'py>, qkv: [&Bound<'py, PyAny>; 3], inputs: Option<&Bound<'py, PyDict>>) -> PyResult<Tensors> {
    Tensors::new(qkv, inputs, on.inputs(), |name, object| {
        Library::of(name, object)?;
        match name {
            "lengths" | "segments_q" | "segments_k" | "buckets_q" | "buckets_k" => {
                on.converted(object, Some(Dtype::I32))
            }
            "positions" => on.converted(object, Some(Dtype::I64)),
            "scale" | "sinks" => on.converted(object, None),
            _ => Ok(object.clone()),
        }
    })
}

/// The last `rank` of four axes.
fn axes(shape: [usize; 4], rank: usize) -> Vec<usize> {
    shape[4 - rank.min(4)..].to_vec()
}

fn workspace<'py>(on: &On<'py>, bytes: usize) -> PyResult<(Option<Bound<'py, PyAny>>, Workspace)> {
    if bytes == 0 {
        return Ok((None, Workspace::new(0, 0)));
    }
    let (object, memory) = on.empty("workspace", Dtype::U8, &[bytes])?;
    Ok((Some(object), Workspace::new(memory.address(), bytes)))
}

/// `Attention.forward`, and `Attention.decode` with `how`.
pub fn forward<'py>(
    on: &On<'py>,
    attention: &qkv::Attention,
    qkv: [&Bound<'py, PyAny>; 3],
    inputs: Option<&Bound<'py, PyDict>>,
    how: Option<Decode>,
) -> PyResult<Kept> {
    let (py, tensors) = (qkv[0].py(), tensors(on, qkv, inputs)?);
    let placed = match how {
        None => attention.clone(),
        Some(Decode::Fast) if tensors.optional.positions.is_some() => attention.clone().place(Place::Given),
        Some(Decode::Fast) => attention.clone().place(Place::End),
        Some(_) => {
            let instead = "leave `exact` out";
            return Err(refused_on_cuda(Error::CpuOnly {
                what: "decoding with the bits of a full pass".into(),
                instead,
            }));
        }
    };
    let given = given(&placed, &tensors)?;
    let (json, dtype) = (to_json(&placed), dtype_of(&tensors.q)?);
    let plan = plans::get(py, &Call::new(on, &json, dtype), &placed, &given)?;
    let ([b, h, n, _], rank) = (tensors.q.four()?.0, tensors.q.shape().len());
    let shape = axes([b, h, n, tensors.v.four()?.0[3]], rank);
    let rows = axes([1, b, h, n], rank.saturating_sub(1));
    let (values, to_values) = on.empty("out", tensors.q.dtype(), &shape)?;
    let (lse, to_lse) = on.empty("lse", Dtype::F32, &rows)?;
    let entropy = placed.entropy.then(|| on.empty("entropy", Dtype::F32, &rows)).transpose()?;
    let mut out = Outputs::new(strided(&to_values, &tensors.q)?, float_vector(&to_lse)?);
    out.entropy = entropy.as_ref().map(|(_, to)| float_vector(to)).transpose()?;
    let ((_kept, workspace), stream) = (workspace(on, plan.forward_workspace())?, Stream(on.stream));
    // SAFETY: the arrays are on this device, have the sizes they declare, and stay valid until work submitted to the
    // stream before they are freed is done; those of the results are new.
    py.detach(|| unsafe { plan.forward(&given, &out, workspace, stream) }).map_err(refused_on_cuda)?;
    Ok(Kept {
        values: on.finished(values)?.unbind(),
        lse: on.finished(lse)?.unbind(),
        entropy: entropy.map(|(array, _)| on.finished(array).map(Bound::unbind)).transpose()?,
        place: placed.place,
        seed: tensors.seed.filter(|_| placed.draws()),
    })
}

/// The output of a forward pass, borrowed: values, log-sum-exp, entropy.
fn saved(py: Python<'_>, on: &On<'_>, kept: &Kept) -> PyResult<(Borrowed, Borrowed, Option<Borrowed>)> {
    let borrow = |name, object: &Object| Borrowed::new_in(name, object.bind(py), on.inputs());
    let entropy = kept.entropy.as_ref().map(|entropy| borrow("entropy", entropy)).transpose()?;
    Ok((borrow("out", &kept.values)?, borrow("lse", &kept.lse)?, entropy))
}

/// `Attention.backward`.
pub fn backward<'py>(
    on: &On<'py>,
    attention: &qkv::Attention,
    qkv: [&Bound<'py, PyAny>; 3],
    inputs: Option<&Bound<'py, PyDict>>,
    kept: &Kept,
    upstream: &Upstream<'_, 'py>,
) -> PyResult<Found> {
    let (py, mut tensors) = (qkv[0].py(), tensors(on, qkv, inputs)?);
    tensors.seed = seed_of(kept, tensors.seed)?;
    let placed = attention.clone().place(kept.place);
    let (values, lse, entropy) = saved(py, on, kept)?;
    let d_out = Borrowed::new_in("d_out", upstream.d_out, on.inputs())?;
    let column = |name, of: Option<&Bound<'py, PyAny>>| {
        of.map(|of| Borrowed::new_in(name, &on.converted(of, None)?, on.inputs())).transpose()
    };
    let (d_lse, d_entropy) = (column("d_lse", upstream.d_lse)?, column("d_entropy", upstream.d_entropy)?);
    let mut out = Outputs::new(strided(&values, &tensors.q)?, float_vector(&lse)?);
    out.entropy = entropy.as_ref().map(float_vector).transpose()?;
    let mut from = Upstreams::new(strided(&d_out, &tensors.q)?);
    from.lse = d_lse.as_ref().map(float_vector).transpose()?;
    from.entropy = d_entropy.as_ref().map(float_vector).transpose()?;
    let given = given(&placed, &tensors)?;
    let (json, dtype) = (to_json(&placed), dtype_of(&tensors.q)?);
    let plan = plans::get(py, &Call { backward: true, ..Call::new(on, &json, dtype) }, &placed, &given)?;
    let (dtype, more) = (tensors.q.dtype(), &tensors.optional);
    let like = |name, of: &Borrowed| on.empty(name, dtype, of.shape());
    let optional = |name, of: &Option<Borrowed>| of.as_ref().map(|of| like(name, of)).transpose();
    let (d_q, d_k, d_v) = (like("d_q", &tensors.q)?, like("d_k", &tensors.k)?, like("d_v", &tensors.v)?);
    let d_bias = if upstream.constant_bias { None } else { optional("d_bias", &more.bias)? };
    let d_table = optional("d_table", &more.table)?;
    let (d_scale, d_sinks) = (optional("d_scale", &more.scale)?, optional("d_sinks", &more.sinks)?);
    let tensor = |(_, to): &(_, Borrowed)| strided(to, &tensors.q);
    let vector = |of: &Option<(_, Borrowed)>| of.as_ref().map(|(_, to)| typed_vector(to, &tensors.q)).transpose();
    let mut into = qkv_cuda::Gradients::new(tensor(&d_q)?, tensor(&d_k)?, tensor(&d_v)?);
    into.bias = d_bias.as_ref().map(tensor).transpose()?;
    (into.table, into.scale, into.sinks) = (vector(&d_table)?, vector(&d_scale)?, vector(&d_sinks)?);
    let ((_kept, workspace), stream) = (workspace(on, plan.backward_workspace())?, Stream(on.stream));
    // SAFETY: as in `forward`; `saved` holds what the forward pass wrote, or other numbers that the caller passed as
    // such.
    py.detach(|| unsafe { plan.backward(&given, &out, &from, &into, workspace, stream) }).map_err(refused_on_cuda)?;
    let finish = |(array, _): (Bound<'py, PyAny>, Borrowed)| on.finished(array).map(Bound::unbind);
    Ok(Found {
        q: finish(d_q)?,
        k: finish(d_k)?,
        v: finish(d_v)?,
        scale: d_scale.map(finish).transpose()?,
        bias: d_bias.map(finish).transpose()?,
        table: d_table.map(finish).transpose()?,
        sinks: d_sinks.map(finish).transpose()?,
    })
}

/// The seed of the forward pass, which a later call may repeat but not change.
pub fn seed_of(kept: &Kept, given: Option<u64>) -> PyResult<Option<u64>> {
    match (kept.seed, given) {
        (Some(forward), Some(seed)) if forward != seed => {
            Err(value(format!("`seed` is {seed}, expected {forward}, the seed of the forward pass")))
        }
        (forward, given) => Ok(forward.or(given)),
    }
}

/// A checked range within `0..all`, or all of it.
fn range(name: &'static str, of: &Option<(usize, usize)>, all: usize) -> PyResult<Range<usize>> {
    let (start, end) = of.unwrap_or((0, all));
    if start <= end && end <= all {
        return Ok(start..end);
    }
    let (found, expected) = (format!("{:?}", start..end), format!("within 0..{all}"));
    Err(refused(qkv::Error::Value { name, found, expected }))
}

/// A part of the weights of a call; `None` only checks that the arguments fit together.
pub fn weights<'py>(
    on: &On<'py>,
    attention: &qkv::Attention,
    qkv: [&Bound<'py, PyAny>; 3],
    inputs: Option<&Bound<'py, PyDict>>,
    kept: &Kept,
    part: Option<&Part>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (py, mut tensors) = (qkv[0].py(), tensors(on, qkv, inputs)?);
    tensors.seed = seed_of(kept, tensors.seed)?;
    let placed = attention.clone().place(kept.place);
    let (_, lse, _) = saved(py, on, kept)?;
    let (lse, given) = (float_vector(&lse)?, given(&placed, &tensors)?);
    let (json, dtype, stream) = (to_json(&placed), dtype_of(&tensors.q)?, Stream(on.stream));
    let plan = plans::get(py, &Call { weights: true, ..Call::new(on, &json, dtype) }, &placed, &given)?;
    let ([b, h, n, _], m) = (tensors.q.four()?.0, tensors.k.four()?.0[2]);
    let new = |shape: &[usize]| on.empty("weights", Dtype::F32, shape);
    let whole = |of: &Borrowed| Vector::new(of.address(), of.shape().iter().product());
    let array = match part {
        None => return Ok(None),
        Some(Part::All) => {
            let (array, to) = new(&[b, h, n, m])?;
            for at in 0..b * h {
                let into = Vector::new(to.address() + (at * n * m * 4) as u64, n * m);
                // SAFETY: as in `forward`; the part of this head is inside the array.
                py.detach(|| unsafe { plan.rectangle(&given, lse, [at / h, at % h], 0..n, 0..m, into, stream) })
                    .map_err(refused_on_cuda)?;
            }
            array
        }
        Some(Part::Rectangle { at, rows, cols }) => {
            let (rows, cols): (Range<usize>, Range<usize>) = (range("rows", rows, n)?, range("columns", cols, m)?);
            let (array, to) = new(&[rows.len(), cols.len()])?;
            // SAFETY: as in `forward`; `rectangle` checks the ranges against the plan.
            py.detach(|| unsafe { plan.rectangle(&given, lse, *at, rows, cols, whole(&to), stream) })
                .map_err(refused_on_cuda)?;
            array
        }
        Some(Part::Pooled { at, rows, cols, size, pool }) => {
            let (rows, cols) = (range("rows", rows, n)?, range("columns", cols, m)?);
            let (array, to) = new(size)?;
            let (_kept, space) = workspace(on, size[0].saturating_mul(cols.len()).saturating_mul(4))?;
            let into = whole(&to);
            // SAFETY: as for a rectangle.
            py.detach(|| unsafe { plan.pooled(&given, lse, *at, rows, cols, *size, *pool, into, space, stream) })
                .map_err(refused_on_cuda)?;
            array
        }
    };
    on.finished(array).map(Some)
}
