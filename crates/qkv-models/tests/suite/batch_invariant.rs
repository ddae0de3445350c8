//! In batch-invariant inference, what a device computes for a sequence has the same bits alone and in any batch: on the
//! emulated device, and on a GPU if there is one.

use super::devices::devices;
use qkv::{Attention, Mask};
use qkv_cuda::Dtype;
use qkv_cuda::operations::Operations;
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{
    Architecture, Encoder, EncoderConfig, GptConfig, Model, ModelConfig, RecurrentConfig, Rows, Search, SpecialTokens,
    TransformerConfig,
};
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};
use qkv_nn::{Machine, Parameters, Pool, Tape};

const CLASSES: usize = 30;

/// Devices in f32 and in bf16.
fn all_devices() -> Vec<Operations> {
    [Dtype::F32, Dtype::Bf16].into_iter().flat_map(devices).collect()
}

fn machines() -> Vec<Machine> {
    let on = |operations: Operations| Machine::new(1).on_cuda(operations).batch_invariant(true);
    all_devices().into_iter().map(on).collect()
}

/// Token sequences of many lengths; the longest has 70 tokens, more than a tile of attention, and others 1 and 2.
fn sequences(count: usize) -> Vec<Vec<u32>> {
    let length = |at: usize| [5, 70, 1, 17, 2, 33, 9, 64, 12, 40, 3][at % 11];
    let token = |at: usize, i: usize| 3 + ((7 * at + 5 * i + i * i / 3) % (CLASSES - 3)) as u32;
    (0..count).map(|at| (0..length(at)).map(|i| token(at, i)).collect()).collect()
}

fn model(architecture: Architecture) -> (Model, Parameters<f32>) {
    let specials = SpecialTokens { pad: 0, bos: 1, eos: 2 };
    Model::new(&ModelConfig::new(architecture, CLASSES, specials), 1).unwrap()
}

fn gpts() -> [(&'static str, Architecture); 3] {
    let gpt = GptConfig { d_model: 24, ffn_dim: 40, heads: 3, layers: 2, max_positions: 80, ..Default::default() };
    let llama = GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        activation: FeedKind::SwiGlu,
        key_heads: Some(2),
        heads: 4,
        bias: false,
        ..gpt.clone()
    };
    // Widths that are no multiples of 16 bytes.
    let odd = GptConfig { d_model: 18, ffn_dim: 21, ..gpt.clone() };
    [("gpt", gpt), ("llama", llama), ("odd widths", odd)].map(|(name, sizes)| (name, Architecture::Gpt(sizes)))
}

fn translators() -> [(&'static str, Architecture); 2] {
    let window = Attention::scaled_dot().mask(Mask::window(6, 6));
    let transformer = TransformerConfig {
        d_model: 24,
        ffn_dim: 40,
        heads: 3,
        encoder_layers: 2,
        decoder_layers: 2,
        encoder_attention: window.clone(),
        decoder_attention: window,
        ..Default::default()
    };
    let recurrent = RecurrentConfig { d_model: 24, hidden: 16, attention_width: 8, ..Default::default() };
    [("transformer, window", Architecture::Transformer(transformer)), ("recurrent", Architecture::Recurrent(recurrent))]
}

/// The logits of the tokens of each sequence, read in one padded batch.
fn logits(model: &Model, parameters: &Parameters<f32>, machine: &Machine, rows: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let (pool, batch) = (Pool::new(), Rows::new(rows, 0));
    let mut tape = Tape::inference(parameters, &pool, machine);
    // A decoder-only model takes sources of one length.
    let source = Rows::new(&vec![vec![1]; rows.len()], 0);
    let scores = model.scores(&mut tape, &source, &batch).unwrap(); // (B, N, V)
    let found = scores.value().data().chunks_exact(batch.length * CLASSES);
    let found = found.zip(rows).map(|(row, tokens)| row[..tokens.len() * CLASSES].to_vec()).collect();
    machine.check().unwrap();
    found
}

#[test]
fn logits_have_the_same_bits_alone_and_in_a_batch() {
    let rows = sequences(12);
    let machines = machines();
    for (name, architecture) in gpts() {
        let (model, parameters) = model(architecture);
        for machine in &machines {
            let together = logits(&model, &parameters, machine, &rows);
            for (row, together) in rows.iter().zip(&together) {
                let alone = logits(&model, &parameters, machine, std::slice::from_ref(row));
                assert_eq!(&alone[0], together, "{name}, {} tokens, {machine:?}", row.len());
            }
        }
    }
}

#[test]
fn translations_and_their_scores_have_the_same_bits_alone_and_in_a_batch() {
    // More sentences than products of few rows take.
    let mut sources = sequences(9);
    sources.iter_mut().for_each(|source| source.truncate(20));
    let searches = [
        Search { length_ratio: 0.0, length_extra: 3, ..Search::greedy() },
        Search { length_ratio: 0.0, length_extra: 3, beam: 3, ..Search::default() },
    ];
    let machines = machines();
    for (name, architecture) in translators() {
        let (model, parameters) = model(architecture);
        for (machine, search) in machines.iter().flat_map(|machine| searches.iter().map(move |by| (machine, by))) {
            let run = |sources: &[Vec<u32>]| search.run(&model, &parameters, &Pool::new(), machine, sources).unwrap();
            let together = run(&sources);
            // Of 20 tokens, 1 and 17.
            for (source, together) in sources.iter().zip(together).skip(1).take(3) {
                let alone = run(std::slice::from_ref(source)).remove(0);
                let bits = |found: &[qkv_models::Hypothesis]| -> Vec<(Vec<u32>, u64)> {
                    found.iter().map(|one| (one.tokens.clone(), one.log_probability.to_bits())).collect()
                };
                assert_eq!(bits(&alone), bits(&together), "{name}, {} tokens, {search:?}, {machine:?}", source.len());
            }
        }
    }
}

#[test]
fn embeddings_have_the_same_bits_alone_and_in_a_batch() {
    let tokenizer = Tokenizer::train(["the quick brown fox jumps over the lazy dog\n"], Kind::Characters).unwrap();
    let config =
        EncoderConfig { d_model: 24, ffn_dim: 40, heads: 3, layers: 2, max_positions: 80, ..Default::default() };
    let encoder = Encoder::new(&config, tokenizer, 5).unwrap();
    let texts: Vec<String> = (0..12).map(|at| "the lazy dog jumps over ".repeat(3)[..5 * at].into()).collect();
    for machine in machines() {
        let together = encoder.embed(&texts, &machine).unwrap();
        for (text, together) in texts.iter().zip(&together) {
            assert_eq!(&encoder.embed(&[text], &machine).unwrap()[0], together, "{text}, {machine:?}");
        }
    }
}

#[test]
fn without_the_option_a_batch_changes_bits_on_a_device() {
    let rows = sequences(12);
    let (model, parameters) = model(gpts().into_iter().next().unwrap().1);
    let Some(operations) = devices(Dtype::F32).into_iter().next() else { return };
    let machine = Machine::new(1).on_cuda(operations);
    let together = logits(&model, &parameters, &machine, &rows);
    let differs = |(row, together): (&Vec<u32>, &Vec<f32>)| {
        &logits(&model, &parameters, &machine, std::slice::from_ref(row))[0] != together
    };
    assert!(rows.iter().zip(&together).any(differs), "the tests above cannot fail");
}
