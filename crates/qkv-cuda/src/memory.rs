//! Device memory: tensors owned by others, described by pointer, shape and strides, and buffers owned by this crate.

use crate::device::Stream;
use crate::driver::Driver;
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// The element type of a tensor. Kernels accumulate in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits, multiplied in f32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        if self == Dtype::F32 { 4 } else { 2 }
    }

    /// The type with this name in `qkv`; none for f64, which runs only on the CPU.
    pub fn named(name: &str) -> Option<Dtype> {
        match name {
            "f32" => Some(Dtype::F32),
            "bf16" => Some(Dtype::Bf16),
            "f16" => Some(Dtype::F16),
            _ => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        })
    }
}

/// A 4-D tensor in device memory. Strides count elements; a stride of 0 broadcasts. It owns nothing: its creator keeps
/// the memory alive as long as work on a stream uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The address of the first element.
    pub ptr: u64,
    /// The length of each axis.
    pub shape: [usize; 4],
    /// Elements from one index of an axis to the next.
    pub strides: [i64; 4],
}

impl Strided {
    /// A row-major tensor.
    pub fn contiguous(ptr: u64, shape: [usize; 4]) -> Strided {
        let [_, h, n, d] = shape.map(|axis| axis as i64);
        Strided { ptr, shape, strides: [h * n * d, n * d, d, 1] }
    }

    /// Elements from the first to one past the last.
    pub fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let axes = self.shape.iter().zip(self.strides);
        axes.map(|(&axis, stride)| (axis - 1) * stride.unsigned_abs() as usize).sum::<usize>() + 1
    }

    /// Whether rows can be read 16 bytes at a time.
    pub(crate) fn is_vectorized(&self, dtype: Dtype) -> bool {
        let each = (16 / dtype.size()) as i64;
        self.strides[3] == 1
            && self.ptr.is_multiple_of(16)
            && self.strides[..3].iter().zip(&self.shape[..3]).all(|(stride, &axis)| axis <= 1 || stride % each == 0)
    }

    /// Whether TMA can address it, as 16-bit elements: contiguous rows, every other stride a multiple of 16 bytes.
    pub(crate) fn is_tma_addressable(&self) -> bool {
        let step = |axis: usize| self.shape[axis] <= 1 || self.strides[axis] > 0 && self.strides[axis] % 8 == 0;
        self.ptr.is_multiple_of(16) && (self.strides[3] == 1 || self.shape[3] <= 1) && (0..3).all(step)
    }

    /// Broadcasts each axis of length 1 to that of `shape`.
    pub(crate) fn broadcast(mut self, tensor: &'static str, shape: [usize; 4]) -> Result<Strided> {
        for (axis, &expected) in shape.iter().enumerate() {
            match self.shape[axis] {
                len if len == expected => {}
                1 => self.strides[axis] = 0,
                _ => {
                    let expected = format!("something that broadcasts to {shape:?}");
                    return Err(qkv::Error::Shape { tensor, found: self.shape.to_vec(), expected }.into());
                }
            }
        }
        self.shape = shape;
        Ok(self)
    }
}

/// Device memory that is freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    ptr: u64,
    bytes: usize,
    driver: Arc<dyn Driver>,
}

impl Buffer {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Buffer> {
        // An empty buffer has no address, so that a plan without constants makes no call to the driver.
        let ptr = if bytes == 0 { 0 } else { driver.allocate(bytes)? };
        Ok(Buffer { ptr, bytes, driver: driver.clone() })
    }

    /// A buffer with a copy of `data`, whose type has no padding.
    pub(crate) fn from_slice<T: Copy>(driver: &Arc<dyn Driver>, data: &[T], stream: Stream) -> Result<Buffer> {
        let buffer = Buffer::new(driver, size_of_val(data))?;
        buffer.write_unpadded(data, stream)?;
        Ok(buffer)
    }

    /// The address of the first byte.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// The size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies scalars to the device.
    pub fn write<T: Scalar>(&self, data: &[T], stream: Stream) -> Result<()> {
        self.write_unpadded(data, stream)
    }

    /// Like [`write`](Buffer::write), for types that this crate knows to have no padding.
    pub(crate) fn write_unpadded<T: Copy>(&self, data: &[T], stream: Stream) -> Result<()> {
        let bytes = size_of_val(data);
        if bytes > self.bytes {
            return Err(Error::memory("buffer", format!("has {} bytes, fewer than the {bytes} to write", self.bytes)));
        }
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: initialized data without padding may be read as bytes.
        self.driver.write(self.ptr, unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), bytes) }, stream)
    }

    /// Copies scalars to the host, after all work on the stream.
    pub fn read<T: Scalar>(&self, count: usize, stream: Stream) -> Result<Vec<T>> {
        let bytes = count.saturating_mul(size_of::<T>());
        if bytes > self.bytes {
            return Err(Error::memory("buffer", format!("has {} bytes, fewer than the {bytes} to read", self.bytes)));
        }
        let mut data = vec![T::default(); count];
        if bytes == 0 {
            return Ok(data);
        }
        // SAFETY: every bit pattern is a value of the sealed scalar types.
        let into = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), bytes) };
        self.driver.read(into, self.ptr, stream)?;
        Ok(data)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.ptr != 0 {
            self.driver.free(self.ptr);
        }
    }
}

/// A number type of which every bit pattern is a valid value.
pub trait Scalar: Copy + Default + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! scalars {
    ($($t:ty)*) => {$(
        impl sealed::Sealed for $t {}
        impl Scalar for $t {}
    )*};
}

scalars! { f32 f64 half::bf16 half::f16 u8 i32 u32 i64 u64 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_that_tma_cannot_address_are_recognized() {
        let dense = Strided::contiguous(4096, [2, 4, 100, 64]);
        assert!(dense.is_tma_addressable());
        assert!(!Strided { ptr: 4098, ..dense }.is_tma_addressable());
        assert!(!Strided::contiguous(4096, [2, 4, 100, 33]).is_tma_addressable());
        assert!(!Strided { strides: [1, 100, 200, 2], ..dense }.is_tma_addressable());
        // [B, N, H, D] in memory, as a projection leaves it.
        assert!(Strided { strides: [100 * 256, 64, 256, 1], ..dense }.is_tma_addressable());
        assert!(!Strided { strides: [0, 6400, 64, 1], ..dense }.is_tma_addressable(), "a broadcast axis is copied");
    }
}
