//! Learning rate schedules.

use serde::{Deserialize, Serialize};

/// Learning rate after the warmup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// Inverse square root of the step (Vaswani et al. 2017): training has no fixed end.
    #[default]
    InverseSqrt,
    /// Cosine to 0 at the last step.
    Cosine,
    /// Linear to 0 at the last step.
    Linear,
    /// Constant.
    Constant,
}

impl Schedule {
    /// The rate of a step, counted from 1, as a fraction of the peak.
    ///
    /// ```
    /// use qkv_models::Schedule;
    /// assert_eq!(Schedule::InverseSqrt.factor(50, 100, 1000), 0.5); // warming up
    /// assert_eq!(Schedule::InverseSqrt.factor(100, 100, 1000), 1.0);
    /// assert_eq!(Schedule::InverseSqrt.factor(400, 100, 1000), 0.5);
    /// assert!(Schedule::Cosine.factor(1000, 100, 1000) < 1e-9);
    /// ```
    pub fn factor(self, step: u64, warmup: u64, steps: u64) -> f64 {
        if step < warmup {
            return step as f64 / warmup as f64;
        }
        let done = (step - warmup) as f64 / steps.saturating_sub(warmup).max(1) as f64;
        match self {
            Schedule::InverseSqrt => (warmup.max(1) as f64 / step.max(1) as f64).sqrt(),
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()),
            Schedule::Linear => (1.0 - done).max(0.0),
            Schedule::Constant => 1.0,
        }
    }
}
