//! Writing a model as a folder in the Hugging Face layout, tokenizer included, whatever format it was read from.

use super::WhisperConfig;
use super::vocabulary::{TIME_STEP, Vocabulary, char_of};
use crate::Result;
use crate::files::atomic;
use crate::files::folder::{self, CONFIG, GENERATION_CONFIG, PREPROCESSOR_CONFIG, TOKENIZER, WEIGHTS};
use crate::files::tensors::{NamedTensor, Storage, write};
use qkv_nn::Parameters;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Writes all files into an existing folder.
pub(super) fn save(
    to: &Path,
    storage: Storage,
    config: &WhisperConfig,
    parameters: &Parameters<f32>,
    vocabulary: &Vocabulary,
    alignment_heads: &[(usize, usize)],
) -> Result<()> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for param in parameters.all() {
        let (name, shape) = (parameters.name(param), parameters.shape(param).to_vec());
        let values = parameters.get(param);
        if name.ends_with("k_proj.bias") && values.iter().all(|&x| x == 0.0) {
            continue;
        }
        let theirs = format!("model.{}", name.replace("embed_tokens.positions", "embed_positions"));
        if name.contains(".conv") && shape.len() == 2 {
            let inputs = shape[1] / 3;
            tensors.push((theirs, vec![shape[0], inputs, 3], taps_last(values, inputs, 3)));
        } else {
            tensors.push((theirs, shape, values.to_vec()));
        }
    }
    let named: Vec<NamedTensor<'_>> =
        tensors.iter().map(|(name, shape, values)| NamedTensor { name, shape, values }).collect();
    write(to.join(WEIGHTS), &named, storage)?;
    folder::write_json(&to.join(CONFIG), &config_json(config, vocabulary))?;
    folder::write_json(&to.join(GENERATION_CONFIG), &generation_json(config, vocabulary, alignment_heads))?;
    let preprocessor = json!({
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config.bands, "sampling_rate": 16000,
        "hop_length": 160, "n_fft": 400, "chunk_length": config.audio_positions / 50, "padding_side": "right",
        "n_samples": config.audio_positions * 320, "nb_max_frames": config.audio_positions * 2, "padding_value": 0.0,
        "processor_class": "WhisperProcessor", "return_attention_mask": false,
    });
    folder::write_json(&to.join(PREPROCESSOR_CONFIG), &preprocessor)?;
    Ok(atomic::write(to.join(TOKENIZER), tokenizer_json(config, vocabulary).to_string().as_bytes())?)
}

/// `[O, K, I]` as `[O, I, K]`.
fn taps_last(values: &[f32], inputs: usize, kernel: usize) -> Vec<f32> {
    let rows = values.chunks_exact(inputs * kernel);
    rows.flat_map(|row| (0..inputs).flat_map(move |i| (0..kernel).map(move |k| row[k * inputs + i]))).collect()
}

fn config_json(config: &WhisperConfig, vocabulary: &Vocabulary) -> Value {
    json!({
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": config.vocabulary,
        "num_mel_bins": config.bands,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "encoder_attention_heads": config.encoder_heads,
        "encoder_ffn_dim": config.encoder_ffn,
        "decoder_layers": config.decoder_layers,
        "decoder_attention_heads": config.decoder_heads,
        "decoder_ffn_dim": config.decoder_ffn,
        "num_hidden_layers": config.encoder_layers,
        "max_source_positions": config.audio_positions,
        "max_target_positions": config.text_positions,
        "activation_function": "gelu",
        "scale_embedding": false,
        "is_encoder_decoder": true,
        "decoder_start_token_id": vocabulary.start,
        "bos_token_id": vocabulary.end,
        "eos_token_id": vocabulary.end,
        "pad_token_id": vocabulary.end,
        "torch_dtype": "float32",
    })
}

fn generation_json(config: &WhisperConfig, vocabulary: &Vocabulary, heads: &[(usize, usize)]) -> Value {
    let languages: Map<String, Value> =
        vocabulary.languages.iter().map(|(code, id)| (format!("<|{code}|>"), json!(id))).collect();
    let mut value = json!({
        "alignment_heads": heads,
        "begin_suppress_tokens": vocabulary.suppressed_at_start(),
        "suppress_tokens": vocabulary.suppressed(),
        "decoder_start_token_id": vocabulary.start,
        "bos_token_id": vocabulary.end,
        "eos_token_id": vocabulary.end,
        "pad_token_id": vocabulary.end,
        "no_timestamps_token_id": vocabulary.no_timestamps,
        "prev_sot_token_id": vocabulary.previous,
        "is_multilingual": !languages.is_empty(),
        "max_initial_timestamp_index": 50,
        "max_length": config.text_positions,
        "return_timestamps": false,
    });
    if !languages.is_empty() {
        value["lang_to_id"] = Value::Object(languages);
        value["task_to_id"] = json!({ "transcribe": vocabulary.transcribe, "translate": vocabulary.translate });
    }
    value
}

/// The `tokenizer.json` of a byte-level BPE. The merges are reconstructed from the vocabulary, as tokens are numbered
/// in merge order.
fn tokenizer_json(config: &WhisperConfig, vocabulary: &Vocabulary) -> Value {
    let name = |bytes: &[u8]| bytes.iter().map(|&byte| char_of(byte)).collect::<String>();
    let ranks: HashMap<&[u8], usize> =
        vocabulary.pieces().iter().enumerate().rev().map(|(id, piece)| (&piece[..], id)).collect();
    let (mut words, mut merges) = (Map::new(), Vec::new());
    for (id, piece) in vocabulary.pieces().iter().enumerate() {
        if piece.is_empty() || ranks.get(&piece[..]) != Some(&id) {
            continue;
        }
        words.insert(name(piece), json!(id));
        if let Some((left, right)) = halves(piece, &ranks, id) {
            merges.push(json!([name(left), name(right)]));
        }
    }
    let special = |name: &str, id: u32, special: bool| {
        json!({ "id": id, "content": format!("<|{name}|>"), "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special })
    };
    let named = [
        ("endoftext", vocabulary.end),
        ("startoftranscript", vocabulary.start),
        ("translate", vocabulary.translate),
        ("transcribe", vocabulary.transcribe),
        ("startoflm", vocabulary.start_of_lm),
        ("startofprev", vocabulary.previous),
        ("nospeech", vocabulary.no_speech),
        ("notimestamps", vocabulary.no_timestamps),
    ];
    let languages = vocabulary.languages.iter().map(|(code, id)| (code.as_str(), *id));
    let mut added: Vec<(u32, Value)> =
        named.into_iter().chain(languages).map(|(name, id)| (id, special(name, id, true))).collect();
    let times = (vocabulary.times()..config.vocabulary as u32).enumerate();
    added.extend(times.map(|(at, id)| (id, special(&format!("{:.2}", at as f64 * TIME_STEP), id, false))));
    added.sort_by_key(|&(id, _)| id);
    let added: Vec<Value> = added.into_iter().map(|(_, token)| token).collect();
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes.clone(), "post_processor": null, "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": words,
                   "merges": merges },
    })
}

/// The two tokens that token `id` was merged from, found by merging its bytes in the order of lower ranks.
fn halves<'a>(piece: &'a [u8], ranks: &HashMap<&[u8], usize>, id: usize) -> Option<(&'a [u8], &'a [u8])> {
    // The ends of the parts.
    let mut ends: Vec<usize> = (1..=piece.len()).collect();
    while ends.len() > 2 {
        let start = |at: usize| if at == 0 { 0 } else { ends[at - 1] };
        let rank = |at: usize| ranks.get(&piece[start(at)..ends[at + 1]]).copied().filter(|&rank| rank < id);
        let (_, at) = (0..ends.len() - 1).filter_map(|at| Some((rank(at)?, at))).min()?;
        ends.remove(at);
    }
    (ends.len() == 2).then(|| piece.split_at(ends[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_from_the_order_of_tokens() {
        let pieces: Vec<&[u8]> = vec![b"a", b"b", b"c", b"ab", b"abc", b"bc"];
        let ranks: HashMap<&[u8], usize> = pieces.iter().enumerate().map(|(id, piece)| (*piece, id)).collect();
        assert_eq!(halves(b"abc", &ranks, 4), Some((&b"ab"[..], &b"c"[..])));
        assert_eq!(halves(b"bc", &ranks, 5), Some((&b"b"[..], &b"c"[..])));
        assert_eq!((halves(b"a", &ranks, 0), halves(b"cab", &ranks, 3)), (None, None));
        assert_eq!(taps_last(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0], 2, 3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }
}
