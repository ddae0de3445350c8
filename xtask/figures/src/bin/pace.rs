//! How long the work of a model takes, to be measured beside something else: each line on stdin is a round, whose
//! seconds are printed. Whoever asks can take turns with another program, so that a busy machine is busy for both.
//!
//! ```text
//! cargo run --release -p figures --bin pace -- embed DIR FILE [f32|bf16]        a round embeds the lines of FILE
//! cargo run --release -p figures --bin pace -- generate PATH TOKENS [f32|bf16]  a round generates TOKENS tokens
//! ```

use qkv_models::{Encoder, Generation, Generator};
use qkv_nn::{Machine, Precision};
use std::error::Error;
use std::io::Write;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [what, model, of, precision @ ..] = &given[..] else { return Err("three arguments are needed".into()) };
    let precision = if precision == ["bf16"] { Precision::Bf16 } else { Precision::F32 };
    let machine = Machine::new(rayon::current_num_threads()).precision(precision);
    match what.as_str() {
        "embed" => {
            let encoder = Encoder::open(model)?;
            let text = std::fs::read_to_string(of)?;
            let lines: Vec<&str> = text.lines().collect();
            rounds(|| {
                let start = Instant::now();
                encoder.embed(&lines, &machine)?;
                Ok(start.elapsed().as_secs_f64())
            })
        }
        _ => {
            let generator = Generator::open(model)?;
            let how = Generation { sample: None, max_tokens: of.parse()?, ..Generation::default() };
            let prompt = generator.tokenizer.encode_text("Once upon a time, in a town by the sea,");
            rounds(|| Ok(generator.generate(&prompt, &how, &machine, &mut |_| true)?.seconds))
        }
    }
}

fn rounds(mut round: impl FnMut() -> Result<f64, Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    for line in std::io::stdin().lines() {
        line?;
        println!("{}", round()?);
        std::io::stdout().flush()?;
    }
    Ok(())
}
