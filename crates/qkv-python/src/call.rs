//! The tensors of a call, from Python objects to the library's [`Inputs`]; the calls themselves, without the
//! interpreter's lock, on this process's pool.

use crate::array::Library;
use crate::attention::Attention;
use crate::borrowed::{Borrowed, Memory, lengths_of, pair};
use crate::dtype::{Typed, of_type};
use crate::errors::{kind, refused, value};
use crate::pool::{self, Accumulator};
use crate::results::{Gradients, Output};
use half::{bf16, f16};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use qkv::{Decode, Element, Inputs, OutputRef, Tensor, Upstream};

/// An element type at the border, whose sums have one as well.
pub trait Float: Element + qkv_simd::Element<Acc: Typed + Accumulator> + Typed {}
impl Float for f32 {}
impl Float for f64 {}
impl Float for bf16 {}
impl Float for f16 {}

macro_rules! optional_tensors {
    ($($name:ident)*) => {
        /// The optional tensors of a call, as they were given.
        #[derive(Default)]
        pub struct Optional {
            $(pub $name: Option<Borrowed>,)*
        }

        impl Optional {
            /// Their names, in the order in which `ops` gets them.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Borrows one; `false` if it is not among them.
            pub fn set(&mut self, name: &str, object: &Bound<'_, PyAny>, memory: Memory) -> PyResult<bool> {
                match name {
                    $(stringify!($name) => self.$name = Some(Borrowed::new_in(stringify!($name), object, memory)?),)*
                    _ => return Ok(false),
                }
                Ok(true)
            }

            /// Those that were given.
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
    /// From positional arguments and keywords; `of` checks each object first.
    pub fn new<'py>(
        [q, k, v]: [&Bound<'py, PyAny>; 3],
        inputs: Option<&Bound<'py, PyDict>>,
        of: impl Fn(&str, &Bound<'py, PyAny>) -> PyResult<()>,
    ) -> PyResult<Tensors> {
        let borrow = |name: &'static str, object: &Bound<'py, PyAny>| {
            of(name, object)?;
            Borrowed::new(name, object)
        };
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
                optional.set(&format!("{name}_q"), &queries, Memory::Host)?;
                optional.set(&format!("{name}_k"), &keys, Memory::Host)?;
            } else {
                of(&name, &object)?;
                if name.contains("segments_")
                    || name.contains("buckets_")
                    || !optional.set(&name, &object, Memory::Host)?
                {
                    return Err(kind(format!("unexpected keyword argument '{name}'")));
                }
            }
        }
        Ok(Tensors { q, k, v, optional, seed })
    }

    /// All that were given.
    pub fn all(&self) -> impl Iterator<Item = &Borrowed> {
        [&self.q, &self.k, &self.v].into_iter().chain(self.optional.given())
    }

    /// Multiply-adds of the forward pass, without the mask.
    pub fn work(&self) -> usize {
        let length = |of: &Borrowed| of.shape().iter().rev().nth(1).copied().unwrap_or(1);
        let size = |of: &Borrowed| of.shape().iter().fold(1usize, |size, &axis| size.saturating_mul(axis));
        let weighted = size(&self.v).saturating_mul(length(&self.q));
        size(&self.q).saturating_mul(length(&self.k)).saturating_add(weighted)
    }
}

/// What the library wants as slices, copied: all of it is small beside q, k and v.
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

/// The number of threads of a call: what it says, what was set, PyTorch's where it is in use, or one for each core.
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

/// Refuses a tensor whose gradient would be lost.
pub fn without_gradient(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    Library::of(name, object).map(|_| ())
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
    let threads = self::threads(py, threads)?;
    let tensors = Tensors::new(qkv, inputs, without_gradient)?;
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

/// The upstream gradients as they were given: of the values; of log-sum-exp, entropy and log-probability.
pub struct GivenUpstream<'a, 'py> {
    pub d_out: &'a Bound<'py, PyAny>,
    pub columns: [Option<&'a Bound<'py, PyAny>>; 3],
    pub constant_bias: bool,
}

/// The same, borrowed.
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
    let threads = self::threads(py, threads)?;
    let mut tensors = Tensors::new(qkv, inputs, without_gradient)?;
    tensors.seed = out.seed_of_backward(tensors.seed)?;
    without_gradient("d_out", upstream.d_out)?;
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

/// Zeros for the gradient of everything that was given.
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
