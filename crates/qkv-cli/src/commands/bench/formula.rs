//! The [materialized formula](qkv::materialized) as a baseline: the difference to the engine is the cost of storing the
//! scores.

use super::case::{Case, Direction};
use super::ours::{Call, noise};
use crate::dtype::Precision;
use crate::failure::Failure;
use qkv::materialized::materialized;
use std::hint::black_box;

/// Maximum bytes of scores for a measurement.
pub(crate) const MOST: u128 = 1 << 30;

/// Whether the formula is measured beside a case: f32, forward.
pub(crate) fn is_for(case: Case) -> bool {
    case.precision == Precision::F32 && case.direction == Direction::Forward
}

/// Whether its scores fit.
pub(crate) fn fits(case: Case) -> bool {
    case.shape.scores().saturating_mul(4) <= MOST
}

/// Prepares the data of a case, and its call, which allocates scores and outputs as any caller of the formula does.
pub(crate) fn prepare(case: Case) -> Result<Call, Failure> {
    let failed = |error| Failure::new(format!("`{case}`: {error}"));
    let (queries, keys) = (case.shape.queries(), case.shape.keys());
    let q = noise::<f32>(queries, 1).map_err(failed)?;
    let k = noise::<f32>(keys, 2).map_err(failed)?;
    let v = noise::<f32>(keys, 3).map_err(failed)?;
    Ok(Box::new(move || {
        black_box(materialized(case.shape.axes(), case.causal, [q.data(), k.data(), v.data()]));
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::shape::Shape;
    use qkv::{Attention, Inputs, Mask};

    #[test]
    fn the_formula_is_attention() {
        for (axes, causal) in [
            ([1, 1, 1, 3, 5, 4], false),
            ([2, 4, 2, 130, 130, 64], true),
            ([1, 6, 2, 100, 300, 20], false),
            ([1, 2, 1, 300, 17, 33], true),
        ] {
            let shape = Shape::new(axes);
            let q = noise::<f32>(shape.queries(), 1).unwrap();
            let [k, v] = [2, 3].map(|seed| noise::<f32>(shape.keys(), seed).unwrap());
            let found = materialized(axes, causal, [q.data(), k.data(), v.data()]);
            let attention = Attention::scaled_dot().mask(if causal { Mask::causal() } else { Mask::full() });
            let expected = attention.forward(Inputs::new(&q, &k, &v)).unwrap().values;
            assert_eq!(found.len(), expected.data().len());
            for (found, expected) in found.iter().zip(expected.data()) {
                assert!((found - expected).abs() < 1e-5, "{shape} causal {causal}: {found} for {expected}");
            }
        }
    }
}
