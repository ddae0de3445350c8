//! The benefit of the key/value cache: the default Transformer writes 512 tokens, once with cached keys and values,
//! once recomputing everything at every step.
//!
//! ```text
//! cargo run --release -p figures --bin cache
//! ```

use qkv_models::{Architecture, Model, ModelConfig, Rows, SpecialTokens, TransformerConfig};
use qkv_nn::{Machine, Pool, Tape};
use std::error::Error;
use std::time::Instant;

const TOKENS: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let specials = SpecialTokens { pad: 0, bos: 1, eos: 2 };
    let config = ModelConfig::new(Architecture::Transformer(TransformerConfig::default()), 8000, specials);
    let (model, parameters) = Model::new(&config, 1)?;
    let (pool, machine) = (Pool::new(), Machine::new(rayon::current_num_threads()));
    let source = Rows::new(&[(0..64).map(|at| 10 + at).collect()], specials.pad);
    let likeliest = |scores: &[f32]| (0..scores.len()).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0);

    for round in 1..=3 {
        let mut tape = Tape::inference(&parameters, &pool, &machine);
        let memory = model.encode(&mut tape, &source)?;
        let (start, mut last) = (Instant::now(), specials.bos);
        let mut state = model.start(&mut tape, &memory, &source)?;
        let mut with = vec![last];
        for _ in 0..TOKENS {
            last = likeliest(model.step(&mut tape, &[last], &mut state)?.value().data()) as u32;
            with.push(last);
        }
        let cached = start.elapsed();

        let (start, mut without) = (Instant::now(), vec![specials.bos]);
        for _ in 0..TOKENS {
            // [1, so far, V]
            let scores = model.scores(&mut tape, &source, &Rows::new(&[without.clone()], specials.pad))?;
            let rows = scores.value().data();
            without.push(likeliest(&rows[rows.len() - config.vocab_size..]) as u32);
        }
        let anew = start.elapsed();
        assert_eq!(with, without, "both write the same");
        println!(
            "round {round}: {TOKENS} tokens in {:.2} s with the cache, {:.2} s without: {:.1} times as fast",
            cached.as_secs_f64(),
            anew.as_secs_f64(),
            anew.as_secs_f64() / cached.as_secs_f64()
        );
    }
    Ok(())
}
