//! Texts that a device generates side by side are those that the CPU generates one by one: on the emulated device, and
//! on a GPU if there is one.

use super::devices::devices;
use qkv::{Attention, Bias, Mask};
use qkv_cuda::Dtype;
use qkv_models::files::tensors::Storage;
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{
    Architecture, Finish, Generated, Generation, Generator, GptConfig, LocalLayers, Model, ModelConfig, Sampling,
    Search, SpecialTokens, Translator,
};
use qkv_nn::Machine;
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};

const CONTEXT: usize = 24;

fn models() -> Vec<(&'static str, GptConfig)> {
    let gpt = GptConfig { d_model: 24, ffn_dim: 40, heads: 3, layers: 2, max_positions: CONTEXT, ..Default::default() };
    let llama = GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        activation: FeedKind::SwiGlu,
        bias: false,
        heads: 4,
        key_heads: Some(2),
        ..gpt.clone()
    };
    let window = GptConfig { attention: Attention::scaled_dot().mask(Mask::window(3, 0)), ..gpt.clone() };
    let alibi = Attention::scaled_dot().bias(Bias::alibi());
    let alibi = GptConfig { attention: alibi, positions: PositionKind::None, ..gpt.clone() };
    let general = GptConfig { attention: Attention::general(), ..gpt.clone() };
    let sines = GptConfig { positions: PositionKind::Sinusoidal, ..gpt.clone() };
    let gemma = GptConfig {
        activation: FeedKind::GeGluTanh,
        head_width: Some(8),
        key_heads: Some(1),
        sandwich_norm: true,
        head_norm: true,
        scaled_embedding: true,
        rotary_base: 1e6,
        local: Some(LocalLayers { window: 4, period: 2, rotary_base: 1e4 }),
        ..llama.clone()
    };
    let named =
        [("gpt", gpt), ("llama", llama), ("gemma", gemma), ("window", window), ("alibi", alibi), ("sinusoidal", sines)];
    // The attention of the last one is computed on the CPU.
    named.into_iter().chain([("general score", general)]).collect()
}

fn generator(sizes: GptConfig) -> Generator {
    let tokenizer = Tokenizer::train(["the quick brown fox jumps over the lazy dog\n"], Kind::Characters).unwrap();
    let config = ModelConfig::new(Architecture::Gpt(sizes), tokenizer.len(), SpecialTokens::of(&tokenizer));
    let (model, mut parameters) = Model::new(&config, 5).unwrap();
    // Logits far apart, so that rounding does not decide.
    for param in parameters.all().collect::<Vec<_>>() {
        parameters.get_mut(param).iter_mut().for_each(|x| *x *= 3.0);
    }
    let folder = tempfile::tempdir().unwrap();
    let made = Translator { model, parameters, tokenizer, search: Search::default() };
    made.save(folder.path(), Storage::F32).unwrap();
    Generator::open(folder.path()).unwrap()
}

fn prompts(generator: &Generator) -> Vec<Vec<u32>> {
    let texts = ["the fox", "q", "", "lazy dog jumps", "over", "brown the quick", "t"];
    texts.iter().map(|text| generator.tokenizer.encode_text(text)).collect()
}

fn all(generator: &Generator, settings: &Generation, together: usize, machine: &Machine) -> Vec<Generated> {
    let prompts = prompts(generator);
    let mut found: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
    let mut receive = |number: usize, generated: Generated| {
        assert!(found[number].replace(generated).is_none(), "a text comes once");
        true
    };
    generator.generate_all(&prompts, settings, together, machine, &mut receive).unwrap();
    found.into_iter().map(Option::unwrap).collect()
}

fn settings() -> [(&'static str, Generation); 6] {
    let greedy = Generation { sample: None, max_tokens: 9, ..Generation::default() };
    let penalized = Generation { repetition_penalty: 1.3, no_repeat: 2, ..greedy.clone() };
    let sample = Some(Sampling { temperature: 0.9, top_k: 12, seed: 4, ..Sampling::default() });
    let sampled = Generation { sample, stop: vec!["e".into()], ..greedy.clone() };
    let of = |sampling| Generation { sample: Some(sampling), ..greedy.clone() };
    let by_share = of(Sampling { temperature: 1.5, top_p: 0.8, seed: 9, ..Sampling::default() });
    let by_least = of(Sampling { temperature: 1.2, min_p: 0.1, top_k: 20, seed: 5, ..Sampling::default() });
    let from_all = of(Sampling { temperature: 1.1, seed: 7, ..Sampling::default() });
    [
        ("greedy", greedy.clone()),
        ("penalized", penalized),
        ("sampled of the likeliest", sampled),
        ("by their share", by_share),
        ("by their least probability", by_least),
        ("from all", from_all),
    ]
}

#[test]
fn texts_side_by_side_are_those_that_are_generated_alone() {
    let (devices, cpu) = (devices(Dtype::F32), Machine::new(1));
    for (name, sizes) in models() {
        // One for each device: a graph needs weights that stay resident.
        let generators: Vec<Generator> = devices.iter().map(|_| generator(sizes.clone())).collect();
        let generator = generator(sizes);
        // Every way of choosing a token, but only on one model, as emulation is slow.
        for (how, settings) in settings().into_iter().take(if name == "llama" { 6 } else { 1 }) {
            let alone = all(&generator, &settings, 1, &cpu);
            for (together, threads) in [(2, 1), (3, 1), (7, 2)] {
                let found = all(&generator, &settings, together, &Machine::new(threads));
                for (found, alone) in found.iter().zip(&alone) {
                    let same = found.tokens == alone.tokens && found.finish == alone.finish;
                    assert!(same, "{name}, {how}, {together} together: {found:?} instead of {alone:?}");
                }
            }
            for (operations, generator) in devices.iter().zip(&generators) {
                let machine = Machine::new(1).on_cuda(operations.clone());
                for together in [1, 3] {
                    let found = all(generator, &settings, together, &machine);
                    for (found, alone) in found.iter().zip(&alone) {
                        let same = found.tokens == alone.tokens && found.finish == alone.finish;
                        assert!(same, "{name}, {how}, {together} together: {found:?} instead of {alone:?}");
                        assert_eq!(found.text, alone.text);
                    }
                }
            }
        }
    }
}

#[test]
fn a_text_beyond_the_context_is_that_of_the_cpu() {
    let settings = Generation { sample: None, max_tokens: 3 * CONTEXT, ..Generation::default() };
    for (name, sizes) in models() {
        let generator = generator(sizes);
        let prompt = generator.tokenizer.encode_text("the lazy fox");
        let generate = |machine: &Machine| generator.generate(&prompt, &settings, machine, &mut |_| true).unwrap();
        let there = generate(&Machine::new(1));
        for operations in devices(Dtype::F32) {
            let found = generate(&Machine::new(1).on_cuda(operations));
            assert_eq!(found.tokens, there.tokens, "{name}");
        }
    }
}

#[test]
fn side_by_side_a_text_ends_with_the_context() {
    let generator = generator(models().remove(1).1);
    let settings = Generation { sample: None, max_tokens: 1000, ..Generation::default() };
    let devices = devices(Dtype::F32).into_iter().map(|operations| Machine::new(1).on_cuda(operations));
    for machine in devices.chain([Machine::new(1)]) {
        for generated in all(&generator, &settings, 2, &machine) {
            let length = generated.prompt + generated.tokens.len();
            assert!(length <= CONTEXT, "{length}");
            assert!(length == CONTEXT || generated.finish == Finish::Eos, "{generated:?}");
        }
    }
}

/// Each thread records its step while the other decodes on the same stream.
#[test]
fn threads_that_share_a_device_get_the_texts_of_one() {
    for operations in devices(Dtype::F32) {
        let generator = generator(models().remove(1).1);
        let machine = Machine::new(1).on_cuda(operations);
        let settings = &settings().map(|(_, settings)| settings)[..3];
        let tokens = |settings: &Generation| -> Vec<Vec<u32>> {
            all(&generator, settings, 3, &machine).into_iter().map(|generated| generated.tokens).collect()
        };
        let alone: Vec<_> = settings.iter().map(&tokens).collect();
        let found: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = settings.iter().map(|settings| scope.spawn(|| tokens(settings))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a text")).collect()
        });
        assert_eq!(found, alone);
    }
}

#[test]
fn weights_that_are_nan_are_refused() {
    let mut generator = generator(models().remove(0).1);
    let param = generator.parameters.find("layers.1.fc2.bias").unwrap();
    generator.parameters.get_mut(param)[0] = f32::NAN;
    let settings = Generation { sample: None, ..Generation::default() };
    let devices = devices(Dtype::F32).into_iter().map(|operations| Machine::new(1).on_cuda(operations));
    for machine in devices.chain([Machine::new(1)]) {
        let error = generator.generate_all(&prompts(&generator), &settings, 2, &machine, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("layers.1.fc2.bias"), "{error}");
    }
}
