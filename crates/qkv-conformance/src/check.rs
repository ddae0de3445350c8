//! Holds an engine to the definition.

use crate::Engine;
use crate::case::{Case, Data, Sizes};
use qkv::reference::Reference;
use qkv::{Bias, Element, Gradients, Output, Tensor, Upstream};

/// How many ε of the largest true value are added to twice the plain formula's own error.
const FEW: f64 = 16.0;

/// One result of a run, flattened.
type Named = (&'static str, Vec<f64>);

/// Runs a case and returns every way in which it breaks the bound.
pub fn check<T: Element>(engine: &impl Engine, case: &Case) -> Vec<String> {
    let data = case.data::<T>();
    let got = match run(engine, case, &data) {
        Ok(got) => got,
        Err(error) => return vec![format!("{} {}: {error}", case.name, T::NAME)],
    };
    let truth = defined::<T, f64>(&Reference::exact(), case, &data);
    // In f64 the plain formula is the truth itself; its error is estimated from that of f32 by the two ε, and doubled,
    // since an estimate of a largest error can be off by that much either way.
    let plain = if T::NAME == "f64" {
        let ratio = 2.0 * f64::EPSILON / f64::from(f32::EPSILON);
        plain_errors::<f32>(case).into_iter().map(|error| error * ratio).collect()
    } else {
        plain_errors::<T>(case)
    };
    assert_eq!((got.len(), got.len()), (truth.len(), plain.len()), "{}: results and truths", case.name);
    let mut broken = Vec::new();
    for (((name, got), (_, truth)), theirs) in got.iter().zip(&truth).zip(plain) {
        assert_eq!(got.len(), truth.len(), "{} {name}: length", case.name);
        let largest = truth.iter().filter(|x| x.is_finite()).fold(0.0f64, |a, b| a.max(b.abs()));
        let mine = error(got, truth);
        let mut bound = 2.0 * theirs + FEW * epsilon::<T>(name) * largest;
        if matches!(*name, "d_bias" | "d_table") && case.shifts_whole_rows() {
            // The truth is 0: what counts is how large the numbers are that cancel.
            bound += epsilon::<T>(name) * score_gradients(case, &data) / truth.len() as f64;
        }
        if mine > bound {
            let apart = |(x, y): &(f64, f64)| (x - y).abs();
            let pairs = got.iter().copied().zip(truth.iter().copied()).enumerate();
            let (at, (x, y)) = pairs.max_by(|a, b| apart(&a.1).total_cmp(&apart(&b.1))).expect("something is off");
            broken.push(format!(
                "{} {} {name}: off by {mine:.3e}, bound {bound:.3e} (plain formula {theirs:.3e}, largest {largest:.3e}); at {at}: {x:e} for {y:e}",
                case.name,
                T::NAME,
            ));
        }
    }
    broken
}

/// The largest distance between two results; equal infinities and NaNs are no distance.
fn error(of: &[f64], truth: &[f64]) -> f64 {
    let apart =
        of.iter().zip(truth).map(|(&x, &y)| if x == y || x.is_nan() && y.is_nan() { 0.0 } else { (x - y).abs() });
    apart.fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) })
}

/// Log-sum-exp, entropy and weights come in the type of sums; all else is rounded to the tensor's.
fn epsilon<T: Element>(name: &str) -> f64 {
    if matches!(name, "lse" | "entropy" | "log_prob" | "weights") {
        <T::Acc as qkv_simd::Element>::EPSILON
    } else {
        T::EPSILON
    }
}

/// The sum of the sizes of all gradients of scores: those of a bias that has all four axes.
fn score_gradients<T: Element>(case: &Case, data: &Data<T>) -> f64 {
    let Sizes { b, hq, n, m, .. } = case.sizes;
    let attention = case.attention.clone().bias(Bias::tensor());
    let bias = Tensor::from_fn([b, hq, n, m], |[b, h, i, j]| match &data.bias {
        Some(bias) => {
            let [bb, bh, bn, bm] = bias.shape();
            bias[[b % bb, h % bh, i % bn, j % bm]]
        }
        None => T::of_f64(0.0),
    });
    let inputs = data.inputs().bias(&bias);
    let reference = Reference::<f64>::exact();
    let forward = reference.forward(&attention, inputs).expect("a case is well formed");
    let grad = reference.backward(&attention, inputs, &forward, data.upstream()).expect("a case is well formed");
    grad.bias.expect("it was given").data().iter().map(|x| x.abs()).sum()
}

/// The error of the plain formula in a type, for every result of a case.
fn plain_errors<T: Element>(case: &Case) -> Vec<f64> {
    let data = case.data::<T>();
    let truth = defined::<T, f64>(&Reference::exact(), case, &data);
    let plain = defined::<T, T::Acc>(&Reference::rounding_to::<T>(), case, &data);
    let errors = plain.iter().zip(&truth).map(|((name, plain), (_, truth))| {
        let kept = epsilon::<T>(name) == <T::Acc as qkv_simd::Element>::EPSILON;
        let rounded = plain.iter().map(|&x| if kept { x } else { T::of_f64(x).to_f64() });
        error(&rounded.collect::<Vec<f64>>(), truth)
    });
    errors.collect()
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

fn defined<T: Element, F: qkv::Real>(reference: &Reference<F>, case: &Case, data: &Data<T>) -> Vec<Named> {
    let forward = reference.forward(&case.attention, data.inputs()).expect("a case is well formed");
    let mut got = vec![
        ("out", wide(forward.output.values.data())),
        ("lse", wide(lse_or_threshold(&forward.output).data())),
        ("entropy", wide(forward.output.entropy.as_ref().filter(|_| case.attention.entropy).map_or(&[], |e| e.data()))),
        ("log_prob", wide(forward.output.log_prob.as_ref().map_or(&[], |p| p.data()))),
        ("weights", wide(forward.weights.data())),
    ];
    let upstream: Upstream<'_, T> = data.upstream();
    got.extend(gradients(
        reference.backward(&case.attention, data.inputs(), &forward, upstream).expect("a case is well formed"),
    ));
    got
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
