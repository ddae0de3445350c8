//! Sung letters that need no recordings: each letter has its own tone, for a tenth of a second or so. The time of each
//! letter is known, so that an alignment can be checked.

use super::{DEV, TRAIN};
use crate::audio::SAMPLE_RATE;
use crate::draws::Draws;
use std::f64::consts::TAU;

/// The letters that sound.
pub const LETTERS: &str = "abcdefgh";
/// Fewest and most letters of a text.
const SHORTEST: usize = 6;
const LONGEST: usize = 12;
/// Seconds of a letter: at least, and at most this much more.
const LEAST: f64 = 0.1;
const MORE: f64 = 0.03;
/// Seconds in which a tone swells, and in which it fades.
const EDGE: f64 = 0.015;
/// Separates these draws from those of other tasks.
const TONES: u32 = 0x746f_6e65;

/// A text, and the sound of its letters in mono samples at 16 kHz.
#[derive(Clone, Debug, PartialEq)]
pub struct SungText {
    /// The letters.
    pub text: String,
    /// The sound.
    pub samples: Vec<f32>,
}

/// The frequency of a letter in hertz: three letters apart is an octave.
fn hertz(letter: usize) -> f64 {
    400.0 * 2f64.powf(letter as f64 / 6.0 * 2.0)
}

/// The sound of a text of [`LETTERS`], with the duration of each drawn at random; other letters are silent.
pub fn sing(text: &str, draws: &mut Draws) -> Vec<f32> {
    let mut samples = Vec::new();
    for letter in text.chars() {
        let seconds = LEAST + MORE * draws.unit();
        let count = (seconds * SAMPLE_RATE as f64) as usize;
        let tone = LETTERS.find(letter).map_or(0.0, hertz);
        samples.extend((0..count).map(|at| {
            let time = at as f64 / SAMPLE_RATE as f64;
            let swell = (time.min(seconds - time) / EDGE).clamp(0.0, 1.0);
            let harmonics = [(1.0, 1.0), (2.0, 0.5), (3.0, 0.25)];
            let sum: f64 = harmonics.iter().map(|(times, share)| share * (TAU * tone * times * time).sin()).sum();
            (0.1 * swell * sum) as f32
        }));
    }
    samples
}

/// Training and validation texts.
///
/// ```
/// let (train, dev) = qkv_models::tasks::tones(7, 3, 2);
/// assert_eq!((train.len(), dev.len()), (3, 2));
/// assert!(train[0].samples.len() >= 1600 * train[0].text.len());
/// ```
pub fn tones(seed: u64, train: usize, dev: usize) -> (Vec<SungText>, Vec<SungText>) {
    let one = |purpose: u32, at: usize| {
        let mut draws = Draws::new(seed, [purpose ^ TONES, at as u32, 0]);
        let length = SHORTEST + draws.below(LONGEST - SHORTEST + 1);
        let letters: Vec<char> = LETTERS.chars().collect();
        let mut text = String::new();
        while text.chars().count() < length {
            // Never the same letter twice in a row: nobody could count repetitions.
            let letter = letters[draws.below(letters.len())];
            if !text.ends_with(letter) {
                text.push(letter);
            }
        }
        let samples = sing(&text, &mut draws);
        SungText { text, samples }
    };
    let some = |purpose, count| (0..count).map(|at| one(purpose, at)).collect();
    (some(TRAIN, train), some(DEV, dev))
}
