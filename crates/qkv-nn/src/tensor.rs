//! Numbers with a shape, rows one after the other. Cheap to clone: clones share the numbers until one of them is changed.

use crate::device::Device;
use crate::float::Float;
use crate::pool::Pool;
use std::fmt;
use std::sync::Arc;

/// A tensor. Its last axis is its *width*; all others together are its *rows*.
#[derive(Clone)]
pub struct Tensor<T: Float> {
    shape: Vec<usize>,
    numbers: Arc<Numbers<T>>,
}

struct Numbers<T: Float> {
    data: Vec<T>,
    pool: Option<Pool<T>>,
}

impl<T: Float> Drop for Numbers<T> {
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
    /// From numbers, row by row.
    ///
    /// # Panics
    /// Where the shape has another number of elements.
    pub fn new(data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        Tensor { shape: shape.to_vec(), numbers: Arc::new(Numbers { data, pool: None }) }
    }

    /// Memory of the pool, holding whatever was there.
    pub(crate) fn unwritten(pool: &Pool<T>, shape: &[usize]) -> Self {
        let data = pool.take(shape.iter().product());
        Tensor { shape: shape.to_vec(), numbers: Arc::new(Numbers { data, pool: Some(pool.clone()) }) }
    }

    /// Zeros in memory of the pool.
    pub(crate) fn zeros(pool: &Pool<T>, shape: &[usize]) -> Self {
        let mut tensor = Tensor::unwritten(pool, shape);
        tensor.data_mut().fill(T::ZERO);
        tensor
    }

    /// Numbers that come from elsewhere, which the pool gets in the end.
    pub(crate) fn adopted(pool: &Pool<T>, data: Vec<T>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?}");
        pool.adopt(data.len());
        Tensor { shape: shape.to_vec(), numbers: Arc::new(Numbers { data, pool: Some(pool.clone()) }) }
    }

    /// Its axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Where its numbers lie.
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// Its numbers, row by row.
    pub fn data(&self) -> &[T] {
        &self.numbers.data[..self.len()]
    }

    /// Its numbers, to be changed; copied first where a clone shares them.
    pub fn data_mut(&mut self) -> &mut [T] {
        let len = self.len();
        if Arc::get_mut(&mut self.numbers).is_none() {
            let data = match &self.numbers.pool {
                Some(pool) => {
                    let mut data = pool.take(len);
                    data[..len].copy_from_slice(&self.numbers.data[..len]);
                    data
                }
                None => self.numbers.data[..len].to_vec(),
            };
            self.numbers = Arc::new(Numbers { data, pool: self.numbers.pool.clone() });
        }
        let numbers = Arc::get_mut(&mut self.numbers).expect("just made unshared");
        &mut numbers.data[..len]
    }

    /// Whether nobody else holds these numbers.
    pub(crate) fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.numbers).is_some()
    }

    /// How many numbers.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
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

    /// These entries of the first axis, in this order; one may be taken several times.
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

    /// The same numbers with other axes.
    ///
    /// # Panics
    /// Where the shape has another number of elements.
    pub fn reshaped(mut self, shape: &[usize]) -> Self {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "{:?} as {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }
}
