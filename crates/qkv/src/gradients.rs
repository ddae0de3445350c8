//! [`Gradients`]: what the backward pass returns, a gradient for every differentiable input of the call.

use crate::inputs::for_each_input;
use crate::tensor::Tensor;

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
            /// Of queries, keys and values alone.
            pub fn new(q: Tensor<T, 4>, k: Tensor<T, 4>, v: Tensor<T, 4>) -> Self {
                Gradients { q, k, v, $($name: None,)* }
            }
        }

        impl<T: qkv_simd::Element> Gradients<T> {
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
