//! How long each letter sounds. A voice that knows this need not hear itself to keep track: every step is given its
//! letter and how far through it the step is, as a position that the letters have too, so that attention finds the
//! letter by its position (similar to Ping et al. 2018, arXiv:1710.07654, whose positions advance at a rate instead of
//! by letter). Durations are learned from the letters' times, as in FastSpeech (Ren et al. 2019, arXiv:1905.09263).

use super::{KERNEL, masked};
use crate::batch::IGNORE;
use qkv_nn::layers::{Builder, Conv1d, Linear, ScaledPositions};
use qkv_nn::{Activation, PendingLoss, Tape, Target, Var, Windows};

/// The longest duration of a letter, in frames.
const LONGEST: usize = 63;
/// Places distinguished within a letter.
const PARTS: usize = 8;
/// Weight in the loss of a letter's duration relative to a frame.
const WEIGHT: f64 = 0.3;

/// Handles to the parameters of durations: a convolution over letters, a class for each number of frames, and places.
#[derive(Clone, Debug)]
pub(super) struct Durations {
    conv: Conv1d,
    classes: Linear,
    places: ScaledPositions,
    dropout: f64,
}

impl Durations {
    /// Adds its parameters: `conv`, `classes`, `places`.
    pub fn new(at: &mut Builder<'_, f32>, width: usize, letters: usize, dropout: f64) -> Durations {
        let windows = Windows { kernel: KERNEL, stride: 1, padding: KERNEL / 2 };
        Durations {
            conv: Conv1d::new(&mut at.at("conv"), width, width, windows),
            classes: Linear::new(&mut at.at("classes"), width, LONGEST + 1, true),
            places: ScaledPositions::in_parts(&mut at.at("places"), letters, PARTS, width),
            dropout,
        }
    }

    /// Adds places to encoded letters `[B, M, C]`: the middle of each letter.
    pub fn placed(&self, tape: &mut Tape<'_, f32>, memory: &Var<f32>) -> Var<f32> {
        let &[batch, letters, _] = memory.shape() else { unreachable!("an encoder keeps the axes") };
        let places: Vec<f32> = (0..batch).flat_map(|_| (0..letters).map(|letter| letter as f32 + 0.5)).collect();
        self.places.add_at(tape, memory, &places)
    }

    /// Adds places, `[B, N]`, to steps `x [B, N, C]`.
    pub fn place(&self, tape: &mut Tape<'_, f32>, x: &Var<f32>, places: &[f32]) -> Var<f32> {
        self.places.add_at(tape, x, places)
    }

    fn hidden(&self, tape: &mut Tape<'_, f32>, memory: &Var<f32>, lengths: Option<&[usize]>) -> Var<f32> {
        let x = masked(tape, memory.clone(), lengths);
        let x = self.conv.activated(tape, &x, Activation::Relu);
        tape.dropout(x, self.dropout)
    }

    /// The loss of durations, and its weight; `sounding` has the frames of each letter of each text, `[B, ≤ M]`.
    pub fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        memory: &Var<f32>,
        lengths: Option<&[usize]>,
        sounding: &[Vec<usize>],
        scale: f64,
    ) -> (f64, PendingLoss) {
        let hidden = self.hidden(tape, memory, lengths);
        let letters = memory.shape()[1];
        let mut ids = vec![IGNORE; sounding.len() * letters];
        for (row, sounding) in ids.chunks_exact_mut(letters).zip(sounding) {
            row.iter_mut().zip(sounding).for_each(|(id, &frames)| *id = frames.min(LONGEST) as u32);
        }
        let target = Target { ids: &ids, ignore: Some(IGNORE), smoothing: 0.0, scale: scale * WEIGHT };
        (WEIGHT, tape.cross_entropy(&hidden, self.classes.weight, self.classes.bias, target))
    }

    /// Predicted frames of each letter of one text: expected durations, rounded without accumulating errors.
    pub fn predict(&self, tape: &mut Tape<'_, f32>, memory: &Var<f32>) -> Vec<usize> {
        let hidden = self.hidden(tape, memory, None);
        let scores = self.classes.forward(tape, &hidden);
        let (mut exact, mut whole) = (0.0, 0);
        let mut frames = |scores: &[f32]| {
            exact += expected(scores);
            let sounding = (exact.round() as usize).saturating_sub(whole);
            whole += sounding;
            sounding
        };
        scores.value().data().chunks_exact(LONGEST + 1).map(&mut frames).collect()
    }
}

/// The mean class, or 0 if class 0 has at least half of the probability.
fn expected(scores: &[f32]) -> f64 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = scores.iter().map(|score| f64::from(score - most).exp()).collect();
    let all: f64 = weights.iter().sum();
    if weights[0] >= 0.5 * all {
        return 0.0;
    }
    weights.iter().enumerate().map(|(class, weight)| class as f64 * weight).sum::<f64>() / all
}

/// The number of frames of each letter, from the place of each frame as a fraction of the text.
pub(super) fn frames_of_letters(places: &[f32], letters: usize) -> Vec<usize> {
    let mut frames = vec![0; letters];
    for place in places {
        // A letter begins at its share of the whole; a place below that by a rounding error belongs to it.
        let letter = (place * letters as f32 + 1e-3) as usize;
        frames[letter.min(letters - 1)] += 1;
    }
    frames
}

/// The place of each step in the text, in letters: the letter at the middle of the step's frames, plus how far through
/// it they are.
pub(super) fn places_of_steps(sounding: &[usize], reduction: usize) -> Vec<f32> {
    let of_letter = |(letter, &frames): (usize, &usize)| {
        (0..frames).map(move |frame| letter as f32 + (frame as f32 + 0.5) / frames as f32)
    };
    let places: Vec<f32> = sounding.iter().enumerate().flat_map(of_letter).collect();
    let middle = |step: usize| places[(step * reduction + reduction / 2).min(places.len() - 1)];
    (0..places.len().div_ceil(reduction)).map(middle).collect()
}

/// Durations stretched to a total of `frames` frames; equal ones if all are zero.
pub(super) fn stretched(sounding: &[usize], frames: usize) -> Vec<usize> {
    let all = sounding.iter().sum::<usize>();
    if all == 0 {
        return stretched(&vec![1; sounding.len()], frames);
    }
    let (mut before, mut whole) = (0, 0);
    let one = |&sounds: &usize| {
        before += sounds;
        let end = (before * frames + all / 2) / all;
        let found = end - whole;
        whole = end;
        found
    };
    sounding.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_by_letters_and_steps_lie_in_them() {
        // The first letter has two frames, the second none, the third three, the end token none.
        let places = [0.0, 0.125, 0.5, 0.6, 0.7];
        let sounding = frames_of_letters(&places, 4);
        assert_eq!(sounding, [2, 0, 3, 0]);
        assert_eq!(places_of_steps(&sounding, 1), [0.25, 0.75, 2.0 + 1.0 / 6.0, 2.5, 2.0 + 5.0 / 6.0]);
        assert_eq!(places_of_steps(&sounding, 2), [0.75, 2.5, 2.0 + 5.0 / 6.0]);
        assert_eq!(stretched(&sounding, 10), [4, 0, 6, 0]);
        assert_eq!(stretched(&sounding, 3).iter().sum::<usize>(), 3);
    }

    #[test]
    fn a_duration_is_the_mean_unless_silence_has_half() {
        let scores = |weights: &[(usize, f32)]| {
            let mut scores = vec![f32::NEG_INFINITY; LONGEST + 1];
            weights.iter().for_each(|&(class, weight)| scores[class] = weight.ln());
            scores
        };
        assert!((expected(&scores(&[(4, 0.5), (8, 0.5)])) - 6.0).abs() < 1e-6);
        assert_eq!(expected(&scores(&[(0, 0.6), (30, 0.4)])), 0.0);
        assert!((expected(&scores(&[(0, 0.25), (8, 0.75)])) - 6.0).abs() < 1e-6);
    }
}
