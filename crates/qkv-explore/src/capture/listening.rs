//! Captures speech recognizers: written words against time.

use super::to_layer;
use crate::recording::{Form, HeardWord, Recording, Side, Token};
use qkv_models::audio::Recording as Sound;
use qkv_models::{Group, ObservedAttention, Recognizer, Result, TranscribeOptions};
use qkv_nn::Machine;

/// Indices of the sides.
const TIMES: usize = 0;
const READ: usize = 1;
const WRITTEN: usize = 2;
/// Milliseconds per frame of the spectrogram, and per position of the encoder.
const FRAME: usize = 10;
const STEP: usize = 2 * FRAME;

/// Captures the transcription of the first window of a sound called `name`: the tokens that are read and written, and
/// one token per position of the sound, named by its time in seconds.
///
/// # Errors
/// Those of the model.
pub fn hearing(recognizer: &Recognizer, name: &str, sound: &Sound, machine: &Machine) -> Result<Recording> {
    let heard = recognizer.listen(sound, &TranscribeOptions::default(), machine)?;
    let time = |at: usize| Token { text: seconds(at * STEP), word: Some(at), ..Token::default() };
    let token = |(at, text): (usize, &String)| {
        let special = text.starts_with('‹') && text.ends_with('›');
        let word = heard.words.iter().position(|(_, tokens)| tokens.contains(&at));
        Token { text: text.clone(), word, special, id: None }
    };
    let tokens = |tokens: &[String]| tokens.iter().enumerate().map(token).collect::<Vec<Token>>();
    let mut sides = vec![
        Side { name: "seconds".into(), tokens: (0..heard.positions).map(time).collect() },
        Side { name: "read".into(), tokens: tokens(&heard.read) },
        Side { name: "written".into(), tokens: tokens(&heard.written) },
    ];
    // Each token that is read is the one written before it.
    for at in (1..sides[READ].tokens.len()).rev() {
        sides[READ].tokens[at].word = sides[WRITTEN].tokens[at - 1].word;
    }
    if let Some(first) = sides[READ].tokens.first_mut() {
        first.word = None;
    }
    let cross = heard.attentions.iter().position(|attended| attended.group == Group::Cross).unwrap_or(0);
    let milliseconds = |seconds: f64| (seconds * 1000.0).round().max(0.0) as usize;
    let words = heard.words.iter().map(|(word, tokens)| HeardWord {
        text: word.word.trim().to_owned(),
        start: milliseconds(word.start),
        end: milliseconds(word.end),
        from: tokens.start,
        to: tokens.end,
    });
    let form = Form::Sound {
        side: TIMES,
        step: STEP,
        frames: heard.frames.len() / heard.bands,
        frame: FRAME,
        points: brightness(&heard.frames),
        words: words.collect(),
        heads: heard.alignment_heads.iter().map(|&(layer, head)| [cross + layer, head]).collect(),
    };
    let layer = |attended: ObservedAttention| {
        let at = attended.layer;
        match attended.group {
            Group::Cross => to_layer(attended, &format!("decoder.layers.{at}.encoder_attn"), [WRITTEN, TIMES]),
            _ => to_layer(attended, &format!("decoder.layers.{at}.self_attn"), [READ, READ]),
        }
    };
    Ok(Recording {
        text: name.to_owned(),
        output: Some(heard.text),
        sides,
        layers: heard.attentions.into_iter().map(layer).collect(),
        steps: Vec::new(),
        form: Some(form),
    })
}

fn seconds(milliseconds: usize) -> String {
    format!("{:.2}", milliseconds as f64 / 1000.0)
}

/// A spectrogram as bytes: its lowest value is 0, its highest 255.
fn brightness(frames: &[f32]) -> Vec<u8> {
    let low = frames.iter().copied().fold(f32::INFINITY, f32::min);
    let high = frames.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let range = (high - low).max(f32::MIN_POSITIVE);
    frames.iter().map(|&x| ((x - low) / range * 255.0).round() as u8).collect()
}
