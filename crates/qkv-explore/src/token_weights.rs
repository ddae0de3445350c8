//! The weights of the words of a document and of the patches of an image, from a recording of either.

use crate::recording::{Form, Recording};
use crate::rollout;
use qkv_models::{ReadSentence, ReadWord, Reading, Result};
use std::ops::Range;

/// The weights of a rectangle in row-major order, of one head or as the mean of all.
fn weights(
    recording: &Recording,
    layer: usize,
    head: Option<usize>,
    rows: Range<usize>,
    keys: Range<usize>,
) -> Result<Vec<f32>> {
    let of = &recording.layers[layer];
    if let Some(head) = head {
        return Ok(of.rectangle(head, rows, keys)?.into_data());
    }
    let mut mean = vec![0.0; rows.len() * keys.len()];
    for head in 0..of.heads() {
        let one = of.rectangle(head, rows.clone(), keys.clone())?;
        mean.iter_mut().zip(one.data()).for_each(|(sum, &w)| *sum += w / of.heads() as f32);
    }
    Ok(mean)
}

/// A document with the weights of sentences and words; `None` if the recording is not of a document. Word pieces are
/// merged.
///
/// # Errors
/// If weights cannot be computed.
pub fn document(recording: &Recording) -> Result<Option<Reading>> {
    let Some(Form::Document { words, sentences, lengths }) = &recording.form else { return Ok(None) };
    let shares = weights(recording, *sentences, None, 0..1, 0..lengths.len())?;
    let (sentence_tokens, tokens) = (&recording.keys(*sentences).tokens, &recording.keys(*words).tokens);
    let (mut read, mut from) = (Vec::with_capacity(lengths.len()), 0);
    for (at, &length) in lengths.iter().enumerate() {
        let within = weights(recording, *words, None, at..at + 1, from..from + length)?;
        let (mut words, mut last): (Vec<ReadWord>, Option<usize>) = (Vec::new(), None);
        for (token, weight) in tokens[from..from + length].iter().zip(within) {
            match words.last_mut() {
                Some(word) if token.word.is_some() && last == token.word => {
                    word.text += &token.text;
                    word.weight += weight;
                }
                _ => words.push(ReadWord { text: token.text.clone(), weight }),
            }
            last = token.word;
        }
        read.push(ReadSentence { text: sentence_tokens[at].text.clone(), weight: shares[at], words });
        from += length;
    }
    Ok(Some(Reading { probabilities: Vec::new(), sentences: read, left_out: 0 }))
}

/// The weights of the patches of an image for the class token, normalized to sum to 1: by rollout through all layers,
/// or the attention in one layer, of one head or as the mean of all. `None` if the recording is not of an image.
///
/// # Errors
/// If there is no such head.
pub fn patches(recording: &Recording, layer: Option<usize>, head: Option<usize>) -> Result<Option<Vec<f32>>> {
    let Some(Form::Image { grid: [down, across], .. }) = &recording.form else { return Ok(None) };
    let mut shares = match layer {
        Some(layer) => weights(recording, layer, head, 0..1, 1..down * across + 1)?,
        None => {
            let layers: Vec<usize> = (0..recording.layers.len()).collect();
            rollout(recording, &layers, 0..1)?.into_data().split_off(1)
        }
    };
    let total: f32 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= total.max(f32::MIN_POSITIVE));
    Ok(Some(shares))
}
