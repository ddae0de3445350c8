//! Tests on the CPU of the fixed point in which Hopper's kernels sum dQ. The scale of a row comes from the kernels' own
//! header, compiled as C++; the kernels' roundings, from the gradients of scores on, are replayed and compared with the
//! definition.

use super::schedule_tests::library;
use half::{bf16, f16};
use libloading::Library;
use qkv::reference::Forward;
use qkv::{Attention, Element, Mask, Place, Tensor};
use qkv_conformance::bound;
use qkv_conformance::case::{Case, Data, Extras, Sizes};
use qkv_conformance::check::{self, ELEMENT_LIMIT};

/// Keys per tile at width 256: each tile adds its rounded part.
const KEYS: usize = 64;
/// Rows that see more keys are skipped: they take long, and their gradients sum so many terms that none is small.
const FEW: usize = 12;

type RowScale = unsafe extern "C" fn(f32, i32, f32, f32, f32, f32, f32) -> f32;

/// d_q as the kernels compute it from exact weights: the row term from the rounded output, the gradients of scores
/// rounded, and the partial sums in fixed point. NaN for rows that see many keys.
fn sum_of_parts<T: Element<Acc = f32>>(
    case: &Case,
    data: &Data<T>,
    truth: &Forward<f64>,
    library: &Library,
) -> Vec<f64> {
    let Sizes { b, hq, hk, n, m, d, dv, .. } = case.sizes;
    // SAFETY: the header's function has this signature.
    let row_scale = unsafe { library.get::<RowScale>(b"test_dq_scale\0") }.unwrap();
    let scale = 1.0 / (d as f64).sqrt();
    let row = |x: &Tensor<T, 4>, b, h, i, width: usize| -> Vec<f32> {
        (0..width).map(|c| x[[b, h, i, c]].to_f64() as f32).collect()
    };
    let mut d_q = Vec::with_capacity(b * hq * n * d);
    for (b, h) in (0..b).flat_map(|b| (0..hq).map(move |h| (b, h))) {
        let kh = h / (hq / hk);
        let keys: Vec<Vec<f32>> = (0..m).map(|j| row(&data.k, b, kh, j, d)).collect();
        let values: Vec<Vec<f32>> = (0..m).map(|j| row(&data.v, b, kh, j, dv)).collect();
        let most = |rows: &[Vec<f32>]| rows.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let (key, value) = (most(&keys), most(&values));
        for i in 0..n {
            let lse = truth.output.lse[[b, h, i]];
            let seen: Vec<usize> = (0..m).filter(|&j| truth.scores[[b, h, i, j]] != f64::NEG_INFINITY).collect();
            if seen.len() > FEW {
                d_q.extend(std::iter::repeat_n(f64::NAN, d));
                continue;
            }
            let d_out = row(&data.d_out, b, h, i, dv);
            let d_lse = data.d_lse.as_ref().map_or(0.0, |d_lse| d_lse[(b * hq + h) * n + i]);
            let out = (0..dv).map(|x| T::of_f64(truth.output.values[[b, h, i, x]]).to_f64() as f32);
            let delta: f32 = out.zip(&d_out).map(|(out, d_out)| out * d_out).sum();
            let square = d_out.iter().map(|x| x * x).sum();
            // SAFETY: likewise.
            let fixed = unsafe { row_scale(square, dv as i32, 1.0, key, value, delta, d_lse) };
            let mut sums = vec![0i64; d];
            for tile in (0..m).step_by(KEYS) {
                let mut part = vec![0.0f32; d];
                for &j in seen.iter().filter(|&&j| j / KEYS == tile / KEYS) {
                    let weight = (truth.scores[[b, h, i, j]] - lse).exp() as f32;
                    let d_weight: f32 = d_out.iter().zip(&values[j]).map(|(a, b)| a * b).sum();
                    let d_score = weight * (d_weight - (delta - d_lse));
                    let d_score = T::of_f64(f64::from(d_score)).to_f64() as f32;
                    part.iter_mut().zip(&keys[j]).for_each(|(sum, key)| *sum += d_score * key);
                }
                for (sum, part) in sums.iter_mut().zip(part) {
                    let rounded = (part * fixed).round_ties_even() as i64;
                    assert!(rounded.abs() < 1 << 31, "{}: a part beyond 32 bits", case.name);
                    *sum += rounded;
                }
            }
            for sum in sums {
                assert!(sum.abs() < 1 << 31, "{}: a sum beyond 32 bits", case.name);
                d_q.push(T::of_f64(sum as f64 / f64::from(fixed) * scale).to_f64());
            }
        }
    }
    d_q
}

/// Two cases in which some query sees one or two keys that are nearly 0 in some column, with a sink or a gradient of
/// the log-sum-exp, so that its own gradient is not 0.
fn of_few_keys() -> [Case; 2] {
    let sizes = Sizes::new(200, 150, 256).heads(2, 2, 1);
    let causal = || Attention::scaled_dot().mask(Mask::causal());
    let lse = Extras { all_upstream: true, ..Extras::default() };
    let at_end = causal().mask(Mask::longformer(40, [1])).place(Place::End);
    let cases = [
        Case::new("causal", causal(), sizes, lse),
        Case::new("causal longformer at the end", at_end, sizes, Extras { sinks: true, ..Extras::default() }),
    ];
    cases.map(|mut case| {
        case.attention.entropy = false;
        case
    })
}

/// The largest distance from the definition, in spreads: of spreads without the fixed-point rounding, and with it.
fn distances<T: Element<Acc = f32>>(case: &Case, library: &Library) -> [f64; 2] {
    let data = case.data::<T>();
    let wide = data.wide();
    let (truth, gradients) = check::definition(case, &wide).unwrap();
    let exact = vec![("d_q", gradients.q.data().to_vec())];
    let spreads = bound::spreads(case, &wide, bound::Roundoff::of::<T>(), &truth, &exact);
    let mut spread = spreads.into_iter().find(|(name, _)| *name == "d_q").unwrap().1;
    let found = sum_of_parts(case, &data, &truth, library);
    let largest = |spread: &[f64]| {
        let apart = found.iter().zip(&exact[0].1).zip(spread);
        apart.filter(|((found, exact), _)| found != exact && !found.is_nan()).fold(0.0f64, |largest, x| {
            let ((found, exact), spread) = x;
            largest.max((found - exact).abs() / spread)
        })
    };
    let without = largest(&spread);
    bound::add_fixed_point(case, &wide, &truth, &mut spread);
    [without, largest(&spread)]
}

#[test]
fn gradients_of_queries_are_within_the_bound_of_fixed_point() {
    let Some((library, _folder)) = library(false, &[]) else { return };
    for case in of_few_keys() {
        for [without, with] in [distances::<f16>(&case, &library), distances::<bf16>(&case, &library)] {
            println!("{}: {without:.2} spreads, {with:.2} with the rounding of fixed point", case.name);
            assert!(with <= ELEMENT_LIMIT, "{}: {with} spreads", case.name);
        }
    }
}

/// A row attains its bound: every value is the row's upstream gradient or its negative, and all keys are equal up to
/// sign.
#[test]
fn the_largest_row_that_can_be_fits() {
    let Some((library, _folder)) = library(false, &[]) else { return };
    // SAFETY: the header's function has this signature.
    let row_scale = unsafe { library.get::<RowScale>(b"test_dq_scale\0") }.unwrap();
    for size in [1e-12f32, 1e-3, 0.7, 1.0, 100.0, 60_000.0] {
        for (width, key, d_lse) in [(64, 1.0f32, 0.0f32), (256, 4.0, 3.0), (128, 1e-4, -50.0)] {
            let square = size * size * width as f32;
            // Half of the weight is on each sign: d_out · v is ±square, and the row term is 0.
            // SAFETY: likewise.
            let scale = unsafe { row_scale(square, width, 1.0, key, size, 0.0, d_lse) };
            let largest = f64::from(key) * (f64::from(square) + f64::from(d_lse.abs())) * f64::from(scale);
            assert!(largest <= f64::from(1 << 30), "{size} {width}: {largest}");
            assert!(
                scale.log2().fract() == 0.0 && (largest > f64::from(1 << 28) || scale.log2() == 126.0),
                "{largest}"
            );
        }
    }
    // SAFETY: likewise.
    let of_nothing_finite = unsafe { row_scale(f32::INFINITY, 64, 1.0, 1.0, 1.0, 0.0, 0.0) };
    assert!(of_nothing_finite.is_nan());
}
