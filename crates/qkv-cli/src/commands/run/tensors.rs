//! The input tensors of a call: read from a file and handed to the library as its inputs. The library checks that
//! shapes agree; this module checks only what the library cannot see, because it takes flat slices or uses another
//! name.

use super::source::{RawTensor, Source};
use crate::dtype::{IntegerError, Precision, floats, integers};
use crate::failure::Failure;
use qkv::{Inputs, Upstream, View, ViewError};
use safetensors::Dtype;
use std::ops::RangeInclusive;

/// A tensor, with the axes that it has in the file.
#[derive(Clone, Debug)]
pub(crate) struct Array<T> {
    pub shape: Vec<usize>,
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// A view of four axes, with leading axes of 1.
    pub fn view(&self) -> Result<View<'_, T>, ViewError> {
        let mut shape = [1; 4];
        shape[4 - self.shape.len()..].copy_from_slice(&self.shape);
        View::new(&self.data, shape)
    }

    /// The shape of a tensor of four axes.
    pub fn axes(&self) -> [usize; 4] {
        self.shape[..].try_into().expect("read with four axes")
    }
}

impl<T: qkv_simd::Element> Array<T> {
    fn widened(&self) -> Array<f64> {
        Array { shape: self.shape.clone(), data: self.data.iter().map(|x| x.to_f64()).collect() }
    }
}

/// The segments of queries, `[B, N]`, and of keys, `[B, M]`.
pub(crate) type Segments = (Vec<i32>, Vec<i32>);

/// Names and shapes, inputs first.
pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// The input tensors.
#[derive(Clone, Debug)]
pub(crate) struct InputTensors<T: qkv_simd::Element> {
    pub q: Array<T>,
    pub k: Array<T>,
    pub v: Array<T>,
    pub d_out: Option<Array<T>>,
    pub d_lse: Option<Array<T::Acc>>,
    pub d_log_prob: Option<Array<T::Acc>>,
    pub bias: Option<Array<T>>,
    pub table: Option<Array<T>>,
    pub scale: Option<Array<T>>,
    pub sinks: Option<Array<T>>,
    pub center: Option<Array<T>>,
    pub w: Option<Array<T>>,
    pub w_q: Option<Array<T>>,
    pub w_k: Option<Array<T>>,
    pub v_score: Option<Array<T>>,
    pub mask: Option<Array<u8>>,
    pub key_lengths: Option<Vec<usize>>,
    pub segments: Option<Segments>,
}

impl<T: qkv_simd::Element> InputTensors<T> {
    /// Only queries, keys and values.
    pub fn new(q: Array<T>, k: Array<T>, v: Array<T>) -> InputTensors<T> {
        InputTensors {
            q,
            k,
            v,
            d_out: None,
            d_lse: None,
            d_log_prob: None,
            bias: None,
            table: None,
            scale: None,
            sinks: None,
            center: None,
            w: None,
            w_q: None,
            w_k: None,
            v_score: None,
            mask: None,
            key_lengths: None,
            segments: None,
        }
    }

    /// Reads every tensor that `qkv run` knows.
    pub fn read(source: &mut Source) -> Result<InputTensors<T>, Failure> {
        let [q, k, v] = [required(source, "q")?, required(source, "k")?, required(source, "v")?];
        let ([batch, heads, n, _], [_, _, m, _]) = (q.axes(), k.axes());
        let rows = [batch, heads, n];
        Ok(InputTensors {
            d_out: float(source, "d_out", 4..=4)?,
            d_lse: upstream(source, "d_lse", rows)?,
            d_log_prob: upstream(source, "d_log_prob", rows)?,
            bias: float(source, "bias", 1..=4)?,
            table: table(source)?,
            scale: float(source, "scale", 0..=1)?,
            sinks: float(source, "sinks", 1..=1)?,
            center: per_query(source, "center", rows)?,
            w: float(source, "w", 2..=3)?,
            w_q: float(source, "w_q", 2..=3)?,
            w_k: float(source, "w_k", 2..=3)?,
            v_score: float(source, "v_score", 1..=1)?,
            mask: bits(source, "mask", 1..=4)?,
            key_lengths: key_lengths(source, batch, m)?,
            segments: segments(source, batch, n, m)?,
            ..InputTensors::new(q, k, v)
        })
    }

    /// The same numbers in f64.
    pub fn widened(&self) -> InputTensors<f64> {
        fn wide<T: qkv_simd::Element>(array: &Option<Array<T>>) -> Option<Array<f64>> {
            array.as_ref().map(Array::widened)
        }
        InputTensors {
            d_out: wide(&self.d_out),
            d_lse: wide(&self.d_lse),
            d_log_prob: wide(&self.d_log_prob),
            bias: wide(&self.bias),
            table: wide(&self.table),
            scale: wide(&self.scale),
            sinks: wide(&self.sinks),
            center: wide(&self.center),
            w: wide(&self.w),
            w_q: wide(&self.w_q),
            w_k: wide(&self.w_k),
            v_score: wide(&self.v_score),
            mask: self.mask.clone(),
            key_lengths: self.key_lengths.clone(),
            segments: self.segments.clone(),
            ..InputTensors::new(self.q.widened(), self.k.widened(), self.v.widened())
        }
    }

    /// The names and shapes of the tensors that are present.
    pub fn shapes(&self) -> Shapes {
        let [batch, _, n, _] = self.q.axes();
        let m = self.k.axes()[2];
        let integers = [
            ("mask", self.mask.as_ref().map(|mask| mask.shape.clone())),
            ("key_lengths", self.key_lengths.as_ref().map(|_| vec![batch])),
            ("segments_q", self.segments.as_ref().map(|_| vec![batch, n])),
            ("segments_k", self.segments.as_ref().map(|_| vec![batch, m])),
        ];
        let sums = [("d_lse", &self.d_lse), ("d_log_prob", &self.d_log_prob)];
        let sums = sums.map(|(name, array)| (name, array.as_ref().map(|array| array.shape.clone())));
        let floats = [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("d_out", self.d_out.as_ref()),
            ("bias", self.bias.as_ref()),
            ("table", self.table.as_ref()),
            ("scale", self.scale.as_ref()),
            ("sinks", self.sinks.as_ref()),
            ("center", self.center.as_ref()),
            ("w", self.w.as_ref()),
            ("w_q", self.w_q.as_ref()),
            ("w_k", self.w_k.as_ref()),
            ("v_score", self.v_score.as_ref()),
        ];
        let floats = floats.into_iter().map(|(name, array)| (name, array.map(|array| array.shape.clone())));
        floats.chain(sums).chain(integers).filter_map(|(name, shape)| Some((name.to_string(), shape?))).collect()
    }

    /// Converts them to the library's inputs.
    pub fn inputs(&self) -> Result<Inputs<'_, T>, qkv::Error> {
        let mut inputs = Inputs::new(self.q.view()?, self.k.view()?, self.v.view()?);
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(bias.view()?);
        }
        if let Some(table) = &self.table {
            inputs = inputs.table(table.view()?);
        }
        if let Some(scale) = &self.scale {
            inputs = inputs.scale(&scale.data);
        }
        if let Some(sinks) = &self.sinks {
            inputs = inputs.sinks(&sinks.data);
        }
        if let Some(center) = &self.center {
            inputs = inputs.center(&center.data);
        }
        if let Some(w) = &self.w {
            inputs = inputs.w(w.view()?);
        }
        if let Some(w_q) = &self.w_q {
            inputs = inputs.w_q(w_q.view()?);
        }
        if let Some(w_k) = &self.w_k {
            inputs = inputs.w_k(w_k.view()?);
        }
        if let Some(v_score) = &self.v_score {
            inputs = inputs.v_score(&v_score.data);
        }
        if let Some(mask) = &self.mask {
            inputs = inputs.bits(mask.view()?);
        }
        if let Some(lengths) = &self.key_lengths {
            inputs = inputs.lengths(lengths);
        }
        if let Some((queries, keys)) = &self.segments {
            inputs = inputs.segments(queries, keys);
        }
        Ok(inputs)
    }

    /// The upstream gradients, if there are any.
    pub fn upstream(&self) -> Result<Option<Upstream<'_, T>>, qkv::Error> {
        let Some(d_out) = &self.d_out else { return Ok(None) };
        let mut upstream = Upstream::new(d_out.view()?);
        if let Some(d_lse) = &self.d_lse {
            upstream = upstream.lse(&d_lse.data);
        }
        if let Some(d_log_prob) = &self.d_log_prob {
            upstream = upstream.log_prob(&d_log_prob.data);
        }
        Ok(Some(upstream))
    }
}

/// Reads a tensor, if its number of axes is within range and its shape addressable.
fn raw(source: &mut Source, name: &str, axes: RangeInclusive<usize>) -> Result<Option<RawTensor>, Failure> {
    if let Some(info) = source.info(name) {
        let (found, (least, most)) = (info.shape.len(), axes.clone().into_inner());
        if !axes.contains(&found) {
            let expected = if least == most { format!("{least}") } else { format!("{least} to {most}") };
            return Err(source.refuse(name, format!("has shape {:?}, expected {expected} axes", info.shape)));
        }
        // An empty tensor may claim any shape; its strides have to fit a machine word all the same.
        let reach = info.shape.iter().try_fold(1isize, |reach, &axis| reach.checked_mul(axis.max(1).try_into().ok()?));
        if reach.is_none() {
            return Err(source.refuse(name, format!("has shape {:?}, which is too large", info.shape)));
        }
    }
    source.read(name)
}

fn float<T: qkv_simd::Element>(
    source: &mut Source,
    name: &str,
    axes: RangeInclusive<usize>,
) -> Result<Option<Array<T>>, Failure> {
    let Some(RawTensor { dtype, shape, bytes }) = raw(source, name, axes)? else { return Ok(None) };
    match floats(dtype, &bytes) {
        Some(data) => Ok(Some(Array { shape, data })),
        None => Err(source.refuse(name, format!("is of type {dtype}, expected F32, F64, BF16 or F16"))),
    }
}

fn required<T: qkv_simd::Element>(source: &mut Source, name: &str) -> Result<Array<T>, Failure> {
    float(source, name, 4..=4)?.ok_or_else(|| missing(source, name))
}

/// One number per query. The library takes a flat slice and would not notice `[B, N, Hq]`.
fn per_query<T: qkv_simd::Element>(
    source: &mut Source,
    name: &str,
    rows: [usize; 3],
) -> Result<Option<Array<T>>, Failure> {
    let found = float(source, name, 3..=3)?;
    match &found {
        Some(Array { shape, .. }) if shape[..] != rows => {
            Err(source.refuse(name, format!("has shape {shape:?}, expected {rows:?}, as `q` has")))
        }
        _ => Ok(found),
    }
}

/// An upstream gradient beside `d_out`.
fn upstream<T: qkv_simd::Element>(
    source: &mut Source,
    name: &str,
    rows: [usize; 3],
) -> Result<Option<Array<T>>, Failure> {
    let found = per_query(source, name, rows)?;
    if found.is_some() && source.info("d_out").is_none() {
        return Err(source.refuse("d_out", format!("is missing: `{name}` needs it")));
    }
    Ok(found)
}

/// The table of a relative bias; its reach R follows from its shape.
fn table<T: qkv_simd::Element>(source: &mut Source) -> Result<Option<Array<T>>, Failure> {
    let table = float(source, "table", 2..=2)?;
    match &table {
        Some(Array { shape, .. }) if shape[1] % 2 == 0 => {
            Err(source.refuse("table", format!("has shape {shape:?}, expected an odd number of columns, 2R + 1")))
        }
        _ => Ok(table),
    }
}

fn missing(source: &Source, name: &str) -> Failure {
    let names: Vec<String> = source.names().iter().take(12).map(|name| format!("`{name}`")).collect();
    let there = if names.is_empty() { "no tensors".into() } else { names.join(", ") };
    source.refuse(name, "is missing").hint(format!("the file holds {there}"))
}

fn bits(source: &mut Source, name: &str, axes: RangeInclusive<usize>) -> Result<Option<Array<u8>>, Failure> {
    match raw(source, name, axes)? {
        None => Ok(None),
        Some(RawTensor { dtype: Dtype::BOOL | Dtype::U8, shape, bytes }) => Ok(Some(Array { shape, data: bytes })),
        Some(RawTensor { dtype, .. }) => Err(source
            .refuse(name, format!("is of type {dtype}, expected BOOL or U8"))
            .hint("a float mask that is added to the scores is called `bias`")),
    }
}

/// Integers of one shape. The library takes a flat slice and would not notice `[N, B]`.
fn whole<I: TryFrom<i128>>(
    source: &mut Source,
    name: &str,
    expected: &[usize],
    range: &str,
) -> Result<Option<Vec<I>>, Failure> {
    let Some(RawTensor { dtype, shape, bytes }) = raw(source, name, expected.len()..=expected.len())? else {
        return Ok(None);
    };
    if shape != expected {
        return Err(source.refuse(name, format!("has shape {shape:?}, expected {expected:?}, as `q` and `k` have")));
    }
    integers(dtype, &bytes).map(Some).map_err(|error| match error {
        IntegerError::Type => source.refuse(name, format!("is of type {dtype}, expected integers")),
        IntegerError::Range(found) => source.refuse(name, format!("holds {found}, expected {range}")),
    })
}

fn key_lengths(source: &mut Source, batch: usize, m: usize) -> Result<Option<Vec<usize>>, Failure> {
    let range = format!("lengths from 0 to {m}, the number of keys");
    let lengths = whole::<usize>(source, "key_lengths", &[batch], &range)?;
    match lengths.iter().flatten().find(|&&length| length > m) {
        Some(length) => Err(source.refuse("key_lengths", format!("holds {length}, expected {range}"))),
        None => Ok(lengths),
    }
}

fn segments(source: &mut Source, batch: usize, n: usize, m: usize) -> Result<Option<Segments>, Failure> {
    let range = "segments that fit 32 bits";
    let queries = whole(source, "segments_q", &[batch, n], range)?;
    let keys = whole(source, "segments_k", &[batch, m], range)?;
    match (queries, keys) {
        (Some(queries), Some(keys)) => Ok(Some((queries, keys))),
        (None, None) => Ok(None),
        (Some(_), None) => Err(source.refuse("segments_k", "is missing: `segments_q` needs it")),
        (None, Some(_)) => Err(source.refuse("segments_q", "is missing: `segments_k` needs it")),
    }
}

/// The type of the queries.
pub(crate) fn precision_of(source: &Source) -> Result<Precision, Failure> {
    let q = source.info("q").ok_or_else(|| missing(source, "q"))?;
    Precision::of(q.dtype)
        .ok_or_else(|| source.refuse("q", format!("is of type {}, expected F32, F64, BF16 or F16", q.dtype)))
}
