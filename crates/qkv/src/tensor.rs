//! The tensors of results: a vector and a shape, in row-major order. Inputs need not be these: any [`View`] will do.

use crate::error::{Error, Result};
use qkv_simd::huge_pages::advise_huge_pages;
use qkv_simd::kept_memory::keep;
use qkv_simd::{Element, Unwritten, View, ViewMut, philox};

/// An owned tensor of `R` axes.
///
/// The memory of large tensors that are dropped is [kept](qkv_simd::kept_memory) for the next results, up to 64 MiB in
/// all: the operating system would take as long to map it again as a short call takes.
///
/// ```
/// use qkv::Tensor;
/// let t = Tensor::from_fn([1, 2, 3, 4], |[_, h, i, x]| (h * 100 + i * 10 + x) as f32);
/// assert_eq!(t[[0, 1, 2, 3]], 123.0);
/// assert_eq!(t.shape(), [1, 2, 3, 4]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T, const R: usize> {
    shape: [usize; R],
    data: Vec<T>,
}

impl<T, const R: usize> Drop for Tensor<T, R> {
    fn drop(&mut self) {
        keep(std::mem::take(&mut self.data));
    }
}

/// The number of elements of a shape, if this machine can address that many of `T`.
pub(crate) fn checked_len<T>(tensor: &'static str, shape: &[usize]) -> Result<usize> {
    let len = shape.iter().try_fold(1usize, |len, &axis| len.checked_mul(axis));
    len.filter(|len| len.checked_mul(size_of::<T>().max(1)).is_some_and(|bytes| bytes <= isize::MAX as usize))
        .ok_or_else(|| Error::TooLarge { tensor, shape: shape.to_vec() })
}

impl<T, const R: usize> Tensor<T, R> {
    /// From a vector, row by row.
    pub fn new(data: Vec<T>, shape: [usize; R]) -> Result<Self> {
        let len = checked_len::<T>("tensor", &shape)?;
        if len != data.len() {
            return Err(Error::shape("tensor", &shape, format!("{} elements in all", data.len())));
        }
        Ok(Tensor { shape, data })
    }

    /// Its axes.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// Its elements, row by row.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// Its elements, mutably.
    pub fn data_mut(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// Its elements, without the shape.
    pub fn into_data(mut self) -> Vec<T> {
        std::mem::take(&mut self.data)
    }

    fn at(&self, index: [usize; R]) -> usize {
        let mut at = 0;
        for (axis, i) in index.into_iter().enumerate() {
            assert!(i < self.shape[axis], "index {index:?} of shape {:?}", self.shape);
            at = at * self.shape[axis] + i;
        }
        at
    }

    /// Every element changed by `f`.
    pub fn map<U>(&self, f: impl FnMut(&T) -> U) -> Tensor<U, R> {
        Tensor { shape: self.shape, data: self.data.iter().map(f).collect() }
    }
}

impl<T: Clone + Default, const R: usize> Tensor<T, R> {
    /// Zeros, or the default of `T`.
    ///
    /// ```
    /// let mut t = qkv::Tensor::<f32, 3>::zeros([2, 3, 4])?;
    /// t[[1, 2, 3]] = 1.0;
    /// assert_eq!(t.data().iter().sum::<f32>(), 1.0);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the shape does not fit into memory.
    pub fn zeros(shape: [usize; R]) -> Result<Self> {
        Tensor::allocate("tensor", shape)
    }

    /// Zeros; errors name the tensor.
    pub(crate) fn allocate(name: &'static str, shape: [usize; R]) -> Result<Self> {
        let len = checked_len::<T>(name, &shape)?;
        // Reserved once to see whether it fits, then allocated as zeros that the system need not write.
        let too_large = |_| Error::TooLarge { tensor: name, shape: shape.to_vec() };
        Vec::<T>::new().try_reserve_exact(len).map_err(too_large)?;
        let mut data = vec![T::default(); len];
        advise_huge_pages(&mut data);
        Ok(Tensor { shape, data })
    }
}

impl<T: Copy> Tensor<T, 4> {
    /// Memory for a tensor of which every row will be written.
    pub(crate) fn unwritten(name: &'static str, shape: [usize; 4]) -> Result<Unwritten<T>> {
        checked_len::<T>(name, &shape)?;
        Unwritten::new(shape).ok_or(Error::TooLarge { tensor: name, shape: shape.to_vec() })
    }
}

impl<T, const R: usize> Tensor<T, R> {
    /// Each element from its index.
    ///
    /// # Panics
    /// If the shape is larger than memory.
    pub fn from_fn(shape: [usize; R], mut f: impl FnMut([usize; R]) -> T) -> Self {
        let len = shape.iter().product();
        let data = (0..len).map(|at| {
            let (mut rest, mut index) = (at, [0; R]);
            for axis in (0..R).rev() {
                index[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            f(index)
        });
        Tensor { shape, data: data.collect() }
    }
}

impl<T: Element, const R: usize> Tensor<T, R> {
    /// Every number rounded to another type.
    pub fn rounded<U: Element>(&self) -> Tensor<U, R> {
        self.map(|x| U::of_f64(x.to_f64()))
    }

    /// Normally distributed numbers, the same for the same seed on every machine.
    ///
    /// ```
    /// use qkv::Tensor;
    /// let a = Tensor::<f32, 4>::randn([2, 8, 100, 64], 1);
    /// let mean = a.data().iter().sum::<f32>() / a.data().len() as f32;
    /// assert!(mean.abs() < 0.02);
    /// ```
    pub fn randn(shape: [usize; R], seed: u64) -> Self {
        let count: usize = shape.iter().product();
        let pairs = (0..count.div_ceil(2) as u64).flat_map(|pair| normals(pair, seed));
        Tensor { shape, data: pairs.take(count).map(T::of_f64).collect() }
    }
}

/// A pair of normally distributed numbers.
fn normals(pair: u64, seed: u64) -> [f64; 2] {
    let [a, b, c, d] = philox::block([pair as u32, (pair >> 32) as u32, 0x6e6f_726d, 0], seed);
    let unit = |high: u32, low: u32| ((u64::from(high) << 32 | u64::from(low)) as f64 + 0.5) / 2f64.powi(64);
    let (radius, angle) = ((-2.0 * unit(a, b).ln()).sqrt(), std::f64::consts::TAU * unit(c, d));
    [radius * angle.cos(), radius * angle.sin()]
}

impl<T, const R: usize> std::ops::Index<[usize; R]> for Tensor<T, R> {
    type Output = T;
    fn index(&self, index: [usize; R]) -> &T {
        &self.data[self.at(index)]
    }
}

impl<T, const R: usize> std::ops::IndexMut<[usize; R]> for Tensor<T, R> {
    fn index_mut(&mut self, index: [usize; R]) -> &mut T {
        let at = self.at(index);
        &mut self.data[at]
    }
}

fn padded_shape<const R: usize>(shape: [usize; R]) -> [usize; 4] {
    const { assert!(R <= 4, "a view has four axes") };
    let mut padded = [1; 4];
    padded[4 - R..].copy_from_slice(&shape);
    padded
}

/// Missing axes count as 1, in front.
impl<'a, T, const R: usize> From<&'a Tensor<T, R>> for View<'a, T> {
    fn from(tensor: &'a Tensor<T, R>) -> Self {
        View::new(&tensor.data, padded_shape(tensor.shape)).expect("a tensor holds its shape")
    }
}

/// A mask of `bool`, for [`Inputs::bits`](crate::Inputs::bits).
impl<'a, const R: usize> From<&'a Tensor<bool, R>> for View<'a, u8> {
    fn from(tensor: &'a Tensor<bool, R>) -> Self {
        View::<bool>::from(tensor).into()
    }
}

/// Missing axes count as 1, in front.
impl<'a, T, const R: usize> From<&'a mut Tensor<T, R>> for ViewMut<'a, T> {
    fn from(tensor: &'a mut Tensor<T, R>) -> Self {
        ViewMut::new(&mut tensor.data, padded_shape(tensor.shape)).expect("a tensor holds its shape")
    }
}

#[cfg(feature = "ndarray")]
mod with_ndarray {
    use super::Tensor;
    use ndarray::{Array, Dim, Dimension, IntoDimension};

    impl<T, const R: usize> From<Tensor<T, R>> for Array<T, Dim<[usize; R]>>
    where
        [usize; R]: IntoDimension<Dim = Dim<[usize; R]>>,
        Dim<[usize; R]>: Dimension,
    {
        fn from(tensor: Tensor<T, R>) -> Self {
            Array::from_shape_vec(tensor.shape.into_dimension(), tensor.into_data()).expect("a tensor holds its shape")
        }
    }
}
