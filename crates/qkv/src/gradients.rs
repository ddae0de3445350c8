//! [`Gradients`]: what the backward pass returns, a gradient for every differentiable input of the call.
//! [`GradientsMut`]: the caller's memory for them.

use crate::error::{Error, Result};
use crate::inputs::{Inputs, Upstream, for_each_input};
use crate::tensor::Tensor;
use qkv_simd::ViewMut;

macro_rules! gradients {
    (
        differentiable { $($name:ident: $view:ty, $owned:ty, $mut:ty, $doc:literal;)* }
        constant { $($constant:ident: $data:ty, $kept:ty;)* }
    ) => {
        /// The gradients of all differentiable inputs of a call, each in the shape of its input.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct Gradients<T> {
            /// Of the queries, `[B, Hq, N, D]`.
            pub q: Tensor<T, 4>,
            /// Of the keys, `[B, Hk, M, Dk]`.
            pub k: Tensor<T, 4>,
            /// Of the values, `[B, Hk, M, Dv]`.
            pub v: Tensor<T, 4>,
            $(
                #[doc = concat!("Of ", $doc, ".")]
                pub $name: Option<$owned>,
            )*
        }

        impl<T> Gradients<T> {
            /// Only those of queries, keys and values.
            pub fn new(q: Tensor<T, 4>, k: Tensor<T, 4>, v: Tensor<T, 4>) -> Self {
                Gradients { q, k, v, $($name: None,)* }
            }
        }

        /// The caller's memory for the gradients of a call. A gradient that is left out is not written.
        #[derive(Debug)]
        #[non_exhaustive]
        pub struct GradientsMut<'a, T> {
            /// Of the queries, `[B, Hq, N, D]`.
            pub q: ViewMut<'a, T>,
            /// Of the keys, `[B, Hk, M, Dk]`.
            pub k: ViewMut<'a, T>,
            /// Of the values, `[B, Hk, M, Dv]`.
            pub v: ViewMut<'a, T>,
            $(
                #[doc = concat!("Of ", $doc, ".")]
                pub $name: Option<$mut>,
            )*
        }

        impl<'a, T> GradientsMut<'a, T> {
            /// For queries `[B, Hq, N, D]`, keys `[B, Hk, M, Dk]` and values `[B, Hk, M, Dv]`, with any strides.
            pub fn new(
                q: impl Into<ViewMut<'a, T>>,
                k: impl Into<ViewMut<'a, T>>,
                v: impl Into<ViewMut<'a, T>>,
            ) -> Self {
                GradientsMut { q: q.into(), k: k.into(), v: v.into(), $($name: None,)* }
            }
        }

        impl<T: qkv_simd::Element> GradientsMut<'_, T> {
            /// Checks each shape against that of its input.
            pub(crate) fn check(&self, inputs: &Inputs<'_, T>) -> Result<()> {
                let same = |tensor, found: &[usize], expected: &[usize]| match found == expected {
                    true => Ok(()),
                    false => Err(Error::shape(tensor, found, format!("{expected:?}"))),
                };
                same("d_q", &self.q.shape(), &inputs.q.shape())?;
                same("d_k", &self.k.shape(), &inputs.k.shape())?;
                same("d_v", &self.v.shape(), &inputs.v.shape())?;
                $(
                    let tensor = concat!("d_", stringify!($name));
                    match (&self.$name, &inputs.$name) {
                        (Some(found), Some(input)) => same(tensor, &Shape::shape(found), &Shape::shape(input))?,
                        (Some(_), None) => return Err(Error::Unused { tensor, reason: "the call has no such input" }),
                        (None, _) => {}
                    }
                )*
                Ok(())
            }
        }

        impl<T: qkv_simd::Element> Gradients<T> {
            /// Zeros for the optional inputs of a call, besides given gradients of q, k and v.
            pub(crate) fn allocate(
                [q, k, v]: [Tensor<T, 4>; 3],
                inputs: &Inputs<'_, T>,
                upstream: &Upstream<'_, T>,
            ) -> Result<Self> {
                let mut all = Gradients {
                    $($name: inputs.$name.as_ref().map(|input| Zeros::like(&Shape::shape(input))).transpose()?,)*
                    ..Gradients::new(q, k, v)
                };
                if !upstream.for_bias {
                    all.bias = None;
                }
                Ok(all)
            }

            /// The memory of all gradients, for a call of
            /// [`Attention::backward_into`](crate::Attention::backward_into).
            pub fn as_mut(&mut self) -> GradientsMut<'_, T> {
                GradientsMut {
                    $($name: self.$name.as_mut().map(AsGradient::as_gradient),)*
                    ..GradientsMut::new(&mut self.q, &mut self.k, &mut self.v)
                }
            }

            /// Every number rounded to another type.
            pub fn rounded<U: qkv_simd::Element>(&self) -> Gradients<U> {
                Gradients {
                    q: self.q.rounded(),
                    k: self.k.rounded(),
                    v: self.v.rounded(),
                    $($name: self.$name.as_ref().map(Round::round),)*
                }
            }
        }
    };
}
for_each_input!(gradients);

/// A gradient as memory to be written.
trait AsGradient<'a> {
    type Memory;
    fn as_gradient(&'a mut self) -> Self::Memory;
}

impl<'a, T: 'a> AsGradient<'a> for Tensor<T, 4> {
    type Memory = ViewMut<'a, T>;
    fn as_gradient(&'a mut self) -> ViewMut<'a, T> {
        ViewMut::from(self)
    }
}

impl<'a, T: 'a> AsGradient<'a> for Vec<T> {
    type Memory = &'a mut [T];
    fn as_gradient(&'a mut self) -> &'a mut [T] {
        self
    }
}

/// The axes of an input or of the memory for its gradient.
trait Shape {
    fn shape(&self) -> Vec<usize>;
}

impl<T> Shape for ViewMut<'_, T> {
    fn shape(&self) -> Vec<usize> {
        ViewMut::shape(self).to_vec()
    }
}

impl<T> Shape for qkv_simd::View<'_, T> {
    fn shape(&self) -> Vec<usize> {
        qkv_simd::View::shape(self).to_vec()
    }
}

impl<T> Shape for &[T] {
    fn shape(&self) -> Vec<usize> {
        vec![self.len()]
    }
}

impl<T> Shape for &mut [T] {
    fn shape(&self) -> Vec<usize> {
        vec![self.len()]
    }
}

/// Zeros in the shape of an input.
trait Zeros: Sized {
    fn like(shape: &[usize]) -> Result<Self>;
}

impl<T: qkv_simd::Element> Zeros for Tensor<T, 4> {
    fn like(shape: &[usize]) -> Result<Self> {
        Tensor::allocate("gradient", shape.try_into().expect("a view has four axes"))
    }
}

impl<T: qkv_simd::Element> Zeros for Vec<T> {
    fn like(shape: &[usize]) -> Result<Self> {
        Ok(vec![T::default(); shape[0]])
    }
}

/// Rounding of a tensor or a vector to another element type.
trait Round<To> {
    fn round(&self) -> To;
}

impl<T: qkv_simd::Element, U: qkv_simd::Element> Round<Tensor<U, 4>> for Tensor<T, 4> {
    fn round(&self) -> Tensor<U, 4> {
        self.rounded()
    }
}

impl<T: qkv_simd::Element, U: qkv_simd::Element> Round<Vec<U>> for Vec<T> {
    fn round(&self) -> Vec<U> {
        self.iter().map(|x| U::of_f64(x.to_f64())).collect()
    }
}
