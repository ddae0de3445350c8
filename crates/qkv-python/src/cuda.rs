//! Operators over CUDA device memory: they run on the stream and in the memory of the calling framework, through plans
//! that are cached for calls with the same description and shapes ([`plans`]); and the calls of a description
//! ([`described`], [`on`]). NVIDIA's driver and compiler are located when the first call needs them.

mod described;
mod on;
mod plans;
mod tensors;

pub use described::{Found, Kept, Part, Upstream, backward, forward, weights};
pub use on::On;

use crate::borrowed::{Borrowed, Memory, apart};
use crate::errors::{kind, refused_on_cuda, value};
use crate::ops::{GRADIENTS, tensors_of};
use crate::parsed::parsed;
use plans::Call;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use qkv_cuda::{Gradients, Outputs, Stream, Upstreams, Workspace};
use tensors::{dtype_of, float_vector, given, strided, typed_vector};

/// The caller has submitted the work that fills its tensors to the stream of the call, so no synchronization is needed.
fn memory_of(device: i32) -> Memory {
    Memory::Cuda { device, stream: -1 }
}

/// Three tensors, of which the last two may be absent.
type Three<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

fn three(names: [&'static str; 3], of: &Three<'_>, memory: Memory) -> PyResult<(Borrowed, [Option<Borrowed>; 2])> {
    let optional = |name, object: &Option<Bound<'_, PyAny>>| {
        object.as_ref().map(|object| Borrowed::new_in(name, object, memory)).transpose()
    };
    Ok((Borrowed::new_in(names[0], &of.0, memory)?, [optional(names[1], &of.1)?, optional(names[2], &of.2)?]))
}

fn outputs(values: &Borrowed, [lse, entropy]: &[Option<Borrowed>; 2], q: &Borrowed) -> PyResult<Outputs> {
    let lse = lse.as_ref().ok_or_else(|| value("`lse` is missing"))?;
    let mut out = Outputs::new(strided(values, q)?, float_vector(lse)?);
    out.entropy = entropy.as_ref().map(float_vector).transpose()?;
    Ok(out)
}

/// The workspace of a pass, allocated by the framework: `allocate` is called with the number of bytes.
fn workspace<'py>(
    allocate: &Bound<'py, PyAny>,
    bytes: usize,
    memory: Memory,
) -> PyResult<(Option<Bound<'py, PyAny>>, Workspace)> {
    if bytes == 0 {
        return Ok((None, Workspace::new(0, 0)));
    }
    let object = allocate.call1((bytes,))?;
    let borrowed = Borrowed::new_in("workspace", &object, memory)?;
    let size = borrowed.shape().iter().product::<usize>() * borrowed.dtype().size();
    Ok((Some(object), Workspace::new(borrowed.address(), size)))
}

/// Submits the forward pass of a softmax attention to a stream of a device. `into` is (`values [B, Hq, N, Dv]`,
/// `lse [B, Hq, N]`, `entropy` or None); `allocate(bytes)` returns memory that may be reused once the work is done.
#[pyfunction]
#[pyo3(signature = (description, tensors, into, seed, device, stream, allocate))]
#[expect(clippy::too_many_arguments, reason = "an operator's arguments, by position")]
pub fn cuda_forward_into<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    into: Three<'py>,
    seed: Option<u64>,
    device: i32,
    stream: u64,
    allocate: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let (attention, memory) = (parsed(description)?, memory_of(device));
    let tensors = tensors_of(tensors, seed, memory)?;
    let (values, rows) = three(["out", "lse", "entropy"], &into, memory)?;
    let written: Vec<&Borrowed> = [&values].into_iter().chain(rows.iter().flatten()).collect();
    apart(&written, tensors.all())?;
    let out = outputs(&values, &rows, &tensors.q)?;
    let given = given(&attention, &tensors)?;
    let call = Call { device, description, dtype: dtype_of(&tensors.q)?, backward: false, weights: false, stream };
    let plan = plans::get(py, &call, &attention, &given)?;
    let (_kept, workspace) = workspace(allocate, plan.forward_workspace(), memory)?;
    // SAFETY: the framework's tensors are on this device, have the sizes they declare, and stay valid until work
    // submitted to their stream before they are freed is done; `apart` checked that outputs overlap nothing.
    py.detach(|| unsafe { plan.forward(&given, &out, workspace, Stream(stream)) }).map_err(refused_on_cuda)
}

/// Submits the backward pass to a stream: see [`cuda_forward_into`], and `backward_into` for `gradients`, `saved` and
/// `upstream`.
#[pyfunction]
#[pyo3(signature = (description, tensors, saved, upstream, gradients, seed, device, stream, allocate))]
#[expect(clippy::too_many_arguments, reason = "an operator's arguments, by position")]
pub fn cuda_backward_into<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    saved: Three<'py>,
    upstream: Three<'py>,
    gradients: &Bound<'py, PyTuple>,
    seed: Option<u64>,
    device: i32,
    stream: u64,
    allocate: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let (attention, memory) = (parsed(description)?, memory_of(device));
    let tensors = tensors_of(tensors, seed, memory)?;
    let (values, rows) = three(["out", "lse", "entropy"], &saved, memory)?;
    let (d_out, d_rows) = three(["d_out", "d_lse", "d_entropy"], &upstream, memory)?;
    let into = gradients_of(gradients, memory)?;
    let read = [&values, &d_out].into_iter().chain(rows.iter().flatten()).chain(d_rows.iter().flatten());
    apart(&into.iter().flatten().collect::<Vec<_>>(), tensors.all().chain(read))?;
    let out = outputs(&values, &rows, &tensors.q)?;
    let mut from = Upstreams::new(strided(&d_out, &tensors.q)?);
    from.lse = d_rows[0].as_ref().map(float_vector).transpose()?;
    from.entropy = d_rows[1].as_ref().map(float_vector).transpose()?;
    let into = into_gradients(&into, &tensors.q)?;
    let given = given(&attention, &tensors)?;
    let call = Call { device, description, dtype: dtype_of(&tensors.q)?, backward: true, weights: false, stream };
    let plan = plans::get(py, &call, &attention, &given)?;
    let (_kept, workspace) = workspace(allocate, plan.backward_workspace(), memory)?;
    // SAFETY: as in `cuda_forward_into`; `saved` holds what the forward pass wrote.
    py.detach(|| unsafe { plan.backward(&given, &out, &from, &into, workspace, Stream(stream)) })
        .map_err(refused_on_cuda)
}

type BorrowedGradients = [Option<Borrowed>; GRADIENTS.len()];

fn gradients_of(given: &Bound<'_, PyTuple>, memory: Memory) -> PyResult<BorrowedGradients> {
    if given.len() != GRADIENTS.len() {
        return Err(kind(format!("{} gradients were given, expected {}", given.len(), GRADIENTS.len())));
    }
    let mut into = BorrowedGradients::default();
    for (at, to) in into.iter_mut().enumerate() {
        let object = given.get_borrowed_item(at)?;
        if !object.is_none() {
            *to = Some(Borrowed::new_in(GRADIENTS[at], &object, memory)?);
        }
    }
    Ok(into)
}

fn into_gradients(into: &BorrowedGradients, like: &Borrowed) -> PyResult<Gradients> {
    let needed = |at: usize| {
        let found = into[at].as_ref().ok_or_else(|| value(format!("`{}` is missing", GRADIENTS[at])))?;
        strided(found, like)
    };
    let numbers = |at: usize| into[at].as_ref().map(|found| typed_vector(found, like)).transpose();
    let mut gradients = Gradients::new(needed(0)?, needed(1)?, needed(2)?);
    gradients.scale = numbers(7)?;
    gradients.bias = into[8].as_ref().map(|found| strided(found, like)).transpose()?;
    gradients.table = numbers(9)?;
    gradients.sinks = numbers(10)?;
    Ok(gradients)
}

/// Also looks for CUDA's compiler in this folder.
#[pyfunction]
pub fn cuda_look_in(folder: std::path::PathBuf) {
    qkv_cuda::look_in(folder);
}

/// The number of cached plans, and the bytes of device memory that they hold.
#[pyfunction]
pub fn cuda_plans() -> (usize, usize) {
    plans::size()
}

/// Drops all cached plans, except those of captured graphs.
#[pyfunction]
pub fn cuda_forget() {
    plans::forget();
}

/// The names of the kernels that compute a call, forward and backward.
#[pyfunction]
#[pyo3(signature = (description, tensors, seed, device, stream))]
pub fn cuda_kernels<'py>(
    py: Python<'py>,
    description: &str,
    tensors: &Bound<'py, PyTuple>,
    seed: Option<u64>,
    device: i32,
    stream: u64,
) -> PyResult<(String, Option<String>)> {
    let attention = parsed(description)?;
    let tensors = tensors_of(tensors, seed, memory_of(device))?;
    let given = given(&attention, &tensors)?;
    let names = |backward| {
        let call = Call { device, description, dtype: dtype_of(&tensors.q)?, backward, weights: false, stream };
        let plan = plans::get(py, &call, &attention, &given)?;
        PyResult::Ok((plan.forward_kernel(), plan.backward_kernel()))
    };
    Ok((names(false)?.0, names(true)?.1))
}
