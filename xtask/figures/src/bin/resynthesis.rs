//! Resynthesizes recordings from their spectrograms, as a voice does with the spectrograms it generates: the baseline
//! for voices in `docs/speak.md`. `resynthesis LIST OUT [VOICE]` reads a list of lines `recording⇥text` and writes
//! `OUT/NUMBER.wav` and `OUT/text.tsv`.
//!
//! With a voice, the spectrograms are those that the voice generates under teacher forcing with the recording, and
//! `OUT/NUMBER.json` has its alignment.

use qkv_models::audio::{Recording, SAMPLE_RATE, Vocoder, wav};
use qkv_models::{Error, Result, SpeakOptions, Speaker, Speech};
use qkv_nn::Machine;
use rayon::prelude::*;
use std::fs;
use std::path::Path;

/// Mel bands of a voice.
const BANDS: usize = 80;

/// The letters and the attention to them, in the format of `qkv speak --json`.
fn alignment(speech: &Speech) -> String {
    let Speech { letters, step, alignment, .. } = speech;
    serde_json::json!({ "letters": letters, "step": step, "alignment": alignment }).to_string()
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, out, rest @ ..] = &arguments[..] else {
        return Err(Error::invalid("usage: resynthesis LIST OUT [VOICE]"));
    };
    let voice = rest.first().map(Speaker::open).transpose()?;
    let (list, out) = (Path::new(list), Path::new(out));
    let text = fs::read_to_string(list).map_err(|e| Error::file("read", list, e))?;
    let written = |what: std::io::Error| Error::file("write", out, what);
    fs::create_dir_all(out).map_err(written)?;
    let rows: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('\t')).collect();
    let folder = list.parent().unwrap_or(Path::new(""));
    let (vocoder, options) = (Vocoder::new(BANDS), SpeakOptions::default());
    rows.par_iter().enumerate().try_for_each(|(at, (name, text))| {
        let pieces = Recording::open(folder.join(name))?.samples()?.collect::<Result<Vec<_>, _>>()?;
        let heard = pieces.concat();
        let sound = match &voice {
            Some(voice) => {
                let speech = voice.speak_along(text, &heard, &options, &Machine::new(1))?;
                fs::write(out.join(format!("{at:02}.json")), alignment(&speech)).map_err(written)?;
                speech.samples
            }
            None => vocoder.samples(&vocoder.spectrogram(&heard), options.iterations, options.seed),
        };
        fs::write(out.join(format!("{at:02}.wav")), wav::to_bytes(&sound, SAMPLE_RATE as u32)).map_err(written)
    })?;
    let lines = rows.iter().enumerate().map(|(at, (_, text))| format!("{at:02}.wav\t{text}\n"));
    fs::write(out.join("text.tsv"), lines.collect::<String>()).map_err(written)
}
