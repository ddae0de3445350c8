//! Row-major tensors with copy-on-write memory: clones are cheap and share their elements until one of them is written.

use crate::device::Device;
use crate::elements::{Elements, PendingNorm};
use crate::float::Float;
use crate::loops::Fill;
use crate::pool::Pool;
use qkv_cuda::operations::{Array, FewRowsInput, Kind, Operations, RowNorm, has_row_norm};
use qkv_simd::Isa;
use std::fmt;
use std::sync::Arc;

/// A tensor. Its last axis is its *width*; all others together are its *rows*.
#[derive(Clone)]
pub struct Tensor<T: Float> {
    shape: Vec<usize>,
    elements: Arc<Elements<T>>,
}

impl<T: Float> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?}", self.shape)
    }
}

impl<T: Float> Tensor<T> {
    /// A tensor of elements in row-major order.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    pub fn new(data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        Tensor { shape: shape.to_vec(), elements: Arc::new(data.into()) }
    }

    /// Uninitialized elements, with arbitrary values, from the pool.
    pub(crate) fn unwritten(pool: &Pool<T>, shape: &[usize]) -> Self {
        let len = shape.iter().product();
        Tensor { shape: shape.to_vec(), elements: Arc::new(Elements::pooled(pool, pool.take(len), len)) }
    }

    /// Zeros from the pool.
    pub(crate) fn zeros(pool: &Pool<T>, shape: &[usize]) -> Self {
        let mut tensor = Tensor::unwritten(pool, shape);
        T::run(Isa::best(), Fill(tensor.data_mut(), T::ZERO).into());
        tensor
    }

    /// Elements allocated elsewhere, whose memory returns to the pool when dropped.
    pub(crate) fn adopted(pool: &Pool<T>, data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        pool.adopt(data.len());
        let len = data.len();
        Tensor { shape: shape.to_vec(), elements: Arc::new(Elements::pooled(pool, data, len)) }
    }

    /// An array in device memory.
    pub(crate) fn on_device(operations: &Operations, array: Array, shape: &[usize]) -> Self {
        assert_eq!(array.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        Tensor { shape: shape.to_vec(), elements: Arc::new(Elements::on_device(operations, array)) }
    }

    /// Uninitialized activations in device memory.
    pub(crate) fn activations(operations: &Operations, shape: &[usize]) -> Self {
        Tensor::on_device(operations, operations.activations(shape.iter().product()), shape)
    }

    /// Its rows after a norm on a device, computed on first use; `None` if a product of this many rows cannot compute
    /// the norm itself.
    pub(crate) fn normalized_later(
        &self,
        operations: &Operations,
        gain: Array,
        bias: Option<Array>,
        epsilon: f64,
    ) -> Option<Self> {
        let sizes @ [rows, width] = [self.rows(), self.width()];
        has_row_norm(rows, width).then(|| {
            let norm = RowNorm { x: self.array(operations), gain, bias, epsilon: epsilon as f32 };
            let pending = PendingNorm { norm, sizes, _input: self.elements.clone() };
            Tensor { shape: self.shape.clone(), elements: Arc::new(Elements::normalized(operations, pending)) }
        })
    }

    /// Passes the rows to a product of few rows, together with the norm if it is still pending.
    pub(crate) fn with_few_rows<R>(&self, operations: &Operations, product: impl FnOnce(FewRowsInput<'_>) -> R) -> R {
        match self.elements.pending_norm(operations) {
            Some(norm) => product(FewRowsInput::Normalized(norm)),
            None => product(FewRowsInput::Rows(&self.array(operations))),
        }
    }

    /// The device that holds it, unless it is only on the host.
    pub(crate) fn operations(&self) -> Option<&Operations> {
        self.elements.operations()
    }

    /// Its elements in device memory; copied there as activations if they are not there yet.
    pub(crate) fn array(&self, operations: &Operations) -> Array {
        self.elements.array(operations, operations.activation_kind())
    }

    /// Its elements in device memory, copied there as f32 if they are not there yet, for values that must not be
    /// rounded.
    pub(crate) fn floats(&self, operations: &Operations) -> Array {
        self.elements.array(operations, Kind::F32)
    }

    /// Its elements in device memory, mutable; copied first if a clone shares them.
    pub(crate) fn array_mut(&mut self, operations: &Operations) -> Array {
        // Put them on the device first, so that a clone copies the array in its existing type.
        self.elements.array(operations, operations.activation_kind());
        Arc::make_mut(&mut self.elements).array_mut(operations, operations.activation_kind())
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its device.
    pub fn device(&self) -> Device {
        if self.elements.is_on_device() { Device::Cuda } else { Device::Cpu }
    }

    /// Its elements, row-major.
    pub fn data(&self) -> &[T] {
        &self.elements
    }

    /// Its elements, mutable; copied first if a clone shares them.
    pub fn data_mut(&mut self) -> &mut [T] {
        &mut Arc::make_mut(&mut self.elements)[..]
    }

    /// Whether no clone shares its memory.
    pub(crate) fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.elements).is_some()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The last axis.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// All axes but the last together.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// Selects entries of the first axis, in this order; repetitions are allowed.
    ///
    /// # Panics
    /// If an entry does not exist.
    pub fn select(&self, entries: &[usize]) -> Self {
        let each = self.len() / self.shape[0].max(1);
        let mut data = Vec::with_capacity(entries.len() * each);
        entries.iter().for_each(|&entry| data.extend_from_slice(&self.data()[entry * each..][..each]));
        let mut shape = self.shape.clone();
        shape[0] = entries.len();
        Tensor::new(data, &shape)
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    pub fn reshaped(mut self, shape: &[usize]) -> Self {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "{:?} as {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }
}
