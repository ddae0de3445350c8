//! [`Attention`]: the description of an attention as a Python object, with the builders of the library and the calls
//! that compute it. How calls handle their tensors is in [`call`](crate::call).

use crate::call;
use crate::description::{Bias, Features, Mask, Place, Score, Select, from_json, hash_of, to_json, word};
use crate::errors::value;
use crate::parsed::check;
use crate::results::{Gradients, Output, Weights};
use crate::spelling;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyType};
use std::sync::Arc;

/// The description of an attention: plain data, without tensors. Builders return a new description.
#[pyclass(frozen, module = "qkv")]
pub struct Attention(Arc<qkv::Attention>, PyOnceLock<Py<PyString>>);

impl Attention {
    /// Rejects numbers that JSON cannot represent, and masks that are nested too deeply.
    pub fn checked(attention: qkv::Attention) -> PyResult<Attention> {
        check(&attention)?;
        Ok(Attention::new_arc(Arc::new(attention)))
    }

    fn new_arc(attention: Arc<qkv::Attention>) -> Attention {
        Attention(attention, PyOnceLock::new())
    }

    /// The description, shared.
    pub fn shared(&self) -> Arc<qkv::Attention> {
        self.0.clone()
    }

    fn built(&self, build: impl FnOnce(qkv::Attention) -> qkv::Attention) -> PyResult<Attention> {
        Attention::checked(build((*self.0).clone()))
    }

    fn of(score: qkv::Score) -> Attention {
        Attention::new_arc(Arc::new(qkv::Attention::new(score)))
    }
}

word! { Attention {
    /// Plain softmax attention with this score.
    #[new]
    #[pyo3(signature = (score=None))]
    fn new(score: Option<&Bound<'_, Score>>) -> Attention {
        Attention::of(score.map_or(qkv::Score::ScaledDot, |score| score.get().0))
    }

    /// `q·k`.
    #[staticmethod]
    fn dot() -> Attention {
        Attention::of(qkv::Score::Dot)
    }

    /// `q·k / √d`, the Transformer's.
    #[staticmethod]
    fn scaled_dot() -> Attention {
        Attention::of(qkv::Score::ScaledDot)
    }

    /// `qᵀ W k`, Luong's.
    #[staticmethod]
    fn general() -> Attention {
        Attention::of(qkv::Score::General)
    }

    /// `vᵀ tanh(W₁q + W₂k)`, Bahdanau's.
    #[staticmethod]
    fn additive() -> Attention {
        Attention::of(qkv::Score::Additive)
    }

    /// `q·k / (‖q‖ ‖k‖)`.
    #[staticmethod]
    fn cosine() -> Attention {
        Attention::of(qkv::Score::Cosine)
    }

    /// `−‖q − k‖²`.
    #[staticmethod]
    fn distance() -> Attention {
        Attention::of(qkv::Score::Distance)
    }

    /// Linear attention with these features.
    #[staticmethod]
    fn linear(features: &Bound<'_, Features>) -> Attention {
        Attention::of(qkv::Score::Linear(features.get().0))
    }

    /// Multiply scores by this instead of the score's default scale.
    fn scale(&self, scale: f64) -> PyResult<Attention> {
        self.built(|it| it.scale(scale))
    }

    /// Multiply scores by the input `scale`, which then has a gradient.
    fn learned_scale(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::learned_scale)
    }

    /// Divide scores by this after the scale.
    fn temperature(&self, temperature: f64) -> PyResult<Attention> {
        self.built(|it| it.temperature(temperature))
    }

    /// Keep scores between −cap and cap with `cap · tanh(score / cap)`.
    fn softcap(&self, cap: f64) -> PyResult<Attention> {
        self.built(|it| it.softcap(cap))
    }

    /// Add this bias to every score. If called twice, both are added.
    fn bias(&self, bias: &Bound<'_, Bias>) -> PyResult<Attention> {
        Bias::sum(self.0.bias, bias.get().0)?;
        self.built(|it| it.bias(bias.get().0))
    }

    /// Let each query see only these keys. If called twice, both masks must allow a pair.
    fn mask(&self, mask: &Bound<'_, Mask>) -> PyResult<Attention> {
        self.built(|it| it.mask(mask.get().0.clone()))
    }

    /// Set the position of the queries relative to the keys.
    fn place(&self, place: &Bound<'_, Place>) -> PyResult<Attention> {
        self.built(|it| it.place(place.get().0))
    }

    /// Set how scores become weights.
    fn select(&self, select: &Bound<'_, Select>) -> PyResult<Attention> {
        self.built(|it| it.select(select.get().0))
    }

    /// Attend to the one key with the largest score.
    fn hard(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::hard)
    }

    /// Attend to one key, drawn from the softmax with the call's `seed`.
    fn sample(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::sample)
    }

    /// Pass the gradient of a hard attention's output to the scores as if the weights had been soft.
    fn straight_through(&self) -> PyResult<Attention> {
        if !matches!(self.0.select, qkv::Select::Hard(_)) {
            let reason = "it comes after `hard` or `sample`";
            return Err(value(format!("straight-through cannot go with a selection that is not hard: {reason}")));
        }
        self.built(qkv::Attention::straight_through)
    }

    /// Attend to the `k` keys with the largest scores.
    fn top_k(&self, k: usize) -> PyResult<Attention> {
        self.built(|it| it.top_k(k))
    }

    /// Compute weights by sparsemax.
    fn sparsemax(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::sparsemax)
    }

    /// Predictive local attention around the input `center [B, Hq, N]` (Luong's local-p).
    fn local(&self, half_width: usize) -> PyResult<Attention> {
        self.built(|it| it.local(half_width))
    }

    /// Drop each weight with probability `p`; the call's `seed` determines which ones.
    fn dropout(&self, p: f64) -> PyResult<Attention> {
        self.built(|it| it.dropout(p))
    }

    /// The same attention without randomness.
    fn for_evaluation(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::for_evaluation)
    }

    /// Whether a call draws random numbers, and so needs a `seed`.
    fn draws(&self) -> bool {
        self.0.draws()
    }

    /// Give every head a sink: a logit, from the input `sinks [Hq]`, that takes probability mass and has no value.
    fn with_sinks(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::with_sinks)
    }

    /// Also return the entropy of each row of weights.
    fn with_entropy(&self) -> PyResult<Attention> {
        self.built(qkv::Attention::with_entropy)
    }

    /// The description as JSON, the same string object on every access; operators take it as text.
    #[getter]
    fn _json(&self, py: Python<'_>) -> Py<PyString> {
        self.1.get_or_init(py, || PyString::new(py, &self.to_json()).unbind()).clone_ref(py)
    }

    /// Computes the attention. Arrays may come from NumPy, PyTorch, JAX or anything with `__dlpack__` or a buffer, with
    /// any strides; they are not copied. Results are arrays of the library of `q`.
    #[pyo3(signature = (q, k, v, *, threads=None, **inputs))]
    fn forward<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        threads: Option<usize>,
        inputs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Output> {
        call::forward(self, [q, k, v], inputs, None, threads)
    }

    /// Attends from a few new queries to a cache of keys and values; the queries are at the end of the keys. With
    /// `exact`, the result is bit-identical to that of a full pass.
    #[pyo3(signature = (q, k, v, *, exact=false, threads=None, **inputs))]
    fn decode<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        exact: bool,
        threads: Option<usize>,
        inputs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Output> {
        let how = if exact { qkv::Decode::Exact } else { qkv::Decode::Fast };
        call::forward(self, [q, k, v], inputs, Some(how), threads)
    }

    /// The gradients of all inputs, from the output of `forward` and the gradient `d_out` of the loss with respect to
    /// its values (and `d_lse`, `d_entropy`, `d_log_prob` if those outputs were used).
    #[pyo3(signature = (q, k, v, out, d_out, *, d_lse=None, d_entropy=None, d_log_prob=None, constant_bias=false,
                        threads=None, **inputs))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn backward<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: &Bound<'py, Output>,
        d_out: &Bound<'py, PyAny>,
        d_lse: Option<&Bound<'py, PyAny>>,
        d_entropy: Option<&Bound<'py, PyAny>>,
        d_log_prob: Option<&Bound<'py, PyAny>>,
        constant_bias: bool,
        threads: Option<usize>,
        inputs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Gradients> {
        let upstream = call::GivenUpstream { d_out, columns: [d_lse, d_entropy, d_log_prob], constant_bias };
        call::backward(self, [q, k, v], inputs, out.get(), upstream, threads)
    }

    /// The weights on demand: any rows, any rectangle, or pooled into a picture, recomputed exactly.
    #[pyo3(signature = (q, k, v, out, *, threads=None, **inputs))]
    fn weights<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: &Bound<'py, Output>,
        threads: Option<usize>,
        inputs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Weights> {
        Weights::new(self, [q, k, v], inputs, out, threads)
    }
}}
