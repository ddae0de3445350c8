//! Device memory: tensors that lie there, whoever owns them, and buffers of our own.

use crate::driver::{Driver, Stream};
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits; products and sums in f32.
    F32,
    /// 16 bits with the range of f32; sums in f32.
    Bf16,
    /// 16 bits, IEEE; sums in f32.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        if self == Dtype::F32 { 4 } else { 2 }
    }

    /// That of the library's type of this name. None for f64, which is the CPU's.
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

/// A tensor of four axes in device memory: where it begins, its axes, and its strides in elements. Zero strides broadcast.
/// It owns nothing: whoever makes it keeps the memory for as long as work that reads it is on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The address of its first element.
    pub at: u64,
    /// Its axes.
    pub shape: [usize; 4],
    /// Elements from one index of each axis to the next.
    pub strides: [i64; 4],
}

impl Strided {
    /// Row by row, without gaps.
    pub fn contiguous(at: u64, shape: [usize; 4]) -> Strided {
        let [_, h, n, d] = shape.map(|axis| axis as i64);
        Strided { at, shape, strides: [h * n * d, n * d, d, 1] }
    }

    /// Elements that it spans, from the first to behind the last.
    pub fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let axes = self.shape.iter().zip(self.strides);
        axes.map(|(&axis, stride)| (axis - 1) * stride.unsigned_abs() as usize).sum::<usize>() + 1
    }

    /// Whether rows can be read 16 bytes at a time.
    pub(crate) fn reads_sixteen(&self, dtype: Dtype) -> bool {
        let each = (16 / dtype.size()) as i64;
        self.strides[3] == 1
            && self.at.is_multiple_of(16)
            && self.strides[..3].iter().zip(&self.shape[..3]).all(|(stride, &axis)| axis <= 1 || stride % each == 0)
    }

    /// With each axis of 1 spread over that of `shape`.
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

/// Device memory of our own, freed when it is dropped.
#[derive(Debug)]
pub struct Buffer {
    at: u64,
    bytes: usize,
    driver: Arc<dyn Driver>,
}

impl Buffer {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Buffer> {
        Ok(Buffer { at: driver.allocate(bytes)?, bytes, driver: driver.clone() })
    }

    pub(crate) fn holding<T: Copy>(driver: &Arc<dyn Driver>, data: &[T], stream: Stream) -> Result<Buffer> {
        let buffer = Buffer::new(driver, size_of_val(data))?;
        buffer.put(data, stream)?;
        Ok(buffer)
    }

    /// Its address.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies plain numbers in.
    pub fn write<T: Number>(&self, data: &[T], stream: Stream) -> Result<()> {
        self.put(data, stream)
    }

    /// As [`write`](Buffer::write), for what the crate knows to have no padding.
    pub(crate) fn put<T: Copy>(&self, data: &[T], stream: Stream) -> Result<()> {
        let bytes = size_of_val(data);
        if bytes > self.bytes {
            return Err(Error::memory("buffer", format!("has {} bytes, and {bytes} were to be written", self.bytes)));
        }
        // SAFETY: any initialised plain data may be read as bytes; numbers have no padding.
        self.driver.write(self.at, unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), bytes) }, stream)
    }

    /// Copies plain numbers out, after all that is on the stream.
    pub fn read<T: Number>(&self, count: usize, stream: Stream) -> Result<Vec<T>> {
        let bytes = count.saturating_mul(size_of::<T>());
        if bytes > self.bytes {
            return Err(Error::memory("buffer", format!("has {} bytes, and {bytes} were to be read", self.bytes)));
        }
        let mut data = vec![T::default(); count];
        // SAFETY: every pattern of bits is a number of a sealed type of numbers.
        let into = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), bytes) };
        self.driver.read(into, self.at, stream)?;
        Ok(data)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.driver.free(self.at);
    }
}

/// A plain number, of which every pattern of bits is one.
pub trait Number: Copy + Default + sealed::Plain {}

mod sealed {
    pub trait Plain {}
}

macro_rules! numbers {
    ($($t:ty)*) => {$(
        impl sealed::Plain for $t {}
        impl Number for $t {}
    )*};
}

numbers! { f32 f64 half::bf16 half::f16 u8 i32 u32 i64 u64 }
