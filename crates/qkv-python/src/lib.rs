//! The native half of the Python package `qkv`: the library's descriptions as Python objects ([`description`],
//! [`attention`]), input arrays ([`borrowed`]) and output arrays ([`array`]), calls that release the GIL ([`call`],
//! [`ops`], [`cuda`]), and the threads that they run on ([`pool`]). The package around it is in `python/qkv`.

mod allocated;
mod array;
mod attention;
mod borrowed;
mod call;
mod cuda;
mod description;
mod dlpack;
mod dtype;
mod errors;
mod inputs;
mod ops;
mod parsed;
mod pool;
mod results;
mod spelling;

use pyo3::prelude::*;

/// The native half of `qkv`.
#[pymodule]
mod _qkv {
    use super::*;

    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::attention::Attention;
    #[pymodule_export]
    use super::cuda::{cuda_backward_into, cuda_forget, cuda_forward_into, cuda_kernels, cuda_look_in, cuda_plans};
    #[pymodule_export]
    use super::description::{Bias, Features, Mask, Place, Score, Select, alibi_slopes, lsh_buckets, segments_of};
    #[pymodule_export]
    use super::ops::{backward_into, forward_into, forward_new, values_new};
    #[pymodule_export]
    use super::results::{Gradients, Output, Weights};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// The number of threads of calls that do not specify it.
    #[pyfunction]
    fn get_num_threads(py: Python<'_>) -> PyResult<usize> {
        call::threads(py, None)
    }

    /// Sets the number of threads of calls that do not specify it; 0 for one per core, or PyTorch's number if PyTorch
    /// is in use.
    #[pyfunction]
    fn set_num_threads(threads: usize) {
        pool::set_threads(threads);
    }
}
