//! cuBLASLt, NVIDIA's library of matrix products, loaded at run time from the toolkit or a Python package
//! (`nvidia-cublas`). An algorithm is chosen once per kind of product, by the library's own heuristic, without
//! benchmarking: the same shapes get the same algorithm, and so the same bits, in every run.

use crate::device::Stream;
use crate::error::{Error, Result};
use crate::matmul::{Epilogue, Matmul, MatmulOperand};
use crate::memory::Dtype;
use crate::toolkit;
use libloading::Library;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;

const NAMES: [&str; 5] =
    ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "cublasLt64_13.dll", "cublasLt64_12.dll"];

type Handle = *mut c_void;
type Status = c_int;

// Values of `cublasLt.h`.
const COMPUTE_32F: c_int = 68;
const REAL_32F: c_int = 0;
const REAL_16F: c_int = 2;
const REAL_16BF: c_int = 14;
const TRANSPOSE: c_int = 1;
/// `cublasLtMatmulDescAttributes_t`.
const TRANSA: c_int = 3;
const TRANSB: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const AUX_POINTER: c_int = 11;
const AUX_LEADING_DIMENSION: c_int = 12;
/// `cublasLtEpilogue_t`.
const EPILOGUE_BIAS: c_int = 4;
const EPILOGUE_GELU_AUX_BIAS: c_int = 164;
/// `cublasLtMatmulPreferenceAttributes_t`.
const MAX_WORKSPACE_BYTES: c_int = 1;
const MIN_ALIGNMENT_A: c_int = 5;
const MIN_ALIGNMENT_B: c_int = 6;
const MIN_ALIGNMENT_C: c_int = 7;
const MIN_ALIGNMENT_D: c_int = 8;

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Debug)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            fn bind(library: &Library) -> Result<Functions, libloading::Error> {
                Ok(Functions {
                    // SAFETY: these are the signatures of `cublasLt.h`, which are fixed for a symbol's name.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! {
    create = "cublasLtCreate" (*mut Handle);
    create_call = "cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int);
    set_call = "cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize);
    create_layout = "cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64);
    create_preference = "cublasLtMatmulPreferenceCreate" (*mut Handle);
    set_preference = "cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize);
    destroy_preference = "cublasLtMatmulPreferenceDestroy" (Handle);
    heuristic = "cublasLtMatmulAlgoGetHeuristic" (
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut HeuristicResult, *mut c_int
    );
    matmul = "cublasLtMatmul" (
        Handle, Handle, *const f32, u64, Handle, u64, Handle, *const f32, u64, Handle, u64, Handle,
        *const [u64; 8], u64, usize, *mut c_void
    );
}

/// What the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    a: MatmulOperand,
    b: MatmulOperand,
    c: Dtype,
    c_stride: usize,
    add: bool,
    epilogue: Epilogue,
    /// Of the three matrices, in bytes.
    alignment: [u32; 3],
}

/// The largest power of two up to 256 that divides an address.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(8)
}

/// A product that has been set up: addresses of the library's descriptors, which live as long as the process.
#[derive(Clone, Copy, Debug)]
struct Prepared {
    call: usize,
    a: usize,
    b: usize,
    c: usize,
    algorithm: [u64; 8],
}

/// The loaded library.
#[derive(Debug)]
pub(crate) struct CublasLt {
    functions: Functions,
    handle: usize,
    workspace: u64,
    prepared: HashMap<Key, Prepared>,
    _library: Library,
}

impl CublasLt {
    /// What NVIDIA recommends for Hopper.
    pub const WORKSPACE_BYTES: usize = 32 << 20;

    /// Loads the library of this machine. The device's context must be current.
    pub fn new() -> Result<CublasLt> {
        let mut looked_for = Vec::new();
        for path in toolkit::candidates("QKV_CUBLASLT", &NAMES, "libcublasLt.so", "cublas") {
            looked_for.push(format!("`{}`", path.display()));
            // SAFETY: the library has no initializer with preconditions; a file that is no library is an error.
            let Ok(library) = (unsafe { Library::new(&path) }) else { continue };
            let Ok(functions) = Functions::bind(&library) else { continue };
            let mut handle = ptr::null_mut();
            // SAFETY: it writes one pointer.
            check(unsafe { (functions.create)(&mut handle) }, "opening cuBLASLt")?;
            let handle = handle as usize;
            return Ok(CublasLt { functions, handle, workspace: 0, prepared: HashMap::new(), _library: library });
        }
        Err(Error::NoCublas { looked_for })
    }

    pub fn has_workspace(&self) -> bool {
        self.workspace != 0
    }

    /// Sets the workspace: [`WORKSPACE_BYTES`](CublasLt::WORKSPACE_BYTES) of device memory.
    pub fn set_workspace(&mut self, workspace: u64) {
        self.workspace = workspace;
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The device's context is current, and every pointer is to device memory as large as the sizes say.
    pub unsafe fn matmul(&mut self, call: &Matmul, stream: Stream) -> Result<()> {
        let Matmul { sizes, a, b, c, c_stride, add, epilogue, pointers } = *call;
        if sizes[0] == 0 || sizes[1] == 0 {
            return Ok(());
        }
        let added = if add { pointers.added } else { pointers.c };
        let alignment = [pointers.a, pointers.b, pointers.c | added].map(alignment);
        let key = Key { sizes, a, b, c, c_stride, add, epilogue, alignment };
        let prepared = match self.prepared.get(&key) {
            Some(prepared) => *prepared,
            None => {
                // SAFETY: the context is current.
                let prepared = unsafe { self.prepare(&key)? };
                self.prepared.insert(key, prepared);
                prepared
            }
        };
        let functions = &self.functions;
        let Prepared { call, a, b, c, algorithm } = prepared;
        let (one, beta) = (1.0f32, if add { 1.0f32 } else { 0.0 });
        let action = "multiplying by cuBLASLt";
        // SAFETY: the descriptors are the library's; pointers are as the caller promises. A row-major matrix here is a
        // transposed column-major one there, so the operands swap places.
        unsafe {
            if epilogue != Epilogue::None {
                let bias = &raw const pointers.bias;
                check((functions.set_call)(call as Handle, BIAS_POINTER, bias.cast(), 8), action)?;
            }
            if epilogue == Epilogue::Gelu {
                let before = &raw const pointers.before;
                check((functions.set_call)(call as Handle, AUX_POINTER, before.cast(), 8), action)?;
            }
            let code = (functions.matmul)(
                self.handle as Handle,
                call as Handle,
                &one,
                pointers.b,
                b as Handle,
                pointers.a,
                a as Handle,
                &beta,
                added,
                c as Handle,
                pointers.c,
                c as Handle,
                &algorithm,
                self.workspace,
                CublasLt::WORKSPACE_BYTES,
                stream.0 as *mut c_void,
            );
            check(code, action).map_err(|error| describe(error, &key))
        }
    }

    /// Sets up a product and chooses its algorithm.
    ///
    /// # Safety
    /// The device's context is current.
    unsafe fn prepare(&self, key: &Key) -> Result<Prepared> {
        let Functions { create_call, set_call, create_layout, .. } = self.functions;
        let [m, n, k] = key.sizes;
        let action = "preparing a product";
        // SAFETY: each call writes one pointer, or reads as many bytes as its argument says.
        unsafe {
            let mut call = ptr::null_mut();
            check(create_call(&mut call, COMPUTE_32F, REAL_32F), action)?;
            let set = |attribute: c_int, value: &c_int| {
                check(set_call(call, attribute, (&raw const *value).cast(), size_of::<c_int>()), action)
            };
            // A row-major matrix is a column-major one transposed: Cᵀ = Bᵀ · Aᵀ.
            if key.b.transposed {
                set(TRANSA, &TRANSPOSE)?;
            }
            if key.a.transposed {
                set(TRANSB, &TRANSPOSE)?;
            }
            match key.epilogue {
                Epilogue::None => {}
                Epilogue::Bias => set(EPILOGUE, &EPILOGUE_BIAS)?,
                Epilogue::Gelu => {
                    set(EPILOGUE, &EPILOGUE_GELU_AUX_BIAS)?;
                    let leading = key.c_stride as i64;
                    let leading = &raw const leading;
                    check(set_call(call, AUX_LEADING_DIMENSION, leading.cast(), 8), action)?;
                }
            }
            let layout = |dtype: Dtype, rows: usize, columns: usize, stride: usize| {
                let mut layout = ptr::null_mut();
                let code = create_layout(&mut layout, real(dtype), rows as u64, columns as u64, stride as i64);
                check(code, action).map(|()| layout)
            };
            let [a, b] = [(key.a, m, k), (key.b, k, n)].map(|(operand, rows, columns)| {
                let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
                layout(operand.dtype, columns, rows, operand.stride)
            });
            let (a, b, c) = (a?, b?, layout(key.c, n, m, key.c_stride)?);
            let mut preference = ptr::null_mut();
            check((self.functions.create_preference)(&mut preference), action)?;
            let limit = CublasLt::WORKSPACE_BYTES;
            let bytes = &raw const limit;
            check((self.functions.set_preference)(preference, MAX_WORKSPACE_BYTES, bytes.cast(), 8), action)?;
            // Slices of larger arrays may begin anywhere; without these limits, an algorithm may assume a larger
            // alignment.
            let [of_a, of_b, of_c] = key.alignment;
            for (attribute, bytes) in
                [(MIN_ALIGNMENT_A, of_b), (MIN_ALIGNMENT_B, of_a), (MIN_ALIGNMENT_C, of_c), (MIN_ALIGNMENT_D, of_c)]
            {
                let bytes = &raw const bytes;
                check((self.functions.set_preference)(preference, attribute, bytes.cast(), 4), action)?;
            }
            let mut found =
                HeuristicResult { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
            let mut count = 0;
            let handle = self.handle as Handle;
            let code = (self.functions.heuristic)(handle, call, b, a, c, c, preference, 1, &mut found, &mut count);
            (self.functions.destroy_preference)(preference);
            check(code, action).map_err(|error| describe(error, key))?;
            if count == 0 {
                return Err(describe(refused(action, "there is no algorithm for it".into()), key));
            }
            let [call, a, b, c] = [call, a, b, c].map(|pointer| pointer as usize);
            Ok(Prepared { call, a, b, c, algorithm: found.algorithm })
        }
    }
}

fn real(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F32 => REAL_32F,
        Dtype::Bf16 => REAL_16BF,
        Dtype::F16 => REAL_16F,
    }
}

fn refused(action: &str, message: String) -> Error {
    Error::Driver { action: action.into(), message }
}

fn check(status: Status, action: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(refused(action, format!("cuBLAS status {status}"))) }
}

/// Adds the shapes to an error.
fn describe(error: Error, key: &Key) -> Error {
    let Error::Driver { action, message } = error else { return error };
    let [m, n, k] = key.sizes;
    Error::Driver { action: format!("{action}: [{m}, {k}] × [{k}, {n}] of {} to {}", key.a.dtype, key.c), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two() {
        assert_eq!([4096, 4096 + 64, 4096 + 6, 4097].map(alignment), [256, 64, 2, 1]);
    }

    #[test]
    fn a_heuristic_result_has_the_layout_of_cublas_lt_h() {
        assert_eq!(size_of::<HeuristicResult>(), 96);
        assert_eq!(std::mem::offset_of!(HeuristicResult, workspace_bytes), 64);
    }
}
