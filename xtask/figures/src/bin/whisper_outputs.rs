//! Writes the outputs of a Whisper model for the first window of a recording, to compare them with other
//! implementations: `whisper_outputs MODEL AUDIO OUT.safetensors` writes the log-mel spectrogram, the output of the
//! encoder and the logits after `TOKENS`. See `dev/whisper.py`.

use qkv_models::audio::{Recording, Spectrogram};
use qkv_models::files::tensors::{NamedTensor, Storage, write};
use qkv_models::{Error, Recognizer, Result};
use qkv_nn::Machine;

/// `<|startoftranscript|><|en|><|transcribe|><|0.00|> The`, in the multilingual models.
const TOKENS: [u32; 5] = [50258, 50259, 50359, 50364, 440];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, audio, out] = &arguments[..] else {
        return Err(Error::invalid("usage: whisper_outputs MODEL AUDIO OUT.safetensors"));
    };
    let recognizer = Recognizer::open(model)?;
    let config = recognizer.config();
    let recording = Recording::open(audio)?;
    let mut spectrogram = Spectrogram::new(&recording, recognizer.filters())?;
    let frames = 2 * config.audio_positions;
    let mel = spectrogram.window(0, spectrogram.frames().min(frames), frames)?; // [frames, bands]
    let machine = Machine::new(rayon::current_num_threads());
    let (encoder, logits) = recognizer.outputs(&mel, &TOKENS, &machine)?;
    let shapes = [
        [frames, config.bands],
        [config.audio_positions, config.d_model],
        [TOKENS.len(), config.vocabulary],
        [config.bands, 201],
    ];
    let values = [&mel[..], &encoder, &logits, recognizer.filters().weights()];
    let named = ["mel", "encoder", "logits", "filters"].into_iter().zip(&shapes).zip(values);
    let tensors: Vec<NamedTensor<'_>> =
        named.map(|((name, shape), values)| NamedTensor { name, shape, values }).collect();
    Ok(write(out, &tensors, Storage::F32)?)
}
