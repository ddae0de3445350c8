//! Captures voices: letters against time.

use super::to_layer;
use crate::recording::{Recording, Side, Token};
use qkv_models::{Group, ObservedAttention, Result, SpeakOptions, Speaker};
use qkv_nn::Machine;

/// Indices of the sides.
const LETTERS: usize = 0;
const TIMES: usize = 1;

/// Captures how a text is spoken: one token per letter, and one per step, named by its time in seconds. No sound is
/// synthesized.
///
/// # Errors
/// Those of the voice.
pub fn speech(voice: &Speaker, text: &str, machine: &Machine) -> Result<Recording> {
    let said = voice.speak(text, &SpeakOptions { iterations: 0, ..SpeakOptions::default() }, machine)?;
    let end = said.letters.len().saturating_sub(1);
    let letter = |(at, letter): (usize, &String)| {
        let shown = if letter.trim().is_empty() { "␣" } else { letter };
        Token { text: shown.to_owned(), word: (at < end).then_some(at), special: at == end, id: None }
    };
    let time = |at: usize| {
        let text = format!("{:.2}", at as f64 * said.step);
        Token { text, word: Some(at), ..Token::default() }
    };
    let sides = vec![
        Side { name: "letters".into(), tokens: said.letters.iter().enumerate().map(letter).collect() },
        Side { name: "seconds".into(), tokens: (0..said.alignment.len()).map(time).collect() },
    ];
    let layer = |attended: ObservedAttention| {
        let at = attended.layer;
        let (name, sides) = match attended.group {
            Group::Encoder => (format!("encoder.layers.{at}.self_attn"), [LETTERS, LETTERS]),
            Group::Cross => (format!("decoder.layers.{at}.encoder_attn"), [TIMES, LETTERS]),
            _ => (format!("decoder.layers.{at}.self_attn"), [TIMES, TIMES]),
        };
        to_layer(attended, &name, sides)
    };
    Ok(Recording {
        text: text.to_owned(),
        output: Some(format!("{:.2} s", said.alignment.len() as f64 * said.step)),
        sides,
        layers: said.attentions.into_iter().map(layer).collect(),
        steps: Vec::new(),
        form: None,
    })
}
