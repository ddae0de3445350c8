//! Holds an engine to the definition in `f64`.
//!
//! The error of every element is measured in [spreads](crate::bound): the root of the sum of squares of the largest
//! effects that its roundings can have. Two limits apply to each result:
//!
//! - one element is at most [`ELEMENT_LIMIT`] spreads off;
//! - the root mean square over the result is at most 1 spread. A systematic error too small for one element shows here.
//!
//! A rounding error is uniform within ± its largest effect at worst, so its standard deviation is 1/√3 of it. The
//! limits are therefore at 5.2 and 1.7 standard deviations of an engine that makes all the roundings it is entitled to.
//! The second is wider for few rows, within which errors are correlated.

use crate::Engine;
use crate::bound::{self, Roundoff};
use crate::case::{Case, Data};
use qkv::reference::{Forward, Reference};
use qkv::{Element, Gradients, Output, Tensor};

/// Spreads that one element may be off by.
pub const ELEMENT_LIMIT: f64 = 3.0;

/// One result of a run, flattened.
type Named = (&'static str, Vec<f64>);

/// How far one result is from the definition, in spreads of its elements.
#[derive(Clone, Debug)]
pub struct Distance {
    /// The result: `out`, `lse`, `d_q`, …
    pub name: &'static str,
    /// The largest distance of an element.
    pub largest: f64,
    /// Root mean square over all elements.
    pub rms: f64,
    /// The limit of the root mean square.
    pub rms_limit: f64,
    /// The element that is furthest off: index, value, and value of the definition.
    pub worst: (usize, f64, f64),
}

impl Distance {
    /// Whether the result is within its bound.
    pub fn holds(&self) -> bool {
        self.largest <= ELEMENT_LIMIT && self.rms <= self.rms_limit
    }
}

/// Runs a case and describes every result that is out of bounds. With `QKV_SPREADS=1` in the environment the distances
/// of all results are printed.
pub fn check<T: Element>(engine: &impl Engine, case: &Case) -> Vec<String> {
    let distances = match distances::<T>(engine, case) {
        Ok(distances) => distances,
        Err(error) => return vec![format!("{} {}: {error}", case.name, T::NAME)],
    };
    if std::env::var_os("QKV_SPREADS").is_some() {
        for Distance { name, largest, rms, rms_limit, .. } in &distances {
            println!("spreads {} {name} {largest:.3} {rms:.3} of {rms_limit:.3} | {}", T::NAME, case.name);
        }
    }
    let broken = distances.iter().filter(|distance| !distance.holds());
    let described = broken.map(|Distance { name, largest, rms, rms_limit, worst: (at, got, truth) }| {
        format!(
            "{} {} {name}: worst element {largest:.2} spreads off (limit {ELEMENT_LIMIT}), rms {rms:.2} (limit {rms_limit:.2}); \
             [{at}] is {got:e}, should be {truth:e}",
            case.name,
            T::NAME,
        )
    });
    described.collect()
}

/// How far every result of a case is from the definition.
///
/// # Errors
/// Those of the engine.
pub fn distances<T: Element>(engine: &impl Engine, case: &Case) -> qkv::Result<Vec<Distance>> {
    let data = case.data::<T>();
    let got = run(engine, case, &data)?;
    let round = |x| T::of_f64(x).to_f64();
    compared(case, &data.wide(), Roundoff::of::<T>(), engine.sums_in_fixed_point::<T>(), round, &got)
}

/// The results of the definition for a case with this data, forward and backward, in `f64`.
///
/// # Errors
/// Those of the definition.
pub fn definition(case: &Case, data: &Data<f64>) -> qkv::Result<(Forward<f64>, Gradients<f64>)> {
    let reference = Reference::<f64>::exact();
    let forward = reference.forward(&case.attention, data.inputs())?;
    let grad = reference.backward(&case.attention, data.inputs(), &forward, data.upstream())?;
    Ok((forward, grad))
}

/// Compares results with the definition. Nothing here depends on the engine or on the type of its tensors, so test
/// binaries share one instance.
fn compared(
    case: &Case,
    data: &Data<f64>,
    unit: Roundoff,
    in_fixed_point: bool,
    round: fn(f64) -> f64,
    got: &[Named],
) -> qkv::Result<Vec<Distance>> {
    let (forward, grads) = definition(case, data)?;
    let grads = gradients(grads);
    let mut spreads = bound::spreads(case, data, unit, &forward, &grads);
    if in_fixed_point && let Some((_, d_q)) = spreads.iter_mut().find(|(name, _)| *name == "d_q") {
        bound::add_fixed_point(case, data, &forward, d_q);
    }
    let mut truth = vec![
        ("out", wide(forward.output.values.data())),
        ("lse", wide(lse_or_threshold(&forward.output).data())),
        ("entropy", wide(forward.output.entropy.as_ref().filter(|_| case.attention.entropy).map_or(&[], |e| e.data()))),
        ("log_prob", wide(forward.output.log_prob.as_ref().map_or(&[], |p| p.data()))),
        ("weights", wide(forward.weights.data())),
    ];
    truth.extend(grads);
    assert_eq!(got.len(), truth.len(), "{}: results", case.name);
    let compared = got.iter().zip(&truth).map(|((name, got), (of, truth))| {
        assert_eq!((name, got.len()), (of, truth.len()), "{}: results and their length", case.name);
        let (_, spread) = spreads.iter().find(|(of, _)| of == name).expect("every result has a spread");
        distance(name, got, truth, spread, rows(case, name, truth.len()), round)
    });
    Ok(compared.collect())
}

/// The number of rows with independent errors.
fn rows(case: &Case, name: &str, len: usize) -> usize {
    let sizes = case.sizes;
    match name {
        "out" | "lse" | "entropy" | "log_prob" | "weights" | "d_q" | "d_center" => sizes.b * sizes.hq * sizes.n,
        "d_k" | "d_v" => sizes.b * sizes.hk * sizes.m,
        _ => len,
    }
}

/// `round` converts a number to the type of the engine's tensors and back.
fn distance(
    name: &'static str,
    got: &[f64],
    truth: &[f64],
    spread: &[f64],
    rows: usize,
    round: fn(f64) -> f64,
) -> Distance {
    let (mut largest, mut worst, mut squares) = (0.0f64, (0, 0.0, 0.0), 0.0);
    for (at, ((&got, &truth), &spread)) in got.iter().zip(truth).zip(spread).enumerate() {
        // Beyond the range of the type both are infinite.
        let same = got == truth || got.is_nan() && truth.is_nan() || got.is_infinite() && got == round(truth);
        let off = if same { 0.0 } else { (got - truth).abs() / spread };
        let off = if off.is_nan() { f64::INFINITY } else { off };
        squares += off * off;
        if off > largest {
            (largest, worst) = (off, (at, got, truth));
        }
    }
    let rms = (squares / got.len().max(1) as f64).sqrt();
    let rms_limit = 1.0 + (ELEMENT_LIMIT - 1.0) / (rows.max(1) as f64).sqrt();
    Distance { name, largest, rms, rms_limit, worst }
}

fn run<T: Element>(engine: &impl Engine, case: &Case, data: &Data<T>) -> qkv::Result<Vec<Named>> {
    let out = engine.forward(&case.attention, data.inputs())?;
    let mut got = vec![
        ("out", wide(out.values.data())),
        ("lse", wide(lse_or_threshold(&out).data())),
        ("entropy", wide(out.entropy.as_ref().map_or(&[], |e| e.data()))),
        ("log_prob", wide(out.log_prob.as_ref().map_or(&[], |p| p.data()))),
    ];
    let mut weights = Vec::new();
    for b in 0..case.sizes.b {
        for h in 0..case.sizes.hq {
            weights.extend(wide(engine.weights(&case.attention, data.inputs(), &out, b, h)?.data()));
        }
    }
    got.push(("weights", weights));
    got.extend(gradients(engine.backward(&case.attention, data.inputs(), &out, data.upstream())?));
    Ok(got)
}

fn gradients<T: qkv_simd::Element>(grad: Gradients<T>) -> Vec<Named> {
    let mut all = vec![("d_q", wide(grad.q.data())), ("d_k", wide(grad.k.data())), ("d_v", wide(grad.v.data()))];
    let tensors = [
        ("d_w", &grad.w),
        ("d_w_q", &grad.w_q),
        ("d_w_k", &grad.w_k),
        ("d_bias", &grad.bias),
        ("d_table", &grad.table),
    ];
    all.extend(tensors.into_iter().filter_map(|(name, t)| t.as_ref().map(|t| (name, wide(t.data())))));
    let vectors =
        [("d_v_score", &grad.v_score), ("d_scale", &grad.scale), ("d_sinks", &grad.sinks), ("d_center", &grad.center)];
    all.extend(vectors.into_iter().filter_map(|(name, v)| v.as_ref().map(|v| (name, wide(v)))));
    all
}

/// The one number per row that weights are recomputed from: the log-sum-exp, or sparsemax's threshold.
fn lse_or_threshold<T: qkv_simd::Element>(out: &Output<T>) -> &Tensor<T::Acc, 3> {
    out.threshold.as_ref().unwrap_or(&out.lse)
}

fn wide<T: qkv_simd::Element>(data: &[T]) -> Vec<f64> {
    data.iter().map(|x| x.to_f64()).collect()
}
