//! Dropout (Srivastava et al. 2014), alone and in front of a residual sum. The bits are Philox's, drawn again on the way
//! back instead of being kept.

use crate::float::Float;
use crate::machine::Machine;
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_simd::pass::Pass;
use qkv_simd::{Isa, philox};

/// Which numbers of a tensor are dropped: a function of the stream, the row and the column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drop {
    threshold: u32,
    stream: u64,
}

impl Drop {
    /// None where nothing is dropped.
    pub fn new<T: Float>(tape: &mut Tape<'_, T>, p: f64) -> Option<Drop> {
        let threshold = (p * 65536.0).round().clamp(0.0, 65535.0) as u32;
        (tape.has_noise() && threshold > 0).then(|| Drop { threshold, stream: tape.stream() })
    }

    /// What is kept grows by this.
    pub fn scale<T: Float>(self) -> T {
        T::of_f64(65536.0 / (65536.0 - f64::from(self.threshold)))
    }

    /// The bits of a row: set where the number is kept.
    #[inline]
    pub fn bits(self, isa: Isa, row: usize, words: &mut [u64]) {
        philox::keep(isa, self.stream, [0, row >> 32, row], 0, self.threshold, words);
    }

    /// Drops from `rows` in place; the first is row `from` of its tensor.
    fn apply<T: Float>(self, machine: &Machine, rows: &mut [T], width: usize, from: usize) {
        let mut words = vec![0; width.div_ceil(64)];
        for (r, row) in rows.chunks_exact_mut(width).enumerate() {
            self.bits(machine.isa(), from + r, &mut words);
            machine.run(Select { row, words: &words, scale: self.scale() });
        }
    }
}

/// Numbers whose bit is set times `scale`, zero elsewhere.
struct Select<'a, T> {
    row: &'a mut [T],
    words: &'a [u64],
    scale: T,
}

impl<T: Float> Pass for Select<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (part, &word) in self.row.chunks_mut(64).zip(self.words) {
            for (j, x) in part.iter_mut().enumerate() {
                let scale = if word >> j & 1 == 1 { self.scale } else { T::ZERO };
                *x = if scale == T::ZERO { T::ZERO } else { *x * scale };
            }
        }
    }
}

/// A tensor with some numbers dropped: in its own memory where nobody else holds it.
pub(crate) fn dropped<T: Float>(machine: &Machine, mut tensor: Tensor<T>, drop: Drop) -> Tensor<T> {
    let (rows, width) = (tensor.rows(), tensor.width());
    let each = machine.rows_each(rows, width);
    let parts = tensor.data_mut().chunks_mut(each * width.max(1)).collect();
    machine.each(parts, |at, part: &mut [T]| drop.apply(machine, part, width, at * each));
    tensor
}

struct DropoutBackward {
    x: Option<usize>,
    drop: Drop,
}

impl<T: Float> Backward<T> for DropoutBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        context.add(self.x, dropped(context.machine, upstream, self.drop));
    }
}

struct ResidualBackward {
    x: Option<usize>,
    y: Option<usize>,
    drop: Option<Drop>,
}

impl<T: Float> Backward<T> for ResidualBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let y = upstream.clone();
        context.add(self.x, upstream);
        context.add(self.y, if let Some(drop) = self.drop { dropped(context.machine, y, drop) } else { y });
    }
}

impl<T: Float> Tape<'_, T> {
    /// Drops each number with probability `p` and lets the others grow, while training.
    pub fn dropout(&mut self, x: Var<T>, p: f64) -> Var<T> {
        let Some(drop) = Drop::new(self, p) else { return x };
        let slot = x.slot;
        let value = dropped(self.machine, x.value, drop);
        self.record(value, || DropoutBackward { x: slot, drop })
    }

    /// `x + dropout(y)`.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn residual(&mut self, x: &Var<T>, y: Var<T>, p: f64) -> Var<T> {
        assert_eq!(x.shape(), y.shape(), "a sum of two shapes");
        let drop = Drop::new(self, p);
        let back = ResidualBackward { x: x.slot, y: y.slot, drop };
        let mut value = y.value;
        if let Some(drop) = drop {
            value = dropped(self.machine, value, drop);
        }
        super::add_assign(self.machine, value.data_mut(), x.value.data());
        self.record(value, || back)
    }

    /// `x + y`.
    ///
    /// # Panics
    /// Where the shapes differ.
    pub fn add(&mut self, x: &Var<T>, y: Var<T>) -> Var<T> {
        self.residual(x, y, 0.0)
    }
}
