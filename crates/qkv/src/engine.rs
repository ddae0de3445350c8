//! For engines outside of this crate: a description and its inputs, checked against each other with the same errors;
//! the mask in the compiled form that all engines share; and the output that an engine returns. Users of an engine need
//! none of this.
//!
//! ```
//! use qkv::{Attention, Inputs, Place, Tensor, engine::Problem};
//! let x = Tensor::<f32, 4>::randn([1, 2, 5, 4], 1);
//! let attention = Attention::scaled_dot();
//! let problem = Problem::new(&attention, Inputs::new(&x, &x, &x))?;
//! assert_eq!((problem.b, problem.n, problem.m, problem.place()), (1, 5, 5, Place::Start));
//! # Ok::<(), qkv::Error>(())
//! ```
//!
//! # Compiled masks
//!
//! [`CompiledMask::new`] turns a [`Mask`](crate::Mask) into an expression over simple predicates. An engine uses the
//! form that it needs: [`classify`](CompiledMask::classify) for the verdict of a tile, [`band`](CompiledMask::band) for
//! kernels that support intervals, and [`program`](CompiledMask::program) for kernels that interpret a postfix program.
//!
//! A [`Step`] of a program has 40 bytes, `{ i32 code; i32 size; i64 x; i64 y; u64 data; i64 count; }`. An interpreter
//! keeps a stack of booleans (for a pair) or of verdicts (for a tile): a predicate pushes one, `AND` and `OR` replace
//! the two on top by one, `NOT` negates the one on top. A program without steps allows every pair. [`mask_constants`]
//! has the opcodes as C++, with the meaning of the operands beside each; `p` is the query's position, `i` its index,
//! `j` the key's index.
//!
//! `data` is an offset into [`MaskProgram::data`], a multiple of 16; [`MaskProgram::steps_at`] turns offsets into
//! addresses. It points to:
//!
//! | opcode | data |
//! | --- | --- |
//! | `OP_KEY_IN`, `OP_QUERY_IN` | `i64[count]`, ascending |
//! | `OP_BIGBIRD` | `i32[5]`: blocks of keys, drawn per row, listed rows, low and high word of the seed; then `i32[listed][drawn]` |
//! | `OP_BLOCKS` | `u8[rows][count]` |
//!
//! BigBird's draws for rows (blocks of queries) beyond the list follow [`BigBird::drawn`](crate::BigBird::drawn).

pub use crate::compiled::{
    Band, CompiledMask, MAX_DRAWN, MAX_STEPS, MaskProgram, Opcode, Step, Verdict, mask_constants,
};
pub use crate::problem::Problem;

use crate::output::Output;
use crate::place::Place;
use crate::tensor::Tensor;

/// The output of a softmax that another engine computed: values `[B, Hq, N, Dv]`, log-sum-exp and entropy `[B, Hq, N]`,
/// and the place of the queries.
pub fn output<T: qkv_simd::Element>(
    values: Tensor<T, 4>,
    lse: Tensor<T::Acc, 3>,
    entropy: Option<Tensor<T::Acc, 3>>,
    place: Place,
) -> Output<T> {
    Output { entropy, ..Output::new(values, lse, place) }
}

/// The place of the queries of an output.
pub fn place_of<T: qkv_simd::Element>(out: &Output<T>) -> Place {
    out.place
}
