//! Times the work of a model in rounds: each line on stdin starts a round, whose seconds are printed. The caller can
//! alternate rounds with those of another program, so that load on the machine affects both alike.
//!
//! ```text
//! cargo run --release -p figures --bin pace -- embed DIR FILE [f32|bf16]
//!     a round embeds the lines of FILE
//! cargo run --release -p figures --bin pace -- generate PATH TOKENS [f32|bf16] [PROMPT_FILE]
//!     a round generates TOKENS tokens greedily: seconds of reading the prompt, of writing
//! cargo run --release -p figures --bin pace -- decode PATH TOKENS SEQUENCES
//!     a round writes so many tokens of each of so many sequences at once
//! cargo run --release -p figures --bin pace -- translate DIR FILE BEAM
//!     a round translates the lines of FILE
//! ```

use qkv_models::{Encoder, Generation, Generator, Rows, Search, Translator};
use qkv_nn::{Machine, Pool, Precision, Tape};
use std::error::Error;
use std::io::Write;
use std::time::Instant;

type Round = Result<Vec<f64>, Box<dyn Error>>;

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [what, model, of, more @ ..] = &given[..] else { return Err("three arguments are needed".into()) };
    let precision = if more.first().is_some_and(|x| x == "bf16") { Precision::Bf16 } else { Precision::F32 };
    let machine = Machine::new(rayon::current_num_threads()).precision(precision);
    match what.as_str() {
        "embed" => {
            let encoder = Encoder::open(model)?;
            let text = std::fs::read_to_string(of)?;
            let lines: Vec<&str> = text.lines().collect();
            rounds(|| {
                let start = Instant::now();
                encoder.embed(&lines, &machine)?;
                Ok(vec![start.elapsed().as_secs_f64()])
            })
        }
        "translate" => {
            let translator = Translator::open(model)?;
            let text = std::fs::read_to_string(of)?;
            let lines: Vec<&str> = text.lines().collect();
            let beam = more.first().map_or(Ok(1), |beam| beam.parse())?;
            let search = if beam == 1 { Search::greedy() } else { Search { beam, ..translator.search.clone() } };
            rounds(|| {
                let start = Instant::now();
                translator.translate(&lines, &search, &machine)?;
                Ok(vec![start.elapsed().as_secs_f64()])
            })
        }
        "decode" => {
            let generator = Generator::open(model)?;
            let (tokens, sequences): (usize, usize) = (of.parse()?, more.first().map_or(Ok(8), |x| x.parse())?);
            rounds(|| decode(&generator, &machine, tokens, sequences))
        }
        _ => {
            let generator = Generator::open(model)?;
            let how = Generation { sample: None, max_tokens: of.parse()?, ..Generation::default() };
            let text = match more.get(1) {
                Some(file) => std::fs::read_to_string(file)?,
                None => "Once upon a time, in a town by the sea,".to_owned(),
            };
            let prompt = generator.tokenizer.encode_text(&text);
            rounds(|| {
                let generated = generator.generate(&prompt, &how, &machine, &mut |_| true)?;
                Ok(vec![generated.prompt_seconds, generated.seconds])
            })
        }
    }
}

/// Decodes several sequences at once, from different first tokens.
fn decode(generator: &Generator, machine: &Machine, tokens: usize, sequences: usize) -> Round {
    let pool = Pool::new();
    let (model, parameters) = (&generator.model, &generator.parameters);
    let first: Vec<Vec<u32>> = (0..sequences).map(|at| vec![100 + at as u32]).collect();
    let source = Rows::new(&first, model.config().pad_token_id);
    let mut tape = Tape::inference(parameters, &pool, machine);
    let memory = model.encode(&mut tape, &source)?;
    let mut state = model.start(&mut tape, &memory, &source)?;
    let mut last: Vec<u32> = first.concat();
    let start = Instant::now();
    for _ in 0..tokens {
        let mut tape = Tape::inference(parameters, &pool, machine);
        let logits = model.step(&mut tape, &last, &mut state)?; // [B, 1, V]
        let rows = logits.value().data().chunks_exact(model.config().vocab_size);
        last = rows.map(|row| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0) as u32).collect();
    }
    Ok(vec![start.elapsed().as_secs_f64()])
}

fn rounds(mut round: impl FnMut() -> Round) -> Result<(), Box<dyn Error>> {
    for line in std::io::stdin().lines() {
        line?;
        let seconds: Vec<String> = round()?.iter().map(f64::to_string).collect();
        println!("{}", seconds.join(" "));
        std::io::stdout().flush()?;
    }
    Ok(())
}
