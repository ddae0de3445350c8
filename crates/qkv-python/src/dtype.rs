//! The element types exchanged with Python: their names, sizes, and encodings in NumPy, DLPack and the buffer protocol.

use crate::dlpack::DataType;
use half::{bf16, f16};

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F64,
    Bf16,
    F16,
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
}

/// All types: name, bytes, NumPy's type string, DLPack's code.
const TABLE: [(Dtype, &str, usize, &str, u8); 10] = [
    (Dtype::F32, "float32", 4, "f4", 2),
    (Dtype::F64, "float64", 8, "f8", 2),
    (Dtype::Bf16, "bfloat16", 2, "V2", 4),
    (Dtype::F16, "float16", 2, "f2", 2),
    (Dtype::Bool, "bool", 1, "b1", 6),
    (Dtype::U8, "uint8", 1, "u1", 1),
    (Dtype::I8, "int8", 1, "i1", 0),
    (Dtype::I16, "int16", 2, "i2", 0),
    (Dtype::I32, "int32", 4, "i4", 0),
    (Dtype::I64, "int64", 8, "i8", 0),
];

impl Dtype {
    fn row(self) -> &'static (Dtype, &'static str, usize, &'static str, u8) {
        TABLE.iter().find(|row| row.0 == self).expect("every type has its row")
    }

    /// The name in NumPy and PyTorch.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Bytes of an element, and its alignment.
    pub fn size(self) -> usize {
        self.row().2
    }

    /// The type string of NumPy's array interface.
    pub fn typestr(self) -> String {
        let order = if self.size() == 1 { '|' } else { '<' };
        format!("{order}{}", self.row().3)
    }

    /// The type of a NumPy type string; `name` distinguishes bfloat16 from other two-byte void types.
    pub fn of_typestr(typestr: &str, name: impl FnOnce() -> Option<String>) -> Option<Dtype> {
        let (order, kind) = typestr.split_at_checked(1)?;
        let found = TABLE.iter().find(|row| row.3 == kind)?;
        let native = if cfg!(target_endian = "little") { "<" } else { ">" };
        let ordered = order == native || order == "|" || found.2 == 1;
        let named = found.0 != Dtype::Bf16 || name().as_deref() == Some("bfloat16");
        (ordered && named).then_some(found.0)
    }

    /// The type in DLPack's encoding.
    pub fn dlpack(self) -> DataType {
        DataType { code: self.row().4, bits: 8 * self.size() as u8, lanes: 1 }
    }

    /// The type of a DLPack encoding.
    pub fn of_dlpack(found: DataType) -> Option<Dtype> {
        let same = |row: &&(Dtype, &str, usize, &str, u8)| row.4 == found.code && 8 * row.2 == usize::from(found.bits);
        TABLE.iter().find(same).filter(|_| found.lanes == 1).map(|row| row.0)
    }

    /// The type of a buffer protocol format, in the notation of the `struct` module.
    pub fn of_format(format: &str, size: usize) -> Option<Dtype> {
        let native = if cfg!(target_endian = "little") { ['@', '=', '<'] } else { ['@', '=', '>'] };
        Some(match (format.trim_start_matches(native), size) {
            ("f", 4) => Dtype::F32,
            ("d", 8) => Dtype::F64,
            ("e", 2) => Dtype::F16,
            ("?", 1) => Dtype::Bool,
            ("B" | "c", 1) => Dtype::U8,
            ("b", 1) => Dtype::I8,
            ("h", 2) => Dtype::I16,
            ("i" | "l" | "q" | "n", 4) => Dtype::I32,
            ("l" | "q" | "n", 8) => Dtype::I64,
            _ => return None,
        })
    }
}

/// A Rust element type for which any bytes are a valid value.
pub trait Typed: Copy + Send + Sync + 'static {
    /// The corresponding type.
    const DTYPE: Dtype;
}

macro_rules! typed {
    ($($t:ty: $dtype:ident;)*) => {$(
        impl Typed for $t {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}
typed! { f32: F32; f64: F64; bf16: Bf16; f16: F16; u8: U8; i8: I8; i16: I16; i32: I32; i64: I64; }

/// Evaluates `$body` with `$T` as the Rust type of a float type.
macro_rules! of_type {
    ($dtype:expr, $name:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::Dtype::F64 => {
                type $T = f64;
                $body
            }
            $crate::dtype::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::dtype::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            other => {
                let (name, other) = ($name, other.name());
                let expected = "float32, float64, bfloat16 or float16";
                return Err($crate::errors::kind(format!("`{name}` has the type {other}, expected {expected}")));
            }
        }
    };
}
pub(crate) use of_type;
