//! The devices that tests run on.

use qkv_cuda::operations::Operations;
use qkv_cuda::{Cuda, Dtype};

/// The emulated device and the GPU, if there is one: in f32, and in bf16, where many results are equal.
pub fn devices() -> Vec<Operations> {
    let on = |cuda: qkv_cuda::Result<Cuda>, dtype| {
        let operations = cuda.and_then(|cuda| cuda.operations(dtype));
        operations.map_err(|error| println!("skipped: {error}")).ok()
    };
    let dtypes = [Dtype::F32, Dtype::Bf16];
    dtypes.into_iter().flat_map(|dtype| [on(Cuda::emulated(), dtype), on(Cuda::new(0), dtype)]).flatten().collect()
}
