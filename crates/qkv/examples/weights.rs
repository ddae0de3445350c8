//! The weights of a long sequence, recomputed on demand: `cargo run --release -p qkv --example weights`.

use qkv::{Attention, Inputs, Mask, Pool, Tensor};

fn main() -> qkv::Result<()> {
    let n = 16_384; // all weights of one head would take 1 GiB
    let x = Tensor::<f32, 4>::randn([1, 2, n, 32], 1);
    let causal = Attention::scaled_dot().mask(Mask::causal() & Mask::window(2048, 0));
    let inputs = Inputs::new(&x, &x, &x);
    let out = causal.forward(inputs)?;
    let weights = causal.weights(inputs, &out)?;

    // A few rows of head 1, exactly.
    let rows = weights.rows(0, 1, 9000..9003)?; // [3, n]
    for r in 0..3 {
        let row = &rows.data()[r * n..][..n];
        let (key, largest) = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("a row has keys");
        println!("query {}: sum {:.4}, most on key {key} ({largest:.4})", 9000 + r, row.iter().sum::<f32>());
    }

    // The whole matrix as a picture.
    let picture = weights.pooled(0, 1, 0..n, 0..n, [24, 48], Pool::Max)?;
    let largest = picture.data().iter().copied().fold(0.0, f32::max);
    for row in picture.data().chunks(48) {
        let shade = |w: &f32| [' ', '.', ':', '+', '#'][((w / largest).sqrt() * 4.0).ceil() as usize];
        println!("{}", row.iter().map(shade).collect::<String>());
    }
    Ok(())
}
