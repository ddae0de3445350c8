//! Records an attention layer of any length for `qkv explore --recording`:
//!
//! ```text
//! cargo run --release -p qkv-explore --example record -- 20000 8 long.safetensors
//! ```
//!
//! Queries and keys are synthetic: each head attends to a different distance. A recording of a real model needs the
//! same data: `q`, `k`, the log-sum-exp that `forward` returns anyway, and tokens.

use qkv::{Attention, Inputs, Mask, Output, OwnedInputs, Place, Tensor};
use qkv_explore::{AttentionCall, Layer, Recording, Side, WeightSource, file};
use std::error::Error;

const WIDTH: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |otherwise| arguments.next().map_or(Ok(otherwise), |text| text.parse::<usize>());
    let (tokens, heads) = (number(20_000)?, number(8)?);
    let path = arguments.next().unwrap_or("long.safetensors".into());

    let attention = Attention::scaled_dot().mask(Mask::causal());
    let noise = |seed| Tensor::<f32, 4>::randn([1, heads, tokens, WIDTH], seed);
    let (mut q, mut k) = (noise(1), noise(2)); // [1, H, N, D]
    for h in 0..heads {
        for i in 0..tokens {
            for pair in 0..WIDTH / 4 {
                // Sinusoids of the position: q_i and k_j agree where i − j is near the head's distance.
                let wave = (40.0f32).powf(-(pair as f32) / 8.0) / (1 << h.min(6)) as f32;
                let back = (h * h * 7) as f32;
                let (at, from) = (wave * i as f32, wave * (i as f32 - back));
                (q[[0, h, i, 2 * pair]], q[[0, h, i, 2 * pair + 1]]) = (3.0 * from.cos(), 3.0 * from.sin());
                (k[[0, h, i, 2 * pair]], k[[0, h, i, 2 * pair + 1]]) = (3.0 * at.cos(), 3.0 * at.sin());
            }
        }
    }
    let nothing = Tensor::new(Vec::new(), [1, heads, tokens, 0])?; // no values: weights need none
    let lse = attention.forward(Inputs::new(&q, &k, &nothing))?.lse; // [1, H, N]
    let output = Output::of_lse(lse, 0, Place::Start)?;
    let call = AttentionCall::new(attention, OwnedInputs::new(q, k, nothing), Some(output));
    let layer = Layer {
        name: "layers.0".into(),
        group: "layers".into(),
        queries: 0,
        keys: 0,
        weights: WeightSource::Call(Box::new(call)),
        importance: None,
    };
    let recording = Recording {
        text: format!("{tokens} tokens"),
        output: None,
        sides: vec![Side::numbered("tokens", tokens)],
        layers: vec![layer],
        steps: Vec::new(),
        form: None,
    };
    file::save(&recording, &path)?;
    println!("{path}: {tokens} tokens, {heads} heads; `qkv explore --recording {path}` shows it");
    Ok(())
}
