//! What an engine outside of this crate stands on: a description and its inputs, checked against each other and with the
//! same words for what does not fit; and the output that it makes. Users of an engine need nothing of this.
//!
//! ```
//! use qkv::{Attention, Inputs, Place, Tensor, engine::Problem};
//! let x = Tensor::<f32, 4>::randn([1, 2, 5, 4], 1);
//! let attention = Attention::scaled_dot();
//! let problem = Problem::new(&attention, Inputs::new(&x, &x, &x))?;
//! assert_eq!((problem.b, problem.n, problem.m, problem.place()), (1, 5, 5, Place::Start));
//! # Ok::<(), qkv::Error>(())
//! ```

pub use crate::problem::Problem;

use crate::output::Output;
use crate::place::Place;
use crate::tensor::Tensor;

/// The output of a softmax, as another engine made it: values `[B, Hq, N, Dv]`, log-sum-exp and entropy `[B, Hq, N]`, and
/// where the queries stood.
pub fn output<T: qkv_simd::Element>(
    values: Tensor<T, 4>,
    lse: Tensor<T::Acc, 3>,
    entropy: Option<Tensor<T::Acc, 3>>,
    place: Place,
) -> Output<T> {
    Output { entropy, ..Output::new(values, lse, place) }
}

/// Where the queries of an output stood.
pub fn place_of<T: qkv_simd::Element>(out: &Output<T>) -> Place {
    out.place
}
