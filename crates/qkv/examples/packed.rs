//! A training step over packed sequences: several documents in one row, kept apart by segments, with dropout.
//! `cargo run --release -p qkv --example packed`.

use qkv::{Attention, Inputs, Mask, Tensor, Upstream, segments_of};

fn main() -> qkv::Result<()> {
    // Three documents of 100, 60 and 96 tokens, one after the other. No padding is computed.
    let segments = segments_of(&[0, 100, 160, 256])?; // cumulative lengths, as varlen kernels take them
    let [q, k, v, target] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 4, 256, 32], seed));
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::segments()).dropout(0.1);

    let mut v = v;
    for step in 0..5 {
        // A new seed at each step; the backward pass gets the seed of its forward pass.
        let inputs = Inputs::new(&q, &k, &v).segments(&segments, &segments).seed(step);
        let out = attention.forward(inputs)?;
        // Loss: half the squared distance to the target; its gradient is the difference.
        let pairs = || out.values.data().iter().zip(target.data());
        let loss: f32 = pairs().map(|(y, t)| 0.5 * (y - t) * (y - t)).sum();
        let d_out = Tensor::new(pairs().map(|(y, t)| y - t).collect(), out.values.shape())?;
        let grad = attention.backward(inputs, &out, Upstream::new(&d_out))?;
        println!("step {step}: loss {loss:.1}");
        v.data_mut().iter_mut().zip(grad.v.data()).for_each(|(v, g)| *v -= 0.05 * g);
    }
    Ok(())
}
