//! What is known of a case once it has been measured.

use super::case::{Case, Direction};
use super::peaks::Peak;
use super::timing::Timing;
use serde::Serialize;

/// A measured case, in the order in which it is told.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
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
    /// Of multiply-adds, or for decoding of reading if that holds it back.
    pub peak_share: f64,
    /// Billions of bytes of keys and values a second, for decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gbs: Option<f64>,
    /// The best time of the materialised formula.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formula_ms: Option<f64>,
    /// PyTorch's best and median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_median_ms: Option<f64>,
    /// PyTorch's time over ours, the median over rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    #[serde(skip)]
    pub case: Case,
}

impl Row {
    pub fn new(case: Case, ours: Timing, peak: &Peak) -> Row {
        let shape = case.shape;
        let a_second = |work: f64| digits(work / ours.best_ms / 1e6, 3);
        Row {
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
            gflops: a_second(case.flops()),
            peak_share: digits(peak.share(ours.best_ms), 4),
            gbs: (case.direction == Direction::Decode).then(|| a_second(case.bytes())),
            formula_ms: None,
            torch_ms: None,
            torch_median_ms: None,
            ratio: None,
            case,
        }
    }

    /// With the anchor's time, and the median of its time over ours.
    pub fn against(mut self, torch: Timing, ratio: f64) -> Row {
        self.torch_ms = Some(to_ten_nanoseconds(torch.best_ms));
        self.torch_median_ms = Some(to_ten_nanoseconds(torch.median_ms));
        self.ratio = Some(digits(ratio, 4));
        self
    }

    /// With the best time of the materialised formula.
    pub fn beside_formula(mut self, formula: Timing) -> Row {
        self.formula_ms = Some(to_ten_nanoseconds(formula.best_ms));
        self
    }

    /// As one JSON object on a line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a row is plain data") + "\n"
    }
}

/// Milliseconds with as many digits as a clock can mean.
pub(crate) fn to_ten_nanoseconds(ms: f64) -> f64 {
    digits(ms, 5)
}

/// Rounded to as many digits behind the point as mean something.
fn digits(x: f64, count: i32) -> f64 {
    let unit = 10f64.powi(count);
    (x * unit).round() / unit
}
