//! Element types: those that attention is computed in, and the conversion of numbers from and to the bytes of a file.

use half::{bf16, f16};
use qkv_simd::Element;
use safetensors::Dtype;

/// A type that attention is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    F32,
    F64,
    Bf16,
    F16,
}

impl Precision {
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::F64, Precision::Bf16, Precision::F16];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => f32::NAME,
            Precision::F64 => f64::NAME,
            Precision::Bf16 => bf16::NAME,
            Precision::F16 => f16::NAME,
        }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Precision::F64 => 8,
            Precision::F32 => 4,
            Precision::Bf16 | Precision::F16 => 2,
        }
    }

    pub fn named(name: &str) -> Option<Precision> {
        Precision::ALL.into_iter().find(|precision| precision.name() == name)
    }

    /// The precision for a tensor's type in a file, if attention can be computed in it.
    pub fn of(dtype: Dtype) -> Option<Precision> {
        match dtype {
            Dtype::F32 => Some(Precision::F32),
            Dtype::F64 => Some(Precision::F64),
            Dtype::BF16 => Some(Precision::Bf16),
            Dtype::F16 => Some(Precision::F16),
            _ => None,
        }
    }
}

/// An element that a file can hold.
pub(crate) trait Stored: Copy + 'static {
    /// Its type in a file.
    const DTYPE: Dtype;

    /// Appends its bytes.
    fn put(self, bytes: &mut Vec<u8>);
}

macro_rules! stored {
    ($($t:ident $dtype:ident),*) => {$(
        impl Stored for $t {
            const DTYPE: Dtype = Dtype::$dtype;
            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

stored!(f32 F32, f64 F64, bf16 BF16, f16 F16, i64 I64);

/// A type to compute in; both it and its accumulator can be stored.
pub(crate) trait Computable: Stored + qkv::Element<Acc: Stored> {}
impl<T: Stored + qkv::Element<Acc: Stored>> Computable for T {}

/// Decodes floats and rounds them to `T`; `None` for other types.
pub(crate) fn floats<T: qkv_simd::Element>(dtype: Dtype, bytes: &[u8]) -> Option<Vec<T>> {
    Some(match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| T::of_f64(f32::from_le_bytes(*x).into())).collect(),
        Dtype::F64 => bytes.as_chunks().0.iter().map(|x| T::of_f64(f64::from_le_bytes(*x))).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| T::of_f64(bf16::from_le_bytes(*x).to_f64())).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| T::of_f64(f16::from_le_bytes(*x).to_f64())).collect(),
        _ => return None,
    })
}

/// Why bytes do not decode to the expected integers.
#[derive(Debug, PartialEq)]
pub(crate) enum IntegerError {
    /// Not an integer type.
    Type,
    /// A value out of range.
    Range(i128),
}

/// Decodes integers of any type, without wrapping.
pub(crate) fn integers<I: TryFrom<i128>>(dtype: Dtype, bytes: &[u8]) -> Result<Vec<I>, IntegerError> {
    let fit = |x: i128| I::try_from(x).map_err(|_| IntegerError::Range(x));
    match dtype {
        Dtype::U8 => bytes.iter().map(|&x| fit(x.into())).collect(),
        Dtype::I8 => bytes.iter().map(|&x| fit((x as i8).into())).collect(),
        Dtype::U16 => bytes.as_chunks().0.iter().map(|x| fit(u16::from_le_bytes(*x).into())).collect(),
        Dtype::I16 => bytes.as_chunks().0.iter().map(|x| fit(i16::from_le_bytes(*x).into())).collect(),
        Dtype::U32 => bytes.as_chunks().0.iter().map(|x| fit(u32::from_le_bytes(*x).into())).collect(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|x| fit(i32::from_le_bytes(*x).into())).collect(),
        Dtype::U64 => bytes.as_chunks().0.iter().map(|x| fit(u64::from_le_bytes(*x).into())).collect(),
        Dtype::I64 => bytes.as_chunks().0.iter().map(|x| fit(i64::from_le_bytes(*x).into())).collect(),
        _ => Err(IntegerError::Type),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_survives_a_round_trip() {
        fn round<T: Stored + qkv_simd::Element>() {
            let mut bytes = Vec::new();
            let numbers = [0.5, -2.0, 0.0, f64::INFINITY].map(T::of_f64);
            numbers.into_iter().for_each(|x| x.put(&mut bytes));
            assert_eq!(floats::<T>(T::DTYPE, &bytes), Some(numbers.to_vec()));
            assert_eq!(floats::<f64>(T::DTYPE, &bytes), Some(vec![0.5, -2.0, 0.0, f64::INFINITY]));
        }
        round::<f32>();
        round::<f64>();
        round::<bf16>();
        round::<f16>();
        assert_eq!(floats::<f32>(Dtype::I32, &[0; 4]), None);
    }

    #[test]
    fn integers_of_any_type_are_decoded_and_never_wrapped() {
        assert_eq!(integers::<i32>(Dtype::I8, &[255, 1]), Ok(vec![-1, 1]));
        assert_eq!(integers::<usize>(Dtype::U16, &[1, 1]), Ok(vec![257]));
        assert_eq!(integers::<usize>(Dtype::I64, &(-3i64).to_le_bytes()), Err(IntegerError::Range(-3)));
        assert_eq!(integers::<i32>(Dtype::U64, &u64::MAX.to_le_bytes()), Err(IntegerError::Range(u64::MAX.into())));
        assert_eq!(integers::<i32>(Dtype::F32, &[0; 4]), Err(IntegerError::Type));
    }
}
