//! The devices that tests run on.

use qkv_cuda::operations::Operations;
use qkv_cuda::{Cuda, Dtype};
use std::io::Write;

/// The emulated device and the GPU, if there is one: in f32, and in bf16, where many results are equal.
pub fn devices() -> Vec<Operations> {
    let found: Vec<Cuda> = [Cuda::emulated(), Cuda::new(0)].into_iter().filter_map(there).collect();
    let dtypes = [Dtype::F32, Dtype::Bf16];
    dtypes.into_iter().flat_map(|dtype| found.iter().map(move |cuda| cuda.operations(dtype).unwrap())).collect()
}

/// The emulated device in f32.
pub fn emulated() -> Option<Operations> {
    there(Cuda::emulated()).map(|cuda| cuda.operations(Dtype::F32).unwrap())
}

/// A device that is not there is skipped; a kernel that does not compile for one that is there is a failure.
pub fn there(cuda: qkv_cuda::Result<Cuda>) -> Option<Cuda> {
    // Bypasses the harness, which captures the output of passing tests.
    cuda.map_err(|error| drop(writeln!(std::io::stderr(), "skipped: {error}"))).ok()
}
