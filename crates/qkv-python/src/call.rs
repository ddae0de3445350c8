//! The calls on the CPU, on this process's thread pool with the GIL released; calls over device memory go to
//! [`cuda`](crate::cuda).

use crate::array::Library;
use crate::attention::Attention;
use crate::borrowed::{Borrowed, Memory};
use crate::cuda::{self, On};
use crate::dtype::of_type;
use crate::errors::refused;
use crate::inputs::{Float, Tensors, Vectors};
use crate::pool;
use crate::results::{Gradients, Output};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use qkv::{Decode, Inputs, OutputRef, Tensor, Upstream};

/// The number of threads of a call: the given number, the one that was set, PyTorch's if it is in use, or one per core.
pub fn threads(py: Python<'_>, given: Option<usize>) -> PyResult<usize> {
    if let Some(threads) = given {
        return Ok(threads);
    }
    if let Some(set) = pool::set() {
        return Ok(set);
    }
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    match modules.get_item(intern!(py, "torch")) {
        Ok(torch) if torch.hasattr(intern!(py, "get_num_threads"))? => {
            torch.call_method0(intern!(py, "get_num_threads"))?.extract()
        }
        _ => Ok(pool::threads()),
    }
}

/// Rejects a tensor whose gradient would be lost.
pub fn without_gradient<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    Library::of(name, object).map(|_| object.clone())
}

/// `Attention.forward`, and `Attention.decode` with `how`.
pub fn forward<'py>(
    attention: &Attention,
    qkv: [&Bound<'py, PyAny>; 3],
    inputs: Option<&Bound<'py, PyDict>>,
    how: Option<Decode>,
    threads: Option<usize>,
) -> PyResult<Output> {
    let py = qkv[0].py();
    let library = Library::of("q", qkv[0])?;
    if let Some(on) = On::of(library, qkv[0])? {
        return cuda::forward(&on, attention.value(), qkv, inputs, how).map(Output::on_device);
    }
    let threads = self::threads(py, threads)?;
    let tensors = Tensors::new(qkv, inputs, Memory::Host, without_gradient)?;
    of_type!(tensors.q.dtype(), "q", T => forward_of::<T>(py, attention.value(), &tensors, library, how, threads))
}

fn forward_of<T: Float>(
    py: Python<'_>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    library: Library,
    how: Option<Decode>,
    threads: usize,
) -> PyResult<Output> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work());
    let out = py.detach(|| {
        pool::run(threads, work, |threads, scratch| match how {
            None => attention.forward_with(inputs, scratch, threads),
            Some(how) => attention.decode_with(inputs, how, scratch, threads),
        })
    });
    Output::new(py, library, out.map_err(refused)?, attention, tensors)
}

/// The upstream gradients as Python objects: that of the values, and those of log-sum-exp, entropy and log-probability.
pub struct GivenUpstream<'a, 'py> {
    pub d_out: &'a Bound<'py, PyAny>,
    pub columns: [Option<&'a Bound<'py, PyAny>>; 3],
    pub constant_bias: bool,
}

/// The upstream gradients, borrowed.
struct BorrowedUpstream {
    d_out: Borrowed,
    columns: [Option<Borrowed>; 3],
    constant_bias: bool,
}

/// `Attention.backward`.
pub fn backward<'py>(
    attention: &Attention,
    qkv: [&Bound<'py, PyAny>; 3],
    inputs: Option<&Bound<'py, PyDict>>,
    out: &Output,
    upstream: GivenUpstream<'_, 'py>,
    threads: Option<usize>,
) -> PyResult<Gradients> {
    let py = qkv[0].py();
    let library = Library::of("q", qkv[0])?;
    without_gradient("d_out", upstream.d_out)?;
    if let Some(on) = On::of(library, qkv[0])? {
        let GivenUpstream { d_out, columns: [d_lse, d_entropy, _], constant_bias } = upstream;
        let upstream = cuda::Upstream { d_out, d_lse, d_entropy, constant_bias };
        return cuda::backward(&on, attention.value(), qkv, inputs, &out.kept(py)?, &upstream)
            .map(Gradients::on_device);
    }
    let threads = self::threads(py, threads)?;
    let mut tensors = Tensors::new(qkv, inputs, Memory::Host, without_gradient)?;
    tensors.seed = out.seed_of_backward(tensors.seed)?;
    let names = ["d_lse", "d_entropy", "d_log_prob"];
    let column = |at: usize| upstream.columns[at].map(|column| Borrowed::new(names[at], column)).transpose();
    let upstream = BorrowedUpstream {
        d_out: Borrowed::new("d_out", upstream.d_out)?,
        columns: [column(0)?, column(1)?, column(2)?],
        constant_bias: upstream.constant_bias,
    };
    let attention = attention.value();
    of_type!(tensors.q.dtype(), "q", T => {
        let gradients = backward_of::<T>(py, attention, &tensors, out, &upstream, threads)?;
        Gradients::new(py, library, gradients, &tensors)
    })
}

fn backward_of<T: Float>(
    py: Python<'_>,
    attention: &qkv::Attention,
    tensors: &Tensors,
    out: &Output,
    given: &BorrowedUpstream,
    threads: usize,
) -> PyResult<qkv::Gradients<T>> {
    let vectors = Vectors::<T>::new(tensors)?;
    let (inputs, work) = (vectors.inputs(tensors)?, tensors.work().saturating_mul(2));
    let column = |at: usize| given.columns[at].as_ref().map(Borrowed::to_vec::<T::Acc>).transpose();
    let [d_lse, d_entropy, d_log_prob] = [column(0)?, column(1)?, column(2)?];
    let mut upstream = Upstream::new(given.d_out.view::<T>()?);
    upstream.lse = d_lse.as_deref();
    upstream.entropy = d_entropy.as_deref();
    upstream.log_prob = d_log_prob.as_deref();
    upstream.for_bias = !given.constant_bias;
    if attention.select != qkv::Select::Soft {
        let saved = out.saved::<T>()?;
        let backward = |threads, scratch: &_| attention.backward_with(inputs, saved, upstream, scratch, threads);
        return py.detach(|| pool::run(threads, work, backward)).map_err(refused);
    }
    let (values, lse, entropy) = out.borrowed::<T>(py)?;
    let mut saved = OutputRef::new(values.view::<T>()?, &lse).place(out.place());
    if let Some(entropy) = &entropy {
        saved = saved.entropy(entropy);
    }
    let mut gradients = zeros::<T>(tensors, &inputs, given.constant_bias)?;
    let into = gradients.as_mut();
    let backward = |threads, scratch: &_| attention.backward_into(inputs, saved, upstream, into, scratch, threads);
    py.detach(|| pool::run(threads, work, backward)).map_err(refused)?;
    Ok(gradients)
}

/// Zeros for the gradient of every input.
fn zeros<T: Float>(tensors: &Tensors, inputs: &Inputs<'_, T>, constant_bias: bool) -> PyResult<qkv::Gradients<T>> {
    let four = |shape: [usize; 4]| Tensor::<T, 4>::zeros(shape).map_err(refused);
    let view = |of: &Option<qkv::View<'_, T>>| of.map(|of| four(of.shape())).transpose();
    let vector = |of: &Option<&[T]>| of.map(|of| vec![T::default(); of.len()]);
    let (q, k, v) = (tensors.q.view::<T>()?, tensors.k.view::<T>()?, tensors.v.view::<T>()?);
    let mut gradients = qkv::Gradients::new(four(q.shape())?, four(k.shape())?, four(v.shape())?);
    gradients.w = view(&inputs.w)?;
    gradients.w_q = view(&inputs.w_q)?;
    gradients.w_k = view(&inputs.w_k)?;
    gradients.bias = if constant_bias { None } else { view(&inputs.bias)? };
    gradients.table = view(&inputs.table)?;
    gradients.v_score = vector(&inputs.v_score);
    gradients.scale = vector(&inputs.scale);
    gradients.sinks = vector(&inputs.sinks);
    gradients.center = vector(&inputs.center);
    Ok(gradients)
}
