//! An activation that is recomputed from its input when its output is needed.

use crate::dropout_mask::DropoutMask;
use crate::float::Float;
use crate::loops::Activation;
use crate::tensor::Tensor;
use qkv_cuda::operations::{self as cuda, Array, Operations};

/// An activation stored as its input: the backward pass recomputes the output, so that only one of the two is kept.
#[derive(Clone, Debug)]
pub(crate) struct ActivationSource<T: Float> {
    pub(crate) before: Tensor<T>,
    pub(crate) activation: Activation,
    pub(crate) dropout: Option<DropoutMask>,
}

impl<T: Float> ActivationSource<T> {
    /// Recomputes the output on a device.
    pub(crate) fn output(&self, operations: &Operations) -> Array {
        let output = operations.activations(self.before.len());
        let (sizes, key) = ([self.before.rows(), self.before.width()], self.dropout.map(DropoutMask::key));
        let before = self.before.array(operations);
        operations.activate(&before, &output, None, sizes, self.activation.into(), key.as_ref());
        output
    }
}

impl From<Activation> for cuda::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::None => cuda::Activation::None,
            Activation::Relu => cuda::Activation::Relu,
            Activation::Gelu => cuda::Activation::Gelu,
            Activation::GeluTanh => cuda::Activation::GeluTanh,
            Activation::Tanh => cuda::Activation::Tanh,
            Activation::Sigmoid => cuda::Activation::Sigmoid,
        }
    }
}
