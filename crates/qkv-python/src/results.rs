//! The results that calls return to Python: [`Output`], [`Gradients`] and [`Weights`], with arrays of the caller's
//! library.

use crate::array::{Array, Library};
use crate::attention::Attention;
use crate::borrowed::{Borrowed, Memory};
use crate::call::{threads, without_gradient};
use crate::cuda::{self, Found, Kept, On, Part};
use crate::dtype::of_type;
use crate::errors::{kind, refused, value};
use crate::inputs::{Float, Tensors, Vectors};
use crate::pool;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use qkv::{Place, Pool, Select, Tensor, engine};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

type Object = Py<PyAny>;

/// The results of the forward pass, including those that the backward pass needs.
#[pyclass(frozen, module = "qkv")]
pub struct Output {
    /// The weighted sums of the values, `[B, Hq, N, Dv]`.
    #[pyo3(get)]
    values: Object,
    /// The log-sum-exp of each row of scores, `[B, Hq, N]`; `None` for sparsemax.
    #[pyo3(get)]
    lse: Option<Object>,
    /// The threshold of each row of sparsemax.
    #[pyo3(get)]
    threshold: Option<Object>,
    /// The entropy of each row of weights, if the attention has `with_entropy`.
    #[pyo3(get)]
    entropy: Option<Object>,
    /// The keys that hard attention or top-k chose.
    #[pyo3(get)]
    chosen: Option<Object>,
    /// The log-probability of hard attention's choice.
    #[pyo3(get)]
    log_prob: Option<Object>,
    place: Place,
    seed: Option<u64>,
    /// The library's output, for a selection other than softmax.
    saved: Option<Box<dyn Any + Send + Sync>>,
}

impl Output {
    /// Converts the library's output to arrays with the rank of the queries.
    pub fn new<T: Float>(
        py: Python<'_>,
        library: Library,
        mut out: qkv::Output<T>,
        attention: &qkv::Attention,
        tensors: &Tensors,
    ) -> PyResult<Output> {
        let (place, rank) = (engine::place_of(&out), tensors.q.shape().len());
        let soft = attention.select == Select::Soft;
        let saved: Option<Box<dyn Any + Send + Sync>> = (!soft).then(|| Box::new(out.clone()) as _);
        let column = |found: Option<Tensor<T::Acc, 3>>| {
            found.map(|found| array(py, library, Array::new(found, rank.saturating_sub(1)))).transpose()
        };
        let lse = std::mem::replace(&mut out.lse, Tensor::zeros([0; 3]).map_err(refused)?);
        Ok(Output {
            lse: column((attention.select != Select::Sparsemax).then_some(lse))?,
            threshold: column(out.threshold)?,
            entropy: column(out.entropy)?,
            log_prob: column(out.log_prob)?,
            chosen: out.chosen.map(|chosen| array(py, library, Array::new(chosen, rank))).transpose()?,
            values: array(py, library, Array::new(out.values, rank))?,
            place,
            seed: tensors.seed.filter(|_| attention.draws()),
            saved,
        })
    }

    /// The output of a forward pass on a device.
    pub fn on_device(kept: Kept) -> Output {
        let Kept { values, lse, entropy, place, seed } = kept;
        let (threshold, chosen, log_prob) = (None, None, None);
        Output { values, lse: Some(lse), threshold, entropy, chosen, log_prob, place, seed, saved: None }
    }

    /// The parts that later calls on a device need.
    pub fn kept(&self, py: Python<'_>) -> PyResult<Kept> {
        let lse = self.lse.as_ref().ok_or_else(|| value("`out` is the output of another attention"))?.clone_ref(py);
        let entropy = self.entropy.as_ref().map(|entropy| entropy.clone_ref(py));
        Ok(Kept { values: self.values.clone_ref(py), lse, entropy, place: self.place, seed: self.seed })
    }

    /// The place of the queries.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The seed of the forward pass, which the backward pass may repeat but not change.
    pub fn seed_of_backward(&self, given: Option<u64>) -> PyResult<Option<u64>> {
        match (self.seed, given) {
            (Some(forward), Some(seed)) if forward != seed => {
                Err(value(format!("`seed` is {seed}, expected {forward}, the seed of the forward pass")))
            }
            (forward, given) => Ok(forward.or(given)),
        }
    }

    /// The library's output, for a selection other than softmax.
    pub fn saved<T: Float>(&self) -> PyResult<&qkv::Output<T>> {
        let found = self.saved.as_ref().and_then(|saved| saved.downcast_ref());
        found.ok_or_else(|| kind("`out` is the output of another attention, or of another type than `q`"))
    }

    /// Values, log-sum-exp and entropy of a softmax, in row-major order.
    pub fn borrowed<T: Float>(&self, py: Python<'_>) -> PyResult<Softmax<T::Acc>> {
        let lse = self.lse.as_ref().ok_or_else(|| value("`out` is the output of another attention"))?;
        let column = |name, found: &Object| Borrowed::new(name, found.bind(py))?.to_vec::<T::Acc>();
        let entropy = self.entropy.as_ref().map(|entropy| column("entropy", entropy)).transpose()?;
        Ok((Borrowed::new("out", self.values.bind(py))?, column("lse", lse)?, entropy))
    }
}

/// Values, log-sum-exp and entropy.
type Softmax<A> = (Borrowed, Vec<A>, Option<Vec<A>>);

fn array(py: Python<'_>, library: Library, array: Array) -> PyResult<Object> {
    library.array(py, array).map(Bound::unbind)
}

#[pymethods]
impl Output {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<qkv.Output values {}>", self.values.bind(py).getattr("shape")?.str()?))
    }
}

macro_rules! gradients {
    (tensors { $($tensor:ident)* } vectors { $($vector:ident)* }) => {
        /// The gradients of all inputs, each in the shape of its input; `None` for inputs that were not given.
        #[pyclass(frozen, get_all, module = "qkv")]
        pub struct Gradients {
            /// Gradient of the queries.
            q: Object,
            /// Gradient of the keys.
            k: Object,
            /// Gradient of the values.
            v: Object,
            $(
                #[doc = concat!("Of the input `", stringify!($tensor), "`.")]
                $tensor: Option<Object>,
            )*
            $(
                #[doc = concat!("Of the input `", stringify!($vector), "`.")]
                $vector: Option<Object>,
            )*
        }

        impl Gradients {
            /// Converts the library's gradients to arrays in the shapes of the inputs.
            pub fn new<T: Float>(
                py: Python<'_>,
                library: Library,
                found: qkv::Gradients<T>,
                tensors: &Tensors,
            ) -> PyResult<Gradients> {
                let given = &tensors.optional;
                let rank = |of: &Option<Borrowed>| of.as_ref().map_or(4, |of| of.shape().len());
                Ok(Gradients {
                    q: array(py, library, Array::new(found.q, tensors.q.shape().len()))?,
                    k: array(py, library, Array::new(found.k, tensors.k.shape().len()))?,
                    v: array(py, library, Array::new(found.v, tensors.v.shape().len()))?,
                    $(
                        $tensor: match found.$tensor {
                            Some(found) => Some(array(py, library, Array::new(found, rank(&given.$tensor)))?),
                            None => None,
                        },
                    )*
                    $(
                        $vector: match (found.$vector, &given.$vector) {
                            (Some(found), Some(given)) => {
                                let found = Array::shaped(found, given.shape())?;
                                Some(array(py, library, found)?)
                            }
                            _ => None,
                        },
                    )*
                })
            }
        }

        impl Gradients {
            /// The gradients of a backward pass on a device.
            pub fn on_device(found: Found) -> Gradients {
                let Found { q, k, v, scale, bias, table, sinks } = found;
                let (w, w_q, w_k, v_score, center) = (None, None, None, None, None);
                Gradients { q, k, v, w, w_q, w_k, bias, table, v_score, scale, sinks, center }
            }
        }

        #[pymethods]
        impl Gradients {
            fn __repr__(&self) -> String {
                let mut names = vec!["q", "k", "v"];
                $(names.extend(self.$tensor.as_ref().map(|_| stringify!($tensor)));)*
                $(names.extend(self.$vector.as_ref().map(|_| stringify!($vector)));)*
                format!("<qkv.Gradients of {}>", names.join(", "))
            }
        }
    };
}
gradients! { tensors { w w_q w_k bias table } vectors { v_score scale sinks center } }

/// The weights of one call on demand: any rows, any rectangle, or pooled into a picture.
#[pyclass(frozen, module = "qkv")]
pub struct Weights {
    attention: Arc<qkv::Attention>,
    qkv: [Object; 3],
    inputs: Option<Py<PyDict>>,
    out: Py<Output>,
    threads: Option<usize>,
}

impl Weights {
    /// Keeps the tensors of the call; they are read when weights are requested.
    pub fn new<'py>(
        attention: &Attention,
        qkv: [&Bound<'py, PyAny>; 3],
        inputs: Option<&Bound<'py, PyDict>>,
        out: &Bound<'py, Output>,
        threads: Option<usize>,
    ) -> PyResult<Weights> {
        let weights = Weights {
            attention: attention.shared(),
            qkv: qkv.map(|of| of.clone().unbind()),
            inputs: inputs.map(|inputs| inputs.copy().map(Bound::unbind)).transpose()?,
            out: out.clone().unbind(),
            threads,
        };
        // Report arguments that do not fit together now.
        weights.ask(qkv[0].py(), &Request::Nothing)?;
        Ok(weights)
    }

    fn ask<'py>(&self, py: Python<'py>, request: &Request) -> PyResult<Bound<'py, PyAny>> {
        let qkv = [0, 1, 2].map(|at| self.qkv[at].bind(py));
        let library = Library::of("q", qkv[0])?;
        let inputs = self.inputs.as_ref().map(|inputs| inputs.bind(py));
        if let Some(on) = On::of(library, qkv[0])? {
            let (kept, part) = (self.out.get().kept(py)?, request.on_device());
            let found = cuda::weights(&on, &self.attention, qkv, inputs, &kept, part.as_ref())?;
            return Ok(found.unwrap_or_else(|| py.None().into_bound(py)));
        }
        let threads = threads(py, self.threads)?;
        let mut tensors = Tensors::new(qkv, inputs, Memory::Host, without_gradient)?;
        tensors.seed = self.out.get().seed_of_backward(tensors.seed)?;
        let found = of_type!(tensors.q.dtype(), "q", T => self.asked::<T>(py, &tensors, request, threads)?);
        library.array(py, found)
    }

    fn asked<T: Float>(&self, py: Python<'_>, tensors: &Tensors, request: &Request, threads: usize) -> PyResult<Array> {
        let (vectors, attention, out) = (Vectors::<T>::new(tensors)?, &*self.attention, self.out.get());
        let inputs = vectors.inputs(tensors)?;
        let [b, h, n, _] = inputs.q.shape();
        let made;
        let saved = if attention.select == Select::Soft {
            let (_, lse, _) = out.borrowed::<T>(py)?;
            let lse = Tensor::new(lse, [b, h, n]).map_err(refused)?;
            made = qkv::Output::of_lse(lse, inputs.v.shape()[3], out.place()).map_err(refused)?;
            &made
        } else {
            out.saved::<T>()?
        };
        let weights = attention.weights(inputs, saved).map_err(refused)?;
        let m = inputs.k.shape()[2];
        let range = |of: &Option<(usize, usize)>, all: usize| of.map_or(0..all, |(start, end)| start..end);
        let part = |rows, cols| (range(rows, n), range(cols, m));
        let found = py.detach(|| {
            pool::run_inside(threads, || match request {
                Request::Nothing => Tensor::<T::Acc, 2>::zeros([0, 0]).map(|none| Array::new(none, 2)),
                Request::Rectangle { at: (b, h), rows, cols } => {
                    let (rows, cols): (Range<usize>, _) = part(rows, cols);
                    weights.rectangle(*b, *h, rows, cols).map(|found| Array::new(found, 2))
                }
                Request::Pooled { at: (b, h), size, rows, cols, pool } => {
                    let (rows, cols) = part(rows, cols);
                    weights.pooled(*b, *h, rows, cols, *size, *pool).map(|found| Array::new(found, 2))
                }
                Request::All => {
                    let mut all = Tensor::<T::Acc, 4>::zeros([b, h, n, m])?;
                    for at in 0..b * h {
                        let head = weights.rectangle(at / h, at % h, 0..n, 0..m)?;
                        all.data_mut()[at * n * m..][..n * m].copy_from_slice(head.data());
                    }
                    Ok(Array::new(all, 4))
                }
            })
        });
        found.map_err(refused)
    }
}

/// A request for weights.
enum Request {
    Nothing,
    Rectangle {
        at: (usize, usize),
        rows: Option<(usize, usize)>,
        cols: Option<(usize, usize)>,
    },
    Pooled {
        at: (usize, usize),
        size: [usize; 2],
        rows: Option<(usize, usize)>,
        cols: Option<(usize, usize)>,
        pool: Pool,
    },
    All,
}

impl Request {
    /// The same request for weights on a device.
    fn on_device(&self) -> Option<Part> {
        match *self {
            Request::Nothing => None,
            Request::All => Some(Part::All),
            Request::Rectangle { at: (b, h), rows, cols } => Some(Part::Rectangle { at: [b, h], rows, cols }),
            Request::Pooled { at: (b, h), size, rows, cols, pool } => {
                Some(Part::Pooled { at: [b, h], rows, cols, size, pool })
            }
        }
    }
}

#[pymethods]
impl Weights {
    /// A rectangle of one head, `[rows, cols]`; each range is `(start, end)`, or everything.
    #[pyo3(signature = (sequence=0, head=0, rows=None, cols=None))]
    fn rectangle<'py>(
        &self,
        py: Python<'py>,
        sequence: usize,
        head: usize,
        rows: Option<(usize, usize)>,
        cols: Option<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.ask(py, &Request::Rectangle { at: (sequence, head), rows, cols })
    }

    /// Whole rows of one head from `start` to `end`, `[end − start, M]`.
    fn rows<'py>(
        &self,
        py: Python<'py>,
        sequence: usize,
        head: usize,
        start: usize,
        end: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.ask(py, &Request::Rectangle { at: (sequence, head), rows: Some((start, end)), cols: None })
    }

    /// A rectangle of one head as a picture of `height` by `width` cells, each the maximum (`pool="max"`) or mean
    /// (`pool="mean"`) of the weights it covers.
    #[pyo3(signature = (height, width, *, sequence=0, head=0, rows=None, cols=None, pool="max"))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn pooled<'py>(
        &self,
        py: Python<'py>,
        height: usize,
        width: usize,
        sequence: usize,
        head: usize,
        rows: Option<(usize, usize)>,
        cols: Option<(usize, usize)>,
        pool: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let pool = match pool {
            "max" => Pool::Max,
            "mean" => Pool::Mean,
            other => return Err(value(format!("`pool` is {other:?}, expected \"max\" or \"mean\""))),
        };
        self.ask(py, &Request::Pooled { at: (sequence, head), size: [height, width], rows, cols, pool })
    }

    /// `(B, Hq, N, M)`.
    #[getter]
    fn shape(&self, py: Python<'_>) -> PyResult<(usize, usize, usize, usize)> {
        let axes = |at: usize| -> PyResult<Vec<usize>> {
            let mut shape: Vec<usize> = self.qkv[at].bind(py).getattr("shape")?.extract()?;
            while shape.len() < 4 {
                shape.insert(0, 1);
            }
            Ok(shape)
        };
        let (q, k) = (axes(0)?, axes(1)?);
        Ok((q[0], q[1], q[2], k[2]))
    }

    /// Every weight, `[B, Hq, N, M]`, which takes quadratic memory.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.ask(py, &Request::All)
    }

    fn __repr__(&self) -> String {
        "<qkv.Weights>".into()
    }
}
