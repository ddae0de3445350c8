//! Third-party checkpoint formats, written and read: what is written is read back unchanged, from one file or several,
//! and malformed files are refused with the file and the tensor named.

use qkv::{Attention, Bias, Features, Mask};
use qkv_models::files::tensors::{NamedTensor, Storage, TensorFile, write};
use qkv_models::text::tokenizer::{Kind, Tokenizer};
use qkv_models::{
    Architecture, Dialect, Encoder, EncoderConfig, Generator, GptConfig, Head, Inspection, LocalLayers, Model,
    ModelConfig, Pooling, Search, SpecialTokens, Translator,
};
use qkv_nn::Machine;
use qkv_nn::layers::{FeedKind, NormKind, PositionKind};
use std::fs;
use std::path::Path;

fn tokenizer() -> Tokenizer {
    Tokenizer::train(["the quick brown fox jumps over the lazy dog\n"], Kind::Characters).unwrap()
}

fn gpt2() -> GptConfig {
    GptConfig { d_model: 24, ffn_dim: 40, heads: 3, layers: 2, max_positions: 20, ..Default::default() }
}

fn llama() -> GptConfig {
    GptConfig {
        positions: PositionKind::Rotary,
        norm: NormKind::Rms,
        activation: FeedKind::SwiGlu,
        bias: false,
        heads: 4,
        key_heads: Some(2),
        rotary_base: 500.0,
        ..gpt2()
    }
}

fn gemma() -> GptConfig {
    GptConfig {
        activation: FeedKind::GeGluTanh,
        head_width: Some(8),
        key_heads: Some(1),
        sandwich_norm: true,
        head_norm: true,
        scaled_embedding: true,
        local: Some(LocalLayers { window: 3, period: 2, rotary_base: 50.0 }),
        ..llama()
    }
}

/// Writes a new model into a folder.
fn written(folder: &Path, sizes: GptConfig) -> Translator {
    let tokenizer = tokenizer();
    let config = ModelConfig::new(Architecture::Gpt(sizes), tokenizer.len(), SpecialTokens::of(&tokenizer));
    let (model, parameters) = Model::new(&config, 3).unwrap();
    let made = Translator { model, parameters, tokenizer, search: Search::default() };
    made.save(folder, Storage::F32).unwrap();
    made
}

#[test]
fn every_decoder_comes_back_from_its_folder_in_the_words_that_others_have_for_it() {
    let narrow = Attention::scaled_dot().scale(0.25);
    let cases = [
        (gpt2(), Dialect::Gpt2, "transformer.h.1.attn.c_attn.weight"),
        (GptConfig { tied: false, ..gpt2() }, Dialect::Gpt2, "lm_head.weight"),
        (llama(), Dialect::Llama, "model.layers.1.self_attn.k_proj.weight"),
        (GptConfig { tied: false, bias: true, head_width: Some(10), ..llama() }, Dialect::Llama, "lm_head.weight"),
        (GptConfig { qkv_bias: Some(true), ..llama() }, Dialect::Qwen2, "model.layers.1.self_attn.k_proj.bias"),
        (gemma(), Dialect::Gemma3, "model.layers.1.post_feedforward_layernorm.weight"),
        (GptConfig { attention: narrow, ..gemma() }, Dialect::Gemma3, "model.layers.0.self_attn.q_norm.weight"),
        (GptConfig { local: None, ..gemma() }, Dialect::Own, "layers.1.self_attn.k_norm.weight"),
        (GptConfig { scaled_embedding: true, ..llama() }, Dialect::Own, "layers.1.self_attn.k_proj.weight"),
        (GptConfig { key_heads: Some(1), ..gpt2() }, Dialect::Own, "layers.1.self_attn.k_proj.weight"),
    ];
    for (sizes, dialect, tensor) in cases {
        let folder = tempfile::tempdir().unwrap();
        let made = written(folder.path(), sizes);
        assert_eq!(Dialect::of(made.model.config()), dialect);
        assert!(TensorFile::open(folder.path().join("model.safetensors")).unwrap().shape(tensor).is_some(), "{tensor}");
        let read = Generator::open(folder.path()).unwrap();
        assert_eq!(read.parameters.count(), made.parameters.count());
        for param in made.parameters.all() {
            let name = made.parameters.name(param);
            let same = read.parameters.find(name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(made.parameters.get(param), read.parameters.get(same), "{name}");
        }
        // Saved again, it gives the same bytes.
        let again = tempfile::tempdir().unwrap();
        read.save(again.path(), Storage::F32).unwrap();
        for file in ["model.safetensors", "config.json", "tokenizer.json"] {
            assert_eq!(
                fs::read(folder.path().join(file)).unwrap(),
                fs::read(again.path().join(file)).unwrap(),
                "{file}"
            );
        }
        let looked = Inspection::of(folder.path()).unwrap();
        assert_eq!((looked.misfits.len(), looked.parameters), (0, Some(made.parameters.count())), "{looked}");
    }
}

/// Splits the weights file of a folder into two shards with an index.
fn cut(folder: &Path) {
    let path = folder.join("model.safetensors");
    let file = TensorFile::open(&path).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let name = format!("model-0000{}-of-00002.safetensors", part + 1);
        let names: Vec<&str> =
            file.names().enumerate().filter(|(at, _)| at % 2 == part).map(|(_, name)| name).collect();
        let values: Vec<Vec<f32>> = names.iter().map(|name| file.read(name).unwrap()).collect();
        let named: Vec<NamedTensor> = (names.iter().zip(&values))
            .map(|(name, values)| NamedTensor { name, shape: file.shape(name).unwrap(), values })
            .collect();
        write(folder.join(&name), &named, Storage::F32).unwrap();
        names.iter().for_each(|tensor| drop(map.insert(tensor.to_string(), name.clone().into())));
    }
    fs::remove_file(path).unwrap();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn several_files_are_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let made = written(folder.path(), llama());
    cut(folder.path());
    let read = Generator::open(folder.path()).unwrap();
    let name = "layers.1.fc2.weight";
    let [a, b] = [&made.parameters, &read.parameters].map(|p| p.get(p.find(name).unwrap()).to_vec());
    assert_eq!(a, b);
}

#[test]
fn shards_that_are_missing_or_lead_elsewhere_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path(), llama());
    cut(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    let whole = fs::read_to_string(&index).unwrap();
    let refused = |text: String, said: &str| {
        fs::write(&index, text).unwrap();
        let error = Generator::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    };
    let second = "model-00002-of-00002.safetensors";
    refused(whole.replace(second, "gone.safetensors"), "its file `gone.safetensors` is missing");
    refused(whole.replace(second, "../up.safetensors"), "which is no `.safetensors` file beside the index");
    // An index that names itself is refused.
    refused(whole.replace(second, "model.safetensors.index.json"), "which is no `.safetensors` file beside the index");
    refused(whole.replace(second, "model-00001-of-00002.safetensors"), "does not have it");
    refused("{\"weight_map\": {}}".into(), "it names no tensor");
    refused("{\"weight_map\": 3}".into(), "model.safetensors.index.json:1");
    refused(whole.replace("model.norm.weight", "model.other.weight"), "does not have it");
    fs::write(&index, &whole).unwrap();
    fs::write(folder.path().join(second), b"short").unwrap();
    let error = Generator::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(second), "{error}");
}

#[test]
fn settings_that_others_have_and_we_have_not_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path(), llama());
    let config = folder.path().join("config.json");
    let whole: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    for (field, value, said) in [
        ("hidden_act", serde_json::json!("relu2"), "field `hidden_act`"),
        ("rope_scaling", serde_json::json!({ "rope_type": "llama3", "factor": 8.0 }), "scaled as `llama3`"),
        ("attention_bias", serde_json::json!(true), "biases in some maps"),
        ("hidden_size", serde_json::json!(-4), "field `hidden_size`: it is -4"),
        ("hidden_size", serde_json::json!(1e18), "field `hidden_size`"),
        ("hidden_size", serde_json::json!(60000), "settings"),
        ("num_hidden_layers", serde_json::json!(4_000_000_000_000u64), "settings"),
        ("num_hidden_layers", serde_json::json!(3), "model.layers.2.self_attn.q_proj.weight`: it is missing"),
        ("num_hidden_layers", serde_json::json!(1), "the model has no such parameter"),
        ("num_attention_heads", serde_json::json!(5), "config.json"),
        ("vocab_size", serde_json::json!(7), "the tokenizer has"),
        ("model_type", serde_json::json!("mamba"), "it is `mamba`"),
        ("intermediate_size", serde_json::json!(41), "expected [41, 24]"),
    ] {
        let mut changed = whole.clone();
        changed[field] = value;
        fs::write(&config, changed.to_string()).unwrap();
        let error = Generator::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(said), "{field}: {error}");
        // Inspection does not panic.
        let _ = Inspection::of(folder.path());
    }
    let mut changed = whole.clone();
    changed["num_hidden_layers"] = serde_json::json!(3);
    fs::write(&config, changed.to_string()).unwrap();
    let looked = Inspection::of(folder.path()).unwrap().to_string();
    assert!(looked.contains("does not fit: tensor `model.layers.2.mlp.up_proj.weight` is missing"), "{looked}");
}

#[test]
fn settings_that_make_no_gemma_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path(), gemma());
    let config = folder.path().join("config.json");
    let whole: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let local = "sliding_attention";
    for (field, value, said) in [
        ("hidden_activation", serde_json::json!("gelu"), "field `hidden_activation`"),
        ("sliding_window", serde_json::json!(0), "field `sliding_window`: a window of 0 tokens"),
        ("sliding_window", serde_json::json!("all"), "field `sliding_window`"),
        ("layer_types", serde_json::json!([local]), "field `layer_types`"),
        ("layer_types", serde_json::json!([local, "chunked_attention"]), "field `layer_types`"),
        ("rope_scaling", serde_json::json!({ "rope_type": "linear", "factor": 8.0 }), "scaled as `linear`"),
        ("rope_parameters", serde_json::json!({ local: { "rope_type": "yarn" } }), "scaled as `yarn`"),
        ("query_pre_attn_scalar", serde_json::json!(0), "field `query_pre_attn_scalar`"),
        ("final_logit_softcapping", serde_json::json!(30.0), "field `final_logit_softcapping`"),
        ("num_key_value_heads", serde_json::json!(3), "config.json"),
        ("head_dim", serde_json::json!(7), "rotary positions cannot turn heads of 7"),
    ] {
        let mut changed = whole.clone();
        changed[field] = value;
        fs::write(&config, changed.to_string()).unwrap();
        let error = Generator::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(said), "{field}: {error}");
    }
}

#[test]
fn an_encoder_comes_back_from_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 2, pooler: true, ..Default::default() };
    let made = Encoder::new(&config, tokenizer(), 5).unwrap();
    made.save(folder.path(), Storage::F32).unwrap();
    let read = Encoder::open(folder.path()).unwrap();
    let machine = Machine::new(1);
    let texts = ["the fox", "dog", "", "lazy lazy lazy dog"];
    let (a, b) = (made.embed(&texts, &machine).unwrap(), read.embed(&texts, &machine).unwrap());
    assert_eq!(a, b);
    // A text has the same vector whatever else is in the batch.
    for (text, vector) in texts.iter().zip(&a) {
        let alone = &made.embed(&[text], &machine).unwrap()[0];
        assert!(alone.iter().zip(vector).all(|(a, b)| (a - b).abs() < 1e-6), "{text}");
        assert!((vector.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
    }
    assert_eq!(Inspection::of(folder.path()).unwrap().misfits.len(), 0);
    let long = "the fox ".repeat(200);
    assert_eq!(read.embed(&[long], &machine).unwrap()[0].len(), 16, "longer texts are cut");
}

#[test]
fn an_encoder_with_another_attention_is_not_passed_off_as_a_bert() {
    let machine = Machine::new(1);
    let sizes = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 2, ..Default::default() };
    for attention in [
        Attention::scaled_dot().mask(Mask::longformer(4, [0])),
        Attention::linear(Features::Elu),
        Attention::scaled_dot().bias(Bias::relative(3)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let config = EncoderConfig { attention: attention.clone(), ..sizes.clone() };
        let made = Encoder::new(&config, tokenizer(), 5).unwrap();
        made.save(folder.path(), Storage::F32).unwrap();
        let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
        assert!(config.contains("\"qkv-encoder\"") && !config.contains("\"bert\""), "{config}");
        assert_eq!(qkv_models::kind(folder.path()).unwrap(), "encoder");
        let read = Encoder::open(folder.path()).unwrap();
        assert_eq!(read.config.attention, attention);
        let texts = ["the lazy dog jumps over the quick brown fox"];
        assert_eq!(made.embed(&texts, &machine).unwrap(), read.embed(&texts, &machine).unwrap());
        assert_eq!(Inspection::of(folder.path()).unwrap().misfits.len(), 0);
    }
}

#[test]
fn an_encoder_for_classes_without_berts_map_is_not_passed_off_as_a_bert() {
    let machine = Machine::new(1);
    for (pooler, called) in [(true, "\"BertForSequenceClassification\""), (false, "\"qkv-encoder\"")] {
        let folder = tempfile::tempdir().unwrap();
        let (head, labels) = (Head::Classes, vec!["bad".to_owned(), "good".to_owned()]);
        let sizes = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 1, ..Default::default() };
        let made = Encoder::new(&EncoderConfig { pooler, head, labels, ..sizes }, tokenizer(), 5).unwrap();
        made.save(folder.path(), Storage::F32).unwrap();
        let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
        assert!(config.contains(called), "{config}");
        let read = Encoder::open(folder.path()).unwrap();
        assert_eq!(made.classify(&["the fox"], &machine).unwrap(), read.classify(&["the fox"], &machine).unwrap());
    }
}

#[test]
fn how_a_text_becomes_a_vector_is_written_with_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let config = EncoderConfig { d_model: 16, ffn_dim: 24, heads: 2, layers: 1, ..Default::default() };
    let mut made = Encoder::new(&config, tokenizer(), 5).unwrap();
    made.pooling = Pooling { mean: false, normalised: false, longest: 7 };
    made.save(folder.path(), Storage::F32).unwrap();
    assert_eq!(Encoder::open(folder.path()).unwrap().pooling, made.pooling);
}
