//! Measures attention on the first GPU over a few shapes: `cargo run --release -p qkv-cuda --example measure`. The
//! whole grid, alongside PyTorch, is `qkv bench --device cuda --against torch`.

use qkv::{Attention, Mask, Place};
use qkv_cuda::{Cuda, Dtype, Error, PlanOptions, Strided, Tensors};
use std::time::Instant;

fn main() -> Result<(), Error> {
    let start = Instant::now();
    let cuda = Cuda::new(0)?;
    println!("{}, {:.0} ms until it can be used", cuda.device().name, start.elapsed().as_secs_f64() * 1e3);
    let scaled = Attention::scaled_dot;
    // How long a plan takes: seconds if kernels have to be compiled, little if they are on disk, nothing after that.
    let room = cuda.buffer(2048 * 16 * 128 * 2)?;
    let x = Strided::contiguous(room.ptr(), [1, 16, 2048, 128]);
    for _ in 0..2 {
        let start = Instant::now();
        let options = PlanOptions::default().backward(true);
        let causal = scaled().mask(Mask::causal());
        let plan = cuda.plan(&causal, Dtype::Bf16, Place::Start, &Tensors::new(x, x, x), options)?;
        println!("plan of {}: {:.1} ms", plan.forward_kernel(), start.elapsed().as_secs_f64() * 1e3);
    }
    for [b, hk, m] in [[1, 32, 8192], [1, 8, 8192], [8, 8, 8192], [32, 8, 8192], [64, 8, 16_384], [1, 8, 131_072]] {
        let shapes = [[b, 32, 1, 128], [b, hk, m, 128]];
        let measured = cuda.benchmark(&scaled(), Dtype::Bf16, shapes, Place::End, PlanOptions::default())?;
        let ms = measured.time(0.2)?.median_ms;
        let bytes = (4 * b * hk * m * 128) as f64;
        println!("decode b {b} heads 32/{hk} keys {m}: {ms:.4} ms, {:.0} GB/s", bytes / ms / 1e6);
    }
    for (dtype, n, d, general_only) in [
        (Dtype::Bf16, 8192, 128, false),
        (Dtype::Bf16, 8192, 64, false),
        (Dtype::Bf16, 8192, 128, true),
        (Dtype::F32, 4096, 128, true),
    ] {
        let (b, h) = (16_384 / n, 2048 / d);
        for (name, mask, share) in [
            ("full", Mask::full(), 1.0),
            ("causal", Mask::causal(), 0.5),
            ("window 1024", Mask::causal() & Mask::window(1024, 0), 1024.0 / n as f64),
            ("longformer 1024", Mask::longformer(1024, [0]), 1024.0 / n as f64),
        ] {
            for backward in [false, true] {
                let shape = [b, h, n, d];
                let options = PlanOptions::default().backward(backward).general_only(general_only);
                let attention = scaled().mask(mask.clone());
                let measured = cuda.benchmark(&attention, dtype, [shape, shape], Place::Start, options)?;
                let ms = measured.time(0.15)?.median_ms;
                let products = if backward { 10.0 } else { 4.0 };
                let work = products * (b * h * n) as f64 * n as f64 * d as f64 * share;
                let kernel = match backward {
                    true => measured.plan().backward_kernel().unwrap_or_default(),
                    false => measured.plan().forward_kernel(),
                };
                println!(
                    "{dtype} n {n} d {d} {name} backward {backward}: {ms:.3} ms, {:.1} TFLOP/s, {kernel}",
                    work / ms / 1e9
                );
            }
        }
    }
    Ok(())
}
