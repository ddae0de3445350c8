//! A recording matches what the model computed: weights that sum to 1 and give its outputs, in every kind of model,
//! with labels in the right places.

use qkv::Attention;
use qkv_explore::{Form, Matrix, MatrixOptions, Observer, Recording, capture, explain};
use qkv_models::audio::{Recording as Sound, wav};
use qkv_models::files::tensors::Storage;
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{
    Architecture, Encoder, EncoderConfig, GptConfig, Model, ModelConfig, Recognizer, RecurrentConfig, Search,
    SpecialTokens, TransformerConfig, Translator, WhisperConfig,
};
use qkv_nn::Machine;
use qkv_nn::layers::AttentionStyle;

fn translator(architecture: Architecture) -> Translator {
    let texts = ["好久不见。", "Long time, no see.", "Recordings of long times."];
    let tokenizer = Tokenizer::train(texts, Kind::Bpe { size: 300 }).expect("a tokenizer");
    let config = ModelConfig::new(architecture, tokenizer.len(), SpecialTokens::of(&tokenizer));
    let (model, parameters) = Model::new(&config, 7).expect("a model");
    Translator { model, parameters, tokenizer, search: Search::default() }
}

fn transformer() -> Architecture {
    let sizes = TransformerConfig {
        d_model: 16,
        ffn_dim: 24,
        heads: 2,
        encoder_layers: 2,
        decoder_layers: 2,
        ..TransformerConfig::default()
    };
    Architecture::Transformer(sizes)
}

fn recurrent(style: AttentionStyle, attention: Attention) -> Architecture {
    let sizes = RecurrentConfig {
        d_model: 16,
        hidden: 12,
        attention_width: 10,
        style,
        attention,
        ..RecurrentConfig::default()
    };
    Architecture::Recurrent(sizes)
}

fn recorded(architecture: Architecture) -> (Translator, Recording) {
    let translator = translator(architecture);
    let recording =
        capture::translation(&translator, "好久不见。", Some("Long time, no see."), &Machine::new(2)).expect("a run");
    (translator, recording)
}

#[test]
fn the_weights_of_every_layer_sum_to_one_and_give_what_the_layer_gave() {
    let kinds = [
        transformer(),
        recurrent(AttentionStyle::Bahdanau, Attention::additive()),
        recurrent(AttentionStyle::Luong, Attention::general()),
        recurrent(AttentionStyle::Bahdanau, Attention::dot().local(3)),
    ];
    for kind in kinds {
        let name = format!("{kind:?}");
        let local = name.contains("local: Some");
        let (_, recording) = recorded(kind);
        for (at, layer) in recording.layers.iter().enumerate() {
            let [n, m] = layer.size();
            assert_eq!((recording.queries(at).len(), recording.keys(at).len()), (n, m), "{}", layer.name);
            let call = layer.call().expect("a model computes");
            for head in 0..layer.heads() {
                let weights = layer.weights(head).expect("weights");
                for (i, row) in weights.data().chunks_exact(m).enumerate() {
                    let sum: f32 = row.iter().sum();
                    // Predictive local attention does not renormalize.
                    assert!(local || (sum - 1.0).abs() < 1e-5, "{}: row {i} sums to {sum}", layer.name);
                    let out: f32 = (0..m).map(|j| row[j] * call.inputs.v[[0, head, j, 1]]).sum();
                    assert!(
                        (out - call.output().expect("it was recorded").values[[0, head, i, 1]]).abs() < 1e-5,
                        "{}: row {i}",
                        layer.name
                    );
                }
                let pair = explain(layer, head, n - 1, 0).expect("a pair");
                assert_eq!(pair.weight, weights[[n - 1, 0]]);
            }
        }
    }
}

#[test]
fn rows_of_cross_attention_are_what_was_written_and_those_of_the_decoder_what_was_read() {
    let (_, recording) = recorded(transformer());
    let groups: Vec<(String, usize)> =
        recording.groups().into_iter().map(|group| (group.name, group.layers.len())).collect();
    assert_eq!(groups, [("encoder".into(), 2), ("decoder".into(), 2), ("cross".into(), 2)]);
    let said = |side: &qkv_explore::Side| side.tokens.iter().map(|token| token.text.clone()).collect::<Vec<_>>();
    let (read, written) = (said(recording.queries(2)), said(recording.queries(4)));
    assert_eq!((read[0].as_str(), written.last().map(String::as_str)), ("‹start›", Some("‹end›")));
    assert_eq!(read[1..], written[..written.len() - 1]);
    let words = Matrix::of(&recording, 5, &MatrixOptions { words: true, text_only: true, ..MatrixOptions::default() })
        .expect("weights");
    assert_eq!(words.columns.join(" "), "好 久 不 见 。");
    assert_eq!(words.rows.join(" "), "Long time , no see .");
    // The decoder cannot look ahead.
    let own = recording.layers[2].weights(0).expect("weights");
    let n = read.len();
    assert!((0..n).all(|i| (i + 1..n).all(|j| own[[i, j]] == 0.0)));
}

#[test]
fn steps_tell_how_likely_each_token_was() {
    let (_, recording) = recorded(transformer());
    assert_eq!(recording.steps.len(), recording.sides[2].len());
    for step in &recording.steps {
        assert!(step.candidates.windows(2).all(|two| two[0].probability >= two[1].probability));
        assert!(step.probability > 0.0 && step.candidates[0].probability <= 1.0);
    }
}

#[test]
fn importance_is_known_for_every_head() {
    for kind in [transformer(), recurrent(AttentionStyle::Bahdanau, Attention::additive())] {
        let (translator, recording) = recorded(kind);
        let importance = capture::importance(&translator, &recording, &Machine::new(2)).expect("gradients");
        assert_eq!(importance.len(), recording.layers.len());
        for (layer, of) in recording.layers.iter().zip(&importance) {
            assert_eq!(of.len(), layer.heads());
            assert!(of.iter().all(|x| x.is_finite() && *x >= 0.0) && of.iter().any(|x| *x > 0.0), "{of:?}");
        }
    }
}

#[test]
fn nothing_to_look_at_is_said_so() {
    let translator = translator(transformer());
    let error = capture::translation(&translator, "  ", None, &Machine::new(1)).expect_err("no text");
    assert_eq!(error.to_string(), "the text is empty");
    let long = "long ".repeat(2000);
    let error = capture::translation(&translator, &long, Some("a"), &Machine::new(1)).expect_err("too long");
    assert!(error.to_string().contains("the model takes 1024"), "{error}");
}

/// Asserts that rows sum to 1, and that outputs are the weights times the values.
fn holds(recording: &Recording) {
    for layer in &recording.layers {
        let ([n, m], call) = (layer.size(), layer.call().expect("a model computes"));
        let shared = layer.heads() / call.inputs.v.shape()[1];
        assert_eq!(recording.sides[layer.queries].len(), n);
        for head in 0..layer.heads() {
            let weights = layer.weights(head).expect("weights");
            for (i, row) in weights.data().chunks_exact(m).enumerate() {
                assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{}: row {i}", layer.name);
                let out: f32 = (0..m).map(|j| row[j] * call.inputs.v[[0, head / shared, j, 1]]).sum();
                assert!(
                    (out - call.output().expect("it was recorded").values[[0, head, i, 1]]).abs() < 1e-5,
                    "{}: row {i}",
                    layer.name
                );
            }
        }
    }
}

#[test]
fn a_model_that_goes_on_with_text_is_recorded_with_what_it_wrote() {
    let folder = tempfile::tempdir().expect("a folder");
    let sizes = GptConfig { d_model: 16, ffn_dim: 24, heads: 4, key_heads: Some(2), layers: 3, ..GptConfig::default() };
    translator(Architecture::Gpt(sizes)).save(folder.path(), Storage::F32).expect("it can be written");
    let model = Observer::open(folder.path()).expect("it can be read");
    let recording = model.record("Long time", None, &Machine::new(2)).expect("a run");
    holds(&recording);
    let groups = recording.groups();
    assert_eq!((groups.len(), groups[0].name.as_str(), groups[0].layers.len()), (1, "decoder", 3));
    let forced = model.record("Long", Some(" time"), &Machine::new(2)).expect("a run");
    assert_eq!(forced.output.as_deref(), Some(" time"));
    assert!(model.record("", None, &Machine::new(1)).is_err());
}

#[test]
fn a_model_that_reads_is_recorded_with_its_special_tokens() {
    let texts = ["Long time, no see.", "Recordings of long times."];
    let tokenizer = Tokenizer::train(texts, Kind::Bpe { size: 300 }).expect("a tokenizer").framed().expect("frames");
    let sizes = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 2, ..EncoderConfig::default() };
    let model = Observer::Encoder(Box::new(Encoder::new(&sizes, tokenizer, 3).expect("a model")));
    let recording = model.record("Long time, no see.", None, &Machine::new(2)).expect("a run");
    holds(&recording);
    let special = recording.sides[0].tokens.iter().filter(|token| token.special).count();
    assert_eq!((special, recording.layers.len()), (2, 2));
}

#[test]
fn words_of_a_sound_lie_in_it_and_its_file_comes_back() {
    let sizes = WhisperConfig {
        bands: 8,
        audio_positions: 50,
        text_positions: 32,
        d_model: 16,
        encoder_heads: 2,
        decoder_heads: 2,
        encoder_layers: 1,
        decoder_layers: 2,
        encoder_ffn: 16,
        decoder_ffn: 16,
        vocabulary: 0,
    };
    let model = Recognizer::untrained(&sizes, 11).unwrap();
    let samples: Vec<f32> = (0..12_800).map(|at| (at as f32 * 0.05).sin() * 0.4).collect();
    let sound = Sound::from_bytes(wav::to_bytes(&samples, 16_000), "a.wav");
    let recording = capture::hearing(&model, "a.wav", &sound, &Machine::new(2)).expect("a run");
    let Some(Form::Sound { side, frames, points, words, heads, .. }) = &recording.form else { panic!("no sound") };
    assert_eq!((*frames, points.len(), recording.sides[*side].len()), (80, 640, 50));
    assert!(!words.is_empty() && words.iter().all(|word| word.start <= word.end && word.end <= 1000));
    assert!(words.windows(2).all(|pair| pair[0].to <= pair[1].from), "in order");
    // The heads that follow the sound are cross-attention heads, from the written tokens to the sound.
    assert!(!heads.is_empty() && heads.iter().all(|&[layer, _]| recording.layers[layer].keys == *side));
    assert_eq!(recording.queries(heads[0][0]).name, "written");
    // A written token is read one position later.
    let [read, written] = [1, 2].map(|side: usize| &recording.sides[side].tokens);
    assert_eq!(
        read[1..].iter().map(|t| &t.text).collect::<Vec<_>>(),
        written[..written.len() - 1].iter().map(|t| &t.text).collect::<Vec<_>>()
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    qkv_explore::file::save(&recording, &path).unwrap();
    assert_eq!(qkv_explore::file::open(&path, &Default::default()).unwrap().form, recording.form);
}
