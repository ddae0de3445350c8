//! Our side of a case: its data, and the call that is timed.

use super::case::{Case, Direction};
use crate::dtype::Precision;
use crate::failure::Failure;
use half::{bf16, f16};
use qkv::{Attention, Decode, Element, Inputs, Mask, Tensor, Upstream};
use std::hint::black_box;

/// A timed call, with its data.
pub(crate) type Call = Box<dyn FnMut() + Send>;

/// How many normal numbers are drawn before they repeat. A prime, so that no two rows are alike; filling a long cache
/// with fresh numbers would take longer than measuring it.
const DRAWN: usize = 65_521;

/// Prepares the data of a case, and its call.
pub(crate) fn prepare(case: Case) -> Result<Call, Failure> {
    let call = match case.precision {
        Precision::F32 => prepare_in::<f32>(case),
        Precision::F64 => prepare_in::<f64>(case),
        Precision::Bf16 => prepare_in::<bf16>(case),
        Precision::F16 => prepare_in::<f16>(case),
    };
    call.map_err(|error| Failure::new(format!("`{case}`: {error}")))
}

fn prepare_in<T: Element>(case: Case) -> Result<Call, qkv::Error> {
    let (queries, keys) = (case.shape.queries(), case.shape.keys());
    let (q, k, v) = (noise::<T>(queries, 1)?, noise::<T>(keys, 2)?, noise::<T>(keys, 3)?);
    let attention = Attention::scaled_dot().mask(if case.causal { Mask::causal() } else { Mask::full() });
    attention.tiles(Inputs::new(&q, &k, &v))?; // refused here, not while measuring
    const CHECKED: &str = "the inputs were checked";
    Ok(match case.direction {
        Direction::Forward => Box::new(move || {
            black_box(attention.forward(Inputs::new(&q, &k, &v)).expect(CHECKED));
        }),
        Direction::Backward => {
            let out = attention.forward(Inputs::new(&q, &k, &v))?;
            let d_out = noise::<T>(queries, 4)?;
            Box::new(move || {
                let upstream = Upstream::new(&d_out);
                black_box(attention.backward(Inputs::new(&q, &k, &v), &out, upstream).expect(CHECKED));
            })
        }
        Direction::Decode => Box::new(move || {
            black_box(attention.decode(Inputs::new(&q, &k, &v), Decode::Fast).expect(CHECKED));
        }),
    })
}

/// Normal numbers.
pub(crate) fn noise<T: Element>(shape: [usize; 4], seed: u64) -> Result<Tensor<T, 4>, qkv::Error> {
    let len = shape.iter().product();
    let drawn = Tensor::<T, 1>::randn([DRAWN.min(len)], seed).into_data();
    Tensor::new(drawn.into_iter().cycle().take(len).collect(), shape)
}
