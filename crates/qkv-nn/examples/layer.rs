//! One attention layer learns to reverse a sequence, and shows that it attends to the mirrored position:
//! `cargo run --release -p qkv-nn --example layer`.

use qkv::Attention;
use qkv_nn::layers::{AttentionConfig, Builder, Embedding, MultiHead, PositionKind};
use qkv_nn::{AdamW, Gradients, Heads, Init, Machine, Moments, Parameters, Pool, Tape, Target};

const TOKENS: usize = 10; // vocabulary
const LENGTH: usize = 8;
const BATCH: usize = 32;
const WIDTH: usize = 32;

fn main() -> qkv::Result<()> {
    let mut parameters = Parameters::<f32>::new();
    let mut at = Builder::new(&mut parameters, 1);
    let embedding = Embedding::new(&mut at.at("embedding"), TOKENS, WIDTH, PositionKind::Learned, LENGTH);
    let config = AttentionConfig::new(Attention::scaled_dot(), Heads { query: 1, key: 1 });
    let layer = MultiHead::new(&mut at.at("attention"), WIDTH, &config)?;
    let output = at.add("output", &[TOKENS, WIDTH], Init::Xavier);

    let (pool, machine) = (Pool::new(), Machine::new(2)); // two threads
    let (mut gradients, mut moments) = (Gradients::of(&parameters), Moments::of(&parameters));
    let optimizer = AdamW::default();
    let mut random = 1u64;
    for step in 1..=300 {
        let ids: Vec<u32> = (0..BATCH * LENGTH).map(|_| draw(&mut random)).collect();
        let reversed: Vec<u32> = ids.chunks(LENGTH).flat_map(|ids| ids.iter().rev().copied()).collect();
        gradients.clear(&machine);
        let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, step);
        let x = embedding.forward(&mut tape, &ids, LENGTH, 0); // [B, N, C]
        let y = layer.forward(&mut tape, &x, &x, None, None, None)?;
        let target = Target { ids: &reversed, ignore: None, smoothing: 0.0, scale: 1.0 / ids.len() as f64 };
        let loss = tape.cross_entropy(&y, output, None, target).read();
        tape.backward();
        drop((x, y, tape));
        optimizer.step(&mut parameters, &mut gradients, &mut moments, 3e-3, &machine);
        if step % 60 == 0 {
            let (loss, right) = (loss.nll / loss.rows as f64, loss.right as f64 / loss.rows as f64);
            println!("step {step:3}   loss {loss:.3}   right {:5.1} %", 100.0 * right);
        }
    }

    let mut tape = Tape::inference(&parameters, &pool, &machine);
    tape.capture();
    let ids: Vec<u32> = (0..LENGTH as u32).collect();
    let x = embedding.forward(&mut tape, &ids, LENGTH, 0);
    layer.forward(&mut tape, &x, &x, None, None, None)?;
    let captured = tape.captured();
    let weights = captured[0].weights(&parameters, 0, 0, 0..LENGTH)?;
    println!("\nposition attends to");
    for i in 0..LENGTH {
        let best = (0..LENGTH).max_by(|&a, &b| weights[[i, a]].total_cmp(&weights[[i, b]])).expect("keys");
        println!("{i:8} {best:10}   weight {:.2}", weights[[i, best]]);
    }
    Ok(())
}

/// The next token of a linear congruential generator.
fn draw(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as u32 % TOKENS as u32
}
