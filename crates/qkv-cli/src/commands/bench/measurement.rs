//! The results of a case.

use super::case::{Case, Direction};
use super::peaks::Peak;
use super::timing::Timing;
use serde::Serialize;

/// A measured case, in the order of the JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measurement {
    b: usize,
    hq: usize,
    hk: usize,
    n: usize,
    m: usize,
    d: usize,
    dtype: &'static str,
    causal: bool,
    direction: &'static str,
    pub best_ms: f64,
    pub median_ms: f64,
    pub gflops: f64,
    /// The fraction of the peak of multiply-adds, or for decoding of memory bandwidth, whichever is the bottleneck.
    pub peak_share: f64,
    /// GB/s of keys and values, for decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gbs: Option<f64>,
    /// The best time of the materialized formula.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formula_ms: Option<f64>,
    /// PyTorch's best and median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_median_ms: Option<f64>,
    /// PyTorch's time over ours, median over rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    #[serde(skip)]
    pub case: Case,
}

impl Measurement {
    pub fn new(case: Case, ours: Timing, peak: &Peak) -> Measurement {
        let shape = case.shape;
        let per_second = |work: f64| round_to(work / ours.best_ms / 1e6, 3);
        Measurement {
            b: shape.b,
            hq: shape.hq,
            hk: shape.hk,
            n: shape.n,
            m: shape.m,
            d: shape.d,
            dtype: case.precision.name(),
            causal: case.causal,
            direction: case.direction.name(),
            best_ms: to_ten_nanoseconds(ours.best_ms),
            median_ms: to_ten_nanoseconds(ours.median_ms),
            gflops: per_second(case.flops()),
            peak_share: round_to(peak.share(ours.best_ms), 4),
            gbs: (case.direction == Direction::Decode).then(|| per_second(case.bytes())),
            formula_ms: None,
            torch_ms: None,
            torch_median_ms: None,
            ratio: None,
            case,
        }
    }

    /// Adds PyTorch's time and the ratio.
    pub fn against(mut self, torch: Timing, ratio: f64) -> Measurement {
        self.torch_ms = Some(to_ten_nanoseconds(torch.best_ms));
        self.torch_median_ms = Some(to_ten_nanoseconds(torch.median_ms));
        self.ratio = Some(round_to(ratio, 4));
        self
    }

    /// Adds the time of the materialized formula.
    pub fn with_formula(mut self, formula: Timing) -> Measurement {
        self.formula_ms = Some(to_ten_nanoseconds(formula.best_ms));
        self
    }

    /// One JSON object, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a row is plain data") + "\n"
    }
}

/// Milliseconds, without the digits that the clock cannot resolve.
pub(crate) fn to_ten_nanoseconds(ms: f64) -> f64 {
    round_to(ms, 5)
}

/// Rounds to a number of decimals.
fn round_to(x: f64, count: i32) -> f64 {
    let unit = 10f64.powi(count);
    (x * unit).round() / unit
}
