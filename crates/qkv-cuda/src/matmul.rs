//! A matrix product, as passed to [`Driver::matmul`](crate::driver::Driver::matmul), and its definition on the host,
//! for the emulated driver.

use crate::memory::Dtype;
use half::{bf16, f16};

/// A matrix of a product, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatmulOperand {
    pub dtype: Dtype,
    /// Whether the product uses its transpose.
    pub transposed: bool,
    /// Elements from one row in memory to the next.
    pub stride: usize,
}

/// What is done to a product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    None,
    /// Adds `bias [n]`.
    Bias,
    /// Adds `bias [n]`, stores the sum in `before`, which is laid out like `C`, and applies GELU (its tanh
    /// approximation).
    Gelu,
}

/// `C [m, n] = A [m, k] · B [k, n]` or, with `add`, `C = A · B + added`, accumulated in f32. `added` may be `C` itself,
/// and has its row stride; `bias` and `before` have its type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matmul {
    pub sizes: [usize; 3],
    pub a: MatmulOperand,
    pub b: MatmulOperand,
    pub c: Dtype,
    /// Elements from one row of `C` to the next.
    pub c_stride: usize,
    pub add: bool,
    pub epilogue: Epilogue,
    pub pointers: MatmulPointers,
}

/// Where the matrices are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MatmulPointers {
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub added: u64,
    pub bias: u64,
    pub before: u64,
}

impl Matmul {
    /// Computes the product by its definition.
    ///
    /// # Safety
    /// The pointers are to host memory as large as the sizes say.
    pub unsafe fn compute_on_host(&self) {
        let [m, n, k] = self.sizes;
        let Matmul { a, b, c, c_stride, pointers, .. } = *self;
        // SAFETY: as the caller promises; every index is within its matrix.
        unsafe {
            for i in 0..m {
                for j in 0..n {
                    let mut sum = 0.0;
                    for x in 0..k {
                        let left = if a.transposed { x * a.stride + i } else { i * a.stride + x };
                        let right = if b.transposed { j * b.stride + x } else { x * b.stride + j };
                        sum += get(pointers.a, a.dtype, left) * get(pointers.b, b.dtype, right);
                    }
                    let at = i * c_stride + j;
                    if self.add {
                        sum += get(pointers.added, c, at);
                    }
                    if self.epilogue != Epilogue::None {
                        sum += get(pointers.bias, c, j);
                    }
                    if self.epilogue == Epilogue::Gelu {
                        put(pointers.before, c, at, sum);
                        let argument = 0.797_884_6 * (sum + 0.044_715 * sum * sum * sum);
                        sum *= 0.5 * (1.0 + argument.tanh());
                    }
                    put(pointers.c, c, at, sum);
                }
            }
        }
    }
}

/// # Safety
/// There is an element of this type at this index.
unsafe fn get(ptr: u64, dtype: Dtype, at: usize) -> f32 {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            Dtype::F32 => *(ptr as *const f32).add(at),
            Dtype::Bf16 => (*(ptr as *const bf16).add(at)).to_f32(),
            Dtype::F16 => (*(ptr as *const f16).add(at)).to_f32(),
        }
    }
}

/// # Safety
/// As for [`get`].
unsafe fn put(ptr: u64, dtype: Dtype, at: usize, x: f32) {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            Dtype::F32 => *(ptr as *mut f32).add(at) = x,
            Dtype::Bf16 => *(ptr as *mut bf16).add(at) = bf16::from_f32(x),
            Dtype::F16 => *(ptr as *mut f16).add(at) = f16::from_f32(x),
        }
    }
}
