//! Numbers as bytes, for sending tensors between ranks. All ranks of a job have the same byte order.

use qkv::half::{bf16, f16};

/// A number that travels between ranks.
pub trait Number: Copy + Default + Send + Sync + 'static {
    /// The bytes of numbers in memory, one after another.
    fn to_bytes(numbers: &[Self]) -> Vec<u8>;

    /// The numbers that these bytes represent; trailing bytes that are not a whole number are ignored.
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(
            impl Number for $number {
                fn to_bytes(numbers: &[Self]) -> Vec<u8> {
                    let mut bytes = vec![0; size_of_val(numbers)];
                    for (to, number) in bytes.chunks_exact_mut(size_of::<Self>()).zip(numbers) {
                        to.copy_from_slice(&number.to_ne_bytes());
                    }
                    bytes
                }

                fn from_bytes(bytes: &[u8]) -> Vec<Self> {
                    let number = |bytes: &[u8]| Self::from_ne_bytes(bytes.try_into().expect("the size of a number"));
                    bytes.chunks_exact(size_of::<Self>()).map(number).collect()
                }
            }
        )*
    };
}
numbers!(f32, f64, bf16, f16, i64);
