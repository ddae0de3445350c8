//! Scaled dot-product attention, forward and backward: `cargo run --release -p qkv --example sdpa`.

use qkv::{Attention, Inputs, Mask, Tensor, Upstream, sdpa, sdpa_causal};

fn main() -> qkv::Result<()> {
    // [B, H, N, D]
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 8, 128, 64], seed));

    // One line.
    let out = sdpa(&q, &k, &v)?;
    println!("sdpa: {:?}, first number {}", out.shape(), out[[0, 0, 0, 0]]);
    let out = sdpa_causal(&q, &k, &v)?;
    assert_eq!(out[[0, 0, 0, 0]], v[[0, 0, 0, 0]]); // the first token sees itself alone

    // With gradients: describe it once, then call forward and backward.
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let inputs = Inputs::new(&q, &k, &v);
    let out = causal.forward(inputs)?;
    let grad = causal.backward(inputs, &out, Upstream::new(&d_out))?;
    println!("gradients: q {:?}, k {:?}, v {:?}", grad.q.shape(), grad.k.shape(), grad.v.shape());
    Ok(())
}
