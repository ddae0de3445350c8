//! Whisper: the same model in every format, and recognition with untrained models, which must end all the same.

use qkv_models::audio::{MelFilters, Recording, Spectrogram, wav};
use qkv_models::files::tensors::{Storage, TensorFile};
use qkv_models::{Recognizer, Segment, Task, TranscribeOptions, Transcript, WhisperConfig};
use qkv_nn::Machine;
use std::path::Path;

/// Windows of one second.
fn sizes() -> WhisperConfig {
    WhisperConfig {
        bands: 8,
        audio_positions: 50,
        text_positions: 48,
        d_model: 16,
        encoder_heads: 2,
        decoder_heads: 4,
        encoder_layers: 1,
        decoder_layers: 2,
        encoder_ffn: 24,
        decoder_ffn: 20,
        vocabulary: 0,
    }
}

fn recording(seconds: f64) -> Recording {
    let samples: Vec<f32> = (0..(seconds * 16_000.0) as usize)
        .map(|at| (at as f32 * 0.05).sin() * (at as f32 * 0.0007).cos() * 0.4)
        .collect();
    Recording::from_bytes(wav::to_bytes(&samples, 16_000), "a.wav")
}

fn window(model: &Recognizer) -> Vec<f32> {
    let recording = recording(1.0);
    Spectrogram::new(&recording, model.filters()).unwrap().window(0, 100, 2 * model.config().audio_positions).unwrap()
}

/// The model of a folder in the Hugging Face layout as a `model.bin` of CTranslate2.
fn as_ctranslate2(folder: &Path, heads: [u16; 2]) -> Vec<u8> {
    let file = TensorFile::open(folder.join("model.safetensors")).unwrap();
    let name = |text: &str| [&(text.len() as u16 + 1).to_le_bytes()[..], text.as_bytes(), &[0]].concat();
    let mut tensors: Vec<Vec<u8>> = Vec::new();
    let mut put = |text: &str, shape: &[usize], values: &[f32]| {
        let mut bytes = name(text);
        bytes.push(shape.len() as u8);
        shape.iter().for_each(|&axis| bytes.extend((axis as u32).to_le_bytes()));
        bytes.push(0);
        bytes.extend((values.len() as u32 * 4).to_le_bytes());
        values.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
        tensors.push(bytes);
    };
    // Keys have no bias in the Hugging Face layout and a zero bias here.
    let read = |name: &str, width: usize| match file.shape(name) {
        Some(shape) => (shape.to_vec(), file.read(name).unwrap()),
        None => (vec![width], vec![0.0; width]),
    };
    let width = sizes().d_model;
    let mut copy = |theirs: &str, ours: &[String]| {
        let parts: Vec<_> = ours.iter().map(|name| read(name, width)).collect();
        let mut shape = parts[0].0.clone();
        shape[0] = parts.iter().map(|(shape, _)| shape[0]).sum();
        put(theirs, &shape, &parts.into_iter().flat_map(|(_, values)| values).collect::<Vec<f32>>());
    };
    for (side, layers) in [("encoder", sizes().encoder_layers), ("decoder", sizes().decoder_layers)] {
        copy(&format!("{side}/position_encodings/encodings"), &[format!("model.{side}.embed_positions.weight")]);
        for (kind, norm) in [("weight", "gamma"), ("bias", "beta")] {
            copy(&format!("{side}/layer_norm/{norm}"), &[format!("model.{side}.layer_norm.{kind}")]);
            for layer in 0..layers {
                let (from, to) = (format!("model.{side}.layers.{layer}"), format!("{side}/layer_{layer}"));
                let projections = |attention: &str, names: &[&str]| -> Vec<String> {
                    names.iter().map(|name| format!("{from}.{attention}.{name}_proj.{kind}")).collect()
                };
                let mut linear = |name: &str, parts: &[String]| copy(&format!("{to}/{name}/{kind}"), parts);
                linear("self_attention/linear_0", &projections("self_attn", &["q", "k", "v"]));
                linear("self_attention/linear_1", &projections("self_attn", &["out"]));
                linear("ffn/linear_0", &[format!("{from}.fc1.{kind}")]);
                linear("ffn/linear_1", &[format!("{from}.fc2.{kind}")]);
                if side == "decoder" {
                    linear("attention/linear_0", &projections("encoder_attn", &["q"]));
                    linear("attention/linear_1", &projections("encoder_attn", &["k", "v"]));
                    linear("attention/linear_2", &projections("encoder_attn", &["out"]));
                    copy(
                        &format!("{to}/attention/layer_norm/{norm}"),
                        &[format!("{from}.encoder_attn_layer_norm.{kind}")],
                    );
                }
                copy(
                    &format!("{to}/self_attention/layer_norm/{norm}"),
                    &[format!("{from}.self_attn_layer_norm.{kind}")],
                );
                copy(&format!("{to}/ffn/layer_norm/{norm}"), &[format!("{from}.final_layer_norm.{kind}")]);
            }
            if side == "encoder" {
                for conv in ["conv1", "conv2"] {
                    copy(&format!("encoder/{conv}/{kind}"), &[format!("model.encoder.{conv}.{kind}")]);
                }
            }
        }
    }
    copy("decoder/embeddings/weight", &["model.decoder.embed_tokens.weight".into()]);
    for (side, heads) in ["encoder", "decoder"].iter().zip(heads) {
        let number = [&[0u8, 2][..], &2u32.to_le_bytes(), &heads.to_le_bytes()].concat();
        tensors.push([name(&format!("{side}/num_heads")), number].concat());
    }
    let head = [6u32.to_le_bytes().to_vec(), name("WhisperSpec"), 3u32.to_le_bytes().to_vec()].concat();
    let count = (tensors.len() as u32).to_le_bytes().to_vec();
    [head, count, tensors.concat(), 0u32.to_le_bytes().to_vec()].concat()
}

#[test]
fn a_model_is_the_same_in_the_hugging_face_layout_and_as_ctranslate2() {
    let model = Recognizer::untrained(&sizes(), 3).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (hugging_face, ctranslate2) = (folder.path().join("hf"), folder.path().join("ct2"));
    model.save(&hugging_face, Storage::F32).unwrap();
    std::fs::create_dir(&ctranslate2).unwrap();
    std::fs::write(ctranslate2.join("model.bin"), as_ctranslate2(&hugging_face, [2, 4])).unwrap();
    std::fs::copy(hugging_face.join("tokenizer.json"), ctranslate2.join("tokenizer.json")).unwrap();
    let machine = Machine::new(1);
    let prompt = [257, 258, 359, 364, 72, 105];
    let expected = model.outputs(&window(&model), &prompt, &machine).unwrap();
    assert_eq!((expected.0.len(), expected.1.len()), (50 * 16, 6 * model.config().vocabulary));
    for folder in [&hugging_face, &ctranslate2] {
        assert!(Recognizer::is_at(folder));
        let read = Recognizer::open(folder).unwrap();
        assert_eq!(read.config(), model.config());
        assert_eq!(read.languages()[..3], ["en", "zh", "de"]);
        assert_eq!(read.outputs(&window(&read), &prompt, &machine).unwrap(), expected);
    }
}

/// A ggml file with random weights; sizes are those of the published multilingual models if they cannot differ.
fn ggml() -> (Vec<u8>, MelFilters) {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let (tokens, positions, text, width, inner, bands) = (51_865, 10, 48, 8, 12, 80);
    let filters = MelFilters::slaney(bands as usize);
    let mut bytes = words(&[0x6767_6d6c, tokens, positions, width, 2, 1, text, width, 2, 1, bands, 0]);
    bytes.extend(words(&[bands, 201]));
    filters.weights().iter().for_each(|x| bytes.extend(x.to_le_bytes()));
    bytes.extend(words(&[50_257]));
    for id in 0..50_257u32 {
        let token = if id < 256 { vec![id as u8] } else { format!("t{id}").into_bytes() };
        bytes.extend(words(&[token.len() as u32]));
        bytes.extend(token);
    }
    let mut seed = 1u32;
    let mut put = |name: &str, shape: &[u32]| {
        bytes.extend(words(&[shape.len() as u32, name.len() as u32, 0]));
        shape.iter().rev().for_each(|axis| bytes.extend(axis.to_le_bytes()));
        bytes.extend_from_slice(name.as_bytes());
        for _ in 0..shape.iter().product::<u32>() {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bytes.extend(((seed >> 8) as f32 / (1 << 24) as f32 - 0.5).to_le_bytes());
        }
    };
    put("encoder.positional_embedding", &[positions, width]);
    put("encoder.conv1.weight", &[width, bands, 3]);
    put("encoder.conv1.bias", &[width, 1]);
    put("encoder.conv2.weight", &[width, width, 3]);
    put("encoder.conv2.bias", &[width, 1]);
    put("decoder.positional_embedding", &[text, width]);
    put("decoder.token_embedding.weight", &[tokens, width]);
    for (side, last) in [("encoder", "ln_post"), ("decoder", "ln")] {
        let attentions: &[&str] = if side == "encoder" { &["attn"] } else { &["attn", "cross_attn"] };
        for attention in attentions {
            for part in ["query", "key", "value", "out"] {
                put(&format!("{side}.blocks.0.{attention}.{part}.weight"), &[width, width]);
                if part != "key" {
                    put(&format!("{side}.blocks.0.{attention}.{part}.bias"), &[width]);
                }
            }
            for kind in ["weight", "bias"] {
                put(&format!("{side}.blocks.0.{attention}_ln.{kind}"), &[width]);
            }
        }
        put(&format!("{side}.blocks.0.mlp.0.weight"), &[inner, width]);
        put(&format!("{side}.blocks.0.mlp.0.bias"), &[inner]);
        put(&format!("{side}.blocks.0.mlp.2.weight"), &[width, inner]);
        put(&format!("{side}.blocks.0.mlp.2.bias"), &[width]);
        for kind in ["weight", "bias"] {
            put(&format!("{side}.blocks.0.mlp_ln.{kind}"), &[width]);
            put(&format!("{side}.{last}.{kind}"), &[width]);
        }
    }
    (bytes, filters)
}

#[test]
fn a_ggml_file_is_read_and_converted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ggml.bin");
    let (bytes, filters) = ggml();
    std::fs::write(&path, &bytes).unwrap();
    assert!(Recognizer::is_at(&path));
    let model = Recognizer::open(&path).unwrap();
    assert_eq!((model.filters(), model.languages().len()), (&filters, 99));
    let machine = Machine::new(1);
    let expected = model.outputs(&window(&model), &[50_258, 50_259, 50_359], &machine).unwrap();
    let converted = folder.path().join("hf");
    model.save(&converted, Storage::F32).unwrap();
    let read = Recognizer::open(&converted).unwrap();
    assert_eq!(read.outputs(&window(&read), &[50_258, 50_259, 50_359], &machine).unwrap(), expected);
    assert_eq!(read.languages(), model.languages());
    // A missing tensor is named.
    std::fs::write(&path, &bytes[..bytes.len() - (44 + 32)]).unwrap();
    let error = Recognizer::open(&path).unwrap_err().to_string();
    assert!(error.contains("tensor `decoder.ln.bias`: it is missing") || error.contains("announced"), "{error}");
}

fn heard(model: &Recognizer, recording: &Recording, options: &TranscribeOptions) -> (Vec<Segment>, Transcript) {
    let mut segments = Vec::new();
    let transcript = model.transcribe(recording, options, &Machine::new(1), &mut |segment, done, seconds| {
        assert!(done <= seconds && segment.start <= segment.end);
        segments.push(segment.clone());
        true
    });
    (segments, transcript.unwrap())
}

#[test]
fn a_model_that_knows_nothing_still_comes_to_an_end() {
    let model = Recognizer::untrained(&sizes(), 5).unwrap();
    let recording = recording(3.3);
    for beam in [1, 3] {
        let options =
            TranscribeOptions { beam, words: beam == 1, log_probability: -9.0, ..TranscribeOptions::default() };
        let (segments, transcript) = heard(&model, &recording, &options);
        assert!((transcript.seconds - 3.3).abs() < 1e-3 && transcript.language_probability > 0.0);
        assert_eq!(heard(&model, &recording, &options).0, segments);
        for segment in &segments {
            assert!(segment.words.windows(2).all(|two| two[0].start <= two[1].start + 1e-9));
            assert_eq!(segment.words.is_empty(), beam != 1, "{segment:?}");
        }
    }
}

#[test]
fn languages_and_tasks_are_checked() {
    let model = Recognizer::untrained(&sizes(), 5).unwrap();
    let options = TranscribeOptions {
        language: Some("zh".into()),
        task: Task::Translate,
        temperatures: vec![0.0],
        ..TranscribeOptions::default()
    };
    let (_, transcript) = heard(&model, &recording(0.5), &options);
    assert_eq!((transcript.language.as_str(), transcript.language_probability), ("zh", 1.0));
    let options = TranscribeOptions { language: Some("klingon".into()), ..options };
    let error = model.transcribe(&recording(0.5), &options, &Machine::new(1), &mut |_, _, _| true).unwrap_err();
    assert_eq!(error.to_string(), "the model does not know the language `klingon`");
    assert!(error.hint().unwrap().starts_with("it knows en, zh, de"));
}

#[test]
fn sizes_that_the_file_does_not_have_are_refused_before_memory_is_allocated() {
    let folder = tempfile::tempdir().unwrap();
    Recognizer::untrained(&sizes(), 5).unwrap().save(folder.path(), Storage::F16).unwrap();
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"decoder_layers\": 2", "\"decoder_layers\": 2000000000")).unwrap();
    let error = Recognizer::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("config.json`: sizes: ") && error.contains("too few"), "{error}");
}
