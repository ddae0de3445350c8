//! Makes sound of the spectrograms of recordings, as a voice makes it of its own: what `docs/speak.md` compares voices
//! with. `resynthesis LIST OUT [ITERATIONS]` reads a list of lines `recording⇥text` and writes `OUT/NUMBER.wav` and
//! `OUT/text.tsv`.

use qkv_models::audio::{Recording, SAMPLE_RATE, Vocoder, wav};
use qkv_models::{Error, Result};
use rayon::prelude::*;
use std::fs;
use std::path::Path;

/// Mel bands of a voice.
const BANDS: usize = 80;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, out, rest @ ..] = &arguments[..] else {
        return Err(Error::invalid("usage: resynthesis LIST OUT [ITERATIONS]"));
    };
    let iterations = rest.first().and_then(|number| number.parse().ok()).unwrap_or(60);
    let (list, out) = (Path::new(list), Path::new(out));
    let text = fs::read_to_string(list).map_err(|e| Error::file("read", list, e))?;
    let written = |what: std::io::Error| Error::file("write", out, what);
    fs::create_dir_all(out).map_err(written)?;
    let rows: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('\t')).collect();
    let folder = list.parent().unwrap_or(Path::new(""));
    let vocoder = Vocoder::new(BANDS);
    rows.par_iter().enumerate().try_for_each(|(at, (name, _))| {
        let pieces = Recording::open(folder.join(name))?.samples()?.collect::<Result<Vec<Vec<f32>>>>()?;
        let sound = vocoder.samples(&vocoder.spectrogram(&pieces.concat()), iterations, 1);
        fs::write(out.join(format!("{at:02}.wav")), wav::to_bytes(&sound, SAMPLE_RATE as u32)).map_err(written)
    })?;
    let lines = rows.iter().enumerate().map(|(at, (_, text))| format!("{at:02}.wav\t{text}\n"));
    fs::write(out.join("text.tsv"), lines.collect::<String>()).map_err(written)
}
