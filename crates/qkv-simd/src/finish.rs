//! The epilogue of a product: steps applied to its elements while they are in registers, each of which saves a pass
//! over memory.

use crate::lanes::Lanes;
use crate::number::Element;

/// `y = activation(x · Wᵀ + b) + residual`, then another activation of the sum; every step is optional. Each step
/// rounds its result, as separate passes would.
///
/// ```
/// use qkv_simd::panels::{PackedMatrix, products};
/// use qkv_simd::{Isa, finish::Finish, team::Team};
/// let matrix = PackedMatrix::new(&[1.0f32, 2.0, 3.0, 4.0], 2);
/// let finish = Finish { bias: Some(&[-20.0, 1.0]), relu: true, residual: Some(&[0.5, 0.5]), ..Finish::default() };
/// let mut y = [0.0; 2];
/// products(Isa::best(), &Team::new(1), &[10.0, 1.0], &mut [(&matrix, &mut y, finish)]);
/// assert_eq!(y, [0.5, 35.5]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a, A = f32> {
    /// Added to every row, `[O]`.
    pub bias: Option<&'a [A]>,
    /// Whether negative values become 0.
    pub relu: bool,
    /// Added last, `[R, O]`.
    pub residual: Option<&'a [A]>,
    /// Whether negative sums then become 0: the end of a residual block.
    pub relu_of_sum: bool,
}

impl<A> Default for Finish<'_, A> {
    fn default() -> Self {
        Finish { bias: None, relu: false, residual: None, relu_of_sum: false }
    }
}

impl<A> Finish<'_, A> {
    /// Whether bias and residual, if present, have the lengths for `rows` rows of `width`.
    pub(crate) fn fits(&self, rows: usize, width: usize) -> bool {
        self.bias.is_none_or(|bias| bias.len() == width)
            && self.residual.is_none_or(|residual| residual.len() == rows * width)
    }
}

impl Finish<'_> {
    /// Finishes the lanes `y` of row `row` from column `first` on, of which `count` are valid, in rows of `width`.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`, and the position is within the sizes that [`fits`](Finish::fits)
    /// checked.
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Lanes<Scalar = f32>>(
        &self,
        mut y: V,
        [row, width]: [usize; 2],
        [first, count]: [usize; 2],
    ) -> V {
        // SAFETY: the caller guarantees the instruction set and the position.
        unsafe {
            if let Some(bias) = self.bias {
                y = y.add(f32::lanes::<V>(bias.as_ptr().add(first), count));
            }
            if self.relu {
                y = y.max(V::splat(0.0));
            }
            if let Some(residual) = self.residual {
                y = y.add(f32::lanes::<V>(residual.as_ptr().add(row * width + first), count));
            }
            if self.relu_of_sum {
                y = y.max(V::splat(0.0));
            }
            y
        }
    }
}
