//! What is true of every model: the parallel pass and the steps agree, gradients flow, threads change nothing.

use super::devices::devices;
use qkv::{Attention, Bias, Features, Mask};
use qkv_cuda::Dtype;
use qkv_models::{
    Architecture, Batch, GptConfig, LocalLayers, Model, ModelConfig, RecurrentConfig, Rows, Search, SpecialTokens,
    TransformerConfig,
};
use qkv_nn::layers::{AttentionStyle, FeedKind, NormKind, NormPlace, PositionKind};
use qkv_nn::{AdamW, Gradients, Machine, Moments, Parameters, Pool, Precision, Tape};

const SPECIALS: SpecialTokens = SpecialTokens { pad: 0, bos: 1, eos: 2 };

fn small() -> TransformerConfig {
    TransformerConfig { d_model: 24, ffn_dim: 40, heads: 4, encoder_layers: 2, decoder_layers: 2, ..Default::default() }
}

fn small_recurrent() -> RecurrentConfig {
    RecurrentConfig { d_model: 20, hidden: 16, attention_width: 12, ..Default::default() }
}

fn transformers() -> Vec<(&'static str, Architecture)> {
    let own = |attention: Attention| TransformerConfig {
        encoder_attention: attention.clone(),
        decoder_attention: attention,
        ..small()
    };
    [
        ("plain", small()),
        (
            "post-norm, learned, untied",
            TransformerConfig { norm: NormPlace::Post, positions: PositionKind::Learned, tied: false, ..small() },
        ),
        ("norms on both sides", TransformerConfig { norm: NormPlace::Both, ..small() }),
        ("grouped", TransformerConfig { key_heads: Some(2), ..small() }),
        ("window", own(Attention::scaled_dot().mask(Mask::window(2, 2)))),
        ("linear", own(Attention::linear(Features::Elu))),
        (
            "alibi",
            TransformerConfig {
                positions: PositionKind::None,
                ..own(Attention::scaled_dot().bias(Bias::alibi()).temperature(1.5))
            },
        ),
        ("relative, additive", own(Attention::additive().bias(Bias::relative(3)))),
        ("general, sinks", own(Attention::general().with_sinks())),
        (
            "top-k, sparsemax",
            TransformerConfig {
                cross_attention: Attention::scaled_dot().sparsemax(),
                ..own(Attention::scaled_dot().top_k(3))
            },
        ),
    ]
    .map(|(name, config)| (name, Architecture::Transformer(config)))
    .into()
}

fn recurrents() -> Vec<(&'static str, Architecture)> {
    let with = |style, attention| RecurrentConfig { style, attention, ..small_recurrent() };
    [
        ("bahdanau additive", small_recurrent()),
        (
            "bahdanau general, two layers",
            RecurrentConfig { layers: 2, ..with(AttentionStyle::Bahdanau, Attention::general()) },
        ),
        ("luong dot", with(AttentionStyle::Luong, Attention::dot())),
        ("luong scaled dot, window", with(AttentionStyle::Luong, Attention::scaled_dot().mask(Mask::window(2, 2)))),
        ("luong local", with(AttentionStyle::Luong, Attention::general().local(2))),
        ("hard", with(AttentionStyle::Bahdanau, Attention::additive().hard().straight_through())),
    ]
    .map(|(name, config)| (name, Architecture::Recurrent(config)))
    .into()
}

fn small_gpt() -> GptConfig {
    GptConfig { d_model: 24, ffn_dim: 40, heads: 4, layers: 2, max_positions: 24, ..Default::default() }
}

fn gpts() -> Vec<(&'static str, Architecture)> {
    let llama = GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        activation: FeedKind::SwiGlu,
        key_heads: Some(2),
        bias: false,
        ..small_gpt()
    };
    let gemma = GptConfig {
        activation: FeedKind::GeGluTanh,
        key_heads: Some(1),
        head_width: Some(10),
        sandwich_norm: true,
        head_norm: true,
        scaled_embedding: true,
        rotary_base: 1e6,
        local: Some(LocalLayers { window: 3, period: 2, rotary_base: 1e4 }),
        ..llama.clone()
    };
    [
        ("gpt", small_gpt()),
        ("llama", llama.clone()),
        ("llama, untied, wide heads", GptConfig { tied: false, head_width: Some(10), ..llama }),
        ("gemma", gemma),
        ("gpt, window", GptConfig { attention: Attention::scaled_dot().mask(Mask::window(3, 0)), ..small_gpt() }),
    ]
    .map(|(name, config)| (name, Architecture::Gpt(config)))
    .into()
}

fn all() -> impl Iterator<Item = (&'static str, Architecture)> {
    transformers().into_iter().chain(recurrents()).chain(gpts())
}

fn model(architecture: Architecture) -> (Model, Parameters<f32>) {
    Model::new(&ModelConfig::new(architecture, 30, SPECIALS), 1).unwrap()
}

fn batch() -> Batch {
    let pairs: [(&[u32], &[u32]); 3] =
        [(&[5, 6, 7, 8, 9, 4, 3], &[12, 13, 14]), (&[9, 8], &[20, 21, 22, 23, 24]), (&[11], &[28])];
    Batch::new(pairs, SPECIALS)
}

/// The same with sources of one length, which a decoder-only model needs in a batch.
fn even_batch() -> Batch {
    let pairs: [(&[u32], &[u32]); 3] =
        [(&[5, 6, 7, 8], &[12, 13, 14]), (&[9, 8, 11, 4], &[20, 21, 22, 23, 24]), (&[11, 3, 8, 9], &[28])];
    Batch::new(pairs, SPECIALS)
}

#[test]
fn the_parallel_pass_and_the_steps_give_the_same_scores() {
    steps_give_the_scores_of_the_parallel_pass(&Machine::new(2));
}

#[test]
fn the_parallel_pass_and_the_steps_give_the_same_scores_on_a_device() {
    for operations in devices(Dtype::F32) {
        steps_give_the_scores_of_the_parallel_pass(&Machine::new(1).on_cuda(operations));
    }
}

/// Models whose attention is computed on the CPU: see `docs/cuda.md`.
const PARTLY_ON_CPU: [&str; 7] = [
    "linear",
    "relative, additive",
    "general, sinks",
    "top-k, sparsemax",
    "bahdanau general, two layers",
    "luong local",
    "hard",
];

fn steps_give_the_scores_of_the_parallel_pass(machine: &Machine) {
    let pool = Pool::new();
    for (name, architecture) in all() {
        let (model, parameters) = model(architecture);
        let batch = if model.gpt().is_some() { even_batch() } else { batch() };
        let mut tape = Tape::inference(&parameters, &pool, machine);
        let all = model.scores(&mut tape, &batch.source, &batch.decoder_input).unwrap(); // (B, N, V)
        let memory = model.encode(&mut tape, &batch.source).unwrap();
        let mut state = model.start(&mut tape, &memory, &batch.source).unwrap();
        let (length, classes) = (batch.decoder_input.length, 30);
        for step in 0..length {
            let last: Vec<u32> = (0..3).map(|b| batch.decoder_input.ids[b * length + step]).collect();
            let scores = model.step(&mut tape, &last, &mut state).unwrap();
            // Without the cache: all tokens so far are recomputed.
            let so_far: Vec<Vec<u32>> =
                (0..3).map(|b| batch.decoder_input.ids[b * length..][..=step].to_vec()).collect();
            let uncached = model.scores(&mut tape, &batch.source, &Rows::new(&so_far, 0)).unwrap();
            for b in (0..3).filter(|&b| step < batch.decoder_input.lengths[b]) {
                let probabilities = |scores: &[f32]| -> Vec<f32> {
                    let sum: f32 = scores.iter().map(|x| x.exp()).sum();
                    scores.iter().map(|x| x.exp() / sum).collect()
                };
                let expected = probabilities(&all.value().data()[(b * length + step) * classes..][..classes]);
                let found = probabilities(&scores.value().data()[b * classes..][..classes]);
                let again = probabilities(&uncached.value().data()[(b * (step + 1) + step) * classes..][..classes]);
                for ((expected, found), again) in expected.iter().zip(found).zip(again) {
                    assert!((expected - found).abs() < 1e-5, "{name}, step {step}: {found} {expected}");
                    assert!((expected - again).abs() < 1e-5, "{name}, step {step}: {again} {expected}");
                }
            }
        }
        machine.check().unwrap();
    }
}

#[test]
fn beams_on_a_device_find_what_they_find_on_the_cpu() {
    let sources: Vec<Vec<u32>> =
        [&[5, 6, 7, 8, 9, 4, 3][..], &[9, 8], &[11], &[20, 21, 22]].map(<[u32]>::to_vec).into();
    let searches = [
        Search::greedy(),
        Search { beam: 4, never: vec![7, 12], ..Search::default() },
        Search { beam: 3, repetition_penalty: 1.4, no_repeat: 2, ..Search::default() },
    ];
    for (name, architecture) in [transformers().remove(0), transformers().remove(1), recurrents().remove(0)] {
        let (model, mut parameters) = model(architecture);
        // Logits far apart, so that rounding does not decide.
        for param in parameters.all().collect::<Vec<_>>() {
            parameters.get_mut(param).iter_mut().for_each(|x| *x *= 2.0);
        }
        for search in &searches {
            let run = |machine: &Machine| search.run(&model, &parameters, &Pool::new(), machine, &sources).unwrap();
            let expected = run(&Machine::new(1));
            for operations in devices(Dtype::F32) {
                let found = run(&Machine::new(1).on_cuda(operations));
                for (found, expected) in found.concat().iter().zip(expected.concat()) {
                    assert_eq!(found.tokens, expected.tokens, "{name}, {search:?}");
                    let [a, b] = [found.log_probability, expected.log_probability];
                    assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{name}, {search:?}: {a} {b}");
                }
            }
        }
    }
}

/// Losses of some steps of training, and the parameters after them.
fn train(
    architecture: Architecture,
    steps: usize,
    threads: usize,
    precision: Precision,
) -> (Vec<f64>, Parameters<f32>) {
    train_on(architecture, steps, &Machine::new(threads).precision(precision))
}

fn train_on(architecture: Architecture, steps: usize, machine: &Machine) -> (Vec<f64>, Parameters<f32>) {
    let (model, mut parameters) = model(architecture);
    let (pool, threads) = (Pool::new(), machine.threads());
    let workers = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let (mut gradients, mut moments) = (Gradients::of(&parameters), Moments::of(&parameters));
    let batch = batch();
    let losses = workers.install(|| {
        (0..steps)
            .map(|step| {
                gradients.clear(machine);
                let mut tape = Tape::training(&parameters, &mut gradients, &pool, machine, step as u64);
                let loss = model.loss(&mut tape, &batch, 0.1, 1.0 / batch.tokens() as f64).unwrap();
                tape.backward();
                drop(tape);
                AdamW::default().step(&mut parameters, &mut gradients, &mut moments, 0.01, machine);
                let loss = loss.read();
                loss.smoothed / loss.rows as f64
            })
            .collect()
    });
    (losses, parameters)
}

#[test]
fn every_model_learns_a_few_sentences() {
    for (name, architecture) in all() {
        let (losses, _) = train(architecture, 60, 2, Precision::F32);
        assert!(losses[59] < 0.7 * losses[0], "{name}: {} to {}", losses[0], losses[59]);
    }
}

#[test]
fn every_model_trains_on_a_device_as_on_the_cpu() {
    let devices = devices(Dtype::F32);
    for (name, architecture) in all() {
        let (there, _) = train(architecture.clone(), 3, 1, Precision::F32);
        for operations in &devices {
            let machine = Machine::new(1).on_cuda(operations.clone());
            let before = operations.bytes_read();
            let (found, parameters) = train_on(architecture.clone(), 3, &machine);
            machine.check().unwrap();
            // Only the losses are copied back: reading activations or parameters would wait for the device.
            let read = operations.bytes_read() - before;
            assert!(read <= 3 * 64 || PARTLY_ON_CPU.contains(&name), "{name}: {read} bytes came back in three steps");
            for (found, there) in found.iter().zip(&there) {
                assert!((found - there).abs() < 2e-4 * there, "{name}: {found} instead of {there}");
            }
            assert!(parameters.all().all(|param| parameters.get(param).iter().all(|x| x.is_finite())), "{name}");
        }
    }
}

#[test]
fn products_in_bf16_learn_as_well() {
    let (full, _) = train(Architecture::Transformer(small()), 60, 2, Precision::F32);
    let (narrow, _) = train(Architecture::Transformer(small()), 60, 2, Precision::Bf16);
    assert!((full[59] - narrow[59]).abs() < 0.1, "{} and {}", full[59], narrow[59]);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let some = [Architecture::Transformer(small()), Architecture::Recurrent(small_recurrent())];
    for architecture in some.into_iter().chain(gpts().into_iter().map(|(_, gpt)| gpt)) {
        for precision in [Precision::F32, Precision::Bf16] {
            let (losses, parameters) = train(architecture.clone(), 5, 1, precision);
            let (other, others) = train(architecture.clone(), 5, 3, precision);
            assert_eq!(losses, other);
            for param in parameters.all() {
                assert_eq!(parameters.get(param), others.get(param), "{}", parameters.name(param));
            }
        }
    }
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let (pool, machine) = (Pool::new(), Machine::new(2));
    let rows: [&[u32]; 3] = [&[5, 6, 7, 8, 9, 4, 3], &[12, 13, 14], &[20, 21, 22, 23, 24]];
    for (name, architecture) in gpts() {
        let (model, parameters) = model(architecture);
        let answers: Vec<Vec<bool>> = rows.iter().map(|row| (0..row.len()).map(|at| at % 3 > 0).collect()).collect();
        let alone = || rows.iter().zip(&answers).map(|(row, answers)| (*row, &answers[..]));
        let run = |batches: &[Batch]| {
            let mut gradients = Gradients::of(&parameters);
            let mut sum = 0.0;
            for batch in batches {
                let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 1);
                sum += model.loss(&mut tape, batch, 0.0, 1.0).unwrap().read().nll;
                tape.backward();
            }
            let all: Vec<f32> = parameters.all().flat_map(|param| gradients.get(param).to_vec()).collect();
            (sum, all)
        };
        let packed = Batch::of_answers(alone(), 0).in_one_row();
        let (one, each) = (
            run(std::slice::from_ref(&packed)),
            run(&alone().map(|row| Batch::of_answers([row], 0)).collect::<Vec<_>>()),
        );
        assert!((one.0 - each.0).abs() < 1e-4 * each.0, "{name}: {} {}", one.0, each.0);
        let largest = each.1.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(one.1.iter().zip(&each.1).all(|(x, y)| (x - y).abs() <= 1e-4 * largest), "{name}");
        // The states of the first sequence are the same to the bit whatever the other sequences contain.
        let states = |ids: &[u32]| {
            let mut tape = Tape::inference(&parameters, &pool, &machine);
            let x = model.gpt().unwrap().forward_packed(&mut tape, ids, &packed.packed).unwrap();
            x.value().data()[..packed.packed[0] * x.value().width()].to_vec()
        };
        let mut other = packed.decoder_input.ids.clone();
        other[packed.packed[0]..].fill(29);
        assert_eq!(states(&packed.decoder_input.ids), states(&other), "{name}");
    }
}
