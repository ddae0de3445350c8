//! The devices that tests run on.

use qkv_cuda::operations::Operations;
use qkv_cuda::{Cuda, Dtype};
use std::io::Write;

/// The emulated device and, if there is one, the GPU. One that is not there is skipped; a kernel that does not compile
/// for one that is there is a failure.
pub fn devices(dtype: Dtype) -> Vec<Operations> {
    let open = |cuda: qkv_cuda::Result<Cuda>| match cuda {
        Ok(cuda) => Some(cuda.operations(dtype).unwrap()),
        Err(error) => {
            // Bypasses the harness, which captures the output of passing tests.
            let _ = writeln!(std::io::stderr(), "skipped: {error}");
            None
        }
    };
    [Cuda::emulated(), Cuda::new(0)].into_iter().filter_map(open).collect()
}
