//! [`OwnedInputs`]: the tensors of a call, owned, for recordings and for calls that outlive the memory they were given.

use crate::element::Element;
use crate::inputs::{Inputs, for_each_input};
use crate::source::Source;
use crate::tensor::Tensor;
use qkv_simd::View;

/// A borrowed input and its owned counterpart.
trait Borrowed<'a>: Copy {
    type Stored;
    fn to_owned(self) -> Self::Stored;
    fn borrow(owned: &'a Self::Stored) -> Self;
}

impl<'a, T: Copy> Borrowed<'a> for View<'a, T> {
    type Stored = Tensor<T, 4>;
    fn to_owned(self) -> Tensor<T, 4> {
        Tensor::new(self.to_vec(), self.shape()).expect("a view has as many elements as its shape")
    }
    fn borrow(owned: &'a Tensor<T, 4>) -> Self {
        View::from(owned)
    }
}

impl<'a, T: Copy> Borrowed<'a> for &'a [T] {
    type Stored = Vec<T>;
    fn to_owned(self) -> Vec<T> {
        self.to_vec()
    }
    fn borrow(owned: &'a Vec<T>) -> Self {
        owned
    }
}

impl<'a, A: Borrowed<'a, Stored: 'a>> Borrowed<'a> for (A, A) {
    type Stored = [A::Stored; 2];
    fn to_owned(self) -> [A::Stored; 2] {
        [self.0.to_owned(), self.1.to_owned()]
    }
    fn borrow([first, second]: &'a [A::Stored; 2]) -> Self {
        (A::borrow(first), A::borrow(second))
    }
}

impl Borrowed<'_> for u64 {
    type Stored = u64;
    fn to_owned(self) -> u64 {
        self
    }
    fn borrow(owned: &u64) -> u64 {
        *owned
    }
}

macro_rules! owned_inputs {
    (
        differentiable { $($with:ident: $view:ty, $owned:ty, $mut:ty, $doc:literal;)* }
        constant { $($name:ident: $data:ty, $kept:ty;)* }
    ) => {
        /// Everything that [`Inputs`] can hold, owned.
        ///
        /// ```
        /// use qkv::{Attention, Inputs, Mask, OwnedInputs, Tensor};
        /// let causal = Attention::scaled_dot().mask(Mask::causal());
        /// let (owned, out) = {
        ///     let x = Tensor::<f32, 4>::randn([1, 2, 10, 16], 1);
        ///     let inputs = Inputs::new(&x, &x, &x);
        ///     (OwnedInputs::of(inputs), causal.forward(inputs)?)
        /// };
        /// let row = causal.weights(owned.inputs(), &out)?.rows(0, 1, 3..4)?; // [1, 10]
        /// assert_eq!(row[[0, 4]], 0.0);
        /// # Ok::<(), qkv::Error>(())
        /// ```
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct OwnedInputs<T> {
            /// `[B, Hq, N, D]`.
            pub q: Tensor<T, 4>,
            /// `[B, Hk, M, Dk]`.
            pub k: Tensor<T, 4>,
            /// `[B, Hk, M, Dv]`; `Dv` may be 0 if only the weights matter.
            pub v: Tensor<T, 4>,
            $(
                #[doc = concat!("See [`Inputs::", stringify!($with), "`](method@Inputs::", stringify!($with), ").")]
                pub $with: Option<$owned>,
            )*
            $(
                #[doc = concat!("See [`Inputs::", stringify!($name), "`](method@Inputs::", stringify!($name), ").")]
                pub $name: Option<$kept>,
            )*
        }

        impl<T: Element> OwnedInputs<T> {
            /// Only queries, keys and values.
            pub fn new(q: Tensor<T, 4>, k: Tensor<T, 4>, v: Tensor<T, 4>) -> Self {
                OwnedInputs { q, k, v, $($with: None,)* $($name: None,)* }
            }

            /// A copy of borrowed inputs.
            pub fn of(inputs: Inputs<'_, T>) -> Self {
                let rows = |source: Source<'_, T>| match source {
                    Source::Rows(view) => Borrowed::to_owned(view),
                    Source::Pages(pages) => Tensor::from_fn(pages.shape(), |[b, h, j, x]| pages.at(b, h, j, x)),
                };
                OwnedInputs {
                    q: Borrowed::to_owned(inputs.q),
                    k: rows(inputs.k),
                    v: rows(inputs.v),
                    $($with: inputs.$with.map(Borrowed::to_owned),)*
                    $($name: inputs.$name.map(Borrowed::to_owned),)*
                }
            }

            /// The same, borrowed, as a call takes them.
            pub fn inputs(&self) -> Inputs<'_, T> {
                Inputs {
                    $($with: self.$with.as_ref().map(Borrowed::borrow),)*
                    $($name: self.$name.as_ref().map(Borrowed::borrow),)*
                    ..Inputs::new(&self.q, &self.k, &self.v)
                }
            }
        }
    };
}
for_each_input!(owned_inputs);
