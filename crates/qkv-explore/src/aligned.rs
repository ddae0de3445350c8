//! Turns the alignment of a translation model into weights between words.

use crate::capture;
use crate::layer::{Layer, WeightSource};
use crate::recording::Recording;
use crate::words::{Matrix, MatrixOptions};
use qkv::Tensor;
use qkv_models::text::tokenizer::Tokenizer;
use qkv_models::{Alignment, Result};

impl Matrix {
    /// The alignment between words: word pieces are merged, special tokens left out.
    ///
    /// # Errors
    /// If the weights do not have the shape of the tokens.
    pub fn aligned(alignment: &Alignment, tokenizer: &Tokenizer) -> Result<Matrix> {
        let Alignment { source, target, weights } = alignment;
        let weights = Tensor::new(weights.concat(), [1, target.len(), source.len()])?;
        let layer = Layer {
            name: String::new(),
            group: String::new(),
            queries: 1,
            keys: 0,
            weights: WeightSource::Stored(weights),
            importance: None,
        };
        let sides = [("source", source), ("written", target)];
        let recording = Recording {
            text: String::new(),
            output: None,
            sides: sides.map(|(name, ids)| capture::side(name, ids, tokenizer)).into(),
            layers: vec![layer],
            steps: Vec::new(),
            form: None,
        };
        Matrix::of(&recording, 0, &MatrixOptions { words: true, text_only: true, ..MatrixOptions::default() })
    }
}
