//! The components of a description as Python objects: [`Mask`], [`Bias`], [`Score`], [`Features`], [`Select`] and
//! [`Place`]. Each wraps the library's value, with a `repr` that can be evaluated, conversion to and from JSON,
//! equality, hash and pickling.

use crate::array::{Library, bools};
use crate::borrowed::{Borrowed, lengths_of, pair};
use crate::errors::{kind, refused, value};
use crate::spelling;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use qkv::{MaskData, Tensor};
use serde::{Serialize, de::DeserializeOwned};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Serializes a value as JSON.
pub fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("descriptions hold finite numbers and strings")
}

/// Parses a value from JSON.
pub fn from_json<T: DeserializeOwned>(json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| value(error.to_string()))
}

/// The hash of a value, which is that of its JSON.
pub fn hash_of(value: &impl Serialize) -> u64 {
    let mut hasher = DefaultHasher::new();
    to_json(value).hash(&mut hasher);
    hasher.finish()
}

/// Adds the methods common to all components of a description to a class's own methods.
macro_rules! word {
    ($class:ident { $($own:tt)* }) => {
        impl $class {
            /// The library's value.
            pub fn value(&self) -> &qkv::$class {
                &self.0
            }
        }

        #[pymethods]
        impl $class {
            $($own)*

            /// The value as JSON, in the form of the library's files.
            fn to_json(&self) -> String {
                to_json(self.value())
            }

            /// Parse JSON as written by `to_json`.
            #[staticmethod]
            fn from_json(json: &str) -> PyResult<$class> {
                $class::checked(from_json(json)?)
            }

            fn __repr__(&self) -> String {
                spelling::Spelled::spelled(self.value())
            }

            fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
                other.cast::<$class>().is_ok_and(|other| other.get().value() == self.value())
            }

            fn __hash__(&self) -> u64 {
                hash_of(self.value())
            }

            fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
                Ok((PyType::new::<$class>(py).getattr("from_json")?, (self.to_json(),)))
            }
        }
    };
}
pub(crate) use word;

/// Which keys a query may see. Masks are combined with `&`, `|` and `~`.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Mask(pub qkv::Mask);

/// Maximum nesting of masks: JSON readers support it, and it is far from overflowing the stack.
const DEEPEST: usize = 56;

impl Mask {
    /// Rejects an expression that is nested too deeply.
    pub fn checked(mask: qkv::Mask) -> PyResult<Mask> {
        fn depth(mask: &qkv::Mask) -> usize {
            match mask {
                qkv::Mask::And(a, b) | qkv::Mask::Or(a, b) => 1 + depth(a).max(depth(b)),
                qkv::Mask::Not(a) => 1 + depth(a),
                _ => 0,
            }
        }
        match depth(&mask) {
            found if found > DEEPEST => {
                Err(value(format!("the mask is nested {found} deep, expected at most {DEEPEST}")))
            }
            _ => Ok(Mask(mask)),
        }
    }
}

word! { Mask {
    /// Every key.
    #[staticmethod]
    fn full() -> Mask {
        Mask(qkv::Mask::full())
    }

    /// Keys at or before the query's position.
    #[staticmethod]
    fn causal() -> Mask {
        Mask(qkv::Mask::causal())
    }

    /// Padding: keys before the length of their sequence, from the input `lengths [B]`.
    #[staticmethod]
    fn lengths() -> Mask {
        Mask(qkv::Mask::lengths())
    }

    /// Packed sequences: query and key are in the same segment, from the input `segments`.
    #[staticmethod]
    fn segments() -> Mask {
        Mask(qkv::Mask::segments())
    }

    /// Pairs for which the input `bits`, which broadcasts to `[B, Hq, N, M]`, is true.
    #[staticmethod]
    fn bits() -> Mask {
        Mask(qkv::Mask::bits())
    }

    /// Local attention: `p − left ≤ j ≤ p + right`.
    #[staticmethod]
    fn window(left: usize, right: usize) -> Mask {
        Mask(qkv::Mask::window(left, right))
    }

    /// A dilated window: every `step`-th key on both sides, `window/2` keys on each.
    #[staticmethod]
    fn dilated(window: usize, step: usize) -> Mask {
        Mask(qkv::Mask::dilated(window, step))
    }

    /// Sparse Transformers' strided pattern.
    #[staticmethod]
    fn strided(stride: usize) -> Mask {
        Mask(qkv::Mask::strided(stride))
    }

    /// Sparse Transformers' fixed pattern.
    #[staticmethod]
    fn fixed(stride: usize, summary: usize) -> Mask {
        Mask(qkv::Mask::fixed(stride, summary))
    }

    /// Longformer: a window of `window` keys, and global positions that see every key and are seen by every query.
    #[staticmethod]
    #[pyo3(signature = (window, globals=Vec::new()))]
    fn longformer(window: usize, globals: Vec<usize>) -> Mask {
        Mask(qkv::Mask::longformer(window, globals))
    }

    /// BigBird, in blocks of `block` tokens: a window of blocks, global blocks, and random ones.
    #[staticmethod]
    #[pyo3(signature = (*, block, window, globals, random, seed))]
    fn bigbird(block: usize, window: usize, globals: usize, random: usize, seed: u64) -> Mask {
        Mask(qkv::Mask::bigbird(qkv::BigBird { block, window, globals, random, seed }))
    }

    /// Block-sparse: the bit of `(⌊i/size⌋, ⌊j/size⌋)` in `seen`, rows of bools.
    #[staticmethod]
    fn blocks(size: usize, seen: Vec<Vec<bool>>) -> Mask {
        Mask(qkv::Mask::blocks(qkv::Blocks { size, seen }))
    }

    /// Reformer's hash buckets, from the input `buckets` (see `lsh_buckets`).
    #[staticmethod]
    #[pyo3(signature = (*, buckets, rounds, seed))]
    fn lsh(buckets: usize, rounds: usize, seed: u64) -> Mask {
        Mask(qkv::Mask::lsh(qkv::Lsh { buckets, rounds, seed }))
    }

    fn __and__(&self, other: &Bound<'_, Mask>) -> PyResult<Mask> {
        Mask::checked(self.0.clone() & other.get().0.clone())
    }

    fn __or__(&self, other: &Bound<'_, Mask>) -> PyResult<Mask> {
        Mask::checked(self.0.clone() | other.get().0.clone())
    }

    fn __invert__(&self) -> PyResult<Mask> {
        Mask::checked(!self.0.clone())
    }

    /// Whether each of `queries` queries may see each of `keys` keys: a matrix of bools for one sequence and head,
    /// computed from the definition of the mask, one pair at a time.
    #[pyo3(signature = (queries, keys, *, place=None, lengths=None, segments=None, bits=None, positions=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn matrix<'py>(
        &self,
        py: Python<'py>,
        queries: usize,
        keys: usize,
        place: Option<&Bound<'py, Place>>,
        lengths: Option<&Bound<'py, PyAny>>,
        segments: Option<&Bound<'py, PyAny>>,
        bits: Option<&Bound<'py, PyAny>>,
        positions: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let borrow = |name, given: Option<&Bound<'py, PyAny>>| given.map(|it| Borrowed::new(name, it)).transpose();
        let lengths = borrow("lengths", lengths)?.map(|it| lengths_of(&it)).transpose()?;
        let segments = segments.map(|both| {
            let (queries, keys) = pair("segments", both)?;
            let integers = |name, of: &Bound<'py, PyAny>| Borrowed::new(name, of)?.integers_i32();
            PyResult::Ok((integers("segments_q", &queries)?, integers("segments_k", &keys)?))
        }).transpose()?;
        let bits = borrow("bits", bits)?;
        let positions = borrow("positions", positions)?.map(|it| it.integers()).transpose()?;
        let mut data = MaskData::new(queries, keys);
        if let Some(place) = place {
            data = data.place(place.get().0);
        }
        if let Some(lengths) = &lengths {
            data = data.lengths(lengths);
        }
        if let Some((queries, keys)) = &segments {
            data = data.segments(queries, keys);
        }
        if let Some(bits) = &bits {
            data = data.bits(bits.bits()?);
        }
        if let Some(positions) = &positions {
            data = data.positions(positions);
        }
        let mut out = Tensor::<u8, 2>::zeros([queries, keys]).map_err(refused)?;
        for (at, to) in out.data_mut().iter_mut().enumerate() {
            *to = u8::from(self.0.allows(at / keys, at % keys, &data).map_err(refused)?);
        }
        let library = if py.import("numpy").is_ok() { Library::NumPy } else { Library::Other };
        library.array(py, bools(out))
    }
}}

/// A term that is added to every score: a function of the positions of query and key, or an input. Biases are summed
/// with `+`.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Bias(pub qkv::Bias);

impl Bias {
    fn checked(bias: qkv::Bias) -> PyResult<Bias> {
        Ok(Bias(bias))
    }

    /// The sum of two biases; an error if both have a relative table.
    pub fn sum(one: qkv::Bias, other: qkv::Bias) -> PyResult<qkv::Bias> {
        match (one.reach(), other.reach()) {
            (Some(_), Some(_)) => Err(value("a relative bias cannot go with another: a call has only one `table`")),
            _ => Ok(one + other),
        }
    }
}

word! { Bias {
    /// No bias.
    #[staticmethod]
    fn none() -> Bias {
        Bias(qkv::Bias::none())
    }

    /// ALiBi: `−slope · |p − j|`.
    #[staticmethod]
    fn alibi() -> Bias {
        Bias(qkv::Bias::alibi())
    }

    /// The input `bias`, which broadcasts to `[B, Hq, N, M]`, with its gradient.
    #[staticmethod]
    fn tensor() -> Bias {
        Bias(qkv::Bias::tensor())
    }

    /// The input `table [1 or Hq, 2·reach + 1]`, with its gradient.
    #[staticmethod]
    fn relative(reach: usize) -> Bias {
        Bias(qkv::Bias::relative(reach))
    }

    fn __add__(&self, other: &Bound<'_, Bias>) -> PyResult<Bias> {
        Ok(Bias(Bias::sum(self.0, other.get().0)?))
    }
}}

/// The similarity of a query and a key.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Score(pub qkv::Score);

impl Score {
    fn checked(score: qkv::Score) -> PyResult<Score> {
        Ok(Score(score))
    }
}

word! { Score {
    /// `q·k`.
    #[staticmethod]
    fn dot() -> Score {
        Score(qkv::Score::Dot)
    }

    /// `q·k / √d`, the Transformer's.
    #[staticmethod]
    fn scaled_dot() -> Score {
        Score(qkv::Score::ScaledDot)
    }

    /// `qᵀ W k`, Luong's; takes the input `w`.
    #[staticmethod]
    fn general() -> Score {
        Score(qkv::Score::General)
    }

    /// `vᵀ tanh(W₁q + W₂k)`, Bahdanau's; takes the inputs `w_q`, `w_k` and `v_score`.
    #[staticmethod]
    fn additive() -> Score {
        Score(qkv::Score::Additive)
    }

    /// `q·k / (‖q‖ ‖k‖)`.
    #[staticmethod]
    fn cosine() -> Score {
        Score(qkv::Score::Cosine)
    }

    /// `−‖q − k‖²`.
    #[staticmethod]
    fn distance() -> Score {
        Score(qkv::Score::Distance)
    }

    /// Linear attention with these features.
    #[staticmethod]
    fn linear(features: &Bound<'_, Features>) -> Score {
        Score(qkv::Score::Linear(features.get().0))
    }
}}

/// The feature map of linear attention.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Features(pub qkv::Features);

impl Features {
    fn checked(features: qkv::Features) -> PyResult<Features> {
        Ok(Features(features))
    }
}

word! { Features {
    /// `elu(x) + 1`.
    #[staticmethod]
    fn elu() -> Features {
        Features(qkv::Features::Elu)
    }

    /// `max(x, 0)`.
    #[staticmethod]
    fn relu() -> Features {
        Features(qkv::Features::Relu)
    }

    /// FAVOR+, the Performer's random features.
    #[staticmethod]
    fn favor(count: usize, seed: u64) -> Features {
        Features(qkv::Features::Favor { count, seed })
    }
}}

/// How scores become weights.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Select(pub qkv::Select);

impl Select {
    fn checked(select: qkv::Select) -> PyResult<Select> {
        Ok(Select(select))
    }
}

word! { Select {
    /// Softmax.
    #[staticmethod]
    fn soft() -> Select {
        Select(qkv::Select::Soft)
    }

    /// One key: the one with the largest score, or one drawn from the softmax.
    #[staticmethod]
    #[pyo3(signature = (*, sample=false, straight_through=false))]
    fn hard(sample: bool, straight_through: bool) -> Select {
        Select(qkv::Select::Hard(qkv::Choice { sample, straight_through }))
    }

    /// Softmax over the `k` keys with the largest scores.
    #[staticmethod]
    fn top_k(k: usize) -> Select {
        Select(qkv::Select::TopK(k))
    }

    /// Sparsemax.
    #[staticmethod]
    fn sparsemax() -> Select {
        Select(qkv::Select::Sparsemax)
    }
}}

/// The position of the queries relative to the keys.
#[pyclass(frozen, module = "qkv")]
#[derive(Clone)]
pub struct Place(pub qkv::Place);

impl Place {
    fn checked(place: qkv::Place) -> PyResult<Place> {
        Ok(Place(place))
    }
}

word! { Place {
    /// The first query is at the first key.
    #[staticmethod]
    fn start() -> Place {
        Place(qkv::Place::Start)
    }

    /// The last query is at the last key.
    #[staticmethod]
    fn end() -> Place {
        Place(qkv::Place::End)
    }

    /// Query `i` is at key `i + offset`.
    #[staticmethod]
    fn offset(offset: i64) -> Place {
        Place(qkv::Place::Offset(offset))
    }

    /// The position of each query is given by the input `positions [B, N]`.
    #[staticmethod]
    fn given() -> Place {
        Place(qkv::Place::Given)
    }
}}

/// The hash buckets of rows `x [B, H, L, D]` for `Mask.lsh(buckets=…, rounds=…, seed=…)`: `[B, H, L, rounds]`. Queries
/// and keys are hashed with the same random numbers.
#[pyfunction]
#[pyo3(signature = (mask, x))]
pub fn lsh_buckets<'py>(
    py: Python<'py>,
    mask: &Bound<'py, Mask>,
    x: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let lsh = mask.get().0.lsh_buckets().ok_or_else(|| value("the mask has no hash buckets"))?;
    let (library, borrowed) = (Library::of("x", x)?, Borrowed::new("x", x)?);
    let hashed = crate::dtype::of_type!(borrowed.dtype(), "x", T => {
        let view = borrowed.view::<T>()?;
        py.detach(|| crate::pool::run_inside(crate::pool::threads(), || lsh.hash(view)))
    });
    library.array(py, crate::array::Array::new(hashed.map_err(refused)?, borrowed.shape().len()))
}

/// The segment of every token, from cumulative lengths: `[0, 4, 9]` gives four tokens in segment 0 and five in segment
/// 1.
#[pyfunction]
pub fn segments_of<'py>(py: Python<'py>, cumulative: Vec<usize>) -> PyResult<Bound<'py, PyAny>> {
    let segments = qkv::segments_of(&cumulative).map_err(refused)?;
    let len = segments.len();
    let library = if py.import("numpy").is_ok() { Library::NumPy } else { Library::Other };
    library.array(py, crate::array::Array::new(Tensor::new(segments, [len]).map_err(refused)?, 1))
}

/// The ALiBi slope of each head.
#[pyfunction]
pub fn alibi_slopes(py: Python<'_>, heads: usize) -> PyResult<Bound<'_, PyTuple>> {
    if heads > 1 << 16 {
        return Err(kind(format!("`heads` is {heads}, expected at most {}", 1 << 16)));
    }
    PyTuple::new(py, qkv::alibi_slopes(heads))
}
