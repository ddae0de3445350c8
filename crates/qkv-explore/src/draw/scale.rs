//! Maps a weight to a level between 0 and 1. Linear is proportional; log shows small weights beside an attention sink;
//! rank shows only the order. `page/scale.js` has the same three scales.

use crate::words::Matrix;
use serde::{Deserialize, Serialize};

/// Range of the logarithmic scale below the largest weight, in powers of ten.
pub const DECADES: f32 = 4.0;

/// How weights map to levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// `w / largest`.
    #[default]
    Linear,
    /// `1 + log₁₀(w / largest) / 4`, and 0 below four decades.
    Log,
    /// The fraction of positive weights that are no larger; equal weights have equal levels, and 0 stays 0.
    Rank,
}

impl Scale {
    /// All scales by name.
    pub const ALL: [(&'static str, Scale); 3] = [("linear", Scale::Linear), ("log", Scale::Log), ("rank", Scale::Rank)];

    /// The scale over some weights.
    ///
    /// ```
    /// use qkv_explore::draw::Scale;
    /// let weights = [0.0, 0.002, 0.02, 0.2];
    /// let places = |scale: Scale| weights.map(|w| format!("{:.2}", scale.over(weights.into_iter()).place(w)));
    /// assert_eq!(places(Scale::Linear), ["0.00", "0.01", "0.10", "1.00"]);
    /// assert_eq!(places(Scale::Log), ["0.00", "0.50", "0.75", "1.00"]);
    /// assert_eq!(places(Scale::Rank), ["0.00", "0.33", "0.67", "1.00"]);
    /// ```
    pub fn over(self, weights: impl Iterator<Item = f32>) -> Scaled {
        let mut order: Vec<f32> = weights.filter(|w| *w > 0.0 && w.is_finite()).collect();
        let largest = order.iter().copied().fold(0.0, f32::max);
        match self {
            Scale::Rank => order.sort_by(f32::total_cmp),
            _ => order.clear(),
        }
        Scaled { scale: self, largest: if largest > 0.0 { largest } else { 1.0 }, order }
    }
}

/// A scale over the weights of one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled {
    scale: Scale,
    largest: f32,
    /// The positive weights, ascending; empty unless the scale is by rank.
    order: Vec<f32>,
}

impl Scaled {
    /// Over all weights of a matrix.
    pub fn of(matrix: &Matrix, scale: Scale) -> Scaled {
        scale.over(matrix.weights.iter().flatten().copied())
    }

    /// The scale.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// The largest weight, or 1 if none is positive.
    pub fn largest(&self) -> f32 {
        self.largest
    }

    /// The level of a weight, 0 to 1. NaN has level 0.
    pub fn place(&self, weight: f32) -> f32 {
        if weight.is_nan() || weight <= 0.0 {
            return 0.0;
        }
        let place = match self.scale {
            Scale::Linear => weight / self.largest,
            Scale::Log => 1.0 + (weight / self.largest).log10() / DECADES,
            Scale::Rank if self.order.is_empty() => 0.0,
            Scale::Rank => self.order.partition_point(|&w| w <= weight) as f32 / self.order.len() as f32,
        };
        place.clamp(0.0, 1.0)
    }

    /// The smallest weight with this level or a higher one.
    pub fn weight(&self, place: f32) -> f32 {
        let place = place.clamp(0.0, 1.0);
        match self.scale {
            Scale::Linear => place * self.largest,
            Scale::Log => self.largest * 10f32.powf(DECADES * (place - 1.0)),
            Scale::Rank => {
                let above = (place * self.order.len() as f32).ceil() as usize;
                self.order.get(above.saturating_sub(1)).copied().unwrap_or(0.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_weights_have_equal_ranks_and_nothing_stays_nothing() {
        let ranks = Scale::Rank.over([0.0, 0.2, 0.2, 0.6, 0.0].into_iter());
        assert_eq!([0.0, 0.2, 0.6].map(|w| ranks.place(w)), [0.0, 2.0 / 3.0, 1.0]);
    }

    #[test]
    fn what_is_no_weight_is_drawn_as_nothing() {
        for (_, scale) in Scale::ALL {
            let scaled = scale.over([f32::NAN, -1.0, f32::INFINITY, 0.5].into_iter());
            assert_eq!([f32::NAN, -1.0, 0.0].map(|w| scaled.place(w)), [0.0; 3]);
            assert_eq!([0.5, f32::INFINITY].map(|w| scaled.place(w)), [1.0; 2]);
            let none = scale.over([].into_iter());
            assert_eq!((none.largest(), none.place(0.0)), (1.0, 0.0));
        }
    }

    #[test]
    fn a_place_leads_back_to_its_weight() {
        let weights = [0.01, 0.03, 0.2, 0.7];
        for (name, scale) in Scale::ALL {
            let scaled = scale.over(weights.into_iter());
            for weight in weights {
                let back = scaled.weight(scaled.place(weight));
                assert!((back - weight).abs() < 1e-5, "{name}: {weight} came back as {back}");
            }
        }
    }
}
