//! Row-major tensors with copy-on-write memory: clones are cheap and share their elements until one is written.

use crate::device::Device;
use crate::float::Float;
use crate::pool::Pool;
use std::fmt;
use std::sync::Arc;

/// A tensor. Its last axis is its *width*; all others together are its *rows*.
#[derive(Clone)]
pub struct Tensor<T: Float> {
    shape: Vec<usize>,
    buffer: Arc<Buffer<T>>,
}

struct Buffer<T: Float> {
    data: Vec<T>,
    pool: Option<Pool<T>>,
}

impl<T: Float> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.give(std::mem::take(&mut self.data));
        }
    }
}

impl<T: Float> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?}", self.shape)
    }
}

impl<T: Float> Tensor<T> {
    /// From elements in row-major order.
    ///
    /// # Panics
    /// Where the shape has another number of elements.
    pub fn new(data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        Tensor { shape: shape.to_vec(), buffer: Arc::new(Buffer { data, pool: None }) }
    }

    /// Uninitialized elements, with arbitrary values, from the pool.
    pub(crate) fn unwritten(pool: &Pool<T>, shape: &[usize]) -> Self {
        let data = pool.take(shape.iter().product());
        Tensor { shape: shape.to_vec(), buffer: Arc::new(Buffer { data, pool: Some(pool.clone()) }) }
    }

    /// Zeros from the pool.
    pub(crate) fn zeros(pool: &Pool<T>, shape: &[usize]) -> Self {
        let mut tensor = Tensor::unwritten(pool, shape);
        tensor.data_mut().fill(T::ZERO);
        tensor
    }

    /// Elements allocated elsewhere, whose memory goes to the pool in the end.
    pub(crate) fn adopted(pool: &Pool<T>, data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        pool.adopt(data.len());
        Tensor { shape: shape.to_vec(), buffer: Arc::new(Buffer { data, pool: Some(pool.clone()) }) }
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its device.
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// Its elements, row-major.
    pub fn data(&self) -> &[T] {
        &self.buffer.data[..self.len()]
    }

    /// Its elements, for writing; copied first where a clone shares them.
    pub fn data_mut(&mut self) -> &mut [T] {
        let len = self.len();
        if Arc::get_mut(&mut self.buffer).is_none() {
            let data = match &self.buffer.pool {
                Some(pool) => {
                    let mut data = pool.take(len);
                    data[..len].copy_from_slice(&self.buffer.data[..len]);
                    data
                }
                None => self.buffer.data[..len].to_vec(),
            };
            self.buffer = Arc::new(Buffer { data, pool: self.buffer.pool.clone() });
        }
        let buffer = Arc::get_mut(&mut self.buffer).expect("just made unshared");
        &mut buffer.data[..len]
    }

    /// Whether no clone shares its memory.
    pub(crate) fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.buffer).is_some()
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

    /// Selects entries of the first axis, in this order, with repetitions.
    ///
    /// # Panics
    /// Where there is no such entry.
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
    /// Where the shape has another number of elements.
    pub fn reshaped(mut self, shape: &[usize]) -> Self {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "{:?} as {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }
}
